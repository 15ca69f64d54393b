/* The mathematics of the backward: one block of rows meets one block of keys.
 *
 *     S = Q K^T   dP = dO V^T   P = exp(S - lse)   dS = scale P (dP - delta)      tile by tile, while they are hot
 *     dV += P^T dO   dK += dS^T Q   dQ += dS K
 *
 * Floats are read, and sums kept, where they lie in the caller's tensors if rows are whole vectors; only K^T and V^T
 * are packed then. */

#define BQ (140 * (HEED_AMX ? 1 : PER_UNIT) / MR * MR) /* rows in a block, at most; even */

/* With HEED_DOT, P and dS of a tile become units at once (gradient.h), and floats are kept for one tile alone. HEED_SPLIT has
 * dV^T += dO^T P and dK^T += Q^T dS, so that P and dS need not be turned, but once for each block of keys their sums. */
#if HEED_SPLIT
#define LDZ (PLANES * PANEL) /* from a pair of rows to the next of P and dS as right factors, in panels of keys */
#define LDP (PANEL + 16)     /* from row to row of a piece (gradient.h) */
#define UNIT_ROWS MR
#define PLAIN_UNITS(j) 0
#elif HEED_DOT
#define LDU (BC / 2 + 16)
#define BUFFERED(rows) MR
#define UNIT_ROWS (HEED_AMX ? MR : 6) /* of S and dP at once; 6, and a panel, stay in registers */
#define PLAIN_UNITS(j) (!(j)->changes && !(j)->p->drop_below)
#else
#define LDU LDS
#define BUFFERED(rows) (rows)
#define UNIT_ROWS MR
#define PLAIN_UNITS(j) 0
#endif

typedef struct backward_layout {
    int64_t keys, key_block, key_blocks;
    int64_t block, row_blocks; /* rows in a block: a whole sequence, or BQ, whatever else is in the batch; even */
    int q_in_place, o_in_place, k_in_place, dq_in_place, dk_in_place, dv_in_place, asks;
    int delta_late;              /* one block of keys: delta is computed with it, and not before all else */
    int64_t ldq, ldv;            /* units in a row of Q; of dO */
    int64_t wide, wide_v;        /* columns of D and Dv, padded */
    int64_t ldu, plane_u;        /* dS as the left factor of dQ: units from row to row; from plane to plane */
    int64_t rows, blocks;        /* of all sequences, which lie end to end also where they are padded */
    size_t delta, turns, bounds; /* [Hq][rows]; [Hq][blocks]; [blocks] */
    size_t dq;                   /* [Hq][rows][wide], if there are several blocks of keys */
    size_t scratch, scratch_stride;
    size_t bias; /* bias_room() for each thread, if d_bias is wanted */
    size_t kt, vt, ks, dk, dv, q, d_o, qs, dos, dqs, p, ds, pz, dsz, dsu, dkt, dvt; /* inside scratch */
    size_t bytes;
} backward_layout;

/* The first and the last block of keys of which some row of a block of rows may see a key; none: 0, -1. */
typedef struct row_bounds {
    int32_t first, last;
} row_bounds;

/* The first and the last tile of a block of rows that see a panel of keys; none: 0, -1. */
typedef struct tile_range {
    int64_t first, last;
} tile_range;

typedef struct backward_run {
    job j;
    backward_layout f;
} backward_run;

/* Of one thread, in floats, for d_bias: dS before the softcap, [BQ][LDS], and sums in double, [BQ][BC]. */
static int64_t bias_room(void) { return BQ * LDS + BQ * BC * 2; }

