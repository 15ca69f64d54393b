/* The vector operations in AVX2 with FMA and F16C. Documented in vec_plain.h. */
#include <immintrin.h>

typedef __m256 vec;
#define W 8
#define MR 6
#define NR 2

static inline vec vec_zero(void) { return _mm256_setzero_ps(); }
static inline vec vec_set1(float x) { return _mm256_set1_ps(x); }
static inline vec vec_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vec_store(float *p, vec x) { _mm256_storeu_ps(p, x); }
static inline vec vec_add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec vec_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec vec_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec vec_div(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec vec_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec vec_min(vec a, vec b) { return _mm256_min_ps(a, b); }
static inline vec vec_max(vec a, vec b) { return _mm256_max_ps(a, b); }
/* n + 127 as the last bits of a float, where vec_scale2() wants them. */
#define SPLIT_BIAS _mm256_set1_ps(0x1.8p23f + 127)
static inline vec vec_split(vec x, vec *fraction)
{
    x = _mm256_max_ps(_mm256_set1_ps(-127), x);
    vec n = _mm256_add_ps(_mm256_sub_ps(x, _mm256_set1_ps(0x1.fffffep-2f)), SPLIT_BIAS); /* the nearest integer */
    *fraction = _mm256_sub_ps(x, _mm256_sub_ps(n, SPLIT_BIAS));
    return n;
}
static inline vec vec_scale2(vec x, vec n) /* the power is 0 where n was below -126 */
{
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}
static inline vec vec_mantissa(vec x, vec *n)
{
    __m256i power = _mm256_sub_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x3F2AAAAB));
    power = _mm256_and_si256(power, _mm256_set1_epi32(~0x7FFFFF));
    *n = _mm256_cvtepi32_ps(_mm256_srai_epi32(power, 23));
    return _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_castps_si256(x), power));
}
static inline vec vec_less(vec a, vec b, vec x, vec y)
{
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
static inline vec vec_abs(vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
static inline vec vec_larger(vec top, vec x)
{
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(top), _mm256_castps_si256(vec_abs(x))));
}
static inline float vec_sum(vec x)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline void vec_sum4(vec a, vec b, vec c, vec d, float out[4])
{
    vec all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
static inline void vec_top4(vec a, vec b, vec c, vec d, float out[4])
{
    vec ab = _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    vec cd = _mm256_max_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    vec all = _mm256_max_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
    _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

static inline vec vec_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static inline vec vec_load_bf16(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
static inline void vec_store_f16(uint16_t *p, vec x)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline void vec_store_bf16(uint16_t *p, vec x)
{
    __m256i bits = _mm256_castps_si256(x), even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7FFF)));
    __m256 nan = _mm256_or_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x400000)));
    __m256 y = _mm256_blendv_ps(_mm256_castsi256_ps(near), nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i high = _mm256_srli_epi32(_mm256_castps_si256(y), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}

/* 8 x 8 in three rounds: 32-bit pairs, 64-bit pairs, 128-bit lanes. */
static inline void vec_transpose(vec r[W])
{
    vec t[W];
    for (int i = 0; i < W; i += 4) {
        vec a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
        vec c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = _mm256_shuffle_ps(a, c, 0x44), t[i + 1] = _mm256_shuffle_ps(a, c, 0xEE);
        t[i + 2] = _mm256_shuffle_ps(b, d, 0x44), t[i + 3] = _mm256_shuffle_ps(b, d, 0xEE);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
}
