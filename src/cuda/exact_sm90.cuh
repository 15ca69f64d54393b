/* fp32 for the kernels of short_sm90.cuh. A number is three of bf16, x = x0 + x1 + x2 to the last bit or two, which have its
 * range, so that no scale has to be found first; of the nine products of two numbers six are made,
 *
 *     a b = (a2 b0 + a0 b2 + a1 b1) + (a1 b0 + a0 b1) + a0 b0          small ones first, all sums in fp32
 *
 * and what is left out is below 2^-25 of a b. Tiles are 64 x 64, and lie in shared memory as three boxes, x0, x1 and x2. Rows of
 * more than 64 columns take two tiles side by side; those of more than 128 are several blocks', a cluster, which add up what their
 * columns make of a score. Where it saves a quarter of the columns, tiles have 48 of them. */
#ifndef HEED_CUDA_EXACT_SM90_CUH
#define HEED_CUDA_EXACT_SM90_CUH

#include "short_sm90.cuh"

constexpr int PART = 64 * 128; /* bytes of one part of a tile */
typedef char exact_tile[3][PART];
typedef __nv_bfloat16 bf16;

/* Columns of a tile, where rows take two or four. */
inline int columns_of_tile(const args &a)
{
    const int width = HEED_MAX(a.D, a.Dv);
    return width <= 96 || (width > 128 && width <= 192) ? 48 : 64;
}

/* Numbers below 2^-63, whose parts may not be normal numbers: their exponents lack the two highest bits, and so does what is
 * found by joining the bits of many. They are multiplied by 2^60 where all of a tile are such. */
constexpr float TINY = 0x1p-60f;
__device__ inline bool is_tiny(uint32_t bits) { return (bits & 0x60000000u) == 0; }

/* ---- Operands ---------------------------------------------------------------------------------------------------- */

/* Two neighbours as three pairs. */
__device__ inline void split_exact(float x, float y, uint32_t &high, uint32_t &middle, uint32_t &low)
{
    high = pack<bf16>(x, y);
    x -= __uint_as_float(high << 16), y -= __uint_as_float(high & 0xFFFF0000u);
    middle = pack<bf16>(x, y);
    x -= __uint_as_float(middle << 16), y -= __uint_as_float(middle & 0xFFFF0000u);
    low = pack<bf16>(x, y);
}

/* Rows of fp32 on their way into a tile of so many columns: of N rows of a thread eight columns each. Thread t of `threads` has
 * columns 8 (t % 8) .. of rows t / 8 + n threads / 8. */
template <int N, int WIDTH = 64> struct exact_rows {
    float x[N][8];

    /* Columns WIDTH `tile` .. of the rows. Rows and columns that there are not become zeros. */
    __device__ void load(const source &s, int tile, int row, int t, int threads = SHORT_THREADS)
    {
        const int column = tile * (WIDTH * 4) + t % 8 * 32;
        const int last = t % 8 * 8 < WIDTH ? s.last : -1;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int i = row + t / 8 + n * (threads / 8);
                uint4 y = make_uint4(0, 0, 0, 0);
                if (i <= last && column + half * 16 <= s.end)
                    y = load_16(row_from(s.first + column + half * 16, i, s.step));
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[n][half * 4 + e] = __uint_as_float(word(y, e));
            }
    }

    /* The bits that some of them have: see is_tiny(). */
    __device__ uint32_t bits() const
    {
        uint32_t some = 0;
#pragma unroll
        for (int i = 0; i < N * 8; i++)
            some |= __float_as_uint(x[i / 8][i % 8]);
        return some;
    }
    __device__ void multiply(float factor)
    {
#pragma unroll
        for (int i = 0; i < N * 8; i++)
            x[i / 8][i % 8] *= factor;
    }

    __device__ void put(exact_tile &to, int t, int threads = SHORT_THREADS) const
    {
        char *const at = to[0] + t / 8 * 128 + (t % 8 ^ t / 8 % 8) * 16;
#pragma unroll
        for (int n = 0; n < N; n++) {
            if ((N * threads > 512 && t / 8 + n * (threads / 8) >= 64) || t % 8 * 8 >= WIDTH)
                break;
            uint32_t y[3][4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                split_exact(x[n][2 * e], x[n][2 * e + 1], y[0][e], y[1][e], y[2][e]);
#pragma unroll
            for (int p = 0; p < 3; p++)
                *(uint4 *)(at + p * PART + n * (threads / 8) * 128) = make_uint4(y[p][0], y[p][1], y[p][2], y[p][3]);
        }
    }
};

