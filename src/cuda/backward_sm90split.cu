/* Backward for fp32 on Hopper: a pass splits all operands, then come the kernels of backward_sm90split.cuh, or above head size
 * 128 the one of backward_sm90split_wide.cu, and what these have marked backward_split.cuh computes again. */
#include "backward_sm90split_dq.cuh"

/* ---- Kernels ----------------------------------------------------------------------------------------------------- */

template <int HEAD, int PARTS, int TERMS>
__global__ void __launch_bounds__(dkv_shape<HEAD, PARTS, TERMS>::THREADS, 1)
    dkv_sm90split(const __grid_constant__ split_job p)
{
    typedef dkv_shape<HEAD, PARTS, TERMS> C;
    let_next_start(); /* dQ, on the multiprocessors that are done here */
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(split_shared<C> *)memory;
    init_barriers(s);
    wait_for_last();
    const int group = uniform(threadIdx.x / 128);
    if (group == C::CONSUMERS + C::OWNERS) {
        fewer_registers<C::FEW>();
        produce<C>(p.job, s);
        return;
    }
    if constexpr (C::OWNERS != 0)
        if (group == C::CONSUMERS) {
            fewer_registers<C::SOME>();
            if (p.job.leaves)
                sums_role<HEAD, C, true>(p, s);
            else
                sums_role<HEAD, C, false>(p, s);
            return;
        }
    more_registers<C::MANY>();
    if (group == 0)
        values_role<HEAD, C>(p, s);
    else
        keys_role<HEAD, C>(p, s);
}

/* dQ from its sums: a block for each 64 queries of each head. */
template <int HEAD>
__global__ void __launch_bounds__(128)
    finish_split(const __grid_constant__ args a, dq_sums sums, const int *turns, int tiles)
{
    const int h = blockIdx.x % a.Hq, tile = blockIdx.x / a.Hq % tiles, b = blockIdx.x / a.Hq / tiles;
    let_next_start();
    wait_for_last();
    const span q = span_of(a, b);
    const bool any = turns[place_of(a, piece_at(a, false, COLUMNS, b, tile), h)]; /* else nothing is there */
    const int top = tile * COLUMNS + threadIdx.x / 32 * 16;
    if (top >= q.rows)
        return;
    const float4 *const from = (const float4 *)sums.at(h, piece_at(a, false, 16, b, 0), top) + threadIdx.x % 32;
    float dQ[1][HEAD / 8][4];
#pragma unroll
    for (int i = 0; i < HEAD / 8; i++)
        *(float4 *)dQ[0][i] = any ? from[i * 32] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    store_rows_fp32<HEAD, 1>(dQ, a.d_q, a.D, false, [&](int r) {
        return top + r < q.rows ? row_at(a.d_q, q.q_batch, h, q.q_row + top + r) : NOWHERE;
    });
}

template <int HEAD, int PARTS, int TERMS>
__global__ void __launch_bounds__(dq_shape<HEAD, PARTS, TERMS>::THREADS, 1)
    dq_sm90split(const __grid_constant__ split_job p)
{
    typedef dq_shape<HEAD, PARTS, TERMS> C;
    let_next_start();
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(split_shared<C> *)memory;
    init_barriers(s);
    const int group = uniform(threadIdx.x / 128);
    if (group == C::CONSUMERS) {
        fewer_registers<C::FEW>();
        produce<C>(p.job, s);
        wait_for_last(); /* when this kernel has ended, so has the one before */
        return;
    }
    more_registers<C::MANY>();
    if (group == 0)
        queries_role<HEAD, C, 0>(p, s);
    else
        queries_role<HEAD, C, 1>(p, s);
}

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

struct split_space {
    split_tensors split;
    piece_table keys, queries;
    dq_sums sums; /* at head sizes to 64 */
};

/* Returns the bytes that it takes. */
static size_t lay_out(const heed_problem *p, void *memory, split_space *s)
{
    split_tensors &split = s->split;
    workspace space = begin_workspace(p, memory, split);
    heed_sm90_take_table(&space, &s->keys, p, &p->a.k, SPLIT_ROWS, COLUMNS);
    heed_sm90_take_table(&space, &s->queries, p, &p->a.q, QUERIES, COLUMNS);
    if (split_width_of(p) == 64) {
        const int64_t all = p->a.q.shape[0] * p->a.q.shape[2];
        s->sums.strips = (int)(all / 16 + p->B + 1), s->sums.width = 64;
        s->sums.data = (float *)space.take((size_t)(p->Hq * s->sums.strips * 16 * 64) * sizeof(float));
        split.turns = (int *)space.take((size_t)(all / COLUMNS + p->B + 1) * p->Hq * TURN_APART * sizeof(int));
        split.turn_count = (int)((all / COLUMNS + p->B + 1) * p->Hq * TURN_APART);
    }
    return space.bytes;
}