static backward_layout backward_lay_out(const heed_problem *p, const heed_plan *plan)
{
    backward_layout f = { .keys = p->Sk };
    if (p->a.align != HEED_ALIGN_POSITION)
        f.keys = p->Sk / p->a.key_stride + (p->Sk % p->a.key_stride != 0);
    f.key_block = HEED_SPLIT && p->D + p->Dv > 128 ? 128 : BC; /* planes of wide rows do not stay in the second cache */
    f.key_blocks = (f.keys + f.key_block - 1) / f.key_block;
    int64_t most = HEED_SPLIT && p->D + p->Dv > 256 ? BQ / 2 : BQ;
    f.row_blocks = (p->Sq + most - 1) / most;
    f.block = f.row_blocks > 1 ? most : round_up(p->Sq, HEED_SPLIT ? MR : 2);
    int64_t uses = p->G * p->Sq, step = p->a.key_stride; /* of a key */
    f.q_in_place = PER_UNIT == 1 && usable_in_place(p, &p->a.q, p->D, 1, p->Sk);
    f.o_in_place = PER_UNIT == 1 && usable_in_place(p, &p->g.d_o, p->Dv, 1, p->Sk);
    f.k_in_place = PER_UNIT == 1 && usable_in_place(p, &p->a.k, p->D, step, uses);
    int sums_in_place = !p->g.accumulate; /* else each call adds its sum once: one rounding, not one for each product */
    sums_in_place = sums_in_place && (PER_UNIT == 1 || HEED_SPLIT > 0);
    f.dq_in_place = sums_in_place && p->g.d_q.data && usable_in_place(p, &p->g.d_q, p->D, 1, p->Sk);
    f.dk_in_place = sums_in_place && p->g.d_k.data && usable_in_place(p, &p->g.d_k, p->D, step, uses);
    f.dv_in_place = sums_in_place && p->g.d_v.data && usable_in_place(p, &p->g.d_v, p->Dv, step, uses);
    const heed_tensor *tensors[] = { &p->a.q, &p->a.k, &p->a.v, &p->g.d_o, &p->g.d_q, &p->g.d_k, &p->g.d_v };
    f.asks = worth_asking(tensors, 7);
    f.wide = round_up(p->D, W), f.wide_v = round_up(p->Dv, W);
    f.ldq = units_of(p->D) * PLANES + W, f.ldv = units_of(p->Dv) * PLANES + W;

    size_t used = HEED_SPLIT ? left_bytes(p) : 0, s = 0;
    f.rows = p->a.offsets_q ? p->a.q.shape[2] : p->B * p->Sq;
    f.blocks = p->a.offsets_q && f.block ? f.rows / f.block + p->B : p->B * f.row_blocks;
    f.delta = take(&used, p->Hq * f.rows);
    f.turns = take(&used, p->Hq * f.blocks);
    f.bounds = take(&used, f.blocks * (int64_t)(sizeof(row_bounds) / sizeof(float)));
    f.delta_late = f.key_blocks == 1 && !p->g.d_sink.data;
    f.dq = used;
    if (p->g.d_q.data && !f.dq_in_place && f.key_blocks > 1)
        take(&used, p->Hq * f.rows * f.wide);

    f.bias = used;
    if (p->g.d_bias.data)
        take(&used, plan->threads * bias_room());

    int64_t kb = f.key_block;
    f.kt = take(&s, panels_size(kb, p->D)), f.vt = take(&s, panels_size(kb, p->Dv));
    f.ks = take(&s, stacked_size(kb, f.wide));
    f.dk = take(&s, kb * f.wide), f.dv = take(&s, kb * f.wide_v);
    f.dqs = take(&s, f.block * f.wide);
#if HEED_SPLIT
    int64_t turned = PLANES * f.block / 2 + W;
    f.q = take(&s, MR * f.ldq), f.d_o = take(&s, MR * f.ldv);
    f.p = take(&s, 4 * MR * LDP);
    f.qs = take(&s, turned * f.wide), f.dos = take(&s, turned * f.wide_v);
    f.pz = take(&s, f.block / 2 * LDZ * (kb / PANEL)), f.dsz = take(&s, f.block / 2 * LDZ * (kb / PANEL));
    f.plane_u = kb / 2, f.ldu = PLANES * f.plane_u + W;
    f.dsu = take(&s, f.block * f.ldu);
    f.dkt = take(&s, kb * f.wide), f.dvt = take(&s, kb * f.wide_v);
#else
    f.plane_u = 0, f.ldu = LDU;
    f.q = take(&s, f.block * f.ldq), f.d_o = take(&s, f.block * f.ldv);
    f.p = take(&s, BUFFERED(f.block) * LDS), f.ds = take(&s, BUFFERED(f.block) * LDS);
    f.qs = take(&s, f.block * f.wide), f.dos = take(&s, f.block * f.wide_v);
#endif
#if HEED_DOT && !HEED_SPLIT
    f.pz = take(&s, (f.block + 1) / 2 * LDS), f.dsz = take(&s, (f.block + 1) / 2 * LDS);
    f.dsu = take(&s, f.block * LDU);
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
    int64_t h, i0, rows;
    int64_t score_tiles, tiles; /* tiles of rows: for S and dP, for dQ */
    int keys_finite;            /* -1: not known yet */
    int all_seen;               /* every row sees every key */
    int careful;                /* something is not finite and not every row sees every key: pair by pair */
    int met;                    /* dK and dV hold sums already */
    ahead next;                 /* asked for while P, dS, dV, dK and dQ are computed */
    query row[BQ];
    tile_range seen[BC / PANEL]; /* with HEED_SPLIT */
    float lse[BQ], delta[BQ];
    left Q, dO, Q_turned, dO_turned; /* turned: with HEED_SPLIT */
    right Q_rows, dO_rows, K_rows;   /* as right factors */
    float *dK, *dV, *dQ;             /* sums, from key n0 and row i0 on */
    int64_t ld_dk, ld_dv, ld_dq;
    float *P, *dS;
    float *Pz, *dSz, *dSu;                                       /* with HEED_DOT, as units */
    float *dKt, *dVt;                                            /* with HEED_SPLIT: sums, turned, in panels of keys */
    float *Kt, *Vt, *Ks, *dKs, *dVs, *Qu, *dOu, *Qs, *dOs, *dQs; /* room for what cannot be used in place */
} backward_block;

