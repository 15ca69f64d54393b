/* From S and dP, the products of a tile of rows, to P and dS, which the other products need:
 *
 *     P = exp(S - lse)     dS = scale P (dP - delta)      zero where a row does not see the key
 *
 * As floats they take the place of S and dP. With HEED_DOT they become units (pack.h), three times: P and dS with rows in
 * pairs, for dV and dK, and dS with columns in pairs, for dQ. */

/* log2(P). S never exceeds the true lse, but it may exceed the rounded one, by much where both are huge. NaN stays. */
INLINE vec log2_weight(vec s, vec scale, vec minus_lse)
{
    return vec_mul(vec_min(vec_zero(), vec_fma(s, scale, minus_lse)), vec_set1(LOG2E));
}

/* Row r: from products s and ds to P and scale dS, columns [from, to), of which column 0 is key n0. In `bias`, where wanted:
 * dS before scale and softcap. */
static void gradient_row(backward_block *b, int64_t r, float *s, float *ds, int64_t n0, int64_t from, int64_t to,
                         int whole, float *bias)
{
    const job *j = &b->x->j;
    float slope[BC + W];
    int capped = j->p->a.softcap > 0;
    if (j->changes || !whole)
        adjust_row(j, &b->span, b->row[r], s, capped ? slope : NULL, n0, from, to);
    for (int64_t c = from; bias && c < to; c++)
        bias[c] = s[c];
    vec scale = vec_set1(j->changes ? 1 : j->s_scale);
    vec lse = vec_set1(-b->lse[r]), delta = vec_set1(b->delta[r]), ds_scale = vec_set1(bias ? 1 : j->p->a.scale);
    if (j->p->drop_below) {
        float keep[BC];
        keep_row(j, &b->span, b->row[r], keep, n0, from, to);
        for (int64_t c = from; c < to; c += W) {
            vec p = vec_exp2(log2_weight(vec_load(s + c), scale, lse)), k = vec_load(keep + c);
            vec_store(ds + c, vec_mul(vec_mul(p, ds_scale), vec_sub(vec_mul(vec_load(ds + c), k), delta)));
            vec_store(s + c, vec_mul(p, k));
        }
    } else
        for (int64_t c = from; c < to; c += W) {
            vec p = vec_exp2(log2_weight(vec_load(s + c), scale, lse));
            vec_store(ds + c, vec_mul(vec_mul(p, ds_scale), vec_sub(vec_load(ds + c), delta)));
            vec_store(s + c, p);
        }
    for (int64_t c = from; bias && c < to; c++)
        bias[c] = bias[c] == -INFINITY ? 0 : ds[c]; /* where P = 0, dS may be 0 * NaN */
    if (capped) {
        int64_t first = HEED_MAX(b->row[r].first - n0, from), last = HEED_MIN(b->row[r].last - n0, to);
        for (int64_t c = first; c < last; c++)
            ds[c] *= slope[c];
    }
}

#if HEED_SPLIT
/* A piece of the block, MR rows and PANEL keys, from products to planes of units. */
typedef struct piece {
    meanwhile work;
    backward_block *b;
    float *S, *dS; /* [MR][LDP]: S and dP, or if it is graded P and dS */
    int graded, whole;
    int64_t r0, rows, c, row;
} piece;

/* Planes of P and dS of rows r and r + W of a piece. */
INLINE void store_planes(const piece *u, int64_t r, vec P[2][2], vec dS[2][2])
{
    int64_t pair = (u->r0 / 2 + r) * LDZ;
    float *z = panel_at(u->b, u->b->Pz, u->c) + pair, *dz = panel_at(u->b, u->b->dSz, u->c) + pair;
    int64_t ldu = u->b->x->f.ldu;
    float *du = u->b->dSu + (u->r0 + r) * ldu + u->c / 2;
    each(h, 2)
        store_parts(z + h * W, PANEL, P[0][h], P[1][h]);
    vec x[2][2][PLANES];
    each(j, 2)
        each(h, 2)
            vec_parts(dS[j][h], x[j][h]);
    each(i, PLANES) {
        each(h, 2)
            vec_store(dz + i * PANEL + h * W, vec_join(x[0][h][i], x[1][h][i]));
        each(j, 2)
            vec_store(du + j * W * ldu + i * u->b->x->f.plane_u, vec_join(x[j][0][i], x[j][1][i]));
    }
}

