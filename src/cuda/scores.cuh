/* From q.k to S and P: softcap, bias, ALiBi, mask, band and dropout, for a thread's share of a tile in any layout.
 *
 * A tile type T tells where its elements stand. Seen from here it is T::R queries times T::C keys, whichever of the
 * two the kernel calls rows:
 *     float &at(r, c)     the element
 *     int row(r)          the query's number in its sequence
 *     int key(c)          the key's number n among those that the sequence can see: key(0) + T::apart(c)
 *     int low(r), high(r) the keys [low, high) that the band lets the query see
 *     EXACT               whether the scores deserve full fp32 accuracy
 * Each feature is one pass over the tile behind one uniform branch, so that its loads are in flight together. */
#ifndef HEED_CUDA_SCORES_CUH
#define HEED_CUDA_SCORES_CUH

#include "problem.cuh"
#include "sm75.cuh"

/* The type of q, k and v: T, or what it is at run time. */
template <class T> __device__ inline T type_of(const args &) { return T(); }
template <> __device__ inline either type_of<either>(const args &a) { return { a.q.dtype == HEED_BF16 }; }

/* One head of one sequence. */
struct head {
    int h, hk;
    int64_t mask, bias; /* where its mask and bias begin */
    float slope;        /* ALiBi */
};

__device__ inline head head_of(const args &a, const span &s, int h)
{
    head x;
    x.h = h;
    x.hk = h / a.G;
    x.mask = row_at(a.mask, s.b, h, 0);
    x.bias = row_at(a.bias, s.b, h, 0);
    x.slope = a.alibi.data ? load(a.alibi, row_at(a.alibi, s.b, h, 0)) : 0.0f;
    return x;
}

/* One comparison for both ends and no branch: a divergent one for each element took longer than the tile's products. */
template <class T> __device__ inline void hide_outside_band(T &t)
{
#pragma unroll
    for (int r = 0; r < T::R; r++) {
        const int low = t.low(r), before = low - t.key(0);
        const unsigned visible = t.high(r) - low;
#pragma unroll
        for (int c = 0; c < T::C; c++)
            t.at(r, c) = (unsigned)(T::apart(c) - before) < visible ? t.at(r, c) : -CUDART_INF_F;
    }
}

template <class T> __device__ inline bool exists(const T &t, const span &s, int r, int c)
{
    return t.row(r) < s.rows && t.key(c) < s.keys;
}

/* Where element (query r, key 0) of a mask or bias that begins at `first` lies. The keys follow apart(c) steps later:
 * the same distance for all threads, so that it takes no registers of theirs. */
template <class T>
__device__ inline int64_t first_element(const T &t, int r, const args &a, const view &m, int64_t first)
{
    return first + t.row(r) * m.stride[2] + (a.col + t.key(0) * a.col_step) * m.stride[3];
}

/* S = factor S + bias. */
template <class T> __device__ inline void add_bias(T &t, float factor, const args &a, const span &s, const head &x)
{
    const int64_t step = a.col_step * a.bias.stride[3];
#pragma unroll
    for (int r = 0; r < T::R; r++) {
        const int64_t at = first_element(t, r, a, a.bias, x.bias);
#pragma unroll
        for (int c = 0; c < T::C; c++)
            t.at(r, c) = fmaf(t.at(r, c), factor, exists(t, s, r, c) ? load(a.bias, at + T::apart(c) * step) : 0.0f);
    }
}

template <class T> __device__ inline void apply_mask(T &t, const args &a, const span &s, const head &x)
{
    const int64_t step = a.col_step * a.mask.stride[3];
#pragma unroll
    for (int r = 0; r < T::R; r++) {
        const int64_t at = first_element(t, r, a, a.mask, x.mask);
#pragma unroll
        for (int c = 0; c < T::C; c++)
            if (exists(t, s, r, c) && !a.mask.data[at + T::apart(c) * step])
                t.at(r, c) = -CUDART_INF_F;
    }
}

/* x - |distance - steps|. */
template <class T> __device__ inline void subtract_distances(T &t, int r, float sign, float distance, float step)
{
#pragma unroll
    for (int c = 0; c < T::C; c++)
        t.at(r, c) -= sign * fabsf(distance - T::apart(c) * step);
}

/* The distance of key 0 is rounded once and those of the others follow from it: exact below 2^24. Scores from 16-bit
 * products take distances that are multiplied by the slope already, at one instruction less. */
template <class T> __device__ inline void add_alibi(T &t, const span &s, float slope)
{
    const float unit = T::EXACT ? 1.0f : slope, step = unit * (float)s.r_step;
#pragma unroll
    for (int r = 0; r < T::R; r++) {
        const float distance = unit * (float)(s.p0 + t.row(r) * s.p_step - s.r0 - t.key(0) * s.r_step);
        if (T::EXACT)
            subtract_distances(t, r, slope, distance, step);
        else if (slope >= 0.0f)
            subtract_distances(t, r, 1.0f, distance, step);
        else
            subtract_distances(t, r, -1.0f, distance, step);
    }
}

