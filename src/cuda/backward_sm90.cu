/* Backward for Hopper, fp16 and bf16, head sizes to 256, with no workspace but two floats for each row of q. Three
 * kernels: what each query contributes (L and delta), dK and dV, dQ. Or one kernel for all three gradients, with dQ's
 * sums in memory (backward_sm90fused.cu), and what comes before and after it. */
#include "backward_sm90_around.cuh"

struct tables {
    term_rows terms;
    piece_table of[2]; /* keys, queries */
};

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

static int64_t pitch_of(const heed_problem *p) { return (p->a.q.shape[2] + 3) / 4 * 4; }

/* How many tiles of so many rows of q or k a table has: see piece_at(). */
static int64_t places_of(const heed_problem *p, const heed_tensor *t, int rows)
{
    const int64_t length = t->shape[2];
    return (t == &p->a.k ? p->a.offsets_k : p->a.offsets_q) ? length / rows + p->B : p->B * tiles_of(length, rows);
}

void heed_sm90_take_table(workspace *space, piece_table *t, const heed_problem *p, const heed_tensor *rows_of, int rows,
                          int grid)
{
    const size_t pieces = (size_t)places_of(p, rows_of, rows);
    t->rows = rows, t->grid = grid, t->grouped = false;
    t->lengths = (int *)space->take((size_t)p->B * sizeof(int));
    t->pieces = (piece *)space->take(pieces * sizeof(piece));
    t->ranges = (int2 *)space->take(pieces * rows * sizeof(int2));
}

/* How many tiles the longest sequence has. */
static void count_tiles(const args &a, piece_table &keys, piece_table &queries)
{
    const int64_t count = a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0;
    keys.tiles = (int)tiles_of(count, keys.rows);
    queries.tiles = queries.rows ? (int)tiles_of(a.Sq, queries.rows) : 0; /* 0: dQ never has a kernel of its own */
    keys.grouped = keys.grouped && keys.tiles > LEAVING;                  /* of no more, dQ may leave with the last */
}

heed_status heed_sm90_find_pieces(const args &a, piece_table &keys, piece_table &queries, const heed_exec *x)
{
    count_tiles(a, keys, queries);
    return launch(find_pieces, tiles_of((int64_t)a.B * (keys.tiles + queries.tiles), 4), 128, 0, x, a, keys, queries);
}

/* Whether dQ goes out with the only tile of keys, so that there is nothing to sum: can_leave() will say so, too. */
static bool has_one_tile(const heed_problem *p, const backward_form &form)
{
    const heed_attention &a = p->a;
    const bool same = !a.lengths_q && !a.lengths_k && !a.offsets_q && !a.offsets_k; /* length of all sequences */
    return form.all.leaves && p->g.d_q.data && p->full.keys > 0 && p->full.keys <= form.all.rows && same &&
           p->left == HEED_UNBOUNDED && p->right == HEED_UNBOUNDED && p->D % 8 == 0 && !p->g.accumulate &&
           p->g.d_q.dtype != HEED_F32;
}

/* How a problem is solved: one kernel for all gradients has sums of dQ, may have L and delta lent room in dQ, and parts. */
struct way {
    bool sums, lent;
    int parts;
};

/* Whether what find_terms() finds can lie in the rows of dQ. */
static bool can_lend(const heed_problem *p)
{
    const heed_tensor &t = p->g.d_q;
    const int64_t size = (int64_t)heed_dtype_size(t.dtype);
    return t.data && !p->g.accumulate && p->D * size >= 16 &&
           HEED_MAX(t.stride[1], t.stride[2]) * size / 8 <= INT32_MAX;
}

/* How many parts heads that share keys fall into at most: see part_sums. */
static int parts_of(const heed_problem *p)
{
    const heed_gradient &g = p->g;
    if (g.accumulate || (g.d_k.data && g.d_k.dtype == HEED_F32) || (g.d_v.data && g.d_v.dtype == HEED_F32) ||
        p->D % 8 || p->Dv % 8)
        return 1;
    return (int)tiles_of(p->G, heads_of_part((int)p->G, p->Sq));
}

