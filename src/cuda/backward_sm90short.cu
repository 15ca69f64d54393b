/* Backward for up to 256 rows and keys on Hopper, fp16 and bf16, head sizes to 128: one launch (short_sm90.cuh). Some
 * blocks own queries and make dQ, others own keys and make dK and dV, 64 at a time:
 *
 *     queries   S   = Q K^T   dP   = dO V^T   dQ = scale dS K
 *     keys      S^T = K Q^T   dP^T = V dO^T   dK = scale dS^T Q   dV = P^T dO
 *
 * S and dP are computed twice, and no block waits for another. delta is computed where it is needed, unless the caller
 * brings it. */
#include "short_sm90.cuh"

constexpr int MEET = 64; /* rows that are met at a time */

/* Shared memory, and after it, `most` rows each, what is met: Q and dO, or K and V. Rows are of D columns, in boxes of 64. */
template <class T, int D, bool GENERAL> struct alignas(1024) backward_room {
    static constexpr int BOXES = (D + 63) / 64;
    char own[2][BOXES][SHORT_OWN * 128];
    union {
        char out[16 * 128];
        key_terms<T> terms[GENERAL ? 1 : 0];
    } of_warp[4];
    float2 facts[HEED_SHORT]; /* of the queries: see facts_of() */
    span s;                   /* the same for all: here it takes no registers */

    __device__ char *met(int which, int most) { return (char *)(this + 1) + which * BOXES * most * 128; }
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
template <class T, int D, bool GENERAL> struct gatherer {
    static constexpr int ONCE = SHORT_THREADS / 8, COUNT = 64 / ONCE, BOXES = (D + 63) / 64;
    uint4 o[COUNT][BOXES];
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
#pragma unroll
            for (int n = 0; n < COUNT * BOXES; n++)
                o[n / BOXES][n % BOXES] = load_16(row_from(from.first + min(n % BOXES * 128 + chunk * 16, from.end),
                                                           min(i0 + n / BOXES * ONCE, s.rows - 1), from.step));
        }
        if (a.delta.data || a.d_lse.data)
            load_facts(given, a.delta.data ? a.delta : a.d_lse);
    }

    __device__ void get(float2 *facts, const char *d_o, int box_bytes, const args &a, const span &s, int row)
    {
        const int r0 = threadIdx.x / 8, chunk = threadIdx.x % 8;
        const char *const at = d_o + r0 * 128 + (chunk ^ r0 % 8) * 16;
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            float delta = given[n];
            if (!a.delta.data) {
                float sum = 0.0f;
#pragma unroll
                for (int box = 0; box < BOXES; box++) {
                    const uint4 g = *(const uint4 *)(at + box * box_bytes + n * ONCE * 128);
                    if (box * 64 + chunk * 8 < a.Dv) /* o has nothing beyond */
#pragma unroll
                        for (int w = 0; w < 4; w++) {
                            const float2 x = unpack<T>(word(o[n][box], w)), y = unpack<T>(word(g, w));
                            sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
                        }
                }
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

template <class T, int D, bool GENERAL, bool STEPS>
__device__ static void own_queries(backward_room<T, D, GENERAL> &room, const args &a, int b, int h, int begin,
                                   int tiles, int most)
{
    constexpr int OWN_BOX = SHORT_OWN * 128;
    const int met_box = D > 64 ? most * 128 : OWN_BOX; /* bytes from one box to the next, where there is one */
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
    copy_both<D, true>(K, V, k, v, first, round_up(last, MEET) - first, met_box);
    const float c = fmaxf(fminf(a.scale * LOG2E, 3e38f), 1.2e-38f);
#pragma unroll 1
    for (int own0 = begin; own0 < end; own0 += SHORT_OWN) {
        const int row = own0 + warp * 16 + lane / 4;
        const meeting see = meet<false, STEPS>(a, s, own0, min(own0 + SHORT_OWN, end));
        if (own0 > begin)
            __syncthreads(); /* all have done with the last tile */
        copy_both<D>(room.own[0][0], room.own[1][0], q, d_o, own0, SHORT_OWN, OWN_BOX);
        commit_copies();
        {
            gatherer<T, D, GENERAL> g;
            g.ask(a, s, x.h, own0);
            wait_for_tiles();
            g.get(room.facts, room.own[1][0], OWN_BOX, a, s, own0);
        }
        __syncthreads();
        float dQ[D / 2];
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
            multiply_boxes<T, D, MEET>(S, shared_address(room.own[0]), OWN_BOX, k_at, met_box);
            wgmma_commit();
            multiply_boxes<T, D, MEET>(dP, shared_address(room.own[1]), OWN_BOX, v_at, met_box);
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
            multiply_columns<T, D, MEET>(dQ, dS, tile_at(k_at, met_box), met);
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
template <class T, int D, bool GENERAL, bool STEPS>
__device__ static void own_keys(backward_room<T, D, GENERAL> &room, const args &a, int b, int hk, int begin, int tiles,
                                int most)
{
    constexpr int OWN_BOX = SHORT_OWN * 128;
    const int met_box = D > 64 ? most * 128 : OWN_BOX; /* bytes from one box to the next, where there is one */
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
    gatherer<T, D, GENERAL> g;
    int known = first; /* the queries up to which there are facts */
#pragma unroll 1
    for (int own0 = begin; own0 < end; own0 += SHORT_OWN) {
        const meeting see = meet<true, STEPS>(a, s, own0, min(own0 + SHORT_OWN, end));
        if (own0 > begin)
            __syncthreads(); /* all have done with the last tile */
        copy_both<D>(room.own[0][0], room.own[1][0], k, v, own0, SHORT_OWN, OWN_BOX);
        float dK[D / 2], dV[D / 2];
        int met = 0;
#pragma unroll 1
        for (int h = hk * a.G; h < hk * a.G + a.G; h++) {
            const head x = head_of(a, s, h);
            if (own0 == begin) {
                const source q = query_rows<T>(a.q, s, h, last - 1, a.D);
                const source d_o = query_rows<T>(a.d_o, s, h, last - 1, a.Dv);
                __syncthreads(); /* all have done with the head before */
                copy_both<D>(Q, dO, q, d_o, first, round_up(last, MEET) - first, met_box);
                known = first;
            }
            commit_copies();
            int i0 = round_down(see.first, MEET);
            if (D == 64 && i0 >= known)
                g.ask(a, s, h, i0);
            wait_for_tiles();
            if (D > 64 && own0 == begin) { /* now there are registers for it */
#pragma unroll 1
                for (int i = first; i < last; i += MEET) {
                    g.ask(a, s, h, i);
                    g.get(room.facts + (i - first), dO + (i - first) * 128, met_box, a, s, i);
                }
                __syncthreads();
            }
#pragma unroll 1
            for (; i0 < see.last; i0 += MEET) {
                float S[MEET / 2], dP[MEET / 2];
                auto &terms = room.of_warp[warp].terms[0];
                score_piece asked[4];
                if (GENERAL)
                    terms.ask(asked, a, s, x, i0, own0 + warp * 16);
                const uint32_t q_at = shared_address(Q) + (i0 - first) * 128,
                               d_o_at = shared_address(dO) + (i0 - first) * 128;
                wgmma_fence();
                multiply_boxes<T, D, MEET>(S, shared_address(room.own[0]), OWN_BOX, q_at, met_box);
                wgmma_commit();
                if (!STEPS) { /* else there are no registers for it now */
                    multiply_boxes<T, D, MEET>(dP, shared_address(room.own[1]), OWN_BOX, d_o_at, met_box);
                    wgmma_commit();
                }
                if (D == 64 && i0 >= known) {
                    g.get(room.facts + (i0 - first), dO + (i0 - first) * 128, met_box, a, s, i0);
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
                    multiply_boxes<T, D, MEET>(dP, shared_address(room.own[1]), OWN_BOX, d_o_at, met_box);
                    wgmma_commit();
                }
                wgmma_wait<0>();
                wgmma_fence();
                multiply_columns<T, D, MEET>(dV, P, tile_at(d_o_at, met_box), met);
                wgmma_commit();
                differentiate(t, dt, room.facts + (t.i0 - first));
                pack_rows<T, MEET>(dS, dP);
                wgmma_fence();
                multiply_columns<T, D, MEET>(dK, dS, tile_at(q_at, met_box), met);
                wgmma_commit();
                wgmma_wait<0>();
                met = 1;
                if (GENERAL && D == 64 && i0 + MEET == known &&
                    known < see.last) /* before there are no registers for it */
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

template <class T, int D, bool GENERAL, bool STEPS>
__global__ void __launch_bounds__(SHORT_THREADS, 2)
    backward_sm90short(const __grid_constant__ args a, const __grid_constant__ short_division by, int most)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(1024) char memory[];
    auto &room = *(backward_room<T, D, GENERAL> *)memory;
    int b, h;
    const int block = own_block(by, a, b, h);
    let_next_start();
    if (block >= by.k_blocks)
        own_queries<T, D, GENERAL, STEPS>(room, a, b, h, (block - by.k_blocks) * by.q_tiles * SHORT_OWN, by.q_tiles,
                                          most);
    else if (h < a.Hk)
        own_keys<T, D, GENERAL, STEPS>(room, a, b, h, block * by.k_tiles * SHORT_OWN, by.k_tiles, most);
#endif
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

template <class T, int D> static heed_status run(const args &a, const heed_plan *plan, const heed_exec *x)
{
    constexpr bool ALL = D == 64; /* else the planner sends nothing but scale and band */
    typedef backward_room<T, D, false> plain_room;
    typedef backward_room<T, D, ALL> general_room;
    const int most = (int)tiles_of(HEED_MAX(keys_of(a), a.Sq), MEET) * MEET;
    dim3 grid;
    const short_division by = divide(a, plan, grid);
    const auto kernel = has_steps(a)    ? backward_sm90short<T, D, ALL, ALL>
                        : is_general(a) ? backward_sm90short<T, D, ALL, false>
                                        : backward_sm90short<T, D, false, false>;
    const size_t bytes = (is_general(a) ? sizeof(general_room) : sizeof(plain_room)) +
                         2 * plain_room::BOXES * most * 128;
    return launch_early(kernel, grid, dim3(SHORT_THREADS), room_for_one(bytes, grid, plan), plan, x, a, by, most);
}

template <class T> static heed_status run(const args &a, const heed_plan *plan, const heed_exec *x)
{
    const int width = HEED_MAX(a.D, a.Dv);
    return width <= 64 ? run<T, 64>(a, plan, x) : width <= 96 ? run<T, 96>(a, plan, x) : run<T, 128>(a, plan, x);
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
