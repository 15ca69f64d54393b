/* Elementary functions on vectors, and rows of any dtype to and from float. */

#define LOG2E 1.44269504088896341f

/* x[i] = 2^x[i], i < n <= 4, for x <= 0 or moderately above; relative error below 2e-7. x = n + f with 0 <= f < 1, and 2^f by a
 * polynomial of degree 5 that is exact at 0; or of degree 3, with an error below 7.5e-5, for results that become bf16, where
 * rounding adds 2e-3. 2^-inf = 0, NaN stays. Step by step for all of them: one after the other, each would wait for its own
 * results, and a processor does not look far enough ahead to begin with the next ones meanwhile. */
INLINE void vec_exp2_of(const int n, vec x[], const int degree)
{
    static const float exact[] = {
        0x1.e974fcp-10f, 0x1.277854p-7f, 0x1.c91ce6p-5f, 0x1.ebdb56p-3f, 0x1.62e4bap-1f, 1.0f
    };
    static const float brief[] = { 0x1.3f96a4p-4f, 0x1.cefc4cp-3f, 0x1.64444cp-1f, 0x1.fff632p-1f };
    const float *factors = degree == 5 ? exact : brief;
    vec f[4], power[4], y[4];
    each(i, n)
        power[i] = vec_split(x[i], &f[i]);
    each(i, n)
        y[i] = vec_fma(vec_set1(factors[0]), f[i], vec_set1(factors[1]));
    each(k, degree - 1)
        each(i, n)
            y[i] = vec_fma(y[i], f[i], vec_set1(factors[k + 2]));
    each(i, n)
        x[i] = vec_scale2(y[i], power[i]);
}

INLINE vec vec_exp2(vec x)
{
    vec_exp2_of(1, &x, 5);
    return x;
}

/* The natural logarithm of a normal number above 0, to about a unit in its last place; NaN stays, and 0 has some finite one.
 * x = 2^n (1 + t), |t| <= 1/3, and log(1 + t) = t - t^2 / 2 + t^3 P(t). */
INLINE vec vec_log(vec x)
{
    vec n, t = vec_sub(vec_mantissa(x, &n), vec_set1(1.0f)), y = vec_set1(-0x1.080586p-3f);
    y = vec_fma(y, t, vec_set1(0x1.1e66bep-3f));
    y = vec_fma(y, t, vec_set1(-0x1.f31140p-4f));
    y = vec_fma(y, t, vec_set1(0x1.1ed716p-3f));
    y = vec_fma(y, t, vec_set1(-0x1.559dccp-3f));
    y = vec_fma(y, t, vec_set1(0x1.99d028p-3f));
    y = vec_fma(y, t, vec_set1(-0x1.fffef0p-3f));
    y = vec_fma(y, t, vec_set1(0x1.555506p-2f));
    y = vec_fma(y, t, vec_set1(-0.5f));
    y = vec_fma(n, vec_set1(0x1.62e430p-1f), vec_fma(vec_mul(t, t), y, t));
    return vec_fma(x, vec_zero(), y); /* a NaN has a mantissa like any other */
}

/* tanh with a relative error of some 1e-7: x + x^3 P(x^2) near 0, elsewhere through exp. */
INLINE vec vec_tanh(vec x)
{
    vec a = vec_abs(x), z = vec_mul(x, x);
    vec y = vec_set1(-0.005704978946596384f);
    y = vec_fma(y, z, vec_set1(0.020639080554246902f));
    y = vec_fma(y, z, vec_set1(-0.05373971164226532f));
    y = vec_fma(y, z, vec_set1(0.13331441581249237f));
    y = vec_fma(y, z, vec_set1(-0.3333328068256378f));
    y = vec_fma(vec_mul(y, z), x, x);
    vec e = vec_exp2(vec_mul(a, vec_set1(-2 * LOG2E))); /* 1 - 2 e / (1 + e) with e = exp(-2|x|) */
    vec far = vec_sub(vec_set1(1.0f), vec_div(vec_add(e, e), vec_add(vec_set1(1.0f), e)));
    far = vec_less(x, vec_zero(), vec_sub(vec_zero(), far), far);
    return vec_less(a, vec_set1(0.625f), y, far);
}

INLINE vec vec_load_as(heed_dtype type, const void *row, int64_t c)
{
    return type == HEED_F32   ? vec_load((const float *)row + c)
           : type == HEED_F16 ? vec_load_f16((const uint16_t *)row + c)
                              : vec_load_bf16((const uint16_t *)row + c);
}

