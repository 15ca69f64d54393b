/* Few rows against many keys, as in a step of decoding. Each key and value is used once for all rows of its head's group,
 * so memory is the limit and nothing is packed: K and V are read where they lie, in their own type, a row at a time. What
 * the processor prefetches by itself does not reach the limit: K is asked for ahead of its use, and V while its turn has
 * not come. */

#define DIRECT_OF_HEAD 4               /* rows of a query head, at most */
#define DIRECT_ROWS 8                  /* of all heads of a group, at a time */
#define AHEAD 16                       /* keys */
#define DIRECT_SUMS (W == 16 ? 16 : 8) /* accumulators that fit in registers */

typedef struct direct_rows {
    source k, v;
    const float *Q;
    int64_t ldq, rows;
} direct_rows;

static inline void prefetch_row(const source *x, int64_t n)
{
    const char *row = source_row(x, n);
    for (int64_t i = 0; i < x->dim * (x->t->dtype == HEED_F32 ? 4 : 2); i += 64)
        __builtin_prefetch(row + i);
}

/* s[i * step] = q_i . k_i, i = 0 .. 3: one key and four rows, or one row and four keys. Each product is summed in the same
 * way, so that a row does not depend on how many others there are. */
INLINE void direct_dot4(heed_dtype type, float *s, int64_t step, const float *const q[4], const void *const k[4],
                        int64_t dim)
{
    vec x[4] = { vec_zero(), vec_zero(), vec_zero(), vec_zero() };
    float sum[4];
    for (int64_t d = 0; d < dim; d += W)
        each(i, 4)
            x[i] = vec_fma(vec_load_as(type, k[i], d), vec_load(q[i] + d), x[i]);
    vec_sum4(x[0], x[1], x[2], x[3], sum);
    each(i, 4)
        s[i * step] = sum[i];
}

/* Four keys, columns s to s + 3. */
INLINE void direct_keys(heed_dtype type, float *s, const direct_rows *x, const void *const k[4], int64_t dim)
{
    int64_t r = 0;
    for (; r + 4 <= x->rows; r += 4) {
        const float *Q = x->Q + r * x->ldq, *const q[4] = { Q, Q + x->ldq, Q + 2 * x->ldq, Q + 3 * x->ldq };
        for (int c = 0; c < 4; c++) {
            const void *const same[4] = { k[c], k[c], k[c], k[c] };
            direct_dot4(type, s + r * LDS + c, LDS, q, same, dim);
        }
    }
    for (; r < x->rows; r++) {
        const float *Q = x->Q + r * x->ldq, *const same[4] = { Q, Q, Q, Q };
        direct_dot4(type, s + r * LDS, 1, same, k, dim);
    }
}

/* Columns [from, to) of S, column c being key n0 + c; some more may be written, up to a whole vector. */
static void direct_scores(const direct_rows *x, float *S, int64_t n0, int64_t from, int64_t to)
{
    const heed_tensor *t = x->k.t;
    int whole = t->stride[3] == 1 && x->k.dim % W == 0;
    int64_t dim = round_up(x->k.dim, W);
    for (int64_t c = from / 4 * 4; c < to; c += 4) {
        float copies[4][HEED_MAX_HEAD_DIM + W];
        const void *k[4];
        for (int64_t i = 0; i < 4; i++) {
            int64_t n = n0 + HEED_MAX(from, HEED_MIN(c + i, to - 1)); /* keys outside may not be there */
            prefetch_row(&x->v, n);
            if (n + AHEAD < x->k.s->keys)
                prefetch_row(&x->k, n + AHEAD);
            k[i] = source_row(&x->k, n);
            if (!whole) {
                load_row(copies[i], t->dtype, k[i], t->stride[3], x->k.dim, dim);
                k[i] = copies[i];
            }
        }
        if (whole)
            FOR_TYPE(t->dtype, direct_keys, S + c, x, k, dim);
        else
            direct_keys(HEED_F32, S + c, x, k, dim);
    }
}

/* O = keep O + P V for R rows and C vectors of columns. */
INLINE void direct_columns(heed_dtype type, const int R, const int C, float *O, int64_t ldo, const float *P,
                           const source *v, int64_t n0, int64_t from, int64_t to, int64_t d, const float *keep)
{
    vec sum[4][8]; /* R and C of them */
    each(r, R)
        each(n, C)
            sum[r][n] = keep ? vec_mul(vec_set1(keep[r]), vec_load(O + r * ldo + d + n * W)) : vec_zero();
    for (int64_t c = from; c < to; c++) {
        const char *row = source_row(v, n0 + c);
        each(n, C) {
            vec value = vec_load_as(type, row, d + n * W);
            each(r, R)
                sum[r][n] = vec_fma(vec_set1(P[r * LDS + c]), value, sum[r][n]);
        }
    }
    each(r, R)
        each(n, C)
            vec_store(O + r * ldo + d + n * W, sum[r][n]);
}

INLINE void direct_rows_of(heed_dtype type, const int R, const int C, float *O, int64_t ldo, const float *P,
                           const source *v, int64_t n0, int64_t from, int64_t to, const float *keep)
{
    int64_t d = 0;
    for (; d + C * W <= v->dim; d += C * W)
        direct_columns(type, R, C, O, ldo, P, v, n0, from, to, d, keep);
    for (; d < v->dim; d += W)
        direct_columns(type, R, 1, O, ldo, P, v, n0, from, to, d, keep);
}

INLINE void direct_values_as(heed_dtype type, const direct_rows *x, float *O, int64_t ldo, const float *P, int64_t n0,
                             int64_t from, int64_t to, const float *keep)
{
    int64_t r = 0;
    for (; r + 4 <= x->rows; r += 4)
        direct_rows_of(type, 4, DIRECT_SUMS / 4, O + r * ldo, ldo, P + r * LDS, &x->v, n0, from, to,
                       keep ? keep + r : NULL);
    for (; r < x->rows; r++)
        direct_rows_of(type, 1, 8, O + r * ldo, ldo, P + r * LDS, &x->v, n0, from, to, keep ? keep + r : NULL);
}

/* O = keep O + P V, or O = P V. careful: a value that is not finite must not meet a weight of 0. */
static void direct_values(const direct_rows *x, float *O, int64_t ldo, const float *P, int64_t n0, int64_t from,
                          int64_t to, const float *keep, int careful)
{
    const heed_tensor *t = x->v.t;
    if (t->stride[3] == 1 && x->v.dim % W == 0 && !careful) {
        FOR_TYPE(t->dtype, direct_values_as, x, O, ldo, P, n0, from, to, keep);
        return;
    }
    for (int64_t r = 0; r < x->rows; r++)
        for (int64_t d = 0; d < x->v.dim; d++)
            O[r * ldo + d] = keep ? keep[r] * O[r * ldo + d] : 0;
    for (int64_t c = from; c < to; c++) {
        float row[HEED_MAX_HEAD_DIM];
        load_row(row, t->dtype, source_row(&x->v, n0 + c), t->stride[3], x->v.dim, x->v.dim);
        for (int64_t r = 0; r < x->rows; r++)
            for (int64_t d = 0; P[r * LDS + c] != 0 && d < x->v.dim; d++)
                O[r * ldo + d] += P[r * LDS + c] * row[d];
    }
}
