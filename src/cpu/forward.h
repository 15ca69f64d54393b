/* Forward attention on the CPU: how the blocks of forward_block.h become items of work. */

static void block_start(forward_block *b, const forward_run *x, const heed_span *s, int64_t hk, int64_t buffer,
                        int thread)
{
    const heed_problem *p = x->j.p;
    size_t scratch = x->f.scratch + x->f.scratch_stride * (size_t)thread;
    int64_t width = round_up(p->Dv, W);
    b->j = &x->j, b->f = &x->f, b->span = s, b->hk = hk;
    b->after.count = 0;
    b->is_direct = are_direct(s->rows, s->keys);
    b->room = at_bytes(&x->j, scratch + x->f.q), b->S = at_bytes(&x->j, scratch + x->f.s);
    b->P = at_bytes(&x->j, scratch + x->f.p), b->O = at_bytes(&x->j, scratch + x->f.o);
    b->panels = at_bytes(&x->j, x->f.panels + x->f.panels_stride * (size_t)buffer);
    b->values = at_bytes(&x->j, x->f.values + x->f.values_stride * (size_t)buffer);
    b->wild = (unsigned char *)at_bytes(&x->j, x->f.wild + x->f.wild_stride * (size_t)buffer);
#if MAY_BE_NEAR
    b->reach = at_bytes(&x->j, x->f.reach + x->f.reach_stride * (size_t)buffer);
    b->may_be_near = !x->j.changes && !p->drop_below && p->D % W == 0 && s->rows >= NEAR_ROWS && s->keys >= NEAR_KEYS;
#endif
    b->packed_first = b->packed_last = 0;
    b->K = (right){ b->panels, PANEL, PANEL * units_of(p->D) * PLANES, PANEL * units_of(p->D) };
    if (x->f.v_in_place && s->keys) {
        source v = keys_of(p, s, &p->a.v, hk, p->Dv);
        b->V = (right){ (const float *)(const void *)source_row(&v, 0), v.spacing, PANEL, 0 };
    } else
        b->V = (right){ b->values, stacked_ld(width), PANEL, width };
}

/* How many chunks the keys of a sequence are cut into: 1, they are not. */
static int64_t chunks_of(const heed_span *s)
{
    return s->rows <= SPLIT_ROWS ? HEED_MAX(1, (s->keys + CHUNK - 1) / CHUNK) : 1;
}

/* The result of chunk 0 of a head; the others follow it. A ragged sequence has room in proportion to its length, which is
 * enough where it has more than one chunk. */
static float *result_of(const forward_run *x, const heed_span *s, int64_t hk)
{
    int64_t slot = x->j.p->a.offsets_k ? 2 * s->k_row / CHUNK : s->b * x->f.splits;
    return at_bytes(&x->j, x->f.results + x->f.results_stride * (size_t)(hk * x->f.slots + slot));
}

/* One chunk of the keys for all rows of a head. */
static void forward_chunk(const forward_run *x, forward_block *b, int64_t chunk)
{
    int64_t ldo = x->f.ldo, n0 = chunk * CHUNK, n1 = HEED_MIN(n0 + CHUNK, b->span->keys), chunks = chunks_of(b->span);
    int64_t rows = b->span->rows * x->j.p->G, step = b->is_direct ? HEED_MIN(DIRECT_ROWS, x->f.block) : x->f.block;
    float *result = NULL;
    if (chunks > 1)
        result = result_of(x, b->span, b->hk) + chunk * (int64_t)(x->f.results_stride / sizeof(float));
    for (int64_t r0 = 0; r0 < rows; r0 += step) {
        forward_block_run(b, r0, HEED_MIN(r0 + step, rows), n0, n1);
        if (chunks == 1)
            finish_block(b);
        for (int64_t r = 0; r < b->rows && chunks > 1; r++, result += ldo + 2) {
            if (b->l[r] != 0 || b->m[r] != b->m[r])
                memcpy(result, b->O + r * ldo, (size_t)ldo * sizeof(float));
            result[ldo] = b->m[r], result[ldo + 1] = b->l[r];
        }
    }
}

