/* Backward for fp32 on Hopper, head sizes to 128: each operand is two numbers of fp16 (split.cuh), and what feeds the
 * warpgroups is what feeds those of fp16 (backward_sm90_feed.cuh): to it a tensor of HEAD columns of fp32 is one of 2 HEAD
 * columns of fp16. Kernels own rows and meet the other side 64 columns at a time:
 *
 *     dK, dV   64 keys. One warpgroup computes S^T, P and dV += P^T dO, the other dP^T, dS and dK += dS^T Q; P passes from
 *              the first to the second in fp32. At head sizes to 64 there are registers for a third, to which dS passes: it
 *              computes dQ = dS K, which is summed in memory, for each query in the order of the keys
 *     dQ       at larger ones: 64 queries for each of two warpgroups, which do everything for them
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
    static constexpr bool SOON = false,
                          BY_ROLE = false; /* K and V are given back together, and with the piece of work */
    static constexpr int WORKS = WIDE ? 1 : 2;
    typedef uint64_t own_rows; /* K and V as left operands */
};

/* With dQ, which needs few registers, so that there are some for K and V: P and dS leave shared memory little time. */
template <int PARTS>
struct dkv_shape<64, PARTS, false> : backward_shape<true, PARTS * 64, SPLIT_ROWS, 2, 4, 2, OWNER, 2, 4> {
    static constexpr bool NUMBERS = true;
    static constexpr int HEAD = 64, MANY = 192, SOME = 96;
    typedef held_rows<PARTS> own_rows;
};

template <int HEAD, int PARTS, bool WIDE = (PARTS * HEAD > 128)>
struct dq_shape : backward_shape<false, PARTS * HEAD, QUERIES, WIDE ? 1 : 2, WIDE ? 2 : 4, WIDE ? 1 : 2> {
    static constexpr bool SOON = false;
    static constexpr int WORKS = WIDE ? 1 : 2;
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

/* dP 2^shifts becomes dS 2^by = P (dP - delta) 2^by, with a by for each row. P(i): elements 4 i .. + 3, times 2^14.
 * pass(i, dS): these of dS, times 2^14. */
template <class Weights, class Terms, class Pass>
__device__ inline void differentiate(float (&dP)[COLUMNS / 2], int shifts, Weights P, Terms delta, int (&by)[2],
                                     Pass pass)
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
        pass(i, &dP[4 * i]);
    }
    raise_rows((float(&)[1][COLUMNS / 8][4]) dP, by);
    by[0] += TOP, by[1] += TOP;
}

/* ---- Keys -------------------------------------------------------------------------------------------------------- */

/* A piece of keys meets the queries of all heads that share the keys, tile after tile, in each the heads one after the
 * other. Where the shifts of tile i are. */
template <class C> __device__ inline int met_at(const split_job &p, const piece &w, int i)
{
    const int step = i / p.job.a.G;
    return (int)split_at(p.other[0], w.other_batch, w.head * p.job.a.G + i - step * p.job.a.G,
                         w.other_row + column_at<C>(w, step));
}

/* Where in its tile a thread puts four numbers at a time that pass: so that those who read them by columns, eight bytes
 * at a time, find them in different banks. */
__device__ inline int place_to_pass(int thread) { return thread ^ (thread >> 1 & 4) ^ (thread >> 3 & 2); }

