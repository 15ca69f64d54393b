/* The tensor-core forward for fp16 and bf16, head sizes to 256. A block of four warps owns 64 or 128 rows of one head,
 * 16 MT to a warp, and meets BC keys at a time. K and V have one buffer each: V arrives while S = Q K^T is computed, the
 * next K while O += P V is.
 *
 * What the scores need beyond scale and band is in GENERAL, so that the others do not pay for it. A Chip says how many
 * rows and keys to take at once: as many as leave no register short. */
#ifndef HEED_CUDA_FORWARD_MMA_CUH
#define HEED_CUDA_FORWARD_MMA_CUH

#include "launch.cuh"
#include "tile_mma.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;

template <int D, bool GENERAL, class Chip> struct shared_forward {
    static constexpr int MT = Chip::template row_tiles<D>, BR = WARPS * 16 * MT;
    static constexpr int BC = Chip::template keys_at_once<D, GENERAL>;
    typedef score_tiles<BR, BC, false> extras;
    char Q[BR * D * 2], K[BC * D * 2], V[BC * D * 2];
    int low[BR], high[BR];
    span sequence; /* what is looked at once for each tile lies here and not in registers */
    head of;
    key_rows k, v;
    int inside, outside;          /* all rows see keys inside .. outside */
    __align__(16) char tiles[16]; /* of mask and bias: as many bytes as they need */
};

/* The four lanes of a row are neighbours. */
__device__ static float row_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ static float row_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* P = 2^(c S - c m'), l = l a + sum P, O = O a, with a = 2^(c m - c m'). */
template <int D, int MT, int NT>
__device__ static void softmax_step(float (&S)[MT][NT][4], float (&m)[MT * 2], float (&l)[MT * 2],
                                    float (&O)[MT][D / 8][4], float c)
{
#pragma unroll
    for (int r = 0; r < MT * 2; r++) {
        float(&rows)[NT][4] = S[r / 2];
        const int half = r % 2 * 2;
        float most = m[r];
#pragma unroll
        for (int n = 0; n < NT; n++)
            most = fmaxf(most, fmaxf(rows[n][half], rows[n][half + 1]));
        most = row_max(most);
        float base = most == -CUDART_INF_F ? 0.0f : most, offset = base * c;
        const float rescale = exp2_fast((m[r] - base) * c);
        if (fabsf(offset) > 1e7f) { /* its rounding would matter to an exponent: subtract first */
#pragma unroll
            for (int n = 0; n < NT; n++)
                rows[n][half] -= base, rows[n][half + 1] -= base;
            offset = 0.0f;
        }
        m[r] = most;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = half; e < half + 2; e++) {
                rows[n][e] = exp2_fast(fmaf(rows[n][e], c, -offset));
                sum += rows[n][e];
            }
        l[r] = l[r] * rescale + sum;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            O[r / 2][n][half] *= rescale, O[r / 2][n][half + 1] *= rescale;
    }
}

template <class Tile> __device__ static void drop(Tile &t, const args &a, const span &s, const head &x)
{
    kept_bits<Tile> kept;
    draw_tile(t, kept, a, s, x);
#pragma unroll
    for (int r = 0; r < Tile::R; r++)
#pragma unroll
        for (int c = 0; c < Tile::C; c++)
            t.at(r, c) = kept.at(r, c) ? t.at(r, c) * a.keep_scale : 0.0f;
}

