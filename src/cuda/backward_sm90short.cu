/* Backward for up to 256 rows and keys on Hopper, fp16 and bf16, head sizes to 64: one launch (short_sm90.cuh). Some
 * blocks own queries and make dQ, others own keys and make dK and dV, 64 at a time:
 *
 *     queries   S   = Q K^T   dP   = dO V^T   dQ = scale dS K
 *     keys      S^T = K Q^T   dP^T = V dO^T   dK = scale dS^T Q   dV = P^T dO
 *
 * S and dP are computed twice, and no block waits for another. delta is computed where it is needed, unless the caller
 * brings it. */
#include "short_sm90.cuh"

constexpr int MEET = 64; /* rows that are met at a time */

/* Shared memory, and after it, `most` rows each, what is met: Q and dO, or K and V. */
template <class T> struct alignas(1024) backward_room {
    char own[2][SHORT_OWN * 128];
    union {
        char out[16 * 128];
        key_terms<T> terms;
    } of_warp[4];
    float2 facts[HEED_SHORT]; /* of the queries: see facts_of() */
    span s;                   /* the same for all: here it takes no registers */

    __device__ char *met(int which, int most) { return (char *)(this + 1) + which * most * 128; }
};

/* ---- Scores ------------------------------------------------------------------------------------------------------ */

/* What is to be known of a query: lse times log2(e), or lse where GENERAL, and delta. A row without gradient has
 * lse = inf, so that its P is 0. */
template <bool GENERAL> __device__ static float2 facts_of(float lse, float delta)
{
    if (!has_gradient(lse))
        return make_float2(CUDART_INF_F, 0.0f);
    return make_float2(GENERAL ? lse : -min_or_nan(-min_or_nan(lse * LOG2E, 3.4e38f), 3.4e38f), delta);
}

/* From S to P. facts: of query 0 of the lane's. */
template <bool GENERAL, class Tile> __device__ static void weigh(Tile &S, const float2 *facts, float c)
{
#pragma unroll
    for (int r = 0; r < Tile::R; r++) {
        const float lse = facts[S.row(r) - S.row(0)].x;
#pragma unroll
        for (int e = 0; e < Tile::C; e++) /* at most 1: rounding, where S is large, could make it more */
            S.at(r, e) = exp2_fast(min_or_nan(GENERAL ? (S.at(r, e) - lse) * LOG2E : fmaf(S.at(r, e), c, -lse), 0.0f));
    }
    keep_order(__float_as_int(S.at(0, 0)) & INT32_MAX);
}

/* From P and dP to dS, but for the scale. */
template <class Tile> __device__ static void differentiate(Tile &P, Tile &dP, const float2 *facts)
{
#pragma unroll
    for (int r = 0; r < Tile::R; r++) {
        const float delta = facts[P.row(r) - P.row(0)].y;
#pragma unroll
        for (int e = 0; e < Tile::C; e++)
            dP.at(r, e) = P.at(r, e) == 0.0f ? 0.0f : P.at(r, e) * (dP.at(r, e) - delta);
    }
}

/* ---- Delta ------------------------------------------------------------------------------------------------------- */

/* Facts of 64 queries from `row` on, by all threads: eight for each, which have the pieces of dO that they copied. ask()
 * loads what is not in shared memory, and get() is called when dO is. */