/* Row i of head h, and block of rows `block`, among those of all sequences. */
static int64_t row_index(const backward_run *x, const heed_span *s, int64_t h, int64_t i)
{
    return h * x->f.rows + (x->j.p->a.offsets_q ? s->q_row : s->b * x->j.p->Sq) + i;
}

static int64_t block_index(const backward_run *x, const heed_span *s, int64_t block)
{
    return (x->j.p->a.offsets_q ? s->q_row / x->f.block + s->b : s->b * x->f.row_blocks) + block;
}

static row_bounds *bounds_of(const backward_run *x, const heed_span *s, int64_t block)
{
    return (row_bounds *)(void *)at_bytes(&x->j, x->f.bounds) + block_index(x, s, block);
}

static void block_of_thread(backward_block *b, const backward_run *x, int thread)
{
    const backward_layout *f = &x->f;
    char *scratch = x->j.workspace + f->scratch + f->scratch_stride * (size_t)thread;
    size_t at[] = { f->kt,  f->vt, f->ks, f->dk, f->dv,  f->q,   f->d_o, f->qs, f->dos,
                    f->dqs, f->p,  f->ds, f->pz, f->dsz, f->dsu, f->dkt, f->dvt };
    float **to[] = { &b->Kt,  &b->Vt, &b->Ks, &b->dKs, &b->dVs, &b->Qu,  &b->dOu, &b->Qs, &b->dOs,
                     &b->dQs, &b->P,  &b->dS, &b->Pz,  &b->dSz, &b->dSu, &b->dKt, &b->dVt };
    b->x = x, b->next.count = 0;
    for (size_t i = 0; i < sizeof at / sizeof *at; i++)
        *to[i] = (float *)(void *)(scratch + at[i]);
}

static void load_keys(backward_block *b, int64_t n0, int64_t n1)
{
    const heed_problem *p = b->x->j.p;
    source k = keys_of(p, &b->span, &p->a.k, b->hk, p->D), v = keys_of(p, &b->span, &p->a.v, b->hk, p->Dv);
    float k_top = 0, v_top = 0;
    k.top = &k_top, v.top = &v_top;
    b->n0 = n0, b->n1 = n1;
    pack_panels(b->Kt - n0 / PANEL * PANEL * units_of(p->D) * PLANES, &k, n0, n1, b->x->j.k_scale);
    pack_panels(b->Vt - n0 / PANEL * PANEL * units_of(p->Dv) * PLANES, &v, n0, n1, 1);
    if (HEED_SPLIT && !(is_moderate(k_top) && is_moderate(v_top)))
        leave_head(&b->x->j, b->span.b * p->Hk + b->hk);
    k.top = NULL; /* known */
    b->K_rows = right_rows(&k, n0, n1, b->Ks, b->x->f.wide, b->x->f.k_in_place);
    b->keys_finite = -1;
}

