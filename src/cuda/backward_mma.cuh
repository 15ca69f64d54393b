/* The tensor-core backward for fp16 and bf16, head sizes to 256, without atomics:
 *
 *     dK/dV kernel    owns 64 or 128 keys, 16 MT to a warp, and meets the queries of its group's heads
 *     dQ kernel       owns 64 or 128 queries, likewise, and meets the keys
 *
 * Either keeps its results in registers, computes S and dP with its own side as rows, and so has P and dS in the layout
 * of a left operand: neither leaves the lanes that computed it, but where two warps share their keys (in_pairs). What a kernel
 * meets is copied two tiles deep. At D = 256 the registers of a warp hold dK or dV of its 16 keys, not both: then there is a
 * kernel for each. dQ needs nothing of dK and dV, and begins on multiprocessors that those leave idle in the end.
 *
 * A Chip says how many rows and columns to take at once, SCORES what is needed beyond scale and band (scores_mma.cuh). */
#ifndef HEED_CUDA_BACKWARD_MMA_CUH
#define HEED_CUDA_BACKWARD_MMA_CUH

#include "differentiate_mma.cuh"
#include "launch.cuh"

/* ---- dQ ---------------------------------------------------------------------------------------------------------- */

template <int D, class Tiles> struct shared_dq {
    static constexpr int BR = Tiles::OWN, BC = Tiles::MEETS, SLOTS = Tiles::SLOTS;
    typedef score_tiles<BR, BC, false> extras;
    char Q[BR * D * 2], dO[BR * D * 2], K[SLOTS][BC * D * 2], V[SLOTS][BC * D * 2];
    float L[BR], delta[BR];
    int low[BR], high[BR];
    int i0, last;        /* the first row, and the end of the keys that some row sees */
    int inside, outside; /* all rows see keys inside .. outside */
    span sequence;
    head of;
    score_source from;
    const char *term;             /* of the head */
    __align__(16) char tiles[16]; /* of mask and bias: as many bytes as they need */
};

