/* Backward for fp32 on Hopper, head sizes to 128: each operand is two numbers of fp16 (split.cuh), and what feeds the
 * warpgroups is what feeds those of fp16 (backward_sm90_feed.cuh): to it a tensor of HEAD columns of fp32 is one of 2 HEAD
 * columns of fp16. Without atomics, by two kernels that own rows and meet the other side 64 columns at a time:
 *
 *     dK, dV   64 keys. One warpgroup computes S^T, P and dV += P^T dO, the other dP^T, dS and dK += dS^T Q; P passes from
 *              the first to the second in fp32
 *     dQ       64 queries for each of two or three warpgroups, which do everything for them
 *
 * P carries 2^14. Each row of dS, and one of P where that is not enough, gets a power of two that brings its largest close
 * to 2^15, so that it is far from fp16's smallest numbers; each tile's part of a result is summed by itself and added to the others in fp32.
 *
 * Where two numbers of fp16 do not hold what is needed for a score, or where something is infinite or not a number, the
 * own rows are marked, and backward_split.cu computes them again. */
#include "backward_sm90.cuh"
#include "split_sm90.cuh"

struct split_job {
    backward_job job;
    split_rows own[2], other[2];
    int exact_below; /* where the shifts of Q and K add up to less, two numbers of fp16 are not enough */
    int *any;        /* whether anything was marked */
};

constexpr int QUERIES = 128; /* of a block that owns queries */

template <int HEAD, int PARTS, bool WIDE = (PARTS * HEAD > 128)>
struct dkv_shape : backward_shape<true, PARTS * HEAD, SPLIT_ROWS, WIDE ? 1 : 2, WIDE ? 2 : 4, 2, 0, 0, 4> {
};

template <int HEAD, int PARTS, bool WIDE = (PARTS * HEAD > 128)>
struct dq_shape : backward_shape<false, PARTS * HEAD, QUERIES, WIDE ? 1 : 2, WIDE ? 2 : 4, WIDE ? 1 : 2> {
};

/* ---- Sums -------------------------------------------------------------------------------------------------------- */

/* 64 rows of a result, in units of 2^-e for either of the lane's rows. */
template <int HEAD> struct gradient {
    float x[HEAD / 2];
    int e[2];
    __device__ gradient()
    {
        clear(x);
        e[0] = e[1] = 1000;
    }

    /* += T, which is in units of 2^-by. */
    __device__ void add(const float (&T)[HEAD / 2], const int (&by)[2])
    {
        if (__any_sync(~0u, by[0] < e[0] - 30 || by[1] < e[1] - 30)) { /* now and then, so that nothing overflows */
            const int least[2] = { min(e[0], by[0]), min(e[1], by[1]) };
            const float down[2] = { power(least[0] - e[0]), power(least[1] - e[1]) };
#pragma unroll
            for (int i = 0; i < HEAD / 2; i++)
                x[i] *= down[i / 2 % 2];
            e[0] = least[0], e[1] = least[1];
        }
        const float now[2] = { power(e[0] - by[0]) * given_back<COLUMNS / 16>,
                               power(e[1] - by[1]) * given_back<COLUMNS / 16> };
#pragma unroll
        for (int i = 0; i < HEAD / 2; i++)
            x[i] = fmaf(T[i], now[i / 2 % 2], x[i]);
    }

    /* Writes those of the rows that are there. at(r): of row r of 64. */
    template <class Where> __device__ void write(float scale, const view &t, int width, int rows, Where at)
    {
#pragma unroll
        for (int i = 0; i < HEAD / 2; i++)
            x[i] = times_power(x[i] * scale, -e[i / 2 % 2]);
        const int top = threadIdx.x / 32 % 4 * 16;
        store_rows_fp32<HEAD, 1>((const float(&)[1][HEAD / 8][4]) x, t, width, false,
                                 [&](int r) { return top + r < rows ? at(top + r) : NOWHERE; });
    }
};

/* ---- Pointwise work ---------------------------------------------------------------------------------------------- */

/* What takes S to exponents of 2. */
template <int HEAD> __device__ inline float exponent_scale(const args &a, int shifts)
{
    return given_back<HEAD / 16> * LOG2E * fmaxf(fminf(times_power(a.scale, -shifts), 2e38f), 1.2e-38f);
}