/* Returns the bytes that it takes. */
static size_t lay_out(const heed_problem *p, const backward_form &form, const way &how, void *memory, tables *t)
{
    workspace space = { (char *)memory, 0 };
    const int pitch = (int)pitch_of(p);
    const size_t terms = (size_t)(p->a.q.shape[0] * p->Hq * pitch) * sizeof(float);
    const bool sums = how.sums;
    term_rows &to = t->terms;
    to.terms = { NULL, NULL, p->Hq * pitch, pitch, 1, 1 };
    to.L = (float *)space.take(sums ? 0 : terms);
    to.delta = (float *)space.take(!sums || ((p->g.d_sink.data || p->g.d_bias.data) && !how.lent) ? terms : 0);
    to.sums.data = NULL, to.parts = { 1, NULL, NULL }, to.part_places = 0;
    if (sums) {
        to.sums.strips = (int)places_of(p, &p->a.q, 16);
        to.sums.width = HEED_MAX((int)(p->D + 7) / 8 * 8, narrowest_sums(form.all.head_dim));
        const int64_t rows = has_one_tile(p, form) ? 0 : p->Hq * to.sums.strips * 16;
        to.sums.data = (float *)space.take((size_t)(rows * to.sums.width) * sizeof(float));
        to.places = (int)(places_of(p, &p->a.q, COLUMNS) * p->Hq);
        to.turns = (int *)space.take((size_t)to.places * TURN_APART * sizeof(int));
        if (how.lent) { /* 8 bytes of each row, 4, and 4 of delta */
            const int64_t *stride = p->g.d_q.stride, step = 8 / (int64_t)heed_dtype_size(p->g.d_q.dtype);
            to.terms = { (uint2 *)p->g.d_q.data,  (uint32_t *)p->g.d_q.data + 2, stride[0] / step,
                         (int)(stride[1] / step), (int)(stride[2] / step),       2 };
            to.delta = (float *)p->g.d_q.data + 3;
        } else
            to.terms.most = (uint2 *)space.take(terms * 2), to.terms.least = (uint32_t *)space.take(terms);
    }
    if (how.parts > 1) {
        const int64_t tiles = places_of(p, &p->a.k, form.all.rows) * p->Hk * 2; /* of dK and of dV */
        to.part_places = (int)(tiles * form.all.rows / 16);
        to.parts.most = how.parts;
        to.parts.turns = (int *)space.take((size_t)to.part_places * sizeof(int));
        to.parts.rest = (uint4 *)space.take((size_t)tiles * form.all.rows * form.all.head_dim);
    }
    t->terms.counters = (int *)space.take(2 * sizeof(int));
    heed_sm90_take_table(&space, &t->of[0], p, &p->a.k, sums ? form.all.rows : form.dkv.rows, sums ? COLUMNS : 1);
    t->of[1] = {};
    t->of[1].rows = form.dq.rows;
    if (!sums)
        heed_sm90_take_table(&space, &t->of[1], p, &p->a.q, form.dq.rows, 1);
    return space.bytes;
}

/* One kernel makes all gradients, if its workspace is no larger than q, k, v and o, in parts if there is room for these. A
 * softcap takes registers that are not there beside dQ; and sums of dQ for few keys or narrow heads may be larger. Asked
 * of one sequence and one head of keys, so that neither the batch nor the heads decide about the bits. */
static way way_for(const heed_problem *p, const backward_form &form)
{
    const way two = { false, false, 1 }, one_kernel = { true, false, 1 };
    if (form.dkv.launch && (!form.all.launch || !p->g.d_q.data || p->a.softcap > 0))
        return two;
    heed_problem one = *p;
    tables t;
    one.Hq = one.G, one.Hk = 1;
    if (!p->a.offsets_q && !p->a.offsets_k)
        one.B = one.a.q.shape[0] = one.a.k.shape[0] = 1;
    const int64_t rows = one.a.q.shape[0] * one.a.q.shape[2] * one.Hq + one.a.k.shape[0] * one.a.k.shape[2];
    const size_t room = (size_t)(rows * (p->D + p->Dv) * 2);
    for (int parts = form.parts.launch ? parts_of(p) : 1; parts; parts = parts > 1 ? 1 : 0)
        for (int lent = 0; lent <= (form.parts.launch && can_lend(p)); lent++) {
            const way how = { true, lent != 0, parts };
            if (lay_out(&one, form, how, NULL, &t) <= room)
                return how;
        }
    return form.dkv.launch ? two : one_kernel;
}

