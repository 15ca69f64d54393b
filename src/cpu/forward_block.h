/* The mathematics of the forward. The rows of all query heads that share a key head are one long list, cut into blocks of
 * BR; a block walks over its keys, BC at a time, and a block of keys stays in the cache while tile after tile of rows
 * (at most MR of them, or TALL) goes through
 *
 *     S = Q K^T              K packed into panels (pack.h), by the first block of rows that comes to them
 *     P = 2^(c (S - m'))     m' the row's maximum so far, c = s_scale log2(e)
 *     O = 2^(c (m - m')) O + P V
 *
 * Blocks of keys begin at multiples of BC whatever the block of rows, and a key that a row does not see adds an exact
 * zero: so a row's bits depend neither on its neighbours nor on the threads.
 *
 * Few rows against many keys (a step of decoding) would leave threads idle and K packed for nothing. Where a sequence has
 * at most SPLIT_ROWS rows its keys are cut into chunks of CHUNK, each an item of work with a result of its own, merged in
 * order; and where are_direct() says so K is not packed: each key is read once, where it lies, for all heads. Each
 * sequence is judged by itself, and not by its heads, so that the bits of one do not depend on the others. */

#define BR (280 / MR * MR)
#define SPLIT_ROWS 64
#define CHUNK 1024

/* Where things are in the workspace, in bytes. */
typedef struct forward_layout {
    int64_t rows, keys;        /* of one key head, at most: G * Sq rows, and keys after the stride */
    int64_t row_blocks, block; /* block: rows in a block, BR at most */
    int64_t splits, slots;     /* chunks of the keys, at most; results of chunks for each key head, in all */
    int64_t ldq, ldo;          /* floats from row to row of Q and O */
    int all_direct, v_in_place, by_head;
    int asks, asks_again; /* ahead.h: for what is read first; for packed keys, which do not stay in the second cache */
    size_t panels, panels_stride;   /* K of one head; [threads] when by_head, else [B * Hk] */
    size_t values, values_stride;   /* V of one head, likewise, unless it is used in place */
    size_t scratch, scratch_stride; /* of one thread */
    size_t q, s, p, o;              /* inside scratch */
    size_t wild, wild_stride;       /* HEED_SPLIT: of each block of keys, whether it is to be left; as panels */
    size_t reach, reach_stride;     /* MAY_BE_NEAR: of each key, as panels */
    size_t results, results_stride; /* O, m, l of one chunk: [Hk][slots] */
    size_t bytes;
} forward_layout;

