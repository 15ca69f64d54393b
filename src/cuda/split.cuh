/* fp32 products on tensor cores that take 16-bit operands. A number is two of fp16,
 *
 *     x 2^s = hi + lo 2^-11          a b = a_hi b_hi + (a_lo b_hi + a_hi b_lo) 2^-11, all sums in fp32
 *
 * with one s for each 64 rows of a tensor that puts their largest into [2^14, 2^15). lo carries 2^11 so that it is as
 * far from fp16's smallest numbers as hi: 22 to 24 bits of every x down to 2^-29 of the largest, and an absolute error
 * of 2^-51 of the largest below. What is left out, a_lo b_lo, is below 2^-24 of a b.
 *
 * The tensor core cuts where fp32 rounds, and always toward zero, so long sums must not stay in it: each product has
 * fresh accumulators, two of them because of the 2^-11, and what leaves them is added in fp32 (promote()).
 *
 * In the workspace a row is its hi and then its lo. A tile of ROWS rows in shared memory:
 *
 *     hi, then lo; of either D/64 panels of ROWS rows of 64 elements = 128 bytes; chunk c of 16 bytes of row r lies at
 *     place c ^ (r % 8), so that the eight rows of an 8 x 8 matrix lie in different banks */
#ifndef HEED_CUDA_SPLIT_CUH
#define HEED_CUDA_SPLIT_CUH

#include "launch.cuh"
#include "scores.cuh"
#include "sm75.cuh"

#include <math.h>

/* Where the kernels are compiled: HEED_NEEDS_forward_split says so to the planner. ptxas spills some of them on Blackwell. */
#define HEED_SPLIT_HERE (__CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 1000)

constexpr int SPLIT_ROWS = 64;
constexpr float SMALL = 0x1p-11f; /* the weight of lo */
constexpr int TOP = 14;           /* the largest of a group is in [2^TOP, 2^(TOP + 1)) */

template <int D, int ROWS> constexpr int part_bytes = ROWS *D * 2;
template <int D, int ROWS> constexpr int split_bytes = 2 * part_bytes<D, ROWS>;

template <int ROWS> __device__ inline uint32_t chunk_of(int row, int chunk)
{
    return ((chunk >> 3) * ROWS + row) * 128 + (((chunk ^ row) & 7) << 4);
}

/* From the place of chunk 0 or 1 of a row to that of chunk c, c even, or c + 1. */
template <int ROWS> __device__ inline uint32_t chunk_along(uint32_t at, int c)
{
    return (at ^ ((c & 6) << 4)) + (c >> 3) * ROWS * 128;
}

/* What is to be known of 64 split rows: their s, and whether one of them holds an infinity or a NaN. */
struct alignas(4) shift {
    short s, strange;
};

/* 2^n, and 0 below the normal numbers; n <= 127. */
__device__ inline float power(int n) { return n < -126 ? 0.0f : __int_as_float((n + 127) << 23); }

/* x 2^n for any n that a result in range can have. */
__device__ inline float times_power(float x, int n)
{
    n = max(-250, min(250, n));
    return x * power(n / 2) * power(n - n / 2);
}

/* The same of many. */
template <int N> __device__ inline void multiply_by_power(float (&x)[N], int s)
{
    if (s < -126 || s > 127) { /* 2^s is no number of fp32 */
        const float up = power(s / 2);
        s -= s / 2;
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] *= up;
    }
    const float up = power(s);
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] *= up;
}

/* The s of a group whose largest finite magnitude has these bits. Of a group of zeros it is larger than any other. */
__device__ inline int shift_of(unsigned bits)
{
    if (bits == 0)
        return 200;
    const int exponent = bits >> 23 ? (int)(bits >> 23) - 127 : -118 - __clz(bits);
    return TOP - exponent;
}

__device__ inline void split_pair(float x, float y, uint32_t &hi, uint32_t &lo)
{
    hi = pack<__half>(x, y);
    const float2 back = __half22float2(*(const __half2 *)&hi);
    lo = pack<__half>((x - back.x) * (1 / SMALL), (y - back.y) * (1 / SMALL));
}

