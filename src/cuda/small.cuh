/* The vocabulary of the kernels for problems that leave the GPU idle. What counts there is how long one warp takes from its
 * start to its end, which is waiting for memory once and then some four clocks for each instruction. So all operands are
 * asked for at once, a warp waits for no other until results are merged, and lanes take 16 bytes at a time in the order in
 * which memory has them: which chunk a lane takes decides the order in which the tensor core meets the elements, and any
 * order will do that both operands share.
 *
 *     lane 4 g + t of the warp     across (depth is d): chunks 4m + t of row g       Q and K in Q K^T
 *                                  down (depth is the row): chunks 8u + g of rows 2t, 2t+1     V in P V
 *     words 0, 1 of a chunk that lies across are one step of the product, words 2, 3 the next one
 *     element e of a chunk that lies down belongs to column tile e of the result, which so has in lane 4 g + t
 *         c[0], c[1]   row g       element e of chunks 8u + 2t and 8u + 2t + 1
 *         c[2], c[3]   row g + 8   the same
 *
 * 16-bit operands have 16 elements to a step. fp32 ones are two of tf32, x = hi + lo to 23 bits, and a product is three:
 * a_lo b_hi + a_hi b_lo + a_hi b_hi, with 8 elements to a step. */
#ifndef HEED_CUDA_SMALL_CUH
#define HEED_CUDA_SMALL_CUH

#include "launch.cuh"
#include "scores.cuh"
#include "sm75.cuh"

/* ---- What there is to do ----------------------------------------------------------------------------------------- */

/* Whether lengths are in memory: then even span_of() has to wait. */
__device__ inline bool is_ragged(const args &a) { return a.lengths_q || a.lengths_k || a.offsets_q || a.offsets_k; }

/* A grid is as many blocks deep as a head takes, with heads and sequences as width and height: whichever is more in x,
 * which alone goes beyond 65535. */
inline dim3 grid_of(const args &a, int64_t blocks)
{
    return a.B >= a.Hq ? dim3(a.B, (unsigned)blocks, a.Hq) : dim3(a.Hq, (unsigned)blocks, a.B);
}
__device__ inline int own_sequence(const args &a) { return a.B >= a.Hq ? blockIdx.x : blockIdx.z; }
__device__ inline int own_head(const args &a) { return a.B >= a.Hq ? blockIdx.z : blockIdx.x; }

/* Sequence b. keys: those that a sequence has where all have the same length, for a division takes its time here. */
__device__ inline span sequence(const args &a, int b, int keys)
{
    if (is_ragged(a))
        return span_of(a, b);
    const int64_t p0 = a.align == HEED_ALIGN_BOTTOM_RIGHT ? (int64_t)a.Sk - a.Sq : a.p0;
    return { b, b, b, 0, a.Sq, 0, keys, p0, a.p_step, a.r0, a.r_step };
}

inline int keys_of(const args &a) { return a.Sk > a.col ? (int)((a.Sk - 1 - a.col) / a.col_step) + 1 : 0; }

/* ---- Memory to registers ----------------------------------------------------------------------------------------- */

/* Rows of a tensor, `step` bytes apart. Who asks for one beyond `last`, or for columns that there are not, is given the
 * nearest: what becomes of it is hidden, multiplied by zero or not stored. */
struct source {
    const char *first;
    int step, last, end; /* end: where the last chunk of a row is */
};

template <class T> __device__ inline source rows_of(const view &t, int64_t at, int64_t step, int last, int width)
{
    constexpr int SIZE = (int)sizeof(T);
    return { t.data + at * SIZE, (int)step * SIZE, last, width * SIZE - 16 };
}

/* Those of a head's queries or keys, to number `last` of the sequence. Numbers without a sign take fewer instructions. */
template <class T> __device__ inline source query_rows(const view &t, const span &s, unsigned h, int last, int width)
{
    return rows_of<T>(t, row_at(t, (unsigned)s.q_batch, h, (unsigned)s.q_row), t.stride[2], last, width);
}
template <class T>
__device__ inline source key_rows(const args &a, const view &t, const span &s, unsigned hk, int last, int width)
{
    return rows_of<T>(t, row_at(t, (unsigned)s.k_batch, hk, (unsigned)s.k_row + a.col), a.col_step * t.stride[2], last,
                      width);
}

/* 16 rows, 4 M chunks of each, across. */
template <int M> __device__ inline void load_across(uint4 (&x)[2][M], const source &s, int row)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++) {
        const char *first = s.first + min(64 * m + lane % 4 * 16, s.end);
#pragma unroll
        for (int n = 0; n < 2; n++)
            x[n][m] = load_16(row_from(first, min(row + 8 * n + lane / 4, s.last), s.step));
    }
}