static forward_layout forward_lay_out(const heed_problem *p, const heed_plan *plan)
{
    forward_layout f = { .rows = p->G * p->Sq, .keys = p->Sk, .splits = 1 };
    int64_t heads = p->B * p->Hk;
    if (p->a.align != HEED_ALIGN_POSITION && p->a.key_stride > 1)
        f.keys = p->Sk / p->a.key_stride + (p->Sk % p->a.key_stride != 0);
    if (p->Sq <= SPLIT_ROWS || p->a.lengths_q || p->a.offsets_q)
        f.splits = HEED_MAX(1, (f.keys + CHUNK - 1) / CHUNK);
    f.slots = p->a.offsets_k ? 2 * p->a.k.shape[2] / CHUNK + 1 : p->B * f.splits;
    f.by_head = plan->threads == 1 || heads >= 4 * plan->threads;
    f.asks_again = panels_size(f.keys, p->D) + panels_size(f.keys, p->Dv) > CACHED_FLOATS;
    /* The higher a block, the fewer times all keys are read; but threads want eight blocks each, or four of four tiles. */
    int64_t most = f.keys > 4 * BC && (f.by_head || heads * f.rows >= 8 * BR * plan->threads) ? BR : BR / 2 / MR * MR;
    f.row_blocks = f.rows <= most ? 1 : (f.rows + most - 1) / most;
    if (!f.by_head && heads)
        f.row_blocks = HEED_MAX(f.row_blocks, HEED_MIN((4 * plan->threads + heads - 1) / heads, f.rows / (4 * MR)));
    f.block = f.rows;
    if (f.row_blocks > 1)
        f.block = round_up((f.rows + f.row_blocks - 1) / f.row_blocks, MR); /* whole tiles, but for the last block */
    f.all_direct = are_direct(p->Sq, p->a.lengths_k || p->a.offsets_k ? 0 : p->full.keys);
    f.v_in_place = PER_UNIT == 1 && usable_in_place(p, &p->a.v, p->Dv, p->a.key_stride, f.rows);
    const heed_tensor *tensors[] = { &p->a.q, &p->a.k, &p->a.v, &p->a.o };
    f.asks = f.by_head && worth_asking(tensors, 4);
    f.ldq = HEED_MAX(units_of(p->D) * PLANES, round_up(p->D, W)) + W;
    f.ldo = round_up(p->Dv, W) + W;

    size_t used = HEED_SPLIT ? left_bytes(p) : 0, inside = 0;
    int64_t copies = f.by_head ? HEED_MIN(heads, plan->threads) : heads;
    f.panels_stride = f.values_stride = 0;
    if (!f.all_direct)
        take(&f.panels_stride, panels_size(f.keys, p->D));
    if (!f.v_in_place && !f.all_direct)
        take(&f.values_stride, stacked_size(f.keys, round_up(p->Dv, W)));
    f.panels = used, used += f.panels_stride * (size_t)copies;
    f.values = used, used += f.values_stride * (size_t)copies;
    if (HEED_SPLIT)
        take(&f.wild_stride, (f.keys / BC + 1 + 3) / 4);
    f.wild = used, used += f.wild_stride * (size_t)copies;
    if (MAY_BE_NEAR && !f.all_direct)
        take(&f.reach_stride, round_up(f.keys, W));
    f.reach = used, used += f.reach_stride * (size_t)copies;

    f.q = take(&inside, f.block * f.ldq);
    f.s = f.p = take(&inside, MOST_ROWS * LDS);
    if (HEED_SPLIT)
        take(&inside, MR * LDS), f.p = take(&inside, MR * LDW); /* S of two tiles */
    f.o = take(&inside, f.block * f.ldo);
    f.scratch = used, f.scratch_stride = inside;
    used += inside * (size_t)plan->threads;

    if (f.splits > 1) {
        take(&f.results_stride, p->G * HEED_MIN(p->Sq, SPLIT_ROWS) * (f.ldo + 2));
        f.results = used, used += f.results_stride * (size_t)(p->Hk * f.slots);
    }
    f.bytes = used;
    return f;
}

typedef struct forward_run {
    job j;
    forward_layout f;
} forward_run;

static float *at_bytes(const job *j, size_t offset) { return (float *)(void *)(j->workspace + offset); }

/* A block of rows on its way through the keys. */
typedef struct forward_block {
    const job *j;
    const forward_layout *f;
    const heed_span *span;
    int64_t hk, rows, tiles;
    query row[BR];
    _Alignas(64) float m[BR + 2 * W], l[BR + 2 * W]; /* m: of products, S / s_scale, if scores are not changed */
    char started[BR];                                /* tile: O holds something */
    left Q;
    float *room, *S, *P, *O; /* room: for rows of Q that cannot be used where they lie */
    right K, V;              /* of key 0 */
    float *panels, *values;
    unsigned char *wild;
#if MAY_BE_NEAR
    int may_be_near;
    float *reach;                    /* |k|^2 of each key, as packed; infinite if its values are not moderate */
    float q_square[BR + W];          /* |q|^2 of each row; of all ... */
    float most_square, least_square; /* ... the largest and the least */
    int64_t met_first, met_last;     /* the keys that are met now, of which ... */
    float most_reach, prefix[BC];    /* ... the largest reach; the largest from a key to each that follows it ... */
    int knows_prefix;                /* ... from the first */
    int all_near, none_near;         /* all rows are near them; none is that sees the first */
    char far[BR], far_rows[BR];      /* row: was not near some keys; tile: how many are such rows */
#endif
    int64_t packed_first, packed_last; /* keys that are there already */
    ahead next, after;                 /* to be asked for now; with the last block of keys */
    int is_direct;                     /* few rows: direct.h */
    direct_rows direct;
} forward_block;

/* A tile of rows against a block of keys that begins with n0, between its scores and its values. */
typedef struct forward_tile {
    int64_t t, r0, rows, n0;
    int64_t first, last, all_first, all_last; /* keys that some row sees, that all see */
    int64_t from, to;                         /* columns that are computed */
    float *S, keep[MOST_ROWS + W];
#if HEED_SPLIT
    weighing weights;
#endif
} forward_tile;

#if MAY_BE_NEAR
#include "near.h"
#endif

