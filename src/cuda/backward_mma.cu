/* Backward with mma.sync for fp16 and bf16, head sizes to 256, on sm_80 and later, without atomics:
 *
 *     dK/dV kernel    owns 64 or 128 keys, 16 MT to a warp, and meets the queries of its group's heads
 *     dQ kernel       owns 64 or 128 queries, likewise, and meets the keys
 *
 * Either keeps its results in registers, computes S and dP with its own side as rows, and so has P and dS in the layout
 * of a left operand: neither ever leaves the lanes that computed it. What a kernel meets is copied two tiles deep. At
 * D = 256 the registers of a warp hold dK or dV of its 16 keys, not both: then there is a kernel for each. */
#include "launch.cuh"
#include "tile_mma.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;

/* A warp's scores with keys as rows. low and high are those of the tile's queries. */
template <int MT, int NT> struct key_major {
    static constexpr int R = 2 * NT, C = 2 * MT;
    static constexpr bool EXACT = false;
    float (&X)[MT][NT][4];
    const int *lows, *highs;
    int i0, n0, column0; /* first query and first key of this lane; its first column of the tile */
    __device__ float &at(int r, int c) { return X[c / 2][r / 2][c % 2 * 2 + r % 2]; }
    static __device__ constexpr int down(int r) { return r / 2 * 8 + r % 2; }
    static __device__ constexpr int apart(int c) { return c / 2 * 16 + c % 2 * 8; }
    __device__ int row(int r) const { return i0 + down(r); }
    __device__ int key(int c) const { return n0 + apart(c); }
    __device__ int low(int r) const { return lows[column0 + down(r)]; }
    __device__ int high(int r) const { return highs[column0 + down(r)]; }
};

/* As for query_major; here the eight keys of one Philox are those of eight lanes, four apart. */
template <int MT, int NT>
__device__ inline void draw_tile(const key_major<MT, NT> &t, uint32_t (&kept)[2 * NT], const args &a, const span &s,
                                 const head &x)
{
    typedef key_major<MT, NT> tile;
    const uint64_t seed = seed_of(a);
    const int lane = threadIdx.x % 32;
    const int64_t first = s.r0 + t.n0 - lane / 4;
    const bool together = s.r_step == 1 && first % 8 == 0;
#pragma unroll
    for (int r = 0; r < tile::R; r++)
        kept[r] = together ? 0 : draw(t, r, a, s, x, seed);
    if (!together)
        return;
#pragma unroll
    for (int i = 0; i < tile::R * tile::C; i += 8) {
        const int r = (i + lane / 4) / tile::C, c = (i + lane / 4) % tile::C;
        const uint32_t p = (uint32_t)(uint64_t)(s.p0 + t.row(r) * s.p_step);
        const uint4 w = philox(seed, make_uint4((uint32_t)(uint64_t)((first + tile::apart(c)) >> 3), p, x.h, s.b));
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int from = j * 4 + lane % 4;
            const uint32_t x0 = __shfl_sync(~0u, w.x, from), x1 = __shfl_sync(~0u, w.y, from);
            const uint32_t x2 = __shfl_sync(~0u, w.z, from), x3 = __shfl_sync(~0u, w.w, from);
            const uint32_t word = lane & 16 ? (lane & 8 ? x3 : x2) : (lane & 8 ? x1 : x0);
            const uint32_t number = word >> (lane & 4 ? 16 : 0) & 0xFFFFu;
            kept[(i + j) / tile::C] |= (uint32_t)(number >= a.drop_below) << (i + j) % tile::C;
        }
    }
}

/* The softcap's slope, two to a register: it multiplies dS, which is about to be rounded to 16 bits as well. */
template <class Tile> struct slopes {
    __half2 two[Tile::R][Tile::C / 2];
};

