/* The warpgroups of the fp32 backward on Hopper, head sizes to 128: each operand is two numbers of fp16 (split.cuh), and what
 * feeds them is what feeds those of fp16 (backward_sm90_feed.cuh): to it a tensor of HEAD columns of fp32 is one of 2 HEAD
 * columns of fp16. Kernels own rows and meet the other side 64 columns at a time:
 *
 *     dK, dV   64 keys. One warpgroup computes S^T, P and dV += P^T dO, the other dP^T, dS and dK += dS^T Q; P passes from
 *              the first to the second in fp32. At head sizes to 64 there are registers for a third, to which dS passes: it
 *              computes dQ = dS K, which is summed in memory, for each query in the order of the keys
 *     dQ       at larger ones: 64 queries for each of two warpgroups, which do everything for them
 *
 * P carries 2^14. Each row of dS, and one of P where that is not enough, gets a power of two that brings its largest close
 * to 2^15, so that it is far from fp16's smallest numbers; each tile's part of a result is summed by itself and added to
 * the others in fp32.
 *
 * Where two numbers of fp16 do not hold what is needed for a score, or where something is infinite or not a number, the
 * own rows are marked. */
#ifndef HEED_CUDA_BACKWARD_SM90SPLIT_CUH
#define HEED_CUDA_BACKWARD_SM90SPLIT_CUH

#include "backward_sm90.cuh"
#include "scores_split.cuh"
#include "split_sm90.cuh"

struct split_job {
    backward_job job;
    split_rows own[2], other[2];
    int exact_below; /* where the shifts of Q and K add up to less, two numbers of fp16 are not enough */
    float scale;     /* unshifted_scale() */
    int *any;        /* whether anything was marked */
    bool whole;      /* K and V come as they are: who owns them meets them once, and splits them in their place */
};

constexpr int QUERIES = 128; /* of a block that owns queries */

/* SPANS: with the terms of scores_split.cuh. */
template <int HEAD, int PARTS, int TERMS_, bool WIDE = (PARTS * HEAD > 128)>
struct dkv_shape : backward_shape<true, PARTS * HEAD, SPLIT_ROWS, WIDE ? 1 : 2, WIDE ? 2 : 4, 2, 0, 0, 4> {
    static constexpr bool SOON = false,
                          BY_ROLE = false; /* K and V are given back together, and with the piece of work */
    static constexpr int KIND = TERMS_;
    static constexpr bool LAST_FIRST = true, SPANS = KIND;
    static constexpr int WORKS = WIDE ? 1 : 2;
    typedef uint64_t own_rows; /* K and V as left operands */
};

template <bool SPANS, int PARTS> struct own_operand {
    typedef held_rows<PARTS> type;
};
template <int PARTS> struct own_operand<true, PARTS> {
    typedef uint64_t type;
};

/* With dQ, which needs few registers, so that there are some for K and V, if not for terms: P and dS leave shared memory
 * little time. */
template <int PARTS, int TERMS_>
struct dkv_shape<64, PARTS, TERMS_, false> : backward_shape<true, PARTS * 64, SPLIT_ROWS, 2, 4, 2, OWNER, 2, 4> {
    static constexpr int KIND = TERMS_;
    static constexpr bool NUMBERS = true, SPANS = KIND;
    static constexpr int HEAD = 64, MANY = 192, SOME = 96;
    typedef typename own_operand<SPANS, PARTS>::type own_rows;
};

template <int HEAD, int PARTS, int TERMS_, bool WIDE = (PARTS * HEAD > 128)>
struct dq_shape : backward_shape<false, PARTS * HEAD, QUERIES, WIDE ? 1 : 2, WIDE ? 2 : 4, WIDE ? 1 : 2> {
    static constexpr int KIND = TERMS_;
    static constexpr bool SOON = false, SPANS = KIND;
    static constexpr int WORKS = WIDE ? 1 : 2;
};

template <class C> struct split_shared : backward_shared<C> {
    unsigned most[2][4]; /* of what each warp has of a K or V that is split */
    shift found[C::SLOTS][2];
    span spans[C::SPANS ? C::WORKS : 1];
};