template <class T, int D, int SCORES, class Chip>
__global__ void __launch_bounds__(Chip::template query_tiles<D, SCORES == GENERAL>::THREADS,
                                  Chip::template query_tiles<D, SCORES == GENERAL>::BLOCKS)
    dq_mma(const __grid_constant__ mma_args a, const float2 *__restrict__ facts,
           const __grid_constant__ tile_order order)
{
#if CHIP_RUNS_HERE
    if (!SCORES_RUN_HERE(SCORES))
        return;
    typedef typename Chip::template query_tiles<D, SCORES == GENERAL> Tiles;
    typedef shared_dq<D, Tiles> shared;
    typedef typename shared::extras extras;
    constexpr bool COPIES = copies_scores(SCORES),
                   DROPS = SCORES == GENERAL || (SCORES == UNBIASED && D <= Chip::DROPS_UNBIASED);
    constexpr int MT = Tiles::MT, BR = shared::BR, BC = shared::BC, NT = BC / 8, SLOTS = Tiles::SLOTS;
    constexpr int THREADS = Tiles::THREADS;
    typedef near_order<BC, SCORES == PLAIN> order_of_keys;
    typedef query_major<MT, NT, T, order_of_keys::NEAR> own_tile;
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(shared *)memory;
    const char **bias = bias_rows(s.tiles);
    const uint32_t sQ = shared_address(s.Q), sdO = shared_address(s.dO);
    constexpr uint32_t TILE = BC * D * 2;
    const uint32_t sK = shared_address(s.K), sV = shared_address(s.V);
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16 * MT;
    auto copy_own_scores = [&](const span &q, const score_source &from, int i0, int n0) {
        copy_mask_and_bias<SCORES, extras, 16 * MT, 32>(lane, s.tiles, row0, a, q, from, i0, n0);
    };
    int n0; /* the first key of a tile; there is one to come */
    bool more;
    const char *next_k = NULL, *next_v = NULL; /* the next tile's */
    auto copy_next = [&](int slot, int keys) {
        copy_rows<D, BC, THREADS>(sK + slot * TILE, next_k, a.k_step, keys, a.D, order_of_keys());
        copy_rows<D, BC, THREADS>(sV + slot * TILE, next_v, a.v_step, keys, a.Dv, order_of_keys());
        next_k += BC * a.k_step, next_v += BC * a.v_step;
    };
    { /* the first copies start before anything is shared: each thread finds out for itself */
        int b, h, first, last, low, high;
        const int i0 = (order.tiles - 1 - order.find(b, h)) * BR;
        const span here = span_of(a, b);
        const int hk = order.heads_of_key.divide(h), rows = min(BR, here.rows - i0);
        if (rows <= 0) {
            wait_for_last();
            return;
        }
        band_of_row(a, here, i0, first, last);
        band_of_row(a, here, i0 + rows - 1, low, high);
        const int inside = max(first, low), outside = min(last, high);
        first = min(first, low) / 16 * 16, last = max(last, high);
        copy_rows<D, BR, THREADS>(sQ, a.q.data + row_at(a.q, here.q_batch, h, here.q_row + i0) * 2, a.q.stride[2] * 2,
                                  rows, a.D);
        copy_rows<D, BR, THREADS>(sdO, a.d_o.data + row_at(a.d_o, here.q_batch, h, here.q_row + i0) * 2,
                                  a.d_o.stride[2] * 2, rows, a.Dv);
        n0 = first, more = first < last;
        next_k = keys_of(a, here, a.k, hk).first + n0 * a.k_step;
        next_v = keys_of(a, here, a.v, hk).first + n0 * a.v_step;
        if (more)
            copy_next(0, here.keys - n0);
        commit_copies();
        score_source from;
        if (COPIES) {
            from = score_source_of(a, head_of(a, here, h));
            if (more)
                copy_own_scores(here, from, i0, n0);
            commit_copies();
        }
        if (threadIdx.x == 0) {
            s.sequence = here;
            s.of = head_of(a, here, h);
            if (COPIES)
                s.from = from;
            s.i0 = i0, s.last = last, s.inside = inside, s.outside = outside;
        }
        if (threadIdx.x < BR) {
            const int row = min((int)threadIdx.x, rows - 1);
            const float2 f = facts[((int64_t)here.q_batch * a.Hq + h) * a.q_rows + here.q_row + i0 + row];
            s.L[threadIdx.x] = f.x, s.delta[threadIdx.x] = f.y;
            band_of_row(a, here, i0 + row, s.low[threadIdx.x], s.high[threadIdx.x]);
            if (SCORES == BEGUN)
                bias[threadIdx.x] = bias_row(a, here, bias_of_head(a, here, h), i0 + row);
        }
    }
    const span &q = s.sequence;
    const head &x = s.of;
    float dQ[MT][D / 8][4];
    clear(dQ);
    const float c = SCORES == GENERAL ? LOG2E : a.scale_log2;
    bool coarse = false;
    if (SCORES == BEGUN) {
        wait_copies<0>();
        __syncthreads();
        scale_own<T, sizeof s.Q, THREADS>(s.Q, power_in(a.scale));
        coarse = __any_sync(~0u, is_coarse(s.L[row0 + lane % (16 * MT)]));
    }

    constexpr bool LATER = COPIES && SLOTS == 2; /* mask and bias may take longer than keys */
    auto wait_for_own_scores = [&] {
        if (LATER) {
            wait_copies<1>();
            __syncwarp();
        }
    };
    for (int slot = 0; more; slot ^= SLOTS - 1, n0 += BC) {
        wait_copies<LATER>();
        __syncthreads(); /* this tile is here, and the one before no longer needed */
        more = n0 + BC < s.last;
        if (SLOTS == 2) {
            if (more)
                copy_next(slot ^ 1, q.keys - n0 - BC);
            commit_copies();
        }
        float S[MT][NT][4], dP[MT][NT][4];
        const bool whole = n0 >= s.inside && n0 + BC <= s.outside;
        const int column0 = lane % 4 * order_of_keys::NEAR;
        own_tile t = { S, s.low, s.high, s.i0 + row0 + lane / 4, n0 + column0, row0 + lane / 4 };
        own_tile dt = { dP, s.low, s.high, t.i0, t.n0, t.row0 };
        kept_bits<own_tile> kept;
        if (DROPS && a.drop_below)
            draw_tile(t, kept, a, q, x);
        if constexpr (SCORES == GENERAL) {
            clear(dP);
            multiply_rows<T, D>(dP, sdO, row0, sV + slot * TILE, 0); /* dP = dO V^T */
            clear(S);
            multiply_rows<T, D>(S, sQ, row0, sK + slot * TILE, 0); /* S  = Q K^T */
            wait_for_own_scores();
            point_at_tiles<SCORES, extras>(t, s.tiles, a, t.row0, column0);
            score_and_differentiate(
                t, dt, kept, a, q, x, whole, [&](int r) { return s.L[t.row0 + own_tile::down(r)]; },
                [&](int r) { return s.delta[t.row0 + own_tile::down(r)]; });
        } else {
            auto L = [&](int r) { return s.L[t.row0 + own_tile::down(r)]; };
            auto multiply_values = [&] { clear(dP), multiply_rows<T, D>(dP, sdO, row0, sV + slot * TILE, 0); };
            if (SCORES == BEGUN) {
                if (more)
                    prefetch_bias<16 * MT, BC, 32>(lane, a, n0 + BC, [&](int r) { return bias[row0 + r]; });
                begin_with_bias<(D > 64)>(
                    t, a, [&](int r) { return bias[t.row0 + own_tile::down(r)]; },
                    [&](int r) { return coarse ? 0.0f : L(r); }, multiply_values);
            } else if (SCORES == WITH_ALIBI) {
                begin_with_alibi(t, a, q, x);
                multiply_values();
            } else
                clear(S);
            multiply_rows<T, D>(S, sQ, row0, sK + slot * TILE, 0);
            if (SCORES == BEGUN && coarse)
                subtract_rows(t, L);
            if (COPIES) {
                wait_for_own_scores();
                point_at_tiles<SCORES, extras>(t, s.tiles, a, t.row0, column0);
            }
            if constexpr (SCORES == UNBIASED)
                score_unscaled<false>(t, a, q, x, whole);
            else if (!whole)
                hide_outside_band(t);
            if (SCORES == MASKED)
                apply_mask(t, a, q, x);
#pragma unroll
            for (int r = 0; r < 2 * MT; r++) {
                const float less = less_later<D, SCORES>(a, L(r), coarse);
#pragma unroll
                for (int e = 0; e < 2 * NT; e++)
                    t.at(r, e) = probability<false>(t.at(r, e), c, less);
            }
            if (!begins(SCORES))
                multiply_values();
            if (DROPS && a.drop_below)
                keep(dt, kept, a.keep_scale);
#pragma unroll
            for (int r = 0; r < 2 * MT; r++) {
                const float delta = s.delta[t.row0 + own_tile::down(r)];
#pragma unroll
                for (int e = 0; e < 2 * NT; e++)
                    dt.at(r, e) = t.at(r, e) * (dt.at(r, e) - delta);
            }
        }
        if (COPIES) {
            __syncwarp();
            if (more)
                copy_own_scores(q, s.from, s.i0, n0 + BC);
            commit_copies();
        }
        multiply_tile<T, D>(dQ, dP, sK + slot * TILE); /* dQ += dS K */
        if (SLOTS == 1) {
            __syncthreads();
            if (more)
                copy_next(0, q.keys - n0 - BC);
            commit_copies();
        }
    }
    wait_copies<0>();
    __syncthreads(); /* Q's tile becomes the way out, and without a key nobody has waited for Q */
    const int i0 = s.i0, rows = min(BR, q.rows - i0);
    scale_rows(dQ, a.scale);
    const int64_t first = row_at(a.d_q, q.q_batch, x.h, q.q_row + i0), step = a.d_q.stride[2];
    store_rows<T, D, MT, true>(dQ, a.d_q, a.D, a.accumulate, sQ, s.Q, row0,
                               [&](int r) { return r < rows ? first + r * step : NOWHERE; });
    wait_for_last(); /* when this kernel has ended, so has that of dK and dV */
#endif
}

