/* Backward attention on the CPU. P is computed again from Q, K and lse. An item of work is a block of KB keys of one key
 * head, which owns its rows of dK and dV; it walks over the blocks of BQ rows of all query heads of the group:
 *
 *     S = Q K^T   dP = dO V^T   P = exp(S - lse)   dS = scale P (dP - delta)      tile by tile, while they are hot
 *     dV += P^T dO   dK += dS^T Q   dQ += dS K
 *
 * Floats are read, and sums kept, where they lie in the caller's tensors if rows are whole vectors; only K^T and V^T
 * are packed then.
 *
 * dQ of a block of rows is summed over the blocks of keys in ascending order: each block of rows has a turn counter, and
 * an item waits until the blocks before its own have added theirs. Items are handed out in that order, so the one that
 * is waited for is always running, and each follows the one before it at a distance of one block of rows. The sums are
 * thus the same for any number of threads. */

#include <sched.h>
#include <stdatomic.h>

#define BQ (140 / MR * MR) /* rows in a block, at most; even */
#define LDB (BC + 16)      /* floats from row to row of P and dS */

typedef struct backward_layout {
    int64_t keys, key_block, key_blocks;
    int64_t block, row_blocks; /* rows in a block: even, as they may be paired, and whole tiles if there are several */
    int q_in_place, o_in_place, k_in_place, dq_in_place, dk_in_place, dv_in_place;
    int64_t ldq, ldv;            /* units in a row of Q; of dO */
    int64_t wide, wide_v;        /* columns of D and Dv, padded */
    size_t delta, turns, bounds; /* [B][Hq][Sq]; [B][Hq][row_blocks]; [B][row_blocks] */
    size_t dq;                   /* [B][Hq][Sq][wide] */
    size_t scratch, scratch_stride;
    size_t bias; /* dS before the softcap, of one thread: [BQ][LDB], for d_bias only */
    size_t kt, vt, ks, dk, dv, q, d_o, qs, dos, p, ds, pz, dsz; /* inside scratch */
    size_t bytes;
} backward_layout;

/* Keys [first, last) that some row of a block may see, as blocks of keys; and whether the rows hold NaN or infinity. */
typedef struct row_bounds {
    int32_t first, last;
} row_bounds;

typedef struct backward_run {
    job j;
    backward_layout f;
} backward_run;

static backward_layout backward_lay_out(const heed_problem *p, const heed_plan *plan)
{
    backward_layout f = { .keys = p->Sk };
    if (p->a.align != HEED_ALIGN_POSITION)
        f.keys = p->Sk / p->a.key_stride + (p->Sk % p->a.key_stride != 0);
    f.key_block = BC;
    f.key_blocks = (f.keys + f.key_block - 1) / f.key_block;
    f.row_blocks = (p->Sq + BQ - 1) / BQ;
    f.block = f.row_blocks ? round_up((p->Sq + f.row_blocks - 1) / f.row_blocks, f.row_blocks > 1 ? MR : 2) : 0;
    f.q_in_place = usable_in_place(p, &p->a.q, p->D), f.o_in_place = usable_in_place(p, &p->g.d_o, p->Dv);
    f.k_in_place = usable_in_place(p, &p->a.k, p->D);
    int sums_in_place = !p->g.accumulate; /* else each call adds its sum once: one rounding, not one for each product */
    f.dq_in_place = sums_in_place && p->g.d_q.data && usable_in_place(p, &p->g.d_q, p->D);
    f.dk_in_place = sums_in_place && p->g.d_k.data && usable_in_place(p, &p->g.d_k, p->D);
    f.dv_in_place = sums_in_place && p->g.d_v.data && usable_in_place(p, &p->g.d_v, p->Dv);
    f.wide = round_up(p->D, W), f.wide_v = round_up(p->Dv, W);
    f.ldq = units_of(p->D) + W, f.ldv = units_of(p->Dv) + W;

    size_t used = 0, s = 0;
    f.delta = take(&used, p->B * p->Hq * p->Sq);
    f.turns = take(&used, p->B * p->Hq * f.row_blocks);
    f.bounds = take(&used, p->B * f.row_blocks * (int64_t)(sizeof(row_bounds) / sizeof(float)));
    f.dq = used;
    if (p->g.d_q.data && !f.dq_in_place)
        take(&used, p->B * p->Hq * p->Sq * f.wide);

    f.bias = used;
    if (p->g.d_bias.data)
        take(&used, plan->threads * BQ * LDB);

    int64_t kb = f.key_block;
    f.kt = take(&s, panels_size(kb, p->D)), f.vt = take(&s, panels_size(kb, p->Dv));
    f.ks = take(&s, kb / PER_UNIT * f.wide);
    f.dk = take(&s, kb * f.wide), f.dv = take(&s, kb * f.wide_v);
    f.q = take(&s, f.block * f.ldq), f.d_o = take(&s, f.block * f.ldv);
    f.p = take(&s, f.block * LDB), f.ds = take(&s, f.block * LDB);
    f.qs = take(&s, f.block * f.wide), f.dos = take(&s, f.block * f.wide_v);
#if HEED_DOT
    f.pz = take(&s, (f.block + 1) / 2 * LDB), f.dsz = take(&s, (f.block + 1) / 2 * LDB);
#endif
    f.scratch = used, f.scratch_stride = s;
    f.bytes = used + s * (size_t)plan->threads;
    return f;
}