size_t heed_sm90_backward_bytes(const heed_problem *p, const backward_form &form)
{
    tables t;
    return lay_out(p, form, way_for(p, form), NULL, &t);
}

/* Maps of the queries' side (Q, dO) and the keys' (K, V), for tiles of so many rows. */
static heed_status map_queries(tensor_map m[2], const heed_problem *p, const args &a, int rows)
{
    const int64_t batches = p->a.q.shape[0];
    heed_status status = heed_tensor_map(&m[0], a.q, a.D, a.q_rows, a.Hq, batches, rows);
    return status ? status : heed_tensor_map(&m[1], a.d_o, a.Dv, a.q_rows, a.Hq, batches, rows);
}

static heed_status map_keys(tensor_map m[2], const heed_problem *p, const args &a, view k, view v, int rows)
{
    const int64_t batches = p->a.k.shape[0], keys = a.col < a.k_rows ? (a.k_rows - 1 - a.col) / a.col_step + 1 : 0;
    if (keys) { /* those on the stride are the rows of a tensor of their own */
        k.data += a.col * k.stride[2] * 2, v.data += a.col * v.stride[2] * 2;
        k.stride[2] *= a.col_step, v.stride[2] *= a.col_step;
    }
    heed_status status = heed_tensor_map(&m[0], k, a.D, HEED_MAX(keys, 1), a.Hk, batches, rows);
    return status ? status : heed_tensor_map(&m[1], v, a.Dv, HEED_MAX(keys, 1), a.Hk, batches, rows);
}

/* Heads that are worked on at the same time. With a band their tiles differ in length, and longest first needs many to
 * choose from; but what they read should stay in the L2 cache. */
int heed_sm90_heads_together(const args &a, int heads, int64_t bytes_of_head)
{
    if (a.left >= FAR && a.right >= FAR)
        return 1;
    return (int)HEED_MAX(1, HEED_MIN(heads, ((int64_t)24 << 20) / HEED_MAX(bytes_of_head, 1)));
}

/* Whether dQ can leave with the last keys: it is of 16 bits, every row sees a key, and the copy engine, which writes whole
 * 16 bytes, writes nothing but rows. It is worth while where heads are short: the last keys have more to wait for, and a
 * pass over all sums is saved. */
static bool can_leave(const args &a)
{
    const span &s = a.all;
    const bool all = a.left >= FAR && a.right >= FAR && s.keys;
    return a.uniform && a.d_q.data && a.d_q.dtype != HEED_F32 && !a.accumulate && a.D % 8 == 0 &&
           (all || (s.unit && s.low < s.high && s.high > 0 && s.rows - 1 + s.low < s.keys));
}