/* ---- dK and dV --------------------------------------------------------------------------------------------------- */

enum { ONLY_DV = 1, ONLY_DK = 2, BOTH = 3 };

/* At D = 128, where reading shared memory is what takes longest, two warps share 32 keys: each computes S and dP of half of
 * the queries, and half of the columns of dK and dV, for which it gets the other half of P and dS through shared memory.
 * Beside a mask's tiles there is no room for that, and it was measured on Hopper alone. */
template <int D, class Chip> __host__ __device__ constexpr bool in_pairs(int scores)
{
    return Chip::PAIRS && D == 128 && (scores == PLAIN || begins(scores));
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr bool PAIRS_RUN_HERE = true;
#else
constexpr bool PAIRS_RUN_HERE = false;
#endif

/* Half of a tile of P or dS for the partner: rows are keys, of BQ queries. */
template <class T, int BQ, int MT, int NT>
__device__ inline void send_half(uint32_t tile, int key, int query, const float (&X)[MT][NT][4])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < NT; n++)
                store_4(chunk_at<BQ>(tile, key + m * 16 + half * 8 + lane / 4, query / 8 + n) + lane % 4 * 4,
                        pack<T>(X[m][n][half * 2], X[m][n][half * 2 + 1]));
}

__device__ inline void wait_for_partner() { asm volatile("bar.sync %0, 64;" ::"r"(1 + threadIdx.x / 64) : "memory"); }

