/* Backward for fp32 on tensor cores by mma.sync: each operand is two numbers of fp16 (split.cuh), made by a pass over q, k, v and d_o before the kernel. Without atomics: a block owns 64 keys and meets
 * the queries of its group's heads 32 at a time, or owns 64 queries and meets the keys. With A the rows it owns and B
 * those it meets it is one computation,
 *
 *     owner of     A1 A2    B1 B2    S = A1 B1^T, dP = A2 B2^T, then P and dS              results
 *     keys         K  V     Q  dO                                         dV += P B2       dK += dS B1
 *     queries      Q  dO    K  V                                                           dQ += dS B1
 *
 * and P and dS, whose rows are the owner's, are left operands where they are. Each of their rows gets a power of two of
 * its own, so that it is far from fp16's smallest numbers; results are kept in units of 2^-e, with e for each row. */
#ifndef HEED_CUDA_BACKWARD_SPLIT_CUH
#define HEED_CUDA_BACKWARD_SPLIT_CUH

#include "tile_split.cuh"

/* Four warps own 16 rows each. At D = 256 there are registers for half of the columns of their results: two times four. */
template <int D> constexpr int threads_of = D > 128 ? 256 : 128;
template <int D> constexpr int columns_of = D > 128 ? 128 : D; /* that a warp has */
constexpr int MEET = 32, NT = MEET / 8;

/* A warp's scores. KEYS: its 16 rows are keys, else queries. */
template <bool KEYS> struct own_tile {
    static constexpr int R = KEYS ? 2 * NT : 2, C = KEYS ? 2 : 2 * NT;
    static constexpr bool EXACT = true;
    float (&X)[1][NT][4];
    const int *lows, *highs; /* of the tile's first query */
    int i0, n0, query0;      /* first query and first key of this lane; its first query of the tile */
    static __device__ constexpr int down(int r) { return r * 8; }
    static __device__ constexpr int across(int c) { return c / 2 * 8 + c % 2; }
    __device__ float &at(int r, int c) { return KEYS ? X[0][r / 2][c * 2 + r % 2] : X[0][c / 2][r * 2 + c % 2]; }
    static __device__ constexpr int later(int r) { return KEYS ? across(r) : down(r); }
    static __device__ constexpr int apart(int c) { return KEYS ? down(c) : across(c); }
    __device__ int row(int r) const { return i0 + later(r); }
    __device__ int key(int c) const { return n0 + apart(c); }
    __device__ int low(int r) const { return lows[query0 + later(r)]; }
    __device__ int high(int r) const { return highs[query0 + later(r)]; }
};

template <int D> struct shared_backward {
    static constexpr int SLOTS = D == 64 ? 2 : 1;
    char A1[split_bytes<D, SPLIT_ROWS>], A2[split_bytes<D, SPLIT_ROWS>];
    char B1[SLOTS][split_bytes<D, MEET>], B2[SLOTS][split_bytes<D, MEET>];
    row_facts_split facts[SPLIT_ROWS]; /* of the queries: the block's own, or those in either slot */
    int low[SPLIT_ROWS], high[SPLIT_ROWS];
    span sequence; /* what is looked at once for each tile lies here and not in registers */
    head of[2];
    unsigned block;                   /* its number, where it has several one after the other */
    int own_h, from;                  /* the head and the first of the own rows */
    shift own[2];                     /* of A1 and A2 */
    int first, last, inside, outside; /* what of the other side some of the own rows see, and what all of them do */
};