/* dK and dV, or all gradients; units: multiprocessors. */
static heed_status run_keys(backward_job *job, const heed_problem *p, const tables &t, const backward_form &form,
                            int units, const heed_exec *x)
{
    const args &a = job->a;
    const bool all = job->sums.data;
    const piece_table &keys = t.of[0];
    const int heads = a.B * a.Hk * job->parts.most, heads_met = (int)tiles_of(a.G, job->parts.most);
    heed_status status;
    job->leaves = all && form.all.leaves && keys.tiles <= LEAVING && can_leave(a);
    job->pieces = keys.pieces, job->ranges = keys.ranges, job->lengths = keys.lengths;
    job->counter = t.terms.counters;
    job->tiles = keys.tiles, job->count = job->tiles * heads;
    /* Bytes of Q and dO; sums of dQ want room, too. Who works on a long head is in about the same half of it. */
    const int64_t met = (int64_t)(all ? HEED_MIN(a.Sq, HEED_MAX(2048, a.Sq / 2)) : a.Sq) * heads_met * (a.D + a.Dv) * 2;
    job->together = heed_sm90_heads_together(a, heads, all ? met + met / 2 : met);
    /* That the tiles of a head follow each other, as they take turns, and do not all start at once; nor all end, where the
     * last ones wait for the others. */
    const int working = job->leaves ? units + units / 2 : units;
    if (all)
        job->together = (int)HEED_MAX(job->together, HEED_MIN(heads, tiles_of(working, job->tiles)));
    if ((a.left < FAR || a.right < FAR) && heads_met > 1 && job->parts.most == 1 && job->count <= 8 * units)
        job->together = heads; /* few tiles and long ones: longest first among all */
    if (job->parts.most > 1) { /* in equal shares, as the last would be long and too few for all multiprocessors */
        int shares = heads / job->together;
        while (heads % shares)
            shares--;
        job->together = heads / shares;
    }
    if ((status = map_keys(job->own, p, a, a.k, a.v, keys.rows)) || (status = map_queries(job->other, p, a, COLUMNS)) ||
        (job->leaves && (status = heed_tensor_map(&job->out, a.d_q, a.D, a.q_rows, a.Hq, p->a.q.shape[0], 16))))
        return status;
    const backward_kernel &kernel = job->parts.most > 1 || job->terms.row != 1 ? form.parts : all ? form.all : form.dkv;
    return kernel.launch(*job, HEED_MIN(units, job->count), x);
}

static heed_status run_queries(backward_job *job, const heed_problem *p, const tables &t, const backward_form &form,
                               int units, const heed_exec *x)
{
    const args &a = job->a;
    const piece_table &queries = t.of[1];
    const int heads = a.B * a.Hq;
    heed_status status;
    job->pieces = queries.pieces, job->ranges = queries.ranges, job->lengths = queries.lengths;
    job->counter = t.terms.counters + 1;
    job->tiles = queries.tiles, job->count = job->tiles * heads;
    job->together = heed_sm90_heads_together(a, heads, (int64_t)a.Sk / a.col_step * (a.D + a.Dv) * 2);
    if ((status = map_queries(job->own, p, a, queries.rows)) ||
        (status = map_keys(job->other, p, a, a.k, a.v, COLUMNS)))
        return status;
    return form.dq.launch(*job, HEED_MIN(units, job->count), x);
}

/* The kernel that comes second begins where the first has no more work. With a band, where heads are long, that is the one
 * for keys, whose pieces are shorter: the longest decide when all is done. */
static heed_status run(backward_job *job, const heed_problem *p, const tables &t, const backward_form &form, int units,
                       const heed_exec *x)
{
    const args &a = job->a;
    const bool all = job->sums.data, queries_first = (a.left < FAR || a.right < FAR) && t.of[0].tiles > 16;
    heed_status status = HEED_OK;
    job->second = job->leaves = false;
    for (int turn = 0; turn < 2 && !status; turn++) {
        const bool queries = turn != queries_first;
        if (queries ? a.d_q.data && !all : (a.d_k.data || a.d_v.data || all) && t.of[0].tiles)
            status = (queries ? run_queries : run_keys)(job, p, t, form, units, x), job->second = true;
    }
    return status;
}

static score_rule rule_of(const args &a)
{
    const bool capped = a.softcap > 0;
    return { a.scale * LOG2E, capped ? 2.0f * LOG2E * a.scale / a.softcap : 0.0f, a.softcap * LOG2E,
             capped ? 1.0f / (a.softcap * LOG2E) : 0.0f };
}