/* Y += P B for 16 columns of P and rows of tile B, of which it is the columns from `column` on. */
template <class T, int D, int MT, int NT>
__device__ inline void multiply_columns(float (&Y)[MT][NT][4], const uint32_t (&P)[MT][4], uint32_t B, int row,
                                        int column)
{
    const int lane = threadIdx.x % 32;
    const uint32_t b_first = chunk_at<D>(B, row + lane % 16, column / 8 + lane / 16);
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
        uint32_t b[4];
        load_matrices_transposed(b, along<D>(b_first, n));
#pragma unroll
        for (int m = 0; m < MT; m++) {
            multiply(Y[m][n], P[m], b[0], b[1], T());
            multiply(Y[m][n + 1], P[m], b[2], b[3], T());
        }
    }
}

/* Y += X B for the warp's own half X of a tile whose rows of B begin at `query`. */
template <class T, int D, int MT, int NT, int NX>
__device__ inline void multiply_own_half(float (&Y)[MT][NT][4], const float (&X)[MT][NX][4], uint32_t B, int query,
                                         int column)
{
#pragma unroll
    for (int k = 0; k < NX / 2; k++) {
        uint32_t P[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
            pack_columns<T>(P[m], X[m], k);
        multiply_columns<T, D>(Y, P, B, query + k * 16, column);
    }
}

/* The same for the partner's half, which was sent in the columns from `sent` on. */
template <class T, int D, int BQ, int MT, int NT>
__device__ inline void multiply_other_half(float (&Y)[MT][NT][4], uint32_t tile, int key, int sent, uint32_t B,
                                           int query, int column)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < BQ / 32; k++) {
        uint32_t P[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
            load_matrices(P[m], chunk_at<BQ>(tile, key + m * 16 + lane % 16, sent / 8 + k * 2 + lane / 16));
        multiply_columns<T, D>(Y, P, B, query + k * 16, column);
    }
}

template <int D, class Tiles> struct shared_dkv {
    static constexpr int BN = Tiles::OWN, BQ = Tiles::MEETS, SLOTS = Tiles::SLOTS;
    char K[BN * D * 2], V[BN * D * 2], Q[SLOTS][BQ * D * 2], dO[SLOTS][BQ * D * 2];
    float2 facts[SLOTS][BQ];
    int low[SLOTS][BQ], high[SLOTS][BQ];
    span sequence;
    head of[SLOTS];                   /* of the queries in either slot */
    score_source from;                /* of head 0 */
    int n0, hk;                       /* the first key, and its head */
    int first, last, inside, outside; /* rows that see some key of the tile, and those that see all */
    typedef score_tiles<BQ, BN, true> extras;
    static constexpr int HALVES = BN * BQ * 2;
    __align__(
        128) char tiles[16]; /* HALVES for partners, then mask and bias for each slot: as many bytes as they need */
};

/* Queries that come next. */
struct next_queries {
    const char *q, *d_o;
};

__device__ static next_queries queries_from(const mma_args &a, const span &q, int h, int i0)
{
    return { a.q.data + row_at(a.q, q.q_batch, h, q.q_row + i0) * 2,
             a.d_o.data + row_at(a.d_o, q.q_batch, h, q.q_row + i0) * 2 };
}

/* Starts the copies of queries i0 .. + BQ of head h into a slot, and says what the tile has to know of them. */
template <int SCORES, int D, class Tiles>
__device__ static void meet_queries(shared_dkv<D, Tiles> &s, const span &q, int slot, const mma_args &a,
                                    const next_queries &from, const float2 *facts, int h, int i0, bool whole,
                                    char *extra_tiles)
{
    constexpr int BQ = Tiles::MEETS, THREADS = Tiles::THREADS;
    const int rows = q.rows - i0;
    copy_rows<D, BQ, THREADS>(shared_address(s.Q[slot]), from.q, a.q_step, rows, a.D);
    copy_rows<D, BQ, THREADS>(shared_address(s.dO[slot]), from.d_o, a.d_o_step, rows, a.Dv);
    if (threadIdx.x < BQ) {
        facts += ((int64_t)q.q_batch * a.Hq + h) * a.q_rows + q.q_row + i0;
        const int real = (int)threadIdx.x < rows ? 8 : 0;
        copy_async<8>(shared_address(&s.facts[slot][threadIdx.x]), real ? facts + threadIdx.x : facts, real);
        if (!whole)
            band_of_row(a, q, min(i0 + (int)threadIdx.x, q.rows - 1), s.low[slot][threadIdx.x],
                        s.high[slot][threadIdx.x]);
        if (SCORES == BEGUN)
            bias_rows(extra_tiles)[slot * BQ + threadIdx.x] = bias_row(a, q, bias_of_head(a, q, h), i0 + threadIdx.x);
    } else if (threadIdx.x == BQ && (SCORES >= UNBIASED || SCORES == WITH_ALIBI))
        s.of[slot] = head_of(a, q, h);
}

