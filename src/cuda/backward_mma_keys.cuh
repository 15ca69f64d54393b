/* dK and dV with mma.sync: a block owns keys and meets the queries of its group's heads (backward_mma.cuh). */
#ifndef HEED_CUDA_BACKWARD_MMA_KEYS_CUH
#define HEED_CUDA_BACKWARD_MMA_KEYS_CUH

#include "differentiate_mma.cuh"
#include "launch.cuh"

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
template <int BQ, int MT, int NT, class T>
__device__ inline void send_half(uint32_t tile, int key, int query, const float (&X)[MT][NT][4], T type)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < NT; n++)
                store_4(chunk_at<BQ>(tile, key + m * 16 + half * 8 + lane / 4, query / 8 + n) + lane % 4 * 4,
                        pack(X[m][n][half * 2], X[m][n][half * 2 + 1], type));
}

__device__ inline void wait_for_partner() { asm volatile("bar.sync %0, 64;" ::"r"(1 + threadIdx.x / 64) : "memory"); }

/* Y += P B for 16 columns of P and rows of tile B, of which it is the columns from `column` on. */
template <int D, int MT, int NT, class T>
__device__ inline void multiply_columns(float (&Y)[MT][NT][4], const uint32_t (&P)[MT][4], uint32_t B, int row,
                                        int column, T type)
{
    const int lane = threadIdx.x % 32;
    const uint32_t b_first = chunk_at<D>(B, row + lane % 16, column / 8 + lane / 16);
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
        uint32_t b[4];
        load_matrices_transposed(b, along<D>(b_first, n));
#pragma unroll
        for (int m = 0; m < MT; m++) {
            multiply(Y[m][n], P[m], b[0], b[1], type);
            multiply(Y[m][n + 1], P[m], b[2], b[3], type);
        }
    }
}

/* Y += X B for the warp's own half X of a tile whose rows of B begin at `query`. */
template <int D, int MT, int NT, int NX, class T>
__device__ inline void multiply_own_half(float (&Y)[MT][NT][4], const float (&X)[MT][NX][4], uint32_t B, int query,
                                         int column, T type)
{
#pragma unroll
    for (int k = 0; k < NX / 2; k++) {
        uint32_t P[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
            pack_columns(P[m], X[m], k, type);
        multiply_columns<D>(Y, P, B, query + k * 16, column, type);
    }
}

/* The same for the partner's half, which was sent in the columns from `sent` on. */
template <int D, int BQ, int MT, int NT, class T>
__device__ inline void multiply_other_half(float (&Y)[MT][NT][4], uint32_t tile, int key, int sent, uint32_t B,
                                           int query, int column, T type)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < BQ / 32; k++) {
        uint32_t P[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
            load_matrices(P[m], chunk_at<BQ>(tile, key + m * 16 + lane % 16, sent / 8 + k * 2 + lane / 16));
        multiply_columns<D>(Y, P, B, query + k * 16, column, type);
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
    const char *bias; /* the thread's pieces of it, where it is near */
};

__device__ static next_queries queries_from(const mma_args &a, const span &q, int h, int i0)
{
    return { a.q.data + row_at(a.q, q.q_batch, h, q.q_row + i0) * 2,
             a.d_o.data + row_at(a.d_o, q.q_batch, h, q.q_row + i0) * 2, NULL };
}

/* Starts the copies of queries i0 .. + BQ of head h into a slot, and says what the tile has to know of them. */
template <int SCORES, int D, class Tiles>
__device__ static void meet_queries(shared_dkv<D, Tiles> &s, const span &q, int slot, const mma_args &a,
                                    const next_queries &from, const float2 *facts, int h, int i0, bool whole)
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
    } else if (threadIdx.x == BQ && (SCORES >= UNBIASED || SCORES == WITH_ALIBI))
        s.of[slot] = head_of(a, q, h);
    else if (threadIdx.x == BQ && SCORES == BEGUN && !near_bias<D>(SCORES, THIS_ARCH))
        s.of[slot].bias = row_at(a.bias, q.b, h, 0);
}

