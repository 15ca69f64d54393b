/* Products of tiles that have two numbers for each (split.cuh), by mma.sync. */
#ifndef HEED_CUDA_TILE_SPLIT_CUH
#define HEED_CUDA_TILE_SPLIT_CUH

#include "split.cuh"

/* X = A B^T: rows a_row .. + 16 MT of tile A times rows b_row .. + 8 NT of tile B. */
template <int D, int A_ROWS, int B_ROWS, int MT, int NT>
__device__ inline void multiply_split_rows(float (&X)[MT][NT][4], uint32_t A, int a_row, uint32_t B, int b_row)
{
    constexpr int GROUP = NT % 4 == 0 && D == 64 ? 4 : 2; /* as many as there are registers for */
    constexpr int PARTS = D > SCORE_COLUMNS ? 2 : 1;
    const int lane = threadIdx.x % 32;
    const uint32_t a_first = A + chunk_of<A_ROWS>(a_row + lane % 16, lane / 16);
    const uint32_t b_first = B + chunk_of<B_ROWS>(b_row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int n0 = 0; n0 < NT; n0 += GROUP) {
        float small[MT][GROUP][4], other[MT][GROUP][4]; /* other: of the second part */
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < GROUP; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        small[m][n][e] = (part ? other[m][n] : X[m][n0 + n])[e] = 0.0f;
#pragma unroll(D > 128 ? 2 : D / 16)
            for (int k = part * (D / 16 / PARTS); k < (part + 1) * (D / 16 / PARTS); k++) {
                uint32_t hi[MT][4], lo[MT][4];
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    load_matrices(hi[m], chunk_along<A_ROWS>(a_first, k * 2) + m * 16 * 128);
                    load_matrices(lo[m], chunk_along<A_ROWS>(a_first, k * 2) + m * 16 * 128 + part_bytes<D, A_ROWS>);
                }
                uint32_t b[GROUP / 2][4], b_lo[GROUP / 2][4];
#pragma unroll
                for (int n = 0; n < GROUP; n += 2) {
                    const uint32_t at = chunk_along<B_ROWS>(b_first, k * 2) + (n0 + n) * 8 * 128;
                    load_matrices(b[n / 2], at);
                    load_matrices(b_lo[n / 2], at + part_bytes<D, B_ROWS>);
                }
#pragma unroll
                for (int which = 0; which < 3; which++) /* far from each other those that add to the same sum */
#pragma unroll
                    for (int n = 0; n < GROUP; n++)
#pragma unroll
                        for (int m = 0; m < MT; m++) {
                            const uint32_t(&right)[4] = which == 2 ? b_lo[n / 2] : b[n / 2];
                            multiply(which != 1 ? small[m][n]
                                     : part     ? other[m][n]
                                                : X[m][n0 + n],
                                     which == 0 ? lo[m] : hi[m], right[n % 2 * 2], right[n % 2 * 2 + 1], __half());
                        }
            }
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < GROUP; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float &x = X[m][n0 + n][e];
                        x = part ? x + join<D / 16 / PARTS>(small[m][n][e], other[m][n][e])
                                 : join<D / 16 / PARTS>(small[m][n][e], x);
                    }
        }
    }
}

/* The same by the sums of multiply_scores() in split_sm90.cuh, to be multiplied by exponents_back<D>: a score that is
 * computed again must be what it was elsewhere, for what it is off by cancels in P = exp(S - lse). */
template <int D, int A_ROWS, int B_ROWS, int MT, int NT>
__device__ inline void multiply_split_again(float (&X)[MT][NT][4], uint32_t A, int a_row, uint32_t B, int b_row)
{
    const int lane = threadIdx.x % 32;
    const uint32_t a_first = A + chunk_of<A_ROWS>(a_row + lane % 16, lane / 16);
    const uint32_t b_first = B + chunk_of<B_ROWS>(b_row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    constexpr int STEPS = D / 16, LAST = score_steps<D>; /* from LAST on hi hi is summed by itself */
    float before[MT][NT][4];
#pragma unroll
    for (int which = 0; which < 4; which++) { /* lo hi, hi lo, and hi hi on what is left of these; the rest of hi hi */
        if (which == 3 && LAST == STEPS)
            break;
#pragma unroll
        for (int i = 0; i < MT * NT * 4; i++) {
            float &x = X[i / 4 / NT][i / 4 % NT][i % 4];
            if (which == 3)
                before[i / 4 / NT][i / 4 % NT][i % 4] = x;
            x = which == 2 ? x * SMALL : which == 1 ? x : 0.0f;
        }
#pragma unroll(D > 128 ? 1 : D / 16)
        for (int k = which == 3 ? LAST : 0; k < (which == 2 ? LAST : STEPS); k++) {
            uint32_t a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++)
                load_matrices(a[m], chunk_along<A_ROWS>(a_first, k * 2) + m * 16 * 128 +
                                        (which == 0 ? part_bytes<D, A_ROWS> : 0));
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                uint32_t b[4];
                load_matrices(b, chunk_along<B_ROWS>(b_first, k * 2) + n * 8 * 128 +
                                     (which == 1 ? part_bytes<D, B_ROWS> : 0));
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    multiply(X[m][n], a[m], b[0], b[1], __half());
                    multiply(X[m][n + 1], a[m], b[2], b[3], __half());
                }
            }
        }
    }
    if (LAST < STEPS)