/* Of x (1 - less), where less is so small that only lo feels it. */
__device__ inline void split_pair(float x, float y, float less, uint32_t &hi, uint32_t &lo)
{
    hi = pack<__half>(x, y);
    const float2 back = __half22float2(*(const __half2 *)&hi);
    lo = pack<__half>(fmaf(-x, less, x - back.x) * (1 / SMALL), fmaf(-y, less, y - back.y) * (1 / SMALL));
}

/* ---- Memory to tiles --------------------------------------------------------------------------------------------- */

/* Rows of a tensor that lie `step` elements apart. */
struct even_rows {
    const float *first;
    int64_t step, columns; /* from row to row, from column to column */
    int count, width;
    bool vector;
};

__device__ inline even_rows rows_from(const view &t, int64_t at, int64_t step, int count, int width)
{
    return { (const float *)t.data + at, step, t.stride[3], count, width, t.vector != 0 };
}

/* Queries i .. and keys n .. to the end of the sequence. */
__device__ inline even_rows queries_from(const args &a, const span &s, const view &t, int h, int i, int width)
{
    return rows_from(t, row_at(t, s.q_batch, h, s.q_row + i), t.stride[2], s.rows - i, width);
}

__device__ inline even_rows keys_from(const args &a, const span &s, const view &t, int h, int n, int width)
{
    return rows_from(t, row_at(t, s.k_batch, h, s.k_row + a.col + n * a.col_step), a.col_step * t.stride[2], s.keys - n,
                     width);
}

/* ROWS rows on their way from memory into a tile, in the registers of THREADS threads. */
template <int D, int ROWS, int THREADS> struct rows_in_flight {
    static constexpr int CHUNKS = D / 8, EACH = ROWS * CHUNKS / THREADS, APART = THREADS / CHUNKS;
    float x[EACH][8];

    /* Rows and columns beyond those there are become zero. */
    __device__ explicit rows_in_flight(const even_rows &rows)
    {
        const int row = threadIdx.x / CHUNKS, c = threadIdx.x % CHUNKS * 8;
        const float *from = rows.first + row * rows.step + c * rows.columns;
        const int64_t step = APART * rows.step;
#pragma unroll
        for (int n = 0; n < EACH; n++, from += step) {
            const int width = row + n * APART < rows.count ? rows.width - c : 0;
            if (rows.vector && width >= 8) {
                *(float4 *)&x[n][0] = *(const float4 *)from;
                *(float4 *)&x[n][4] = *(const float4 *)(from + 4);
            } else {
#pragma unroll
                for (int e = 0; e < 8; e++)
                    x[n][e] = e < width ? from[e * rows.columns] : 0.0f;
            }
        }
    }

    /* The largest finite magnitude of all threads' elements decides. most: shared memory for THREADS / 32 words. All
     * threads call it, and it starts with all of them in step. */
    __device__ shift find_shift(unsigned *most) const
    {
        constexpr unsigned FINITE = 1u << 24; /* magnitudes begin here, and what is not finite comes out below */
        unsigned largest = FINITE, least = ~0u;
#pragma unroll
        for (int n = 0; n < EACH; n++)
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const unsigned b = 2 * __float_as_uint(x[n][e]) + FINITE;
                largest = max(largest, b), least = min(least, b);
            }
        unsigned bits = (largest - FINITE) / 2, strange = least < FINITE;
#pragma unroll
        for (int lane = 16; lane; lane /= 2) {
            bits = max(bits, __shfl_xor_sync(~0u, bits, lane));
            strange |= __shfl_xor_sync(~0u, strange, lane);
        }
        __syncthreads();
        if (threadIdx.x % 32 == 0)
            most[threadIdx.x / 32] = bits | strange << 31;
        __syncthreads();
        bits = strange = 0;
#pragma unroll
        for (int warp = 0; warp < THREADS / 32; warp++) {
            bits = max(bits, most[warp] & 0x7FFFFFFFu);
            strange |= most[warp] >> 31;
        }
        return { (short)shift_of(bits), (short)strange };
    }

    /* Calls put(row, chunk, hi, lo) for each of this thread's chunks of 16 bytes. less: of each row, or NULL. */
    template <class Put> __device__ void split(int s, const float *less, Put put)
    {
        multiply_by_power((float(&)[8 * EACH]) x, s);
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const int row = threadIdx.x / CHUNKS + n * APART;
            uint32_t hi[4], lo[4];
#pragma unroll
            for (int e = 0; e < 8; e += 2)
                if (less)
                    split_pair(x[n][e], x[n][e + 1], less[row], hi[e / 2], lo[e / 2]);
                else
                    split_pair(x[n][e], x[n][e + 1], hi[e / 2], lo[e / 2]);
            put(row, threadIdx.x % CHUNKS, make_uint4(hi[0], hi[1], hi[2], hi[3]),
                make_uint4(lo[0], lo[1], lo[2], lo[3]));
        }
    }
};