template <class T, int D, int SCORES, int WHICH, class Chip>
__global__ void __launch_bounds__(Chip::template key_tiles<D, SCORES == GENERAL>::THREADS,
                                  Chip::template key_tiles<D, SCORES == GENERAL>::BLOCKS)
    dkv_mma(const __grid_constant__ mma_args a, const float2 *__restrict__ facts,
            const __grid_constant__ tile_order order)
{
#if CHIP_RUNS_HERE
    if (!SCORES_RUN_HERE(SCORES))
        return;
    let_next_start();
    typedef typename Chip::template key_tiles<D, SCORES == GENERAL> Tiles;
    typedef shared_dkv<D, Tiles> shared;
    typedef typename shared::extras extras;
    constexpr bool COPIES = copies_scores(SCORES),
                   DROPS = SCORES == GENERAL || (SCORES == UNBIASED && D <= Chip::DROPS_UNBIASED);
    constexpr int BN = shared::BN, BQ = shared::BQ, SLOTS = Tiles::SLOTS, THREADS = Tiles::THREADS;
    constexpr bool PAIRS = PAIRS_RUN_HERE && in_pairs<D, Chip>(SCORES);
    constexpr int MT = PAIRS ? 2 * Tiles::MT : Tiles::MT, NT = (PAIRS ? BQ / 2 : BQ) / 8;
    constexpr int COLUMNS = PAIRS ? D / 2 : D; /* of the warp's results */
    typedef key_major<MT, NT, BN, T> own_tile;
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(shared *)memory;
    const uint32_t sK = shared_address(s.K), sV = shared_address(s.V);
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / (PAIRS ? 64 : 32) * 16 * MT;
    const int query0 = PAIRS ? threadIdx.x / 32 % 2 * (BQ / 2) : 0, other0 = query0 ^ BQ / 2;
    const int column = PAIRS ? query0 * (D / BQ) : 0; /* the first of the warp's */
    char *const extra_tiles = memory + offsetof(shared, tiles) + (PAIRS ? shared::HALVES : 0);
    int i0, h; /* the first of the queries that come next, and their head */
    bool more;
    constexpr bool RUNS = D == 64; /* next keeps its place from tile to tile: others have no registers for it */
    next_queries next;
    auto meet_next = [&](int slot, const span &q, const score_source &from, int n0, bool whole) {
        if (!RUNS)
            next = queries_from(a, q, h, i0);
        meet_queries<SCORES>(s, q, slot, a, next, facts, h, i0, whole, extra_tiles);
        next.q += BQ * a.q_step, next.d_o += BQ * a.d_o_step;
        if (SCORES == BEGUN) {
            const char *first = bias_of_head(a, q, h);
            prefetch_bias<BQ, BN, THREADS>(threadIdx.x, a, n0, [&](int r) { return bias_row(a, q, first, i0 + r); });
        }
        if (COPIES)
            copy_mask_and_bias<SCORES, extras, BQ, THREADS>(threadIdx.x, extra_tiles + slot * extras::bytes(a, SCORES),
                                                            0, a, q, at_head(from, a, h), i0, n0);
    };
    { /* the first copies start before anything is shared: each thread finds out for itself */
        int b, hk;
        const int n0 = order.find(b, hk) * BN;
        const span here = span_of(a, b);
        const int keys = min(BN, here.keys - n0);
        if (keys <= 0)
            return;
        copy_rows<D, BN, THREADS>(sK, keys_of(a, here, a.k, hk).first + n0 * a.k_step, a.k_step, keys, a.D,
                                  key_order<MT>());
        copy_rows<D, BN, THREADS>(sV, keys_of(a, here, a.v, hk).first + n0 * a.v_step, a.v_step, keys, a.Dv,
                                  key_order<MT>());
        int first, last, first_of_end, last_of_end;
        band_of_key(a, here, n0, first, last);
        band_of_key(a, here, n0 + keys - 1, first_of_end, last_of_end);
        const int inside = max(first, first_of_end), outside = min(last, last_of_end);
        first = min(first, first_of_end), last = max(last, last_of_end);
        i0 = first, h = hk * a.G, more = first < last;
        score_source from;
        if (COPIES)
            from = score_source_of(a, head_of(a, here, 0));
        if (RUNS)
            next = queries_from(a, here, h, i0);
        if (more)
            meet_next(0, here, from, n0, i0 >= inside && min(i0 + BQ, here.rows) <= outside);
        if (threadIdx.x == 0) {
            s.sequence = here;
            if (COPIES)
                s.from = from;
            s.n0 = n0, s.hk = hk;
            s.first = first, s.last = last, s.inside = inside, s.outside = outside;
        }
    }
    commit_copies();
    const span &q = s.sequence;
    auto all_see_all = [&](int i) { return i >= s.inside && min(i + BQ, q.rows) <= s.outside; };

    float dK[MT][COLUMNS / 8][4], dV[MT][COLUMNS / 8][4];
    clear(dK);
    clear(dV);
    const float c = SCORES == GENERAL ? LOG2E : a.scale_log2;
    if (SCORES == BEGUN) {
        wait_copies<0>();
        __syncthreads();
        scale_own<T, sizeof s.K, THREADS>(s.K, power_in(a.scale));
    }
    for (int slot = 0; more; slot ^= SLOTS - 1) {
        wait_copies<0>();
        __syncthreads(); /* this tile is here, and the one before no longer needed */
        const int i = i0;
        i0 += BQ;
        if (i0 >= s.last) {
            i0 = s.first, h++;
            more = h < (s.hk + 1) * a.G;
            if (more && RUNS)
                next = queries_from(a, q, h, i0);
        }
        if (SLOTS == 2) {
            if (more)
                meet_next(slot ^ 1, q, s.from, s.n0, all_see_all(i0));
            commit_copies();
        }
        const uint32_t sQ = shared_address(s.Q[slot]), sdO = shared_address(s.dO[slot]);
        const head &x = s.of[slot];
        const bool whole = all_see_all(i);
        float S[MT][NT][4], dP[MT][NT][4];
        const int column0 = query0 + lane % 4 * 2;
        own_tile t = { S, s.low[slot], s.high[slot], i + column0, s.n0 + row0 + lane / 4 * (2 * MT), column0 };
        own_tile dt = { dP, t.lows, t.highs, t.i0, t.n0, t.column0 };
        auto facts_of = [&](int r) { return s.facts[slot][t.column0 + own_tile::down(r)]; };
        kept_bits<own_tile> kept;
        if (DROPS && a.drop_below)
            draw_tile(t, kept, a, q, x);
        if constexpr (SCORES == GENERAL) {
            clear(dP);
            if (WHICH & ONLY_DK)
                multiply_rows<T, D>(dP, sV, row0, sdO, query0); /* dP^T = V dO^T */
            clear(S);
            multiply_rows<T, D>(S, sK, row0, sQ, query0); /* S^T = K Q^T */
            point_at_tiles<SCORES, extras>(t, extra_tiles + slot * extras::bytes(a, SCORES), a, t.column0,
                                           row0 + lane / 4 * (2 * MT));
            score_and_differentiate(
                t, dt, kept, a, q, x, whole, [&](int r) { return facts_of(r).x; },
                [&](int r) { return facts_of(r).y; });
        } else {
            auto multiply_values = [&] {
                clear(dP);
                if (WHICH & ONLY_DK)
                    multiply_rows<T, D>(dP, sV, row0, sdO, query0);
            };
            bool coarse = false;
            if (SCORES == BEGUN) {
                const char **rows = bias_rows(extra_tiles) + slot * BQ + t.column0;
                for (int r = lane; r < BQ; r += 32)
                    coarse |= is_coarse(s.facts[slot][r].x);
                coarse = __any_sync(~0u, coarse);
                begin_with_bias<(D > 64)>(
                    t, a, [&](int r) { return rows[own_tile::down(r)]; },
                    [&](int r) { return coarse ? 0.0f : facts_of(r).x; }, multiply_values);
            } else if (SCORES == WITH_ALIBI) {
                begin_with_alibi(t, a, q, x);
                multiply_values();
            } else
                clear(S);
            multiply_rows<T, D>(S, sK, row0, sQ, query0);
            if (SCORES == BEGUN && coarse)
                subtract_rows(t, [&](int r) { return facts_of(r).x; });
            if (COPIES)
                point_at_tiles<SCORES, extras>(t, extra_tiles + slot * extras::bytes(a, SCORES), a, t.column0,
                                               row0 + lane / 4 * (2 * MT));
            if constexpr (SCORES == UNBIASED)
                score_unscaled<false>(t, a, q, x, whole);
            else if (!whole)
                hide_outside_band(t);
            if (SCORES == MASKED)
                apply_mask(t, a, q, x);
            float delta[2 * NT];
#pragma unroll
            for (int r = 0; r < 2 * NT; r++) {
                const float2 f = facts_of(r);
                const float L = less_later<D, SCORES>(a, f.x, coarse);
                delta[r] = f.y;
#pragma unroll
                for (int e = 0; e < 2 * MT; e++)
                    t.at(r, e) = probability<false>(t.at(r, e), c, L);
            }
            if (!begins(SCORES))
                multiply_values();
            if (DROPS && a.drop_below)
                keep(dt, kept, a.keep_scale);
#pragma unroll
            for (int r = 0; r < 2 * NT; r++)
#pragma unroll
                for (int e = 0; e < 2 * MT; e++)
                    dt.at(r, e) = t.at(r, e) * (dt.at(r, e) - delta[r]);
            if (DROPS && a.drop_below)
                keep(t, kept, a.keep_scale);
        }
        if constexpr (PAIRS) {
            const uint32_t halves = shared_address(s.tiles);
            send_half<T, BQ>(halves, row0, query0, S);
            multiply_own_half<T, D>(dV, S, sdO, query0, column);
            multiply_own_half<T, D>(dK, dP, sQ, query0, column);
            wait_for_partner();
            multiply_other_half<T, D, BQ>(dV, halves, row0, other0, sdO, other0, column);
            __syncwarp();
            send_half<T, BQ>(halves, row0, other0, dP); /* where the partner's P was, which nobody else reads */
            wait_for_partner();
            multiply_other_half<T, D, BQ>(dK, halves, row0, query0, sQ, other0, column);
        } else {
            if (WHICH & ONLY_DV)
                multiply_tile<T, D>(dV, S, sdO); /* dV += P^T dO */
            if (WHICH & ONLY_DK)
                multiply_tile<T, D>(dK, dP, sQ); /* dK += dS^T Q */
        }
        if (SLOTS == 1) {
            __syncthreads();
            if (more)
                meet_next(0, q, s.from, s.n0, all_see_all(i0));
            commit_copies();
        }
    }
    wait_copies<0>();
    __syncthreads();
    const int n0 = s.n0, hk = s.hk, keys = min(BN, q.keys - n0);
    scale_rows(dK, a.scale);
    auto store_keys = [&](const float(&x)[MT][COLUMNS / 8][4], const view &to, int width, uint32_t tile, char *memory) {
        const int64_t first = key_at(a, q, to, hk, n0), step = a.col_step * to.stride[2];
        const int half = column * (BN * 2); /* of the tile: where the warp's columns go out */
        store_rows<T, COLUMNS, MT, true>(x, to, width - column, a.accumulate, tile + half, memory + half, row0,
                                         [&](int r) {
                                             r = key_order<MT>()(r);
                                             return r < keys ? first + r * step + column : NOWHERE;
                                         });
    };
    if (WHICH & ONLY_DK && a.d_k.data)
        store_keys(dK, a.d_k, a.D, sK, s.K);
    if (WHICH & ONLY_DV && a.d_v.data)
        store_keys(dV, a.d_v, a.Dv, sV, s.V);
#endif
}

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

