/* Backward with mma.sync for fp16 and bf16, head sizes to 128, on sm_80 and later, without atomics:
 *
 *     dK/dV kernel    owns 64 or 128 keys, 16 MT to a warp, and meets the queries of its group's heads
 *     dQ kernel       owns 128 queries, 32 to a warp, and meets the keys
 *
 * Either keeps its results in registers, computes S and dP with its own side as rows, and so has P and dS in the layout
 * of a left operand: neither ever leaves the lanes that computed it. What a kernel meets is copied two tiles deep. */
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

/* P = 2^(c S - L), with L from log2_of(lse), or from S = score() the slower way, which takes scores of any size; at most
 * 1: rounding, where S is large, could make it more. */
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
    const uint64_t seed = a.drop_below ? seed_of(a) : 0;
#pragma unroll
    for (int r = 0; r < Tile::R; r++) {
        const uint32_t kept = a.drop_below ? draw(P, r, a, s, x, seed) : ~0u;
#pragma unroll
        for (int c = 0; c < Tile::C; c++) {
            const float keep = kept >> c & 1 ? a.keep_scale : 0.0f, p = P.at(r, c);
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

/* ---- dQ ------------------------------------------------------------------------------------------------------------ */

constexpr int BR = 128;

template <int D, int BC> struct shared_dq {
    char Q[BR * D * 2], dO[BR * D * 2], K[2][BC * D * 2], V[2][BC * D * 2];
    int low[BR], high[BR], inside, outside; /* all rows see keys inside .. outside */
    span sequence;
    head of;
    key_rows k, v;
};

template <int D, bool GENERAL> constexpr int keys_at_once = (D == 128 ? 32 : 64) / (GENERAL ? 2 : 1);

template <class T, int D, bool GENERAL>
__global__ void __launch_bounds__(THREADS, 2)
    dq_mma(const __grid_constant__ args a, const float2 *__restrict__ facts, int tiles)
{
#if __CUDA_ARCH__ >= 800
    constexpr int BC = keys_at_once<D, GENERAL>, MT = 2, NT = BC / 8;
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
    band_of_row(a, q, min(i0 + (int)threadIdx.x, q.rows - 1), s.low[threadIdx.x], s.high[threadIdx.x]);
    copy_rows<D, BR, THREADS>(sQ, a.q.data + row_at(a.q, q.q_batch, x.h, q.q_row + i0) * 2, a.q.stride[2] * 2, rows, a.D);
    copy_rows<D, BR, THREADS>(sdO, a.d_o.data + row_at(a.d_o, q.q_batch, x.h, q.q_row + i0) * 2, a.d_o.stride[2] * 2, rows,
                              a.Dv);
    __syncthreads();
    const int first = min(s.low[0], s.low[rows - 1]) / 8 * 8, last = max(s.high[0], s.high[rows - 1]);
    if (threadIdx.x == 0)
        s.inside = max(s.low[0], s.low[rows - 1]), s.outside = min(s.high[0], s.high[rows - 1]);
    float L[2 * MT], delta[2 * MT];
    facts += ((int64_t)q.q_batch * a.Hq + x.h) * a.q_rows + q.q_row + i0;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        const int row = row0 + own_tile::down(r) + lane / 4;
        const float2 f = row < rows ? facts[row] : make_float2(CUDART_INF_F, 0.0f);
        L[r] = log2_of<GENERAL>(f.x), delta[r] = f.y;
    }
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
        multiply_rows<T, D>(S, sQ, row0, sK + slot * TILE, 0);                       /* S  = Q K^T */
        if (GENERAL)
            score_with_slopes(t, slope, a, q, x, whole);
        else if (!whole)
            hide_outside_band(t);
#pragma unroll
        for (int r = 0; r < 2 * MT; r++)
#pragma unroll
            for (int e = 0; e < 2 * NT; e++)
                t.at(r, e) = probability<GENERAL>(t.at(r, e), c, L[r]);
        clear(dP);
        multiply_rows<T, D>(dP, sdO, row0, sV + slot * TILE, 0);                     /* dP = dO V^T */
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
        multiply_tile<T, D>(dQ, dS, sK + slot * TILE, 0);                            /* dQ += dS K */
    }
    wait_copies<0>();
    scale_rows(dQ, a.scale);
    store_rows<T, D, MT>(dQ, a.d_q, a.D, a.accumulate, sQ, s.Q, row0, [&](int r) {
        return r < rows ? row_at(a.d_q, q.q_batch, x.h, q.q_row + i0 + r) : NOWHERE;
    });
#endif
}