/* cap tanh(x / cap) with tanh to within 2^-22 of 1, for scores that came from 16-bit products; else to the last bit or
 * two. inverse: 1 / cap, and what else x is to be multiplied by. */
template <bool EXACT> __device__ inline float capped(float x, float inverse, float cap)
{
    return EXACT ? cap * tanhf(x * inverse)
                 : fmaf(-2.0f * cap, reciprocal_fast(exp2_fast(x * (2.0f * LOG2E * inverse)) + 1.0f), cap);
}

template <bool EXACT> __device__ inline float tangent(float x)
{
    return EXACT ? tanhf(x) : 1.0f - __fdividef(2.0f, __expf(2.0f * x) + 1.0f);
}

template <class T> __device__ inline void scale_scores(T &t, float factor)
{
#pragma unroll
    for (int r = 0; r < T::R; r++)
#pragma unroll
        for (int c = 0; c < T::C; c++)
            t.at(r, c) *= factor;
}

/* Whether scores are more than scale * q.k, or P more than their exponentials. */
__host__ __device__ inline bool has_extras(const args &a)
{
    return a.softcap > 0 || a.bias.data || a.alibi.data || a.mask.data || a.drop_below;
}

/* Hides what mask and band hide. whole: the band hides nothing in this tile. */
template <bool MASKS, class T>
__device__ inline void hide_scores(T &t, const args &a, const span &s, const head &x, bool whole)
{
    if (MASKS && a.mask.data)
        apply_mask(t, a, s, x);
    if (!whole)
        hide_outside_band(t);
}

/* S from factor * S, which is q.k with factor = scale, or the softcap's result. */
template <class T>
__device__ inline void finish_scores(T &t, float factor, const args &a, const span &s, const head &x, bool whole)
{
    if (a.bias.data)
        add_bias(t, factor, a, s, x);
    else if (factor != 1.0f)
        scale_scores(t, factor);
    if (a.alibi.data)
        add_alibi(t, s, x.slope);
    hide_scores<true>(t, a, s, x, whole);
}

/* S from q.k, in place. factor: the scale, or 1 where nothing is added to S and the caller prefers to scale later.
 * whole: the band hides nothing in this tile. */
template <class T>
__device__ inline void score(T &t, float factor, const args &a, const span &s, const head &x, bool whole)
{
    if (a.softcap > 0) {
        const float inverse = a.scale / a.softcap;
        factor = a.softcap;
#pragma unroll
        for (int r = 0; r < T::R; r++)
#pragma unroll
            for (int c = 0; c < T::C; c++)
                t.at(r, c) = capped<T::EXACT>(t.at(r, c), inverse, 1.0f);
    }
    finish_scores(t, factor, a, s, x, whole);
}

/* S / scale from q.k, in place, where there is no bias (which, divided by the scale, might not be finite) and the scale is
 * positive: what is added to q.k costs no multiplication by the scale. */
template <bool CAPS, class T>
__device__ inline void score_unscaled(T &t, const args &a, const span &s, const head &x, bool whole)
{
    if (CAPS && a.softcap > 0) {
        const float cap = a.softcap / a.scale, inverse = a.scale / a.softcap;
#pragma unroll
        for (int r = 0; r < T::R; r++)
#pragma unroll
            for (int c = 0; c < T::C; c++)
                t.at(r, c) = capped<T::EXACT>(t.at(r, c), inverse, cap);
    }
    if (a.alibi.data)
        add_alibi(t, s, x.slope / a.scale);
    hide_scores<true>(t, a, s, x, whole);
}

/* The same as score(), and dS/d(q.k): scale, times the softcap's slope where there is one. */
template <class T>
__device__ inline void score_with_slope(T &t, float (&slope)[T::R][T::C], const args &a, const span &s, const head &x,
                                        bool whole)
{
    const float inverse = a.scale / a.softcap;
#pragma unroll
    for (int r = 0; r < T::R; r++)
#pragma unroll
        for (int c = 0; c < T::C; c++) {
            slope[r][c] = a.scale;
            if (a.softcap > 0) {
                const float u = capped<T::EXACT>(t.at(r, c), inverse, 1.0f);
                t.at(r, c) = u;
                slope[r][c] *= 1.0f - u * u;
            }
        }
    finish_scores(t, a.softcap > 0 ? a.softcap : a.scale, a, s, x, whole);
}

/* ---- Dropout ----------------------------------------------------------------------------------------------------- */

__device__ inline uint64_t seed_of(const args &a) { return a.seed + (a.seed_at ? *a.seed_at : 0); }

constexpr uint32_t PHILOX_M0 = 0xD2511F53u, PHILOX_M1 = 0xCD9E8D57u, PHILOX_K0 = 0x9E3779B9u, PHILOX_K1 = 0xBB67AE85u;

__device__ inline void multiply_wide(uint32_t x, uint32_t y, uint32_t &low, uint32_t &high)
{
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(x), "r"(y));
    low = (uint32_t)product, high = (uint32_t)(product >> 32);
}

