/* The Hopper backward's dQ where it is computed beside dK and dV: the warpgroups put their dS of a tile of queries side
 * by side into shared memory. All of it is multiplied with K, by a warpgroup that does nothing else or, where registers
 * do not allow for one, by each of them in turn, one tile later; the product is added to sums in memory when it is the
 * turn of these keys, or goes out with them: keep_turns() in backward_sm90_feed.cuh. */
#ifndef HEED_CUDA_BACKWARD_SM90_SUMS_CUH
#define HEED_CUDA_BACKWARD_SM90_SUMS_CUH

#include "backward_sm90.cuh"

template <class C> __device__ inline uint32_t dS_at(const backward_job &p, const backward_shared<C> &s, int tile)
{
    return shared_address(s.dS[0]) + dS_slot<C>(p, tile) * (C::ROWS * 128);
}

/* dS of 64 keys, transposed: rows of queries. It is there for others once it is announced, which takes a while: where
 * nobody waits for it at once, the tensor core should have something to do. */
template <class C>
__device__ inline void hand_over(const backward_job &p, backward_shared<C> &s, const uint32_t (&dS)[COLUMNS / 16][4],
                                 int tile, int group)
{
    const int lane = threadIdx.x % 32, query = lane / 16 * 8 + lane % 8,
              chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
    const uint32_t to = dS_at(p, s, tile) + group * COLUMNS * 128 + query * 128 + ((chunk ^ query % 8) << 4);
    wait(shared_address(&s.ds_free[dS_slot<C>(p, tile)]), dS_parity<C>(p, tile) ^ 1);
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; i++)
        store_matrices_transposed(to + i * 2048, dS[i][0], dS[i][1], dS[i][2], dS[i][3]);
}

template <class C> __device__ inline void announce(const backward_job &p, backward_shared<C> &s, int tile)
{
    fence_async();
    release(&s.ds_full[dS_slot<C>(p, tile)]);
}

/* N columns of a strip of 16 rows go out: those of the sums, which are there if reads, join them first. */
template <class T, class C, int N, int FIRST>
__device__ inline void see_out(float (&dQ)[N / 2], float scale, float4 *sums, int width, uint32_t strip, bool reads)
{
    const int lane = threadIdx.x % 32, row = lane % 16;
    if (reads)
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            if (FIRST + 8 * i >= width)
                continue;
            const float4 x = sums[i * 32];
            dQ[4 * i] += x.x, dQ[4 * i + 1] += x.y, dQ[4 * i + 2] += x.z, dQ[4 * i + 3] += x.w;
        }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
        const float *y = &dQ[8 * k];
        store_matrices(strip + (FIRST / 16 + k) / 4 * 2048 + row * 128 + ((k % 4 * 2 + lane / 16 ^ row % 8) << 4),
                       pack<T>(y[0] * scale, y[1] * scale), pack<T>(y[2] * scale, y[3] * scale),
                       pack<T>(y[4] * scale, y[5] * scale), pack<T>(y[6] * scale, y[7] * scale));
    }
}

/* N columns of dQ = dS K of a tile, from column FIRST on, a multiple of 64, put where they wait for their turn to join the
 * sums or to go out: see keep_turns(). Waits for all products. */
template <class T, class C, int N, int FIRST, bool LEAVES>
__device__ inline void sum_columns(const backward_job &p, backward_shared<C> &s, int n, int tile, bool last,
                                   const dq_share &share)
{
    uint32_t own = shared_address(own_tile(s, n, 0));
    if (C::APART)
        asm volatile("" : "+r"(own)); /* worked out for each tile: there are few registers */
    const uint64_t dS = tile_at(dS_at(p, s, tile)), K = tile_at(own + FIRST / 64 * (C::ROWS * 128), C::ROWS * 128);
    float dQ[N / 2];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::ROWS / 16; k++)
        wgmma<T, N>::template shared<0, 1>(dQ, on(dS, k / 4 * 8192 + k % 4 * 32), on(K, k * 2048), k != 0);
    wgmma_commit();
    wgmma_wait<0>();
    if (FIRST + N == C::D) {
        release(&s.ds_free[dS_slot<C>(p, tile)]);
        if (last)
            release(&s.own_free[n % C::SLOTS]);
    }
    const int slot = stage_slot<C, LEAVES>(p, tile);
    if (FIRST == 0)
        wait(shared_address(&s.stage_free[slot]), stage_parity<C, LEAVES>(p, tile) ^ !LEAVES); /* see take_turn() */
    const int warp = threadIdx.x / 32 % 4, width = p.sums.width;
    float4 *const stage = C::LENDS ? s.stage[0] + slot * (s.lent_stage - s.stage[0]) : s.stage[slot];
    float4 *const to = stage + warp * (4 * width) + FIRST * 4 + threadIdx.x % 32;
    if (LEAVES && share.leaves(tile)) {
        see_out<T, C, N, FIRST>(dQ, p.a.scale, to, width, strip_at<C>(shared_address(stage), width, warp),
                                share.reads(tile));
        return;
    }
#pragma unroll
    for (int i = 0; i < N / 8; i++)
        if (FIRST + 8 * i < width)
            to[i * 32] = make_float4(dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]);
}

/* All columns; the owner of dQ, who has few registers, takes 64 at a time. last: K is not needed any more. */
template <class T, class C, bool LEAVES = false>
__device__ inline void sum_queries(const backward_job &p, backward_shared<C> &s, int n, int tile, bool last,
                                   const dq_share &share = {})
{
    constexpr int N = C::OWNERS && C::D > 64 ? 64 : C::D;
    wait(shared_address(&s.ds_full[dS_slot<C>(p, tile)]), dS_parity<C>(p, tile));
    sum_columns<T, C, N, 0, LEAVES>(p, s, n, tile, last, share);
    if constexpr (N < C::D)
        sum_columns<T, C, C::D - N, N, LEAVES>(p, s, n, tile, last, share);
    fence_async();
    release(&s.staged[tile % 2]);
}

/* The warpgroup that does nothing else. */
template <class T, class C, bool LEAVES>
__device__ inline void own_queries(const backward_job &p, backward_shared<C> &s)
{
    int tile = 0;
    meet_pieces<C>(s, [&](const piece &w, int n) {
        const dq_share mine = share_of<C>(p, w, tile),
                       share = { uniform(mine.stored), uniform(mine.leaving), uniform(mine.end) };
#pragma unroll 1
        for (; tile < share.end; tile++)
            sum_queries<T, C, LEAVES>(p, s, n, tile, false, share);
        release(&s.own_free[n % C::SLOTS]);
        release(&s.work_free[n % C::WORKS]);
    });
}

#endif
