/* The tensor-core forward for fp16 and bf16, head sizes to 256. A block owns 16 MT rows of one head for each of its
 * warps, and meets BC keys at a time: V arrives while S = Q K^T is computed, the next K while O += P V is.
 *
 * SCORES is what they need beyond scale and band (scores_mma.cuh): nobody pays for what is absent. */
#ifndef HEED_CUDA_FORWARD_MMA_CUH
#define HEED_CUDA_FORWARD_MMA_CUH

#include "begin_mma.cuh"
#include "launch.cuh"

template <int D, class Tiles> struct shared_forward {
    static constexpr int BR = Tiles::OWN, BC = Tiles::MEETS;
    typedef score_tiles<BR, BC, false> extras;
    char Q[BR * D * 2], K[BC * D * 2], V[BC * D * 2];
    int low[BR], high[BR];
    span sequence; /* what is looked at once for each tile lies here and not in registers */
    head of;
    score_source from;
    key_rows k, v;
    int i0, last;                 /* the first row, and the end of the keys that some row sees */
    int inside, outside;          /* all rows see keys inside .. outside */
    __align__(16) char tiles[16]; /* of mask and bias: as many bytes as they need */
};

/* The running maximum m of a row follows its scores only where they pass it by more than LAG, as a power of two: P
 * is then at most 2^LAG, and most tiles need neither the maximum of the four lanes nor a new scale of O. */
constexpr float LAG = 8.0f;

/* With c m beyond this, its rounding would matter to an exponent: the maximum is then subtracted first. */
constexpr float COARSE = 1e7f;

/* The largest of a lane's scores in row r. */
template <int MT, int NT> __device__ static float own_max(const float (&S)[MT][NT][4], int r)
{
    float most = -CUDART_INF_F;
#pragma unroll
    for (int n = 0; n < NT; n++)
        most = fmaxf(most, fmaxf(S[r / 2][n][r % 2 * 2], S[r / 2][n][r % 2 * 2 + 1]));
    return most;
}

/* m = m', l = l a, O = O a, with a = 2^(c m - c m'). */
template <int D, int MT, int NT>
__device__ static void follow_maximum(float (&S)[MT][NT][4], float (&m)[MT * 2], float (&l)[MT * 2],
                                      float (&O)[MT][D / 8][4], float c)
{
#pragma unroll
    for (int r = 0; r < MT * 2; r++) {
        const int half = r % 2 * 2;
        const float most = quad_max(own_max(S, r)), next = (most - m[r]) * c > LAG ? most : m[r];
        const float base = next == -CUDART_INF_F ? 0.0f : next, rescale = exp2_fast((m[r] - base) * c);
        m[r] = next;
        l[r] *= rescale;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            O[r / 2][n][half] *= rescale, O[r / 2][n][half + 1] *= rescale;
        if (fabsf(base * c) > COARSE)
#pragma unroll
            for (int n = 0; n < NT; n++)
                S[r / 2][n][half] -= base, S[r / 2][n][half + 1] -= base;
    }
}

/* Lets m follow where it must. */
template <int D, int MT, int NT>
__device__ static void find_maximum(float (&S)[MT][NT][4], float (&m)[MT * 2], float (&l)[MT * 2],
                                    float (&O)[MT][D / 8][4], float c)
{
    bool follow = false;
#pragma unroll
    for (int r = 0; r < MT * 2; r++)
        follow |= (own_max(S, r) - m[r]) * c > LAG || (m[r] != -CUDART_INF_F && fabsf(m[r] * c) > COARSE);
    if (__any_sync(~0u, follow))
        follow_maximum<D>(S, m, l, O, c);
}

/* P = 2^(c S - c m) of columns 16 k .. + 16, l = l + sum P. offset: c m, or 0 where no key was seen yet and where m was
 * subtracted already. */
template <int MT, int NT>
__device__ static void exponentials(float (&S)[MT][NT][4], int k, const float (&offset)[MT * 2], float (&l)[MT * 2],
                                    float c)
{
#pragma unroll
    for (int r = 0; r < MT * 2; r++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float &x = S[r / 2][2 * k + e / 2][r % 2 * 2 + e % 2];
            x = exp2_fast(fmaf(x, c, -offset[r]));
            l[r] += x;
        }
}