template <class C> __device__ inline void note_span(const backward_job &p, backward_shared<C> &s, int slot, int b)
{
    if (threadIdx.x % 32 == 0)
        static_cast<split_shared<C> &>(s).spans[slot] = span_of(p.a, b);
}

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

    /* What sums of STEPS instructions in units of 2^-by are to be multiplied with when they are added. */
    template <int STEPS> __device__ void prepare(const int (&by)[2], float (&now)[2])
    {
        if (__any_sync(~0u, by[0] < e[0] - 30 || by[1] < e[1] - 30)) { /* now and then, so that nothing overflows */
            const int least[2] = { min(e[0], by[0]), min(e[1], by[1]) };
            const float down[2] = { power(least[0] - e[0]), power(least[1] - e[1]) };
#pragma unroll
            for (int i = 0; i < HEAD / 2; i++)
                x[i] *= down[i / 2 % 2];
            e[0] = least[0], e[1] = least[1];
        }
        now[0] = power(e[0] - by[0]) * given_back<STEPS>, now[1] = power(e[1] - by[1]) * given_back<STEPS>;
    }

    /* += T now, to some columns. */
    template <int N> __device__ void add_columns(int first, const float (&T)[N], const float (&now)[2])
    {
#pragma unroll
        for (int i = 0; i < N; i++)
            x[first / 2 + i] = fmaf(T[i], now[i / 2 % 2], x[first / 2 + i]);
    }

    /* += T, which is in units of 2^-by. */
    __device__ void add(const float (&T)[HEAD / 2], const int (&by)[2])
    {
        float now[2];
        prepare<COLUMNS / 16>(by, now);
        add_columns(0, T, now);
    }

    /* What has been added is added here: the compiler would put it off, and T would take registers meanwhile. */
    __device__ void settle()
    {
#pragma unroll
        for (int i = 0; i < HEAD / 2; i++)
            asm volatile("" : "+f"(x[i]));
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
    return exponents_back<HEAD> * fmaxf(fminf(times_power(a.scale, -shifts), 2e38f), 1.2e-38f);
}

/* S becomes P 2^14, with L(e) of element e. range: the columns that this lane's rows see. In the exponent 14 would cost
 * four bits of the largest P. */
template <int N, class Terms>
__device__ inline void weigh(float (&S)[N], float c, bool whole, const int2 *range, int column, Terms L)
{
#pragma unroll
    for (int e = 0; e < N; e++)
        S[e] = exp2_fast(fmaf(S[e], c, -L(e))) * power(TOP);
    if (whole)
        return;
    const int low[2] = { range[0].x - column, range[8].x - column };
    const int high[2] = { range[0].y - column, range[8].y - column };
#pragma unroll
    for (int e = 0; e < N; e++) {
        const int i = column_of(e), r = e / 2 % 2;
        S[e] = i >= low[r] && i < high[r] ? S[e] : 0.0f;
    }
}

/* Whether an lse is so large that exponents would be rounded too far: what has terms is then marked. */
__device__ inline bool is_vast_log2(float L) { return fabsf(L) > 1e7f && L != CUDART_INF_F; }

/* P 2^14 with terms as dS wants it, by pass(its elements): times the softcap's slope, where there is one. Dropout has given some a
 * sign. */
template <int TERMS, int N, class Pass>
__device__ inline void pass_weights(const float (&P)[N], const float (&slope)[N], const args &a, Pass pass)
{
    if (has_cap<TERMS>(a))
        pass([&](int e) { return P[e] * slope[e]; });
    else
        pass([&](int e) { return P[e]; });
}

/* dP 2^shifts becomes dS 2^by = P (dP - delta) 2^by, with a by for each row. P(i): elements 4 i .. + 3, times 2^14. With TERMS they
 * have a sign where dropout has left them out, and it is P (keep dP - delta). pass(i, dS): these of dS, times 2^14. */
