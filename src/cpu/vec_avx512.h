/* The vector operations in AVX-512, and with HEED_DOT also the bf16 dot product. Documented in vec_plain.h. */
#include <immintrin.h>

typedef __m512 vec;
#define W 16
#define MR (HEED_AMX ? 32 : 14)
#define NR 2

static inline vec vec_zero(void) { return _mm512_setzero_ps(); }
static inline vec vec_set1(float x) { return _mm512_set1_ps(x); }
static inline vec vec_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vec_store(float *p, vec x) { _mm512_storeu_ps(p, x); }
static inline vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }
static inline vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec vec_min(vec a, vec b) { return _mm512_min_ps(a, b); }
static inline vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec vec_split(vec x, vec *fraction)
{
    *fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* 0 for -inf */
    return x;                                                                   /* scalef takes the floor itself */
}
static inline vec vec_scale2(vec x, vec n) { return _mm512_scalef_ps(x, n); }
static inline vec vec_mantissa(vec x, vec *n)
{
    __m512i power = _mm512_sub_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x3F2AAAAB));
    power = _mm512_and_si512(power, _mm512_set1_epi32(~0x7FFFFF));
    *n = _mm512_cvtepi32_ps(_mm512_srai_epi32(power, 23));
    return _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_castps_si512(x), power));
}
static inline vec vec_less(vec a, vec b, vec x, vec y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
static inline vec vec_abs(vec x) { return _mm512_abs_ps(x); }
static inline vec vec_larger(vec top, vec x)
{
    __m512i bits = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(top), bits));
}
static inline float vec_sum(vec x) { return _mm512_reduce_add_ps(x); }
static inline void vec_sum4(vec a, vec b, vec c, vec d, float out[4])
{
    vec ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    vec cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    vec all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
static inline void vec_top4(vec a, vec b, vec c, vec d, float out[4])
{
    vec ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    vec cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    vec all = _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
    __m256 half = _mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

static inline vec vec_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline vec vec_load_bf16(const uint16_t *p)
{
    __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}
static inline void vec_store_f16(uint16_t *p, vec x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline void vec_store_bf16(uint16_t *p, vec x)
{
#if HEED_DOT
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
    __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
    __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7FFF)));
    __m512i nan = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    near = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), near, nan);
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(near, 16)));
#endif
}

/* 16 x 16 in four rounds of exchanging halves: of 32-bit pairs, 64-bit pairs, then 128-bit lanes twice. */
static inline void vec_transpose(vec r[W])
{
    __m512d t[W];
    for (int i = 0; i < W; i += 4) {
        __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r[i], r[i + 1]));
        __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(r[i], r[i + 1]));
        __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(r[i + 2], r[i + 3]));
        __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(r[i + 2], r[i + 3]));
        t[i] = _mm512_unpacklo_pd(a, c), t[i + 1] = _mm512_unpackhi_pd(a, c);
        t[i + 2] = _mm512_unpacklo_pd(b, d), t[i + 3] = _mm512_unpackhi_pd(b, d);
    }
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_shuffle_f64x2(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f64x2(t[i], t[i + 4], 0xDD);
        __m512d c = _mm512_shuffle_f64x2(t[i + 8], t[i + 12], 0x88),
                d = _mm512_shuffle_f64x2(t[i + 8], t[i + 12], 0xDD);
        r[i] = _mm512_castpd_ps(_mm512_shuffle_f64x2(a, c, 0x88));
        r[i + 4] = _mm512_castpd_ps(_mm512_shuffle_f64x2(b, d, 0x88));
        r[i + 8] = _mm512_castpd_ps(_mm512_shuffle_f64x2(a, c, 0xDD));
        r[i + 12] = _mm512_castpd_ps(_mm512_shuffle_f64x2(b, d, 0xDD));
    }
}