template <class Tile>
__device__ static void score_with_slopes(Tile &t, slopes<Tile> &slope, const args &a, const span &s, const head &x,
                                         bool whole)
{
    const float inverse = a.softcap > 0 ? 1.0f / a.softcap : 0.0f;
#pragma unroll
    for (int r = 0; r < Tile::R; r++)
#pragma unroll
        for (int c = 0; c < Tile::C; c += 2) {
            float u[2] = { 0.0f, 0.0f };
#pragma unroll
            for (int e = 0; e < 2; e++) {
                t.at(r, c + e) *= a.scale;
                if (a.softcap > 0) {
                    u[e] = tangent<false>(t.at(r, c + e) * inverse);
                    t.at(r, c + e) = a.softcap * u[e];
                }
            }
            slope.two[r][c / 2] = __floats2half2_rn(1.0f - u[0] * u[0], 1.0f - u[1] * u[1]);
        }
    finish_scores(t, a, s, x, whole);
}

/* P = 2^(c S - L) with L from log2_of(lse); GENERAL: from S of score() and lse, the slower way that takes scores of any
 * size. At most 1: rounding, where S is large, could make it more. */
template <bool GENERAL> __device__ inline float probability(float S, float c, float L)
{
    return exp2_fast(GENERAL ? min_or_nan(S - L, 0.0f) * LOG2E : min_or_nan(fmaf(S, c, -L), 0.0f));
}

/* lse * log2(e) within the range of finite numbers; +inf, a row without gradient, stays. */
template <bool GENERAL> __device__ inline float log2_of(float lse)
{
    return GENERAL || lse == CUDART_INF_F ? lse : -min_or_nan(-min_or_nan(lse * LOG2E, 3.4e38f), 3.4e38f);
}

/* dP becomes dS = P (dP - delta) slope, and P what dV wants, after dropout. */
template <class Tile>
__device__ static void differentiate(Tile &P, Tile &dP, const slopes<Tile> &slope, const float (&delta)[Tile::R],
                                     const args &a, const span &s, const head &x)
{
    uint32_t kept[Tile::R];
#pragma unroll
    for (int r = 0; r < Tile::R; r++)
        kept[r] = ~0u;
    if (a.drop_below)
        draw_tile(P, kept, a, s, x);
#pragma unroll
    for (int r = 0; r < Tile::R; r++) {
#pragma unroll
        for (int c = 0; c < Tile::C; c++) {
            const float keep = kept[r] >> c & 1 ? a.keep_scale : 0.0f, p = P.at(r, c);
            const float2 two = __half22float2(slope.two[r][c / 2]);
            dP.at(r, c) = p == 0.0f ? 0.0f : p * (keep * dP.at(r, c) - delta[r]) * (c % 2 ? two.y : two.x);
            P.at(r, c) = p * keep;
        }
    }
}

template <int MT, int NT> __device__ static void scale_rows(float (&x)[MT][NT][4], float by)
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[m][n][e] *= by;
}

/* ---- dQ ---------------------------------------------------------------------------------------------------------- */

/* 16-row tiles to a warp, and keys at once: as many as leave no register short. */
template <int D> constexpr int row_tiles = D == 256 ? 1 : 2;

template <int D, int BC> struct shared_dq {
    static constexpr int BR = WARPS * 16 * row_tiles<D>;
    char Q[BR * D * 2], dO[BR * D * 2], K[2][BC * D * 2], V[2][BC * D * 2];
    float L[BR], delta[BR];
    int low[BR], high[BR], inside, outside; /* all rows see keys inside .. outside */
    span sequence;
    head of;
    key_rows k, v;
};

template <int D, bool GENERAL> constexpr int keys_at_once = D == 256 ? 16 : D == 64 && !GENERAL ? 64 : 32;