/* Rows of a split k or v that are there. */
static int64_t keys_of(const args &a)
{
    return a.offsets_k ? a.k_rows : a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0;
}

/* Heads that are worked on at the same time, longest pieces first, as heed_sm90_heads_together() has it. Who is done with the
 * last of these waits for the others: so they are all heads where pieces are few, and else equally many each time. Where
 * keys take turns, the fewer of a head are at work, the better. */
static int heads_together(const args &a, bool turns, int64_t tiles, int64_t heads, int64_t bytes_of_head, int units)
{
    if (a.left >= FAR && a.right >= FAR && !turns)
        return 1;
    if (tiles * heads <= 8 * units)
        return (int)heads;
    const int64_t most = HEED_MAX(turns ? tiles_of(units, tiles) : 1, ((int64_t)32 << 20) / HEED_MAX(bytes_of_head, 1));
    return (int)tiles_of(heads, tiles_of(heads, most));
}

/* One of the two kernels: for the own side and the other. second: it follows the other one and need not wait for it. */
template <int HEAD, class C, class Kernel>
static heed_status run(Kernel kernel, split_job &p, const piece_table &pieces, const split_rows (&own)[2],
                       const split_rows (&other)[2], int64_t own_rows, int64_t other_rows, bool second,
                       const heed_plan *plan, const heed_exec *x)
{
    static_assert(sizeof(split_shared<C>) <= 227 * 1024, "what a block may have on sm_90");
    const args &a = p.job.a;
    const int heads = C::KEYS ? a.Hk : a.Hq, queries = a.offsets_q ? 1 : a.B, keys = a.offsets_k ? 1 : a.B;
    backward_job &job = p.job;
    job.pieces = pieces.pieces, job.ranges = pieces.ranges, job.lengths = pieces.lengths;
    job.tiles = pieces.tiles, job.count = pieces.tiles * a.B * heads;
    job.together = heads_together(a, C::ADDS, job.tiles, a.B * heads, other_rows * (C::KEYS ? a.G : 1) * C::D * 4,
                                  plan->device.units);
    heed_status status = HEED_OK;
    for (int i = 0; i < 2 && !status; i++) {
        p.own[i] = own[i], p.other[i] = other[i];
        status = C::ADDS && p.whole
                     ? whole_map(&job.own[i], i ? a.v : a.k, i ? a.Dv : a.D, own_rows, heads, keys, C::ROWS)
                     : split_map(&job.own[i], own[i], HEAD, C::D / HEAD, own_rows, C::KEYS ? keys : queries, C::ROWS);
        if (!status)
            status = split_map(&job.other[i], other[i], HEAD, C::D / HEAD, other_rows, C::KEYS ? queries : keys,
                               COLUMNS);
    }
    const int blocks = HEED_MIN(plan->device.units, job.count);
    return status ? status
           : second || HEAD == 64
               ? launch_early(kernel, dim3(blocks), dim3(C::THREADS), sizeof(split_shared<C>), plan, x, p)
               : launch(kernel, blocks, C::THREADS, sizeof(split_shared<C>), x, p);
}

/* Whether every row sees a key, so that dQ can leave with the last keys. It is worth while where heads are short: these have
 * more to wait for, and a pass over all sums is saved. */
static bool all_rows_see(const args &a)
{
    const span &s = a.all;
    const bool all = a.left >= FAR && a.right >= FAR && s.keys;
    return a.uniform && a.d_q.data && (all || (s.unit && s.low < s.high && s.high > 0 && s.rows - 1 + s.low < s.keys));
}

template <int HEAD, int PARTS, int TERMS = WITHOUT_TERMS>
static heed_status run_all(split_job &p, const split_space &s, const heed_plan *plan, const heed_exec *x)
{
    typedef dkv_shape<HEAD, PARTS, TERMS> keys_shape;
    typedef dq_shape<HEAD, PARTS, TERMS> queries_shape;
    const int64_t keys = keys_of(p.job.a);
    const args &a = p.job.a;
    const split_tensors &split = s.split;
    heed_status status = HEED_OK;
    p.job.counter = split.zeros;
    p.job.leaves = keys_shape::ADDS && s.keys.tiles <= LEAVING && all_rows_see(a);
    if (a.d_k.data || a.d_v.data || keys_shape::ADDS)
        status = run<HEAD, keys_shape>(dkv_sm90split<HEAD, PARTS, TERMS>, p, s.keys, { split.k, split.v },
                                       { split.q, split.d_o }, keys, a.q_rows, false, plan, x);
    p.job.counter = split.zeros + 1;
    if (!a.d_q.data || status)
        return status;
    if constexpr (keys_shape::ADDS) {
        if (p.job.leaves)
            return HEED_OK;
        const int tiles = (int)tiles_of(a.Sq, COLUMNS);
        return launch_next(finish_split<HEAD>, (int64_t)tiles * a.B * a.Hq, 128, 0, x, a, s.sums, split.turns, tiles);
    } else
        return run<HEAD, queries_shape>(dq_sm90split<HEAD, PARTS, TERMS>, p, s.queries, { split.q, split.d_o },
                                        { split.k, split.v }, a.q_rows, keys, a.d_k.data || a.d_v.data, plan, x);
}