/* S becomes P 2^14, with L(e) of element e. range: the columns that this lane's rows see. In the exponent 14 would cost
 * four bits of the largest P. */
template <class Terms>
__device__ inline void weigh(float (&S)[COLUMNS / 2], float c, bool whole, const int2 *range, int column, Terms L)
{
#pragma unroll
    for (int e = 0; e < COLUMNS / 2; e++)
        S[e] = exp2_fast(fmaf(S[e], c, -L(e))) * power(TOP);
    if (whole)
        return;
    const int low[2] = { range[0].x - column, range[8].x - column };
    const int high[2] = { range[0].y - column, range[8].y - column };
#pragma unroll
    for (int e = 0; e < COLUMNS / 2; e++) {
        const int i = column_of(e), r = e / 2 % 2;
        S[e] = i >= low[r] && i < high[r] ? S[e] : 0.0f;
    }
}

/* dP 2^shifts becomes dS 2^by = P (dP - delta) 2^by, with a by for each row. P(i): elements 4 i .. + 3, times 2^14. */
template <class Weights, class Terms>
__device__ inline void differentiate(float (&dP)[COLUMNS / 2], int shifts, Weights P, Terms delta, int (&by)[2])
{
    for (; shifts > 100; shifts -= 100) /* so that its power of two is a number of fp32 */
#pragma unroll
        for (int e = 0; e < COLUMNS / 2; e++)
            dP[e] *= power(-100);
    const float down = power(max(-126, min(127, -shifts))) * given_back<4>;
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; i++) {
        const float4 four = P(i);
        const float weights[4] = { four.x, four.y, four.z, four.w };
#pragma unroll
        for (int e = 0; e < 4; e++)
            dP[4 * i + e] = fmaf(dP[4 * i + e], down, -delta(4 * i + e)) * weights[e];
    }
    raise_rows((float(&)[1][COLUMNS / 8][4]) dP, by);
    by[0] += TOP, by[1] += TOP;
}

/* ---- Keys -------------------------------------------------------------------------------------------------------- */

/* A piece of keys meets the queries of all heads that share the keys, tile after tile, in each the heads one after the
 * other. Where the shifts of tile i are. */
__device__ inline int met_at(const split_job &p, const piece &w, int i)
{
    const int step = i / p.job.a.G;
    return (int)split_at(p.other[0], w.other_batch, w.head * p.job.a.G + i - step * p.job.a.G, w.other_row + w.start) +
           step * COLUMNS;
}