/* The chunks of a head put together, in order. */
static void merge_chunks(const forward_run *x, forward_block *b)
{
    const heed_problem *p = x->j.p;
    int64_t ldo = x->f.ldo, chunks = chunks_of(b->span), step = (int64_t)(x->f.results_stride / sizeof(float));
    float c = (x->j.changes ? 1 : x->j.s_scale) * LOG2E;
    for (int64_t r = 0; r < b->span->rows * p->G && chunks > 1; r++) {
        const float *part = result_of(x, b->span, b->hk) + r * (ldo + 2);
        float m = -INFINITY, l = 0, *O = b->O;
        memset(O, 0, (size_t)ldo * sizeof(float));
        for (int64_t i = 0; i < chunks; i++)
            m = part[i * step + ldo] > m || part[i * step + ldo] != part[i * step + ldo] ? part[i * step + ldo] : m;
        for (int64_t i = 0; i < chunks; i++) {
            const float *o = part + i * step;
            if (o[ldo + 1] == 0 && o[ldo] == o[ldo])
                continue;
            float w = exp2f((o[ldo] - m) * c);
            l += w * o[ldo + 1];
            for (int64_t d = 0; d < p->Dv; d++)
                O[d] += w * o[d];
        }
        query_at(p, b->span, b->hk * p->G + r / b->span->rows, r % b->span->rows, &b->row[0]);
        finish_row(b, O, m, l);
    }
}

/* Item `unit` of a head: a chunk of its keys, or a block of its rows, last ones first: with a causal mask they are the
 * long ones. */
static void forward_unit(const forward_run *x, forward_block *b, int64_t unit)
{
    int64_t rows = b->span->rows * x->j.p->G, r = (x->f.row_blocks - 1 - unit) * x->f.block;
    if (b->span->rows <= SPLIT_ROWS) {
        if (unit < chunks_of(b->span))
            forward_chunk(x, b, unit);
    } else if (unit < x->f.row_blocks && r < rows) {
        forward_block_run(b, r, HEED_MIN(r + x->f.block, rows), 0, b->span->keys);
        finish_block(b);
    }
}

static int64_t units_of_head(const forward_run *x) { return HEED_MAX(x->f.row_blocks, x->f.splits); }

/* After `unit` of head `index` comes the next one, or the first of the head that this thread is likely to get. */
static void look_ahead(forward_block *b, const forward_run *x, int64_t index, int64_t unit)
{
    const heed_problem *p = x->j.p;
    heed_span s;
    b->after.count = 0;
    if (!x->f.asks)
        return;
    if (++unit == units_of_head(x))
        unit = 0, index += x->j.plan->threads;
    if (index >= p->B * p->Hk)
        return;
    heed_span_of(p, index / p->Hk, &s);
    if (unit == 0)
        ask_for_keys(&b->after, &x->j, &s, index % p->Hk, 0);
    else
        ask_for_packed(&b->after, b, 0);
    int64_t r = (x->f.row_blocks - 1 - unit) * x->f.block;
    if (r < s.rows * p->G) { /* those of the first query head in it */
        int64_t h = index % p->Hk * p->G + r / s.rows, i = r % s.rows, end = HEED_MIN(i + x->f.block, s.rows);
        ask_for(&b->after, rows_of(p, &s, &p->a.q, h, p->D), i, end);
        ask_for(&b->after, rows_of(p, &s, &p->a.o, h, p->Dv), i, end);
    }
}

/* Many heads: each is one item. Its keys are packed when the first block of rows comes to them, and stay in the cache. */
static void forward_head(void *context, int64_t index, int thread)
{
    const forward_run *x = context;
    heed_span s;
    forward_block b;
    if (is_left(&x->j, index))
        return;
    heed_span_of(x->j.p, index / x->j.p->Hk, &s);
    block_start(&b, x, &s, index % x->j.p->Hk, thread, thread);
    for (int64_t unit = 0; unit < units_of_head(x); unit++) {
        look_ahead(&b, x, index, unit);
        forward_unit(x, &b, unit);
    }
    if (x->f.splits > 1)
        merge_chunks(x, &b);
}