/* What comes before the large kernels: pieces of work and terms. a->delta becomes that of the terms. */
static heed_status prepare(const heed_problem *p, args *a, tables *t, bool lent, const heed_exec *x)
{
    t->terms.rows = a->q_rows, t->terms.pitch = (int)pitch_of(p);
    t->terms.heads = p->a.q.shape[0] * a->Hq;
    t->of[0].grouped = t->terms.sums.data && !x->nondeterministic && a->left >= FAR && a->right < FAR;
    count_tiles(*a, t->of[0], t->of[1]);
    if (t->terms.sums.data)
        t->of[1].tiles = 0; /* dQ has no kernel of its own */
    heed_status status = a->q.dtype == HEED_F16 ? launch_terms<__half>(*a, t->terms, t->of[0], t->of[1], x)
                                                : launch_terms<__nv_bfloat16>(*a, t->terms, t->of[0], t->of[1], x);
    view &delta = a->delta;
    char *const d_q = a->d_q.data;
    const term_view &terms = t->terms.terms;
    delta.data = (char *)t->terms.delta, delta.dtype = HEED_F32;
    delta.stride[0] = terms.batch * terms.times, delta.stride[1] = (int64_t)terms.head * terms.times;
    delta.stride[2] = (int64_t)terms.row * terms.times, delta.stride[3] = 1;
    if (lent)
        a->d_q.data = NULL; /* its padding is zeroed when all have read the terms */
    if (!status)
        status = heed_cuda_prepare_backward(p, a, x);
    a->d_q.data = d_q;
    if (!status)
        status = heed_cuda_sink_gradient(*a, x);
    return status ? status : heed_cuda_bias_gradient(*a, x);
}

/* A tensor without elements has no map; then the sums are over nothing. */
static int is_nothing(const heed_problem *p)
{
    return !heed_elements(&p->a.q) || !heed_elements(&p->a.k) || !heed_elements(&p->a.v);
}

static heed_status clear_all(const heed_problem *p, const args &a, const heed_exec *x)
{
    if (a.accumulate)
        return HEED_OK;
    heed_status status = heed_cuda_fill(a.d_q, p->g.d_q.shape, 0.0f, x);
    status = status ? status : heed_cuda_fill(a.d_k, p->g.d_k.shape, 0.0f, x);
    return status ? status : heed_cuda_fill(a.d_v, p->g.d_v.shape, 0.0f, x);
}

heed_status heed_sm90_backward(const heed_problem *p, const backward_form &form, const heed_exec *x)
{
    on_device device(x->device);
    heed_device chip;
    backward_job job;
    tables t;
    heed_status status = device.status;
    if (status || (status = heed_cuda_device(x->device, &chip)) || (status = heed_cuda_args(p, &job.a)))
        return status;
    const way how = way_for(p, form);
    lay_out(p, form, how, x->workspace, &t);
    job.rule = rule_of(job.a);
    if (t.terms.sums.data && fabsf(job.rule.c) < 1e-30f)
        job.rule.c = 1e-30f; /* so that there is an L / c */
    t.terms.inverse = 1.0f / job.rule.c;
    const term_rows &terms = t.terms;
    if ((status = prepare(p, &job.a, &t, how.lent, x)))
        return status;
    if (is_nothing(p))
        return clear_all(p, job.a, x);
    job.a.scale *= job.a.keep_scale; /* from here on what dQ and dK leave with */
    job.L = terms.L, job.delta = terms.delta, job.terms = terms.terms, job.parts = terms.parts, job.pitch = terms.pitch;
    job.sums = terms.sums, job.turns = terms.turns, job.any_order = x->nondeterministic;
    job.grouped = t.of[0].grouped;
    status = run(&job, p, t, form, chip.units, x);
    if (status || !job.sums.data || job.leaves || !job.a.d_q.data)
        return status;
    if (how.lent && (job.a.lengths_q || job.a.offsets_q) &&
        (status = heed_cuda_fill(job.a.d_q, p->g.d_q.shape, 0.0f, x)))
        return status;
    const int tiles = (int)tiles_of(job.a.Sq, COLUMNS);
    return launch_next(job.a.q.dtype == HEED_F16 ? finish_dq<__half> : finish_dq<__nv_bfloat16>,
                       (int64_t)tiles * job.a.B * job.a.Hq, 128, 0, x, job.a, terms, tiles);
}

static backward_form form_of(const heed_problem *p)
{
    const int head_dim = (int)HEED_MAX(p->D, p->Dv);
    return { heed_sm90_dkv(head_dim), heed_sm90_dq(head_dim), {}, {} };
}

size_t heed_backward_workspace_sm90(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return heed_sm90_backward_bytes(p, form_of(p));
}

heed_status heed_backward_sm90(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    (void)plan;
    return heed_sm90_backward(p, form_of(p), x);
}