template <class T, int D, bool GENERAL>
__global__ void __launch_bounds__(THREADS, 2)
    dq_mma(const __grid_constant__ args a, const float2 *__restrict__ facts, int tiles)
{
#if __CUDA_ARCH__ >= 800
    constexpr int BC = keys_at_once<D, GENERAL>, NT = BC / 8, MT = row_tiles<D>, BR = WARPS * 16 * MT;
    typedef query_major<MT, NT> own_tile;
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(shared_dq<D, BC> *)memory;
    const uint32_t sQ = shared_address(s.Q), sdO = shared_address(s.dO);
    constexpr uint32_t TILE = BC * D * 2;
    const uint32_t sK = shared_address(s.K), sV = shared_address(s.V);
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16 * MT, i0 = (tiles - 1 - blockIdx.x % tiles) * BR;
    if (threadIdx.x == 0) {
        s.sequence = span_of(a, blockIdx.x / tiles / a.Hq);
        s.of = head_of(a, s.sequence, blockIdx.x / tiles % a.Hq);
        s.k = keys_of(a, s.sequence, a.k, s.of.hk);
        s.v = keys_of(a, s.sequence, a.v, s.of.hk);
    }
    __syncthreads();
    const span &q = s.sequence;
    const head &x = s.of;
    if (i0 >= q.rows)
        return;
    const int rows = min(BR, q.rows - i0);
    if (threadIdx.x < BR) {
        const int row = min((int)threadIdx.x, rows - 1);
        const float2 f = facts[((int64_t)q.q_batch * a.Hq + x.h) * a.q_rows + q.q_row + i0 + row];
        s.L[threadIdx.x] = log2_of<GENERAL>(f.x), s.delta[threadIdx.x] = f.y;
        band_of_row(a, q, i0 + row, s.low[threadIdx.x], s.high[threadIdx.x]);
    }
    copy_rows<D, BR, THREADS>(sQ, a.q.data + row_at(a.q, q.q_batch, x.h, q.q_row + i0) * 2, a.q.stride[2] * 2, rows,
                              a.D);
    copy_rows<D, BR, THREADS>(sdO, a.d_o.data + row_at(a.d_o, q.q_batch, x.h, q.q_row + i0) * 2, a.d_o.stride[2] * 2,
                              rows, a.Dv);
    __syncthreads();
    const int first = min(s.low[0], s.low[rows - 1]) / 8 * 8, last = max(s.high[0], s.high[rows - 1]);
    if (threadIdx.x == 0)
        s.inside = max(s.low[0], s.low[rows - 1]), s.outside = min(s.high[0], s.high[rows - 1]);
    float dQ[MT][D / 8][4];
    clear(dQ);
    const float c = GENERAL ? LOG2E : a.scale * LOG2E;

    if (first < last) {
        copy_keys<D, BC, THREADS>(sK, a, q, a.k, s.k, x.hk, first, q.keys, a.D);
        copy_keys<D, BC, THREADS>(sV, a, q, a.v, s.v, x.hk, first, q.keys, a.Dv);
    }
    commit_copies();
    for (int n0 = first, slot = 0; n0 < last; n0 += BC, slot ^= 1) {
        wait_copies<0>();
        __syncthreads(); /* this tile is here, and the one before no longer needed */
        if (n0 + BC < last) {
            copy_keys<D, BC, THREADS>(sK + (slot ^ 1) * TILE, a, q, a.k, s.k, x.hk, n0 + BC, q.keys, a.D);
            copy_keys<D, BC, THREADS>(sV + (slot ^ 1) * TILE, a, q, a.v, s.v, x.hk, n0 + BC, q.keys, a.Dv);
        }
        commit_copies();
        float S[MT][NT][4], dP[MT][NT][4];
        const bool whole = n0 >= s.inside && n0 + BC <= s.outside;
        own_tile t = { S, s.low, s.high, i0 + row0 + lane / 4, n0 + lane % 4 * 2, row0 + lane / 4 };
        own_tile dt = { dP, s.low, s.high, t.i0, t.n0, t.row0 };
        slopes<own_tile> slope;
        clear(S);
        multiply_rows<T, D>(S, sQ, row0, sK + slot * TILE, 0); /* S  = Q K^T */
        if (GENERAL)
            score_with_slopes(t, slope, a, q, x, whole);
        else if (!whole)
            hide_outside_band(t);
        float delta[2 * MT];
#pragma unroll
        for (int r = 0; r < 2 * MT; r++) {
            const float L = s.L[t.row0 + own_tile::down(r)];
            delta[r] = s.delta[t.row0 + own_tile::down(r)];
#pragma unroll
            for (int e = 0; e < 2 * NT; e++)
                t.at(r, e) = probability<GENERAL>(t.at(r, e), c, L);
        }
        clear(dP);
        multiply_rows<T, D>(dP, sdO, row0, sV + slot * TILE, 0); /* dP = dO V^T */
        if (GENERAL)
            differentiate(t, dt, slope, delta, a, q, x);
        else {
#pragma unroll
            for (int r = 0; r < 2 * MT; r++)
#pragma unroll
                for (int e = 0; e < 2 * NT; e++)
                    dt.at(r, e) = t.at(r, e) * (dt.at(r, e) - delta[r]);
        }
        uint32_t dS[MT][NT / 2][4];
        pack_tile<T>(dS, dP);
        multiply_tile<T, D>(dQ, dS, sK + slot * TILE, 0); /* dQ += dS K */
    }
    wait_copies<0>();
    __syncthreads(); /* Q's tile becomes the way out, and without a key nobody has waited for Q */
    scale_rows(dQ, a.scale);
    store_rows<T, D, MT>(dQ, a.d_q, a.D, a.accumulate, sQ, s.Q, row0,
                         [&](int r) { return r < rows ? row_at(a.d_q, q.q_batch, x.h, q.q_row + i0 + r) : NOWHERE; });
#endif
}