template <int TERMS, int N, class Weights, class Terms, class Pass>
__device__ inline void differentiate(float (&dP)[N], int shifts, const args &a, Weights P, Terms delta, int (&by)[2],
                                     Pass pass)
{
    for (; shifts > 100; shifts -= 100) /* so that its power of two is a number of fp32 */
#pragma unroll
        for (int e = 0; e < N; e++)
            dP[e] *= power(-100);
    const float down = power(max(-126, min(127, -shifts))) * given_back<4>;
    const auto all = [&](auto dS) { /* of dP, the weight and delta */
#pragma unroll
                                    for (int i = 0; i < N / 4; i++) {
                                        const float4 four = P(i);
                                        const float weights[4] = { four.x, four.y, four.z, four.w };
#pragma unroll
                                        for (int e = 0; e < 4; e++)
                                            dP[4 * i + e] = dS(dP[4 * i + e], weights[e], delta(4 * i + e));
                                        pass(i, &dP[4 * i]);
                                    }
    };
    if (has_dropout<TERMS>(a)) {
        const float kept = fminf(down * a.keep_scale, 3e38f);
        all([&](float x, float weight, float d) { return fmaf(x, weight < 0.0f ? 0.0f : kept, -d) * fabsf(weight); });
    } else
        all([&](float x, float weight, float d) { return fmaf(x, down, -d) * weight; });
    raise_rows((float(&)[1][N / 4][4]) dP, by);
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

/* Whether own keys and values are split here. */
template <class C> __device__ inline bool splits_own(const split_job &p) { return C::ADDS && C::D == 128 && p.whole; }

/* The shift of own keys (which = 0) or values, when they are split: by one role, and the others come to know of it with the
 * first tile that passes. */
template <class C>
__device__ inline shift split_own(const split_job &p, split_shared<C> &s, const piece &w, int slot, int which)
{
    if (splits_own<C>(p)) {
        split_in_place<64>(s.own[slot][which], w.rows, s.most[which], s.found[slot][which], 1 + which);
        return s.found[slot][which];
    }
    return shift_at(p.own[which], w.batch, w.head, w.memory_row);
}

template <class C> __device__ inline void leave_piece(backward_shared<C> &s, int slot)
{
    release(&s.own_free[slot]);
    if (C::ADDS)
        release(&s.work_free[slot]);
}

template <int HEAD, class C> __device__ inline void values_role(const split_job &p, split_shared<C> &s)
{
    const args &a = p.job.a;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    int tile = 0;
    meet_pieces<C>(s, [&](const piece &w, int n) {
        const int slot = n % C::SLOTS;
        const int all = uniform(w.tiles) * a.G;
        const int k_shift = split_own(p, s, w, slot, 0).s;
        typename C::own_rows K;
        take_rows(K, shared_address(s.own[0][0]) + slot * (int)sizeof(s.own[0]));
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
        /* Of tile j: its head, and this lane's first query. */
        const auto head_met = [&](int j) { return w.head * a.G + j % a.G; };
        const auto query_met = [&](int j) { return column_at<C>(w, j / a.G) + lane % 4 * 2; };
        uint32_t dropped = 0;
        const auto draw = [&](int j) { /* of tile j, while its S is on the way */
                                       if constexpr (C::SPANS)
                                           if (has_dropout<C::KIND>(a))
                                               dropped = draw_dropped<true, COLUMNS / 2>(a, s.spans[n % C::WORKS],
                                                                                         head_met(j), query_met(j),
                                                                                         w.tile * C::ROWS + row);
        };
        /* From S to P of tile j, which is handed over. */
        const auto finish = [&](float(&S)[COLUMNS / 2], int shift, int j) {
            const float *const L = s.L[tile % C::FIRST] + lane % 4 * 2;
            const int care = uniform(s.care[tile % C::FIRST][0]);
            float c, slope[COLUMNS / 2];
            if constexpr (C::SPANS) {
                const span &q = s.spans[n % C::WORKS];
                lane_scores<true, COLUMNS / 2> t = { S, query_met(j), w.tile * C::ROWS + row };
                add_terms<C::KIND>(t, logit_scale<HEAD>(p.scale, k_shift + shift), a, q, head_of(a, q, head_met(j)),
                                   [&](int e, float x) { slope[e] = x; });
                bool vast = false;
#pragma unroll
                for (int e = 0; e < COLUMNS / 2; e += 4)
                    vast |= is_vast_log2(L[column_of(e)]) || is_vast_log2(L[column_of(e + 1)]);
                if (__any_sync(~0u, vast) && lane == 0) {
                    p.own[0].marks[split_at(p.own[0], w.batch, w.head, w.memory_row)] = *p.any = 1;
                    if (C::ADDS)
                        p.other[0].marks[met_at<C>(p, w, j)] = 1;
                }
                c = LOG2E;
            } else
                c = exponent_scale<HEAD>(a, k_shift + shift);
            weigh(S, c, care < 0, range, care + lane % 4 * 2, [&](int e) { return L[column_of(e)]; });
            release_first(s, tile);
            wait_to_pass(s, tile);
            float4 *const to = (float4 *)s.pass[tile % 2 * 2] + place_to_pass(threadIdx.x % 128);
            const auto pass = [&](auto P) {
#pragma unroll
                for (int i = 0; i < COLUMNS / 8; i++)
                    to[i * 128] = make_float4(P(4 * i), P(4 * i + 1), P(4 * i + 2), P(4 * i + 3));
            };
            if (has_dropout<C::KIND>(a))
                sign_dropped<true>(S, dropped);
            if constexpr (C::SPANS)
                pass_weights<C::KIND>(S, slope, a, pass);
            else
                pass([&](int e) { return S[e]; });
            release(&s.pass_full[tile % 2]);
            if (has_dropout<C::KIND>(a))
                drop<true>(S, dropped); /* from dV */
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
            multiply_scores<HEAD, C::ROWS, C::D / HEAD>(S, K, first_tile(s, tile), /* S^T = K Q^T */
                                                        [&]() { draw(0); });
            finish(S, q_shift(0).s, 0);
            split(S, g_shift(0).s);
            tile++;
        }
#pragma unroll 1
        for (int j = 1; j < all; j++, tile++) {
            float S[COLUMNS / 2];
            wait_first(s, tile);
            wait_second(s, tile - 1);
            multiply_both<HEAD, C::ROWS, C::D / HEAD>(
                S, K, first_tile(s, tile), T, hi, lo, second_tile(s, tile - 1),
                [&]() {
                    if (!C::SPANS)
                        dV.add(T, held);
                },
                [&]() { draw(j); });
            const auto complete = [&]() { /* T */
                                          keep_order(tile);
                                          wgmma_wait<0>();
                                          release_second(s, tile - 1);
            };
            if (C::SPANS) { /* terms leave no registers for it */
                complete();
                dV.add(T, by);
                if (C::KIND == WITH_ALL_TERMS)
                    dV.settle();
            }
            finish(S, q_shift(j).s, j);
            if (!C::SPANS) {
                complete();
                held[0] = by[0], held[1] = by[1];
            }
            split(S, g_shift(j).s);
        }
        if (all) {
            if (!C::SPANS)
                dV.add(T, held);
            wait_second(s, tile - 1);
            multiply_values<HEAD, C::D / HEAD>(T, hi, lo, second_tile(s, tile - 1));
            release_second(s, tile - 1);
            dV.add(T, by);
        }
        if (a.d_v.data)
            dV.write(C::SPANS ? a.keep_scale : 1.0f, a.d_v, a.Dv, w.rows,
                     [&](int r) { return row_at(a.d_v, w.batch, w.head, a.col + (w.memory_row + r) * a.col_step); });
        leave_piece(s, slot);
    });
}

template <int HEAD, class C> __device__ inline void keys_role(const split_job &p, split_shared<C> &s)
{
    const args &a = p.job.a;
    const int lane = threadIdx.x % 32;
    int tile = 0;
    meet_pieces<C>(s, [&](const piece &w, int n) {
        const int slot = n % C::SLOTS;
        const int all = uniform(w.tiles) * a.G;
        const shift v = split_own(p, s, w, slot, 1);
        typename C::own_rows V;
        take_rows(V, shared_address(s.own[0][1]) + slot * (int)sizeof(s.own[0]));
        const int own = (int)split_at(p.own[0], w.batch, w.head, w.memory_row);
        shift k = splits_own<C>(p) ? shift{} : p.own[0].shifts[own];
        bool again = false;
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
            differentiate<C::KIND>(
                dP, v.s + g.s, a, [&](int i) { return pass[i * 128]; }, [&](int e) { return delta[column_of(e)]; },
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
            const bool strange = q.strange || g.strange || k.strange || v.strange || k.s + q.s < p.exact_below;
            again |= strange;
            by[0] = raised[0] + q.s, by[1] = raised[1] + q.s;
            if (C::ADDS && strange && threadIdx.x % 128 == 0) /* nor is dQ what it should be */
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
            if (splits_own<C>(p))
                k = s.found[slot][0];
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
    });
}

/* ---- The workspace ----------------------------------------------------------------------------------------------- */

/* Begins with all tensors, split, and what goes with them. */
inline workspace begin_workspace(const heed_problem *p, void *memory, split_tensors &split)
{
    const int64_t rows = p->a.q.shape[0] * p->Hq * p->a.q.shape[2];
    workspace space = { (char *)memory, split_place(p, SPLIT_ALL, (char *)memory, split) };
    space.bytes = (space.bytes + 15) / 16 * 16;
    split.L = (float *)space.take(rows * sizeof(float));
    split.delta = (float *)space.take(rows * sizeof(float));
    split.zeros = (int *)space.take(3 * sizeof(int));
    split.k.marks = (int *)space.take(p->a.k.shape[0] * p->Hk * split.k.head_rows * sizeof(int));
    split.q.marks = (int *)space.take(rows * sizeof(int));
    return space;
}

/* ---- Head sizes from 129 to 256: backward_sm90split_wide.cu ------------------------------------------------------ */

size_t heed_backward_workspace_sm90split_wide(const heed_problem *p);
heed_status heed_backward_sm90split_wide(const heed_problem *p, const heed_plan *plan, const heed_exec *x);

#endif