template <int HEAD, class C> __device__ inline void values_role(const split_job &p, backward_shared<C> &s)
{
    const args &a = p.job.a;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    for (int n = 0, tile = 0;; n++) {
        const int slot = n % C::SLOTS;
        const piece &w = s.work[slot];
        wait(shared_address(&s.own_full[slot]), n / C::SLOTS & 1);
        if (!uniform(w.exists))
            break;
        const int all = uniform(w.tiles) * a.G;
        const uint64_t K = tile_at(shared_address(s.own[0][0]) + slot * (int)sizeof(s.own[0]));
        const int k_shift = shift_at(p.own[0], w.batch, w.head, w.memory_row).s;
        int column = w.start;
        shifts_ahead q_shifts, g_shifts;
        const auto of_q = [&](int i) { return p.other[0].shifts + met_at(p, w, i); };
        const auto of_g = [&](int i) { return p.other[1].shifts + met_at(p, w, i); };
        const auto q_shift = [&](int i) { return q_shifts.get(i, all, of_q); };
        const auto g_shift = [&](int i) { return g_shifts.get(i, all, of_g); };
        if (all)
            q_shifts.ask(0, all, of_q), g_shifts.ask(0, all, of_g);
        gradient<HEAD> dV;
        operand hi, lo;
        /* From S to P of a tile, which is handed over. */
        const auto finish = [&](float(&S)[COLUMNS / 2], int shift) {
            const float *const L = s.L[tile % C::FIRST] + lane % 4 * 2;
            weigh(S, exponent_scale<HEAD>(a, k_shift + shift),
                  column >= w.inside[0] && column + COLUMNS <= w.outside[0], &s.range[slot][row], column + lane % 4 * 2,
                  [&](int e) { return L[column_of(e)]; });
            release_first(s, tile);
            wait_to_pass(s, tile);
            float4 *const to = (float4 *)s.pass[tile % 2 * 2] + threadIdx.x % 128;
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++)
                to[i * 128] = make_float4(S[4 * i], S[4 * i + 1], S[4 * i + 2], S[4 * i + 3]);
            release(&s.pass_full[tile % 2]);
        };
        float T[HEAD / 2]; /* P^T dO of a tile is added when the next S is under way */
        clear(T);
        int by[2], held[2] = { 1000, 1000 }; /* of P^T dO of the tile before, and of T */
        int heads = a.G;                     /* that have yet to meet the present column */
        const auto split = [&](float(&S)[COLUMNS / 2], int g_shift) {
            int raised[2];
            split_weights(hi, lo, S, raised);
            by[0] = raised[0] + TOP + g_shift, by[1] = raised[1] + TOP + g_shift;
        };
        if (all) {
            float S[COLUMNS / 2];
            wait_first(s, tile);
            multiply_scores<HEAD, C::ROWS, C::D / HEAD>(S, K, first_tile(s, tile)); /* S^T = K Q^T */
            finish(S, q_shift(0).s);
            split(S, g_shift(0).s);
            tile++;
        }
#pragma unroll 1
        for (int j = 1; j < all; j++, tile++) {
            float S[COLUMNS / 2];
            if (--heads == 0)
                heads = a.G, column += COLUMNS;
            wait_first(s, tile);
            wait_second(s, tile - 1);
            multiply_both<HEAD, C::ROWS, C::D / HEAD>(S, K, first_tile(s, tile), T, hi, lo, second_tile(s, tile - 1),
                                                      [&]() { dV.add(T, held); });
            finish(S, q_shift(j).s);
            keep_order(tile);
            wgmma_wait<0>();
            release_second(s, tile - 1);
            held[0] = by[0], held[1] = by[1];
            split(S, g_shift(j).s);
        }
        if (all) {
            dV.add(T, held);
            wait_second(s, tile - 1);
            multiply_values<HEAD, C::D / HEAD>(T, hi, lo, second_tile(s, tile - 1));
            release_second(s, tile - 1);
            dV.add(T, by);
        }
        if (a.d_v.data)
            dV.write(1.0f, a.d_v, a.Dv, w.rows,
                     [&](int r) { return row_at(a.d_v, w.batch, w.head, a.col + (w.memory_row + r) * a.col_step); });
        release(&s.own_free[slot]);
    }
}