/* -inf to what a row does not see of the piece's columns h W and on. */
INLINE vec hide_unseen(vec s, const piece *u, const query *q, int h)
{
    int64_t begin = u->b->n0 + u->c + h * W;
    vec lane = vec_load(lane_numbers), hidden = vec_set1(-INFINITY);
    s = vec_less(lane, vec_set1((float)(q->first - begin)), hidden, s);
    return vec_less(lane, vec_set1((float)(q->last - begin)), s, hidden);
}

/* Two rows. What gradient_row() does, where that was not called. */
static void grade(meanwhile *work)
{
    piece *u = (piece *)work;
    if (u->row >= W)
        return;
    const backward_block *b = u->b;
    const job *j = &b->x->j;
    vec P[2][2], dS[2][2], scale = vec_set1(j->s_scale), ds_scale = vec_set1(j->p->a.scale);
    each(i, 2) {
        int64_t r = HEED_MIN(u->row + i * W, u->rows - 1), at = r * LDP, row = u->r0 + r;
        vec lse = vec_set1(-b->lse[row]), delta = vec_set1(b->delta[row]);
        each(h, 2) {
            vec s = vec_load(u->S + at + h * W), d = vec_load(u->dS + at + h * W);
            if (u->graded)
                P[i][h] = s, dS[i][h] = d;
            else {
                P[i][h] = vec_exp2(log2_weight(u->whole ? s : hide_unseen(s, u, b->row + row, h), scale, lse));
                dS[i][h] = vec_mul(vec_mul(P[i][h], ds_scale), vec_sub(d, delta));
            }
            if (u->row + i * W >= u->rows)
                P[i][h] = dS[i][h] = vec_zero();
        }
    }
    store_planes(u, u->row, P, dS);
    u->row++;
}

/* S and dP of a piece, which are late unless scores change, and meanwhile P and dS of the one before. */
static void score_piece(piece *u, meanwhile *before, late_sums *late)
{
    backward_block *b = u->b;
    const job *j = &b->x->j;
    const heed_problem *p = j->p;
    int64_t ku = units_of(p->D) * PANEL, vu = units_of(p->Dv) * PANEL;
    right K = { b->Kt, PANEL, ku * PLANES, ku }, V = { b->Vt, PANEL, vu * PLANES, vu };
    ahead *next = b->next.count ? &b->next : NULL;
    multiply_panel(late, u->S, LDP, b->Q, right_from(K, 0, u->c), u->rows, ku / PANEL, before, next);
    multiply_panel(late, u->dS, LDP, b->dO, right_from(V, 0, u->c), u->rows, vu / PANEL, before, next);
    u->graded = j->changes || p->drop_below;
    if (u->graded)
        store_late(late);
    for (int64_t r = 0; r < u->rows && u->graded; r++)
        gradient_row(b, u->r0 + r, u->S + r * LDP, u->dS + r * LDP, b->n0 + u->c, 0, PANEL, u->whole, NULL);
}

static void finish_piece(piece *u)
{
    while (u->row < W)
        grade(&u->work);
}

/* Tile t of rows sees some keys of a panel. What lies between those that do is zero. */
static void note_seen(backward_block *b, int64_t c, int64_t t)
{
    tile_range *seen = b->seen + c / PANEL;
    if (seen->first > seen->last)
        seen->first = t;
    else
        for (int64_t r = (seen->last + 1) * W; r < t * W; r++) {
            memset(panel_at(b, b->Pz, c) + r * LDZ, 0, LDZ * sizeof(float));
            memset(panel_at(b, b->dSz, c) + r * LDZ, 0, LDZ * sizeof(float));
        }
    seen->last = t;
}