/* out[r] = the product of rows first + r of two tensors of the same size, r < n. */
static void dot_rows(float *out, const source *x, const source *y, int64_t first, int64_t n)
{
    float copies[2][4][HEED_MAX_HEAD_DIM + W], sums[4];
    int64_t dim = round_up(x->dim, W);
    int direct = x->t->dtype == y->t->dtype && x->t->stride[3] == 1 && y->t->stride[3] == 1 && x->dim == dim;
    heed_dtype type = direct ? x->t->dtype : HEED_F32;
    for (int64_t r = 0; r < n; r += 4) {
        const void *rows[2][4];
        for (int i = 0; i < 8; i++) {
            const source *t = i < 4 ? x : y;
            const void *row = source_row(t, first + HEED_MIN(r + i % 4, n - 1));
            if (!direct)
                load_row(copies[i / 4][i % 4], t->t->dtype, row, t->t->stride[3], t->dim, dim);
            rows[i / 4][i % 4] = direct ? row : copies[i / 4][i % 4];
        }
        FOR_TYPE(type, dot4_as, rows[0], rows[1], dim, sums);
        memcpy(out + r, sums, (size_t)HEED_MIN(4, n - r) * sizeof *out);
    }
}

/* delta of rows [i0, i0 + n) of query head h. */
static void delta_of_rows(float *delta, const heed_problem *p, const heed_span *s, int64_t h, int64_t i0, int64_t n)
{
    const heed_gradient *g = &p->g;
    source o = rows_of(p, s, &p->a.o, h, p->Dv), d_o = rows_of(p, s, &g->d_o, h, p->Dv);
    const heed_tensor *given = g->delta.data ? &g->delta : &g->d_lse;
    if (!g->delta.data)
        dot_rows(delta, &o, &d_o, i0, n);
    if (!given->data)
        return;
    const float *at = (const float *)given->data + s->q_batch * given->stride[0] + h * given->stride[1] +
                      (s->q_row + i0) * given->stride[2];
    for (int64_t r = 0; r < n; r++)
        delta[r] = g->delta.data ? at[r * given->stride[2]] : delta[r] - at[r * given->stride[2]];
}

static inline int keys_are_finite(backward_block *b)
{
    const heed_problem *p = b->x->j.p;
    if (b->keys_finite < 0) {
        source k = keys_of(p, &b->span, &p->a.k, b->hk, p->D), v = keys_of(p, &b->span, &p->a.v, b->hk, p->Dv);
        b->keys_finite = rows_are_finite(&k, b->n0, b->n1) && rows_are_finite(&v, b->n0, b->n1);
    }
    return b->keys_finite;
}