/* Few heads, several threads: first all packing ... */
static void pack_chunk(void *context, int64_t index, int thread)
{
    const forward_run *x = context;
    int64_t chunks = (x->f.keys + CHUNK - 1) / CHUNK, head = index / chunks, first = index % chunks * CHUNK;
    heed_span s;
    forward_block b;
    if (is_left(&x->j, head))
        return;
    heed_span_of(x->j.p, head / x->j.p->Hk, &s);
    block_start(&b, x, &s, head % x->j.p->Hk, head, thread);
    if (first < s.keys && !b.is_direct)
        pack_keys(&b, first, HEED_MIN(first + CHUNK, s.keys));
}

/* ... then all units of all heads ... */
static void forward_item(void *context, int64_t index, int thread)
{
    const forward_run *x = context;
    heed_span s;
    forward_block b;
    int64_t head = index / units_of_head(x);
    if (is_left(&x->j, head))
        return;
    heed_span_of(x->j.p, head / x->j.p->Hk, &s);
    block_start(&b, x, &s, head % x->j.p->Hk, head, thread);
    b.packed_last = s.keys;
    forward_unit(x, &b, index % units_of_head(x));
}

/* ... then what was cut is merged. */
static void merge_head(void *context, int64_t head, int thread)
{
    const forward_run *x = context;
    heed_span s;
    forward_block b;
    if (is_left(&x->j, head))
        return;
    heed_span_of(x->j.p, head / x->j.p->Hk, &s);
    block_start(&b, x, &s, head % x->j.p->Hk, 0, thread);
    merge_chunks(x, &b);
}

/* Rows that are padding: o = 0, lse = -inf. */
static void forward_padding(void *context, int64_t index, int thread)
{
    const forward_run *x = context;
    forward_block b = { .j = &x->j, .f = &x->f };
    heed_span s;
    float zero[HEED_MAX_HEAD_DIM];
    (void)thread;
    heed_span_of(x->j.p, index / x->j.p->Hq, &s);
    b.span = &s;
    for (int64_t i = s.rows; i < s.padded_rows; i++) {
        b.row[0] = (query){ .h = index % x->j.p->Hq, .i = i };
        finish_row(&b, zero, -INFINITY, 0);
    }
}

static void forward_all(forward_run *x)
{
    const heed_problem *p = x->j.p;
    int64_t heads = p->B * p->Hk, chunks = (x->f.keys + CHUNK - 1) / CHUNK;
    int threads = x->j.plan->threads;
    if (x->f.by_head)
        parallel_for(threads, heads, forward_head, x);
    else {
        if (!x->f.all_direct)
            parallel_for(threads, heads * chunks, pack_chunk, x);
        parallel_for(threads, heads * units_of_head(x), forward_item, x);
        if (x->f.splits > 1)
            parallel_for(threads, heads, merge_head, x);
    }
    if (p->a.lengths_q)
        parallel_for(threads, p->B * p->Hq, forward_padding, x);
}

#if HEED_SPLIT
size_t ISA(heed_forward_workspace)(const heed_problem *p, const heed_plan *plan)
{
    return HEED_MAX(forward_lay_out(p, plan).bytes, left_bytes(p) + heed_forward_workspace_avx512(p, plan));
}

heed_status ISA(heed_forward)(const heed_problem *p, const heed_plan *plan, const heed_exec *exec)
{
    forward_run x = { .f = forward_lay_out(p, plan) };
    job_start(&x.j, p, plan, exec, exec->workspace);
    leave_short(&x.j);
    forward_all(&x);
    return do_left(&x.j, exec, heed_forward_left_avx512);
}
#else
size_t ISA(heed_forward_workspace)(const heed_problem *p, const heed_plan *plan)
{
    return forward_lay_out(p, plan).bytes;
}

heed_status ISA(heed_forward_left)(const heed_problem *p, const heed_plan *plan, const heed_exec *exec,
                                   unsigned char *left)
{
    forward_run x = { .f = forward_lay_out(p, plan) };
    job_start(&x.j, p, plan, exec, left);
    forward_all(&x);
    return HEED_OK;
}

heed_status ISA(heed_forward)(const heed_problem *p, const heed_plan *plan, const heed_exec *exec)
{
    return ISA(heed_forward_left)(p, plan, exec, NULL);
}
#endif
