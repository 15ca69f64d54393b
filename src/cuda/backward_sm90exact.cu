/* Backward for up to 256 rows and keys on Hopper, fp32, head sizes to 64 (exact_sm90.cuh): one launch, in which blocks own 64
 * queries or 64 keys and meet 64 of the others at a time, as in backward_sm90short.cu. Sums of each 64 are made anew and
 * added in fp32. Where all own rows or all that are met turn out to be tiny, everything is done again with these times 2^60. */
#include "exact_sm90.cuh"

enum { OWN_X = 1, OWN_Y = 2, MET_X = 4, MET_Y = 8 }; /* kinds of tiles. X: Q or K, Y: dO or V */

struct alignas(1024) exact_room {
    exact_tile own[2], met[2];    /* Q and dO, or K and V */
    float4 d_v[8][SHORT_THREADS]; /* sums so far, of each thread its own: there are no registers for them */
    float2 lse[64];               /* of the queries: a weight_of_row, or lse where GENERAL */
    float delta[64];
    uint32_t seen[4]; /* traits of what each warp has loaded */
    uint32_t tiny;    /* kinds of tiles that are in units of TINY, if it is done again */
    span s;           /* the same for all: here they take no registers */
    meeting m;
};

/* ---- Tiny numbers ------------------------------------------------------------------------------------------------ */

/* Of a tile of that kind: that bit where some are not zero, and the one four further up where some are not tiny. A thread's
 * first row mostly says it all. */
__device__ static uint32_t traits(const exact_rows<4> &x, uint32_t kind)
{
    uint32_t bits = 0;
#pragma unroll
    for (int e = 0; e < 8; e++)
        bits |= __float_as_uint(x.x[0][e]);
    if (is_tiny(bits))
        bits = x.bits();
    return (bits << 1 ? kind : 0u) | (is_tiny(bits) ? 0u : kind << 4);
}

/* seen: traits of all tiles that this thread has had a share in. Whether nothing is to be done again: else all tiles of some
 * kind were tiny, and not all zero. */
__device__ static bool is_done(exact_room &room, uint32_t seen)
{
    seen = __reduce_or_sync(~0u, seen);
    if (threadIdx.x % 32 == 0)
        room.seen[threadIdx.x / 32] = seen;
    __syncthreads();
    seen = room.seen[0] | room.seen[1] | room.seen[2] | room.seen[3];
    const uint32_t tiny = seen & ~(seen >> 4) & 15;
    if (threadIdx.x == 0)
        room.tiny = tiny;
    return tiny == 0;
}

/* A unit of tiles of that kind, or of products of several kinds: `of` as bits. */
template <bool AGAIN> __device__ static float unit_of(const exact_room &room, uint32_t of, float tiny = TINY)
{
    float unit = 1.0f;
    if (AGAIN)
#pragma unroll
        for (uint32_t kind = 1; kind <= MET_Y; kind *= 2)
            unit *= of & kind && room.tiny & kind ? tiny : 1.0f;
    return unit;
}

/* ---- Queries on their way ---------------------------------------------------------------------------------------- */

/* Facts of 64 queries from `row` on, by the threads that have their dO, of which a unit is 1 or TINY: eight for each. */
template <bool GENERAL>
__device__ static void find_facts(exact_room &room, const exact_rows<4> &d_o, const args &a, const span &s, int h,
                                  int row, float unit)
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
            delta[n] = fmaf(sum[0], unit, delta[n]);
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

/* From P and dP to dS, but for the scale. per_one: so many units of dP are 1, which is a power of two. */
template <class Tile> __device__ static void differentiate(Tile &P, Tile &dP, const float *delta, float per_one)
{
#pragma unroll
    for (int r = 0; r < Tile::R; r += 2) {
        float d[2];
        get_two(d, P, delta, r);
#pragma unroll
        for (int e = 0; e < 2 * Tile::C; e++) {
            const float p = P.at(r + e % 2, e / 2);
            float &x = dP.at(r + e % 2, e / 2);
            x = p == 0.0f ? 0.0f : p * fmaf(-d[e % 2], per_one, whole_sum(x));
        }
    }
}

/* ---- Results ----------------------------------------------------------------------------------------------------- */