static heed_status run(split_job &p, const split_space &s, const heed_plan *plan, const heed_exec *x)
{
    const bool narrow = split_width(p.job.a) == 64;
    const int terms = terms_of(p.job.a);
    if (terms == WITH_ALL_TERMS)
        return narrow ? run_all<64, 2, WITH_ALL_TERMS>(p, s, plan, x) : run_all<128, 2, WITH_ALL_TERMS>(p, s, plan, x);
    if (terms == WITH_SOME_TERMS)
        return narrow ? run_all<64, 2, WITH_SOME_TERMS>(p, s, plan, x)
                      : run_all<128, 2, WITH_SOME_TERMS>(p, s, plan, x);
    if (s.split.hi_only)
        return narrow ? run_all<64, 1>(p, s, plan, x) : run_all<128, 1>(p, s, plan, x);
    return narrow ? run_all<64, 2>(p, s, plan, x) : run_all<128, 2>(p, s, plan, x);
}

size_t heed_backward_workspace_sm90split(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    split_space s = {};
    return split_width_of(p) > 128 ? heed_backward_workspace_sm90split_wide(p)
                                   : lay_out(p, NULL, &s) + heed_cuda_others_bytes(p);
}

heed_status heed_backward_sm90split(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    if (split_width_of(p) > 128)
        return heed_backward_sm90split_wide(p, plan, x);
    split_space s = {};
    split_job job = {};
    args a;
    heed_exec behind = *x; /* delta, where sink or bias want it, lies behind the rest */
    behind.workspace = (char *)x->workspace + lay_out(p, x->workspace, &s);
    const on_device device(x->device);
    heed_status status = device.status ? device.status : heed_cuda_args(p, &a);
    if (!status)
        status = heed_cuda_prepare_others(p, &a, &behind, false);
    if (status)
        return status;
    s.split.facts = NULL;
    s.split.hi_only = p->precision == HEED_TF32 && !has_terms(a);
    s.split.gaps = (a.col_step != 1 || a.col) && !a.lengths_k && !a.offsets_k;
    job.job.a = a, job.job.L = s.split.L, job.job.delta = s.split.delta, job.job.pitch = a.q_rows;
    job.job.sums = s.sums, job.job.turns = s.split.turns, job.job.any_order = x->nondeterministic;
    job.exact_below = split_exact_below(a), job.scale = unshifted_scale(a), job.any = s.split.zeros + 2;
    if (!heed_elements(&p->a.q) || keys_of(a) == 0) { /* the sums are over nothing, and there are no maps */
        const heed_gradient &g = p->g;
        status = heed_cuda_fill(a.d_q, g.d_q.shape, 0.0f, x);
        status = status ? status : heed_cuda_fill(a.d_k, g.d_k.shape, 0.0f, x);
        return status ? status : heed_cuda_fill(a.d_v, g.d_v.shape, 0.0f, x);
    }
    status = heed_sm90_find_pieces(a, s.keys, s.queries, x);
    /* Of so few pieces each is waited for longer than the pass would take. */
    const bool many = tiles_of(keys_of(a), SPLIT_ROWS) * a.B * a.Hk > 3 * plan->device.units;
    job.whole = many && split_width(a) == 64 && !s.split.hi_only && a.col_step == 1 && a.col == 0 &&
                is_whole(p->a.k, a.k) && is_whole(p->a.v, a.v);
    split_tensors pass = s.split;
    if (job.whole)
        pass.k.rows = pass.v.rows = NULL;
    if (!status)
        status = heed_cuda_split(a, pass, true, NULL, x);
    if (!status)
        status = run(job, s, plan, x);
    const marked only = { job.any, s.split.k.marks, s.split.q.marks };
    if ((s.split.hi_only || job.whole) && !status) { /* what is marked wants the rest too */
        pass = s.split;
        pass.hi_only = pass.gaps = false, pass.zeros = pass.k.marks = pass.q.marks = pass.turns = NULL;
        if (job.whole)
            pass.q.rows = pass.d_o.rows = NULL;
        status = heed_cuda_split(a, pass, true, job.any, x);
    }
    return status ? status : heed_cuda_backward_marked(a, s.split, only, 2 * plan->device.units, x);
}