static void load_rows(backward_block *b, int64_t h, int64_t i0)
{
    const heed_problem *p = b->x->j.p;
    const heed_tensor *lse = &p->a.lse;
    source q = rows_of(p, &b->span, &p->a.q, h, p->D), d_o = rows_of(p, &b->span, &p->g.d_o, h, p->Dv);
    b->h = h, b->i0 = i0;
    b->rows = HEED_MIN(b->x->f.block, b->span.rows - i0);
    b->tiles = tile_count(b->rows, tile_height(&b->x->j, b->span.keys));
    b->score_tiles = PLAIN_UNITS(&b->x->j) && !HEED_AMX ? tile_count(b->rows, UNIT_ROWS) : b->tiles;
    int finite = 1;
    b->all_seen = 1;
    if (b->x->f.delta_late)
        delta_of_rows(b->delta, p, &b->span, h, i0, b->rows);
    else
        memcpy(b->delta, at_bytes(&b->x->j, b->x->f.delta) + row_index(b->x, &b->span, h, i0),
               (size_t)b->rows * sizeof(float));
    for (int64_t r = 0; r < b->rows; r++) {
        int64_t i = i0 + r;
        query_at(p, &b->span, h, i, &b->row[r]);
        b->lse[r] = ((const float *)lse->data)[b->span.q_batch * lse->stride[0] + h * lse->stride[1] +
                                               (b->span.q_row + i) * lse->stride[2]];
        if (b->lse[r] == -INFINITY) /* saw no key: P = 0 */
            b->lse[r] = INFINITY, b->delta[r] = 0, b->row[r].last = b->row[r].first;
        else if (b->lse[r] - b->lse[r] != 0 || b->delta[r] - b->delta[r] != 0)
            finite = 0;
        b->all_seen = b->all_seen && b->row[r].first <= b->n0 && b->row[r].last >= b->n1;
    }
    float q_top = 0, d_o_top = 0;
    q.top = &q_top, d_o.top = &d_o_top;
    b->careful = 0;
#if HEED_SPLIT
    b->Q_turned = pack_turned(b->Qs, &q, i0, i0 + b->rows, b->x->f.block, b->x->f.wide);
    b->dO_turned = pack_turned(b->dOs, &d_o, i0, i0 + b->rows, b->x->f.block, b->x->f.wide_v);
    if (!(finite && is_moderate(q_top) && is_moderate(d_o_top)))
        leave_head(&b->x->j, b->span.b * p->Hk + b->hk);
#else
    b->Q = left_rows(&q, i0, i0 + b->rows, b->Qu, b->x->f.ldq);
    b->dO = left_rows(&d_o, i0, i0 + b->rows, b->dOu, b->x->f.ldv);
    if (PER_UNIT == 1 && b->Q.data == b->Qu) /* rows of floats are a factor on either side */
        b->Q_rows = (right){ b->Qu, b->Q.ld, PANEL, 0 };
    else
        b->Q_rows = right_rows(&q, i0, i0 + b->rows, b->Qs, b->x->f.wide, b->x->f.q_in_place);
    if (PER_UNIT == 1 && b->dO.data == b->dOu)
        b->dO_rows = (right){ b->dOu, b->dO.ld, PANEL, 0 };
    else
        b->dO_rows = right_rows(&d_o, i0, i0 + b->rows, b->dOs, b->x->f.wide_v, b->x->f.o_in_place);
    const heed_attention *a = &p->a;
    if (b->x->j.partial && (!b->all_seen || a->mask.data || a->bias.data))
        b->careful = !(finite && rows_are_finite(&q, i0, i0 + b->rows) && rows_are_finite(&d_o, i0, i0 + b->rows) &&
                       keys_are_finite(b));
#endif
}