static int64_t keys_on_stride(const args &a) { return a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0; }

template <class T, int D, int SCORES, int WHICH, class Chip>
static heed_status run_keys(const args &a, const float2 *facts, const heed_plan *plan, const heed_exec *x)
{
    typedef typename Chip::template key_tiles<D, SCORES == GENERAL> Tiles;
    typedef shared_dkv<D, Tiles> shared;
    static_assert(SCORES == MASKED || SCORES == UNBIASED ||
                  sizeof(shared) + Tiles::SLOTS * shared::extras::most_bytes(SCORES) <= Chip::SHARED_BYTES);
    const tile_order order = order_tiles(tiles_of(keys_on_stride(a), Tiles::OWN), a.Hk, (int64_t)a.Sq * a.G, a);
    const size_t bytes = sizeof(shared) + Tiles::SLOTS * shared::extras::bytes(a, SCORES),
                 halves = in_pairs<D, Chip>(SCORES) ? shared::HALVES : 0;
    return launch(dkv_mma<T, D, SCORES, WHICH, Chip>, order.blocks(), Tiles::THREADS,
                  bytes + (bytes + halves <= plan->device.shared_bytes ? halves : 0), x, with_unit<SCORES>(a), facts,
                  order);
}

template <class T, int D, int SCORES, class Chip>
static heed_status run_queries(const args &a, const float2 *facts, bool early, const heed_plan *plan,
                               const heed_exec *x)
{
    typedef typename Chip::template query_tiles<D, SCORES == GENERAL> Tiles;
    typedef shared_dq<D, Tiles> shared;
    static_assert(SCORES == MASKED || SCORES == UNBIASED ||
                  sizeof(shared) + shared::extras::most_bytes(SCORES) <= Chip::SHARED_BYTES);
    const tile_order order = order_tiles(tiles_of(a.Sq, Tiles::OWN), a.Hq, (int64_t)a.Sk / a.G, a);
    const size_t bytes = sizeof(shared) + shared::extras::bytes(a, SCORES);
    const auto kernel = dq_mma<T, D, SCORES, Chip>;
    return early && Chip::STARTS_EARLY && plan->device.arch >= 90
               ? launch_next(kernel, order.blocks(), Tiles::THREADS, bytes, x, with_unit<SCORES>(a), facts, order)
               : launch(kernel, order.blocks(), Tiles::THREADS, bytes, x, with_unit<SCORES>(a), facts, order);
}