template <class T, bool GENERAL> struct gatherer {
    static constexpr int ONCE = SHORT_THREADS / 8, COUNT = 64 / ONCE;
    uint4 o[COUNT];
    float lse[COUNT], given[COUNT]; /* given: delta or d_lse */

    __device__ void ask(const args &a, const span &s, int h, int row)
    {
        const int chunk = threadIdx.x % 8, i0 = row + threadIdx.x / 8;
        const auto load_facts = [&](float(&to)[COUNT], const view &t) {
            const float *const first = (const float *)t.data + row_at(t, s.q_batch, h, s.q_row);
#pragma unroll
            for (int n = 0; n < COUNT; n++)
                to[n] = first[min(i0 + n * ONCE, s.rows - 1) * t.stride[2]];
        };
        load_facts(lse, a.lse);
        if (!a.delta.data) {
            const source from = query_rows<T>(a.o, s, h, s.rows - 1, a.Dv);
            const char *const first = from.first + min(chunk * 16, from.end);
#pragma unroll
            for (int n = 0; n < COUNT; n++)
                o[n] = load_16(row_from(first, min(i0 + n * ONCE, s.rows - 1), from.step));
        }
        if (a.delta.data || a.d_lse.data)
            load_facts(given, a.delta.data ? a.delta : a.d_lse);
    }

    __device__ void get(float2 *facts, const char *d_o, const args &a, const span &s, int row)
    {
        const int r0 = threadIdx.x / 8, chunk = threadIdx.x % 8;
        const char *const at = d_o + r0 * 128 + (chunk ^ r0 % 8) * 16;
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            float delta = given[n];
            if (!a.delta.data) {
                const uint4 g = *(const uint4 *)(at + n * ONCE * 128); /* zeros beyond the last column */
                float sum = 0.0f;
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const float2 x = unpack<T>(word(o[n], w)), y = unpack<T>(word(g, w));
                    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
                }
                if (chunk * 8 >= a.Dv)
                    sum = 0.0f;
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                sum += __shfl_xor_sync(~0u, sum, 4);
                delta = a.d_lse.data ? sum - delta : sum;
            }
            const int i = r0 + n * ONCE;
            if (chunk == 0)
                facts[i] = facts_of<GENERAL>(row + i < s.rows ? lse[n] : CUDART_INF_F, delta);
        }
    }
};

/* ---- A block ----------------------------------------------------------------------------------------------------- */

template <class T, bool GENERAL, bool STEPS>
__device__ static void own_queries(backward_room<T> &room, const args &a, int b, int h, int begin, int tiles, int most)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const span &s = find_span<GENERAL>(room.s, a, b);
    const int end = min(begin + tiles * SHORT_OWN, s.rows);
    if (begin >= end)
        return;
    const head x = head_of(a, s, h);
    const int hk = a.G == 1 ? x.h : x.hk;
    const meeting all = meet<false, STEPS>(a, s, begin, end);
    const int first = round_down(all.first, MEET), last = min(round_up(all.last, MEET), s.keys);
    const source q = query_rows<T>(a.q, s, x.h, s.rows - 1, a.D);
    const source d_o = query_rows<T>(a.d_o, s, x.h, s.rows - 1, a.Dv);
    const source k = key_rows<T>(a, a.k, s, hk, last - 1, a.D);
    const source v = key_rows<T>(a, a.v, s, hk, last - 1, a.Dv);
    wait_for_last(q.first, k.first, v.first);
    char *const K = room.met(0, most), *const V = room.met(1, most);
    copy_both<true>(K, V, k, v, first, round_up(last, MEET) - first);
    const float c = fmaxf(fminf(a.scale * LOG2E, 3e38f), 1.2e-38f);
#pragma unroll 1
    for (int own0 = begin; own0 < end; own0 += SHORT_OWN) {
        const int row = own0 + warp * 16 + lane / 4;
        const meeting see = meet<false, STEPS>(a, s, own0, min(own0 + SHORT_OWN, end));
        if (own0 > begin)
            __syncthreads(); /* all have done with the last tile */
        copy_both(room.own[0], room.own[1], q, d_o, own0, SHORT_OWN);
        commit_copies();
        {
            gatherer<T, GENERAL> g;
            g.ask(a, s, x.h, own0);
            wait_for_tiles();
            g.get(room.facts, room.own[1], a, s, own0);
        }
        __syncthreads();
        float dQ[32];
        int met = 0;
#pragma unroll 1
        for (int n0 = round_down(see.first, MEET); n0 < see.last; n0 += MEET) {
            float S[MEET / 2], dP[MEET / 2];
            query_scores<MEET> t = { S, row, n0 + lane % 4 * 8 }, dt = { dP, row, 0 };
            query_terms<T, MEET> terms;
            if (GENERAL)
                terms.ask(a, s, x, t);
            const uint32_t k_at = shared_address(K) + (n0 - first) * 128, v_at = shared_address(V) + (n0 - first) * 128;
            wgmma_fence();
            multiply_rows<T, 64, SHORT_OWN, MEET>(S, tile_at(shared_address(room.own[0])), tile_at(k_at));
            wgmma_commit();
            multiply_rows<T, 64, SHORT_OWN, MEET>(dP, tile_at(shared_address(room.own[1])), tile_at(v_at));
            wgmma_commit();
            wgmma_wait<1>();
            const bool whole = n0 >= see.inside && n0 + MEET <= see.outside;
            if (GENERAL)
                terms.score(t, a, s, x);
            hide_band<STEPS>(t, a, s, whole);
            weigh<GENERAL>(t, room.facts + (row - own0), c);
            wgmma_wait<0>();
            differentiate(t, dt, room.facts + (row - own0));
            uint32_t dS[MEET / 16][4];
            pack_rows<T, MEET>(dS, dP);
            wgmma_fence();
            multiply_columns<T, 64, MEET>(dQ, dS, tile_at(k_at, MEET * 128), met);
            wgmma_commit();
            met = 1;
        }
        wgmma_wait<0>();
        const int at = own0 + warp * 16;
        const float scale = met ? a.scale : 0.0f;
        store_rows<T>(room.of_warp[warp].out, dQ, scale, scale, a.d_q, row_at(a.d_q, s.q_batch, x.h, s.q_row + at),
                      a.d_q.stride[2], s.rows - at, a.D);
    }
}