template <class T, int D, bool GENERAL, class Chip>
__global__ void __launch_bounds__(THREADS, 2) forward_mma(const __grid_constant__ args a, int tiles)
{
#if CHIP_RUNS_HERE
    extern __shared__ __align__(1024) char memory[];
    typedef shared_forward<D, GENERAL, Chip> shared;
    typedef typename shared::extras extras;
    constexpr int MT = shared::MT, BR = shared::BR, BC = shared::BC, NT = BC / 8;
    auto &s = *(shared *)memory;
    const uint32_t sQ = shared_address(s.Q), sK = shared_address(s.K), sV = shared_address(s.V);
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16 * MT, i0 = (tiles - 1 - blockIdx.x % tiles) * BR;
    int first, last;
    { /* the first copies start before anything is shared: each thread finds out for itself */
        const span here = span_of(a, blockIdx.x / tiles / a.Hq);
        const int h = blockIdx.x / tiles % a.Hq, rows = min(BR, here.rows - i0);
        if (rows <= 0)
            return;
        const key_rows k = keys_of(a, here, a.k, h / a.G), v = keys_of(a, here, a.v, h / a.G);
        int low, high, inside, outside;
        band_of_row(a, here, i0, first, last);
        band_of_row(a, here, i0 + rows - 1, low, high);
        inside = max(first, low), outside = min(last, high);
        first = min(first, low) / 16 * 16, last = max(last, high);
        copy_rows<D, BR, THREADS>(sQ, a.q.data + row_at(a.q, here.q_batch, h, here.q_row + i0) * 2, a.q.stride[2] * 2,
                                  rows, a.D);
        if (first < last)
            copy_keys<D, BC, THREADS>(sK, a, here, a.k, k, h / a.G, first, here.keys, a.D);
        if (threadIdx.x == 0) {
            s.sequence = here;
            s.of = head_of(a, here, h);
            s.k = k, s.v = v;
            s.inside = inside, s.outside = outside;
        }
        if (threadIdx.x < BR)
            band_of_row(a, here, i0 + min((int)threadIdx.x, rows - 1), s.low[threadIdx.x], s.high[threadIdx.x]);
    }
    commit_copies();
    const span &q = s.sequence;
    const head &x = s.of;
    float O[MT][D / 8][4], m[MT * 2], l[MT * 2];
    clear(O);
#pragma unroll
    for (int r = 0; r < MT * 2; r++)
        m[r] = -CUDART_INF_F, l[r] = 0.0f;
    const float c = GENERAL ? LOG2E : a.scale * LOG2E;

    for (int n0 = first; n0 < last; n0 += BC) {
        wait_copies<0>();
        __syncthreads(); /* K is here, and the last V is no longer needed */
        copy_keys<D, BC, THREADS>(sV, a, q, a.v, s.v, x.hk, n0, q.keys, a.Dv);
        if (GENERAL)
            copy_mask_and_bias<extras, BR, BC, THREADS>(s.tiles, a, q, x, i0, n0);
        commit_copies();
        float S[MT][NT][4];
        clear(S);
        multiply_rows<T, D>(S, sQ, row0, sK, 0); /* S  = Q K^T */
        wait_copies<0>();
        __syncthreads(); /* V is here, and this K is no longer needed */
        if (n0 + BC < last)
            copy_keys<D, BC, THREADS>(sK, a, q, a.k, s.k, x.hk, n0 + BC, q.keys, a.D);
        commit_copies();
        const bool whole = n0 >= s.inside && n0 + BC <= s.outside;
        query_major<MT, NT> t = { S, s.low, s.high, i0 + row0 + lane / 4, n0 + lane % 4 * 2, row0 + lane / 4 };
        if (GENERAL) {
            point_at_tiles<extras>(t, s.tiles, a, t.row0, lane % 4 * 2);
            score(t, a, q, x, whole);
        } else if (!whole)
            hide_outside_band(t);
        softmax_step<D>(S, m, l, O, c);
        if constexpr (GENERAL)
            if (a.drop_below)
                drop(t, a, q, x);
        uint32_t P[MT][NT / 2][4];
        pack_tile<T>(P, S);
        multiply_tile<T, D>(O, P, sV, 0); /* O += P V */
    }
    wait_copies<0>();
    __syncthreads(); /* without a key nobody has waited for Q */

    /* A warp's own rows of Q's tile become the way out: no other warp reads them. */
    const int rows = min(BR, q.rows - i0);
    const float sink = a.sink.data ? load(a.sink, row_at(a.sink, 0, x.h, 0)) : -CUDART_INF_F;
#pragma unroll
    for (int r = 0; r < MT * 2; r++) {
        const int i = i0 + row0 + r / 2 * 16 + r % 2 * 8 + lane / 4;
        float sum = row_sum(l[r]), own = GENERAL ? m[r] : m[r] * a.scale, most = fmaxf(own, sink), rescale = 0.0f;
        if (sum != 0.0f) { /* else the row saw no key */
            rescale = exp2_fast((own - most) * LOG2E);
            sum = sum * rescale + exp2_fast((sink - most) * LOG2E);
            rescale /= sum;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            O[r / 2][n][r % 2 * 2] *= rescale, O[r / 2][n][r % 2 * 2 + 1] *= rescale;
        if (a.lse.data && lane % 4 == 0 && i < q.rows)
            store(a.lse, row_at(a.lse, q.q_batch, x.h, q.q_row + i), sum == 0.0f ? -CUDART_INF_F : most + logf(sum));
    }
    store_rows<T, D, MT>(O, a.o, a.Dv, false, sQ, s.Q, row0,
                         [&](int r) { return r < rows ? row_at(a.o, q.q_batch, x.h, q.q_row + i0 + r) : NOWHERE; });
#endif
}

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

template <class T, int D, bool GENERAL, class Chip> static heed_status run_tiles(const args &a, const heed_exec *x)
{
    typedef shared_forward<D, GENERAL, Chip> shared;
    static_assert(sizeof(shared) + (GENERAL ? shared::extras::MOST_BYTES : 0) <= Chip::SHARED_BYTES, "");
    const int64_t tiles = tiles_of(a.Sq, shared::BR);
    return launch(forward_mma<T, D, GENERAL, Chip>, tiles * a.Hq * a.B, THREADS,
                  sizeof(shared) + (GENERAL ? shared::extras::bytes(a) : 0), x, a, (int)tiles);
}

template <class T, int D, class Chip> static heed_status run_head(const args &a, const heed_exec *x)
{
    const bool general = a.softcap > 0 || a.bias.data || a.alibi.data || a.mask.data || a.drop_below || a.scale <= 0;
    return general ? run_tiles<T, D, true, Chip>(a, x) : run_tiles<T, D, false, Chip>(a, x);
}

template <class T, class Chip> static heed_status run(const args &a, const heed_exec *x)
{
    const int width = HEED_MAX(a.D, a.Dv);
    if (width <= 64)
        return run_head<T, 64, Chip>(a, x);
    if constexpr (Chip::HEAD_DIM > 128)
        if (width > 128)
            return run_head<T, 256, Chip>(a, x);
    return run_head<T, 128, Chip>(a, x);
}

#endif