/* ---- dK and dV --------------------------------------------------------------------------------------------------- */

template <int D, bool GENERAL> constexpr int queries_at_once = D == 256 ? 16 : (D == 128 ? 64 : 32) / (GENERAL ? 2 : 1);

/* Keys of a block. */
template <int D> constexpr int key_tiles = D == 64 ? 2 : 1;

enum { ONLY_DV = 1, ONLY_DK = 2, BOTH = 3 };

template <int D, int BN, int BQ> struct shared_dkv {
    char K[BN * D * 2], V[BN * D * 2], Q[2][BQ * D * 2], dO[2][BQ * D * 2];
    float2 facts[2][BQ];
    int low[2][BQ], high[2][BQ];
    span sequence;
    head of[2]; /* of the queries in either slot */
    key_rows k, v;
    int first, last, inside, outside; /* rows that see some key of the tile, and those that see all */
};

/* Starts the copies of queries i0 .. + BQ of head h into a slot, and says what the tile has to know of them. */
template <int D, int BN, int BQ>
__device__ static void meet_queries(shared_dkv<D, BN, BQ> &s, int slot, const args &a, const float2 *facts, int h,
                                    int i0, bool whole)
{
    const span &q = s.sequence;
    const int rows = q.rows - i0;
    copy_rows<D, BQ, THREADS>(shared_address(s.Q[slot]), a.q.data + row_at(a.q, q.q_batch, h, q.q_row + i0) * 2,
                              a.q.stride[2] * 2, rows, a.D);
    copy_rows<D, BQ, THREADS>(shared_address(s.dO[slot]), a.d_o.data + row_at(a.d_o, q.q_batch, h, q.q_row + i0) * 2,
                              a.d_o.stride[2] * 2, rows, a.Dv);
    if (threadIdx.x < BQ) {
        const float2 *from = facts + ((int64_t)q.q_batch * a.Hq + h) * a.q_rows + q.q_row + i0;
        const bool real = (int)threadIdx.x < rows;
        copy_async8(shared_address(&s.facts[slot][threadIdx.x]), real ? from + threadIdx.x : facts, real ? 8 : 0);
        if (!whole)
            band_of_row(a, q, min(i0 + (int)threadIdx.x, q.rows - 1), s.low[slot][threadIdx.x],
                        s.high[slot][threadIdx.x]);
    } else if (threadIdx.x == BQ)
        s.of[slot] = head_of(a, q, h);
    commit_copies();
}