/* P and dS of the block, and which tiles of rows see each panel of keys. */
static void score_block(backward_block *b)
{
    const heed_problem *p = b->x->j.p;
    source q = rows_of(p, &b->span, &p->a.q, b->h, p->D), d_o = rows_of(p, &b->span, &p->g.d_o, b->h, p->Dv);
    piece pieces[2], *before = NULL;
    late_sums late = { .to = NULL };
    for (int64_t i = 0; i < BC / PANEL; i++)
        b->seen[i] = (tile_range){ 0, -1 };
    for (int64_t t = 0; t < b->tiles; t++) {
        int64_t r0 = tile_begin(b->rows, b->tiles, t), rows = tile_begin(b->rows, b->tiles, t + 1) - r0;
        int64_t first, last, all_first = b->n0, all_last = b->n1;
        int whole;
        if (!columns_seen(b, r0, rows, &first, &last, &whole))
            continue;
        for (int64_t r = r0; r < r0 + rows; r++)
            all_first = HEED_MAX(all_first, b->row[r].first), all_last = HEED_MIN(all_last, b->row[r].last);
        b->Q = left_rows(&q, b->i0 + r0, b->i0 + r0 + rows, b->Qu, b->x->f.ldq);
        b->dO = left_rows(&d_o, b->i0 + r0, b->i0 + r0 + rows, b->dOu, b->x->f.ldv);
        for (int64_t c = first / PANEL * PANEL; c < last; c += PANEL) {
            piece *u = before == pieces ? pieces + 1 : pieces;
            float *room = b->P + (u - pieces) * 2 * MR * LDP;
            *u = (piece){ .work = { grade }, .b = b, .S = room, .dS = room + MR * LDP, .r0 = r0, .rows = rows, .c = c };
            u->whole = all_first <= b->n0 + c && all_last >= b->n0 + c + PANEL;
            score_piece(u, before ? &before->work : NULL, &late);
            if (before)
                finish_piece(before);
            note_seen(b, c, t);
            before = u;
        }
    }
    store_late(&late);
    if (before)
        finish_piece(before);
}
#else
static void clear_outside(float *row, int64_t from, int64_t to, int64_t columns)
{
    if (from)
        memset(row, 0, (size_t)from * sizeof *row);
    if (to < columns)
        memset(row + to, 0, (size_t)(columns - to) * sizeof *row);
}

#if HEED_DOT
/* P and dS of rows r and r + 1 (where `rows` is 2), columns c .. c + 2 W, as units. */
INLINE void store_units(backward_block *b, int64_t r, const int rows, int64_t c, vec P[2][2], vec dS[2][2])
{
    vec p[2] = { vec_zero(), vec_zero() }, d[2] = { vec_zero(), vec_zero() };
    each(i, rows) {
        p[i] = vec_to_pairs(P[i][0], P[i][1]), d[i] = vec_to_pairs(dS[i][0], dS[i][1]);
        vec_store(b->dSu + (r + i) * LDU + c / 2, d[i]);
    }
    each(h, 2) {
        vec_store(b->Pz + r / 2 * LDS + c + h * W, vec_zip(p[0], p[1], h));
        vec_store(b->dSz + r / 2 * LDS + c + h * W, vec_zip(d[0], d[1], h));
    }
}

/* s, ds: of row r; the next follows LDS floats behind. */
INLINE void rows_to_units(backward_block *b, int64_t r, const int rows, const float *s, const float *ds,
                          int64_t columns)
{
    for (int64_t c = 0; c < columns; c += 2 * W) {
        vec P[2][2], dS[2][2];
        each(i, rows)
            each(h, 2) {
                int64_t at = i * LDS + c + h * W;
                P[i][h] = c + h * W < columns ? vec_load(s + at) : vec_zero();
                dS[i][h] = c + h * W < columns ? vec_load(ds + at) : vec_zero();
            }
        store_units(b, r, rows, c, P, dS);
    }
}

/* Plain attention, neither changed scores nor dropout, goes to units without a stop: up to UNIT_ROWS rows at a time. */
typedef struct unit_rows {
    float minus_lse[UNIT_ROWS], minus_delta[UNIT_ROWS]; /* times log2(e), and scale: bf16 does not feel the rounding */
    float first[UNIT_ROWS], last[UNIT_ROWS];            /* columns that a row sees, and ... */
    int64_t all_first, all_last;                        /* ... that all see */
} unit_rows;

static unit_rows unit_rows_of(const backward_block *b, int64_t r, int64_t rows, int64_t from, int64_t to)
{
    unit_rows x = { .all_first = from, .all_last = to };
    for (int64_t i = 0; i < rows; i++) {
        query q = b->row[r + i];
        float l = b->lse[r + i] * LOG2E;
        x.minus_lse[i] = l > FLT_MAX ? -FLT_MAX : -l; /* a larger S then has P = 1 */
        x.minus_delta[i] = -b->delta[r + i] * b->x->j.p->a.scale;
        int64_t first = HEED_MIN(HEED_MAX(q.first - b->n0, 0), BC), last = HEED_MIN(HEED_MAX(q.last - b->n0, 0), BC);
        x.first[i] = (float)first, x.last[i] = (float)last;
        x.all_first = HEED_MAX(x.all_first, first), x.all_last = HEED_MIN(x.all_last, last);
    }
    return x;
}