/* Keys [first, last) in the form that tiles read. */
static void pack_more(forward_block *b, int64_t first, int64_t last)
{
    const heed_problem *p = b->j->p;
    source k = keys_of(p, b->span, &p->a.k, b->hk, p->D), v = keys_of(p, b->span, &p->a.v, b->hk, p->Dv);
    int64_t width = round_up(p->Dv, W);
#if MAY_BE_NEAR
    k.squares = b->may_be_near ? b->reach : NULL;
#endif
    for (int64_t n = first; n < last; n += BC) {
        int64_t end = HEED_MIN(n + BC, last);
        float k_top = 0, v_top = 0;
        k.top = &k_top, v.top = &v_top;
        pack_panels(b->panels, &k, n, end, b->j->k_scale);
        if (!b->f->v_in_place)
            pack_stacked(b->values + n / PER_UNIT * stacked_ld(width), &v, n, end, width);
        if (HEED_SPLIT)
            b->wild[n / BC] = !(k_top <= SPLIT_MOST && v_top <= SPLIT_MOST && (v_top >= SPLIT_LEAST || v_top == 0));
#if MAY_BE_NEAR
        if (b->may_be_near)
            find_reach(b, n, end);
#endif
    }
}

/* Likewise, and what lies between them and those that are there, if they are not there yet. */
static void pack_keys(forward_block *b, int64_t first, int64_t last)
{
    if (b->packed_first == b->packed_last)
        b->packed_first = b->packed_last = first;
    if (first < b->packed_first)
        pack_more(b, first, b->packed_first);
    if (last > b->packed_last)
        pack_more(b, b->packed_last, last);
    b->packed_first = HEED_MIN(b->packed_first, first), b->packed_last = HEED_MAX(b->packed_last, last);
}

/* Of keys of the block that is met. */
static int values_are_finite(const forward_block *b, int64_t first, int64_t last)
{
    const heed_problem *p = b->j->p;
    if (first >= last)
        return 1;
#if MAY_BE_NEAR
    if (b->may_be_near && b->most_reach < INFINITY) /* then they are moderate */
        return 1;
#endif
    source v = keys_of(p, b->span, &p->a.v, b->hk, p->Dv);
    return rows_are_finite(&v, first, last);
}

/* O = keep O + P V for a tile in whose keys some value is not finite and that not every row sees: 0 * NaN must not be
 * added. */
static void add_seen_values(float *O, int64_t ldo, const float *S, right V, int64_t rows, int64_t from, int64_t to,
                            int64_t width, const float *keep)
{
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t d = 0; d < width; d++)
            O[r * ldo + d] = keep ? keep[r] * O[r * ldo + d] : 0;
        for (int64_t c = from; c < to; c++) {
            float w = unit_value(S + r * LDS, c / PER_UNIT, c % PER_UNIT);
            for (int64_t d = 0; w != 0 && d < width; d++)
                O[r * ldo + d] += w * unit_value(V.data, c / PER_UNIT * V.ld + d, c % PER_UNIT);
        }
    }
}

/* Tile t and keys [n0, n1); 0: no row sees any of them. */
static int tile_sees(const forward_block *b, forward_tile *x, int64_t t, int64_t n0, int64_t n1)
{
    int64_t r0 = tile_begin(b->rows, b->tiles, t), rows = tile_begin(b->rows, b->tiles, t + 1) - r0;
    const query *q = b->row + r0;
    int64_t first = n0, last = n1, all_first = n0, all_last = n1;
    if (b->j->partial) {
        first = n1, last = n0;
        for (int64_t r = 0; r < rows; r++) {
            first = HEED_MIN(first, q[r].first), last = HEED_MAX(last, q[r].last);
            all_first = HEED_MAX(all_first, q[r].first), all_last = HEED_MIN(all_last, q[r].last);
        }
        first = HEED_MAX(first, n0), last = HEED_MIN(last, n1);
    }
    x->t = t, x->r0 = r0, x->rows = rows, x->n0 = n0;
    x->first = first, x->last = last, x->all_first = all_first, x->all_last = all_last;
    x->from = (first - n0) / PANEL * PANEL, x->to = round_up(last - n0, W);
    return first < last;
}