/* Dropout of columns 16 k .. + 16. What is kept is scaled with the whole row in the end. */
template <class Tile> __device__ static void drop(Tile &t, int k, const kept_bits<Tile> &kept)
{
#pragma unroll
    for (int r = 0; r < Tile::R; r++)
#pragma unroll
        for (int c = 4 * k; c < 4 * k + 4; c++)
            t.at(r, c) = kept.at(r, c) ? t.at(r, c) : 0.0f;
}

/* The tiles are those of the Chip as the code's own target has them. */
template <class T, int D, int SCORES, class Chip>
__global__ void __launch_bounds__(Chip::template tiles<D, SCORES>::THREADS, Chip::template tiles<D, SCORES>::BLOCKS)
    forward_mma(const __grid_constant__ mma_args a, const __grid_constant__ tile_order order)
{
#if CHIP_RUNS_HERE
    extern __shared__ __align__(1024) char memory[];
    typedef typename Chip::template tiles<D, SCORES> Tiles;
    typedef shared_forward<D, Tiles> shared;
    typedef typename shared::extras extras;
    constexpr bool COPIES = copies_scores(SCORES),
                   DROPS = SCORES == GENERAL || (SCORES == UNBIASED && D <= Chip::DROPS_UNBIASED);
    constexpr int MT = Tiles::MT, BR = Tiles::OWN, BC = Tiles::MEETS, NT = BC / 8, THREADS = Tiles::THREADS;
    constexpr bool V_EARLY = Chip::template V_EARLY<D, SCORES>;
    typedef near_order<BC, SCORES == PLAIN> order_of_keys;
    typedef query_major<MT, NT, T, order_of_keys::NEAR> own_tile;
    auto &s = *(shared *)memory;
    const T type = type_of<T>(a);
    const char **const bias = (const char **)s.tiles; /* of each row, where S begins with it */
    const uint32_t sQ = shared_address(s.Q), sK = shared_address(s.K), sV = shared_address(s.V);
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16 * MT;
    auto copy_own_scores = [&](const span &q, const score_source &from, int i0, int n0) {
        copy_mask_and_bias<SCORES, extras, 16 * MT, 32>(lane, s.tiles, row0, a, q, from, i0, n0);
    };
    int n0; /* the first key of a tile; there is one to come */
    bool more;
    { /* the first copies start before anything is shared: each thread finds out for itself */
        int b, h, first, last;
        const int i0 = (order.tiles - 1 - order.find(b, h)) * BR;
        const span here = span_of(a, b);
        const int hk = order.heads_of_key.divide(h), rows = min(BR, here.rows - i0);
        if (rows <= 0)
            return;
        const key_rows k = keys_of(a, here, a.k, hk), v = keys_of(a, here, a.v, hk);
        int low, high, inside, outside;
        band_of_row(a, here, i0, first, last);
        band_of_row(a, here, i0 + rows - 1, low, high);
        inside = max(first, low), outside = min(last, high);
        first = min(first, low) / 16 * 16, last = max(last, high);
        copy_rows<D, BR, THREADS>(sQ, a.q.data + row_at(a.q, here.q_batch, h, here.q_row + i0) * 2, a.q.stride[2] * 2,
                                  rows, a.D);
        n0 = first, more = first < last;
        if (more)
            copy_keys<D, BC, THREADS>(sK, a, here, a.k, k, hk, n0, here.keys, a.D, order_of_keys());
        score_source from;
        if (COPIES) {
            from = score_source_of(a, head_of(a, here, h));
            if (more)
                copy_own_scores(here, from, i0, n0);
        }
        commit_copies();
        if (V_EARLY && more)
            copy_keys<D, BC, THREADS>(sV, a, here, a.v, v, hk, n0, here.keys, a.Dv, order_of_keys());
        commit_copies();
        if (threadIdx.x == 0) {
            s.sequence = here;
            s.of = head_of(a, here, h);
            if (COPIES)
                s.from = from;
            s.k = k, s.v = v;
            s.i0 = i0, s.last = last, s.inside = inside, s.outside = outside;
        }
        if (threadIdx.x < BR) {
            const int row = min((int)threadIdx.x, rows - 1);
            band_of_row(a, here, i0 + row, s.low[threadIdx.x], s.high[threadIdx.x]);
            if (SCORES == BEGUN)
                bias[threadIdx.x] = bias_row(a, bias_of_head(a, row_at(a.bias, b, h, 0)), i0 + row);
        }
    }
    const span &q = s.sequence;
    const head &x = s.of;
    float O[MT][D / 8][4], m[MT * 2], l[MT * 2];
    clear(O);
#pragma unroll
    for (int r = 0; r < MT * 2; r++)
        m[r] = -CUDART_INF_F, l[r] = 0.0f;
    /* Where nothing is added to S it need not be scaled before the exponential. */
    const bool scaled = SCORES == GENERAL && (a.softcap > 0 || a.bias.data || a.alibi.data || a.scale <= 0);
    const float unit = scaled ? 1.0f : a.unit, c = scaled ? LOG2E : a.scale_log2;
    if (SCORES == BEGUN) {
        wait_copies<0>();
        __syncthreads();
        scale_own<sizeof s.Q, THREADS>(s.Q, power_in(a.scale), type);
    }

    for (bool first = V_EARLY; more; first = false) {
        auto meet_keys = [&] {
            if (first) { /* V is on its way */
                wait_copies<1>();
                __syncthreads();
            } else {
                wait_copies<0>();
                __syncthreads(); /* K is here, mask and bias too, and the last V is no longer needed */
                copy_keys<D, BC, THREADS>(sV, a, q, a.v, s.v, x.hk, n0, q.keys, a.Dv, order_of_keys());
                commit_copies();
            }
        };
        constexpr bool ASKS_FIRST = SCORES == BEGUN && D > 64; /* for a bias, which at d64 would take registers */
        if (!ASKS_FIRST)
            meet_keys();
        more = n0 + BC < s.last;
        float S[MT][NT][4];
        const int column0 = lane % 4 * order_of_keys::NEAR;
        own_tile t = { S, s.low, s.high, s.i0 + row0 + lane / 4, n0 + column0, row0 + lane / 4 };
        point_at_tiles<SCORES, extras>(t, s.tiles, a, t.row0, column0);
        const bool sees = !COPIES || (SCORES != MASKED && !a.mask.data) || take_mask(t);
        if (SCORES == BEGUN) {
            if (more)
                prefetch_bias<16 * MT, BC, 32>(lane, a, n0 + BC, [&](int r) { return bias[row0 + r]; });
            auto row = [&](int r) { return bias[t.row0 + own_tile::down(r)]; };
            begin_with_bias<false>(
                t, a, true, row, row, [](int) { return 0.0f; },
                [&] {
                    if (ASKS_FIRST)
                        meet_keys();
                });
        } else if (SCORES == WITH_ALIBI)
            begin_with_alibi(t, a, q, x);
        else
            clear(S);
        multiply_rows<D>(S, sQ, row0, sK, 0, type); /* S += Q K^T */
        wait_copies<0>();
        __syncthreads(); /* V is here, and this K is no longer needed */
        if (more)
            copy_keys<D, BC, THREADS>(sK, a, q, a.k, s.k, x.hk, n0 + BC, q.keys, a.D, order_of_keys());
        commit_copies();
        const bool whole = n0 >= s.inside && n0 + BC <= s.outside;
        if constexpr (SCORES == GENERAL)
            score(t, scaled ? a.scale : 1.0f, a, q, x, whole);
        else if constexpr (SCORES == UNBIASED)
            score_unscaled<true>(t, a, q, x, whole);
        else if (!whole)
            hide_outside_band(t);
        if (SCORES == MASKED)
            apply_mask(t, a, q, x);
        if (COPIES) {
            __syncwarp();
            if (more)
                copy_own_scores(q, s.from, s.i0, n0 + BC);
            commit_copies();
        }
        n0 += BC;
        if (!sees)
            continue;
        find_maximum<D>(S, m, l, O, c);
        float offset[MT * 2];
#pragma unroll
        for (int r = 0; r < MT * 2; r++)
            offset[r] = fabsf(m[r] * c) > COARSE ? 0.0f : m[r] * c;
        kept_bits<own_tile> kept;
        auto add_values = [&](auto drops) { /* some are multiplied while others are computed: no branch between them */
                                            with_type(type, [&](auto known) {
#pragma unroll
                                                for (int k = 0; k < NT / 2; k++) {
                                                    exponentials(S, k, offset, l, c);
                                                    if (drops.value)
                                                        drop(t, k, kept);
                                                    multiply_tile<D>(O, S, k, sV, known); /* O += P V */
                                                }
                                            });
        };
        if (DROPS && a.drop_below) {
            draw_tile(t, kept, a, q, x);
            add_values(constant<1>());
        } else
            add_values(constant<0>());
    }
    wait_copies<0>();
    __syncthreads(); /* without a key nobody has waited for Q */

    /* A warp's own rows of Q's tile become the way out: no other warp reads them. */
    const int i0 = s.i0, rows = min(BR, q.rows - i0);
    const float sink = a.sink.data ? load(a.sink, row_at(a.sink, 0, x.h, 0)) : -CUDART_INF_F;
    float own_sum = 0.0f, own_most = 0.0f; /* of row number lane % 4 of the lane's: each lane finds the lse of one */
#pragma unroll
    for (int r = 0; r < MT * 2; r++) {
        float sum = quad_sum(l[r]), own = m[r] * unit, most = fmaxf(own, sink), rescale = 0.0f;
        if (sum != 0.0f) { /* else the row saw no key */
            rescale = exp2_fast((own - most) * LOG2E);
            sum = sum * rescale + exp2_fast((sink - most) * LOG2E);
            rescale = __fdividef((DROPS && a.drop_below ? a.keep_scale : 1.0f) * rescale, sum);
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            O[r / 2][n][r % 2 * 2] *= rescale, O[r / 2][n][r % 2 * 2 + 1] *= rescale;
        if (r == lane % 4)
            own_sum = sum, own_most = most;
    }
    const int own_row = row0 + own_tile::down(lane % 4) + lane / 4;
    if (a.lse.data && lane % 4 < MT * 2 && own_row < rows)
        store(a.lse, row_at(a.lse, q.q_batch, x.h, q.q_row + i0 + own_row),
              own_sum == 0.0f ? -CUDART_INF_F : own_most + logf(own_sum));
    const int64_t first = row_at(a.o, q.q_batch, x.h, q.q_row + i0), step = a.o.stride[2];
    store_rows<D, MT, false>(
        O, a.o, a.Dv, false, sQ, s.Q, row0, [&](int r) { return r < rows ? first + r * step : NOWHERE; }, type);
#endif
}

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

template <class T, int D, int SCORES, class Chip> static heed_status run_tiles(const args &a, const heed_exec *x)
{
    typedef typename Chip::template tiles<D, SCORES> Tiles;
    typedef shared_forward<D, Tiles> shared;
    static_assert(sizeof(shared) + shared::extras::most_bytes(SCORES) <= Chip::SHARED_BYTES);
    const tile_order order = order_tiles(tiles_of(a.Sq, Tiles::OWN), a.Hq, (int64_t)a.Sk / a.G, a);
    return launch(forward_mma<T, D, SCORES, Chip>, order.blocks(), Tiles::THREADS,
                  sizeof(shared) + shared::extras::bytes(a, SCORES), x, with_unit<SCORES>(a), order);
}

template <class T, class Chip, int... KINDS> static heed_status run(const args &a, int scores, const heed_exec *x)
{
    return run_kind<Chip, KINDS...>(a, scores, [&](auto width, auto kind) {
        return run_tiles<T, decltype(width)::value, decltype(kind)::value, Chip>(a, x);
    });
}

#endif
