/* The vector operations in portable C: the compiler's generic vectors, four floats wide, which become SSE2 on any
 * x86-64 and NEON on ARM. This file is also their description; vec_avx2.h and vec_avx512.h define the same.
 *
 *     vec, W          a vector of W floats
 *     MR, NR          rows, and vectors in a row, of the largest register tile (tile.h): MR * NR + NR + 1 registers
 */
typedef float vec __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t vec_int __attribute__((vector_size(16)));
#define W 4
#if defined(__aarch64__)
#define MR 12 /* 32 registers */
#else
#define MR 6 /* 16 registers */
#endif
#define NR 2

static inline vec vec_zero(void) { return (vec){ 0, 0, 0, 0 }; }
static inline vec vec_set1(float x) { return (vec){ x, x, x, x }; }
static inline vec vec_load(const float *p) { return *(const vec *)p; }
static inline void vec_store(float *p, vec x) { *(vec *)p = x; }
static inline vec vec_add(vec a, vec b) { return a + b; }
static inline vec vec_sub(vec a, vec b) { return a - b; }
static inline vec vec_mul(vec a, vec b) { return a * b; }
static inline vec vec_div(vec a, vec b) { return a / b; }
static inline vec vec_fma(vec a, vec b, vec c) { return a * b + c; }

/* Lane by lane: x where a < b, else y. */
static inline vec vec_less(vec a, vec b, vec x, vec y)
{
    vec_int m = a < b;
    return (vec)(((vec_int)x & m) | ((vec_int)y & ~m));
}

/* The smaller, the larger; b where one of them is NaN. */
static inline vec vec_min(vec a, vec b) { return vec_less(a, b, a, b); }
static inline vec vec_max(vec a, vec b) { return vec_less(b, a, a, b); }
static inline vec vec_abs(vec x) { return (vec)((vec_int)x & (vec_int){ INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX }); }

/* The larger of top, which is not negative, and the magnitude of x; NaN is larger than all. */
static inline vec vec_larger(vec top, vec x)
{
    vec_int a = (vec_int)top, b = (vec_int)vec_abs(x), m = a > b;
    return (vec)((a & m) | (b & ~m));
}

/* x = n + *fraction, n integral, 0 <= *fraction <= 1, for x up to 127; below -127, -inf included, some n below -126. Only
 * vec_scale2() makes sense of n: an instruction set may leave part of the work to it. 0 has the fraction 0, NaN stays. */
static inline vec vec_split(vec x, vec *fraction)
{
    vec big = vec_set1(0x1.8p23f), one = vec_set1(1);
    x = vec_max(vec_set1(-150), x);
    vec n = (x + big) - big; /* the nearest integer; not a no-op, as this file is never compiled with -ffast-math */
    n = vec_less(x, n, n - one, n);
    *fraction = x - n;
    return n;
}

/* x * 2^n for an n of vec_split(); 0 where n < -126. */
static inline vec vec_scale2(vec x, vec n)
{
    n = vec_less(n, vec_set1(-127), vec_set1(-127), n);
    n = vec_less(vec_set1(127), n, vec_set1(127), n);
    vec_int e;
    for (int i = 0; i < W; i++)
        e[i] = n[i] == n[i] ? (int32_t)n[i] : 0;
    return x * (vec)((e + 127) << 23);
}
/* x = 2^*n m, 2/3 <= m < 4/3, of normal numbers above 0; 0 is taken for 2^-127. */
static inline vec vec_mantissa(vec x, vec *n)
{
    vec_int power = ((vec_int)x - 0x3F2AAAAB) & ~0x7FFFFF; /* 2/3 */
    *n = __builtin_convertvector(power >> 23, vec);
    return (vec)((vec_int)x - power);
}
/* The sum of the lanes. */
static inline float vec_sum(vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
/* The sums of four vectors. */
static inline void vec_sum4(vec a, vec b, vec c, vec d, float out[4])
{
    out[0] = vec_sum(a), out[1] = vec_sum(b), out[2] = vec_sum(c), out[3] = vec_sum(d);
}
/* The largest lanes of four vectors. */
static inline void vec_top4(vec a, vec b, vec c, vec d, float out[4])
{
    vec ab = vec_max((vec){ a[0], b[0], a[1], b[1] }, (vec){ a[2], b[2], a[3], b[3] });
    vec cd = vec_max((vec){ c[0], d[0], c[1], d[1] }, (vec){ c[2], d[2], c[3], d[3] });
    vec top = vec_max((vec){ ab[0], ab[1], cd[0], cd[1] }, (vec){ ab[2], ab[3], cd[2], cd[3] });
    vec_store(out, top);
}

/* W numbers of 16 bits to and from floats, rounded to nearest even. */
static inline vec vec_load_f16(const uint16_t *p)
{
    return (vec){ heed_f16_to_f32(p[0]), heed_f16_to_f32(p[1]), heed_f16_to_f32(p[2]), heed_f16_to_f32(p[3]) };
}
static inline vec vec_load_bf16(const uint16_t *p)
{
    return (vec){ heed_bf16_to_f32(p[0]), heed_bf16_to_f32(p[1]), heed_bf16_to_f32(p[2]), heed_bf16_to_f32(p[3]) };
}
static inline void vec_store_f16(uint16_t *p, vec x)
{
    for (int i = 0; i < W; i++)
        p[i] = heed_f32_to_f16(x[i]);
}
static inline void vec_store_bf16(uint16_t *p, vec x)
{
    for (int i = 0; i < W; i++)
        p[i] = heed_f32_to_bf16(x[i]);
}

/* r[i] lane j becomes r[j] lane i. */
static inline void vec_transpose(vec r[W])
{
    vec a = r[0], b = r[1], c = r[2], d = r[3];
    r[0] = (vec){ a[0], b[0], c[0], d[0] };
    r[1] = (vec){ a[1], b[1], c[1], d[1] };
    r[2] = (vec){ a[2], b[2], c[2], d[2] };
    r[3] = (vec){ a[3], b[3], c[3], d[3] };
}