/* Columns that there are not become zero: of one of two operands is enough. */
template <int M> __device__ inline void clear_columns(uint4 (&x)[2][M], const source &s)
{
    if (64 * M - 16 <= s.end)
        return;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int m = 0; m < M; m++)
            if (64 * m + (int)threadIdx.x % 4 * 16 > s.end)
                x[n][m] = make_uint4(0, 0, 0, 0);
}

/* Rows on their way through shared memory, where they take no registers: a warp's own, so that it waits for nobody else.
 * Chunk c of row r lies at place c ^ f(r) so that neither way to read has two lanes in one bank. */
template <int ROWS, int CHUNKS> struct staged {
    uint4 x[ROWS][CHUNKS];
    static __device__ int place(int row, int chunk) { return chunk ^ (row & 6) ^ (row & 1) << 2; }

    __device__ void copy(const source &s, int row)
    {
        const int r0 = threadIdx.x % 32 / CHUNKS, c = threadIdx.x % CHUNKS;
        const char *first = s.first + min(c * 16, s.end);
#pragma unroll
        for (int r = 0; r < ROWS; r += 32 / CHUNKS)
            copy_async_near(shared_address(&x[r + r0][place(r + r0, c)]),
                            row_from(first, min(row + r + r0, s.last), s.step));
    }

    /* Chunk 4m + t of row 8n + g; chunk 8u + g of row 8n + 2t + i. */
    __device__ uint4 across(int n, int m) const
    {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        return x[8 * n + g][place(g, 4 * m + t)];
    }
    __device__ const uint4 &down(int n, int i, int u) const
    {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        return x[8 * n + 2 * t + i][place(2 * t + i, 8 * u + g)];
    }
};

/* So many groups of copies may still be under way; the others' results can be seen by the whole warp. */
template <int PENDING> __device__ inline void wait_for_copies()
{
    wait_copies<PENDING>();
    __syncwarp();
}

__device__ inline uint32_t word(const uint4 &x, int w) { return w == 0 ? x.x : w == 1 ? x.y : w == 2 ? x.z : x.w; }

/* ---- fp32 as two numbers of tf32 --------------------------------------------------------------------------------- */

/* x, and what is computed of it is computed here, in every round of a loop: kept, it would take too many registers. */
__device__ inline uint32_t now(uint32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}

/* hi is x to 11 bits; the rest has 12, of which the tensor core reads 11. A NaN is in lo at least. */
__device__ inline void split_tf32(uint32_t x, uint32_t &hi, uint32_t &lo)
{
    hi = (x + 0x1000u) & 0xFFFFE000u;
    lo = __float_as_uint(__uint_as_float(x) - __uint_as_float(hi));
}

/* The tensor core cuts sums where fp32 rounds: by half a unit in the last place for each instruction that adds to what
 * has grown by then to k / STEPS of the sum. That is given back, unless most terms may be zeros: then nothing is cut. */
template <int STEPS> __device__ inline float join(float small, float large, bool all = true)
{
    return fmaf(large, all ? 0x1p-24f * 0.36f * (STEPS + 1) : 0.0f, small) + large;
}

/* Column tiles of 8 in rows of 128 U bytes. */
template <class T, int U> constexpr int column_tiles = U * 16 / (int)sizeof(T);

/* ---- Products ---------------------------------------------------------------------------------------------------- */

template <int N> __device__ inline void clear(float (&x)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[n][e] = 0.0f;
}

/* X = A B^T for 16 rows of A and 8 N of B, both across. */
template <class T, int N, int M>
__device__ inline void multiply_across(float (&X)[N][4], const uint4 (&A)[2][M], const staged<8 * N, 4 * M> &B, T)
{
    clear(X);
#pragma unroll
    for (int m = 0; m < M; m++) {
        uint4 b[N];
#pragma unroll
        for (int n = 0; n < N; n++)
            b[n] = B.across(n, m);
#pragma unroll
        for (int w = 0; w < 4; w += 2) {
            const uint32_t a[4] = { word(A[0][m], w), word(A[1][m], w), word(A[0][m], w + 1), word(A[1][m], w + 1) };
#pragma unroll
            for (int n = 0; n < N; n++)
                multiply(X[n], a, word(b[n], w), word(b[n], w + 1), T());
        }
    }
}

