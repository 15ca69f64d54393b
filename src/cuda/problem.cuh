/* What a kernel is given: heed_problem as one plain struct, passed by value, and the device's versions of the rules
 * of internal.h that say which rows and keys a sequence has and what a row may see (heed_span, heed_band,
 * heed_key_offset). Lengths, offsets and pages live in the device's memory, so here they are bounded and not checked:
 * nothing outside a tensor is ever touched, whatever they hold. */
#ifndef HEED_CUDA_PROBLEM_CUH
#define HEED_CUDA_PROBLEM_CUH

#include "backend.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

struct view {
    char *data; /* NULL: absent */
    int64_t stride[4];
    int dtype;
    int vector; /* columns are contiguous and every row starts at a multiple of 16 bytes */
};

/* One sequence of the batch, as heed_span of internal.h. */
struct span {
    int b, q_batch, k_batch;
    int q_row, rows, k_row, keys;
    int64_t p0, p_step, r0, r_step;
    int unit, low, high; /* steps are 1, and row i sees keys i + low .. i + high - 1, so far as they exist */
};

struct args {
    view q, k, v, o, lse, mask, bias, alibi, sink;
    view d_o, d_lse, delta, d_q, d_k, d_v, d_bias, d_sink;
    int B, Hq, Hk, G, Sq, Sk, D, Dv;
    int q_rows, k_rows; /* rows of q and k in memory, for each batch index */
    float scale, softcap;
    float scale_log2; /* scale * log2(e) */
    int align;
    int64_t left, right;
    int64_t col, col_step;          /* key n is number col + n * col_step of its sequence */
    int64_t p0, p_step, r0, r_step; /* positions as in heed_span; p0 only with HEED_ALIGN_POSITION */
    const int32_t *lengths_q, *lengths_k, *offsets_q, *offsets_k;
    const int32_t *block_table;
    int64_t block_table_stride;
    int page, pages;
    uint32_t drop_below;
    float keep_scale; /* 1 / (1 - p) */
    uint64_t seed;
    const uint64_t *seed_at;
    int accumulate;
    int bias_shape[4];
    int uniform; /* no lengths and no offsets: every sequence is `all`, but for its number */
    span all;
};

view heed_cuda_view(const heed_tensor &t);

/* Fails where a size is beyond what the kernels count in 32 bits. */
heed_status heed_cuda_args(const heed_problem *p, args *a);

/* Division of numbers below 2^31 by one that the host knows. */
struct divisor {
    unsigned number, factor, shift;
    __device__ int divide(int n) const { return (int)((uint64_t)(unsigned)n * factor >> shift); }
};

inline divisor divisor_of(int64_t number)
{
    divisor d = { (unsigned)HEED_MAX(number, 1), 0, 31 };
    while ((uint64_t)1 << (d.shift - 31) < d.number)
        d.shift++;
    d.factor = (unsigned)(((uint64_t)1 << d.shift) / d.number + 1);
    return d;
}

/* ---- Elements ---------------------------------------------------------------------------------------------------- */

__device__ inline float load(const view &t, int64_t at)
{
    switch (t.dtype) {
    case HEED_F16: return __half2float(((const __half *)t.data)[at]);
    case HEED_BF16: return __bfloat162float(((const __nv_bfloat16 *)t.data)[at]);
    default: return ((const float *)t.data)[at];
    }
}

__device__ inline void store(const view &t, int64_t at, float x)
{
    switch (t.dtype) {
    case HEED_F16: ((__half *)t.data)[at] = __float2half_rn(x); break;
    case HEED_BF16: ((__nv_bfloat16 *)t.data)[at] = __float2bfloat16_rn(x); break;
    default: ((float *)t.data)[at] = x;
    }
}

/* An offset that no row has. Strides may be negative, and so may offsets. */
#define NOWHERE INT64_MIN

/* Element offset of row i of head h. */
__device__ inline int64_t row_at(const view &t, int64_t b, int64_t h, int64_t i)
{
    return b * t.stride[0] + h * t.stride[1] + i * t.stride[2];
}

/* ---- Sequences --------------------------------------------------------------------------------------------------- */

__host__ __device__ inline int clamp(int64_t x, int low, int high) { return x < low ? low : x > high ? high : (int)x; }