#pragma unroll
        for (int i = 0; i < MT * NT * 4; i++)
            X[i / 4 / NT][i / 4 % NT][i % 4] += before[i / 4 / NT][i / 4 % NT][i % 4];
}

/* A tile of results as the left operand of the next product, 16 columns at a time, without leaving its lanes. */
template <int MT, int KT> struct split_operand {
    uint32_t hi[MT][KT][4], lo[MT][KT][4];
    __device__ explicit split_operand(const float (&X)[MT][2 * KT][4])
    {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int k = 0; k < KT; k++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    split_pair(X[m][2 * k + e / 2][e % 2 * 2], X[m][2 * k + e / 2][e % 2 * 2 + 1], hi[m][k][e],
                               lo[m][k][e]);
    }
};

/* Y = Y before + P B now, of each row: B is the rows b_row .. + 16 KT of a tile, D wide, and Y has its first 8 WT columns. Every
 * 16 rows lie `apart` bytes from those before. */
template <int D, int B_ROWS, int WT, int MT, int KT>
__device__ inline void multiply_split_tile(float (&Y)[MT][WT][4], const float (&before)[2 * MT],
                                           const float (&now)[2 * MT], const split_operand<MT, KT> &P, uint32_t B,
                                           int b_row, int apart = 16 * 128)
{
    const int lane = threadIdx.x % 32;
    const uint32_t b_first = B + chunk_of<B_ROWS>(b_row + lane % 16, lane / 16);
    constexpr int GROUP = MT == 1 && D == 64 ? 4 : 2;
#pragma unroll
    for (int n0 = 0; n0 < WT; n0 += GROUP) {
        float small[MT][GROUP][4], large[MT][GROUP][4];
        if (D > 64 && n0 % (D > 128 ? 2 : 8) == 0)
            __syncwarp(); /* or ptxas has so many of these in flight that it runs out of registers */
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < GROUP; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    small[m][n][e] = large[m][n][e] = 0.0f;
#pragma unroll
        for (int k = 0; k < KT; k++) {
            uint32_t b[GROUP / 2][4], b_lo[GROUP / 2][4];
#pragma unroll
            for (int n = 0; n < GROUP; n += 2) {
                const uint32_t at = chunk_along<B_ROWS>(b_first, n0 + n) + k * apart;
                load_matrices_transposed(b[n / 2], at);
                load_matrices_transposed(b_lo[n / 2], at + part_bytes<D, B_ROWS>);
            }
#pragma unroll
            for (int which = 0; which < 3; which++)
#pragma unroll
                for (int n = 0; n < GROUP; n++)
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        const uint32_t(&right)[4] = which == 2 ? b_lo[n / 2] : b[n / 2];
                        multiply(which == 1 ? large[m][n] : small[m][n], which == 0 ? P.lo[m][k] : P.hi[m][k],
                                 right[n % 2 * 2], right[n % 2 * 2 + 1], __half());
                    }
        }
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < GROUP; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float sum = join<KT>(small[m][n][e], large[m][n][e]);
                    Y[m][n0 + n][e] = fmaf(sum, now[2 * m + e / 2], Y[m][n0 + n][e] * before[2 * m + e / 2]);
                }
    }
}

/* The sums of multiply_split_rows() times 2^-s, without tensor cores, for operands that two numbers of fp16 cannot hold:
 * infinities, and groups so uneven that what is cut off could be seen in a score. Slow, and seldom: a loop over the scores, or
 * UNROLLED of them at a time where ptxas, in the rest of the kernel, runs out of registers by it. */
template <int UNROLLED = 1, class Tile>
__device__ inline void multiply_exactly(Tile &t, const args &a, const span &s, const head &x, int q_shift, int k_shift)
{
#pragma unroll
    for (int n = 0; n < Tile::R * Tile::C; n++)
        t.at(n / Tile::C, n % Tile::C) = 0.0f;
#pragma unroll(UNROLLED)
    for (int i = 0; i < Tile::R * Tile::C; i++) {
        const int row = t.row(i / Tile::C), key = t.key(i % Tile::C);
        const bool real = row < s.rows && key < s.keys;
        const float *q = (const float *)a.q.data + row_at(a.q, s.q_batch, x.h, s.q_row + row);
        const float *k = (const float *)a.k.data + row_at(a.k, s.k_batch, x.hk, s.k_row + a.col + key * a.col_step);
        float sum = 0.0f, some = 0.0f; /* 16 terms at a time, so that roundings are those of smaller sums */
#pragma unroll 1
        for (int d = 0; real && d < a.D; d++) {
            some = fmaf(times_power(q[d * a.q.stride[3]], q_shift), times_power(k[d * a.k.stride[3]], k_shift),
                        d % 16 ? some : 0.0f);
            sum += d % 16 == 15 || d == a.D - 1 ? some : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < Tile::R * Tile::C; n++) /* registers have no index: this is what the loop costs */
            t.at(n / Tile::C, n % Tile::C) = n == i ? sum : t.at(n / Tile::C, n % Tile::C);
    }
}

#endif