/* Rows r + i and, where `rows` is 2, r + i + 1; columns [c, c + N W), of which S and dP are given. */
INLINE void pair_to_units(const int rows, const int N, backward_block *b, int64_t r, int64_t i, int64_t c,
                          const unit_rows *x, vec S[2][NR], vec dP[2][NR])
{
    vec to_log2 = vec_set1(b->x->j.s_scale * LOG2E), scale = vec_set1(b->x->j.p->a.scale);
    vec P[2][2] = { { vec_zero(), vec_zero() }, { vec_zero(), vec_zero() } };
    vec dS[2][2] = { { vec_zero(), vec_zero() }, { vec_zero(), vec_zero() } };
    vec weights[4];
    each(j, rows)
        each(h, N)
            weights[j * N + h] = vec_min(vec_zero(), vec_fma(S[j][h], to_log2, vec_set1(x->minus_lse[i + j])));
    vec_exp2_of(rows * N, weights, 3);
    each(j, rows)
        each(h, N) {
            P[j][h] = weights[j * N + h];
            dS[j][h] = vec_mul(P[j][h], vec_fma(dP[j][h], scale, vec_set1(x->minus_delta[i + j])));
        }
    store_units(b, r + i, rows, c, P, dS);
}

/* -inf to columns [c, c + W) that row i does not see. */
INLINE vec hide_unseen(vec s, int64_t c, const unit_rows *x, int64_t i)
{
    vec column = vec_add(vec_load(lane_numbers), vec_set1((float)c)), hidden = vec_set1(-INFINITY);
    s = vec_less(column, vec_set1(x->first[i]), hidden, s);
    return vec_less(column, vec_set1(x->last[i]), s, hidden);
}

#if HEED_AMX
/* Rows [r, r + rows), the first of which has its products at s and ds. */
static void gradient_units(backward_block *b, int64_t r, int64_t rows, const float *s, const float *ds, int64_t from,
                           int64_t to)
{
    unit_rows x = unit_rows_of(b, r, rows, from, to);
    for (int64_t i = 0; i < rows; i += 2) {
        ask(&b->next);
        for (int64_t c = from; c < to; c += 2 * W) {
            vec S[2][NR], dP[2][NR];
            for (int j = 0; j < 2; j++)
                each(h, 2) {
                    int64_t row = HEED_MIN(i + j, rows - 1), at = row * LDS + c + h * W;
                    S[j][h] = vec_load(s + at), dP[j][h] = vec_load(ds + at);
                    if (c < x.all_first || c + 2 * W > x.all_last)
                        S[j][h] = hide_unseen(S[j][h], c + h * W, &x, row);
                }
            if (i + 1 < rows)
                pair_to_units(2, 2, b, r, i, c, &x, S, dP);
            else
                pair_to_units(1, 2, b, r, i, c, &x, S, dP);
        }
    }
}
#else
/* Rows [r, r + R), columns [c, c + N W): S and dP stay in registers. */
INLINE void gradient_panel(const int R, const int N, backward_block *b, int64_t r, int64_t c, const unit_rows *x)
{
    const heed_problem *p = b->x->j.p;
    int64_t D = (p->D + 1) / 2, Dv = (p->Dv + 1) / 2;
    const float *K = b->Kt + c / PANEL * units_of(p->D) * PANEL, *V = b->Vt + c / PANEL * units_of(p->Dv) * PANEL;
    const float *Q = b->Q.data + r * b->Q.ld, *dO = b->dO.data + r * b->dO.ld;
    vec S[MR][NR], dP[MR][NR];
    sum_first(R, N, 0, S, Q, b->Q.ld, K);
    sum_first(R, N, 0, dP, dO, b->dO.ld, V);
    int64_t both = HEED_MIN(D, Dv);
    for (int64_t k = 1; k < both; k++) { /* together: one alone has too few sums for what a dot product waits */
        sum_more(R, N, 0, S, Q + k, b->Q.ld, K + k * PANEL, PANEL, 1);
        sum_more(R, N, 0, dP, dO + k, b->dO.ld, V + k * PANEL, PANEL, 1);
    }
    sum_more(R, N, 0, S, Q + both, b->Q.ld, K + both * PANEL, PANEL, D - both);
    sum_more(R, N, 0, dP, dO + both, b->dO.ld, V + both * PANEL, PANEL, Dv - both);
    if (c < x->all_first || c + N * W > x->all_last)
        each(i, R)
            each(h, N)
                S[i][h] = hide_unseen(S[i][h], c + h * W, x, i);
    each(pair, (R + 1) / 2)
        pair_to_units(R - 2 * pair < 2 ? 1 : 2, N, b, r, 2 * pair, c, x, S + 2 * pair, dP + 2 * pair);
}

