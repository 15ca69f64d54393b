/* Rows that are near keys (softmax.h): the forward of bf16 by products of pairs. */

/* Whether sums of the weights of near rows, from 2^-49 to 2^32, times n of these bf16 stay within the range of floats. */
static int has_moderate(const uint16_t *v, int64_t n)
{
    uint16_t top = 0, least = UINT16_MAX; /* magnitudes as bits; the least but for zeros, less one */
    for (int64_t i = 0; i < n; i++) {
        uint16_t x = v[i] & 0x7FFF, less = (uint16_t)(x - 1);
        top = top > x ? top : x;
        least = least < less ? least : less;
    }
    return top <= MODERATE_MOST && least >= MODERATE_LEAST - 1;
}

/* The reach of keys [first, last), which are packed: infinite for those whose values are not moderate. */
static void find_reach(forward_block *b, const source *v, int64_t first, int64_t last)
{
    uint32_t top = 0, square; /* as bits, of which those of a NaN are the largest */
    for (int64_t n = first; n < last; n += W) {
        const float *units = right_from(b->K, 0, n / PANEL * PANEL).data + n % PANEL;
        vec sum[4] = { vec_zero(), vec_zero(), vec_zero(), vec_zero() };
        for (int64_t u = 0; u < units_of(b->j->p->D); u += 4)
            each(i, 4) {
                vec k = vec_load(units + (u + i) * PANEL);
                sum[i] = vec_dot(k, k, sum[i]);
            }
        vec_store(b->reach + n, vec_add(vec_add(sum[0], sum[1]), vec_add(sum[2], sum[3])));
    }
    for (int64_t n = first; n < last; n++) {
        if (!has_moderate((const uint16_t *)(const void *)source_row(v, n), v->dim))
            b->reach[n] = INFINITY;
        memcpy(&square, b->reach + n, sizeof square);
        top = n % BC && top > square ? top : square;
        memcpy(b->reach + n, &top, sizeof top);
    }
}

static void square_rows(forward_block *b)
{
    for (int64_t r = 0; r < b->rows; r += 4) {
        const void *rows[4];
        each(i, 4)
            rows[i] = b->Q.data + HEED_MIN(r + i, b->rows - 1) * b->Q.ld;
        dot4_as(HEED_BF16, rows, rows, b->j->p->D, b->q_square + r);
    }
    vec_store(b->q_square + b->rows, vec_zero());
    for (int64_t t = 0; t < b->tiles; t++) { /* and a few rows of the next one, whose squares may well be here, too */
        int64_t r = tile_begin(b->rows, b->tiles, t), end = tile_begin(b->rows, b->tiles, t + 1);
        vec top = vec_zero(), low = vec_set1(INFINITY);
        for (; r < end; r += W) {
            vec x = vec_load(b->q_square + r);
            top = vec_larger(top, x), low = vec_min(low, vec_max(x, vec_zero())); /* 0 for a NaN */
        }
        b->tile_square[t] = vec_largest(top);
        b->tile_least[t] = vec_least(low);
    }
}

/* Whether |q|^2 and |k|^2 are those of near rows. Squares beyond 2^60 are none, as 2^-60 may be lost in the other one. */
static inline int are_near(float q_square, float reach, float c)
{
    return q_square <= 0x1p60f && reach <= 0x1p60f && q_square * reach * (c * c) <= NEAR * NEAR;
}

/* Whether all rows of a tile are near its block of keys. */
static int tile_is_near(const forward_block *b, const forward_tile *x)
{
    return x->all_first <= x->n0 && are_near(b->tile_square[x->t], b->reach[x->last - 1], b->j->s_scale * LOG2E);
}

/* Which are, if any. No key that a row does not see decides about it, nor does another row. */
static int find_near_rows(const forward_block *b, const forward_tile *x, char near[MR])
{
    const float c = b->j->s_scale * LOG2E;
    int any = 0;
    memset(near, 0, MR);
    for (int64_t r = 0; r < x->rows && are_near(b->tile_least[x->t], b->reach[x->n0], c); r++) {
        const query *q = b->row + x->r0 + r;
        int64_t last = HEED_MIN(q->last, x->last);
        float m = b->m[x->r0 + r];
        near[r] = q->first <= x->n0 && last > x->n0 && are_near(b->q_square[x->r0 + r], b->reach[last - 1], c) &&
                  (m == -INFINITY || fabsf(m) * c <= NEAR);
        any |= near[r];
    }
    return any;
}

/* The softmax of a tile where that matters. */
static void near_softmax(forward_block *b, forward_tile *x)
{
    const float c = b->j->s_scale * LOG2E;
    float *m = b->m + x->r0;
    char near[MR];
    if (tile_is_near(b, x)) {
        for (int64_t r = 0; r < x->rows; r++) {
            m[r] = b->row[x->r0 + r].last > x->n0 ? NEAR_M / c : m[r];
            x->keep[r] = 1;
        }
        b->met_near[x->t] = 1;
        weigh_tile(b->P, x->S, b->l + x->r0, x->keep, NULL, 1, 1, x->rows, x->from, x->to, c, 1, &b->next);
        return;
    }
    b->met_near[x->t] |= (char)find_near_rows(b, x, near);
    b->tile_square[x->t] = NAN;
    softmax_tile(b->P, x->S, m, b->l + x->r0, x->keep, x->rows, x->from, x->to, c, 1, b->met_near[x->t] ? near : NULL,
                 &b->next);
}