INLINE float load_as(heed_dtype type, const void *row, int64_t c)
{
    return type == HEED_F32   ? ((const float *)row)[c]
           : type == HEED_F16 ? heed_f16_to_f32(((const uint16_t *)row)[c])
                              : heed_bf16_to_f32(((const uint16_t *)row)[c]);
}

INLINE void vec_store_as(heed_dtype type, void *row, int64_t c, vec x)
{
    if (type == HEED_F32)
        vec_store((float *)row + c, x);
    else if (type == HEED_F16)
        vec_store_f16((uint16_t *)row + c, x);
    else
        vec_store_bf16((uint16_t *)row + c, x);
}

/* Calls f(type, ...) with type a constant, so that the compiler makes a loop for each. */
#define FOR_TYPE(type, f, ...)                                                                                         \
    ((type) == HEED_F32   ? f(HEED_F32, __VA_ARGS__)                                                                   \
     : (type) == HEED_F16 ? f(HEED_F16, __VA_ARGS__)                                                                   \
                          : f(HEED_BF16, __VA_ARGS__))

/* Rows of neighbours in vectors, of which the last may overlap the one before; shorter ones, and others, one by one. */
INLINE void load_row_as(heed_dtype type, float *to, const void *from, int64_t step, int64_t n)
{
    int64_t c = 0;
    if (step == 1 && n >= W)
        for (; c < n; c += W) {
            int64_t at = HEED_MIN(c, n - W);
            vec_store(to + at, vec_load_as(type, from, at));
        }
    for (; c < n; c++)
        to[c] = load_as(type, from, c * step);
}

/* to[c] = from[c * step], c < n; zeros up to padded, a multiple of W where it is more than n. */
static void load_row(float *to, heed_dtype type, const void *from, int64_t step, int64_t n, int64_t padded)
{
    for (int64_t c = n / W * W; c < padded && n < padded; c += W)
        vec_store(to + c, vec_zero());
    FOR_TYPE(type, load_row_as, to, from, step, n);
}

/* to[c * step] = scale * from[c] + zero, where 0 makes a 0 of -0, and -0 leaves all as it is. */
INLINE void store_row_as(heed_dtype type, void *to, int64_t step, const float *from, int64_t n, float scale, float zero)
{
    int64_t c = 0;
    if (step == 1 && n >= W)
        for (; c < n; c += W) {
            int64_t at = HEED_MIN(c, n - W);
            vec_store_as(type, to, at, vec_fma(vec_load(from + at), vec_set1(scale), vec_set1(zero)));
        }
    for (; c < n; c++) {
        float x = scale * from[c] + zero;
        if (type == HEED_F32)
            ((float *)to)[c * step] = x;
        else
            ((uint16_t *)to)[c * step] = type == HEED_F16 ? heed_f32_to_f16(x) : heed_f32_to_bf16(x);
    }
}

/* to[c * step] = scale * from[c]. */
static void store_row(void *to, heed_dtype type, int64_t step, const float *from, int64_t n, float scale)
{
    FOR_TYPE(type, store_row_as, to, step, from, n, scale, -0.0f);
}

INLINE void store_rows_as(heed_dtype type, char *to, int64_t step, const float *from, int64_t ld, int64_t rows,
                          int64_t n)
{
    for (int64_t r = 0; r < rows; r++, to += step, from += ld)
        for (int64_t c = 0; c < n; c += W)
            vec_store_as(type, to, c, vec_load(from + c));
}

/* out[r] = a[r] . b[r], whole vectors. */
INLINE void dot4_as(heed_dtype type, const void *const a[4], const void *const b[4], int64_t n, float out[4])
{
    vec sum[4] = { vec_zero(), vec_zero(), vec_zero(), vec_zero() };
    int64_t c = 0;
#if HEED_DOT
    for (; type == HEED_BF16 && c + 2 * W <= n; c += 2 * W)
        each(r, 4)
            sum[r] = vec_dot(vec_load((const float *)a[r] + c / 2), vec_load((const float *)b[r] + c / 2), sum[r]);
#endif
    for (; c < n; c += W)
        each(r, 4)
            sum[r] = vec_fma(vec_load_as(type, a[r], c), vec_load_as(type, b[r], c), sum[r]);
    vec_sum4(sum[0], sum[1], sum[2], sum[3], out);
}