INLINE void gradient_tile(const int R, backward_block *b, int64_t r, int64_t from, int64_t to)
{
    unit_rows x = unit_rows_of(b, r, R, from, to);
    int64_t c = from, asked = 0;
    for (; c + W < to; c += 2 * W) {
        if (asked++ < (R + 1) / 2)
            ask(&b->next);
        gradient_panel(R, 2, b, r, c, &x);
    }
    if (c < to)
        gradient_panel(R, 1, b, r, c, &x);
    for (; asked < (R + 1) / 2; asked++)
        ask(&b->next);
}

typedef void gradient_fn(backward_block *b, int64_t r, int64_t from, int64_t to);

#define GRADIENT(R)                                                                                                    \
    static void gradient_##R(backward_block *b, int64_t r, int64_t from, int64_t to)                                   \
    {                                                                                                                  \
        gradient_tile(R, b, r, from, to);                                                                              \
    }
#define GRADIENT_NAME(R) gradient_##R,
#define EACH_UNIT_ROW(X) X(1) X(2) X(3) X(4) X(5) X(6)
EACH_UNIT_ROW(GRADIENT)
static gradient_fn *const gradients[UNIT_ROWS] = { EACH_UNIT_ROW(GRADIENT_NAME) };
#endif

/* Units of rows [r, r + rows) outside columns [from, to). */
static void clear_units(backward_block *b, int64_t r, int64_t rows, int64_t from, int64_t to, int64_t columns)
{
    for (int64_t i = r; i < r + rows; i++) {
        clear_outside(b->dSu + i * LDU, from / 2, (to + 1) / 2, (columns + 1) / 2);
        if (i % 2)
            continue;
        clear_outside(b->Pz + i / 2 * LDS, from, to, columns);
        clear_outside(b->dSz + i / 2 * LDS, from, to, columns);
    }
}
#endif

/* P and dS of tile t of the block. */
static void score_rows(backward_block *b, int64_t t, float *bias)
{
    const job *j = &b->x->j;
    const heed_problem *p = j->p;
    int64_t r0 = tile_begin(b->rows, b->score_tiles, t), rows = tile_begin(b->rows, b->score_tiles, t + 1) - r0;
    int64_t first, last, from = 0, to = 0, columns = round_up(b->n1 - b->n0, W);
    float *S = b->P + (HEED_DOT ? 0 : r0 * LDS), *dS = b->dS + (HEED_DOT ? 0 : r0 * LDS);
    int whole, seen = columns_seen(b, r0, rows, &first, &last, &whole);
    if (seen)
        from = first / PANEL * PANEL, to = round_up(last, W);
#if HEED_DOT && !HEED_AMX
    if (PLAIN_UNITS(j)) {
        if (seen)
            gradients[rows - 1](b, r0, from, to);
        clear_units(b, r0, rows, from, to, columns);
        return;
    }
#endif
    if (seen) {
        int64_t ku = units_of(p->D) * PANEL, vu = units_of(p->Dv) * PANEL, vecs = (to - from) / W;
        right K = { b->Kt, PANEL, ku * PLANES, ku }, V = { b->Vt, PANEL, vu * PLANES, vu };
        multiply_scores(S + from, left_from(b->Q, r0, 0), right_from(K, 0, from), rows, vecs,
                        (p->D + PER_UNIT - 1) / PER_UNIT, NULL);
        multiply_scores(dS + from, left_from(b->dO, r0, 0), right_from(V, 0, from), rows, vecs,
                        (p->Dv + PER_UNIT - 1) / PER_UNIT, NULL);
    }
#if HEED_AMX
    if (PLAIN_UNITS(j)) {
        if (seen)
            gradient_units(b, r0, rows, S, dS, from, to);
        clear_units(b, r0, rows, from, to, columns);
        return;
    }
#endif
    for (int64_t r = 0; r < rows; r += PER_UNIT) {
        int64_t n = HEED_MIN(PER_UNIT, rows - r);
        ask(&b->next);
        for (int64_t i = r; i < r + n; i++) {
            if (seen)
                gradient_row(b, r0 + i, S + i * LDS, dS + i * LDS, b->n0, from, to, whole,
                             bias ? bias + (r0 + i) * LDS : NULL);
            clear_outside(S + i * LDS, from, to, columns);
            clear_outside(dS + i * LDS, from, to, columns);
        }
#if HEED_DOT
        if (n == 2)
            rows_to_units(b, r0 + r, 2, S + r * LDS, dS + r * LDS, columns);
        else
            rows_to_units(b, r0 + r, 1, S + r * LDS, dS + r * LDS, columns);
#endif
    }
}

/* P and dS of the block. */
static void score_block(backward_block *b)
{
    for (int64_t t = 0; t < b->score_tiles; t++)
        score_rows(b, t, NULL);
}
#endif