/* ---- dK and dV ------------------------------------------------------------------------------------------------------ */

template <int D, bool GENERAL> constexpr int queries_at_once = (D == 128 ? 64 : 32) / (GENERAL ? 2 : 1);

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
__device__ static void meet_queries(shared_dkv<D, BN, BQ> &s, int slot, const args &a, const float2 *facts, int h, int i0,
                                    bool whole)
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

template <class T, int D, bool GENERAL>
__global__ void __launch_bounds__(THREADS, 2)
    dkv_mma(const __grid_constant__ args a, const float2 *__restrict__ facts, int tiles)
{
#if __CUDA_ARCH__ >= 800
    constexpr int MT = 128 / D, BN = WARPS * 16 * MT, BQ = queries_at_once<D, GENERAL>, NT = BQ / 8;
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
        multiply_rows<T, D>(S, sK, row0, sQ, 0);                             /* S^T = K Q^T */
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
        multiply_rows<T, D>(dP, sV, row0, sdO, 0);                           /* dP^T = V dO^T */
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
        pack_tile<T>(packed, S);
        multiply_tile<T, D>(dV, packed, sdO, 0);                             /* dV += P^T dO */
        pack_tile<T>(packed, dP);
        multiply_tile<T, D>(dK, packed, sQ, 0);                              /* dK += dS^T Q */
    }
    wait_copies<0>();
    __syncthreads();
    scale_rows(dK, a.scale);
    if (a.d_k.data)
        store_rows<T, D, MT>(dK, a.d_k, a.D, a.accumulate, sK, s.K, row0, [&](int r) {
            return r < keys ? key_at(a, q, a.d_k, hk, n0 + r) : NOWHERE;
        });
    if (a.d_v.data)
        store_rows<T, D, MT>(dV, a.d_v, a.Dv, a.accumulate, sV, s.V, row0, [&](int r) {
            return r < keys ? key_at(a, q, a.d_v, hk, n0 + r) : NOWHERE;
        });
#endif
}

/* ---- Launch --------------------------------------------------------------------------------------------------------- */

template <class T, int D, bool GENERAL>
static heed_status run(const args &a, const float2 *facts, const heed_exec *x)
{
    constexpr int BN = WARPS * 16 * (128 / D);
    const int64_t keys = a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0;
    const int64_t tiles = tiles_of(keys, BN), query_tiles = tiles_of(a.Sq, BR);
    heed_status status = HEED_OK;
    if (a.d_k.data || a.d_v.data)
        status = launch(dkv_mma<T, D, GENERAL>, tiles * a.Hk * a.B, THREADS,
                        sizeof(shared_dkv<D, BN, queries_at_once<D, GENERAL>>), x, a, facts, (int)tiles);
    if (!status && a.d_q.data)
        status = launch(dq_mma<T, D, GENERAL>, query_tiles * a.Hq * a.B, THREADS,
                        sizeof(shared_dq<D, keys_at_once<D, GENERAL>>), x, a, facts, (int)query_tiles);
    return status;
}

template <class T, int D> static heed_status run(const args &a, const float2 *facts, const heed_exec *x)
{
    const bool general = a.softcap > 0 || a.bias.data || a.alibi.data || a.mask.data || a.drop_below;
    return general ? run<T, D, true>(a, facts, x) : run<T, D, false>(a, facts, x);
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
    const bool narrow = HEED_MAX(a.D, a.Dv) <= 64;
    if (a.q.dtype == HEED_F16)
        return narrow ? run<__half, 64>(a, facts, x) : run<__half, 128>(a, facts, x);
    return narrow ? run<__nv_bfloat16, 64>(a, facts, x) : run<__nv_bfloat16, 128>(a, facts, x);
}