template <class T, int D, int SCORES, int WHICH, class Chip>
__global__ void __launch_bounds__(Chip::template key_tiles<D, SCORES == GENERAL>::THREADS,
                                  Chip::template key_tiles<D, SCORES == GENERAL>::BLOCKS)
    dkv_mma(const __grid_constant__ mma_args a, const float2 *__restrict__ facts,
            const __grid_constant__ tile_order order)
{
#if CHIP_RUNS_HERE
    let_next_start();
    typedef typename Chip::template key_tiles<D, SCORES == GENERAL> Tiles;
    typedef shared_dkv<D, Tiles> shared;
    typedef typename shared::extras extras;
    constexpr bool NEAR = near_bias<D>(SCORES, THIS_ARCH), COPIES = copies_scores(SCORES) || NEAR,
                   DROPS = SCORES == GENERAL || (SCORES == UNBIASED && D <= Chip::DROPS_UNBIASED);
    constexpr int BN = shared::BN, BQ = shared::BQ, SLOTS = Tiles::SLOTS, THREADS = Tiles::THREADS;
    constexpr bool PAIRS = PAIRS_RUN_HERE && in_pairs<D, Chip>(SCORES);
    constexpr int MT = PAIRS ? 2 * Tiles::MT : Tiles::MT, NT = (PAIRS ? BQ / 2 : BQ) / 8;
    constexpr int COLUMNS = PAIRS ? D / 2 : D; /* of the warp's results */
    typedef key_major<MT, NT, BN, T> own_tile;
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(shared *)memory;
    const T type = type_of<T>(a);
    const uint32_t sK = shared_address(s.K), sV = shared_address(s.V);
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / (PAIRS ? 64 : 32) * 16 * MT;
    const int query0 = PAIRS ? threadIdx.x / 32 % 2 * (BQ / 2) : 0, other0 = query0 ^ BQ / 2;
    const int column = PAIRS ? query0 * (D / BQ) : 0; /* the first of the warp's */
    char *const extra_tiles = memory + offsetof(shared, tiles) + (PAIRS ? shared::HALVES : 0);
    int i0, h; /* the first of the queries that come next, and their head */
    bool more;
    constexpr bool RUNS = D == 64; /* next keeps its place from tile to tile: others have no registers for it */
    next_queries next;
    auto meet_head = [&](const span &q, int n0) {
        next = queries_from(a, q, h, i0);
        if (NEAR)
            next.bias = own_pieces<extras, THREADS>(threadIdx.x, a,
                                                    bias_row(a, bias_of_head(a, row_at(a.bias, q.b, h, 0)), i0) +
                                                        n0 * (a.bias.dtype == HEED_F32 ? 4 : 2));
    };
    auto meet_next = [&](int slot, const span &q, const score_source &from, int n0, bool whole) {
        if (!RUNS)
            meet_head(q, n0);
        meet_queries<SCORES>(s, q, slot, a, next, facts, h, i0, whole);
        if (SCORES == BEGUN && !NEAR) {
            const char *head = bias_of_head(a, row_at(a.bias, q.b, h, 0));
            prefetch_bias<BQ, BN, THREADS>(threadIdx.x, a, n0,
                                           [&](int r) { return bias_row(a, head, min(i0 + r, q.rows - 1)); });
        }
        if constexpr (NEAR)
            bring_bias<BQ, extras, THREADS>(threadIdx.x, extra_tiles + slot * extras::bytes(a, SCORES, NEAR), a,
                                            next.bias, q.rows - i0, n0);
        else if (COPIES)
            copy_mask_and_bias<SCORES, extras, BQ, THREADS>(threadIdx.x,
                                                            extra_tiles + slot * extras::bytes(a, SCORES, NEAR), 0, a,
                                                            q, at_head(from, a, h), i0, n0);
        next.q += BQ * a.q_step, next.d_o += BQ * a.d_o_step;
        if (NEAR)
            next.bias = bias_row(a, next.bias, BQ);
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
        if (COPIES && !NEAR)
            from = score_source_of(a, head_of(a, here, 0));
        if (RUNS)
            meet_head(here, n0);
        if (more)
            meet_next(0, here, from, n0, i0 >= inside && min(i0 + BQ, here.rows) <= outside);
        if (threadIdx.x == 0) {
            s.sequence = here;
            if (COPIES && !NEAR)
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
        scale_own<sizeof s.K, THREADS>(s.K, power_in(a.scale), type);
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
                meet_head(q, s.n0);
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
                multiply_rows<D>(dP, sV, row0, sdO, query0, type); /* dP^T = V dO^T */
            clear(S);
            multiply_rows<D>(S, sK, row0, sQ, query0, type); /* S^T = K Q^T */
            point_at_tiles<SCORES, extras>(t, extra_tiles + slot * extras::bytes(a, SCORES, NEAR), a, t.column0,
                                           row0 + lane / 4 * (2 * MT));
            score_and_differentiate(
                t, dt, kept, a, q, x, whole, [&](int r) { return facts_of(r).x; },
                [&](int r) { return facts_of(r).y; });
        } else {
            auto multiply_values = [&] {
                clear(dP);
                if (WHICH & ONLY_DK)
                    multiply_rows<D>(dP, sV, row0, sdO, query0, type);
            };
            bool coarse = false;
            if (SCORES == BEGUN) {
                for (int r = lane; r < BQ; r += 32)
                    coarse |= is_coarse(s.facts[slot][r].x);
                coarse = __any_sync(~0u, coarse);
            }
            auto point_at_own = [&] {
                point_at_tiles<SCORES, extras>(t, extra_tiles + slot * extras::bytes(a, SCORES, NEAR), a, t.column0,
                                               row0 + lane / 4 * (2 * MT));
            };
            if constexpr (NEAR) {
                point_at_own();
                begin_with_near_bias(t, a);
            } else if (SCORES == BEGUN) {
                const char *head = bias_of_head(a, x.bias), *first = bias_row(a, head, t.i0);
                begin_with_bias<(D > 64)>(
                    t, a, i + BQ <= q.rows, [&](int r) { return bias_row(a, first, own_tile::down(r)); },
                    [&](int r) { return bias_row(a, head, min(t.row(r), q.rows - 1)); },
                    [&](int r) { return coarse ? 0.0f : facts_of(r).x; }, multiply_values);
            } else if (SCORES == WITH_ALIBI)
                begin_with_alibi(t, a, q, x);
            else
                clear(S);
            multiply_rows<D>(S, sK, row0, sQ, query0, type);
            if (SCORES == BEGUN && coarse)
                subtract_rows(t, [&](int r) { return facts_of(r).x; });
            if (COPIES && !NEAR)
                point_at_own();
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
            if (SCORES != BEGUN || NEAR)
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
            send_half<BQ>(halves, row0, query0, S, type);
            multiply_own_half<D>(dV, S, sdO, query0, column, type);
            multiply_own_half<D>(dK, dP, sQ, query0, column, type);
            wait_for_partner();
            multiply_other_half<D, BQ>(dV, halves, row0, other0, sdO, other0, column, type);
            __syncwarp();
            send_half<BQ>(halves, row0, other0, dP, type); /* where the partner's P was, which nobody else reads */
            wait_for_partner();
            multiply_other_half<D, BQ>(dK, halves, row0, query0, sQ, other0, column, type);
        } else {
            if (WHICH & ONLY_DV)
                multiply_tile<D>(dV, S, sdO, type); /* dV += P^T dO */
            if (WHICH & ONLY_DK)
                multiply_tile<D>(dK, dP, sQ, type); /* dK += dS^T Q */
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
        const auto where = [&](int r) {
            r = key_order<MT>()(r);
            return r < keys ? first + r * step + column : NOWHERE;
        };
        store_rows<COLUMNS, MT, true>(x, to, width - column, a.accumulate, tile + half, memory + half, row0, where,
                                      type);
    };
    if (WHICH & ONLY_DK && a.d_k.data)
        store_keys(dK, a.d_k, a.D, sK, s.K);
    if (WHICH & ONLY_DV && a.d_v.data)
        store_keys(dV, a.d_v, a.Dv, sV, s.V);
#endif
}

#endif