/* S of a tile, and with HEED_SPLIT meanwhile the weights of another one; the softmax, or with HEED_SPLIT its beginning. */
static void tile_scores(forward_block *b, forward_tile *x, float *S, meanwhile *work)
{
    const job *j = b->j;
    const query *q = b->row + x->r0;
    int64_t r0 = x->r0, rows = x->rows, n0 = x->n0, from = x->from, to = x->to;
    x->S = S;
    if (b->is_direct)
        direct_scores(&b->direct, S, n0, x->first - n0, x->last - n0);
    else
        for (int64_t t = 0, count = tile_count(rows, MR); t < count; t++) {
            int64_t r = tile_begin(rows, count, t), R = tile_begin(rows, count, t + 1) - r;
            multiply_scores(S + r * LDS + from, left_from(b->Q, r0 + r, 0), right_from(b->K, 0, n0 + from), R,
                            (to - from) / W, (j->p->D + PER_UNIT - 1) / PER_UNIT, work);
        }
    int whole = x->all_first <= n0 + from && x->all_last >= n0 + to; /* every row sees every column */
    if (j->changes || !whole)
        for (int64_t r = 0; r < rows; r++)
            adjust_row(j, b->span, q[r], S + r * LDS, NULL, n0, from, to);
    float c = j->changes ? LOG2E : j->s_scale * LOG2E;
#if HEED_SPLIT
    if (!j->p->drop_below) {
        softmax_begin(&x->weights, b->P, S, b->m + r0, x->keep, rows, from, to, c, &b->next);
        return;
    }
    x->weights.work.step = weigh, x->weights.row = x->weights.rows = 0;
#elif MAY_BE_NEAR
    if (b->may_be_near) {
        near_softmax(b, x);
        return;
    }
#endif
    softmax_tile(b->P, S, b->m + r0, b->l + r0, x->keep, rows, from, to, c,
                 (b->is_direct ? DIRECT_DOT : HEED_DOT) && !j->p->drop_below, NULL, &b->next);
}

/* O of a tile. *finite, where a mask or a bias may hide any key: whether V is so in the block, which ends before n1; -1 where
 * not known yet. */
static void tile_values(forward_block *b, forward_tile *x, int64_t n1, int *finite)
{
    const job *j = b->j;
    int64_t t = x->t, rows = x->rows, n0 = x->n0, first = x->first, last = x->last, from = x->from, to = x->to;
    int64_t all_first = x->all_first, all_last = x->all_last;
    const query *q = b->row + x->r0;
    float *S = x->S, *O = b->O + x->r0 * b->f->ldo, *keep = x->keep;
    int pairs = b->is_direct ? DIRECT_DOT : HEED_DOT;
#if HEED_SPLIT
    if (!j->p->drop_below)
        softmax_end(&x->weights, b->l + x->r0, x->keep);
    (void)n1, (void)finite, (void)all_first, (void)all_last;
#endif
    for (int64_t r = 0; r < rows && j->p->drop_below; r++) {
        float *s = S + r * LDS, drop[BC];
        keep_row(j, b->span, q[r], drop, n0, from, to);
        for (int64_t c = from; c < to; c++)
            s[c] *= drop[c];
        for (int64_t c = from; pairs && c < to; c += 2 * W)
            store_units_of(b->P + r * LDW, c, vec_load(s + c), c + W < to ? vec_load(s + c + W) : vec_zero());
    }

    right V = b->V;
    int64_t width = round_up(j->p->Dv, W), skip = (first - n0) / (PER_UNIT * STEP) * STEP;
    if (!b->is_direct)
        V.data += n0 / PER_UNIT * V.ld;
    int careful = 0;
    if (HEED_SPLIT)
        ; /* numbers that are not finite are left to others */
    else if (j->partial && (j->p->a.mask.data || j->p->a.bias.data)) {
        if (*finite < 0)
            *finite = values_are_finite(b, n0, n1);
        careful = !*finite;
    } else if (j->partial) { /* a step or a pair reaches keys that no row sees */
        int64_t begin = n0 + skip * PER_UNIT, end = HEED_MIN(n0 + round_up(last - n0, PER_UNIT), n1);
        careful = !values_are_finite(b, begin, HEED_MIN(all_first, end)) ||
                  !values_are_finite(b, HEED_MAX(all_last, begin), end);
    }
    if (b->is_direct)
        direct_values(&b->direct, O, b->f->ldo, S, n0, first - n0, last - n0, b->started[t] ? keep : NULL, careful);
    else if (careful)
        add_seen_values(O, b->f->ldo, S, V, rows, first - n0, last - n0, width, b->started[t] ? keep : NULL);
    else
        multiply(O, b->f->ldo, (left){ b->P + skip, LDW, 0, WEIGHT_PLANE }, right_from(V, skip, 0), rows, width / W,
                 (last - n0 + PER_UNIT - 1) / PER_UNIT - skip, b->started[t] ? keep : NULL, &b->next);
    b->started[t] = 1;
}