/* ---- Rows in the workspace --------------------------------------------------------------------------------------- */

/* One tensor, split: [batch][head][row], of each row hi and then lo. The shift of 64 rows of a sequence is at the first,
 * and so is their mark, which is to become 0. */
struct split_rows {
    char *rows;
    shift *shifts;
    int *marks;
    int heads, head_rows;
};

__device__ inline int64_t split_at(const split_rows &x, int batch, int h, int row)
{
    return ((int64_t)batch * x.heads + h) * x.head_rows + row;
}

template <int D> __device__ inline char *split_row(const split_rows &x, int batch, int h, int row)
{
    return x.rows + split_at(x, batch, h, row) * (4 * D);
}

__device__ inline const shift &shift_at(const split_rows &x, int batch, int h, int row)
{
    return x.shifts[split_at(x, batch, h, row)];
}

/* What the backward has to know of a row of q: P = 2^(c S - log2 - rest) with lse log2(e) = log2 + rest. A row without
 * gradient has log2 = inf, so that its P is 0. */
struct row_facts_split {
    float log2, rest, delta, lse;
};

/* What is split before a kernel, and where it goes; what is not wanted has no rows. Of each row of d_o, for the backward:
 * facts; or L = log2 and delta, where d_o and delta are to be divided by 2^rest, so that P need not be. Where the problem
 * has no delta, it is computed from o and d_o. */
struct split_tensors {
    split_rows k, v, q, d_o;
    row_facts_split *facts;
    float *L, *delta; /* [batch][head][row] */
    int *zeros;       /* three numbers that are to become 0 */
    int *turns;       /* and so many more */
    int turn_count;
    int columns;  /* of the rows that are written; 0: as wide as tiles are */
    bool hi_only; /* lo is not wanted */
    bool gaps;    /* dK and dV of keys off the stride are to become 0 */
};

/* split.cu. On Hopper, early: it need not wait for the kernel before it. when: it does nothing where this is 0, which is
 * the rule. */
heed_status heed_cuda_split(const args &a, const split_tensors &to, bool early, const int *when, const heed_exec *x);

/* The width of the tiles. */
inline int split_width(int64_t head) { return head <= 64 ? 64 : head <= 128 ? 128 : 256; }
inline int split_width_of(const heed_problem *p) { return split_width(HEED_MAX(p->D, p->Dv)); }
inline int split_width(const args &a) { return split_width(HEED_MAX(a.D, a.Dv)); }

/* The width that the kernels of Hopper have above 128, whose rows need not be a power of two. */
inline int split_columns(const args &a) { return HEED_MAX(a.D, a.Dv) <= 192 ? 192 : 256; }

/* Gives a tensor its place at memory, and returns where it ends. */
inline char *place_rows(split_rows &x, char *memory, int64_t batches, int64_t heads, int64_t rows, int width)
{
    x.heads = (int)heads, x.head_rows = (int)rows;
    x.rows = memory;
    x.shifts = (shift *)(memory + batches * heads * rows * (4 * width));
    return (char *)x.shifts + (batches * heads * rows * (int64_t)sizeof(shift) + 15) / 16 * 16;
}

/* Which tensors of a problem are to be split. */
enum { SPLIT_KEYS = 1, SPLIT_QUERIES = 2, SPLIT_GRADIENTS = 4, SPLIT_ALL = 7 };

