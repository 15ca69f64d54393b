/* One step of the online softmax. A row's scores arrive a block of keys at a time; m is the largest so far and l the sum
 * of 2^(c (s - m)). When a block raises m, what was summed before is scaled down:
 *
 *     m' = max(m, max_j s_j)     keep = 2^(c (m - m'))     P_j = 2^(c (s_j - m'))     l' = keep l + sum_j P_j
 */

/* m keeps P within the range of floats, and the largest score is not the only number that does. A row is near a block of keys
 * where |q| |k| says that none of those it sees has a |c s| above NEAR. From a row's first keys on, as long as it is near them,
 * m = NEAR_M / c will do, and nobody needs to look for the largest. P = 2^(c s - NEAR_M) is one operation, and with NEAR_M = 0 as
 * exact as c s. That of bf16 is an eighth below a power of two, as they are closest there and scores of flat rows near 0. */
#define MAY_BE_NEAR (!HEED_SPLIT)
#define NEAR 40.0f
#define NEAR_M (HEED_DOT ? 8.125f : 0.0f)
#define NEAR_ROWS 64                                     /* of a sequence, and ... */
#define NEAR_KEYS (HEED_AMX ? 512 : HEED_DOT ? 64 : 256) /* ... keys, for which it is worth finding out */

/* 2^(c (m - m')) for each row of a tile goes to keep, m' to m; m' = max(m, the largest of the row's scores). top has -inf
 * behind the last row up to a whole vector: m of the next tile stays as it is. */
static void raise_maxima(float *m, const float *top, float *keep, float *base, int64_t rows, float c)
{
    for (int64_t r = 0; r < rows; r += W) {
        vec old = vec_load(m + r), now = vec_max(vec_load(top + r), old);
        vec floor = vec_less(now, vec_set1(-FLT_MAX), vec_zero(), now); /* no key yet: -inf - -inf would be NaN */
        vec k = vec_exp2(vec_mul(vec_sub(old, floor), vec_set1(c)));
        vec_store(m + r, now), vec_store(base + r, floor), vec_store(keep + r, k);
    }
}

/* The largest of columns [from, to). */
INLINE vec largest(const float *s, int64_t from, int64_t to)
{
    vec x = vec_load(s + from), y = x;
    int64_t i = from + W;
    for (; i + W < to; i += 2 * W)
        x = vec_max(x, vec_load(s + i)), y = vec_max(y, vec_load(s + i + W));
    for (; i < to; i += W)
        x = vec_max(x, vec_load(s + i));
    return vec_max(x, y);
}

/* Two vectors of weights, columns i and i + W of row r: units to P, or floats to S, where a second beyond `to` is nobody's. */
INLINE void store_weights(float *P, float *S, int64_t r, int64_t i, int64_t to, vec x, vec y, const int as_units)
{
    if (as_units) {
        store_units_of(P + r * LDW, i, x, y);
        return;
    }
    vec_store(S + r * LDS + i, x);
    if (i + W < to)
        vec_store(S + r * LDS + i + W, y);
}

/* The largest of columns [from, to) of each row of a tile raise m; l and O are to be scaled by keep. Which rows are near the
 * keys, where some may be. */
INLINE void raise_tile(const float *S, float *m, float *keep, float *base, int64_t rows, int64_t from, int64_t to,
                       float c, const char *near)
{
    float top[MOST_ROWS + W] = { 0 };
    int64_t r = 0;
    for (; r < rows; r += 4) {
        const float *s = S + r * LDS;
        int64_t last = (rows - 1 - r) * LDS; /* which stands in for rows beyond */
        vec_top4(largest(s, from, to), largest(s + HEED_MIN(LDS, last), from, to),
                 largest(s + HEED_MIN(2 * LDS, last), from, to), largest(s + HEED_MIN(3 * LDS, last), from, to),
                 top + r);
    }
    for (r = 0; near && r < rows; r++)
        if (near[r])
            top[r] = m[r] == -INFINITY ? NEAR_M / c : -INFINITY;
    for (r = rows; r < round_up(rows, W); r++)
        top[r] = -INFINITY;
    raise_maxima(m, top, keep, base, rows, c);
}

/* l = keep l + the sums of a tile's weights, of which there are zeros behind the last row up to a multiple of 4. */
INLINE void add_sums(float *l, const float *keep, vec *sum, int64_t rows)
{
    for (int64_t r = rows; r < round_up(rows, 4); r++)
        sum[r] = vec_zero();
    for (int64_t r = 0; r < rows; r += 4) {
        float sums[4];
        vec_sum4(sum[r], sum[r + 1], sum[r + 2], sum[r + 3], sums);
        for (int64_t i = 0; i < HEED_MIN(4, rows - r); i++)
            l[r + i] = keep[r + i] * l[r + i] + sums[i];
    }
}

/* log2(P) = c (s - m), with c in `factor`. */
typedef struct row_base {
    vec m, offset;
} row_base;

INLINE row_base base_of(float m, int is_near)
{
    return is_near ? (row_base){ vec_zero(), vec_set1(-NEAR_M) } : (row_base){ vec_set1(m), vec_zero() };
}