/* Of W rows what normalises O, and lse where wanted; 0 and -inf for one that saw no key. */
INLINE void end_rows(const job *j, vec m, vec l, int wants_lse, float scale[W], float lse[W])
{
    vec per_sum = vec_div(vec_set1(1), l);
    vec of_none = vec_less(m, vec_set1(INFINITY), vec_zero(), per_sum); /* NaN was seen */
    vec_store(scale, vec_less(vec_abs(l), vec_set1(FLT_MIN), of_none, per_sum));
    if (wants_lse)
        vec_store(lse, vec_fma(m, vec_set1(j->changes ? 1 : j->s_scale), vec_log(l)));
}

/* The same for one that saw keys and has a sink. */
static void add_sink(const job *j, int64_t h, float m, float l, float *scale, float *lse)
{
    const heed_tensor *t = &j->p->a.sink;
    double sink = ((const float *)t->data)[h * t->stride[1]];
    double top = (double)m * (j->changes ? 1 : j->s_scale), max = sink > top ? sink : top;
    double sum = l * exp(top - max) + exp(sink - max);
    *scale = (float)(exp(top - max) / sum);
    *lse = (float)(max + log(sum));
}

/* Where o and lse of a sequence are, head 0 and row 0: local to who writes them, lest each store make it all be read again. */
typedef struct ends {
    char *o;
    float *lse; /* NULL: not wanted */
    int64_t o_head, o_row, o_column, lse_head, lse_row, columns;
    int has_sink;
} ends;

INLINE ends ends_of(heed_dtype type, const forward_block *b)
{
    const heed_tensor *o = &b->j->p->a.o, *lse = &b->j->p->a.lse;
    int64_t bytes = type == HEED_F32 ? 4 : 2, batch = b->span->q_batch, row = b->span->q_row;
    ends e = { .o = (char *)o->data + (batch * o->stride[0] + row * o->stride[2]) * bytes, .columns = b->j->p->Dv };
    e.o_head = o->stride[1] * bytes, e.o_row = o->stride[2] * bytes, e.o_column = o->stride[3];
    if (lse->data)
        e.lse = (float *)lse->data + batch * lse->stride[0] + row * lse->stride[2];
    e.lse_head = lse->stride[1], e.lse_row = lse->stride[2];
    e.has_sink = b->j->p->a.sink.data != NULL;
    return e;
}

/* Row q and those that follow it, at most W and of one head, whose O, m and l these are: normalises them, writes o, which is of
 * that type, and lse. */
INLINE void finish_rows_as(heed_dtype type, const job *j, const ends e, query q, int64_t rows, float *O, int64_t ldo,
                           vec m, vec l)
{
    float scale[W], lse[W], tops[W], sums[W];
    char *o = e.o + q.h * e.o_head + q.i * e.o_row;
    float *to = e.lse ? e.lse + q.h * e.lse_head + q.i * e.lse_row : NULL;
    end_rows(j, m, l, e.lse != NULL, scale, lse);
    if (e.has_sink) {
        vec_store(tops, m), vec_store(sums, l);
        for (int64_t r = 0; r < rows; r++)
            if (scale[r] != 0)
                add_sink(j, q.h, tops[r], sums[r], &scale[r], &lse[r]);
    }
    for (int64_t r = 0; r < rows; r++, O += ldo, o += e.o_row) {
        if (scale[r] == 0) /* nothing was seen, and O may never have been written */
            memset(O, 0, (size_t)e.columns * sizeof *O);
        store_row_as(type, o, e.o_column, O, e.columns, scale[r], 0); /* a zero has its sign of what the tile sees */
        if (to)
            *to = lse[r], to += e.lse_row;
    }
}

INLINE void finish_one_as(heed_dtype type, const forward_block *b, float *O, float m, float l)
{
    finish_rows_as(type, b->j, ends_of(type, b), b->row[0], 1, O, 0, vec_set1(m), vec_set1(l));
}