/* More than one tile only where a head of keys has one of queries. */
template <class T, bool GENERAL, bool STEPS>
__device__ static void own_keys(backward_room<T> &room, const args &a, int b, int hk, int begin, int tiles, int most)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const span &s = find_span<GENERAL>(room.s, a, b);
    const int end = min(begin + tiles * SHORT_OWN, s.keys);
    if (begin >= end)
        return;
    const meeting all = meet<true, STEPS>(a, s, begin, end);
    const int first = round_down(all.first, MEET), last = min(round_up(all.last, MEET), s.rows);
    const int64_t k_row = s.k_row + a.col;
    const source k = key_rows<T>(a, a.k, s, hk, s.keys - 1, a.D);
    const source v = key_rows<T>(a, a.v, s, hk, s.keys - 1, a.Dv);
    wait_for_last(k.first, v.first, nullptr);
    const float c = fmaxf(fminf(a.scale * LOG2E, 3e38f), 1.2e-38f);
    char *const Q = room.met(0, most), *const dO = room.met(1, most);
    gatherer<T, GENERAL> g;
    int known = first; /* the queries up to which there are facts */
#pragma unroll 1
    for (int own0 = begin; own0 < end; own0 += SHORT_OWN) {
        const meeting see = meet<true, STEPS>(a, s, own0, min(own0 + SHORT_OWN, end));
        if (own0 > begin)
            __syncthreads(); /* all have done with the last tile */
        copy_both(room.own[0], room.own[1], k, v, own0, SHORT_OWN);
        float dK[32], dV[32];
        int met = 0;
#pragma unroll 1
        for (int h = hk * a.G; h < hk * a.G + a.G; h++) {
            const head x = head_of(a, s, h);
            if (own0 == begin) {
                const source q = query_rows<T>(a.q, s, h, last - 1, a.D);
                const source d_o = query_rows<T>(a.d_o, s, h, last - 1, a.Dv);
                __syncthreads(); /* all have done with the head before */
                copy_both(Q, dO, q, d_o, first, round_up(last, MEET) - first);
                known = first;
            }
            commit_copies();
            int i0 = round_down(see.first, MEET);
            if (i0 >= known)
                g.ask(a, s, h, i0);
            wait_for_tiles();
#pragma unroll 1
            for (; i0 < see.last; i0 += MEET) {
                float S[MEET / 2], dP[MEET / 2];
                auto &terms = room.of_warp[warp].terms;
                score_piece asked[4];
                if (GENERAL)
                    terms.ask(asked, a, s, x, i0, own0 + warp * 16);
                const uint32_t q_at = shared_address(Q) + (i0 - first) * 128,
                               d_o_at = shared_address(dO) + (i0 - first) * 128;
                wgmma_fence();
                multiply_rows<T, 64, SHORT_OWN, MEET>(S, tile_at(shared_address(room.own[0])), tile_at(q_at));
                wgmma_commit();
                if (!STEPS) { /* else there are no registers for it now */
                    multiply_rows<T, 64, SHORT_OWN, MEET>(dP, tile_at(shared_address(room.own[1])), tile_at(d_o_at));
                    wgmma_commit();
                }
                if (i0 >= known) {
                    g.get(room.facts + (i0 - first), dO + (i0 - first) * 128, a, s, i0);
                    known = i0 + MEET;
                    if (!GENERAL && known < see.last)
                        g.ask(a, s, h, known);
                    __syncthreads();
                }
                if (GENERAL)
                    terms.put(asked, a);
                wgmma_wait<STEPS ? 0 : 1>();
                key_scores<> t = { S, i0 + lane % 4 * 2, own0 + warp * 16 + lane / 4 }, dt = { dP, t.i0, t.n0 };
                if (GENERAL)
                    terms.score(t, a, s, x);
                hide_band<STEPS>(t, a, s, i0 >= see.inside && i0 + MEET <= see.outside);
                weigh<GENERAL>(t, room.facts + (t.i0 - first), c);
                uint32_t P[MEET / 16][4], dS[MEET / 16][4];
                pack_rows<T, MEET>(P, S);
                if (STEPS) {
                    wgmma_fence();
                    multiply_rows<T, 64, SHORT_OWN, MEET>(dP, tile_at(shared_address(room.own[1])), tile_at(d_o_at));
                    wgmma_commit();
                }
                wgmma_wait<0>();
                wgmma_fence();
                multiply_columns<T, 64, MEET>(dV, P, tile_at(d_o_at, MEET * 128), met);
                wgmma_commit();
                differentiate(t, dt, room.facts + (t.i0 - first));
                pack_rows<T, MEET>(dS, dP);
                wgmma_fence();
                multiply_columns<T, 64, MEET>(dK, dS, tile_at(q_at, MEET * 128), met);
                wgmma_commit();
                wgmma_wait<0>();
                met = 1;
                if (GENERAL && i0 + MEET == known && known < see.last) /* before there are no registers for it */
                    g.ask(a, s, h, known);
            }
        }
        const int at = own0 + warp * 16;
        const float scale = met ? a.scale : 0.0f;
        if (a.d_k.data)
            store_rows<T>(room.of_warp[warp].out, dK, scale, scale, a.d_k,
                          row_at(a.d_k, s.k_batch, hk, k_row + at * a.col_step), a.col_step * a.d_k.stride[2],
                          s.keys - at, a.D);
        __syncwarp();
        if (a.d_v.data)
            store_rows<T>(room.of_warp[warp].out, dV, met, met, a.d_v,
                          row_at(a.d_v, s.k_batch, hk, k_row + at * a.col_step), a.col_step * a.d_v.stride[2],
                          s.keys - at, a.Dv);
    }
}