/* A result of 16 rows, in units of 2^-e for either of the lane's rows. */
template <int D> struct gradient {
    static constexpr int WT = columns_of<D> / 8;
    float x[1][WT][4];
    int e[2];
    __device__ gradient()
    {
#pragma unroll
        for (int n = 0; n < WT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[0][n][i] = 0.0f;
        e[0] = e[1] = 1000;
    }

    /* += X B, with the shift of B's tile. X is spoilt. */
    __device__ void add(float (&X)[1][NT][4], uint32_t B, int s)
    {
        float before[2], now[2];
        int up[2];
        raise_rows(X, up);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int least = min(e[r], up[r] + s);
            before[r] = power(least - e[r]), now[r] = power(least - up[r] - s);
            e[r] = least;
        }
        multiply_split_tile<D, MEET>(x, before, now, split_operand<1, NT / 2>(X), B, 0);
    }

    __device__ void finish(float scale)
    {
#pragma unroll
        for (int n = 0; n < WT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[0][n][i] = times_power(x[0][n][i] * scale, -e[i / 2]);
    }
};

/* ---- The other side ---------------------------------------------------------------------------------------------- */

/* Facts of row i of the queries to where they are looked at. again: there are L and delta instead, and P is 2^rest times as
 * large: most_of() says how large its logarithm may be. */
__device__ inline void bring_facts(row_facts_split &to, const args &a, const split_tensors &split, const span &q, int h,
                                   int i, bool again)
{
    const int64_t number = ((int64_t)q.q_batch * a.Hq + h) * a.q_rows + q.q_row + i;
    if (!again)
        copy_async(shared_address(&to), split.facts + number, 16);
    else
        to = { split.L[number], 0.0f, split.delta[number], load(a.lse, row_at(a.lse, q.q_batch, h, q.q_row + i)) };
}

/* Where in it a block is: from row `at` of head h on. Queries of all heads of a group, keys of one. */
struct place {
    int h, at;
};

template <bool KEYS, int D>
__device__ static void meet(shared_backward<D> &s, int slot, const args &a, const split_tensors &split, place p,
                            bool again)
{
    constexpr int THREADS = threads_of<D>;
    const span &q = s.sequence;
    const split_rows &B1 = KEYS ? split.q : split.k, &B2 = KEYS ? split.d_o : split.v;
    const int batch = KEYS ? q.q_batch : q.k_batch, row = (KEYS ? q.q_row : q.k_row) + p.at;
    const int rows = (KEYS ? q.rows : q.keys) - p.at;
    copy_split<D, MEET, THREADS>(shared_address(s.B1[slot]), split_row<D>(B1, batch, p.h, row), rows);
    copy_split<D, MEET, THREADS>(shared_address(s.B2[slot]), split_row<D>(B2, batch, p.h, row), rows);
    if (KEYS && threadIdx.x < MEET) {
        const int i = min(p.at + (int)threadIdx.x, q.rows - 1), to = slot * MEET + threadIdx.x;
        bring_facts(s.facts[to], a, split, q, p.h, i, again);
        band_of_row(a, q, i, s.low[to], s.high[to]);
        if (p.at + (int)threadIdx.x >= q.rows)
            s.low[to] = s.high[to] = 0; /* sees nothing */
    }
    if (KEYS && threadIdx.x == MEET)
        s.of[slot] = head_of(a, q, p.h);
    commit_copies();
}

/* ---- Scores ------------------------------------------------------------------------------------------------------ */

__device__ static void clear(float (&x)[1][NT][4])
{
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[0][n][e] = 0.0f;
}

__device__ static void copy(float (&to)[1][NT][4], const float (&from)[1][NT][4])
{
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            to[0][n][e] = from[0][n][e];
}

__device__ inline float most_of(const row_facts_split &f, bool divided)
{
    return divided && fabsf(f.log2) < 1e7f ? 0.5f : 0.0f;
}

/* From S = A1 B1^T 2^shifts and dP = A2 B2^T / down to P and dS: plain scores are what the forward has made of them, to the
 * last bit. exponents: log2(e), with what S lacks. P is at most 1: rounding, where S is large, could make it more. divided:
 * see bring_facts(). */
template <class Tile>
__device__ static void differentiate_plain(Tile &S, Tile &dP, const row_facts_split *facts, float scale, int shifts,
                                           float exponents, float down, float factor, bool divided, bool whole)
{
    const float c2 = fmaxf(fminf(times_power(scale, -shifts), 2e38f), 1.2e-38f) * exponents;
    if (!whole)
        hide_outside_band(S);
#pragma unroll
    for (int r = 0; r < Tile::R; r++) {
        const row_facts_split f = facts[S.query0 + Tile::later(r)];
#pragma unroll
        for (int c = 0; c < Tile::C; c++) {
            const float p = exp2_fast(min_or_nan(fmaf(S.at(r, c), c2, -f.log2) - f.rest, most_of(f, divided)));
            S.at(r, c) = p;
            dP.at(r, c) = p * fmaf(dP.at(r, c), down, -f.delta) * factor;
        }
    }
}

/* The same for any scores; P is after dropout. back: what S lacks. */
template <class Tile>
__device__ static void differentiate_any(Tile &S, Tile &dP, const row_facts_split *facts, const args &a, const span &q,
                                         const head &x, int shifts, float back, float down, bool divided, bool whole)
{
    const float up = power(-shifts / 2) * back, further = power(-shifts - -shifts / 2);
    float slope[Tile::R][Tile::C];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            S.X[0][n][e] *= up, S.X[0][n][e] *= further;
    __builtin_assume(a.bias.dtype == HEED_F32); /* check.c wants it so where q is; an absent one has it too */
    score_with_slope(S, slope, a, q, x, whole);
    uint32_t kept = 0; /* a bit for each score */
    if (a.drop_below) {
        const uint64_t seed = seed_of(a);
#pragma unroll 1
        for (int r = 0; r < Tile::R; r++)
            kept |= draw(S, r, a, q, x, seed) << r * Tile::C;
    }
#pragma unroll
    for (int r = 0; r < Tile::R; r++) {
        const row_facts_split f = facts[S.query0 + Tile::later(r)];
#pragma unroll
        for (int c = 0; c < Tile::C; c++) {
            const bool near = divided && fabsf(f.log2) < 1e7f;
            const float x2 = near ? fmaf(S.at(r, c), LOG2E, -f.log2) : (S.at(r, c) - f.lse) * LOG2E;
            const float p = exp2_fast(min_or_nan(x2, near ? 0.5f : 0.0f));
            const float keep = !a.drop_below ? 1.0f : kept >> (r * Tile::C + c) & 1 ? a.keep_scale : 0.0f;
            S.at(r, c) = p * keep;
            dP.at(r, c) = p == 0.0f ? 0.0f : p * fmaf(dP.at(r, c) * down, keep, -f.delta) * slope[r][c];
        }
    }
}

/* dS has the scale in it where GENERAL. again: S is that of another kernel, by multiply_split_again(). */
template <int D, bool GENERAL, class Tile>
__device__ static void differentiate(Tile &S, Tile &dP, const row_facts_split *facts, const args &a, const span &q,
                                     const head &x, int shifts, int d_shifts, bool again, bool divided, bool whole)
{
    for (; d_shifts > 100; d_shifts -= 100) /* so that its power of two is a number of fp32 */
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                dP.X[0][n][e] *= power(-100);
    const float down = power(max(-126, min(127, -d_shifts)));
    if (GENERAL && (has_extras(a) || a.scale <= 0))
        differentiate_any(S, dP, facts, a, q, x, shifts, again ? given_back<score_steps<D>> : 1.0f, down, divided,
                          whole);
    else
        differentiate_plain(S, dP, facts, a.scale, shifts, again ? exponents_back<D> : LOG2E, down,
                            GENERAL ? a.scale : 1.0f, divided, whole);
}

/* ---- A block ----------------------------------------------------------------------------------------------------- */

template <bool KEYS, int D>
__device__ static void find_other_side(shared_backward<D> &s, const args &a, const span &q, int from, int rows)
{
    int first, last;
    if (KEYS) {
        band_of_key(a, q, from, s.first, s.last);
        band_of_key(a, q, from + rows - 1, first, last);
    } else {
        band_of_row(a, q, from, s.first, s.last);
        band_of_row(a, q, from + rows - 1, first, last);
    }
    s.inside = max(s.first, first), s.outside = min(s.last, last);
    s.first = min(s.first, first) / MEET * MEET, s.last = max(s.last, last);
}

/* What a block has to do. */
struct share {
    int block, tiles; /* its number among the blocks of its kind, and how many of these a head has */
    const int *only;  /* see marked; NULL: all rows are wanted */
    bool values; /* of keys, above D = 64: dV and not dK. The registers of a warp hold both of 16 keys at 64 alone */
    bool again;  /* what another kernel has left: its scores are that one's, which the forward had too */
};

/* Inlined, so that what a kernel knows of w takes no code. Above D = 64 dK and dV are one piece of code, as
 * all that they differ in is one product and what is added to the result. */
template <int D, bool GENERAL, bool KEYS>
__device__ __forceinline__ void own_rows(shared_backward<D> &s, const args &a, const split_tensors &split,
                                         const share &w, int exact_below)
{
    constexpr bool BOTH = KEYS && D == 64; /* dK and dV */
    const bool values = KEYS && !BOTH && w.values, again = w.again;
    constexpr int SLOTS = shared_backward<D>::SLOTS, THREADS = threads_of<D>, W = columns_of<D>;
    const int lane = threadIdx.x % 32, row0 = threadIdx.x % 128 / 32 * 16, heads = KEYS ? a.Hk : a.Hq;
    const int own_h = w.block / w.tiles % heads, tile = w.block % w.tiles;
    const int from = (KEYS ? tile : w.tiles - 1 - tile) * SPLIT_ROWS;
    if (threadIdx.x == 0) {
        s.sequence = span_of(a, w.block / w.tiles / heads);
        s.of[0] = head_of(a, s.sequence, KEYS ? own_h * a.G : own_h);
        s.own_h = own_h, s.from = from;
    }
    __syncthreads();
    const span &q = s.sequence;
    const int rows = min(SPLIT_ROWS, (KEYS ? q.keys : q.rows) - from);
    if (rows <= 0)
        return;
    const split_rows &A1 = KEYS ? split.k : split.q, &A2 = KEYS ? split.v : split.d_o;
    const split_rows &B1 = KEYS ? split.q : split.k, &B2 = KEYS ? split.d_o : split.v;
    const int batch = KEYS ? q.k_batch : q.q_batch, row = (KEYS ? q.k_row : q.q_row) + from;
    const int64_t own_at = split_at(A1, batch, own_h, row);
    if (w.only && !w.only[own_at])
        return;
    const uint32_t sA1 = shared_address(s.A1), sA2 = shared_address(s.A2);
    copy_split<D, SPLIT_ROWS, THREADS>(sA1, split_row<D>(A1, batch, own_h, row), rows);
    copy_split<D, SPLIT_ROWS, THREADS>(sA2, split_row<D>(A2, batch, own_h, row), rows);
    if (!KEYS && threadIdx.x < SPLIT_ROWS) {
        const int i = from + min((int)threadIdx.x, rows - 1);
        bring_facts(s.facts[threadIdx.x], a, split, q, own_h, i, again);
        band_of_row(a, q, i, s.low[threadIdx.x], s.high[threadIdx.x]);
    }
    commit_copies();
    if (threadIdx.x == 0) {
        s.own[0] = A1.shifts[own_at], s.own[1] = A2.shifts[own_at];
        find_other_side<KEYS>(s, a, q, from, rows);
    }
    __syncthreads();

    const int column0 = D > W ? threadIdx.x / 128 * W : 0; /* of this warp's results */
    gradient<D> y, dV;                                     /* y: dK, dQ, or dV where it has no other place */
    place next = { KEYS ? own_h * a.G : own_h / a.G, s.first };
    const int h_end = KEYS ? next.h + a.G : next.h + 1;
    const bool any = s.first < s.last;
    if (any && SLOTS == 2)
        meet<KEYS>(s, 0, a, split, next, again);
    for (int slot = 0; any && next.h < h_end; slot = SLOTS == 2 ? slot ^ 1 : 0) {
        const place here = next;
        next.at += MEET;
        if (next.at >= s.last)
            next.at = s.first, next.h++;
        if (SLOTS == 1) {
            __syncthreads(); /* the tile before is no longer needed */
            meet<KEYS>(s, 0, a, split, here, again);
        }
        const int met_batch = KEYS ? q.q_batch : q.k_batch;
        const int met_row = (KEYS ? q.q_row : q.k_row) + here.at / SPLIT_ROWS * SPLIT_ROWS;
        const int64_t met_at = split_at(B1, met_batch, here.h, met_row);
        const shift met1 = B1.shifts[met_at], met2 = B2.shifts[met_at];
        const shift own1 = s.own[0], own2 = s.own[1];
        wait_copies<0>();
        __syncthreads(); /* this tile is here, and, of two slots, the one before no longer needed */
        if (SLOTS == 2 && next.h < h_end)
            meet<KEYS>(s, slot ^ 1, a, split, next, again);
        const uint32_t sB1 = shared_address(s.B1[slot]), sB2 = shared_address(s.B2[slot]);
        const head &x = s.of[KEYS ? slot : 0];
        const bool whole = here.at >= s.inside && here.at + MEET <= s.outside;
        float S[1][NT][4], dP[1][NT][4];
        const int own = s.from + row0 + lane / 4, met = here.at + lane % 4 * 2;
        const int *lows = s.low + (KEYS ? slot * MEET : 0), *highs = s.high + (KEYS ? slot * MEET : 0);
        const int query0 = KEYS ? lane % 4 * 2 : row0 + lane / 4;
        own_tile<KEYS> t = { S, lows, highs, KEYS ? met : own, KEYS ? own : met, query0 };
        own_tile<KEYS> dt = { dP, lows, highs, t.i0, t.n0, query0 };
        const bool exactly = own1.strange | met1.strange || own1.s + met1.s < exact_below;
        if (exactly)
            multiply_exactly(t, a, q, x, KEYS ? met1.s : own1.s, KEYS ? own1.s : met1.s);
        else if (again)
            multiply_split_again<D, SPLIT_ROWS, MEET>(S, sA1, row0, sB1, 0);
        else
            multiply_split_rows<D, SPLIT_ROWS, MEET>(S, sA1, row0, sB1, 0);
        if (values)
            clear(dP);
        else
            multiply_split_rows<D, SPLIT_ROWS, MEET>(dP, sA2, row0, sB2, 0);
        differentiate<D, GENERAL>(t, dt, s.facts + (KEYS ? slot * MEET : 0), a, q, x, own1.s + met1.s, own2.s + met2.s,
                                  again && !exactly, again, whole);
        if (BOTH)
            dV.add(S, sB2, met2.s);
        if (values)
            copy(dP, S);
        y.add(dP, (values ? sB2 : sB1) + column0 / 64 * MEET * 128, values ? met2.s : met1.s);
    }
    wait_copies<0>();
    const auto where = [&](const view &t) {
        return [&](int r) {
            const int i = s.from + row0 + r;
            return i >= (KEYS ? q.keys : q.rows) ? NOWHERE
                   : KEYS                        ? row_at(t, q.k_batch, s.own_h, q.k_row + a.col + i * a.col_step)
                                                 : row_at(t, q.q_batch, s.own_h, q.q_row + i);
        };
    };
    const auto store = [&](gradient<D> &y, view t, float scale, int width) {
        y.finish(scale);
        t.data += column0 * t.stride[3] * (int)sizeof(float);
        store_rows_fp32<W, 1>(y.x, t, width - column0, a.accumulate, where(t));
    };
    const view &d = values ? a.d_v : KEYS ? a.d_k : a.d_q;
    if (d.data)
        store(y, d, GENERAL || values ? 1.0f : a.scale, values ? a.Dv : a.D);
    if (BOTH && a.d_v.data)
        store(dV, a.d_v, 1.0f, a.Dv);
}

/* The blocks of each kind, in the order of their numbers: dK, dV, dQ. */
struct kinds {
    int key_tiles, query_tiles, dv, dk, dq;
};

/* again: see share. */
template <int D, bool GENERAL>
__device__ __forceinline__ void compute_block(const args &a, const split_tensors &split, const kinds &n, int block,
                                              int exact_below, const marked &only, bool again)
{
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(shared_backward<D> *)memory;
    const bool values = block >= n.dk;
    if (block < n.dk + n.dv)
        own_rows<D, GENERAL, true>(s, a, split, { block - (values ? n.dk : 0), n.key_tiles, only.keys, values, again },
                                   exact_below);
    else
        own_rows<D, GENERAL, false>(s, a, split, { block - n.dk - n.dv, n.query_tiles, only.queries, false, again },
                                    exact_below);
}

/* The whole problem, up to D = 128. */
template <int D, bool GENERAL>
__global__ void __launch_bounds__(threads_of<D>, 2)
    backward_split(const __grid_constant__ args a, const __grid_constant__ split_tensors split, kinds n,
                   int exact_below)
{
#if HEED_SPLIT_HERE
    compute_block<D, GENERAL>(a, split, n, blockIdx.x, exact_below, {}, false);
#endif
}

/* The rows that a kernel of Hopper has marked, by few blocks, as there are seldom any. Above D = 128 also the whole problem,
 * where nothing says what is marked: only Hopper has the shared memory for that, and one kernel is half as much to compile
 * as two that are all but the same. */
template <int D>
__global__ void __launch_bounds__(threads_of<D>, D > 128 ? 1 : 2)
    backward_marked(const __grid_constant__ args a, const __grid_constant__ split_tensors split, kinds n,
                    int exact_below, marked only)
{
#if HEED_SPLIT_HERE && __CUDA_ARCH__ >= 900
    wait_for_last();
    const bool again = D <= 128 || only.any;
    if (again && !*only.any)
        return;
    extern __shared__ __align__(1024) char memory[];
    unsigned &block = ((shared_backward<D> *)memory)->block; /* for which there is no register */
    if (threadIdx.x == 0)
        block = blockIdx.x;
    __syncthreads();
#pragma unroll 1
    while (block < (unsigned)(n.dk + n.dv + n.dq)) {
        compute_block<D, true>(a, split, n, block, exact_below, only, again);
        __syncthreads();
        if (threadIdx.x == 0)
            block += gridDim.x; /* either is below 2^31 */
        __syncthreads();
    }
#endif
}

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

template <int D> static kinds kinds_of(const args &a)
{
    const int64_t keys = a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0;
    const int64_t key_tiles = tiles_of(keys, SPLIT_ROWS), query_tiles = tiles_of(a.Sq, SPLIT_ROWS);
    const int64_t key_blocks = key_tiles * a.Hk * a.B, query_blocks = a.d_q.data ? query_tiles * a.Hq * a.B : 0;
    const int64_t dk = a.d_k.data || (D == 64 && a.d_v.data) ? key_blocks : 0;
    const int64_t dv = a.d_v.data && D > 64 ? key_blocks : 0;
    return { (int)key_tiles, (int)query_tiles, (int)dv, (int)dk, (int)query_blocks };
}

template <int D, bool GENERAL> static heed_status run(const args &a, const split_tensors &split, const heed_exec *x)
{
    const kinds n = kinds_of<D>(a);
    return launch(backward_split<D, GENERAL>, (int64_t)n.dk + n.dv + n.dq, threads_of<D>, sizeof(shared_backward<D>), x,
                  a, split, n, split_exact_below(a));
}

template <int D>
static heed_status run_marked(const args &a, const split_tensors &split, const marked &only, int64_t blocks,
                              const heed_exec *x)
{
    const kinds n = kinds_of<D>(a);
    const int64_t all = (int64_t)n.dk + n.dv + n.dq;
    return launch_next(backward_marked<D>, HEED_MIN(all, blocks), threads_of<D>, sizeof(shared_backward<D>), x, a,
                       split, n, split_exact_below(a), only);
}

/* All tensors split into the workspace, and then one kernel: run(). */
inline size_t backward_split_bytes(const heed_problem *p)
{
    split_tensors split = {};
    return split_place(p, SPLIT_ALL, NULL, split) + heed_cuda_delta_bytes(p);
}

template <class Run> static heed_status backward_split_by(Run run, const heed_problem *p, const heed_exec *x)
{
    split_tensors split = {};
    const prologue start(p, x, split_place(p, SPLIT_ALL, (char *)x->workspace, split));
    const heed_status status = start.status ? start.status : heed_cuda_split(start.a, split, false, NULL, x);
    return status ? status : run(start.a, split, x);
}

#endif
