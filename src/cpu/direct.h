/* Few rows against many keys, as in a step of decoding. Each key and value is used once for all rows of its head's group,
 * so memory is the limit and nothing is packed: K and V are read where they lie, in their own type, a row at a time. What
 * the processor prefetches by itself does not reach the limit, and memory must not rest while there is arithmetic to do: V
 * of a block is asked for while its scores are computed, K of the next block while the weights meet V. */

#define AHEAD 32                       /* keys */
#define DIRECT_SUMS (W == 16 ? 16 : 8) /* accumulators that fit in registers */

/* Pairs of bf16 as in the tiles, but where there is AMX: there the pairs of vectors take twice as long as floats. */
#define DIRECT_DOT (HEED_DOT && !HEED_AMX)
#if DIRECT_DOT
#define direct_madd vec_dot
#define direct_scale vec_scale_pairs
#define DIRECT_UNIT 2 /* elements in a unit */
#else
#define direct_madd vec_fma
#define direct_scale vec_mul
#define DIRECT_UNIT 1
#endif

/* Rows of a query head for which K is not worth packing: up to 4, over many keys up to 8. */
static inline int are_direct(int64_t rows, int64_t keys)
{
    return !HEED_SPLIT && rows <= (keys > FEW && !HEED_AMX ? 8 : 4);
}

/* Inlined into the rest of a tile, their sums would not stay in registers. */
#define APART static __attribute__((noinline))

typedef struct direct_rows {
    source k, v;
    const float *Q;
    int64_t ldq, rows;
} direct_rows;

static inline int64_t direct_units(int64_t n) { return DIRECT_DOT ? units_of(n) : round_up(n, W); }

/* One row as units. */
static void direct_row(float *to, const source *x, int64_t n)
{
    if (DIRECT_DOT)
        unit_row(to, x, n);
    else
        load_row(to, x->t->dtype, source_row(x, n), x->t->stride[3], x->dim, direct_units(x->dim));
}

/* Into the first cache or the second, which clang wants to read as a number. */
INLINE void prefetch_row(const source *x, int64_t n, const int first)
{
    const char *row = source_row(x, n);
    for (int64_t i = 0; i < x->dim * (x->t->dtype == HEED_F32 ? 4 : 2); i += LINE)
        if (first)
            __builtin_prefetch(row + i, 0, 3);
        else
            __builtin_prefetch(row + i, 0, 2);
}

/* R rows and four keys: s[r * LDS + c] = q_r . k_c. Each product is summed in the same way, so that a row does not depend
 * on how many others there are. */
INLINE void direct_products(heed_dtype type, const int R, float *s, const float *q, int64_t ldq, const void *const k[4],
                            int64_t units)
{
    vec x[4][4]; /* R of them */
    each(r, R)
        each(c, 4)
            x[r][c] = vec_zero();
    for (int64_t u = 0; u < units; u += W) {
        vec key[4];
        each(c, 4)
            key[c] = vec_load_as(type, k[c], u);
        each(r, R) {
            vec row = vec_load(q + r * ldq + u);
            each(c, 4)
                x[r][c] = direct_madd(row, key[c], x[r][c]);
        }
    }
    each(r, R)
        vec_sum4(x[r][0], x[r][1], x[r][2], x[r][3], s + r * LDS);
}

/* Four keys, columns s to s + 3. */
INLINE void direct_keys(heed_dtype type, float *s, const direct_rows *x, const void *const k[4], int64_t units)
{
    const int R = DIRECT_SUMS / 4;
    int64_t r = 0;
    for (; r + R <= x->rows; r += R)
        direct_products(type, R, s + r * LDS, x->Q + r * x->ldq, x->ldq, k, units);
    for (; r < x->rows; r++)
        direct_products(type, 1, s + r * LDS, x->Q + r * x->ldq, x->ldq, k, units);
}

/* Columns [from, to) of S, column c being key n0 + c; some more may be written, up to a whole vector. */
APART void direct_scores(const direct_rows *x, float *S, int64_t n0, int64_t from, int64_t to)
{
    const heed_tensor *t = x->k.t;
    int64_t units = direct_units(x->k.dim);
    int whole = t->stride[3] == 1 && x->k.dim == units * DIRECT_UNIT;
    for (int64_t c = from / 4 * 4; c < to; c += 4) {
        float copies[4][HEED_MAX_HEAD_DIM + W];
        const void *k[4];
        for (int64_t i = 0; i < 4; i++) {
            int64_t n = n0 + HEED_MAX(from, HEED_MIN(c + i, to - 1)); /* keys outside may not be there */
            prefetch_row(&x->v, n, 1); /* quicker from memory than into the second cache, for K slower */
            if (n + AHEAD < x->k.s->keys)
                prefetch_row(&x->k, n + AHEAD, 0);
            k[i] = source_row(&x->k, n);
            if (!whole) {
                direct_row(copies[i], &x->k, n);
                k[i] = copies[i];
            }
        }
        if (whole && DIRECT_UNIT == 1)
            FOR_TYPE(t->dtype, direct_keys, S + c, x, k, units);
        else
            direct_keys(HEED_F32, S + c, x, k, units);
    }
}

/* Columns [d, d + W) of a unit of values: of a row, or of two rows in pairs. With `paired` it is one half of 2 W columns,
 * which begin at a multiple of 2 W. */