template <class T, int D, int SCORES, class Chip>
static heed_status run_scores(const args &a, float2 *facts, const heed_plan *plan, const heed_exec *x)
{
    heed_status status = heed_cuda_row_facts(a, unit_of_lse<SCORES>(a), facts, x);
    if (status)
        return status;
    const bool keys = (a.d_k.data || a.d_v.data) && keys_on_stride(a) > 0;
    if constexpr (D == 256) {
        if (a.d_v.data)
            status = run_keys<T, D, SCORES, ONLY_DV, Chip>(a, facts, plan, x);
        if (!status && a.d_k.data)
            status = run_keys<T, D, SCORES, ONLY_DK, Chip>(a, facts, plan, x);
    } else if (keys)
        status = run_keys<T, D, SCORES, BOTH, Chip>(a, facts, plan, x);
    if (!status && a.d_q.data)
        status = run_queries<T, D, SCORES, Chip>(a, facts, keys, plan, x);
    return status;
}

/* The plain kernels' tiles leave room for more on some chips only. */
template <int D, class Chip> static bool fits(const args &a, int scores, size_t shared_bytes)
{
    typedef shared_dkv<D, typename Chip::template key_tiles<D, false>> keys;
    typedef shared_dq<D, typename Chip::template query_tiles<D, false>> queries;
    return HEED_MAX(sizeof(keys) + keys::SLOTS * keys::extras::bytes(a, scores),
                    sizeof(queries) + queries::extras::bytes(a, scores)) <= shared_bytes;
}

