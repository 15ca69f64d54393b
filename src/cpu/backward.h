/* Backward attention on the CPU. P is computed again from Q, K and lse. An item of work is a block of keys of one key
 * head, which owns its rows of dK and dV; it walks over the blocks of rows of all query heads of the group
 * (backward_block.h).
 *
 * dQ of a block of rows is summed over the blocks of keys in ascending order: each block of rows has a turn counter, and
 * an item waits until the blocks before its own have added theirs. Items are handed out in that order, so the one that
 * is waited for is always running, and each follows the one before it at a distance of one block of rows. The sums are
 * thus the same for any number of threads. */

#include <sched.h>
#include <stdatomic.h>

static _Atomic int32_t *turn_of(const backward_run *x, const heed_span *s, int64_t h, int64_t block)
{
    return (_Atomic int32_t *)(void *)at_bytes(&x->j, x->f.turns) + h * x->f.blocks + block_index(x, s, block);
}

/* Writes n rows of sums as rows first, first + 1, ... of head h of a result; sums == NULL: zeros. With `add` the result
 * is fp32 and they are added to what is there. */
static void write_rows(const source *to, int64_t first, int64_t n, const float *sums, int64_t ld, int add)
{
    static const float zeros[HEED_MAX_HEAD_DIM];
    if (sums && !add && to->t->stride[3] == 1 && to->dim % W == 0) {
        char *row = (char *)(uintptr_t)source_row(to, first);
        FOR_TYPE(to->t->dtype, store_rows_as, row, to->step, sums, ld, n, to->dim);
        return;
    }
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

/* First of all, for each block of rows: the keys it sees, its turn, and delta. Rows without keys get their zeros. */
static void prepare_rows(void *context, int64_t index, int thread)
{
    const backward_run *x = context;
    const heed_problem *p = x->j.p;
    const heed_gradient *g = &p->g;
    int64_t block = index % x->f.row_blocks, h = index / x->f.row_blocks % p->Hq, b = index / x->f.row_blocks / p->Hq;
    int64_t i0 = block * x->f.block;
    heed_span s;
    (void)thread;
    const int elsewhere = !HEED_SPLIT && is_left(&x->j, b * p->Hk + h / p->G);
    heed_span_of(p, b, &s);
    if (i0 >= s.padded_rows || (elsewhere && h > 0))
        return;
    int64_t first = s.keys, last = 0, i1 = HEED_MIN(i0 + x->f.block, s.rows);
    for (int64_t i = i0; i < i1; i++) {
        query q;
        query_at(p, &s, h, i, &q);
        if (q.first < q.last)
            first = HEED_MIN(first, q.first), last = HEED_MAX(last, q.last);
    }
    row_bounds bounds = { 0, -1 };
    if (first < last)
        bounds = (row_bounds){ (int32_t)(first / x->f.key_block), (int32_t)((last - 1) / x->f.key_block) };
    if (h == 0) /* for all heads, some of which may be computed here even if this one is not */
        *bounds_of(x, &s, block) = bounds;
    if (elsewhere)
        return;
    if (!x->f.delta_late && i0 < i1)
        delta_of_rows(at_bytes(&x->j, x->f.delta) + row_index(x, &s, h, i0), p, &s, h, i0, i1 - i0);
    atomic_init(turn_of(x, &s, h, block), bounds.first);

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
    if (!HEED_SPLIT && is_left(&x->j, index))
        return;
    heed_span_of(p, index / p->Hk, &s);
    s.col = 0, s.col_step = 1;
    source d_k = keys_of(p, &s, &p->g.d_k, index % p->Hk, p->D), d_v = keys_of(p, &s, &p->g.d_v, index % p->Hk, p->Dv);
    if (p->g.d_k.data)
        write_rows(&d_k, 0, s.padded_keys, NULL, 0, 0);
    if (p->g.d_v.data)
        write_rows(&d_v, 0, s.padded_keys, NULL, 0, 0);
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
    _Atomic int32_t *turn = turn_of(x, &b->span, b->h, block);
    source d_q = rows_of(p, &b->span, &p->g.d_q, b->h, p->D);
    int in_place = x->f.dq_in_place;
    int add = key_block != bounds.first;
    b->dQ = NULL;
    if (p->g.d_q.data)
        b->dQ = sums_at(&d_q, b->i0, in_place,
                        x->f.key_blocks == 1
                            ? b->dQs
                            : at_bytes(&x->j, x->f.dq) + row_index(x, &b->span, b->h, b->i0) * x->f.wide,
                        x->f.wide, &b->ld_dq);
    if (!b->careful) {
        score_block(b);
        add_to_keys(b);
    }
    while (atomic_load_explicit(turn, memory_order_acquire) != key_block)
        sched_yield();
    if (b->careful) {
        if (!b->met)
            clear_key_sums(b, 0, b->n1 - b->n0);
        add_seen_pairs(b, add);
    } else if (b->dQ)
        add_to_rows(b, add);
    atomic_store_explicit(turn, (int32_t)key_block + 1, memory_order_release);
    b->met = 1;
    if (b->dQ && !in_place && key_block == bounds.last)
        write_rows(&d_q, b->i0, b->rows, b->dQ, b->ld_dq, p->g.accumulate);
}

/* The item of work `index`. One thread takes head after head, which keeps Q and dO of a head in the cache. Several start
 * on different heads, so that they seldom wait for each other. Either way the blocks of a head come in ascending order. */
static int64_t item_at(const backward_run *x, int64_t index, int64_t *key_block)
{
    int64_t heads = x->j.p->B * x->j.p->Hk, several = x->j.plan->threads > 1;
    *key_block = several ? index / heads : index % x->f.key_blocks;
    return several ? index % heads : index / x->f.key_blocks;
}

/* From one block of rows to the next that may see the block of keys, over all query heads of the group; 0 when there is
 * none. The first is that after block -1. */
static int next_block(const backward_run *x, const heed_span *s, int64_t hk, int64_t key_block, int64_t *h,
                      int64_t *block)
{
    do {
        if (++*block * x->f.block >= s->rows)
            *block = 0, ++*h;
        if (*h == (hk + 1) * x->j.p->G || !s->rows)
            return 0;
    } while (key_block < bounds_of(x, s, *block)->first || key_block > bounds_of(x, s, *block)->last);
    return 1;
}

/* What comes after this block of rows: block `block` of query head h, or with the next item of work its keys and first
 * block. */
static void look_further(backward_block *b, int more, int64_t h, int64_t block, int64_t index)
{
    const backward_run *x = b->x;
    const heed_problem *p = x->j.p;
    const heed_gradient *g = &p->g;
    heed_span s = b->span;
    b->next.count = 0;
    if (!x->f.asks || (!more && index >= p->B * p->Hk * x->f.key_blocks))
        return;
    if (!more) {
        int64_t key_block, head = item_at(x, index, &key_block), hk = head % p->Hk;
        heed_span_of(p, head / p->Hk, &s);
        int64_t n0 = key_block * x->f.key_block, n1 = HEED_MIN(n0 + x->f.key_block, s.keys);
        ask_for(&b->next, keys_of(p, &s, &p->a.k, hk, p->D), n0, n1);
        ask_for(&b->next, keys_of(p, &s, &p->a.v, hk, p->Dv), n0, n1);
        ask_for(&b->next, keys_of(p, &s, &g->d_k, hk, p->D), n0, n1);
        ask_for(&b->next, keys_of(p, &s, &g->d_v, hk, p->Dv), n0, n1);
        h = hk * p->G, block = -1;
        more = next_block(x, &s, hk, key_block, &h, &block);
    }
    int64_t i0 = block * x->f.block, i1 = more ? HEED_MIN(i0 + x->f.block, s.rows) : i0;
    ask_for(&b->next, rows_of(p, &s, &p->a.q, h, p->D), i0, i1);
    ask_for(&b->next, rows_of(p, &s, &g->d_o, h, p->Dv), i0, i1);
    ask_for(&b->next, rows_of(p, &s, &g->d_q, h, p->D), i0, i1);
    ask_for(&b->next, rows_of(p, &s, &p->a.o, h, p->Dv), i0, x->f.delta_late ? i1 : i0);
    int64_t keys = b->n1 - b->n0, vecs = x->f.wide / W, vecs_v = x->f.wide_v / W;
    int64_t key_units = (keys + PER_UNIT - 1) / PER_UNIT, row_units = (b->rows + PER_UNIT - 1) / PER_UNIT;
    int64_t steps = asking_steps(b->rows, vecs, key_units) + asking_steps(keys, vecs, row_units) +
                    asking_steps(keys, vecs_v, row_units);
#if HEED_SPLIT
    steps += asking_steps(b->rows, keys / W, units_of(p->D)) + asking_steps(b->rows, keys / W, units_of(p->Dv));
    if (!b->all_seen)
        steps = steps / 2 + 1;
#else
    steps += row_units; /* gradient.h */
#endif
    ask_in(&b->next, steps);
}

static void backward_keys(void *context, int64_t index, int thread)
{
    const backward_run *x = context;
    const heed_problem *p = x->j.p;
    int64_t key_block, head = item_at(x, index, &key_block);
    backward_block b;
    heed_span_of(p, head / p->Hk, &b.span);
    b.hk = head % p->Hk;
    int64_t n0 = key_block * x->f.key_block, n1 = HEED_MIN(n0 + x->f.key_block, b.span.keys);
    if (n0 >= n1 || is_left(&x->j, head))
        return;
    block_of_thread(&b, x, thread);
    load_keys(&b, n0, n1);
    source d_k = keys_of(p, &b.span, &p->g.d_k, b.hk, p->D), d_v = keys_of(p, &b.span, &p->g.d_v, b.hk, p->Dv);
    b.dK = sums_at(&d_k, n0, x->f.dk_in_place, b.dKs, x->f.wide, &b.ld_dk);
    b.dV = sums_at(&d_v, n0, x->f.dv_in_place, b.dVs, x->f.wide_v, &b.ld_dv);
    b.met = 0;
    int64_t next_h = b.hk * p->G, next = -1;
    for (int more = next_block(x, &b.span, b.hk, key_block, &next_h, &next); more;) {
        int64_t h = next_h, block = next;
        load_rows(&b, h, block * x->f.block);
        more = next_block(x, &b.span, b.hk, key_block, &next_h, &next);
        look_further(&b, more, next_h, next, index + x->j.plan->threads);
        meet(&b, block, *bounds_of(x, &b.span, block), key_block);
    }
    if (!b.met)
        clear_key_sums(&b, 0, n1 - n0);
#if HEED_SPLIT
    else
        turn_sums(b.dK, b.ld_dk, x->f.wide, b.dKt, n1 - n0), turn_sums(b.dV, b.ld_dv, x->f.wide_v, b.dVt, n1 - n0);
#endif
    if (p->g.d_k.data && !x->f.dk_in_place)
        write_rows(&d_k, n0, n1 - n0, b.dK, b.ld_dk, p->g.accumulate);
    if (p->g.d_v.data && !x->f.dv_in_place)
        write_rows(&d_v, n0, n1 - n0, b.dV, b.ld_dv, p->g.accumulate);
}

/* ---- The call --------------------------------------------------------------------------------------------------- */

static void backward_all(backward_run *x)
{
    const heed_problem *p = x->j.p;
    int threads = x->j.plan->threads;
    parallel_for(threads, p->B * p->Hq * x->f.row_blocks, prepare_rows, x);
    if (!p->g.accumulate && (p->a.key_stride > 1 || p->a.lengths_k))
        parallel_for(threads, p->B * p->Hk, clear_keys, x);
    if (p->g.d_q.data || p->g.d_k.data || p->g.d_v.data)
        parallel_for(threads, p->B * p->Hk * x->f.key_blocks, backward_keys, x);
}

#if HEED_SPLIT
size_t ISA(heed_backward_workspace)(const heed_problem *p, const heed_plan *plan)
{
    return HEED_MAX(backward_lay_out(p, plan).bytes, left_bytes(p) + heed_backward_workspace_avx512(p, plan));
}

heed_status ISA(heed_backward)(const heed_problem *p, const heed_plan *plan, const heed_exec *exec)
{
    backward_run x = { .f = backward_lay_out(p, plan) };
    job_start(&x.j, p, plan, exec, exec->workspace);
    leave_short(&x.j);
    backward_all(&x);
    if (p->g.d_sink.data)
        parallel_for(plan->threads, p->Hq, sink_owned, &x);
    return do_left(&x.j, exec, heed_backward_left_avx512);
}
#else
size_t ISA(heed_backward_workspace)(const heed_problem *p, const heed_plan *plan)
{
    return backward_lay_out(p, plan).bytes;
}

heed_status ISA(heed_backward_left)(const heed_problem *p, const heed_plan *plan, const heed_exec *exec,
                                    unsigned char *left)
{
    backward_run x = { .f = backward_lay_out(p, plan) };
    job_start(&x.j, p, plan, exec, left);
    backward_all(&x);
    return HEED_OK;
}

heed_status ISA(heed_backward)(const heed_problem *p, const heed_plan *plan, const heed_exec *exec)
{
    backward_run x = { .f = backward_lay_out(p, plan) };
    job_start(&x.j, p, plan, exec, NULL);
    backward_all(&x);
    if (p->g.d_bias.data) {
        const int64_t *shape = p->g.d_bias.shape;
        if (p->a.key_stride > 1)
            clear_bias(&p->g.d_bias);
        parallel_for(plan->threads,
                     shape[0] * shape[1] * (shape[2] == 1 ? 1 : x.f.row_blocks) * (shape[3] == 1 ? 1 : x.f.key_blocks),
                     bias_owned, &x);
    }
    if (p->g.d_sink.data)
        parallel_for(plan->threads, p->Hq, sink_owned, &x);
    return HEED_OK;
}
#endif