/* T = P B is under way, and Y += T when it is there, of so many units. */
__device__ static void start_product(float (&T)[32], const left_exact &P, const exact_tile &B)
{
    multiply_exact(T, P, B);
}
__device__ static void finish_product(float (&Y)[32], const float (&T)[32], float unit)
{
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 32; i++)
        Y[i] = fmaf(whole_sum(T[i]), unit, Y[i]);
}
__device__ static void finish_product(float4 (&Y)[8][SHORT_THREADS], const float (&T)[32], float unit, bool first)
{
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float4 &at = Y[n][threadIdx.x], y = first ? make_float4(0, 0, 0, 0) : at;
        y.x = fmaf(whole_sum(T[4 * n]), unit, y.x), y.y = fmaf(whole_sum(T[4 * n + 1]), unit, y.y);
        y.z = fmaf(whole_sum(T[4 * n + 2]), unit, y.z), y.w = fmaf(whole_sum(T[4 * n + 3]), unit, y.w);
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

/* Whether it is done. AGAIN: if it was not, with the units that the first time has found. GENERAL is always done: there are no
 * registers for more. */
template <bool GENERAL, bool KEYS, bool AGAIN>
__device__ static bool own_rows(exact_room &room, const args &a, int b, int own_h, int own0)
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
        return true;
    const int met_first = round_down(m.first, 64);
    const source k = key_rows<float>(a, a.k, s, hk, (KEYS ? s.keys : m.last) - 1, a.D);
    const source v = key_rows<float>(a, a.v, s, hk, (KEYS ? s.keys : m.last) - 1, a.Dv);
    const auto queries = [&](const view &t, int h, int width) {
        return query_rows<float>(t, s, h, (KEYS ? m.last : s.rows) - 1, width);
    };
    const int first_h = KEYS ? own_h * a.G : own_h, last_h = first_h + (KEYS ? a.G : 1) - 1;
    wait_for_last(k.first, v.first, queries(a.q, first_h, a.D).first);
    const bool some = met_first < m.last;
    const float c = fmaxf(fminf(a.scale * LOG2E, 3e38f), 1.2e-38f);
    float sum[32]; /* dQ or dK */
    int h = first_h, met0 = met_first;
    exact_rows<4> x, y;
    const auto ask = [&] { x.load(KEYS ? queries(a.q, h, a.D) : k, met0, threadIdx.x); };
    uint32_t seen = 0;
    const auto put = [&](exact_rows<4> &rows, exact_tile &to, uint32_t kind) {
        if (!AGAIN && !GENERAL)
            seen |= traits(rows, kind);
        if (AGAIN && room.tiny & kind)
            rows.multiply(1 / TINY);
        rows.put(to, threadIdx.x);
    };
    if (some) {
        x.load(KEYS ? k : queries(a.q, own_h, a.D), own0, threadIdx.x);
        y.load(KEYS ? v : queries(a.d_o, own_h, a.Dv), own0, threadIdx.x);
        put(x, room.own[0], OWN_X), put(y, room.own[1], OWN_Y);
        if (!KEYS)
            find_facts<GENERAL>(room, y, a, s, own_h, own0, unit_of<AGAIN>(room, OWN_Y));
        if (!GENERAL)
            ask();
    }
#pragma unroll
    for (int i = 0; i < 32; i++)
        sum[i] = 0.0f;
#pragma unroll 1
    for (bool more = some; more;) {
        if (GENERAL)
            ask();
        y.load(KEYS ? queries(a.d_o, h, a.Dv) : v, met0, threadIdx.x);
        __syncthreads(); /* all have done with what was met before */
        put(x, room.met[0], MET_X), put(y, room.met[1], MET_Y);
        if (KEYS)
            find_facts<GENERAL>(room, y, a, s, h, met0, unit_of<AGAIN>(room, MET_Y));
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
        if (AGAIN)
#pragma unroll
            for (int i = 0; i < 32; i++)
                S[i] *= unit_of<AGAIN>(room, OWN_X | MET_X);
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
        differentiate(t, dt, room.delta + query, unit_of<AGAIN>(room, OWN_Y | MET_Y, 1 / TINY));
        if (KEYS) {
            const left_exact P(S);
            start_product(S, P, room.met[1]); /* dV += P^T dO */
            finish_product(room.d_v, S, unit_of<AGAIN>(room, MET_Y), h == first_h && met0 == met_first);
        }
        const left_exact dS(dP);
        start_product(S, dS, room.met[0]); /* dQ += dS K, dK += dS^T Q */
        if ((met0 += 64) >= m.last)
            met0 = met_first, h++;
        more = h <= last_h;
        if (!GENERAL && more) /* while there are registers for it */
            ask();
        finish_product(sum, S, unit_of<AGAIN>(room, OWN_Y | MET_Y | MET_X));
    }
    const int at = own0 + warp * 16;
    if (!KEYS) {
        store_exact(sum, a.scale, a.d_q, row_at(a.d_q, s.q_batch, own_h, s.q_row + at), a.d_q.stride[2], s.rows - at,
                    a.D);
        return AGAIN || GENERAL || is_done(room, seen);
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
    return AGAIN || GENERAL || is_done(room, seen);
}

template <bool GENERAL, bool KEYS>
__device__ static void own_tile(exact_room &room, const args &a, int b, int own_h, int own0)
{
    if (!own_rows<GENERAL, KEYS, false>(room, a, b, own_h, own0))
        own_rows<false, KEYS, true>(room, a, b, own_h, own0);
}

template <bool GENERAL>
__global__ void __launch_bounds__(SHORT_THREADS, 2)
    backward_sm90exact(const __grid_constant__ args a, const __grid_constant__ short_division by)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(1024) char memory[];
    auto &room = *(exact_room *)memory;
    int b, h;
    const int block = own_block(by, a, b, h);
    let_next_start();
    if (block >= by.k_blocks)
        own_tile<GENERAL, false>(room, a, b, h, (block - by.k_blocks) * SHORT_OWN);
    else if (h < a.Hk)
        own_tile<GENERAL, true>(room, a, b, h, block * SHORT_OWN);
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
    dim3 grid;
    const short_division by = divide(a, true, plan, grid);
    return launch_early(is_general(a) ? backward_sm90exact<true> : backward_sm90exact<false>, grid, dim3(SHORT_THREADS),
                        room_for_one(sizeof(exact_room), grid, plan), plan, x, a, by);
}