template <class C> __device__ inline void leave_piece(backward_shared<C> &s, int slot)
{
    release(&s.own_free[slot]);
    if (C::ADDS)
        release(&s.work_free[slot]);
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
        typename C::own_rows K;
        take_rows(K, shared_address(s.own[0][0]) + slot * (int)sizeof(s.own[0]));
        const int k_shift = shift_at(p.own[0], w.batch, w.head, w.memory_row).s;
        const int2 *const range = C::ADDS ? p.job.ranges + w.ranges + row : &s.range[slot][row];
        shifts_ahead q_shifts, g_shifts;
        const auto of_q = [&](int i) { return p.other[0].shifts + met_at<C>(p, w, i); };
        const auto of_g = [&](int i) { return p.other[1].shifts + met_at<C>(p, w, i); };
        const auto q_shift = [&](int i) { return q_shifts.get(i, all, of_q); };
        const auto g_shift = [&](int i) { return g_shifts.get(i, all, of_g); };
        if (all)
            q_shifts.ask(0, all, of_q), g_shifts.ask(0, all, of_g);
        gradient<HEAD> dV;
        operand hi, lo;
        /* From S to P of a tile, which is handed over. */
        const auto finish = [&](float(&S)[COLUMNS / 2], int shift) {
            const float *const L = s.L[tile % C::FIRST] + lane % 4 * 2;
            const int care = uniform(s.care[tile % C::FIRST][0]);
            weigh(S, exponent_scale<HEAD>(a, k_shift + shift), care < 0, range, care + lane % 4 * 2,
                  [&](int e) { return L[column_of(e)]; });
            release_first(s, tile);
            wait_to_pass(s, tile);
            float4 *const to = (float4 *)s.pass[tile % 2 * 2] + place_to_pass(threadIdx.x % 128);
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++)
                to[i * 128] = make_float4(S[4 * i], S[4 * i + 1], S[4 * i + 2], S[4 * i + 3]);
            release(&s.pass_full[tile % 2]);
        };
        float T[HEAD / 2]; /* P^T dO of a tile is added when the next S is under way */
        clear(T);
        int by[2], held[2] = { 1000, 1000 }; /* of P^T dO of the tile before, and of T */
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
        leave_piece(s, slot);
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
        typename C::own_rows V;
        take_rows(V, shared_address(s.own[0][1]) + slot * (int)sizeof(s.own[0]));
        const int own = (int)split_at(p.own[0], w.batch, w.head, w.memory_row);
        const int k_shift = p.own[0].shifts[own].s, v_shift = p.own[1].shifts[own].s;
        const bool own_strange = p.own[0].shifts[own].strange | p.own[1].shifts[own].strange;
        bool again = own_strange;
        shifts_ahead q_shifts, g_shifts;
        const auto of_q = [&](int i) { return p.other[0].shifts + met_at<C>(p, w, i); };
        const auto of_g = [&](int i) { return p.other[1].shifts + met_at<C>(p, w, i); };
        const auto q_shift = [&](int i) { return q_shifts.get(i, all, of_q); };
        const auto g_shift = [&](int i) { return g_shifts.get(i, all, of_g); };
        if (all)
            q_shifts.ask(0, all, of_q), g_shifts.ask(0, all, of_g);
        gradient<HEAD> dK;
        operand hi, lo;
        int by[2] = {}; /* of dS Q of the tile before */
        /* From dP to dS of a tile, which is handed over where dQ is computed beside dK. */
        const auto finish = [&](float(&dP)[COLUMNS / 2], const shift &g, int(&raised)[2]) {
            const float *const delta = s.delta[tile % C::SECOND] + lane % 4 * 2;
            float4 *const pass = (float4 *)s.pass[tile % 2 * 2] + place_to_pass(threadIdx.x % 128);
            wait_passed(s, tile);
            wait_first(s, tile); /* Q for the next round */
            differentiate(
                dP, v_shift + g.s, [&](int i) { return pass[i * 128]; }, [&](int e) { return delta[column_of(e)]; },
                raised,
                [&](int i, const float *dS) {
                    if (C::ADDS) /* keys r and r + 8 of a query beside each other */
                        pass[i * 128] = make_float4(dS[0], dS[2], dS[1], dS[3]);
                });
            release(C::ADDS ? &s.ds_full[tile % 2] : &s.pass_free[tile % 2]);
            release_second(s, tile);
        };
        const auto add = [&](const float(&T)[HEAD / 2]) {
            release_first(s, tile - 1);
            dK.add(T, by);
        };
        const auto look_at_shifts = [&](int i, const shift &q, const shift &g, const int(&raised)[2]) {
            const bool strange = q.strange || g.strange || k_shift + q.s < p.exact_below;
            again |= strange;
            by[0] = raised[0] + q.s, by[1] = raised[1] + q.s;
            if (C::ADDS && (strange || own_strange) && threadIdx.x % 128 == 0) /* nor is dQ what it should be */
                p.other[0].marks[met_at<C>(p, w, i)] = *p.any = 1;
        };
        if (all) {
            float dP[COLUMNS / 2];
            int raised[2];
            wait_second(s, tile);
            multiply_scores<HEAD, C::ROWS, C::D / HEAD>(dP, V, second_tile(s, tile)); /* dP^T = V dO^T */
            const shift g = g_shift(0);
            finish(dP, g, raised);
            split_weights(hi, lo, dP);
            look_at_shifts(0, q_shift(0), g, raised);
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
            const shift g = g_shift(j);
            finish(dP, g, raised);
            split_weights(hi, lo, dP);
            look_at_shifts(j, q_shift(j), g, raised);
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
        leave_piece(s, slot);
    }
}