template <int HEAD, class C> __device__ inline void keys_role(const split_job &p, backward_shared<C> &s)
{
    const args &a = p.job.a;
    const int lane = threadIdx.x % 32;
    for (int n = 0, tile = 0;; n++) {
        const int slot = n % C::SLOTS;
        const piece &w = s.work[slot];
        wait(shared_address(&s.own_full[slot]), n / C::SLOTS & 1);
        if (!uniform(w.exists))
            return;
        const int all = uniform(w.tiles) * a.G;
        const uint64_t V = tile_at(shared_address(s.own[0][1]) + slot * (int)sizeof(s.own[0]));
        const int own = (int)split_at(p.own[0], w.batch, w.head, w.memory_row);
        const int k_shift = p.own[0].shifts[own].s, v_shift = p.own[1].shifts[own].s;
        bool again = p.own[0].shifts[own].strange | p.own[1].shifts[own].strange;
        shifts_ahead q_shifts, g_shifts;
        const auto of_q = [&](int i) { return p.other[0].shifts + met_at(p, w, i); };
        const auto of_g = [&](int i) { return p.other[1].shifts + met_at(p, w, i); };
        const auto q_shift = [&](int i) { return q_shifts.get(i, all, of_q); };
        const auto g_shift = [&](int i) { return g_shifts.get(i, all, of_g); };
        if (all)
            q_shifts.ask(0, all, of_q), g_shifts.ask(0, all, of_g);
        gradient<HEAD> dK;
        operand hi, lo;
        int by[2] = {}; /* of dS Q of the tile before */
        /* From dP to dS of a tile. */
        const auto finish = [&](float(&dP)[COLUMNS / 2], const shift &g, int(&raised)[2]) {
            const float *const delta = s.delta[tile % C::SECOND] + lane % 4 * 2;
            const float4 *const from = (const float4 *)s.pass[tile % 2 * 2] + threadIdx.x % 128;
            again |= g.strange;
            wait_passed(s, tile);
            wait_first(s, tile); /* Q for the next round */
            differentiate(
                dP, v_shift + g.s, [&](int i) { return from[i * 128]; }, [&](int e) { return delta[column_of(e)]; },
                raised);
            release(&s.pass_free[tile % 2]);
            release_second(s, tile);
        };
        const auto add = [&](const float(&T)[HEAD / 2]) {
            release_first(s, tile - 1);
            dK.add(T, by);
        };
        const auto look_at_q = [&](const shift &q, const int(&raised)[2]) {
            again |= q.strange || k_shift + q.s < p.exact_below;
            by[0] = raised[0] + q.s, by[1] = raised[1] + q.s;
        };
        if (all) {
            float dP[COLUMNS / 2];
            int raised[2];
            wait_second(s, tile);
            multiply_scores<HEAD, C::ROWS, C::D / HEAD>(dP, V, second_tile(s, tile)); /* dP^T = V dO^T */
            finish(dP, g_shift(0), raised);
            split_weights(hi, lo, dP);
            look_at_q(q_shift(0), raised);
            tile++;
        }
#pragma unroll 1
        for (int j = 1; j < all; j++, tile++) {
            float dP[COLUMNS / 2], T[HEAD / 2];
            int raised[2];
            wait_second(s, tile);
            multiply_both_values_first<HEAD, C::ROWS, C::D / HEAD>(dP, V, second_tile(s, tile), T, hi, lo,
                                                                   first_tile(s, tile - 1));
            add(T); /* dK += dS^T Q of the tile before */
            keep_order(tile);
            wgmma_wait<0>();
            finish(dP, g_shift(j), raised);
            split_weights(hi, lo, dP);
            look_at_q(q_shift(j), raised);
        }
        if (all) {
            float T[HEAD / 2];
            multiply_values<HEAD, C::D / HEAD>(T, hi, lo, first_tile(s, tile - 1));
            add(T);
        }
        if (a.d_k.data)
            dK.write(a.scale, a.d_k, a.D, w.rows,
                     [&](int r) { return row_at(a.d_k, w.batch, w.head, a.col + (w.memory_row + r) * a.col_step); });
        if (again && threadIdx.x % 128 == 0)
            p.own[0].marks[own] = *p.any = 1;
        release(&s.own_free[slot]);
    }
}

template <int HEAD, int PARTS>
__global__ void __launch_bounds__(dkv_shape<HEAD, PARTS>::THREADS, 1) dkv_sm90split(const __grid_constant__ split_job p)
{
    typedef dkv_shape<HEAD, PARTS> C;
    let_next_start(); /* dQ, on the multiprocessors that are done here */
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(backward_shared<C> *)memory;
    init_barriers(s);
    const int group = uniform(threadIdx.x / 128);
    if (group == C::CONSUMERS) {
        fewer_registers<C::FEW>();
        produce<C>(p.job, s);
        return;
    }
    more_registers<C::MANY>();
    if (group == 0)
        values_role<HEAD, C>(p, s);
    else
        keys_role<HEAD, C>(p, s);
}

/* ---- Queries ----------------------------------------------------------------------------------------------------- */

