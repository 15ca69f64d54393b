/* Backward for up to 256 rows and keys on Hopper, fp32, head sizes to 64 (exact_sm90.cuh): one launch, in which blocks own 64
 * queries or 64 keys and meet 64 of the others at a time, as in backward_sm90short.cu. Sums of each 64 are made anew and
 * added in fp32. */
#include "exact_sm90.cuh"

struct alignas(1024) exact_room {
    exact_tile own[2], met[2];    /* Q and dO, or K and V */
    float4 d_v[8][SHORT_THREADS]; /* sums so far, of each thread its own: there are no registers for them */
    float2 lse[64];               /* of the queries: a weight_of_row, or lse where GENERAL */
    float delta[64];
    span s; /* the same for all: here they take no registers */
    meeting m;
};

/* ---- Queries on their way ---------------------------------------------------------------------------------------- */

/* Facts of 64 queries from `row` on, by the threads that have their dO: eight for each. */
template <bool GENERAL>
__device__ static void find_facts(exact_room &room, const exact_rows<4> &d_o, const args &a, const span &s, int h,
                                  int row)
{
    exact_rows<4> o;
    float lse[4], delta[4];
    const auto fact = [&](const view &t, int i) {
        return ((const float *)t.data)[row_at(t, s.q_batch, h, s.q_row + i)];
    };
    if (!a.delta.data)
        o.load(query_rows<float>(a.o, s, h, s.rows - 1, a.Dv), row, threadIdx.x);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int i = min(row + (int)threadIdx.x / 8 + n * 16, s.rows - 1);
        lse[n] = fact(a.lse, i);
        delta[n] = a.delta.data ? fact(a.delta, i) : a.d_lse.data ? -fact(a.d_lse, i) : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        if (!a.delta.data) {
            float sum[2] = {};
#pragma unroll
            for (int e = 0; e < 8; e++)
                sum[e % 2] = fmaf(o.x[n][e], d_o.x[n][e], sum[e % 2]);
            sum[0] += sum[1];
#pragma unroll
            for (int lanes = 1; lanes < 8; lanes *= 2)
                sum[0] += __shfl_xor_sync(~0u, sum[0], lanes);
            delta[n] += sum[0];
        }
        const int i = threadIdx.x / 8 + n * 16;
        if (threadIdx.x % 8 == 0) {
            const bool some = row + i < s.rows && has_gradient(lse[n]);
            const weight_of_row w(lse[n]);
            room.lse[i] = !some     ? make_float2(CUDART_INF_F, 0.0f)
                          : GENERAL ? make_float2(lse[n], 0.0f)
                                    : make_float2(w.log2, w.rest);
            room.delta[i] = some ? delta[n] : 0.0f;
        }
    }
}

/* ---- Scores ------------------------------------------------------------------------------------------------------ */

/* A number of rows r and r + 1, which are neighbours in a tile of keys. of: that of row 0. */
template <class Tile, class T> __device__ static void get_two(T (&x)[2], const Tile &t, const T *of, int r)
{
    struct alignas(2 * sizeof(T)) both {
        T x[2];
    };
    if (t.row(1) == t.row(0) + 1) {
        const both y = *(const both *)(of + (t.row(r) - t.row(0)));
        x[0] = y.x[0], x[1] = y.x[1];
    } else
        x[0] = of[0], x[1] = of[t.row(1) - t.row(0)];
}

/* From S to P. lse: of the lane's first query. */
template <bool GENERAL, class Tile> __device__ static void weigh(Tile &S, const float2 *lse, float c)
{
#pragma unroll
    for (int r = 0; r < Tile::R; r += 2) {
        float2 w[2];
        get_two(w, S, lse, r);
#pragma unroll
        for (int e = 0; e < 2 * Tile::C; e++) { /* at most 1: rounding, where S is large, could make it more */
            float &x = S.at(r + e % 2, e / 2);
            const float power = GENERAL ? (x - w[e % 2].x) * LOG2E : fmaf(x, c, -w[e % 2].x) - w[e % 2].y;
            x = exp2_fast(min_or_nan(power, 0.0f));
        }
    }
}

/* From P and dP to dS, but for the scale. */
template <class Tile> __device__ static void differentiate(Tile &P, Tile &dP, const float *delta)
{
#pragma unroll
    for (int r = 0; r < Tile::R; r += 2) {
        float d[2];
        get_two(d, P, delta, r);
#pragma unroll
        for (int e = 0; e < 2 * Tile::C; e++) {
            const float p = P.at(r + e % 2, e / 2);
            float &x = dP.at(r + e % 2, e / 2);
            x = p == 0.0f ? 0.0f : p * (whole_sum(x) - d[e % 2]);
        }
    }
}

/* ---- Results ----------------------------------------------------------------------------------------------------- */