template <class T, int D, class Chip>
static heed_status run_head(const args &a, float2 *facts, const heed_plan *plan, const heed_exec *x)
{
    int scores = scores_of<D, Chip>(a, plan->device.arch);
    if (scores != PLAIN && !fits<D, Chip>(a, scores, plan->device.shared_bytes))
        scores = GENERAL;
    if constexpr (D <= Chip::UNBIASED_HEAD_DIM) {
        if (scores == BEGUN)
            return run_scores<T, D, BEGUN, Chip>(a, facts, plan, x);
        if (scores == WITH_ALIBI)
            return run_scores<T, D, WITH_ALIBI, Chip>(a, facts, plan, x);
        if (scores == MASKED)
            return run_scores<T, D, MASKED, Chip>(a, facts, plan, x);
        if (scores == UNBIASED)
            return run_scores<T, D, UNBIASED, Chip>(a, facts, plan, x);
    }
    return scores == PLAIN ? run_scores<T, D, PLAIN, Chip>(a, facts, plan, x)
                           : run_scores<T, D, GENERAL, Chip>(a, facts, plan, x);
}

template <class T, class Chip>
static heed_status run(const args &a, float2 *facts, const heed_plan *plan, const heed_exec *x)
{
    const int width = HEED_MAX(a.D, a.Dv);
    if (width <= 64)
        return run_head<T, 64, Chip>(a, facts, plan, x);
    if constexpr (Chip::HEAD_DIM > 128)
        if (width > 128)
            return run_head<T, 256, Chip>(a, facts, plan, x);
    return run_head<T, 128, Chip>(a, facts, plan, x);
}

/* How a launch begins: all that prologue does. At the workspace's start there is room for the facts of each row of q. */
struct backward_prologue : prologue {
    float2 *facts;
    backward_prologue(const heed_problem *p, const heed_exec *x)
        : prologue(p, x, heed_cuda_facts_bytes(p)), facts((float2 *)x->workspace)
    {
    }
};

static size_t backward_workspace(const heed_problem *p) { return heed_cuda_facts_bytes(p) + heed_cuda_delta_bytes(p); }

#endif