/* A block of keys and a block of rows, and what is known about both. */
typedef struct backward_block {
    const backward_run *x;
    heed_span span;
    int64_t hk, n0, n1; /* keys */
    int64_t h, i0, rows, tiles;
    int finite, keys_finite;
    query row[BQ];
    float lse[BQ], delta[BQ];
    left Q, dO;
    right Q_rows, dO_rows, K_rows; /* as right factors */
    float *dK, *dV, *dQ;           /* sums, from key n0 and row i0 on */
    int64_t ld_dk, ld_dv, ld_dq;
    float *P, *dS;
    float *Kt, *Vt, *Ks, *dKs, *dVs, *Qu, *dOu, *Qs, *dOs, *Pz, *dSz; /* room for what cannot be used in place */
} backward_block;

static int rows_are_finite(const source *x, int64_t first, int64_t last)
{
    for (int64_t n = first; n < last; n++)
        if (!row_is_finite(x->t->dtype, source_row(x, n), x->t->stride[3], x->dim))
            return 0;
    return 1;
}

static void load_keys(backward_block *b, int64_t n0, int64_t n1)
{
    const heed_problem *p = b->x->j.p;
    source k = keys_of(p, &b->span, &p->a.k, b->hk, p->D), v = keys_of(p, &b->span, &p->a.v, b->hk, p->Dv);
    b->n0 = n0, b->n1 = n1;
    pack_panels(b->Kt - n0 / PANEL * PANEL * units_of(p->D), &k, n0, n1, b->x->j.k_scale);
    pack_panels(b->Vt - n0 / PANEL * PANEL * units_of(p->Dv), &v, n0, n1, 1);
    b->K_rows = right_rows(&k, n0, n1, b->Ks, b->x->f.wide, b->x->f.k_in_place);
    b->keys_finite = !b->x->j.partial || (rows_are_finite(&k, n0, n1) && rows_are_finite(&v, n0, n1));
}

