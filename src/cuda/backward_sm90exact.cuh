/* What a warpgroup of the fp32 backward of short sequences (backward_sm90exact.cu) does with 64 queries and 64 keys: which tiles
 * are of tiny numbers, queries on their way, from scores to weights and their gradients, results on their way out. */
#ifndef HEED_CUDA_BACKWARD_SM90EXACT_CUH
#define HEED_CUDA_BACKWARD_SM90EXACT_CUH

#include "exact_sm90.cuh"

enum { OWN_X = 1, OWN_Y = 2, MET_X = 4, MET_Y = 8 }; /* kinds of tiles. X: K or Q, Y: V or dO */

/* ---- Tiny numbers ------------------------------------------------------------------------------------------------ */

/* The kinds of tiles that the warps from `first` on have found tiny, which are to be multiplied by 1 / TINY; all of them are asked.
 * large: of this thread's kinds those that are not. sync: waits for these warps. */
template <int WARPS, int ALL, class Sync>
__device__ inline uint32_t tiny_kinds(uint32_t (&seen)[ALL], uint32_t kinds, uint32_t large, int first, Sync sync)
{
    large = __reduce_or_sync(~0u, large);
    if (threadIdx.x % 32 == 0)
        seen[threadIdx.x / 32] = large;
    sync();
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++)
        kinds &= ~seen[first + warp];
    return kinds;
}

template <int N, int WIDTH> __device__ inline uint32_t kind_if_large(const exact_rows<N, WIDTH> &x, uint32_t kind)
{
    return is_tiny(x.bits()) ? 0 : kind;
}

template <int N, int WIDTH>
__device__ inline void put(exact_rows<N, WIDTH> &x, exact_tile &to, int t, int threads, bool is_tiny)
{
    if (is_tiny)
        x.multiply(1 / TINY);
    x.put(to, t, threads);
}

/* The unit of products of these kinds, of which some are tiny. */
__device__ inline float unit_of(uint32_t tiny, uint32_t kinds)
{
    float unit = 1.0f;
#pragma unroll
    for (uint32_t kind = 1; kind <= MET_Y; kind *= 2)
        unit *= kinds & kind && tiny & kind ? TINY : 1.0f;
    return unit;
}

/* ---- Queries on their way ---------------------------------------------------------------------------------------- */

/* 64 queries of head h from `row` on, of rows before `last`, by the threads of a warpgroup: eight for each row of a tile. */
template <bool GENERAL, int WIDTH> struct query_rows_coming {
    exact_rows<4, WIDTH> q, d_o, o;
    float lse[4], given[4]; /* delta or d_lse */

    __device__ void ask(const args &a, const span &s, int last, int h, int row, int tile)
    {
        const int thread = threadIdx.x % SHORT_THREADS, i0 = row + thread / 8;
        const auto load_facts = [&](float(&to)[4], const view &t) {
            const float *const first = (const float *)t.data + row_at(t, s.q_batch, h, s.q_row);
#pragma unroll
            for (int n = 0; n < 4; n++)
                to[n] = last ? first[min(i0 + n * 16, s.rows - 1) * t.stride[2]] : 0.0f;
        };
        q.load(query_rows<float>(a.q, s, h, last - 1, a.D), tile, row, thread);
        d_o.load(query_rows<float>(a.d_o, s, h, last - 1, a.Dv), tile, row, thread);
        if (!a.delta.data)
            o.load(query_rows<float>(a.o, s, h, last - 1, a.Dv), tile, row, thread);
        load_facts(lse, a.lse);
        if (a.delta.data || a.d_lse.data)
            load_facts(given, a.delta.data ? a.delta : a.d_lse);
    }

    /* No more are coming: they are not to be kept. */
    __device__ void forget()
    {
#pragma unroll
        for (int i = 0; i < 32; i++)
            asm volatile("" : "=f"(q.x[i / 8][i % 8]), "=f"(d_o.x[i / 8][i % 8]), "=f"(o.x[i / 8][i % 8]));
#pragma unroll
        for (int n = 0; n < 4; n++)
            asm volatile("" : "=f"(lse[n]), "=f"(given[n]));
    }

    /* What is to be known of the queries, delta so far as this tile's columns make it. unit: of dO, 1 or TINY. */
    __device__ void give_facts(float2 *of_lse, float *of_delta, const args &a, const span &s, int row, int tile,
                               float unit) const
    {
        const int thread = threadIdx.x % SHORT_THREADS;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float delta = given[n];
            if (!a.delta.data) {
                float sum[2] = {};
#pragma unroll
                for (int e = 0; e < 8; e++)
                    sum[e % 2] = fmaf(o.x[n][e], d_o.x[n][e], sum[e % 2]);
                sum[0] += sum[1];
#pragma unroll
                for (int lanes = 1; lanes < 8; lanes *= 2)
                    sum[0] += __shfl_xor_sync(~0u, sum[0], lanes);
                delta = fmaf(sum[0], unit, a.d_lse.data && !tile ? -delta : 0.0f);
            } else if (tile)
                delta = 0.0f;
            const int i = thread / 8 + n * 16;
            if (thread % 8 == 0) {
                const bool some = row + i < s.rows && has_gradient(lse[n]);
                const weight_of_row w(lse[n]);
                of_lse[i] = !some     ? make_float2(CUDART_INF_F, 0.0f)
                            : GENERAL ? make_float2(lse[n], 0.0f)
                                      : make_float2(w.log2, w.rest);
                of_delta[i] = some ? delta : 0.0f;
            }
        }
    }
};

