/* The Hopper backward's dQ where it is computed beside dK and dV: the warpgroups put their dS of a tile of queries side
 * by side into shared memory; then, one tile later and in turn, one of them multiplies all of it with K and adds the
 * product to sums in memory. In which order the parts of a row of dQ arrive there is anybody's guess. */
#ifndef HEED_CUDA_BACKWARD_SM90_SUMS_CUH
#define HEED_CUDA_BACKWARD_SM90_SUMS_CUH

#include "backward_sm90.cuh"

template <class C> __device__ inline uint32_t dS_at(const backward_shared<C> &s, int tile)
{
    return shared_address(s.dS[0]) + tile % C::DS * (C::ROWS * 128);
}

/* dS of 64 keys, transposed: rows of queries. */
template <class C>
__device__ inline void hand_over(backward_shared<C> &s, const uint32_t (&dS)[COLUMNS / 16][4], int tile, int group)
{
    const int lane = threadIdx.x % 32, query = lane / 16 * 8 + lane % 8,
              chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
    const uint32_t to = dS_at(s, tile) + group * COLUMNS * 128 + query * 128 + ((chunk ^ query % 8) << 4);
    wait(shared_address(&s.ds_free[tile % C::DS]), tile / C::DS & 1 ^ 1);
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; i++)
        store_matrices_transposed(to + i * 2048, dS[i][0], dS[i][1], dS[i][2], dS[i][3]);
    fence_async();
    release(&s.ds_full[tile % C::DS]);
}

/* dQ = dS K of a tile, added to the sums at `place`: tiles and heads counted together. Waits for all products. */
template <class T, class C>
__device__ inline void sum_queries(const backward_job &p, backward_shared<C> &s, int slot, int tile, int place)
{
    const uint64_t dS = tile_at(dS_at(s, tile)), K = tile_at(shared_address(s.own[slot][0]), C::ROWS * 128);
    float dQ[C::D / 2];
    wait(shared_address(&s.ds_full[tile % C::DS]), tile / C::DS & 1);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::ROWS / 16; k++)
        wgmma<T, C::D>::template shared<0, 1>(dQ, on(dS, k / 4 * 8192 + k % 4 * 32), on(K, k * 2048), k != 0);
    wgmma_commit();
    wgmma_wait<0>();
    release(&s.ds_free[tile % C::DS]);
    float *const to = p.sums + (int64_t)place * (sums_boxes(C::D) * SUMS_BOX) + threadIdx.x / 32 % 4 * SUMS_WARP +
                      threadIdx.x % 32 * 4;
#pragma unroll
    for (int i = 0; i < C::D / 8; i++)
        add4(to + i / 8 * SUMS_BOX + i % 8 * 128, dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]);
}

#endif
