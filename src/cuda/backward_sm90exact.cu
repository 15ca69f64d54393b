/* Backward for few rows and keys on Hopper, fp32 (exact_sm90.cuh): up to 256 with head sizes to 64, up to 192 with head sizes to
 * 128. One launch, in which blocks own 64 queries or 64 keys and meet 64 of the others at a time, as in backward_sm90short.cu;
 * with head sizes above 64 a block has two warpgroups, each of which finds all scores but makes 64 columns of the results. Sums
 * of each 64 are made anew and added in fp32. Where all own rows or all that are met turn out to be tiny, everything is done
 * again with these times 2^60. */
#include "exact_sm90.cuh"

enum { OWN_X = 1, OWN_Y = 2, MET_X = 4, MET_Y = 8 }; /* kinds of tiles. X: Q or K, Y: dO or V */

template <int TILES> struct alignas(1024) exact_room {
    exact_tile own[2][TILES], met[2][TILES]; /* Q and dO, or K and V */
    float4 d_v[8][SHORT_THREADS * TILES];    /* sums so far, of each thread its own: there are no registers for them */
    float2 lse[64];                          /* of the queries: a weight_of_row, or lse where GENERAL */
    float delta[TILES][64];                  /* to be added up */
    uint32_t seen[4 * TILES];                /* traits of what each warp has loaded */
    uint32_t tiny;                           /* kinds of tiles that are in units of TINY, if it is done again */
    span s;                                  /* the same for all: here they take no registers */
    meeting m;
};

/* ---- Tiny numbers ------------------------------------------------------------------------------------------------ */

/* Of a tile of that kind: that bit where some are not zero, and the one four further up where some are not tiny. */
__device__ static uint32_t traits(const exact_rows<4> &x, uint32_t kind)
{
    const uint32_t bits = x.bits();
    return (bits << 1 ? kind : 0u) | (is_tiny(bits) ? 0u : kind << 4);
}

/* Whether nothing is to be done again: else all tiles of some kind were tiny, and not all zero. */
template <int TILES> __device__ static bool is_done(exact_room<TILES> &room)
{
    uint32_t seen = 0;
#pragma unroll
    for (int warp = 0; warp < 4 * TILES; warp++)
        seen |= room.seen[warp];
    const uint32_t tiny = seen & ~(seen >> 4) & 15;
    if (tiny == 0)
        return true;
    __syncthreads(); /* all know, and have done with what lies there */
    if (threadIdx.x == 0)
        room.tiny = tiny;
    return false;
}

/* A unit of tiles of that kind, or of products of several kinds: `of` as bits. */
template <bool AGAIN, class Room> __device__ static float unit_of(const Room &room, uint32_t of, float tiny = TINY)
{
    float unit = 1.0f;
    if (AGAIN)
#pragma unroll
        for (uint32_t kind = 1; kind <= MET_Y; kind *= 2)
            unit *= of & kind && room.tiny & kind ? tiny : 1.0f;
    return unit;
}

/* ---- Queries on their way ---------------------------------------------------------------------------------------- */

/* The tile that this thread loads, and whose columns of the results it makes. */
template <int TILES> __device__ static int own_tile()
{
    return TILES == 1 ? 0 : __shfl_sync(~0u, threadIdx.x / SHORT_THREADS, 0);
}

/* Facts of 64 queries from `row` on, by the threads that have their dO: eight for each, of each tile. ask() loads what get()
 * makes them of. */
template <bool GENERAL, int TILES> struct gatherer {
    exact_rows<4> o;
    float lse[4], given[4]; /* delta or d_lse */

    __device__ void ask(const args &a, const span &s, int h, int row)
    {
        const int i0 = row + threadIdx.x % SHORT_THREADS / 8;
        const auto load_facts = [&](float(&to)[4], const view &t) {
            const float *const first = (const float *)t.data + row_at(t, s.q_batch, h, s.q_row);
#pragma unroll
            for (int n = 0; n < 4; n++)
                to[n] = first[min(i0 + n * 16, s.rows - 1) * t.stride[2]];
        };
        if (!a.delta.data)
            o.load(query_rows<float>(a.o, s, h, s.rows - 1, a.Dv), own_tile<TILES>(), row, threadIdx.x % SHORT_THREADS);
        load_facts(lse, a.lse);
        if (a.delta.data || a.d_lse.data)
            load_facts(given, a.delta.data ? a.delta : a.d_lse);
    }

    /* unit: of dO, 1 or TINY. */
    __device__ void get(exact_room<TILES> &room, const exact_rows<4> &d_o, const args &a, const span &s, int row,
                        float unit)
    {
        const int thread = threadIdx.x % SHORT_THREADS, tile = own_tile<TILES>();
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float delta = given[n];
            if (!a.delta.data) {
                float sum[2] = {};
#pragma unroll
                for (int e = 0; e < 8; e++)
                    sum[e % 2] = fmaf(o.x[n][e], d_o.x[n][e], sum[e % 2]);
                sum[0] += sum[1];
#pragma unroll
                for (int lanes = 1; lanes < 8; lanes *= 2)
                    sum[0] += __shfl_xor_sync(~0u, sum[0], lanes);
                delta = fmaf(sum[0], unit, a.d_lse.data && !tile ? -delta : 0.0f);
            } else if (tile)
                delta = 0.0f;
            const int i = thread / 8 + n * 16;
            if (thread % 8 == 0) {
                const bool some = row + i < s.rows && has_gradient(lse[n]);
                const weight_of_row w(lse[n]);
                if (!tile)
                    room.lse[i] = !some     ? make_float2(CUDART_INF_F, 0.0f)
                                  : GENERAL ? make_float2(lse[n], 0.0f)
                                            : make_float2(w.log2, w.rest);
                room.delta[tile][i] = some ? delta : 0.0f;
            }
        }
    }
};

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