template <int N, int M>
__device__ inline void multiply_across(float (&X)[N][4], const uint4 (&A)[2][M], const staged<8 * N, 4 * M> &B, float)
{
    float small[2][N][4];
    clear(X), clear(small[0]), clear(small[1]);
#pragma unroll
    for (int m = 0; m < M; m++) {
        uint4 right[N];
#pragma unroll
        for (int n = 0; n < N; n++)
            right[n] = B.across(n, m);
#pragma unroll
        for (int w = 0; w < 4; w += 2) {
            uint32_t hi[4], lo[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                split_tf32(now(word(A[e % 2][m], w + e / 2)), hi[e], lo[e]);
#pragma unroll
            for (int n = 0; n < N; n++) {
                uint32_t b[2], b_lo[2];
                split_tf32(word(right[n], w), b[0], b_lo[0]);
                split_tf32(word(right[n], w + 1), b[1], b_lo[1]);
                multiply_tf32(small[0][n], lo, b[0], b[1]);
                multiply_tf32(small[1][n], hi, b_lo[0], b_lo[1]);
                multiply_tf32(X[n], hi, b[0], b[1]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            X[n][e] = join<2 * M>(small[0][n][e] + small[1][n][e], X[n][e]);
}

/* A tile of results, 16 rows and 8 N columns, as the left operand P of the next product. It stays in its lanes.
 * times(): Y = column tiles 4i .. 4i + 3 of P B, for B of 8 N rows, down. all: see join(). */
template <class T, int N> struct left_operand {
    uint32_t x[N / 2][4];
    __device__ explicit left_operand(const float (&P)[N][4])
    {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e += 2)
                x[n / 2][n % 2 * 2 + e / 2] = pack<T>(P[n][e], P[n][e + 1]);
    }

    template <int U> __device__ void times(float (&Y)[4][4], const staged<8 * N, 8 * U> &B, int i, bool = true) const
    {
        clear(Y);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint2 b[4]; /* half a chunk of rows 2t and 2t + 1, and of those 8 further down */
#pragma unroll
            for (int r = 0; r < 4; r++)
                b[r] = ((const uint2 *)&B.down(n + r / 2, r % 2, i / 2))[i % 2];
#pragma unroll
            for (int j = 0; j < 4; j++) { /* their columns in pairs */
                const int halves = j % 2 ? 0x7632 : 0x5410;
                multiply(Y[j], x[n / 2], __byte_perm(j < 2 ? b[0].x : b[0].y, j < 2 ? b[1].x : b[1].y, halves),
                         __byte_perm(j < 2 ? b[2].x : b[2].y, j < 2 ? b[3].x : b[3].y, halves), T());
            }
        }
    }
};

template <int N> struct left_operand<float, N> {
    uint32_t hi[N][4], lo[N][4];
    __device__ explicit left_operand(const float (&P)[N][4])
    {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) /* depth t is row 2t, depth t + 4 row 2t + 1 */
                split_tf32(__float_as_uint(P[n][e % 2 * 2 + e / 2]), hi[n][e], lo[n][e]);
    }

    template <int U>
    __device__ void times(float (&Y)[4][4], const staged<8 * N, 8 * U> &B, int i, bool all = true) const
    {
        float small[4][4], large[(N + 1) / 2][4][4]; /* two steps each: uniform P would show what more are cut */
        clear(small);
#pragma unroll
        for (int n = 0; n < N; n += 2)
            clear(large[n / 2]);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const uint4 upper = B.down(n, 0, i), lower = B.down(n, 1, i);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t b[2], b_lo[2];
                split_tf32(word(upper, j), b[0], b_lo[0]);
                split_tf32(word(lower, j), b[1], b_lo[1]);
                multiply_tf32(small[j], lo[n], b[0], b[1]);
                multiply_tf32(large[n / 2][j], hi[n], b[0], b[1]);
                multiply_tf32(small[j], hi[n], b_lo[0], b_lo[1]);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                Y[j][e] = large[0][j][e];
#pragma unroll
                for (int n = 2; n < N; n += 2)
                    Y[j][e] += large[n / 2][j][e];
                Y[j][e] = join<HEED_MIN(N, 2)>(small[j][e], Y[j][e], all);
            }
    }
};

/* ---- Results ----------------------------------------------------------------------------------------------------- */

/* Four column tiles, 4i .. 4i + 3, are four pieces of a lane, p = 0 .. 3, each of four neighbours in a row: row
 * g + 8 (p % 2), elements 4 (i % Q) .. of chunk 8 (i / Q) + 2t + p / 2, where Q = 1 for fp32 and 2 for 16 bits. */
template <class T> struct piece {
    static constexpr int Q = 4 / (int)sizeof(T);
    static __device__ int row(int p) { return threadIdx.x % 32 / 4 + p % 2 * 8; }
    static __device__ int column(int i, int p)
    {
        return (i / Q * 8 + threadIdx.x % 4 * 2 + p / 2) * (4 * Q) + i % Q * 4;
    }
    static __device__ float4 of(const float (&Y)[4][4], int p)
    {
        const int e = p % 2 * 2 + p / 2;
        return make_float4(Y[0][e], Y[1][e], Y[2][e], Y[3][e]);
    }
};

/* Four neighbours, to a tensor of T or fp32. accumulate: they are added to, in fp32. */
template <class T> __device__ inline void store_piece(const view &t, int64_t at, float4 x, bool accumulate)
{
    if constexpr (sizeof(T) == 2)
        if (t.dtype != HEED_F32) {
            *(uint2 *)(t.data + at * 2) = make_uint2(pack<T>(x.x, x.y), pack<T>(x.z, x.w));
            return;
        }
    float4 *to = (float4 *)((float *)t.data + at);
    const float4 y = accumulate ? *to : make_float4(0, 0, 0, 0);
    *to = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

/* Two numbers of 16 bits. */
template <class T> __device__ inline float2 unpack(uint32_t x);
template <> __device__ inline float2 unpack<__half>(uint32_t x) { return __half22float2(*(const __half2 *)&x); }
template <> __device__ inline float2 unpack<__nv_bfloat16>(uint32_t x)
{
    return __bfloat1622float2(*(const __nv_bfloat162 *)&x);
}

/* ---- Scores ------------------------------------------------------------------------------------------------------ */

/* A warp's scores as scores.cuh wants to see them: queries are rows. */
template <class T, int N> struct score_tile {
    static constexpr int R = 2, C = 2 * N;
    static constexpr bool EXACT = sizeof(T) == 4;
    float (&X)[N][4];
    int i0, n0;            /* first query and first key of this lane */
    int lows[2], highs[2]; /* of its two queries */
    __device__ float &at(int r, int c) { return X[c / 2][r * 2 + c % 2]; }
    static __device__ constexpr int apart(int c) { return c / 2 * 8 + c % 2; }
    __device__ int row(int r) const { return i0 + r * 8; }
    __device__ int key(int c) const { return n0 + apart(c); }
    __device__ int low(int r) const { return lows[r]; }
    __device__ int high(int r) const { return highs[r]; }
};

/* ---- Softmax ----------------------------------------------------------------------------------------------------- */

/* Exponents are relative to c times the largest score m, rounded once, so that all use the same number. Where its
 * rounding would matter, scores are subtracted from each other first. */
struct exponent {
    float c, m, first, then; /* 2^((x - first) c - then) */
    __device__ exponent(float factor, float most)
    {
        c = factor;
        m = most == -CUDART_INF_F ? 0.0f : most;
        then = __fmul_rn(m, c);
        const bool large = !(fabsf(then) <= 1e7f);
        first = large ? m : 0.0f, then = large ? 0.0f : then;
    }
    __device__ bool large() const { return first != 0.0f; }
    __device__ float of_most(float x) const { return exp2_fast(__fmul_rn(x - first, c) - then); }
};

/* lse log2(e) of a row in two numbers: P = 2^(c S - log2 - rest). */
struct weight_of_row {
    float log2, rest;
    __device__ explicit weight_of_row(float lse)
    {
        const float LOG2E_REST = 1.92596303e-8f;
        log2 = -min_or_nan(-min_or_nan(lse * LOG2E, 3.4e38f), 3.4e38f);
        rest = fabsf(log2) < 1e7f ? fmaf(lse, LOG2E_REST, fmaf(lse, LOG2E, -log2)) : 0.0f;
    }
};

/* Rows without gradient are given lse = inf, so that their P is 0. */
__device__ inline bool has_gradient(float lse) { return lse != -CUDART_INF_F && lse != CUDART_INF_F; }

/* A row of o from its two halves. What a sum is relative to is lost where the sink is far above: then it is all there is. */
struct merged_row {
    float weight[2], sum, top;
    exponent e;

    __device__ merged_row(float2 x, float2 y, float c, float scale, float sink) : e(c, fmaxf(x.x, y.x))
    {
        weight[0] = e.of_most(x.x), weight[1] = e.of_most(y.x);
        sum = fmaf(weight[0], x.y, weight[1] * y.y);
        top = -CUDART_INF_F;
        if (sum == 0.0f) /* the row saw no key */
            return;
        if (sink != -CUDART_INF_F) {
            top = fminf(e.large() ? (sink - e.m * scale) * LOG2E : fmaf(sink, LOG2E, -e.then), 127.0f);
            sum += exp2_fast(top);
        }
        const float inverse = __frcp_rn(sum);
        weight[0] *= inverse, weight[1] *= inverse;
    }

    __device__ float lse(float scale, float sink) const
    {
        const float LN2 = 0.693147182f, LN2_REST = -1.90465421e-9f;
        return sum == 0.0f                  ? -CUDART_INF_F
               : top > 100.0f && sum == sum ? sink
               : e.large()                  ? e.m * scale + logf(sum)
                                            : fmaf(e.then, LN2, fmaf(e.then, LN2_REST, logf(sum)));
    }
};

#endif
