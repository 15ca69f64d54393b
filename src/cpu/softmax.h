/* One step of the online softmax. A row's scores arrive a block of keys at a time; m is the largest so far and l the sum
 * of 2^(c (s - m)). When a block raises m, what was summed before is scaled down:
 *
 *     m' = max(m, max_j s_j)     keep = 2^(c (m - m'))     P_j = 2^(c (s_j - m'))     l' = keep l + sum_j P_j
 */

/* 2^(c (m - m')) for each row of a tile goes to keep, m' to m; m' = max(m, the largest of the row's scores). */
static void raise_maxima(float *m, float *l, const float *top, float *keep, float *base, int64_t rows, float c)
{
    for (int64_t r = 0; r < rows; r += W) {
        vec old = vec_load(m + r), now = vec_max(vec_load(top + r), old);
        vec floor = vec_less(now, vec_set1(-FLT_MAX), vec_zero(), now); /* no key yet: -inf - -inf would be NaN */
        vec k = vec_exp2(vec_mul(vec_sub(old, floor), vec_set1(c)));
        float lane[3][W];
        vec_store(lane[0], now), vec_store(lane[1], k), vec_store(lane[2], floor);
        for (int64_t i = r; i < HEED_MIN(r + W, rows); i++) {
            m[i] = lane[0][i - r], keep[i] = lane[1][i - r], base[i] = lane[2][i - r];
            l[i] *= keep[i];
        }
    }
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
 * by what to scale O. as_units: see row_to_units(). */
static void softmax_tile(float *S, float *m, float *l, float *keep, int64_t rows, int64_t from, int64_t to, float c,
                         const int as_units)
{
    float top[MR + W], base[MR + W];
    for (int64_t r = 0; r < rows; r++) {
        const float *s = S + r * LDS;
        vec x = vec_load(s + from), y = x;
        int64_t i = from + W;
        for (; i + W < to; i += 2 * W)
            x = vec_max(x, vec_load(s + i)), y = vec_max(y, vec_load(s + i + W));
        for (; i < to; i += W)
            x = vec_max(x, vec_load(s + i));
        top[r] = vec_top(vec_max(x, y));
    }
    for (int64_t r = rows; r < round_up(rows, W); r++)
        top[r] = 0;
    raise_maxima(m, l, top, keep, base, rows, c);
    vec factor = vec_set1(c);
    for (int64_t r = 0; r < rows; r++) {
        float *s = S + r * LDS;
        vec b = vec_set1(base[r]), sum = vec_zero(), sum2 = vec_zero();
        int64_t i = from;
        for (; i + W < to; i += 2 * W) {
            vec x = vec_exp2(vec_mul(vec_sub(vec_load(s + i), b), factor));
            vec y = vec_exp2(vec_mul(vec_sub(vec_load(s + i + W), b), factor));
            store_weights(s, i, x, y, as_units);
            sum = vec_add(sum, x), sum2 = vec_add(sum2, y);
        }
        for (; i < to; i += W) {
            vec x = vec_exp2(vec_mul(vec_sub(vec_load(s + i), b), factor));
            store_weights(s, i, x, vec_zero(), as_units);
            sum = vec_add(sum, x);
        }
        l[r] += vec_sum(vec_add(sum, sum2));
    }
}