INLINE vec log2_of_weight(vec s, row_base base, vec factor)
{
    vec above = vec_sub(s, base.m);
    return MAY_BE_NEAR && NEAR_M != 0 ? vec_fma(above, factor, base.offset) : vec_mul(above, factor);
}

/* Vectors of columns i to i + n W of row r, n even: from scores to weights and onto their sums. */
INLINE void weigh_vectors(const int n, float *P, float *S, int64_t r, int64_t i, row_base base, vec factor, vec sum[2],
                          const int as_units)
{
    vec x[4];
    each(h, n)
        x[h] = log2_of_weight(vec_load(S + r * LDS + i + h * W), base, factor);
    vec_exp2_of(n, x, 5);
    each(h, n)
        sum[h % 2] = vec_add(sum[h % 2], x[h]);
    each(h, n / 2)
        store_weights(P, S, r, i + 2 * h * W, INT64_MAX, x[2 * h], x[2 * h + 1], as_units);
}

/* Columns i and i + W, or i alone if that is the last before `to`. */
INLINE void weigh_pair(float *P, float *S, int64_t r, int64_t i, int64_t to, row_base base, vec factor, vec sum[2],
                       const int as_units)
{
    if (i + W < to) {
        weigh_vectors(2, P, S, r, i, base, factor, sum, as_units);
        return;
    }
    vec x = vec_exp2(log2_of_weight(vec_load(S + r * LDS + i), base, factor));
    sum[0] = vec_add(sum[0], x);
    store_weights(P, S, r, i, to, x, vec_zero(), as_units);
}

/* Weights of a tile, columns [from, to) of S, multiples of 2 W and W: as units to P, which is S or another place, or as floats
 * where they are. Updates l. A step of `next` for each row. */
INLINE void weigh_tile(float *P, float *S, float *l, const float *keep, const float *base, const int all_near,
                       const char *near, int64_t rows, int64_t from, int64_t to, float c, const int as_units,
                       ahead *next)
{
    vec sum[MOST_ROWS + W];
    for (int64_t r = 0; r < rows; r++) {
        vec of_row[2] = { vec_zero(), vec_zero() };
        row_base b = all_near ? base_of(0, 1) : base_of(base[r], near && near[r]);
        int64_t i = from;
        ask(next);
        for (; i + 4 * W <= to; i += 4 * W)
            weigh_vectors(4, P, S, r, i, b, vec_set1(c), of_row, as_units);
        for (; i < to; i += 2 * W)
            weigh_pair(P, S, r, i, to, b, vec_set1(c), of_row, as_units);
        sum[r] = vec_add(of_row[0], of_row[1]);
    }
    add_sums(l, keep, sum, rows);
}

/* Scores of a tile to weights. Updates m and l and says in keep by what to scale O; `near` as in raise_tile(). */
INLINE void softmax_tile(float *P, float *S, float *m, float *l, float *keep, int64_t rows, int64_t from, int64_t to,
                         float c, const int as_units, const char *near, ahead *next)
{
    float base[MOST_ROWS + W];
    raise_tile(S, m, keep, base, rows, from, to, c, near);
    weigh_tile(P, S, l, keep, base, 0, near, rows, from, to, c, as_units, next);
}

#if HEED_SPLIT
/* The same in pieces: softmax_begin(), then weigh() while AMX multiplies for the next tile, then softmax_end(). */
typedef struct weighing {
    meanwhile work;
    float *P, *S;
    int64_t row, column, rows, from, to; /* row, column: what comes next */
    float c, base[MR + W];
    vec sum[MR + W][2];
    ahead *next;
} weighing;

/* A piece: 4 W columns of one row at most. */
static void weigh(meanwhile *work)
{
    weighing *w = (weighing *)work;
    if (w->row == w->rows)
        return;
    int64_t i = w->column;
    row_base base = base_of(w->base[w->row], 0);
    vec factor = vec_set1(w->c), *sum = w->sum[w->row];
    if (i + 4 * W <= w->to) {
        weigh_vectors(4, w->P, w->S, w->row, i, base, factor, sum, 1);
        w->column = i += 4 * W;
        if (i < w->to)
            return;
    } else
        for (; i < w->to; i += 2 * W)
            weigh_pair(w->P, w->S, w->row, i, w->to, base, factor, sum, 1);
    w->column = w->from;
    w->row++;
    ask(w->next);
}

static void softmax_begin(weighing *w, float *P, float *S, float *m, float *keep, int64_t rows, int64_t from,
                          int64_t to, float c, ahead *next)
{
    w->work.step = weigh, w->P = P, w->S = S, w->row = 0, w->column = from, w->rows = rows, w->from = from, w->to = to,
    w->c = c;
    w->next = next;
    raise_tile(S, m, keep, w->base, rows, from, to, c, NULL);
    memset(w->sum, 0, sizeof w->sum);
}

static void softmax_end(weighing *w, float *l, const float *keep)
{
    vec sum[MR + W];
    while (w->row < w->rows)
        weigh(&w->work);
    for (int64_t r = 0; r < w->rows; r++)
        sum[r] = vec_add(w->sum[r][0], w->sum[r][1]);
    add_sums(l, keep, sum, w->rows);
}
#endif