/* T = P B is under way, and Y += T when it is there. */
__device__ static void start_product(float (&T)[32], const left_exact &P, const exact_tile &B)
{
    multiply_exact(T, P, B);
}
__device__ static void finish_product(float (&Y)[32], const float (&T)[32])
{
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 32; i++)
        Y[i] += whole_sum(T[i]);
}
__device__ static void finish_product(float4 (&Y)[8][SHORT_THREADS], const float (&T)[32], bool first)
{
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float4 &at = Y[n][threadIdx.x], y = first ? make_float4(0, 0, 0, 0) : at;
        y.x += whole_sum(T[4 * n]), y.y += whole_sum(T[4 * n + 1]);
        y.z += whole_sum(T[4 * n + 2]), y.w += whole_sum(T[4 * n + 3]);
        at = y;
    }
}

__device__ static void store_exact(const float (&Y)[32], float scale, const view &t, int64_t at, int64_t step, int rows,
                                   int width)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (lane / 4 + 8 * r < rows) {
            float *const y = (float *)t.data + at + (lane / 4 + 8 * r) * step + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < 8; n++)
                if (n * 8 + lane % 4 * 2 < width)
                    *(float2 *)(y + n * 8) = make_float2(Y[4 * n + 2 * r] * scale, Y[4 * n + 2 * r + 1] * scale);
        }
}

/* ---- A block ----------------------------------------------------------------------------------------------------- */

template <bool KEYS> struct scores_of {
    typedef query_scores<64, true> type;
};
template <> struct scores_of<true> {
    typedef key_scores<true> type;
};

template <bool GENERAL, bool KEYS>
__device__ static void own_rows(exact_room &room, const args &a, int b, int own_h, int own0)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int hk = KEYS || a.G == 1 ? own_h : own_h / a.G;
    if (GENERAL || is_ragged(a))
        wait_for_last();
    if (threadIdx.x == 0) {
        const span s = span_of(a, b);
        room.s = s;
        room.m = meet<KEYS, GENERAL>(a, s, own0, min(own0 + SHORT_OWN, KEYS ? s.keys : s.rows));
    }
    __syncthreads();
    const span &s = room.s;
    const meeting &m = room.m;
    if (own0 >= (KEYS ? s.keys : s.rows))
        return;
    const int met_first = round_down(m.first, 64);
    const source k = key_rows<float>(a, a.k, s, hk, (KEYS ? s.keys : m.last) - 1, a.D);
    const source v = key_rows<float>(a, a.v, s, hk, (KEYS ? s.keys : m.last) - 1, a.Dv);
    const auto queries = [&](const view &t, int h, int width) {
        return query_rows<float>(t, s, h, (KEYS ? m.last : s.rows) - 1, width);
    };
    const int first_h = KEYS ? own_h * a.G : own_h, last_h = first_h + (KEYS ? a.G : 1) - 1;
    wait_for_last(k.first, v.first, queries(a.q, first_h, a.D).first);
    int h = first_h, met0 = met_first;
    const bool some = met_first < m.last;
    exact_rows<4> x, y;
    const auto ask = [&] { x.load(KEYS ? queries(a.q, h, a.D) : k, met0, threadIdx.x); };
    if (some) {
        x.load(KEYS ? k : queries(a.q, own_h, a.D), own0, threadIdx.x);
        y.load(KEYS ? v : queries(a.d_o, own_h, a.Dv), own0, threadIdx.x);
        x.put(room.own[0], threadIdx.x);
        y.put(room.own[1], threadIdx.x);
        if (!KEYS)
            find_facts<GENERAL>(room, y, a, s, own_h, own0);
        if (!GENERAL)
            ask();
    }
    const float c = fmaxf(fminf(a.scale * LOG2E, 3e38f), 1.2e-38f);
    float sum[32]; /* dQ or dK */
#pragma unroll
    for (int i = 0; i < 32; i++)
        sum[i] = 0.0f;