/* From P and dP to dS, but for the scale. delta: of the lane's first query. per_one: so many units of dP are 1, which is a power
 * of two. */
template <int TILES, class Tile>
__device__ static void differentiate(Tile &P, Tile &dP, const float *delta, float per_one)
{
#pragma unroll
    for (int r = 0; r < Tile::R; r += 2) {
        float d[2];
        get_two(d, P, delta, r);
        if (TILES == 2) {
            float rest[2];
            get_two(rest, P, delta + 64, r);
            d[0] += rest[0], d[1] += rest[1];
        }
#pragma unroll
        for (int e = 0; e < 2 * Tile::C; e++) {
            const float p = P.at(r + e % 2, e / 2);
            float &x = dP.at(r + e % 2, e / 2);
            x = p == 0.0f ? 0.0f : p * fmaf(-d[e % 2], per_one, whole_sum<TILES>(x));
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
template <int THREADS>
__device__ static void finish_product(float4 (&Y)[8][THREADS], const float (&T)[32], float unit, bool first)
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
template <int TILES, bool GENERAL, bool KEYS, bool AGAIN>
__device__ static bool own_rows(exact_room<TILES> &room, const args &a, int b, int own_h, int own0)
{
    const int thread = threadIdx.x % SHORT_THREADS, lane = thread % 32, warp = thread / 32;
    const int tile = own_tile<TILES>();
    const int hk = KEYS || a.G == 1 ? own_h : own_h / a.G;
    wait_where_needed<GENERAL>(a);
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
    gatherer<GENERAL, TILES> facts;
    const auto ask = [&] { x.load(KEYS ? queries(a.q, h, a.D) : k, tile, met0, thread); };
    constexpr bool AHEAD = !GENERAL &&
                           !AGAIN; /* x of the next tile is on its way: else there are no registers for it */
    const auto at_tile = [&] {
        return TILES == 1 ? 0 : now(tile);
    }; /* else its addresses are kept, in too many registers */
    uint32_t seen = 0;
    const auto put = [&](exact_rows<4> &rows, exact_tile &to, uint32_t kind) {
        if (!AGAIN && !GENERAL)
            seen |= traits(rows, kind);
        if (AGAIN && room.tiny & kind)
            rows.multiply(1 / TINY);
        rows.put(to, thread);
    };
    if (some) {
        exact_rows<4> own_x, own_y;
        own_x.load(KEYS ? k : queries(a.q, own_h, a.D), tile, own0, thread);
        own_y.load(KEYS ? v : queries(a.d_o, own_h, a.Dv), tile, own0, thread);
        if (!KEYS)
            facts.ask(a, s, own_h, own0);
        if (AHEAD)
            ask();
        put(own_x, room.own[0][tile], OWN_X), put(own_y, room.own[1][tile], OWN_Y);
        if (!KEYS)
            facts.get(room, own_y, a, s, own0, unit_of<AGAIN>(room, OWN_Y));
    }
#pragma unroll
    for (int i = 0; i < 32; i++)
        sum[i] = 0.0f;
#pragma unroll 1
    for (bool more = some; more;) {
        if (!AHEAD)
            ask();
        y.load(KEYS ? queries(a.d_o, h, a.Dv) : v, tile, met0, thread);
        if (KEYS)
            facts.ask(a, s, h, met0);
        __syncthreads(); /* all have done with what was met before */
        put(x, room.met[0][tile], MET_X), put(y, room.met[1][tile], MET_Y);
        if (KEYS)
            facts.get(room, y, a, s, met0, unit_of<AGAIN>(room, MET_Y));
        if (!AGAIN && !GENERAL) {
            const uint32_t all = __reduce_or_sync(~0u, seen);
            if (lane == 0)
                room.seen[threadIdx.x / 32] = all;
        }
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
            S[i] = whole_sum<TILES>(S[i]);
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
        if (GENERAL)
            score_exact(t, a, s, of);
        hide_band<GENERAL>(t, a, s, whole);
        weigh<GENERAL>(t, room.lse + query, c);
        if (GENERAL)
            multiply_exact<KEYS, PRODUCTS>(dP, room.own[1], room.met[1]);
        else
            keep_order(__float_as_int(S[0]) & INT32_MAX);
        wgmma_wait<0>();
        differentiate<TILES>(t, dt, room.delta[0] + query, unit_of<AGAIN>(room, OWN_Y | MET_Y, 1 / TINY));
        if (KEYS) {
            const left_exact P(S);
            start_product(S, P, room.met[1][at_tile()]); /* dV += P^T dO */
            finish_product(room.d_v, S, unit_of<AGAIN>(room, MET_Y), h == first_h && met0 == met_first);
        }
        const left_exact dS(dP);
        start_product(S, dS, room.met[0][at_tile()]); /* dQ += dS K, dK += dS^T Q */
        if ((met0 += 64) >= m.last)
            met0 = met_first, h++;
        more = h <= last_h;
        if (AHEAD && more)
            ask();
        finish_product(sum, S, unit_of<AGAIN>(room, OWN_Y | MET_Y | MET_X));
    }
    const int at = own0 + warp * 16;
    if (!KEYS) {
        store_exact(sum, a.scale, a.d_q, row_at(a.d_q, s.q_batch, own_h, s.q_row + at) + tile * 64, a.d_q.stride[2],
                    s.rows - at, a.D - tile * 64);
        return AGAIN || GENERAL || !some || is_done(room);
    }
    const int64_t row = s.k_row + a.col + at * a.col_step;
    if (a.d_k.data)
        store_exact(sum, a.scale, a.d_k, row_at(a.d_k, s.k_batch, own_h, row) + tile * 64, a.col_step * a.d_k.stride[2],
                    s.keys - at, a.D - tile * 64);
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float4 y = some ? room.d_v[n][threadIdx.x] : make_float4(0, 0, 0, 0);
        sum[4 * n] = y.x, sum[4 * n + 1] = y.y, sum[4 * n + 2] = y.z, sum[4 * n + 3] = y.w;
    }
    if (a.d_v.data)
        store_exact(sum, 1.0f, a.d_v, row_at(a.d_v, s.k_batch, own_h, row) + tile * 64, a.col_step * a.d_v.stride[2],
                    s.keys - at, a.Dv - tile * 64);
    return AGAIN || GENERAL || !some || is_done(room);
}

template <int TILES, bool GENERAL, bool KEYS>
__device__ static void own(exact_room<TILES> &room, const args &a, int b, int own_h, int own0)
{
    if (!own_rows<TILES, GENERAL, KEYS, false>(room, a, b, own_h, own0))
        own_rows<TILES, false, KEYS, true>(room, a, b, own_h, own0);
}

/* Head sizes to 64 TILES. */
template <int TILES, bool GENERAL>
__global__ void __launch_bounds__(SHORT_THREADS *TILES, 2 / TILES)
    backward_sm90exact(const __grid_constant__ args a, const __grid_constant__ short_division by)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(1024) char memory[];
    auto &room = *(exact_room<TILES> *)memory;
    int b, h;
    const int block = own_block(by, a, b, h);
    let_next_start();
    if (block >= by.k_blocks)
        own<TILES, GENERAL, false>(room, a, b, h, (block - by.k_blocks) * SHORT_OWN);
    else if (h < a.Hk)
        own<TILES, GENERAL, true>(room, a, b, h, block * SHORT_OWN);
#endif
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

template <int TILES> static heed_status run(const args &a, const heed_plan *plan, const heed_exec *x)
{
    /* Not all of its last KB: so there is room for a block besides one of the forward or the next backward (room_for_one()). */
    constexpr size_t BYTES = (offsetof(exact_room<TILES>, m) + sizeof(meeting) + 127) / 128 * 128;
    static_assert(2 / TILES * (BYTES + 1024) <= 228 * 1024, "shared memory of a multiprocessor");
    dim3 grid;
    const short_division by = divide(a, true, plan, grid);
    return launch_early(is_general(a) ? backward_sm90exact<TILES, true> : backward_sm90exact<TILES, false>, grid,
                        dim3(SHORT_THREADS * TILES), room_for_one(BYTES, grid, plan), plan, x, a, by);
}

size_t heed_backward_workspace_sm90exact(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return heed_cuda_others_bytes(p);
}

heed_status heed_backward_sm90exact(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    const prologue start(p, x, DELTA_WHERE_NEEDED);
    const args &a = start.a;
    if (start.status)
        return start.status;
    return HEED_MAX(a.D, a.Dv) <= 64 ? run<1>(a, plan, x) : run<2>(a, plan, x);
}
