/* Joining what parts of the keys gave for a row. */
#ifndef HEED_CUDA_MERGE_CUH
#define HEED_CUDA_MERGE_CUH

#include "problem.cuh"

struct part_results {
    int count;                    /* of parts */
    const float *o, *most, *sums; /* [part][row]; sums NULL: o is divided already, and most is lse */
    int64_t rows;
    int columns; /* of o */
};

/* A warp for 32 columns of a row, each lane with column c, or a block's WARPS where there are more than 32 parts. A warp sums
 * every WARPSth 32 of them in their order, asked for at once and before it is known what they weigh: there may be few rows, and
 * nothing to do meanwhile. Which parts are summed together does not depend on how many follow that have seen nothing. */
template <int WARPS>
__device__ inline void merge_columns(const args &a, const span &s, int h, int i, const part_results &p, int64_t row,
                                     int c)
{
    __shared__ float all[WARPS][33];
    constexpr int AT_ONCE = 32;
    const int lane = threadIdx.x % 32, warp = WARPS == 1 ? 0 : threadIdx.x / 32;
    float value[AT_ONCE], most, part_sum;
    auto ask = [&](int first) {
        const float *at = p.o + (first * p.rows + row) * p.columns + min(c, p.columns - 1);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++, at += p.rows * p.columns)
            value[k] = first + k < p.count ? *at : 0.0f;
        const bool exists = first + lane < p.count;
        most = exists ? p.most[(first + lane) * p.rows + row] : -CUDART_INF_F;
        part_sum = !exists ? 0.0f : p.sums ? p.sums[(first + lane) * p.rows + row] : 1.0f;
    };
    ask(warp * AT_ONCE);
    const float sink = a.sink.data ? load(a.sink, row_at(a.sink, 0, h, 0)) : -CUDART_INF_F;
    float m = most, x = 0.0f, sum = 0.0f;
    if constexpr (WARPS > 1)
#pragma unroll 8
        for (int part = lane; part < p.count; part += 32)
            m = fmaxf(m, p.most[part * p.rows + row]);
#pragma unroll
    for (int other = 16; other; other /= 2)
        m = fmaxf(m, __shfl_xor_sync(~0u, m, other));
    const bool seen = m != -CUDART_INF_F;
    m = fmaxf(m, sink);
    for (int first = warp * AT_ONCE; seen && first < p.count;) {
        const float w = expf(most - m);
        sum += w * part_sum;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            if (k % 8 == 0 && first + k >= p.count)
                break;
            const float weight = __shfl_sync(~0u, w, k);
            x += weight == 0.0f ? 0.0f : weight * value[k];
        }
        first += WARPS * AT_ONCE;
        if constexpr (WARPS == 1)
            break;
        if (first < p.count)
            ask(first);
    }
#pragma unroll
    for (int other = 16; other; other /= 2)
        sum += __shfl_xor_sync(~0u, sum, other);
    if constexpr (WARPS > 1) {
        all[warp][lane] = x, all[warp][32] = sum;
        __syncthreads();
        if (warp)
            return;
        for (int other = 1; other < WARPS; other++)
            x += all[other][lane], sum += all[other][32];
    }
    sum += seen ? expf(sink - m) : 0.0f;
    if (c < p.columns)
        store(a.o, row_at(a.o, s.q_batch, h, s.q_row + i) + c * a.o.stride[3], seen ? x / sum : 0.0f);
    if (a.lse.data && c == 0)
        store(a.lse, row_at(a.lse, s.q_batch, h, s.q_row + i), seen ? m + logf(sum) : -CUDART_INF_F);
}

#endif