/* Where sequence b starts and how long it is. */
__host__ __device__ inline void extent(const int32_t *lengths, const int32_t *offsets, int b, int memory_rows,
                                       int longest, int &start, int &length)
{
    start = 0, length = longest;
    if (offsets) {
        start = clamp(offsets[b], 0, memory_rows);
        length = clamp((int64_t)offsets[b + 1] - start, 0, min(longest, memory_rows - start));
    }
    if (lengths)
        length = clamp(lengths[b], 0, length);
}

/* Further than any two positions, which are within 2^61, are apart. */
#define FAR ((int64_t)1 << 62)

/* Where steps are 1 and sizes below 2^30, the band is two numbers. */
__host__ __device__ inline void place_band(const args &a, span &s)
{
    constexpr int MOST = 1 << 30;
    s.unit = s.p_step == 1 && s.r_step == 1 && a.Sq < MOST && a.Sk < MOST;
    s.low = a.left >= FAR ? -MOST : clamp(s.p0 - s.r0 - a.left, -MOST, MOST);
    s.high = a.right >= FAR ? MOST : clamp(s.p0 - s.r0 + a.right + 1, -MOST, MOST);
}

__host__ __device__ inline span span_of(const args &a, int b)
{
    span s = a.all;
    if (!a.uniform) {
        int Lk;
        extent(a.lengths_q, a.offsets_q, b, a.q_rows, a.Sq, s.q_row, s.rows);
        extent(a.lengths_k, a.offsets_k, b, a.k_rows, a.Sk, s.k_row, Lk);
        s.p0 = a.align == HEED_ALIGN_BOTTOM_RIGHT ? (int64_t)Lk - s.rows : a.p0;
        s.p_step = a.p_step, s.r0 = a.r0, s.r_step = a.r_step;
        const unsigned col = (unsigned)a.col, step = (unsigned)a.col_step; /* below 2^31: see place_keys() */
        s.keys = (unsigned)Lk > col ? (int)((Lk - col + step - 1) / step) : 0;
        place_band(a, s);
    }
    s.b = b;
    s.q_batch = a.offsets_q ? 0 : b;
    s.k_batch = a.offsets_k ? 0 : b;
    return s;
}

/* Element offset of key n in t (k or v), or NOWHERE: its page does not exist. The division by a page's size is quicker in 32
 * bits, which are enough for any key (see place_keys()), but may keep more registers. */
template <class Number = int64_t>
__device__ inline int64_t key_at(const args &a, const span &s, const view &t, int h, int n)
{
    const int64_t j = a.col + n * a.col_step;
    if (!a.page)
        return row_at(t, s.k_batch, h, s.k_row + j);
    const int page = a.block_table[s.b * a.block_table_stride + (Number)j / (Number)a.page];
    return page < 0 || page >= a.pages ? NOWHERE : row_at(t, page, h, (Number)j % (Number)a.page);
}

/* ---- The band ---------------------------------------------------------------------------------------------------- */

/* Which of the points start + x * step, 0 <= x < count, lie in [low, high]. */
__device__ inline void between(int64_t low, int64_t high, int64_t start, int64_t step, int count, int &first, int &last)
{
    int64_t from = low - start, to = high - start;
    if (step != 1) { /* up and down to multiples of step */
        from = from > 0 ? (from + step - 1) / step : 0;
        to = to >= 0 ? to / step : -1;
    }
    first = clamp(from, 0, count);
    last = max(first, clamp(to + 1, 0, count));
}

/* The keys [first, last) that the band lets row i see. */
__device__ inline void band_of_row(const args &a, const span &s, int i, int &first, int &last)
{
    if (s.unit) {
        first = min(max(i + s.low, 0), s.keys);
        last = max(first, min(i + s.high, s.keys));
        return;
    }
    int64_t p = s.p0 + i * s.p_step;
    between(a.left >= FAR ? -FAR : p - a.left, a.right >= FAR ? FAR : p + a.right, s.r0, s.r_step, s.keys, first, last);
}

/* The rows [first, last) that the band lets see key n. */
__device__ inline void band_of_key(const args &a, const span &s, int n, int &first, int &last)
{
    if (s.unit) {
        first = min(max(n - s.high + 1, 0), s.rows);
        last = max(first, min(n - s.low + 1, s.rows));
        return;
    }
    int64_t r = s.r0 + n * s.r_step;
    between(a.right >= FAR ? -FAR : r - a.right, a.left >= FAR ? FAR : r + a.left, s.p0, s.p_step, s.rows, first, last);
}

#endif
