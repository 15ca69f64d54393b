/* Rows that are near keys (softmax.h). */

/* Values are moderate if sums of them, times weights of near rows, stay within the range of floats: those are between 2^-49
 * and 2^40. */
#define MODERATE_MOST 0x1p64f
#define MODERATE_LEAST 0x1p-77f /* unless 0 */

/* Whether so many rows of units are. A NaN is not. */
static int are_moderate(right V, int64_t rows, int64_t width)
{
#if HEED_DOT
    vec most = vec_zero(), least = vec_pairs(UINT16_MAX);
    for (; rows > 0; rows--, V.data += V.ld)
        for (int64_t c = 0; c < width; c += W)
            vec_widen_pairs(vec_load(V.data + c), &least, &most);
    return vec_pairs_within(least, most, MODERATE_LEAST, MODERATE_MOST);
#else
    float top[4];
    vec most = vec_zero(), tiny = vec_zero();
    for (; rows > 0; rows--, V.data += V.ld)
        for (int64_t c = 0; c < width; c += W) {
            vec x = vec_abs(vec_load(V.data + c));
            most = vec_larger(most, x), tiny = vec_max(vec_less(x, vec_set1(MODERATE_LEAST), x, vec_zero()), tiny);
        }
    most = vec_less(most, vec_set1(2 * MODERATE_MOST), most, vec_set1(INFINITY)); /* for NaN, too */
    vec_top4(most, tiny, most, tiny, top);
    return top[0] <= MODERATE_MOST && top[1] == 0;
#endif
}

/* Of keys [first, last), which are packed: those whose values are not moderate are out of reach. */
static void find_reach(forward_block *b, int64_t first, int64_t last)
{
    int64_t width = round_up(b->j->p->Dv, W);
    right V = right_from(b->V, first / PER_UNIT, 0);
    if (are_moderate(V, (last - first + PER_UNIT - 1) / PER_UNIT, width))
        return;
    for (int64_t n = first; n < last; n++)
        for (int64_t c = 0; c < width; c++) {
            float v = fabsf(unit_value(b->V.data, n / PER_UNIT * b->V.ld + c, n % PER_UNIT));
            if (!(v <= MODERATE_MOST) || (v < MODERATE_LEAST && v != 0))
                b->reach[n] = INFINITY;
        }
}

/* |q|^2 of all rows, the largest and the least. */
static void square_rows(forward_block *b)
{
    const int64_t rows = b->rows, ld = b->Q.ld, D = b->j->p->D;
    const float *Q = b->Q.data;
    float top[4];
    vec most = vec_zero(), least = vec_set1(-INFINITY);
    for (int64_t r = 0; r < rows; r += 4) {
        vec sum[4] = { vec_zero(), vec_zero(), vec_zero(), vec_zero() };
        const float *row[4];
        each(i, 4)
            row[i] = Q + HEED_MIN(r + i, rows - 1) * ld;
        int64_t c = 0;
        for (; c + PER_UNIT * W <= D; c += PER_UNIT * W)
            each(i, 4) {
                vec x = vec_load(row[i] + c / PER_UNIT);
                sum[i] = vec_madd(x, x, sum[i]);
            }
        if (c < D)
            each(i, 4) {
                vec x = vec_load_as(PER_UNIT == 1 ? HEED_F32 : HEED_BF16, row[i], c);
                sum[i] = vec_fma(x, x, sum[i]);
            }
        vec_sum4(sum[0], sum[1], sum[2], sum[3], b->q_square + r);
    }
    for (int64_t r = rows; r < round_up(rows, W); r++)
        b->q_square[r] = b->q_square[rows - 1];
    for (int64_t r = 0; r < rows; r += W) {
        vec x = vec_load(b->q_square + r);
        most = vec_max(x, most), least = vec_max(vec_sub(vec_zero(), x), least);
    }
    vec_top4(most, least, most, least, top);
    b->most_square = top[0], b->least_square = -top[1];
}

/* Whether |q|^2 and |k|^2 are those of near rows. Squares beyond 2^60 are none, as 2^-60 may be lost in the other one. */
static inline int are_near(float q_square, float reach, float c)
{
    return q_square <= 0x1p60f && reach <= 0x1p60f && q_square * reach * (c * c) <= NEAR * NEAR;
}

/* Before keys [n0, n1), a block or what there is of it, are met: the largest |k|^2, seen or not, whether all rows are near, and
 * whether none is that sees the first. */
static void look_at_keys(forward_block *b, int64_t n0, int64_t n1)
{
    const float c = b->j->s_scale * LOG2E;
    float top[4];
    vec most = vec_zero();
    for (int64_t n = n0; n < n1; n += W)
        most = vec_max(vec_load(b->reach + n), most);
    vec_top4(most, most, most, most, top);
    b->met_first = n0, b->met_last = n1, b->most_reach = top[0];
    b->all_near = are_near(b->most_square, b->most_reach, c);
    b->none_near = !are_near(b->least_square, b->reach[n0], c);
    b->knows_prefix = 0;
}

/* The largest |k|^2 of keys [first, last), which are among those. */
static float reach_of(forward_block *b, int64_t first, int64_t last)
{
    const int from_first = first == b->met_first;
    if (from_first && last == b->met_last)
        return b->most_reach;
    if (!from_first || !b->knows_prefix) {
        float top = 0;
        for (int64_t n = first; n < (from_first ? b->met_last : last); n++)
            b->prefix[n - first] = top = b->reach[n] > top ? b->reach[n] : top;
        b->knows_prefix = from_first;
    }
    return b->prefix[last - 1 - first];
}

/* Which rows of a tile are near these keys, and were near all others before. No key that a row does not see decides about it,
 * nor does another row. */
static void find_near_rows(forward_block *b, const forward_tile *x, char near[TALL])
{
    const float c = b->j->s_scale * LOG2E;
    char count = 0;
    for (int64_t r = 0; r < x->rows; r++) {
        const query *q = b->row + x->r0 + r;
        int64_t first = HEED_MAX(q->first, x->n0), last = HEED_MIN(q->last, x->last);
        char *far = b->far + x->r0 + r;
        near[r] = first < last && !*far && are_near(b->q_square[x->r0 + r], reach_of(b, first, last), c);
        *far |= first < last && !near[r];
        count = (char)(count + *far);
    }
    b->far_rows[x->t] = count;
}

/* The softmax of a tile where that matters. */
static void near_softmax(forward_block *b, forward_tile *x)
{
    const float c = b->j->s_scale * LOG2E;
    float *m = b->m + x->r0;
    char near[TALL], *far = b->far_rows + x->t;
    if (b->none_near && x->all_first <= x->n0 && x->all_last > x->n0)
        *far = (char)x->rows;
    else if (*far < x->rows && !(*far == 0 && b->all_near))
        find_near_rows(b, x, near);
    if (*far == 0) {
        for (int64_t r = 0; r < x->rows; r++) {
            const query *q = b->row + x->r0 + r;
            m[r] = HEED_MAX(q->first, x->n0) < HEED_MIN(q->last, x->last) ? NEAR_M / c : m[r];
            x->keep[r] = 1;
        }
        weigh_tile(b->P, x->S, b->l + x->r0, x->keep, NULL, 1, NULL, x->rows, x->from, x->to, c, HEED_DOT, &b->next);
    } else
        softmax_tile(b->P, x->S, m, b->l + x->r0, x->keep, x->rows, x->from, x->to, c, HEED_DOT,
                     *far < x->rows ? near : NULL, &b->next);
}