static void load_rows(backward_block *b, int64_t h, int64_t i0)
{
    const heed_problem *p = b->x->j.p;
    const heed_tensor *lse = &p->a.lse;
    source q = rows_of(p, &b->span, &p->a.q, h, p->D), d_o = rows_of(p, &b->span, &p->g.d_o, h, p->Dv);
    const float *delta = at_bytes(&b->x->j, b->x->f.delta) + (b->span.b * p->Hq + h) * p->Sq + i0;
    b->h = h, b->i0 = i0;
    b->rows = HEED_MIN(b->x->f.block, b->span.rows - i0);
    b->tiles = tile_count(b->rows);
    b->finite = 1;
    for (int64_t r = 0; r < b->rows; r++) {
        int64_t i = i0 + r;
        b->row[r] = query_at(p, &b->span, h, i);
        b->lse[r] = ((const float *)lse->data)[b->span.q_batch * lse->stride[0] + h * lse->stride[1] +
                                               (b->span.q_row + i) * lse->stride[2]];
        b->delta[r] = delta[r];
        if (b->lse[r] == -INFINITY) /* saw no key: P = 0 */
            b->lse[r] = INFINITY, b->row[r].last = b->row[r].first;
        else if (b->lse[r] - b->lse[r] != 0 || b->delta[r] - b->delta[r] != 0)
            b->finite = 0;
    }
    b->Q = left_rows(&q, i0, i0 + b->rows, b->Qu, b->x->f.ldq);
    b->dO = left_rows(&d_o, i0, i0 + b->rows, b->dOu, b->x->f.ldv);
    b->Q_rows = right_rows(&q, i0, i0 + b->rows, b->Qs, b->x->f.wide, b->x->f.q_in_place);
    b->dO_rows = right_rows(&d_o, i0, i0 + b->rows, b->dOs, b->x->f.wide_v, b->x->f.o_in_place);
    if (b->x->j.partial && b->finite)
        b->finite = rows_are_finite(&q, i0, i0 + b->rows) && rows_are_finite(&d_o, i0, i0 + b->rows);
}

/* log2(P). S never exceeds the true lse, but it may exceed the rounded one, by much where both are huge. NaN stays. */
INLINE vec log2_weight(vec s, vec scale, vec minus_lse)
{
    return vec_mul(vec_min(vec_zero(), vec_fma(s, scale, minus_lse)), vec_set1(LOG2E));
}

/* Row r: from products S and dP to P and scale dS, columns [from, to). In `bias`, where wanted: dS before scale and
 * softcap. */