/* Where in the workspace the split tensors of a pass lie. Returns how much of it they take. */
inline size_t split_place(const heed_problem *p, int which, char *memory, split_tensors &to)
{
    const int width = split_width_of(p);
    const heed_attention &a = p->a;
    int64_t step = a.key_stride,
            rest = HEED_MAX(a.key_step, 1); /* from key to key on the stride: it counts positions */
    while (rest) {
        const int64_t next = step % rest;
        step = rest, rest = next;
    }
    const int64_t keys = a.offsets_k ? a.k.shape[2] : tiles_of(p->Sk, a.key_stride / step);
    char *end = memory;
    if (which & SPLIT_KEYS) {
        end = place_rows(to.k, end, a.k.shape[0], p->Hk, keys, width);
        end = place_rows(to.v, end, a.k.shape[0], p->Hk, keys, width);
    }
    if (which & SPLIT_QUERIES)
        end = place_rows(to.q, end, a.q.shape[0], p->Hq, a.q.shape[2], width);
    if (which & SPLIT_GRADIENTS) {
        end = place_rows(to.d_o, end, a.q.shape[0], p->Hq, a.q.shape[2], width);
        to.facts = (row_facts_split *)end;
        end += a.q.shape[0] * a.q.shape[1] * a.q.shape[2] * (int64_t)sizeof(row_facts_split);
    }
    return (size_t)(end - memory);
}

/* What a split cuts off a score is at most scale D 2^(30 - shifts) 2^-50; below 2^-24 it cannot be seen. */
inline int split_exact_below(const args &a)
{
    return 4 + (a.scale == 0.0f ? -500 : ilogbf(fabsf(a.scale) * (float)a.D) + 1);
}

/* COUNT rows that begin at `from` to a tile in shared memory, asynchronously; those from `rows` on become zero. */
template <int D, int COUNT, int THREADS> __device__ inline void copy_split(uint32_t to, const char *from, int rows)
{
    const int row = threadIdx.x / 8 % COUNT, panel = threadIdx.x / (8 * COUNT);
    constexpr int PANELS = 2 * D / 64, ROWS_AT_ONCE = THREADS / 8 < COUNT ? THREADS / 8 : COUNT;
    constexpr int PANELS_AT_ONCE = THREADS / (8 * ROWS_AT_ONCE);
    from += row * (4 * D) + panel * 128 + threadIdx.x % 8 * 16;
    to += (panel * COUNT + row) * 128 + ((threadIdx.x ^ row) % 8 << 4);
#pragma unroll
    for (int r = 0; r < COUNT; r += ROWS_AT_ONCE)
#pragma unroll
        for (int p = 0; p < PANELS; p += PANELS_AT_ONCE)
            copy_async(to + (p * COUNT + r) * 128, from + r * (4 * D) + p * 128, row + r < rows ? 16 : 0);
}

/* hi hi + (lo hi + hi lo) 2^-11 from sums of STEPS instructions each. Every one of them cuts the larger sum, which has
 * grown to k / STEPS of itself, by half a unit in the last place on average, 0.36 2^-23 of it. That is given back. */
template <int STEPS> __device__ inline float join(float small, float large)
{
    return fmaf(fmaf(large, 0x1p-13f * 0.36f * (STEPS + 1), small), SMALL, large);
}

/* The same for sums that are not apart, as a factor. Of two instructions so little is cut that nothing is given back. */
template <int STEPS> constexpr float given_back = STEPS > 2 ? 1.0f + 0x1p-24f * 0.36f * (STEPS + 1) : 1.0f;

/* Of a score so many columns are summed at a time: longer sums would lose too much. */
constexpr int SCORE_COLUMNS = 128;
template <int HEAD> constexpr int score_steps = (HEAD < SCORE_COLUMNS ? HEAD : SCORE_COLUMNS) / 16;

/* And for scores, times log2(e), by all who compute them. Rounded once: what it is off by every logit is off by. */
template <int HEAD>
constexpr float exponents_back = (float)(1.4426950408889634 * (1.0 + 0x1p-24 * 0.36 * (score_steps<HEAD> + 1)));

/* ---- Rows of the forward ----------------------------------------------------------------------------------------- */

/* What is subtracted from exponents when the row's maximum is m: rounded once, so that every tile uses the same. Beyond
 * 1e7 its own rounding would matter: then scores are subtracted from each other first. */
__device__ inline float offset_of(float m, int top = TOP) { return fmaf(m, LOG2E, (float)-top); }
__device__ inline bool is_vast(float offset) { return !(fabsf(offset) <= 1e7f); }