/* heed_philox() of internal.h, for eight key positions of one row at once, from round FIRST on. WIDE: both halves of a product
 * by one instruction, as the compiler would not do it by itself; it wants pairs of registers. */
template <int FIRST = 0, bool WIDE = false> __device__ inline uint4 philox(uint64_t seed, uint4 c)
{
    uint32_t k0 = (uint32_t)seed + FIRST * PHILOX_K0, k1 = (uint32_t)(seed >> 32) + FIRST * PHILOX_K1;
#pragma unroll
    for (int round = FIRST; round < 7; round++) {
        uint32_t low0 = PHILOX_M0 * c.x, low1 = PHILOX_M1 * c.z;
        uint32_t high0 = __umulhi(PHILOX_M0, c.x), high1 = __umulhi(PHILOX_M1, c.z);
        if (WIDE)
            multiply_wide(PHILOX_M0, c.x, low0, high0), multiply_wide(PHILOX_M1, c.z, low1, high1);
        c = make_uint4(high1 ^ c.y ^ k0, low1, high0 ^ c.w ^ k1, low0);
        k0 += PHILOX_K0;
        k1 += PHILOX_K1;
    }
    return c;
}

/* Bit n is set where number n of eight is not below the bound. */
__device__ inline uint32_t kept_of_eight(uint4 w, uint32_t drop_below)
{
    const uint32_t words[4] = { w.x, w.y, w.z, w.w }, bound = drop_below << 16;
    uint32_t kept = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        kept |= words[j] << 16 >= bound ? 1u << 2 * j : 0;
        kept |= words[j] >= bound ? 2u << 2 * j : 0;
    }
    return kept;
}

/* The numbers of a head's pairs. The first two rounds of Philox do not mix what depends on the row with what depends on the
 * keys, so a tile computes those once for each row and once for each eight keys. */
struct drop_source {
    uint64_t seed;
    uint32_t h, b;
    struct keys_part {
        uint32_t x, y, z;
    };
    struct row_part {
        uint32_t z, w;
    };
    __device__ keys_part of_keys(uint32_t eight) const
    {
        const uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32), z = __umulhi(PHILOX_M0, eight) ^ b ^ k1;
        return { __umulhi(PHILOX_M1, z) ^ PHILOX_M1 * h ^ (k0 + PHILOX_K0), PHILOX_M1 * z,
                 PHILOX_M0 * eight ^ (k1 + PHILOX_K1) };
    }
    __device__ row_part of_row(uint32_t position) const
    {
        const uint32_t x = __umulhi(PHILOX_M1, h) ^ position ^ (uint32_t)seed;
        return { __umulhi(PHILOX_M0, x), PHILOX_M0 * x };
    }
    template <bool WIDE = false> __device__ uint4 numbers(const keys_part &keys, const row_part &row) const
    {
        return philox<2, WIDE>(seed, make_uint4(keys.x, keys.y, keys.z ^ row.z, row.w));
    }
    __device__ uint32_t kept(const keys_part &keys, const row_part &row, uint32_t drop_below) const
    {
        return kept_of_eight(numbers(keys, row), drop_below);
    }
    /* One pair, by its positions. */
    __device__ bool keeps(int64_t key, uint32_t row, uint32_t drop_below) const
    {
        const uint4 x = philox(seed, make_uint4((uint32_t)(uint64_t)(key >> 3), row, h, b));
        return kept_of_eight(x, drop_below) >> (key & 7) & 1;
    }
};

/* Bit c is set where P of query r and key c is kept. The loop stays a loop: unrolled it would be a Philox a key. */
template <class T>
__device__ inline uint32_t draw(const T &t, int r, const args &a, const span &s, const head &x, uint64_t seed)
{
    static_assert(T::C <= 32, "one word for the keys of a row");
    uint32_t p = (uint32_t)(uint64_t)(s.p0 + t.row(r) * s.p_step), kept = 0;
    int64_t group = INT64_MIN;
    uint4 bits = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (int c = 0; c < T::C; c++) {
        int64_t position = s.r0 + t.key(c) * s.r_step;
        if (position >> 3 != group) {
            group = position >> 3;
            bits = philox(seed, make_uint4((uint32_t)(uint64_t)group, p, x.h, s.b));
        }
        int lane = (int)(position & 7);
        uint32_t word = lane & 4 ? (lane & 2 ? bits.w : bits.z) : (lane & 2 ? bits.y : bits.x);
        if ((word >> (16 * (lane & 1)) & 0xFFFFu) >= a.drop_below)
            kept |= 1u << c;
    }
    return kept;
}

/* Drops P, and multiplies what is kept by `scale`. */
template <class T> __device__ inline void drop_and_scale(T &t, float scale, const args &a, const span &s, const head &x)
{
    const uint64_t seed = seed_of(a);
#pragma unroll
    for (int r = 0; r < T::R; r++) {
        const uint32_t kept = draw(t, r, a, s, x, seed);
#pragma unroll
        for (int c = 0; c < T::C; c++)
            t.at(r, c) = kept >> c & 1 ? t.at(r, c) * scale : 0.0f;
    }
}

#endif