#if HEED_DOT
/* c + a0 b0 + a1 b1 in each lane, where a lane of a and b is a pair of bf16. */
static inline vec vec_dot(vec a, vec b, vec c)
{
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}
/* Both halves of each pair times a power of two. */
static inline vec vec_scale_pairs(vec x, vec scale)
{
    __m512i bits = _mm512_castps_si512(x), high = _mm512_set1_epi32((int)0xFFFF0000);
    __m512i odd = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(bits, high)), scale));
    __m512i even = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)), scale));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_and_si512(odd, high), _mm512_srli_epi32(even, 16)));
}
/* Lane i: the pair (a[i], b[i]). */
static inline vec vec_load_pairs(const uint16_t *a, const uint16_t *b)
{
    __m512i lo = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)a));
    __m512i hi = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)b));
    return _mm512_castsi512_ps(_mm512_or_si512(lo, _mm512_slli_epi32(hi, 16)));
}
/* W pairs: the 2 W numbers of two vectors, lo first, rounded to bf16. */
static inline vec vec_to_pairs(vec lo, vec hi) { return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(hi, lo)); }
#if HEED_SPLIT
/* x = part[0] + part[1] + ..., if it is neither huge nor tiny: bf16 in the upper halves of their lanes, each what the ones
 * before it left over, cut off. Three are exactly x; two are if x was fp16, else they lack less than 2^-15 of it. The last
 * has what is cut off in its lower halves. */
static inline void vec_parts(vec x, vec part[HEED_SPLIT])
{
    const __m512i high = _mm512_set1_epi32((int)0xFFFF0000);
    for (int i = 0; i + 1 < HEED_SPLIT; i++) {
        part[i] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), high));
        x = _mm512_sub_ps(x, part[i]);
    }
    part[HEED_SPLIT - 1] = x;
}
#endif
/* Lane i: the pair of the bf16 that are the upper halves of a_i and b_i. */
static inline vec vec_join(vec a, vec b)
{
    const __m512i high = _mm512_set1_epi32((int)0xFFFF0000), low = _mm512_srli_epi32(_mm512_castps_si512(a), 16);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(low, _mm512_castps_si512(b), high, 0xF8)); /* low | b & high */
}
static inline float vec_largest(vec top)
{
    uint32_t bits = _mm512_reduce_max_epu32(_mm512_castps_si512(top));
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
/* Both halves of each lane. */
static inline vec vec_pairs(uint16_t bits) { return _mm512_castsi512_ps(_mm512_set1_epi16((short)bits)); }
/* Bounds of magnitudes, as bits: of the largest, and of the least less one, where zeros are beyond all others. */
static inline void vec_widen_pairs(vec x, vec *least, vec *most)
{
    __m512i bits = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi16(0x7FFF));
    __m512i less = _mm512_sub_epi16(bits, _mm512_set1_epi16(1));
    *most = _mm512_castsi512_ps(_mm512_max_epu16(_mm512_castps_si512(*most), bits));
    *least = _mm512_castsi512_ps(_mm512_min_epu16(_mm512_castps_si512(*least), less));
}
/* Whether they are within two powers of two. */
static inline int vec_pairs_within(vec least, vec most, float low, float high)
{
    __m512i lower = _mm512_castps_si512(vec_pairs((uint16_t)(heed_f32_to_bf16(low) - 1)));
    __m512i upper = _mm512_castps_si512(vec_pairs(heed_f32_to_bf16(high)));
    return !_mm512_cmplt_epu16_mask(_mm512_castps_si512(least), lower) &&
           !_mm512_cmpgt_epu16_mask(_mm512_castps_si512(most), upper);
}
/* a and b hold 2 W bf16 each. Lane i of the result: the pair (a_i, b_i), or with `high` (a_(i+W), b_(i+W)). */
static inline vec vec_zip(vec a, vec b, const int high)
{
    const int first = high ? 0x00300010 : 0x00200000; /* numbers 32 and up are those of b */
    __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i index = _mm512_add_epi32(_mm512_set1_epi32(first), _mm512_mullo_epi32(lane, _mm512_set1_epi32(0x10001)));
    return _mm512_castsi512_ps(_mm512_permutex2var_epi16(_mm512_castps_si512(a), index, _mm512_castps_si512(b)));
}
#endif