/* A result as the left operand of the next product. */
struct left_exact {
    uint32_t x[3][4][4];
    __device__ explicit left_exact(const float (&P)[32])
    {
#pragma unroll
        for (int i = 0; i < 16; i++)
            split_exact(P[2 * i], P[2 * i + 1], x[0][i / 4][i % 4], x[1][i / 4][i % 4], x[2][i / 4][i % 4]);
    }
};

/* ---- Products ---------------------------------------------------------------------------------------------------- */

/* Which part of the left and of the right operand a product takes: two bits each. */
constexpr int PRODUCTS = 6, LEFT_PARTS = 0x52, RIGHT_PARTS = 0x118;
__device__ inline int part_of(int parts, int product) { return parts >> 2 * product & 3; }

/* X = A B^T as so many committed groups: PRODUCTS. FLIP: as if it were B A^T, to the last bit. COPIES of the code of a product: one
 * is quicker where it is met but once. */
template <bool FLIP, int COPIES, int WIDTH = 64>
__device__ inline void multiply_exact(float (&X)[32], const exact_tile &A, const exact_tile &B)
{
    const uint64_t a = tile_at(shared_address(A)), b = tile_at(shared_address(B));
#pragma unroll(COPIES)
    for (int product = 0; product < PRODUCTS; product++) {
        const uint64_t left = on(a, part_of(FLIP ? RIGHT_PARTS : LEFT_PARTS, product) * PART),
                       right = on(b, part_of(FLIP ? LEFT_PARTS : RIGHT_PARTS, product) * PART);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < WIDTH / 16; k++)
            wgmma<bf16, 64>::shared<0, 0>(X, on(left, k * 32), on(right, k * 32), product + k);
        wgmma_commit();
    }
}

/* X = P B, where the rows of B are the columns of P, as one group. The last rows of B first: where weights are largest in the first
 * ones, as those of a causal key are, each step would cut off a sum that is large already. */
template <int M> __device__ inline void multiply_exact(float (&X)[M], const left_exact &P, const exact_tile &B)
{
    const uint64_t b = tile_at(shared_address(B), PART);
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < PRODUCTS; product++)
#pragma unroll
        for (int k = 3; k >= 0; k--)
            wgmma<bf16, 2 * M>::template registers<1>(X, P.x[part_of(LEFT_PARTS, product)][k],
                                                      on(b, part_of(RIGHT_PARTS, product) * PART + k * 2048),
                                                      product || k < 3);
    wgmma_commit();
}

/* The same with P in shared memory. */
template <int M> __device__ inline void multiply_exact_shared(float (&X)[M], const exact_tile &P, const exact_tile &B)
{
    const uint64_t a = tile_at(shared_address(P)), b = tile_at(shared_address(B), PART);
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < PRODUCTS; product++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma<bf16, 2 * M>::template shared<0, 1>(X, on(a, part_of(LEFT_PARTS, product) * PART + k * 32),
                                                      on(b, part_of(RIGHT_PARTS, product) * PART + k * 2048),
                                                      product + k);
    wgmma_commit();
}

/* Gives back half of what the tensor core cuts off a sum of four steps on average. */
__device__ inline float whole_sum(float x) { return fmaf(x, 0x1p-24f * 0.9f, x); }

/* ---- Results ----------------------------------------------------------------------------------------------------- */

/* Of each thread its own: out of registers. to: of the first thread. */
__device__ inline void leave(float4 *to, const float (&Y)[32])
{
#pragma unroll
    for (int n = 0; n < 8; n++)
        to[n * SHORT_THREADS] = make_float4(Y[4 * n], Y[4 * n + 1], Y[4 * n + 2], Y[4 * n + 3]);
}

/* Four columns of a row of a result on its way out, of 64 columns of fp32. */
__device__ inline float4 &way_out(void *x, int row, int four) { return ((float4 *)x)[row * 16 + (four ^ row % 4 * 2)]; }

/* ---- Scores ------------------------------------------------------------------------------------------------------ */

/* S from q.k but for the band. There is no room for score_terms: mask and bias are read one by one. */
__device__ inline void score_exact(query_scores<64, true> &t, const args &a, const span &s, const head &x)
{
    score(t, a.scale, a, s, x, true);
}

/* Four queries at a time, for the sake of registers. */
__device__ inline void score_exact(key_scores<true> &t, const args &a, const span &s, const head &x)
{
#pragma unroll
    for (int from = 0; from < 16; from += 4) {
        key_scores<true, 4> four = { t.X, t.i0, t.n0, from };
        score(four, a.scale, a, s, x, true);
    }
}

#endif