/* Row 0 of the block, whose O, m and l these are. */
static void finish_row(const forward_block *b, float *O, float m, float l)
{
    FOR_TYPE(b->j->p->a.o.dtype, finish_one_as, b, O, m, l);
}

INLINE void finish_block_as(heed_dtype type, const forward_block *b)
{
    const ends e = ends_of(type, b);
    const int64_t rows = b->rows, ldo = b->f->ldo;
    for (int64_t r = 0, count; r < rows; r += count) {
        count = HEED_MIN(HEED_MIN(W, rows - r), b->span->rows - b->row[r].i);
        finish_rows_as(type, b->j, e, b->row[r], count, b->O + r * ldo, ldo, vec_load(b->m + r), vec_load(b->l + r));
    }
}

static void finish_block(const forward_block *b) { FOR_TYPE(b->j->p->a.o.dtype, finish_block_as, b); }

/* Q of the block's rows; they may belong to several heads. The direct form multiplies by K as it is: the power of two
 * that is otherwise in K goes into Q. With HEED_SPLIT their largest magnitude is returned. */
static float query_rows(forward_block *b)
{
    const heed_problem *p = b->j->p;
    const heed_tensor *t = &p->a.q;
    source q = rows_of(p, b->span, t, b->rows ? b->row[0].h : 0, p->D);
    float top = 0;
    q.top = &top;
    b->Q = (left){ b->room, b->f->ldq, 0, units_of(p->D) };
    if (!b->is_direct && b->rows && b->row[b->rows - 1].h == q.head) {
        b->Q = left_rows(&q, b->row[0].i, b->row[0].i + b->rows, b->room, b->f->ldq);
        return top;
    }
    for (int64_t r = 0; r < b->rows; r++) {
        float *to = b->room + r * b->f->ldq;
        q = rows_of(p, b->span, t, b->row[r].h, p->D);
        q.top = &top;
        if (!b->is_direct) {
            unit_row(to, &q, b->row[r].i);
            continue;
        }
        direct_row(to, &q, b->row[r].i);
        for (int64_t u = 0; u < direct_units(p->D); u += W)
            vec_store(to + u, direct_scale(vec_load(to + u), vec_set1(b->j->k_scale)));
    }
    b->direct = (direct_rows){ keys_of(p, b->span, &p->a.k, b->hk, p->D), keys_of(p, b->span, &p->a.v, b->hk, p->Dv),
                               b->room, b->f->ldq, b->rows };
    return top;
}

/* Some row sees a key of [n0, n1). */
static int are_seen(const forward_block *b, int64_t n0, int64_t n1)
{
    for (int64_t r = 0; r < b->rows; r++)
        if (b->row[r].first < HEED_MIN(b->row[r].last, n1) && b->row[r].last > n0)
            return 1;
    return 0;
}

/* Keys [first, first + BC) of the block's head, which are packed. */
static void ask_for_packed(ahead *a, const forward_block *b, int64_t first)
{
    const heed_problem *p = b->j->p;
    int64_t last = HEED_MIN(first + BC, b->span->keys), width = round_up(p->Dv, W);
    int64_t key_bytes = units_of(p->D) * PLANES * (int64_t)sizeof(float);
    int64_t value_bytes = stacked_ld(width) * (int64_t)sizeof(float);
    if (!b->f->asks_again)
        return;
    ask_for_rows(a, b->panels + first * units_of(p->D) * PLANES, last - first, key_bytes, key_bytes);
    if (b->f->v_in_place)
        ask_for(a, keys_of(p, b->span, &p->a.v, b->hk, p->Dv), first, last);
    else
        ask_for_rows(a, b->values + first / PER_UNIT * stacked_ld(width), (last - first) / PER_UNIT, value_bytes,
                     value_bytes);
}

static void ask_for_keys(ahead *a, const job *j, const heed_span *s, int64_t hk, int64_t first)
{
    const heed_problem *p = j->p;
    int64_t last = HEED_MIN(first + BC, s->keys);
    ask_for(a, keys_of(p, s, &p->a.k, hk, p->D), first, last);
    ask_for(a, keys_of(p, s, &p->a.v, hk, p->Dv), first, last);
}