template <int HEAD, class C, int GROUP> __device__ inline void queries_role(const split_job &p, backward_shared<C> &s)
{
    constexpr int PARTS = C::D / HEAD;
    constexpr bool EARLY_DP = HEAD == 64; /* there are registers for dP beside all else */
    const args &a = p.job.a;
    const int lane = threadIdx.x % 32, row = GROUP * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    for (int n = 0, tile = 0;; n++) {
        const int slot = n % C::SLOTS;
        const piece &w = s.work[slot];
        wait(shared_address(&s.own_full[slot]), n / C::SLOTS & 1);
        if (!uniform(w.exists))
            return;
        const uint64_t Q = tile_at(shared_address(s.own[slot][0]) + GROUP * 8192);
        const uint64_t dO = tile_at(shared_address(s.own[slot][1]) + GROUP * 8192);
        const int64_t at = ((int64_t)w.batch * a.Hq + w.head) * p.job.pitch + w.memory_row;
        const int r0 = min(row, w.rows - 1), r1 = min(row + 8, w.rows - 1); /* rows that do not exist see no column */
        const float L[2] = { p.job.L[at + r0], p.job.L[at + r1] };
        const float delta[2] = { p.job.delta[at + r0], p.job.delta[at + r1] };
        const int64_t own = split_at(p.own[0], w.batch, w.head, w.memory_row) + (GROUP * 64 < w.rows ? GROUP * 64 : 0);
        const int q_shift = p.own[0].shifts[own].s, g_shift = p.own[1].shifts[own].s;
        bool again = p.own[0].shifts[own].strange | p.own[1].shifts[own].strange;
        const int inside = uniform(w.inside[GROUP]), outside = uniform(w.outside[GROUP]);
        const int begin = uniform(w.begin[GROUP]), end = uniform(w.end[GROUP]), tiles = uniform(w.tiles);
        int column = w.start + begin * COLUMNS;
        shifts_ahead k_shifts, v_shifts;
        const int met = (int)split_at(p.other[0], w.other_batch, w.head / a.G, w.other_row + column);
        gradient<HEAD> dQ;
        operand hi, lo;
        int by[2] = {}, before = 0; /* of dS and K of the tile before */
        const auto of_k = [&](int i) { return p.other[0].shifts + met + i * COLUMNS; };
        const auto of_v = [&](int i) { return p.other[1].shifts + met + i * COLUMNS; };
        if (begin < end)
            k_shifts.ask(0, end - begin, of_k), v_shifts.ask(0, end - begin, of_v);
        tile = skip(s, tile, begin);
        shift k = {};
        /* From S of a tile to P. */
        const auto finish = [&](float(&S)[COLUMNS / 2], int j) {
            k = k_shifts.get(j - begin, end - begin, of_k);
            weigh(S, exponent_scale<HEAD>(a, q_shift + k.s), column >= inside && column + COLUMNS <= outside,
                  &s.range[slot][row], column + lane % 4 * 2, [&](int e) { return L[e / 2 % 2]; });
        };
        const auto add = [&](const float(&T)[HEAD / 2]) {
            release_first(s, tile - 1);
            const int all_of_it[2] = { by[0] + before, by[1] + before };
            dQ.add(T, all_of_it);
        };
#pragma unroll 1
        for (int j = begin; j < end; j++, tile++, column += COLUMNS) {
            float S[COLUMNS / 2], dP[COLUMNS / 2];
            wait_first(s, tile);
            if (j == begin) {
                multiply_scores<HEAD, C::ROWS, PARTS>(S, Q, first_tile(s, tile)); /* S = Q K^T */
                finish(S, j);
            } else {
                float T[HEAD / 2], small[COLUMNS / 2];
                multiply_both<HEAD, C::ROWS, PARTS>(S, Q, first_tile(s, tile), T, hi, lo, first_tile(s, tile - 1));
                if (EARLY_DP) {
                    wait_second(s, tile);
                    start_apart<HEAD, C::ROWS, PARTS>(dP, small, dO, second_tile(s, tile)); /* dP = dO V^T */
                }
                finish(S, j);
                keep_order(tile);
                wgmma_wait<EARLY_DP ? 1 : 0>();
                add(T); /* dQ += dS K of the tile before */
                if (EARLY_DP) {
                    keep_order(tile);
                    wgmma_wait<0>();
                    if (PARTS == 2)
                        join(dP, small);
                }
            }
            if (!EARLY_DP || j == begin) {
                wait_second(s, tile);
                multiply_apart<HEAD, C::ROWS, PARTS>(dP, dO, second_tile(s, tile));
            }
            release_second(s, tile);
            const shift v = v_shifts.get(j - begin, end - begin, of_v);
            again |= k.strange || v.strange || q_shift + k.s < p.exact_below;
            differentiate(
                dP, g_shift + v.s,
                [&](int i) { return make_float4(S[4 * i], S[4 * i + 1], S[4 * i + 2], S[4 * i + 3]); },
                [&](int e) { return delta[e / 2 % 2]; }, by);
            before = k.s;
            split_weights(hi, lo, dP);
        }
        if (begin < end) {
            float T[HEAD / 2];
            multiply_values<HEAD, C::D / HEAD>(T, hi, lo, first_tile(s, tile - 1));
            add(T);
        }
        tile = skip(s, tile, tiles - end);
        dQ.write(a.scale, a.d_q, a.D, w.rows - GROUP * 64,
                 [&](int r) { return row_at(a.d_q, w.batch, w.head, w.memory_row + GROUP * 64 + r); });
        if (again && GROUP * 64 < w.rows && threadIdx.x % 128 == 0)
            p.own[0].marks[own] = *p.any = 1;
        release(&s.own_free[slot]);
    }
}