/* The columns of the block of keys that rows [r0, r0 + rows) see between them; 0 when there are none. */
static int columns_seen(const backward_block *b, int64_t r0, int64_t rows, int64_t *first, int64_t *last, int *whole)
{
    int64_t n0 = b->n0, n1 = b->n1, all_first = n0, all_last = n1;
    if (b->all_seen) {
        *first = 0, *last = n1 - n0, *whole = (n1 - n0) % W == 0;
        return 1;
    }
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

/* Nothing yet for keys [c, c + n) of the block. */
static void clear_key_sums(backward_block *b, int64_t c, int64_t n)
{
    for (int64_t r = c; r < c + n; r++) {
        memset(b->dK + r * b->ld_dk, 0, (size_t)b->x->f.wide * sizeof(float));
        memset(b->dV + r * b->ld_dv, 0, (size_t)b->x->f.wide_v * sizeof(float));
    }
}

#if HEED_SPLIT
/* Panel c of P or dS as a right factor. */
static inline float *panel_at(const backward_block *b, float *planes, int64_t c)
{
    return planes + c / PANEL * (b->x->f.block / 2) * LDZ;
}

/* Turned sums of n keys as rows. */
static void turn_sums(float *to, int64_t ld, int64_t width, const float *from, int64_t n)
{
    for (int64_t r = 0; r < n; r += W)
        for (int64_t d = 0; d < width; d += W) {
            vec t[W];
            each(i, W)
                t[i] = vec_load(from + r / PANEL * PANEL * width + (d + i) * PANEL + r % PANEL);
            vec_transpose(t);
            for (int64_t i = 0; i < HEED_MIN(W, n - r); i++)
                vec_store(to + (r + i) * ld + d, t[i]);
        }
}

/* dV^T += dO^T P and dK^T += Q^T dS, a panel of keys at a time, over the tiles of rows that see it. */
static void add_to_keys(backward_block *b)
{
    const backward_layout *f = &b->x->f;
    const float *keep = b->met ? keep_all : NULL;
    for (int64_t c = 0; c < b->n1 - b->n0; c += PANEL) {
        tile_range seen = b->seen[c / PANEL];
        int64_t k = seen.first * STEP, units = (seen.last + 1) * STEP - k;
        if (units > 0) {
            multiply(b->dVt + c * f->wide_v, PANEL, left_from(b->dO_turned, 0, k),
                     (right){ panel_at(b, b->Pz, c) + k * LDZ, LDZ, PANEL, PANEL }, f->wide_v, NR, units, keep,
                     &b->next);
            multiply(b->dKt + c * f->wide, PANEL, left_from(b->Q_turned, 0, k),
                     (right){ panel_at(b, b->dSz, c) + k * LDZ, LDZ, PANEL, PANEL }, f->wide, NR, units, keep,
                     &b->next);
        } else if (!b->met)
            memset(b->dVt + c * f->wide_v, 0, (size_t)(PANEL * f->wide_v) * sizeof(float)),
                memset(b->dKt + c * f->wide, 0, (size_t)(PANEL * f->wide) * sizeof(float));
    }
}
#else
/* Keys [c, c + R) of the block and rows [first, last), of which there may be none. */
static void add_to_tile(backward_block *b, int64_t c, int64_t R, int64_t first, int64_t last)
{
    const backward_layout *f = &b->x->f;
    const float *P = HEED_DOT ? b->Pz : b->P, *dS = HEED_DOT ? b->dSz : b->dS;
    int64_t k = first / (PER_UNIT * STEP) * STEP, units = (last + PER_UNIT - 1) / PER_UNIT - k;
    if (units <= 0) {
        if (!b->met)
            clear_key_sums(b, c, R);
        return;
    }
    multiply(b->dV + c * b->ld_dv, b->ld_dv, (left){ P + k * LDS + c, LDS, 1, 0 }, right_from(b->dO_rows, k, 0), R,
             f->wide_v / W, units, b->met ? keep_all : NULL, &b->next);
    multiply(b->dK + c * b->ld_dk, b->ld_dk, (left){ dS + k * LDS + c, LDS, 1, 0 }, right_from(b->Q_rows, k, 0), R,
             f->wide / W, units, b->met ? keep_all : NULL, &b->next);
}

/* dV += P^T dO and dK += dS^T Q, MR keys at a time, over the rows that see them. */
static void add_to_keys(backward_block *b)
{
    int64_t keys = b->n1 - b->n0, count = tile_count(keys, tile_height(&b->x->j, b->span.keys));
    int64_t begin = 0; /* rows before it see no key from here on */
    for (int64_t t = 0; t < count; t++) {
        int64_t c = tile_begin(keys, count, t), R = tile_begin(keys, count, t + 1) - c, first, last = b->rows;
        while (begin < last && b->row[begin].last <= b->n0 + c)
            begin++;
        for (first = begin; first < last && b->row[first].first >= b->n0 + c + R;)
            first++;
        while (last > first && (b->row[last - 1].last <= b->n0 + c || b->row[last - 1].first >= b->n0 + c + R))
            last--;
        add_to_tile(b, c, R, first, last);
    }
}
#endif

/* dQ = dS K, or dQ += dS K. */
static void add_to_rows(backward_block *b, int add)
{
    const backward_layout *f = &b->x->f;
    for (int64_t t = 0; t < b->tiles; t++) {
        int64_t r0 = tile_begin(b->rows, b->tiles, t), rows = tile_begin(b->rows, b->tiles, t + 1) - r0, first, last;
        int whole;
        if (columns_seen(b, r0, rows, &first, &last, &whole)) {
            int64_t k = first / (PER_UNIT * STEP) * STEP;
            multiply(b->dQ + r0 * b->ld_dq, b->ld_dq,
                     (left){ (HEED_DOT ? b->dSu : b->dS) + r0 * f->ldu + k, f->ldu, 0, f->plane_u },
                     right_from(b->K_rows, k, 0), rows, f->wide / W, (last + PER_UNIT - 1) / PER_UNIT - k,
                     add ? keep_all : NULL, &b->next);
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