template <class T, int D, bool GENERAL, int WHICH>
__global__ void __launch_bounds__(THREADS, 2)
    dkv_mma(const __grid_constant__ args a, const float2 *__restrict__ facts, int tiles)
{
#if __CUDA_ARCH__ >= 800
    constexpr int MT = key_tiles<D>, BN = WARPS * 16 * MT, BQ = queries_at_once<D, GENERAL>, NT = BQ / 8;
    typedef key_major<MT, NT> own_tile;
    extern __shared__ __align__(1024) char memory[];
    auto &s = *(shared_dkv<D, BN, BQ> *)memory;
    const uint32_t sK = shared_address(s.K), sV = shared_address(s.V);
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16 * MT;
    const int n0 = blockIdx.x % tiles * BN, hk = blockIdx.x / tiles % a.Hk;
    if (threadIdx.x == 0) {
        s.sequence = span_of(a, blockIdx.x / tiles / a.Hk);
        s.k = keys_of(a, s.sequence, a.k, hk);
        s.v = keys_of(a, s.sequence, a.v, hk);
    }
    __syncthreads();
    const span &q = s.sequence;
    if (n0 >= q.keys)
        return;
    const int keys = min(BN, q.keys - n0);
    copy_keys<D, BN, THREADS>(sK, a, q, a.k, s.k, hk, n0, q.keys, a.D);
    copy_keys<D, BN, THREADS>(sV, a, q, a.v, s.v, hk, n0, q.keys, a.Dv);
    commit_copies();
    if (threadIdx.x == 0) {
        int first, last;
        band_of_key(a, q, n0, s.first, s.last);
        band_of_key(a, q, n0 + keys - 1, first, last);
        s.inside = max(s.first, first), s.outside = min(s.last, last);
        s.first = min(s.first, first), s.last = max(s.last, last);
    }
    __syncthreads();
    auto all_see_all = [&](int i) { return i >= s.inside && min(i + BQ, q.rows) <= s.outside; };

    float dK[MT][D / 8][4], dV[MT][D / 8][4];
    clear(dK);
    clear(dV);
    const float c = GENERAL ? LOG2E : a.scale * LOG2E;
    int h = hk * a.G, i0 = s.first;
    if (s.first < s.last)
        meet_queries(s, 0, a, facts, h, i0, all_see_all(i0));
    for (int slot = 0; s.first < s.last && h < (hk + 1) * a.G; slot ^= 1) {
        const int i = i0;
        i0 += BQ;
        if (i0 >= s.last)
            i0 = s.first, h++;
        wait_copies<0>();
        __syncthreads(); /* this tile is here, and the one before no longer needed */
        if (h < (hk + 1) * a.G)
            meet_queries(s, slot ^ 1, a, facts, h, i0, all_see_all(i0));
        const uint32_t sQ = shared_address(s.Q[slot]), sdO = shared_address(s.dO[slot]);
        const head &x = s.of[slot];
        const bool whole = all_see_all(i);
        float S[MT][NT][4], dP[MT][NT][4];
        own_tile t = { S, s.low[slot], s.high[slot], i + lane % 4 * 2, n0 + row0 + lane / 4, lane % 4 * 2 };
        own_tile dt = { dP, t.lows, t.highs, t.i0, t.n0, t.column0 };
        slopes<own_tile> slope;
        clear(S);
        multiply_rows<T, D>(S, sK, row0, sQ, 0); /* S^T = K Q^T */
        if (GENERAL)
            score_with_slopes(t, slope, a, q, x, whole);
        else if (!whole)
            hide_outside_band(t);
        float delta[2 * NT];
#pragma unroll
        for (int r = 0; r < 2 * NT; r++) {
            const float2 f = s.facts[slot][t.column0 + own_tile::down(r)];
            const float L = log2_of<GENERAL>(f.x);
            delta[r] = f.y;
#pragma unroll
            for (int e = 0; e < 2 * MT; e++)
                t.at(r, e) = probability<GENERAL>(t.at(r, e), c, L);
        }
        clear(dP);
        if (WHICH & ONLY_DK)
            multiply_rows<T, D>(dP, sV, row0, sdO, 0); /* dP^T = V dO^T */
        if (GENERAL)
            differentiate(t, dt, slope, delta, a, q, x);
        else {
#pragma unroll
            for (int r = 0; r < 2 * NT; r++)
#pragma unroll
                for (int e = 0; e < 2 * MT; e++)
                    dt.at(r, e) = t.at(r, e) * (dt.at(r, e) - delta[r]);
        }
        uint32_t packed[MT][NT / 2][4];
        if (WHICH & ONLY_DV) {
            pack_tile<T>(packed, S);
            multiply_tile<T, D>(dV, packed, sdO, 0); /* dV += P^T dO */
        }
        if (WHICH & ONLY_DK) {
            pack_tile<T>(packed, dP);
            multiply_tile<T, D>(dK, packed, sQ, 0); /* dK += dS^T Q */
        }
    }
    wait_copies<0>();
    __syncthreads();
    scale_rows(dK, a.scale);
    if (WHICH & ONLY_DK && a.d_k.data)
        store_rows<T, D, MT>(dK, a.d_k, a.D, a.accumulate, sK, s.K, row0,
                             [&](int r) { return r < keys ? key_at(a, q, a.d_k, hk, n0 + r) : NOWHERE; });
    if (WHICH & ONLY_DV && a.d_v.data)
        store_rows<T, D, MT>(dV, a.d_v, a.Dv, a.accumulate, sV, s.V, row0,
                             [&](int r) { return r < keys ? key_at(a, q, a.d_v, hk, n0 + r) : NOWHERE; });
#endif
}

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