template <int HEAD, int PARTS>
__global__ void __launch_bounds__(dq_shape<HEAD, PARTS>::THREADS, 1) dq_sm90split(const __grid_constant__ split_job p)
{
    typedef dq_shape<HEAD, PARTS> C;
    let_next_start();
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(backward_shared<C> *)memory;
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
    else if (group == 1)
        queries_role<HEAD, C, 1>(p, s);
    else if (C::CONSUMERS == 3)
        queries_role<HEAD, C, C::CONSUMERS - 1>(p, s);
}

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

struct split_space {
    split_tensors split;
    piece_table keys, queries;
};

/* Returns the bytes that it takes. */
static size_t lay_out(const heed_problem *p, void *memory, split_space *s)
{
    const int64_t rows = p->a.q.shape[0] * p->Hq * p->a.q.shape[2];
    workspace space = { (char *)memory, split_place(p, SPLIT_ALL, (char *)memory, s->split) };
    split_tensors &split = s->split;
    space.bytes = (space.bytes + 15) / 16 * 16;
    split.L = (float *)space.take(rows * sizeof(float));
    split.delta = (float *)space.take(rows * sizeof(float));
    split.zeros = (int *)space.take(3 * sizeof(int));
    split.k.marks = (int *)space.take(p->a.k.shape[0] * p->Hk * split.k.head_rows * sizeof(int));
    split.q.marks = (int *)space.take(rows * sizeof(int));
    heed_sm90_take_table(&space, &s->keys, p, &p->a.k, SPLIT_ROWS, COLUMNS);
    heed_sm90_take_table(&space, &s->queries, p, &p->a.q, QUERIES, COLUMNS);
    return space.bytes;
}

/* Rows of a split k or v that are there. */
static int64_t keys_of(const args &a)
{
    return a.offsets_k ? a.k_rows : a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0;
}

/* Heads that are worked on at the same time, longest pieces first, as heed_sm90_heads_together() has it. Who is done with the
 * last of these waits for the others: so they are all heads where pieces are few, and else equally many each time. */
static int heads_together(const args &a, int64_t tiles, int64_t heads, int64_t bytes_of_head, int units)
{
    if (a.left >= FAR && a.right >= FAR)
        return 1;
    if (tiles * heads <= 8 * units)
        return (int)heads;
    const int64_t most = HEED_MAX(1, ((int64_t)32 << 20) / HEED_MAX(bytes_of_head, 1));
    return (int)tiles_of(heads, tiles_of(heads, most));
}