template <class T, bool GENERAL, bool STEPS>
__global__ void __launch_bounds__(SHORT_THREADS, 2)
    backward_sm90short(const __grid_constant__ args a, const __grid_constant__ short_division by, int most)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(1024) char memory[];
    auto &room = *(backward_room<T> *)memory;
    int b, h;
    const int block = own_block(by, a, b, h);
    let_next_start();
    if (block >= by.k_blocks)
        own_queries<T, GENERAL, STEPS>(room, a, b, h, (block - by.k_blocks) * by.q_tiles * SHORT_OWN, by.q_tiles, most);
    else if (h < a.Hk)
        own_keys<T, GENERAL, STEPS>(room, a, b, h, block * by.k_tiles * SHORT_OWN, by.k_tiles, most);
#endif
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

template <class T> static heed_status run(const args &a, const heed_plan *plan, const heed_exec *x)
{
    const int most = (int)tiles_of(HEED_MAX(keys_of(a), a.Sq), MEET) * MEET;
    dim3 grid;
    const short_division by = divide(a, plan, grid);
    const auto kernel = has_steps(a)    ? backward_sm90short<T, true, true>
                        : is_general(a) ? backward_sm90short<T, true, false>
                                        : backward_sm90short<T, false, false>;
    return launch_early(kernel, grid, dim3(SHORT_THREADS),
                        room_for_one(sizeof(backward_room<T>) + 2 * most * 128, grid, plan), plan, x, a, by, most);
}

size_t heed_backward_workspace_sm90short(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return heed_cuda_others_bytes(p);
}

heed_status heed_backward_sm90short(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    const prologue start(p, x, DELTA_WHERE_NEEDED);
    const args &a = start.a;
    if (start.status)
        return start.status;
    return a.q.dtype == HEED_F16 ? run<__half>(a, plan, x) : run<__nv_bfloat16>(a, plan, x);
}