INLINE vec load_values(heed_dtype type, const char *const row[2], int64_t d, const int paired, const int half)
{
#if DIRECT_DOT
    const uint16_t *a = (const uint16_t *)(const void *)row[0] + d, *b = (const uint16_t *)(const void *)row[1] + d;
    (void)type;
    if (!paired)
        return vec_load_pairs(a, b);
    a -= half * W, b -= half * W;
    return vec_zip(vec_load((const float *)(const void *)a), vec_load((const float *)(const void *)b), half);
#else
    (void)paired, (void)half;
    return vec_load_as(type, row[0], d);
#endif
}

/* A block of values, and the keys of the next block, which are asked for meanwhile. To find a row may take a call, in a
 * paged cache, and a call would cost the sums their registers: so it is done before. */
typedef struct value_rows {
    const char *row[BC + 1], *key[BC];
    int64_t from, to, keys; /* columns; keys to ask for, beginning with key[from] */
    int64_t key_bytes;
} value_rows;

static void find_values(value_rows *v, const direct_rows *x, int64_t n0, int64_t from, int64_t to)
{
    static const uint16_t zeros[HEED_MAX_HEAD_DIM];
    v->from = from / DIRECT_UNIT * DIRECT_UNIT, v->to = to;
    v->keys = HEED_MIN(to, x->k.s->keys - n0 - BC);
    v->key_bytes = x->k.dim * (x->k.t->dtype == HEED_F32 ? 4 : 2);
    for (int64_t c = v->from; c < to; c++)
        v->row[c] = source_row(&x->v, n0 + c);
    v->row[to] = (const char *)zeros; /* completes a pair */
    for (int64_t c = v->from; c < v->keys; c++)
        v->key[c] = source_row(&x->k, n0 + c + BC);
}

/* O = keep O + P V for R rows and C vectors of columns. */
INLINE void direct_columns(heed_dtype type, const int R, const int C, float *O, int64_t ldo, const float *P,
                           const value_rows *v, int64_t d, const float *keep)
{
    vec sum[4][8]; /* R and C of them */
    each(r, R)
        each(n, C)
            sum[r][n] = keep ? vec_mul(vec_set1(keep[r]), vec_load(O + r * ldo + d + n * W)) : vec_zero();
    int64_t asks = d == 0 ? v->keys : 0;
    for (int64_t c = v->from; c < v->to; c += DIRECT_UNIT) {
        each(i, DIRECT_UNIT)
            for (int64_t at = 0; c + i < asks && at < v->key_bytes; at += LINE)
                __builtin_prefetch(v->key[c + i] + at, 0, 2);
        vec value[8];
        each(n, C)
            value[n] = load_values(type, v->row + c, d + n * W, C > 1, n % 2);
        each(r, R) {
            vec p = vec_set1(P[r * LDS + c / DIRECT_UNIT]);
            each(n, C)
                sum[r][n] = direct_madd(p, value[n], sum[r][n]);
        }
    }
    each(r, R)
        each(n, C)
            vec_store(O + r * ldo + d + n * W, sum[r][n]);
}

INLINE void direct_rows_of(heed_dtype type, const int R, const int C, float *O, int64_t ldo, const float *P,
                           const value_rows *v, int64_t width, const float *keep)
{
    int64_t d = 0;
    for (; d + C * W <= width; d += C * W)
        direct_columns(type, R, C, O, ldo, P, v, d, keep);
    for (; d < width; d += W)
        direct_columns(type, R, 1, O, ldo, P, v, d, keep);
}

INLINE void direct_values_as(heed_dtype type, const direct_rows *x, float *O, int64_t ldo, const float *P,
                             const value_rows *v, const float *keep)
{
    int64_t r = 0;
    for (; r + 4 <= x->rows; r += 4)
        direct_rows_of(type, 4, DIRECT_SUMS / 4, O + r * ldo, ldo, P + r * LDS, v, x->v.dim, keep ? keep + r : NULL);
    for (; r < x->rows; r++)
        direct_rows_of(type, 1, 8, O + r * ldo, ldo, P + r * LDS, v, x->v.dim, keep ? keep + r : NULL);
}

/* O = keep O + P V, or O = P V; P in units. careful: a value that is not finite must not meet a weight of 0. */
APART void direct_values(const direct_rows *x, float *O, int64_t ldo, const float *P, int64_t n0, int64_t from,
                         int64_t to, const float *keep, int careful)
{
    const heed_tensor *t = x->v.t;
    if (t->stride[3] == 1 && x->v.dim % W == 0 && !careful) {
        value_rows v;
        find_values(&v, x, n0, from, to);
        if (DIRECT_UNIT == 1)
            FOR_TYPE(t->dtype, direct_values_as, x, O, ldo, P, &v, keep);
        else
            direct_values_as(HEED_BF16, x, O, ldo, P, &v, keep);
        return;
    }
    for (int64_t r = 0; r < x->rows; r++)
        for (int64_t d = 0; d < x->v.dim; d++)
            O[r * ldo + d] = keep ? keep[r] * O[r * ldo + d] : 0;
    for (int64_t c = from; c < to; c++) {
        float row[HEED_MAX_HEAD_DIM];
        load_row(row, t->dtype, source_row(&x->v, n0 + c), t->stride[3], x->v.dim, x->v.dim);
        for (int64_t r = 0; r < x->rows; r++) {
            float w = DIRECT_DOT ? unit_value(P + r * LDS, c / 2, c % 2) : P[r * LDS + c];
            for (int64_t d = 0; w != 0 && d < x->v.dim; d++)
                O[r * ldo + d] += w * row[d];
        }
    }
}
