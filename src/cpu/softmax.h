/* One step of the online softmax. A row's scores arrive a block of keys at a time; m is the largest so far and l the sum
 * of 2^(c (s - m)). When a block raises m, what was summed before is scaled down:
 *
 *     m' = max(m, max_j s_j)     keep = 2^(c (m - m'))     P_j = 2^(c (s_j - m'))     l' = keep l + sum_j P_j
 */

/* 2^(c (m - m')) for each row of a tile goes to keep, m' to m; m' = max(m, the largest of the row's scores). top has -inf
 * behind the last row up to a whole vector: m and l of the next tile stay as they are. */
static void raise_maxima(float *m, float *l, const float *top, float *keep, float *base, int64_t rows, float c)
{
    for (int64_t r = 0; r < rows; r += W) {
        vec old = vec_load(m + r), now = vec_max(vec_load(top + r), old);
        vec floor = vec_less(now, vec_set1(-FLT_MAX), vec_zero(), now); /* no key yet: -inf - -inf would be NaN */
        vec k = vec_exp2(vec_mul(vec_sub(old, floor), vec_set1(c)));
        vec_store(m + r, now), vec_store(base + r, floor), vec_store(keep + r, k);
        vec_store(l + r, vec_mul(vec_load(l + r), k));
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

/* Two vectors of weights, columns i and i + W, to their row: floats, or units. */
INLINE void store_weights(float *row, int64_t i, vec x, vec y, const int as_units)
{
#if HEED_DOT
    if (as_units) {
        vec_store(row + i / 2, vec_to_pairs(x, y));
        return;
    }
#endif
    (void)as_units;
    vec_store(row + i, x), vec_store(row + i + W, y);
}

/* Scores of a tile to weights, in place, columns [from, to) of S, multiples of 2 W and W; updates m and l and says in keep
 * by what to scale O. as_units: see row_to_units(). A step of `next` for each row. */
static void softmax_tile(float *S, float *m, float *l, float *keep, int64_t rows, int64_t from, int64_t to, float c,
                         const int as_units, ahead *next)
{
    float top[MR + W], base[MR + W];
    int64_t r = 0;
    for (; r < rows; r += 4) {
        const float *s = S + r * LDS;
        int64_t last = (rows - 1 - r) * LDS; /* which stands in for rows beyond */
        vec_top4(largest(s, from, to), largest(s + HEED_MIN(LDS, last), from, to),
                 largest(s + HEED_MIN(2 * LDS, last), from, to), largest(s + HEED_MIN(3 * LDS, last), from, to),
                 top + r);
    }
    for (r = rows; r < round_up(rows, W); r++)
        top[r] = -INFINITY;
    raise_maxima(m, l, top, keep, base, rows, c);
    vec factor = vec_set1(c), sum[MR + W];
    for (r = 0; r < rows; r++) {
        float *s = S + r * LDS;
        ask(next);
        vec b = vec_set1(base[r]), sum1 = vec_zero(), sum2 = vec_zero();
        int64_t i = from;
        for (; i + W < to; i += 2 * W) {
            vec x = vec_exp2(vec_mul(vec_sub(vec_load(s + i), b), factor));
            vec y = vec_exp2(vec_mul(vec_sub(vec_load(s + i + W), b), factor));
            store_weights(s, i, x, y, as_units);
            sum1 = vec_add(sum1, x), sum2 = vec_add(sum2, y);
        }
        if (i < to) {
            vec x = vec_exp2(vec_mul(vec_sub(vec_load(s + i), b), factor));
            store_weights(s, i, x, vec_zero(), as_units);
            sum1 = vec_add(sum1, x);
        }
        sum[r] = vec_add(sum1, sum2);
    }
    for (r = rows; r < round_up(rows, 4); r++)
        sum[r] = vec_zero();
    for (r = 0; r < rows; r += 4) {
        float sums[4];
        vec_sum4(sum[r], sum[r + 1], sum[r + 2], sum[r + 3], sums);
        for (int64_t i = 0; i < HEED_MIN(4, rows - r); i++)
            l[r + i] += sums[i];
    }
}
