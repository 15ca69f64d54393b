/* The Hopper backward's dQ where it is computed beside dK and dV: warpgroups that have found dS of a tile of queries
 * hand it over in shared memory, one more (BY_ONE) or they themselves, by columns (BY_ALL), multiply it with K and add
 * the product to sums in memory. In which order the parts of a row of dQ arrive there is anybody's guess. */
#ifndef HEED_CUDA_BACKWARD_SM90_SUMS_CUH
#define HEED_CUDA_BACKWARD_SM90_SUMS_CUH

#include "backward_sm90.cuh"

enum { DS_FULL = 3 }; /* a named barrier, BY_ALL */

/* dS of 64 keys, transposed: rows of queries. */
template <class C>
__device__ inline void hand_over(backward_shared<C> &s, const uint32_t (&dS)[COLUMNS / 16][4], int tile, int group)
{
    const int lane = threadIdx.x % 32, query = lane / 16 * 8 + lane % 8,
              chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
    const uint32_t to = shared_address(s.dS[0]) + tile % 2 * (C::ROWS * 128) + group * COLUMNS * 128 + query * 128 +
                        ((chunk ^ query % 8) << 4);
    if (C::SUMS == BY_ONE)
        wait(shared_address(&s.ds_free[tile % 2]), tile / 2 & 1 ^ 1);
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; i++)
        store_matrices_transposed(to + i * 2048, dS[i][0], dS[i][1], dS[i][2], dS[i][3]);
    fence_async();
    if (C::SUMS == BY_ONE)
        release(&s.ds_full[tile % 2]);
}

/* D = A B over K rows of B: 64 rows of A in boxes of 64 columns, and 64 columns of B. */
template <class T, int K> __device__ inline void multiply_tiles(float (&D)[32], uint64_t A, uint64_t B)
{
#pragma unroll
    for (int k = 0; k < K / 16; k++)
        wgmma<T, 64>::template shared<0, 1>(D, on(A, k / 4 * 8192 + k % 4 * 32), on(B, k * 2048), k != 0);
}

/* 64 columns of a tile of dQ leave: each warp adds its 16 rows to memory. */
template <class C>
__device__ inline void add_part(const backward_job &p, backward_shared<C> &s, const float (&dQ)[32], int buffer,
                                int box, const piece &w, int column, int head)
{
    constexpr int PENDING = C::SUMS == BY_ONE; /* two buffers in turn, or one for each warpgroup */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float4 *const part = (float4 *)s.parts[buffer] + warp * (SUMS_WARP / 4);
    if (lane == 0)
        bulk_wait_read<PENDING>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i++)
        part[i * 32 + lane] = make_float4(dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]);
    fence_async();
    __syncwarp();
    if (lane == 0) {
        bulk_add(p.sums + sums_at(p.a, sums_boxes(C::D), w.sums + column / COLUMNS, head, box) + warp * SUMS_WARP,
                 shared_address(part), SUMS_WARP * 4);
        bulk_commit();
    }
}

/* BY_ALL, in two steps: dS of all keys is there and is multiplied; and out. */
template <class T, class C>
__device__ inline void start_columns(float (&dQ)[32], backward_shared<C> &s, int slot, int tile, int group)
{
    const uint32_t K = shared_address(s.own[0][0]) + slot * (int)sizeof(s.own[0]) + group * C::ROWS * 128;
    named_sync(DS_FULL, 256);
    wgmma_fence();
    multiply_tiles<T, C::ROWS>(dQ, tile_at(shared_address(s.dS[0]) + tile % 2 * (C::ROWS * 128)),
                               tile_at(K, C::ROWS * 128));
    wgmma_commit();
}

template <class C>
__device__ inline void add_columns(const backward_job &p, backward_shared<C> &s, const float (&dQ)[32], int slot,
                                   int column, int g, int group)
{
    const piece &w = s.work[slot];
    add_part<C>(p, s, dQ, group, group, w, column, w.head * p.a.G + g);
}

/* BY_ONE. */
template <class T, class C> __device__ inline void sum_queries(const backward_job &p, backward_shared<C> &s)
{
    const args &a = p.a;
    for (int n = 0, tile = 0, buffer = 0;; n++) {
        const int slot = n % C::SLOTS;
        const piece &w = s.work[slot];
        wait(shared_address(&s.own_full[slot]), n / C::SLOTS & 1);
        if (!uniform(w.exists))
            break;
        const uint64_t K = tile_at(shared_address(s.own[slot][0]), C::ROWS * 128);
        const int last = uniform(w.start + w.tiles * COLUMNS);
        for (int g = 0; g < a.G; g++)
#pragma unroll 1
            for (int column = uniform(w.start); column < last; column += COLUMNS, tile++) {
                const uint64_t dS = tile_at(shared_address(s.dS[0]) + tile % 2 * (C::ROWS * 128));
                wait(shared_address(&s.ds_full[tile % 2]), tile / 2 & 1);
#pragma unroll 1
                for (int from = 0; from < C::D; from += 64, buffer ^= 1) {
                    float dQ[32];
                    wgmma_fence();
                    multiply_tiles<T, C::ROWS>(dQ, dS, on(K, from / 64 * C::ROWS * 128)); /* dQ = dS K */
                    wgmma_commit();
                    wgmma_wait<0>();
                    if (from + 64 >= C::D)
                        release(&s.ds_free[tile % 2]);
                    add_part<C>(p, s, dQ, buffer, from / 64, w, column, w.head * a.G + g);
                }
            }
        release(&s.own_free[slot]);
    }
    if (threadIdx.x % 32 == 0)
        bulk_wait<0>();
}

#endif