/* Closes a row: from its l, its maximum m and offset to lse, and to what O is to be divided by. A sink joins l. */
__device__ inline float finish_row(float l, float m, float offset, float sink, float &lse)
{
    lse = -CUDART_INF_F;
    if (l == 0.0f) /* the row saw no key */
        return 0.0f;
    const float LN2 = 0.693147182f, LN2_REST = -1.90465421e-9f;
    const bool large = is_vast(offset);
    const float d = fminf(large ? (sink - m) * LOG2E + TOP : fmaf(sink, LOG2E, -offset), 127.0f);
    const float sum = l + exp2_fast(d);
    /* lse = (offset + e) ln 2 + log(sum 2^-e): offset and log(sum) may be larger than lse, and so would be their roundings. */
    const float e = (float)min((int)(__float_as_uint(sum) >> 23) - 127, 126), whole = offset + e,
                of_it = whole - offset;
    const float rest = (offset - (whole - of_it)) + (e - of_it); /* of offset + e */
    lse = d > 100.0f && sum == sum ? sink
          : large                  ? m + logf(sum * power(-TOP))
                  : fmaf(whole, LN2, fmaf(whole, LN2_REST, fmaf(rest, LN2, logf(sum * power(-(int)e)))));
    return sum;
}

/* x / y from r = 1 / y, with one rounding in place of two. */
__device__ inline float quotient(float x, float y, float r)
{
    const float z = x * r;
    return fabsf(z) < 1e30f ? fmaf(fmaf(-z, y, x), r, z) : z;
}

/* ---- What others leave ------------------------------------------------------------------------------------------- */

/* Which 64 keys and queries are wanted: not 0 at [batch][head][row] of the first of them, as the shifts are. any: whether
 * there are such. */
struct marked {
    const int *any, *keys, *queries;
};

/* forward_sm90split_marked.cu, backward_sm90split_marked.cu: the plain problem for these rows, by so many blocks. split: all
 * tensors; the forward needs them above head size 128 alone. */
heed_status heed_cuda_forward_marked(const args &a, const split_tensors &split, const marked &only, int blocks,
                                     const heed_exec *x);
heed_status heed_cuda_backward_marked(const args &a, const split_tensors &split, const marked &only, int blocks,
                                      const heed_exec *x);
/* backward_splitwide.cu: the same above head size 128. */
heed_status heed_cuda_backward_marked_wide(const args &a, const split_tensors &split, const marked &only, int blocks,
                                           const heed_exec *x);

/* ---- Registers --------------------------------------------------------------------------------------------------- */

/* Multiplies each row of X by a power of two that brings its largest close to 2^15, and returns the exponents. */
template <int MT, int NT> __device__ inline void raise_rows(float (&X)[MT][NT][4], int (&up)[2 * MT])
{
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        float(&rows)[NT][4] = X[r / 2];
        const int half = r % 2 * 2;
        float most = 0.0f;
#pragma unroll
        for (int n = 0; n < NT; n++)
            most = fmaxf(most, fmaxf(fabsf(rows[n][half]), fabsf(rows[n][half + 1])));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        up[r] = min(TOP + 127 - (int)(__float_as_uint(most) >> 23), 127);
        const float factor = power(up[r]);
#pragma unroll
        for (int n = 0; n < NT; n++)
            rows[n][half] *= factor, rows[n][half + 1] *= factor;
    }
}

/* The warp's 16 MT rows, row r at element offset where(r), which may be NOWHERE. */
template <int D, int MT, class Where>
__device__ inline void store_rows_fp32(const float (&Y)[MT][D / 8][4], const view &t, int width, bool accumulate,
                                       Where where)
{
    const int lane = threadIdx.x % 32, pair = lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < MT * 2; r++) {
        const int64_t at = where(r / 2 * 16 + r % 2 * 8 + lane / 4);
        if (at == NOWHERE)
            continue;
        float *to = (float *)t.data + at;
        if (t.vector && width == D && !accumulate) {
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                *(float2 *)(to + n * 8 + pair) = make_float2(Y[r / 2][n][r % 2 * 2], Y[r / 2][n][r % 2 * 2 + 1]);
            continue;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (n * 8 + pair + e < width) {
                    float *one = to + (n * 8 + pair + e) * t.stride[3];
                    *one = Y[r / 2][n][r % 2 * 2 + e] + (accumulate ? *one : 0.0f);
                }
    }
}

#endif