static void gradient_row(backward_block *b, int64_t r, int64_t from, int64_t to, int whole, float *bias)
{
    const job *j = &b->x->j;
    float *s = b->P + r * LDB, *ds = b->dS + r * LDB, slope[BC + W];
    int capped = j->p->a.softcap > 0;
    if (j->changes || !whole)
        adjust_row(j, &b->span, b->row[r], s, capped ? slope : NULL, b->n0, from, to);
    char hidden[BC];
    for (int64_t c = from; bias && c < to; c++)
        hidden[c] = s[c] == -INFINITY;
    vec scale = vec_set1(j->changes ? 1 : j->s_scale);
    vec lse = vec_set1(-b->lse[r]), delta = vec_set1(b->delta[r]), ds_scale = vec_set1(bias ? 1 : j->p->a.scale);
    if (j->p->drop_below) {
        float keep[BC];
        keep_row(j, &b->span, b->row[r], keep, b->n0, from, to);
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
        bias[c] = hidden[c] ? 0 : ds[c]; /* where P = 0, dS may be 0 * NaN */
    if (capped) {
        int64_t first = HEED_MAX(b->row[r].first - b->n0, from), last = HEED_MIN(b->row[r].last - b->n0, to);
        for (int64_t c = first; c < last; c++)
            ds[c] *= slope[c];
    }
}

/* The columns of the block of keys that rows [r0, r0 + rows) see between them; 0 when there are none. */
static int columns_seen(const backward_block *b, int64_t r0, int64_t rows, int64_t *first, int64_t *last, int *whole)
{
    int64_t n0 = b->n0, n1 = b->n1, all_first = n0, all_last = n1;
    *first = n1, *last = n0;
    for (int64_t r = r0; r < r0 + rows; r++) {
        query q = b->row[r];
        if (q.first < q.last)
            *first = HEED_MIN(*first, q.first), *last = HEED_MAX(*last, q.last);
        all_first = HEED_MAX(all_first, q.first), all_last = HEED_MIN(all_last, q.last);
    }
    *first = HEED_MAX(*first, n0) - n0, *last = HEED_MIN(*last, n1) - n0;
    *whole = all_first <= n0 + *first / PANEL * PANEL && all_last >= n0 + round_up(*last, W);
    return *first < *last;
}

/* P and dS of the block, zero where a row sees nothing. */
static void score_rows(backward_block *b, int64_t t, float *bias)
{
    const heed_problem *p = b->x->j.p;
    int64_t r0 = tile_begin(b->rows, b->tiles, t), rows = tile_begin(b->rows, b->tiles, t + 1) - r0;
    int64_t first, last, from = 0, to = 0, columns = round_up(b->n1 - b->n0, W);
    int whole;
    if (columns_seen(b, r0, rows, &first, &last, &whole)) {
        from = first / PANEL * PANEL, to = round_up(last, W);
        int64_t ku = units_of(p->D) * PANEL, vu = units_of(p->Dv) * PANEL, vecs = (to - from) / W;
        multiply(b->P + r0 * LDB + from, LDB, (left){ b->Q.data + r0 * b->Q.ld, b->Q.ld, 0 },
                 (right){ b->Kt + from / PANEL * ku, PANEL, ku }, rows, vecs, (p->D + PER_UNIT - 1) / PER_UNIT, NULL);
        multiply(b->dS + r0 * LDB + from, LDB, (left){ b->dO.data + r0 * b->dO.ld, b->dO.ld, 0 },
                 (right){ b->Vt + from / PANEL * vu, PANEL, vu }, rows, vecs, (p->Dv + PER_UNIT - 1) / PER_UNIT, NULL);
    }
    for (int64_t r = r0; r < r0 + rows; r++) {
        float *P = b->P + r * LDB, *dS = b->dS + r * LDB;
        if (from < to)
            gradient_row(b, r, from, to, whole, bias ? bias + r * LDB : NULL);
        memset(P, 0, (size_t)from * sizeof *P), memset(dS, 0, (size_t)from * sizeof *dS);
        if (to < columns) {
            memset(P + to, 0, (size_t)(columns - to) * sizeof *P);
            memset(dS + to, 0, (size_t)(columns - to) * sizeof *dS);
        }
    }
}

#if HEED_DOT
/* P and dS as the units that the products need: rows paired for the transposed factors, columns paired for dQ. */
static void weights_to_units(backward_block *b)
{
    int64_t columns = round_up(b->n1 - b->n0, W);
    for (int64_t r = 0; r < b->rows; r += 2) {
        float *p0 = b->P + r * LDB, *d0 = b->dS + r * LDB;
        int pair = r + 1 < b->rows;
        for (int64_t c = 0; c < columns; c += W) {
            vec p1 = pair ? vec_load(p0 + LDB + c) : vec_zero(), d1 = pair ? vec_load(d0 + LDB + c) : vec_zero();
            vec_store(b->Pz + r / 2 * LDB + c, vec_zip_bf16(vec_load(p0 + c), p1));
            vec_store(b->dSz + r / 2 * LDB + c, vec_zip_bf16(vec_load(d0 + c), d1));
        }
        for (int64_t k = 0; k < 1 + pair; k++)
            for (int64_t c = 0; c < columns; c += 2 * W) {
                float *d = d0 + k * LDB;
                vec_store_bf16_pair((uint16_t *)d + c, vec_load(d + c),
                                    c + W < columns ? vec_load(d + c + W) : vec_zero());
            }
    }
}
#endif

/* dV += P^T dO and dK += dS^T Q, MR keys at a time, over the rows that see them. */
static void add_to_keys(backward_block *b)
{
    const backward_layout *f = &b->x->f;
    const float *P = HEED_DOT ? b->Pz : b->P, *dS = HEED_DOT ? b->dSz : b->dS;
    int64_t keys = b->n1 - b->n0, count = tile_count(keys);
    right Q = b->Q_rows, dO = b->dO_rows;
    for (int64_t t = 0; t < count; t++) {
        int64_t c = tile_begin(keys, count, t), R = tile_begin(keys, count, t + 1) - c, first = 0, last = b->rows;
        while (first < last && (b->row[first].last <= b->n0 + c || b->row[first].first >= b->n0 + c + R))
            first++;
        while (last > first && (b->row[last - 1].last <= b->n0 + c || b->row[last - 1].first >= b->n0 + c + R))
            last--;
        int64_t k = first / PER_UNIT, units = (last + PER_UNIT - 1) / PER_UNIT - k;
        if (units <= 0)
            continue;
        multiply(b->dV + c * b->ld_dv, b->ld_dv, (left){ P + k * LDB + c, LDB, 1 },
                 (right){ dO.data + k * dO.ld, dO.ld, dO.next }, R, f->wide_v / W, units, keep_all);
        multiply(b->dK + c * b->ld_dk, b->ld_dk, (left){ dS + k * LDB + c, LDB, 1 },
                 (right){ Q.data + k * Q.ld, Q.ld, Q.next }, R, f->wide / W, units, keep_all);
    }
}

/* dQ = dS K, or dQ += dS K. */
static void add_to_rows(backward_block *b, int add)
{
    const backward_layout *f = &b->x->f;
    for (int64_t t = 0; t < b->tiles; t++) {
        int64_t r0 = tile_begin(b->rows, b->tiles, t), rows = tile_begin(b->rows, b->tiles, t + 1) - r0, first, last;
        int whole;
        if (columns_seen(b, r0, rows, &first, &last, &whole)) {
            int64_t k = first / PER_UNIT;
            multiply(b->dQ + r0 * b->ld_dq, b->ld_dq, (left){ b->dS + r0 * LDB + k, LDB, 0 },
                     (right){ b->K_rows.data + k * b->K_rows.ld, b->K_rows.ld, PANEL }, rows, f->wide / W,
                     (last + PER_UNIT - 1) / PER_UNIT - k, add ? keep_all : NULL);
        } else if (!add)
            for (int64_t r = r0; r < r0 + rows; r++)
                memset(b->dQ + r * b->ld_dq, 0, (size_t)f->wide * sizeof(float));
    }
}

/* The same for a block in which something is not finite and not every row sees every key: pair by pair, so that a NaN
 * reaches only what depends on it. Slow, and rare. */
static void add_seen_pairs(backward_block *b, int add)
{
    const job *j = &b->x->j;
    const heed_problem *p = j->p;
    float q[HEED_MAX_HEAD_DIM], d_o[HEED_MAX_HEAD_DIM], k[HEED_MAX_HEAD_DIM], v[HEED_MAX_HEAD_DIM];
    source qs = rows_of(p, &b->span, &p->a.q, b->h, p->D), os = rows_of(p, &b->span, &p->g.d_o, b->h, p->Dv);
    source ks = keys_of(p, &b->span, &p->a.k, b->hk, p->D), vs = keys_of(p, &b->span, &p->a.v, b->hk, p->Dv);
    for (int64_t r = 0; r < b->rows; r++) {
        int64_t first = HEED_MAX(b->row[r].first, b->n0), last = HEED_MIN(b->row[r].last, b->n1);
        float *dQ = b->dQ ? b->dQ + r * b->ld_dq : NULL;
        if (dQ && !add)
            memset(dQ, 0, (size_t)b->x->f.wide * sizeof(float));
        load_row(q, qs.t->dtype, source_row(&qs, b->i0 + r), qs.t->stride[3], p->D, p->D);
        load_row(d_o, os.t->dtype, source_row(&os, b->i0 + r), os.t->stride[3], p->Dv, p->Dv);
        for (int64_t n = first; n < last; n++) {
            float s[BC] = { 0 }, slope[BC + W], keep[BC], dp = 0; /* one column of a block that begins at key n */
            load_row(k, ks.t->dtype, source_row(&ks, n), ks.t->stride[3], p->D, p->D);
            load_row(v, vs.t->dtype, source_row(&vs, n), vs.t->stride[3], p->Dv, p->Dv);
            for (int64_t d = 0; d < p->D; d++)
                s[0] += q[d] * k[d];
            for (int64_t d = 0; d < p->Dv; d++)
                dp += d_o[d] * v[d];
            s[0] *= j->changes ? p->a.scale / j->s_scale : p->a.scale; /* adjust_row() multiplies by s_scale */
            adjust_row(j, &b->span, b->row[r], s, slope, n, 0, 1);
            if (s[0] == -INFINITY)
                continue;
            keep[0] = 1;
            if (p->drop_below)
                keep_row(j, &b->span, b->row[r], keep, n, 0, 1);
            float P = s[0] > b->lse[r] ? 1 : expf(s[0] - b->lse[r]), dS = p->a.scale * P * (dp * keep[0] - b->delta[r]);
            if (p->a.softcap > 0)
                dS *= slope[0];
            for (int64_t d = 0; d < p->Dv; d++)
                b->dV[(n - b->n0) * b->ld_dv + d] += P * keep[0] * d_o[d];
            for (int64_t d = 0; d < p->D; d++) {
                b->dK[(n - b->n0) * b->ld_dk + d] += dS * q[d];
                if (dQ)
                    dQ[d] += dS * k[d];
            }
        }
    }
}

/* ---- The items of work ------------------------------------------------------------------------------------------ */

static _Atomic int32_t *turn_of(const backward_run *x, int64_t b, int64_t h, int64_t block)
{
    return (_Atomic int32_t *)(void *)at_bytes(&x->j, x->f.turns) + (b * x->j.p->Hq + h) * x->f.row_blocks + block;
}

static row_bounds *bounds_of(const backward_run *x, int64_t b, int64_t block)
{
    return (row_bounds *)(void *)at_bytes(&x->j, x->f.bounds) + b * x->f.row_blocks + block;
}

/* Writes n rows of sums as rows first, first + 1, ... of head h of a result; sums == NULL: zeros. With `add` the result
 * is fp32 and they are added to what is there. */
static void write_rows(const source *to, int64_t first, int64_t n, const float *sums, int64_t ld, int add)
{
    static const float zeros[HEED_MAX_HEAD_DIM];
    for (int64_t r = 0; r < n; r++) {
        char *row = (char *)(uintptr_t)source_row(to, first + r);
        float total[HEED_MAX_HEAD_DIM];
        const float *from = sums ? sums + r * ld : zeros;
        if (add) {
            load_row(total, HEED_F32, row, to->t->stride[3], to->dim, to->dim);
            for (int64_t c = 0; c < to->dim; c++)
                total[c] += from[c];
            from = total;
        }
        store_row(row, to->t->dtype, to->t->stride[3], from, to->dim, 1);
    }
}

/* First of all, for each block of rows: delta, the keys it sees, and its turn. Rows without keys get their zeros. */
static void prepare_rows(void *context, int64_t index, int thread)
{
    const backward_run *x = context;
    const heed_problem *p = x->j.p;
    const heed_gradient *g = &p->g;
    int64_t block = index % x->f.row_blocks, h = index / x->f.row_blocks % p->Hq, b = index / x->f.row_blocks / p->Hq;
    int64_t i0 = block * x->f.block;
    heed_span s;
    (void)thread;
    heed_span_of(p, b, &s);
    int64_t first = s.keys, last = 0;
    for (int64_t i = i0; i < HEED_MIN(i0 + x->f.block, s.rows); i++) {
        source o = rows_of(p, &s, &p->a.o, h, p->Dv), d_o = rows_of(p, &s, &g->d_o, h, p->Dv);
        query q = query_at(p, &s, h, i);
        if (q.first < q.last)
            first = HEED_MIN(first, q.first), last = HEED_MAX(last, q.last);
        int64_t row = s.q_row + i;
        float *delta = at_bytes(&x->j, x->f.delta) + (b * p->Hq + h) * p->Sq + i;
        if (g->delta.data)
            *delta = ((const float *)g->delta
                          .data)[s.q_batch * g->delta.stride[0] + h * g->delta.stride[1] + row * g->delta.stride[2]];
        else {
            float a[HEED_MAX_HEAD_DIM + W], c[HEED_MAX_HEAD_DIM + W];
            vec sum = vec_zero();
            load_row(a, o.t->dtype, source_row(&o, i), o.t->stride[3], p->Dv, x->f.wide_v);
            load_row(c, d_o.t->dtype, source_row(&d_o, i), d_o.t->stride[3], p->Dv, x->f.wide_v);
            for (int64_t d = 0; d < x->f.wide_v; d += W)
                sum = vec_fma(vec_load(a + d), vec_load(c + d), sum);
            *delta = vec_sum(sum);
            if (g->d_lse.data)
                *delta -= ((const float *)g->d_lse.data)[s.q_batch * g->d_lse.stride[0] + h * g->d_lse.stride[1] +
                                                         row * g->d_lse.stride[2]];
        }
    }
    row_bounds bounds = { 0, -1 };
    if (first < last)
        bounds = (row_bounds){ (int32_t)(first / x->f.key_block), (int32_t)((last - 1) / x->f.key_block) };
    if (h == 0)
        *bounds_of(x, b, block) = bounds;
    atomic_init(turn_of(x, b, h, block), bounds.first);

    int64_t from = first < last ? HEED_MAX(i0, s.rows) : i0, to = HEED_MIN(i0 + x->f.block, s.padded_rows);
    source d_q = rows_of(p, &s, &g->d_q, h, p->D);
    if (g->d_q.data && !g->accumulate && from < to)
        write_rows(&d_q, from, to - from, NULL, 0, 0);
}

/* Zeros for keys that no row can see: padding, and those off the stride. */
static void clear_keys(void *context, int64_t index, int thread)
{
    const backward_run *x = context;
    const heed_problem *p = x->j.p;
    heed_span s;
    (void)thread;
    heed_span_of(p, index / p->Hk, &s);
    s.col = 0, s.col_step = 1;
    source d_k = keys_of(p, &s, &p->g.d_k, index % p->Hk, p->D), d_v = keys_of(p, &s, &p->g.d_v, index % p->Hk, p->Dv);
    if (p->g.d_k.data)
        write_rows(&d_k, 0, s.padded_keys, NULL, 0, 0);
    if (p->g.d_v.data)
        write_rows(&d_v, 0, s.padded_keys, NULL, 0, 0);
}

static void block_of_thread(backward_block *b, const backward_run *x, int thread)
{
    const backward_layout *f = &x->f;
    char *scratch = x->j.workspace + f->scratch + f->scratch_stride * (size_t)thread;
    size_t at[] = { f->kt, f->vt, f->ks, f->dk, f->dv, f->q, f->d_o, f->qs, f->dos, f->p, f->ds, f->pz, f->dsz };
    float **to[] = { &b->Kt, &b->Vt,  &b->Ks, &b->dKs, &b->dVs, &b->Qu, &b->dOu,
                     &b->Qs, &b->dOs, &b->P,  &b->dS,  &b->Pz,  &b->dSz };
    b->x = x;
    for (size_t i = 0; i < sizeof at / sizeof *at; i++)
        *to[i] = (float *)(void *)(scratch + at[i]);
}

/* Where the sums of a result are kept: the result's own rows, or `room`. */
static float *sums_at(const source *to, int64_t first, int in_place, float *room, int64_t width, int64_t *ld)
{
    *ld = in_place ? to->spacing : width;
    return in_place ? (float *)(uintptr_t)source_row(to, first) : room;
}

/* One block of rows meets one block of keys. */
static void meet(backward_block *b, int64_t block, row_bounds bounds, int64_t key_block)
{
    const backward_run *x = b->x;
    const heed_problem *p = x->j.p;
    _Atomic int32_t *turn = turn_of(x, b->span.b, b->h, block);
    source d_q = rows_of(p, &b->span, &p->g.d_q, b->h, p->D);
    int in_place = x->f.dq_in_place, careful = x->j.partial && !(b->finite && b->keys_finite);
    int add = key_block != bounds.first;
    b->dQ = NULL;
    if (p->g.d_q.data)
        b->dQ = sums_at(&d_q, b->i0, in_place,
                        at_bytes(&x->j, x->f.dq) + ((b->span.b * p->Hq + b->h) * p->Sq + b->i0) * x->f.wide, x->f.wide,
                        &b->ld_dq);
    if (!careful) {
        for (int64_t t = 0; t < b->tiles; t++)
            score_rows(b, t, NULL);
#if HEED_DOT
        weights_to_units(b);
#endif
        add_to_keys(b);
    }
    while (atomic_load_explicit(turn, memory_order_acquire) != key_block)
        sched_yield();
    if (careful)
        add_seen_pairs(b, add);
    else if (b->dQ)
        add_to_rows(b, add);
    atomic_store_explicit(turn, (int32_t)key_block + 1, memory_order_release);
    if (b->dQ && !in_place && key_block == bounds.last)
        write_rows(&d_q, b->i0, b->rows, b->dQ, b->ld_dq, p->g.accumulate);
}

static void clear_sums(float *sums, int64_t ld, int64_t rows, int64_t width)
{
    for (int64_t r = 0; r < rows; r++)
        memset(sums + r * ld, 0, (size_t)width * sizeof(float));
}

static void backward_keys(void *context, int64_t index, int thread)
{
    const backward_run *x = context;
    const heed_problem *p = x->j.p;
    /* One thread takes head after head, which keeps Q and dO of a head in the cache. Several start on different heads,
     * so that they seldom wait for each other. Either way the blocks of a head come in ascending order. */
    int64_t heads = p->B * p->Hk, several = x->j.plan->threads > 1;
    int64_t head = several ? index % heads : index / x->f.key_blocks;
    int64_t key_block = several ? index / heads : index % x->f.key_blocks;
    backward_block b;
    heed_span_of(p, head / p->Hk, &b.span);
    b.hk = head % p->Hk;
    int64_t n0 = key_block * x->f.key_block, n1 = HEED_MIN(n0 + x->f.key_block, b.span.keys);
    if (n0 >= n1)
        return;
    block_of_thread(&b, x, thread);
    load_keys(&b, n0, n1);
    source d_k = keys_of(p, &b.span, &p->g.d_k, b.hk, p->D), d_v = keys_of(p, &b.span, &p->g.d_v, b.hk, p->Dv);
    b.dK = sums_at(&d_k, n0, x->f.dk_in_place, b.dKs, x->f.wide, &b.ld_dk);
    b.dV = sums_at(&d_v, n0, x->f.dv_in_place, b.dVs, x->f.wide_v, &b.ld_dv);
    clear_sums(b.dK, b.ld_dk, n1 - n0, x->f.wide);
    clear_sums(b.dV, b.ld_dv, n1 - n0, x->f.wide_v);
    for (int64_t h = b.hk * p->G; h < (b.hk + 1) * p->G; h++)
        for (int64_t block = 0; block * x->f.block < b.span.rows; block++) {
            row_bounds bounds = *bounds_of(x, b.span.b, block);
            if (key_block < bounds.first || key_block > bounds.last)
                continue;
            load_rows(&b, h, block * x->f.block);
            meet(&b, block, bounds, key_block);
        }
    if (p->g.d_k.data && !x->f.dk_in_place)
        write_rows(&d_k, n0, n1 - n0, b.dK, b.ld_dk, p->g.accumulate);
    if (p->g.d_v.data && !x->f.dv_in_place)
        write_rows(&d_v, n0, n1 - n0, b.dV, b.ld_dv, p->g.accumulate);
}