/* ---- Scores ------------------------------------------------------------------------------------------------------ */

/* A number of rows r and r + 1, which are neighbours in a tile of keys. of: that of row 0. */
template <class Tile, class T> __device__ inline void get_two(T (&x)[2], const Tile &t, const T *of, int r)
{
    struct alignas(2 * sizeof(T)) both {
        T x[2];
    };
    if (t.row(1) == t.row(0) + 1) {
        const both y = *(const both *)(of + (t.row(r) - t.row(0)));
        x[0] = y.x[0], x[1] = y.x[1];
    } else
        x[0] = of[0], x[1] = of[t.row(1) - t.row(0)];
}

/* From S to P. lse: of the lane's first query. */
template <bool GENERAL, class Tile> __device__ inline void weigh(Tile &S, const float2 *lse, float c)
{
#pragma unroll
    for (int r = 0; r < Tile::R; r += 2) {
        float2 w[2];
        get_two(w, S, lse, r);
#pragma unroll
        for (int e = 0; e < 2 * Tile::C; e++) { /* at most 1: rounding, where S is large, could make it more */
            float &x = S.at(r + e % 2, e / 2);
            const float power = GENERAL ? (x - w[e % 2].x) * LOG2E : fmaf(x, c, -w[e % 2].x) - w[e % 2].y;
            x = exp2_fast(min_or_nan(power, 0.0f));
        }
    }
}

/* From P and dP to dS, but for the scale. delta: of the lane's first query. per_one: so many units of dP are 1,
 * which is a power of two. */
template <class Tile> __device__ inline void differentiate(Tile &P, Tile &dP, const float *delta, float per_one)
{
#pragma unroll
    for (int r = 0; r < Tile::R; r += 2) {
        float d[2];
        get_two(d, P, delta, r);
#pragma unroll
        for (int e = 0; e < 2 * Tile::C; e++) {
            const float p = P.at(r + e % 2, e / 2);
            float &x = dP.at(r + e % 2, e / 2);
            x = p == 0.0f ? 0.0f : p * fmaf(-d[e % 2], per_one, x);
        }
    }
}

/* ---- Results ----------------------------------------------------------------------------------------------------- */

/* Y += T, of so many units. Rounded before it is added, so that sums of the same terms are the same however they are shared out. */
template <int M> __device__ inline void add(float (&Y)[M], const float (&T)[M], float unit)
{
#pragma unroll
    for (int i = 0; i < M; i++)
        Y[i] = __fadd_rn(Y[i], __fmul_rn(whole_sum(T[i]), unit));
}

/* dS, with keys as rows, where the tensor core finds it with queries as rows. */
__device__ inline void put_across(exact_tile &to, const left_exact &dS)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % SHORT_THREADS / 32;
    const uint32_t at = shared_address(to) + (lane / 16 * 8 + lane % 8) * 128 +
                        ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
    for (int p = 0; p < 3; p++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            store_matrices_transposed(at + p * PART + k * 2048, dS.x[p][k][0], dS.x[p][k][1], dS.x[p][k][2],
                                      dS.x[p][k][3]);
}

template <int M>
__device__ inline void store_exact(const float (&Y)[M], float scale, const view &t, int64_t at, int64_t step, int rows,
                                   int width)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (lane / 4 + 8 * r < rows) {
            float *const y = (float *)t.data + at + (lane / 4 + 8 * r) * step + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < M / 4; n++)
                if (n * 8 + lane % 4 * 2 < width)
                    *(float2 *)(y + n * 8) = make_float2(Y[4 * n + 2 * r] * scale, Y[4 * n + 2 * r + 1] * scale);
        }
}

/* And back. */
__device__ inline void get_left(float (&Y)[32], const float4 *from)
{
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float4 y = from[n * SHORT_THREADS];
        Y[4 * n] = y.x, Y[4 * n + 1] = y.y, Y[4 * n + 2] = y.z, Y[4 * n + 3] = y.w;
    }
}
__device__ inline void add_left(float (&Y)[32], const float4 *from)
{
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float4 y = from[n * SHORT_THREADS];
        Y[4 * n] += y.x, Y[4 * n + 1] += y.y, Y[4 * n + 2] += y.z, Y[4 * n + 3] += y.w;
    }
}

#endif