/* One of the two kernels: for the own side and the other. second: it follows the other one and need not wait for it. */
template <int HEAD, class C, class Kernel>
static heed_status run(Kernel kernel, split_job &p, const piece_table &pieces, const split_rows (&own)[2],
                       const split_rows (&other)[2], int64_t own_rows, int64_t other_rows, bool second,
                       const heed_plan *plan, const heed_exec *x)
{
    static_assert(sizeof(backward_shared<C>) <= 227 * 1024, "what a block may have on sm_90");
    const args &a = p.job.a;
    const int heads = C::KEYS ? a.Hk : a.Hq, queries = a.offsets_q ? 1 : a.B, keys = a.offsets_k ? 1 : a.B;
    backward_job &job = p.job;
    job.pieces = pieces.pieces, job.ranges = pieces.ranges, job.lengths = pieces.lengths;
    job.tiles = pieces.tiles, job.count = pieces.tiles * a.B * heads;
    job.together = heads_together(a, job.tiles, a.B * heads, other_rows * (C::KEYS ? a.G : 1) * C::D * 4,
                                  plan->device.units);
    heed_status status = HEED_OK;
    for (int i = 0; i < 2 && !status; i++) {
        p.own[i] = own[i], p.other[i] = other[i];
        status = split_map(&job.own[i], own[i], HEAD, C::D / HEAD, own_rows, C::KEYS ? keys : queries, C::ROWS);
        if (!status)
            status = split_map(&job.other[i], other[i], HEAD, C::D / HEAD, other_rows, C::KEYS ? queries : keys,
                               COLUMNS);
    }
    const int blocks = HEED_MIN(plan->device.units, job.count);
    return status   ? status
           : second ? launch_early(kernel, dim3(blocks), dim3(C::THREADS), sizeof(backward_shared<C>), plan, x, p)
                    : launch(kernel, blocks, C::THREADS, sizeof(backward_shared<C>), x, p);
}

template <int HEAD, int PARTS>
static heed_status run_both(split_job &p, const split_space &s, const heed_plan *plan, const heed_exec *x)
{
    const int64_t keys = keys_of(p.job.a);
    const args &a = p.job.a;
    const split_tensors &split = s.split;
    heed_status status = HEED_OK;
    p.job.counter = split.zeros;
    if (a.d_k.data || a.d_v.data)
        status = run<HEAD, dkv_shape<HEAD, PARTS>>(dkv_sm90split<HEAD, PARTS>, p, s.keys, { split.k, split.v },
                                                   { split.q, split.d_o }, keys, a.q_rows, false, plan, x);
    p.job.counter = split.zeros + 1;
    if (a.d_q.data && !status)
        status = run<HEAD, dq_shape<HEAD, PARTS>>(dq_sm90split<HEAD, PARTS>, p, s.queries, { split.q, split.d_o },
                                                  { split.k, split.v }, a.q_rows, keys, a.d_k.data || a.d_v.data, plan,
                                                  x);
    return status;
}

static heed_status run(split_job &p, const split_space &s, const heed_plan *plan, const heed_exec *x)
{
    const bool narrow = split_width(p.job.a) == 64;
    if (s.split.hi_only)
        return narrow ? run_both<64, 1>(p, s, plan, x) : run_both<128, 1>(p, s, plan, x);
    return narrow ? run_both<64, 2>(p, s, plan, x) : run_both<128, 2>(p, s, plan, x);
}

size_t heed_backward_workspace_sm90split(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    split_space s = {};
    return lay_out(p, NULL, &s) + heed_cuda_others_bytes(p);
}

heed_status heed_backward_sm90split(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
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
    s.split.hi_only = p->precision == HEED_TF32;
    s.split.gaps = (a.col_step != 1 || a.col) && !a.lengths_k && !a.offsets_k;
    job.job.a = a, job.job.L = s.split.L, job.job.delta = s.split.delta, job.job.pitch = a.q_rows;
    job.exact_below = split_exact_below(a), job.any = s.split.zeros + 2;
    if (!heed_elements(&p->a.q) || keys_of(a) == 0) { /* the sums are over nothing, and there are no maps */
        const heed_gradient &g = p->g;
        status = heed_cuda_fill(a.d_q, g.d_q.shape, 0.0f, x);
        status = status ? status : heed_cuda_fill(a.d_k, g.d_k.shape, 0.0f, x);
        return status ? status : heed_cuda_fill(a.d_v, g.d_v.shape, 0.0f, x);
    }
    status = heed_sm90_find_pieces(a, s.keys, s.queries, x);
    if (!status)
        status = heed_cuda_split(a, s.split, true, NULL, x);
    if (!status)
        status = run(job, s, plan, x);
    const marked only = { job.any, s.split.k.marks, s.split.q.marks };
    if (s.split.hi_only && !status) { /* what is marked wants lo too */
        split_tensors both = s.split;
        both.hi_only = both.gaps = false, both.zeros = both.k.marks = both.q.marks = NULL;
        status = heed_cuda_split(a, both, true, job.any, x);
    }
    return status ? status : heed_cuda_backward_marked(a, s.split, only, 2 * plan->device.units, x);
}
