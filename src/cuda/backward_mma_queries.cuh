/* dQ with mma.sync: a block owns queries and meets the keys (backward_mma.cuh). */
#ifndef HEED_CUDA_BACKWARD_MMA_QUERIES_CUH
#define HEED_CUDA_BACKWARD_MMA_QUERIES_CUH

#include "differentiate_mma.cuh"
#include "launch.cuh"

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
    __align__(16) char tiles[16]; /* of mask and bias: as many bytes as they need */
};

template <class T, int D, int SCORES, class Chip>
__global__ void __launch_bounds__(Chip::template query_tiles<D, SCORES == GENERAL>::THREADS,
                                  Chip::template query_tiles<D, SCORES == GENERAL>::BLOCKS)
    dq_mma(const __grid_constant__ mma_args a, const float2 *__restrict__ facts,
           const __grid_constant__ tile_order order)
{
#if CHIP_RUNS_HERE
    typedef typename Chip::template query_tiles<D, SCORES == GENERAL> Tiles;
    typedef shared_dq<D, Tiles> shared;
    typedef typename shared::extras extras;
    constexpr bool NEAR = near_bias<D>(SCORES, THIS_ARCH), COPIES = copies_scores(SCORES) || NEAR,
                   DROPS = SCORES == GENERAL || (SCORES == UNBIASED && D <= Chip::DROPS_UNBIASED);
    constexpr int MT = Tiles::MT, BR = shared::BR, BC = shared::BC, NT = BC / 8, SLOTS = Tiles::SLOTS;
    constexpr int THREADS = Tiles::THREADS;
    typedef near_order<BC, SCORES == PLAIN> order_of_keys;
    typedef query_major<MT, NT, T, order_of_keys::NEAR> own_tile;
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(shared *)memory;
    const T type = type_of<T>(a);
    const char **const bias = (const char **)s.tiles; /* of each row, where S begins with it */
    const uint32_t sQ = shared_address(s.Q), sdO = shared_address(s.dO);
    constexpr uint32_t TILE = BC * D * 2;
    const uint32_t sK = shared_address(s.K), sV = shared_address(s.V);
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16 * MT;
    const char *next_bias = NULL; /* the lane's pieces of it, where it is near */
    auto copy_own_scores = [&](const span &q, const score_source &from, int i0, int n0) {
        if constexpr (NEAR) {
            const int size = a.bias.dtype == HEED_F32 ? 4 : 2;
            bring_bias<16 * MT, extras, 32>(lane, s.tiles + row0 * extras::pitch(size), a, next_bias,
                                            q.rows - i0 - row0, n0);
            next_bias += BC * size;
        } else
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
            if (NEAR)
                next_bias = own_pieces<extras, 32>(lane, a,
                                                   bias_row(a, bias_of_head(a, row_at(a.bias, b, h, 0)), i0 + row0) +
                                                       n0 * (a.bias.dtype == HEED_F32 ? 4 : 2));
            else
                from = score_source_of(a, head_of(a, here, h));
            if (more)
                copy_own_scores(here, from, i0, n0);
            commit_copies();
        }
        if (threadIdx.x == 0) {
            s.sequence = here;
            s.of = head_of(a, here, h);
            if (COPIES && !NEAR)
                s.from = from;
            s.i0 = i0, s.last = last, s.inside = inside, s.outside = outside;
        }
        if (threadIdx.x < BR) {
            const int row = min((int)threadIdx.x, rows - 1);
            const float2 f = facts[((int64_t)here.q_batch * a.Hq + h) * a.q_rows + here.q_row + i0 + row];
            s.L[threadIdx.x] = f.x, s.delta[threadIdx.x] = f.y;
            band_of_row(a, here, i0 + row, s.low[threadIdx.x], s.high[threadIdx.x]);
            if (SCORES == BEGUN && !NEAR)
                bias[threadIdx.x] = bias_row(a, bias_of_head(a, row_at(a.bias, b, h, 0)), i0 + row);
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
        scale_own<sizeof s.Q, THREADS>(s.Q, power_in(a.scale), type);
        coarse = __any_sync(~0u, is_coarse(s.L[row0 + lane % (16 * MT)]));
    }

    constexpr bool LATER = COPIES && SLOTS == 2; /* mask and bias may take longer than keys */
    auto wait_for_own_scores = [&] {
        if (LATER) {
            wait_copies<1>();
            __syncwarp();
        }
    };
    auto copy_next_scores = [&] {
        __syncwarp();
        if (more)
            copy_own_scores(q, s.from, s.i0, n0 + BC);
        commit_copies();
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
            multiply_rows<D>(dP, sdO, row0, sV + slot * TILE, 0, type); /* dP = dO V^T */
            clear(S);
            multiply_rows<D>(S, sQ, row0, sK + slot * TILE, 0, type); /* S  = Q K^T */
            wait_for_own_scores();
            point_at_tiles<SCORES, extras>(t, s.tiles, a, t.row0, column0);
            if (a.mask.data)
                take_mask(t);
            score_and_differentiate(
                t, dt, kept, a, q, x, whole, [&](int r) { return s.L[t.row0 + own_tile::down(r)]; },
                [&](int r) { return s.delta[t.row0 + own_tile::down(r)]; });
        } else {
            auto L = [&](int r) { return s.L[t.row0 + own_tile::down(r)]; };
            auto multiply_values = [&] { clear(dP), multiply_rows<D>(dP, sdO, row0, sV + slot * TILE, 0, type); };
            if constexpr (NEAR) {
                wait_for_own_scores();
                point_at_tiles<SCORES, extras>(t, s.tiles, a, t.row0, column0);
                begin_with_near_bias(t, a);
                copy_next_scores();
            } else if (SCORES == BEGUN) {
                if (more)
                    prefetch_bias<16 * MT, BC, 32>(lane, a, n0 + BC, [&](int r) { return bias[row0 + r]; });
                auto row = [&](int r) { return bias[t.row0 + own_tile::down(r)]; };
                begin_with_bias<(D > 64)>(
                    t, a, true, row, row, [&](int r) { return coarse ? 0.0f : L(r); }, multiply_values);
            } else if (SCORES == WITH_ALIBI)
                begin_with_alibi(t, a, q, x);
            else
                clear(S);
            multiply_rows<D>(S, sQ, row0, sK + slot * TILE, 0, type);
            if constexpr (SCORES == BEGUN)
                if (coarse || !whole) { /* one branch: with two, numbers were moved between them */
                    if (coarse)
                        subtract_rows(t, L);
                    if (!whole)
                        hide_outside_band(t);
                }
            if (COPIES && !NEAR) {
                wait_for_own_scores();
                point_at_tiles<SCORES, extras>(t, s.tiles, a, t.row0, column0);
                if (SCORES == MASKED || a.mask.data)
                    take_mask(t);
            }
            if constexpr (SCORES == UNBIASED)
                score_unscaled<false>(t, a, q, x, whole);
            else if (SCORES != BEGUN && !whole)
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
            if (SCORES != BEGUN || NEAR)
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
        if (COPIES && !NEAR)
            copy_next_scores();
        multiply_tile<D>(dQ, dP, sK + slot * TILE, type); /* dQ += dS K */
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
    store_rows<D, MT, true>(
        dQ, a.d_q, a.D, a.accumulate, sQ, s.Q, row0, [&](int r) { return r < rows ? first + r * step : NOWHERE; },
        type);
    wait_for_last(); /* when this kernel has ended, so has that of dK and dV */
#endif
}

#endif