#pragma unroll 1
    for (bool more = some; more;) {
        if (GENERAL)
            ask();
        y.load(KEYS ? queries(a.d_o, h, a.Dv) : v, met0, threadIdx.x);
        __syncthreads(); /* all have done with what was met before */
        x.put(room.met[0], threadIdx.x);
        y.put(room.met[1], threadIdx.x);
        if (KEYS)
            find_facts<GENERAL>(room, y, a, s, h, met0);
        fence_async();
        __syncthreads();
        float S[32], dP[32];
        multiply_exact<KEYS, PRODUCTS>(S, room.own[0], room.met[0]);
        if (GENERAL) /* there are no registers for dP now */
            wgmma_wait<0>();
        else {
            multiply_exact<KEYS, PRODUCTS>(dP, room.own[1], room.met[1]);
            wgmma_wait<PRODUCTS>();
        }
#pragma unroll
        for (int i = 0; i < 32; i++)
            S[i] = whole_sum(S[i]);
        const bool whole = met0 >= m.inside && met0 + 64 <= m.outside;
        const head of = head_of(a, s, h);
        const int own_row = own0 + warp * 16 + lane / 4, met_row = met0 + lane % 4 * 2;
        typename scores_of<KEYS>::type t = { S, KEYS ? met_row : own_row, KEYS ? own_row : met_row },
                                       dt = { dP, t.i0, t.n0 };
        const int query = t.i0 - (KEYS ? met0 : own0);
        find_scores<GENERAL>(t, a, s, of, whole);
        weigh<GENERAL>(t, room.lse + query, c);
        if (GENERAL)
            multiply_exact<KEYS, PRODUCTS>(dP, room.own[1], room.met[1]);
        else
            keep_order(__float_as_int(S[0]) & INT32_MAX);
        wgmma_wait<0>();
        differentiate(t, dt, room.delta + query);
        if (KEYS) {
            const left_exact P(S);
            start_product(S, P, room.met[1]); /* dV += P^T dO */
            finish_product(room.d_v, S, h == first_h && met0 == met_first);
        }
        const left_exact dS(dP);
        start_product(S, dS, room.met[0]); /* dQ += dS K, dK += dS^T Q */
        if ((met0 += 64) >= m.last)
            met0 = met_first, h++;
        more = h <= last_h;
        if (!GENERAL && more) /* while there are registers for it */
            ask();
        finish_product(sum, S);
    }
    const int at = own0 + warp * 16;
    if (!KEYS) {
        store_exact(sum, a.scale, a.d_q, row_at(a.d_q, s.q_batch, own_h, s.q_row + at), a.d_q.stride[2], s.rows - at,
                    a.D);
        return;
    }
    const int64_t row = s.k_row + a.col + at * a.col_step;
    if (a.d_k.data)
        store_exact(sum, a.scale, a.d_k, row_at(a.d_k, s.k_batch, own_h, row), a.col_step * a.d_k.stride[2],
                    s.keys - at, a.D);
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float4 y = some ? room.d_v[n][threadIdx.x] : make_float4(0, 0, 0, 0);
        sum[4 * n] = y.x, sum[4 * n + 1] = y.y, sum[4 * n + 2] = y.z, sum[4 * n + 3] = y.w;
    }
    if (a.d_v.data)
        store_exact(sum, 1.0f, a.d_v, row_at(a.d_v, s.k_batch, own_h, row), a.col_step * a.d_v.stride[2], s.keys - at,
                    a.Dv);
}

/* The first k_blocks, which have more to do, own keys. */
template <bool GENERAL>
__global__ void __launch_bounds__(SHORT_THREADS, 2)
    backward_sm90exact(const __grid_constant__ args a, int k_blocks, bool blocks_last)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(1024) char memory[];
    auto &room = *(exact_room *)memory;
    const int block = blocks_last ? blockIdx.z : blockIdx.y, x = blockIdx.x, y = blocks_last ? blockIdx.y : blockIdx.z;
    const int b = a.B >= a.Hq ? x : y, h = a.B >= a.Hq ? y : x; /* as in grid_of() */
    let_next_start();
    if (block >= k_blocks)
        own_rows<GENERAL, false>(room, a, b, h, (block - k_blocks) * SHORT_OWN);
    else if (h < a.Hk)
        own_rows<GENERAL, true>(room, a, b, h, block * SHORT_OWN);
#endif
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

size_t heed_backward_workspace_sm90exact(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return heed_cuda_others_bytes(p);
}

heed_status heed_backward_sm90exact(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    static_assert(2 * sizeof(exact_room) <= 226 * 1024, "shared memory of two blocks");
    const prologue start(p, x, DELTA_WHERE_NEEDED);
    const args &a = start.a;
    if (start.status)
        return start.status;
    const int q_blocks = a.d_q.data ? (int)tiles_of(a.Sq, SHORT_OWN) : 0,
              k_blocks = a.d_k.data || a.d_v.data ? (int)tiles_of(keys_of(a), SHORT_OWN) : 0;
    const bool few = (int64_t)a.B * a.Hq * (k_blocks + q_blocks) <= 2 * plan->device.units;
    dim3 grid = grid_of(a, k_blocks + q_blocks);
    if (few) /* each multiprocessor gets some of both kinds */
        grid = dim3(grid.x, grid.z, grid.y);
    return launch_early(is_general(a) ? backward_sm90exact<true> : backward_sm90exact<false>, grid, dim3(SHORT_THREADS),
                        room_for_one(sizeof(exact_room), grid, plan), plan, x, a, k_blocks, few);
}