/* dS of a tile as it has been passed, with queries as rows. */
__device__ inline void read_across(float (&X)[COLUMNS / 2], const uint4 *pass)
{
    const int warp = threadIdx.x / 32 % 4, query = threadIdx.x % 32 / 4, key = threadIdx.x % 4 * 2;
    const float2 *const from = (const float2 *)pass + query % 2;
#pragma unroll
    for (int i = 0; i < 2; i++) /* queries, 8 apart */
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; k++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int thread = (key + e) * 4 + query / 2;
                const float2 two = from[((2 * warp + i) * 128 + k * 32 + place_to_pass(thread)) * 2];
                X[8 * k + 2 * i + e] = two.x, X[8 * k + 4 + 2 * i + e] = two.y;
            }
}

/* dQ = dS K of one tile after the other, sent to its sums: see keep_turns(). Where it LEAVES with the last keys, what others
 * have summed joins these here. */
template <int HEAD, class C, bool LEAVES> __device__ inline void sums_role(const split_job &p, backward_shared<C> &s)
{
    const args &a = p.job.a;
    for (int n = 0, tile = 0;; n++) {
        const int slot = n % C::SLOTS;
        const piece &w = s.work[slot];
        wait(shared_address(&s.own_full[slot]), n / C::SLOTS & 1);
        if (!uniform(w.exists))
            return;
        const int all = uniform(w.tiles) * a.G;
        const uint64_t K = tile_at(shared_address(s.own[0][0]) + slot * (int)sizeof(s.own[0]), C::ROWS * 128);
        const int k_shift = shift_at(p.own[0], w.batch, w.head, w.memory_row).s;
        const dq_share mine = LEAVES ? share_of(p.job, w, tile) : dq_share{},
                       share = { uniform(mine.stored), uniform(mine.leaving), uniform(mine.end) };
        int column = column_at<C>(w, 0), heads = a.G; /* that have yet to meet it */
#pragma unroll 1
        for (int j = 0; j < all; j++, tile++) {
            float X[COLUMNS / 2], T[HEAD / 2];
            operand hi, lo;
            int by[2];
            wait(shared_address(&s.ds_full[tile % 2]), tile / 2 & 1);
            read_across(X, s.pass[tile % 2 * 2]);
            release(&s.pass_free[tile % 2]);
            raise_rows((float(&)[1][COLUMNS / 8][4]) X, by);
            split_weights(hi, lo, X);
            multiply_in_turn<HEAD, C::D / HEAD>(T, hi, lo, K);
            float first[2], second[2]; /* together a.scale 2^-by, which may be no number of fp32 */
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int down = max(-250, min(250, -(by[r] + TOP + k_shift)));
                first[r] = a.scale * given_back<COLUMNS / 16> * power(down / 2), second[r] = power(down - down / 2);
            }
#pragma unroll
            for (int i = 0; i < HEAD / 2; i++)
                T[i] *= first[i / 2 % 2], T[i] *= second[i / 2 % 2];
            wait(shared_address(&s.stage_free[tile % 2]), tile / 2 & 1 ^ !LEAVES); /* see take_turn() */
            float4 *const stage = s.stage[tile % 2] + threadIdx.x / 32 % 4 * (4 * HEAD) + threadIdx.x % 32;
            if (LEAVES && share.leaves(tile)) {
                if (share.reads(tile))
#pragma unroll
                    for (int i = 0; i < HEAD / 8; i++) {
                        const float4 x = stage[i * 32];
                        T[4 * i] += x.x, T[4 * i + 1] += x.y, T[4 * i + 2] += x.z, T[4 * i + 3] += x.w;
                    }
                const int top = column + threadIdx.x / 32 % 4 * 16, h = w.head * a.G + a.G - heads;
                store_rows_fp32<HEAD, 1>((const float(&)[1][HEAD / 8][4]) T, a.d_q, a.D, false, [&](int r) {
                    return top + r < w.columns ? row_at(a.d_q, w.other_batch, h, w.other_row + top + r) : NOWHERE;
                });
            } else {
#pragma unroll
                for (int i = 0; i < HEAD / 8; i++)
                    stage[i * 32] = make_float4(T[4 * i], T[4 * i + 1], T[4 * i + 2], T[4 * i + 3]);
            }
            fence_async();
            release(&s.staged[tile % 2]);
            if (--heads == 0)
                heads = a.G, column -= COLUMNS;
        }
        leave_piece(s, slot);
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

/* ---- Queries ----------------------------------------------------------------------------------------------------- */

template <int HEAD, class C, int GROUP> __device__ inline void queries_role(const split_job &p, backward_shared<C> &s)
{
    constexpr int PARTS = C::D / HEAD;
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
                float T[HEAD / 2];
                multiply_both<HEAD, C::ROWS, PARTS>(S, Q, first_tile(s, tile), T, hi, lo, first_tile(s, tile - 1));
                finish(S, j);
                keep_order(tile);
                wgmma_wait<0>();
                add(T); /* dQ += dS K of the tile before */
            }
            wait_second(s, tile);
            multiply_apart<HEAD, C::ROWS, PARTS>(dP, dO, second_tile(s, tile)); /* dP = dO V^T */
            release_second(s, tile);
            const shift v = v_shifts.get(j - begin, end - begin, of_v);
            again |= k.strange || v.strange || q_shift + k.s < p.exact_below;
            differentiate(
                dP, g_shift + v.s,
                [&](int i) { return make_float4(S[4 * i], S[4 * i + 1], S[4 * i + 2], S[4 * i + 3]); },
                [&](int e) { return delta[e / 2 % 2]; }, by, [](int, const float *) {});
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
    static_assert(sizeof(backward_shared<C>) <= 227 * 1024, "what a block may have on sm_90");
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

/* Whether every row sees a key, so that dQ can leave with the last keys. It is worth while where heads are short: these have
 * more to wait for, and a pass over all sums is saved. */
static bool all_rows_see(const args &a)
{
    const span &s = a.all;
    const bool all = a.left >= FAR && a.right >= FAR && s.keys;
    return a.uniform && a.d_q.data && (all || (s.unit && s.low < s.high && s.high > 0 && s.rows - 1 + s.low < s.keys));
}

template <int HEAD, int PARTS>
static heed_status run_all(split_job &p, const split_space &s, const heed_plan *plan, const heed_exec *x)
{
    typedef dkv_shape<HEAD, PARTS> keys_shape;
    const int64_t keys = keys_of(p.job.a);
    const args &a = p.job.a;
    const split_tensors &split = s.split;
    heed_status status = HEED_OK;
    p.job.counter = split.zeros;
    p.job.leaves = keys_shape::ADDS && s.keys.tiles <= LEAVING && all_rows_see(a);
    if (a.d_k.data || a.d_v.data || keys_shape::ADDS)
        status = run<HEAD, dkv_shape<HEAD, PARTS>>(dkv_sm90split<HEAD, PARTS>, p, s.keys, { split.k, split.v },
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
        return run<HEAD, dq_shape<HEAD, PARTS>>(dq_sm90split<HEAD, PARTS>, p, s.queries, { split.q, split.d_o },
                                                { split.k, split.v }, a.q_rows, keys, a.d_k.data || a.d_v.data, plan,
                                                x);
}

static heed_status run(split_job &p, const split_space &s, const heed_plan *plan, const heed_exec *x)
{
    const bool narrow = split_width(p.job.a) == 64;
    if (s.split.hi_only)
        return narrow ? run_all<64, 1>(p, s, plan, x) : run_all<128, 1>(p, s, plan, x);
    return narrow ? run_all<64, 2>(p, s, plan, x) : run_all<128, 2>(p, s, plan, x);
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
    job.job.sums = s.sums, job.job.turns = s.split.turns, job.job.any_order = x->nondeterministic;
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
        both.hi_only = both.gaps = false, both.zeros = both.k.marks = both.q.marks = both.turns = NULL;
        status = heed_cuda_split(a, both, true, job.any, x);
    }
    return status ? status : heed_cuda_backward_marked(a, s.split, only, 2 * plan->device.units, x);
}