/* What is asked for while keys [n, n + BC) of those before `end` are met. */
static void ask_during(forward_block *b, int64_t n, int64_t end)
{
    b->next.count = 0;
    if (b->is_direct)
        return;
    if (n + BC >= end) {
        if (b->after.count) /* a long struct, mostly empty */
            b->next = b->after;
    } else if (n + BC < b->packed_last)
        ask_for_packed(&b->next, b, n + BC);
    else if (b->f->asks)
        ask_for_keys(&b->next, b->j, b->span, b->hk, n + BC);
}

/* The block's rows, from row r0 of the key head on; *first and *last widen to the keys that some of them see. */
static void find_rows(forward_block *b, int64_t r0, int64_t *first, int64_t *last)
{
    const heed_problem *p = b->j->p;
    const int64_t rows = b->rows, length = b->span->rows, keys = b->span->keys;
    const int bounded = p->left != HEED_UNBOUNDED || p->right != HEED_UNBOUNDED;
    int64_t h = b->hk * p->G + (r0 ? r0 / length : 0), i = r0 ? r0 % length : 0;
    for (int64_t r = 0; r < rows; r++, i++) {
        if (i == length)
            i = 0, h++;
        b->row[r] = (query){ h, i, 0, keys };
        if (bounded) {
            heed_band(p, b->span, i, &b->row[r].first, &b->row[r].last);
            if (b->row[r].first < b->row[r].last)
                *first = HEED_MIN(*first, b->row[r].first), *last = HEED_MAX(*last, b->row[r].last);
        }
    }
    if (!bounded && rows && keys)
        *first = 0, *last = HEED_MAX(*last, keys);
}

/* Rows [r0, r1) of key head hk against keys [n0, n1). The result stays in the block. */
static void forward_block_run(forward_block *b, int64_t r0, int64_t r1, int64_t n0, int64_t n1)
{
    const heed_problem *p = b->j->p;
    int64_t first = n1, last = n0;
    b->rows = r1 - r0;
    find_rows(b, r0, &first, &last);
    /* Whole vectors, as they are read: loads wait for what was stored in parts. One more, as they may begin with any row. */
    for (int64_t r = 0; r < b->rows + W; r += W)
        vec_store(b->m + r, vec_set1(-INFINITY)), vec_store(b->l + r, vec_zero());
    b->tiles = b->is_direct ? 1 : tile_count(b->rows, forward_height(b->j, last - first));
    if (!(query_rows(b) <= SPLIT_MOST))
        leave_head(b->j, b->span->b * p->Hk + b->hk);
#if MAY_BE_NEAR
    if (b->may_be_near)
        square_rows(b), memset(b->far, 0, sizeof b->far), memset(b->far_rows, 0, sizeof b->far_rows);
#endif
    memset(b->started, 0, sizeof b->started);
    int64_t begin = HEED_MAX(first, n0) / BC * BC, end = HEED_MIN(last, n1);
    for (int64_t n = begin; n < end; n += BC) {
        int finite = -1;
        if (!b->is_direct)
            pack_keys(b, HEED_MAX(n, n0), HEED_MIN(n + BC, n1));
        if (HEED_SPLIT && b->wild[n / BC] && are_seen(b, n, HEED_MIN(n + BC, n1)))
            leave_head(b->j, b->span->b * p->Hk + b->hk);
        ask_during(b, n, end);
        int64_t begins = HEED_MAX(n, n0), ends = HEED_MIN(n + BC, n1),
                units = (ends - begins + PER_UNIT - 1) / PER_UNIT;
#if MAY_BE_NEAR
        if (b->may_be_near)
            look_at_keys(b, begins, ends);
#endif
        ask_in(&b->next, b->rows + b->tiles * asking_steps(MR, round_up(p->Dv, W) / W, units));
#if HEED_SPLIT
        forward_tile tiles[2], *before = NULL;
        for (int64_t t = 0; t < b->tiles; t++) {
            forward_tile *x = before == tiles ? tiles + 1 : tiles;
            int seen = tile_sees(b, x, t, begins, ends);
            if (seen)
                tile_scores(b, x, b->S + (x - tiles) * MR * LDS, before ? &before->weights.work : NULL);
            if (before)
                tile_values(b, before, ends, &finite);
            before = seen ? x : NULL;
        }
        if (before)
            tile_values(b, before, ends, &finite);
#else
        forward_tile x;
        for (int64_t t = 0; t < b->tiles; t++)
            if (tile_sees(b, &x, t, begins, ends)) {
                tile_scores(b, &x, b->S, NULL);
                tile_values(b, &x, ends, &finite);
            }
#endif
    }
}