template <class T, int D, bool GENERAL, int WHICH>
static heed_status run_keys(const args &a, const float2 *facts, const heed_exec *x)
{
    constexpr int BN = WARPS * 16 * key_tiles<D>;
    typedef shared_dkv<D, BN, queries_at_once<D, GENERAL>> shared;
    static_assert(sizeof(shared) <= 99 * 1024, "what a block may have on sm_86, 89 and 120");
    const int64_t keys = a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0, tiles = tiles_of(keys, BN);
    return launch(dkv_mma<T, D, GENERAL, WHICH>, tiles * a.Hk * a.B, THREADS, sizeof(shared), x, a, facts, (int)tiles);
}

template <class T, int D, bool GENERAL> static heed_status run(const args &a, const float2 *facts, const heed_exec *x)
{
    typedef shared_dq<D, keys_at_once<D, GENERAL>> shared;
    static_assert(sizeof(shared) <= 99 * 1024, "what a block may have on sm_86, 89 and 120");
    const int64_t tiles = tiles_of(a.Sq, shared::BR);
    heed_status status = HEED_OK;
    if constexpr (D == 256) {
        if (a.d_v.data)
            status = run_keys<T, D, GENERAL, ONLY_DV>(a, facts, x);
        if (!status && a.d_k.data)
            status = run_keys<T, D, GENERAL, ONLY_DK>(a, facts, x);
    } else if (a.d_k.data || a.d_v.data)
        status = run_keys<T, D, GENERAL, BOTH>(a, facts, x);
    if (!status && a.d_q.data)
        status = launch(dq_mma<T, D, GENERAL>, tiles * a.Hq * a.B, THREADS, sizeof(shared), x, a, facts, (int)tiles);
    return status;
}

template <class T, int D> static heed_status run(const args &a, const float2 *facts, const heed_exec *x)
{
    const bool general = a.softcap > 0 || a.bias.data || a.alibi.data || a.mask.data || a.drop_below || a.scale <= 0;
    return general ? run<T, D, true>(a, facts, x) : run<T, D, false>(a, facts, x);
}

template <class T> static heed_status run(const args &a, const float2 *facts, const heed_exec *x)
{
    const int width = HEED_MAX(a.D, a.Dv);
    return width <= 64 ? run<T, 64>(a, facts, x) : width <= 128 ? run<T, 128>(a, facts, x) : run<T, 256>(a, facts, x);
}

size_t heed_backward_workspace_mma(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return heed_cuda_facts_bytes(p) + heed_cuda_delta_bytes(p);
}

heed_status heed_backward_mma(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    on_device device(x->device);
    if (p->g.d_o.dtype != p->a.q.dtype) /* an fp32 o: its gradient is not rounded to 16 bits behind the caller's back */
        return heed_backward_portable(p, plan, x);
    args a;
    heed_exec after = *x; /* delta's part of the workspace */
    after.workspace = (char *)x->workspace + heed_cuda_facts_bytes(p);
    float2 *facts = (float2 *)x->workspace;
    heed_status status = device.status;
    if (!status)
        status = heed_cuda_args(p, &a);
    if (!status)
        status = heed_cuda_prepare_backward(p, &a, &after);
    if (!status)
        status = heed_cuda_row_facts(a, p->a.q.shape, facts, x);
    if (!status)
        status = heed_cuda_sink_gradient(a, x);
    if (!status)
        status = heed_cuda_bias_gradient(a, x);
    if (status)
        return status;
    return a.q.dtype == HEED_F16 ? run<__half>(a, facts, x) : run<__nv_bfloat16>(a, facts, x);
}
