/* Backward for few rows and keys on Hopper, fp32 (exact_sm90.cuh). A block owns 64 keys, of which it makes dK and dV, and meets the
 * queries in rounds, with two warpgroups:
 *
 *     head sizes to 64    each takes 64 queries of its own; dK and dV of the two are added at the end
 *     to 128              both take the same 64 queries and find all scores, and each makes 64 columns of the results
 *     above               as to 64, but of 64 columns: what all columns make of a score is added up from block to block of a cluster
 *
 * Of a round's dQ each block has what its keys make. The blocks of two neighbouring tiles of keys are in one cluster, and add it
 * up, some rows each; where there are more than two, what the others make is added by a second launch. Products of 64 terms are
 * made anew and added in fp32. */
#include "exact_sm90.cuh"

constexpr int GROUPS = 2, THREADS = GROUPS * SHORT_THREADS;
constexpr int TOGETHER =
    2; /* tiles of keys in a cluster: with four, of blocks that take a multiprocessor each, few fit */

enum { OWN_X = 1, OWN_Y = 2, MET_X = 4, MET_Y = 8 }; /* kinds of tiles. X: K or Q, Y: V or dO */

template <int TILES> struct alignas(1024) exact_room {
    exact_tile own[2][TILES];  /* K and V */
    exact_tile met[2][GROUPS]; /* Q and dO, each warpgroup's. In the end, in the place of Q: dQ on its way; of dO: dS */
    float2 lse[GROUPS][64];    /* of the queries: a weight_of_row, or lse where GENERAL */
    float delta[GROUPS][64];   /* so far as a warpgroup's columns make it */
    float all_of_delta[GROUPS][64]; /* of all of them */
    uint32_t seen[2][THREADS / 32]; /* traits of what each warp has loaded, of keys and of queries */
    uint32_t tiny[GROUPS];          /* kinds of tiles that are in units of TINY */
    span s;                         /* the same for all: here they take no registers */
    int first, last;                /* queries that rounds are made of: those that the keys of the cluster meet */
    meeting m;

    /* Where there are more columns than this block's: what these make of S and dP. */
    __device__ float4 *parts(int which, int group) { return (float4 *)(this + 1) + (which * GROUPS + group) * 1024; }
};

/* ---- Tiny numbers ------------------------------------------------------------------------------------------------ */

/* The kinds of tiles that the warps from `first` on have found tiny, which are to be multiplied by 1 / TINY; all of them are asked.
 * large: of this thread's kinds those that are not. Waits for all. */
template <int WARPS>
__device__ static uint32_t tiny_kinds(uint32_t (&seen)[THREADS / 32], uint32_t kinds, uint32_t large, int first)
{
    large = __reduce_or_sync(~0u, large);
    if (threadIdx.x % 32 == 0)
        seen[threadIdx.x / 32] = large;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++)
        kinds &= ~seen[first + warp];
    return kinds;
}

template <int N> __device__ static uint32_t kind_if_large(const exact_rows<N> &x, uint32_t kind)
{
    return is_tiny(x.bits()) ? 0 : kind;
}

template <int N> __device__ static void put(exact_rows<N> &x, exact_tile &to, int t, int threads, bool is_tiny)
{
    if (is_tiny)
        x.multiply(1 / TINY);
    x.put(to, t, threads);
}

/* The unit of products of these kinds, of which some are tiny. */
__device__ static float unit_of(uint32_t tiny, uint32_t kinds)
{
    float unit = 1.0f;
#pragma unroll
    for (uint32_t kind = 1; kind <= MET_Y; kind *= 2)
        unit *= kinds & kind && tiny & kind ? TINY : 1.0f;
    return unit;
}

/* ---- Queries on their way ---------------------------------------------------------------------------------------- */

/* 64 queries of head h from `row` on, of rows before `last`, by the threads of a warpgroup: eight for each row of a tile. */
template <bool GENERAL> struct query_rows_coming {
    exact_rows<4> q, d_o, o;
    float lse[4], given[4]; /* delta or d_lse */

    __device__ void ask(const args &a, const span &s, int last, int h, int row, int tile)
    {
        const int thread = threadIdx.x % SHORT_THREADS, i0 = row + thread / 8;
        const auto load_facts = [&](float(&to)[4], const view &t) {
            const float *const first = (const float *)t.data + row_at(t, s.q_batch, h, s.q_row);
#pragma unroll
            for (int n = 0; n < 4; n++)
                to[n] = last ? first[min(i0 + n * 16, s.rows - 1) * t.stride[2]] : 0.0f;
        };
        q.load(query_rows<float>(a.q, s, h, last - 1, a.D), tile, row, thread);
        d_o.load(query_rows<float>(a.d_o, s, h, last - 1, a.Dv), tile, row, thread);
        if (!a.delta.data)
            o.load(query_rows<float>(a.o, s, h, last - 1, a.Dv), tile, row, thread);
        load_facts(lse, a.lse);
        if (a.delta.data || a.d_lse.data)
            load_facts(given, a.delta.data ? a.delta : a.d_lse);
    }

    /* No more are coming: they are not to be kept. */
    __device__ void forget()
    {
#pragma unroll
        for (int i = 0; i < 32; i++)
            asm volatile("" : "=f"(q.x[i / 8][i % 8]), "=f"(d_o.x[i / 8][i % 8]), "=f"(o.x[i / 8][i % 8]));
#pragma unroll
        for (int n = 0; n < 4; n++)
            asm volatile("" : "=f"(lse[n]), "=f"(given[n]));
    }

    /* What is to be known of the queries, delta so far as this tile's columns make it. unit: of dO, 1 or TINY. */
    __device__ void give_facts(float2 *of_lse, float *of_delta, const args &a, const span &s, int row, int tile,
                               float unit) const
    {
        const int thread = threadIdx.x % SHORT_THREADS;
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
                of_lse[i] = !some     ? make_float2(CUDART_INF_F, 0.0f)
                            : GENERAL ? make_float2(lse[n], 0.0f)
                                      : make_float2(w.log2, w.rest);
                of_delta[i] = some ? delta : 0.0f;
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

/* From P and dP to dS, but for the scale. delta: of the lane's first query, by so many tiles. per_one: so many units of dP are 1,
 * which is a power of two. */
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
            x = p == 0.0f ? 0.0f : p * fmaf(-d[e % 2], per_one, x);
        }
    }
}

/* ---- Results ----------------------------------------------------------------------------------------------------- */

/* Y += T, of so many units. */
__device__ static void add(float (&Y)[32], const float (&T)[32], float unit)
{
#pragma unroll
    for (int i = 0; i < 32; i++)
        Y[i] = fmaf(whole_sum(T[i]), unit, Y[i]);
}

/* dS, with keys as rows, where the tensor core finds it with queries as rows. */
__device__ static void put_across(exact_tile &to, const left_exact &dS)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % SHORT_THREADS / 32;
    const uint32_t at = shared_address(to) + (lane / 16 * 8 + lane % 8) * 128 +
                        ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
    for (int p = 0; p < 3; p++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            store_matrices_transposed(at + p * PART + k * 2048, dS.x[p][k][0], dS.x[p][k][1], dS.x[p][k][2],
                                      dS.x[p][k][3]);
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

/* And back. */
__device__ static void add_left(float (&Y)[32], const float4 *from)
{
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float4 y = from[n * SHORT_THREADS];
        Y[4 * n] += y.x, Y[4 * n + 1] += y.y, Y[4 * n + 2] += y.z, Y[4 * n + 3] += y.w;
    }
}

/* ---- Clusters ---------------------------------------------------------------------------------------------------- */

/* The tile of keys that is this block's of those in its cluster. */
__device__ static int place_together() { return blockIdx.y % TOGETHER; }

/* The block of the cluster with the same keys and those columns, and with the same columns and those keys. */
__device__ static int block_of_columns(int tile) { return place_together() + tile * (gridDim.y > 1 ? TOGETHER : 1); }
__device__ static int block_of_keys(int keys) { return keys + cluster_place() * (gridDim.y > 1 ? TOGETHER : 1); }

/* S, dP and delta of all columns from what each block's columns make of them, in their order. Returns the unit of dP: the largest
 * of theirs. */
__device__ static float add_up_columns(exact_room<1> &room, int group, float (&S)[32], float (&dP)[32])
{
    const int thread = threadIdx.x % SHORT_THREADS, tiles = cluster_depth();
    float unit = 0.0f, delta = 0.0f;
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) {
        const uint32_t tiny = __float_as_uint(
            load_of_block<float>(shared_address(&room.tiny[group]), block_of_columns(tile)));
        unit = fmaxf(unit, unit_of(tiny, OWN_Y | MET_Y));
    }
#pragma unroll
    for (int i = 0; i < 32; i++)
        S[i] = dP[i] = 0.0f;
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) {
        const int block = block_of_columns(tile);
        const uint32_t tiny = __float_as_uint(load_of_block<float>(shared_address(&room.tiny[group]), block));
        const uint32_t s_at = shared_address(room.parts(0, group) + thread),
                       d_at = shared_address(room.parts(1, group) + thread);
        const float by = unit_of(tiny, OWN_Y | MET_Y) / unit; /* a power of two */
        if (thread < 64)
            delta += load_of_block<float>(shared_address(&room.delta[group][thread]), block);
        const bool here = tile == cluster_place(); /* other blocks' are far away */
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int on = n * SHORT_THREADS;
            const float4 x = here ? room.parts(0, group)[on + thread] : load_of_block<float4>(s_at + on * 16, block);
            S[4 * n] += x.x, S[4 * n + 1] += x.y, S[4 * n + 2] += x.z, S[4 * n + 3] += x.w;
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int on = n * SHORT_THREADS;
            const float4 x = here ? room.parts(1, group)[on + thread] : load_of_block<float4>(d_at + on * 16, block);
            dP[4 * n] = fmaf(x.x, by, dP[4 * n]), dP[4 * n + 1] = fmaf(x.y, by, dP[4 * n + 1]);
            dP[4 * n + 2] = fmaf(x.z, by, dP[4 * n + 2]), dP[4 * n + 3] = fmaf(x.w, by, dP[4 * n + 3]);
        }
    }
    if (thread < 64)
        room.all_of_delta[group][thread] = delta;
    return unit;
}

/* Who meets the keys beyond those of the first cluster. */
template <bool STEPS> __device__ static meeting meet_rest(const args &a, const span &s)
{
    return meet<true, STEPS>(a, s, 64 * TOGETHER, s.keys);
}

/* Where what the keys beyond those of the first cluster make of dQ waits: at [sequence][head][row], rows as wide as those of dQ. */
__device__ static float *rest_at(float *rest, const args &a, int b, int h, int row)
{
    return rest + (((int64_t)b * a.Hq + h) * a.Sq + row) * a.D;
}

/* A round's dQ, of queries from `row` on, from what all keys of the cluster make of it: this block's share. ONCE:
 * loads that are on their way together. */
template <int TILES, int ONCE>
__device__ static void store_round(exact_room<TILES> &room, const args &a, const span &s, int h, int row, int tile,
                                   float *rest)
{
    const int blocks = blockIdx.y / TOGETHER * (64 * TOGETHER) + 64 < s.keys ? TOGETHER : 1; /* that have keys */
    const bool first = blockIdx.y < TOGETHER;
    float *const to = (first ? (float *)a.d_q.data + row_at(a.d_q, s.q_batch, h, s.q_row)
                             : rest_at(rest, a, s.b, h, 0)) +
                      tile * 64;
    const int64_t step = first ? a.d_q.stride[2] : a.D;
#pragma unroll 1
    for (int begin = place_together() * THREADS + threadIdx.x; begin < GROUPS * 64 * 16;
         begin += ONCE * blocks * THREADS) {
        float4 y[ONCE], z[ONCE] = {};
#pragma unroll
        for (int n = 0; n < ONCE; n++) {
            const int i = begin + n * blocks * THREADS;
            const uint32_t at = shared_address(&way_out(room.met[0][i / 1024], i / 16 % 64, i % 16));
            y[n] = load_of_block<float4>(at, block_of_keys(0));
            if (blocks > 1)
                z[n] = load_of_block<float4>(at, block_of_keys(1));
        }
#pragma unroll
        for (int n = 0; n < ONCE; n++) {
            const int i = begin + n * blocks * THREADS, at = row + (TILES == 1 ? i / 16 : i / 16 % 64),
                      column = (TILES == 1 ? 0 : i / 1024 * 64) + i % 16 * 4;
            if (at < s.rows && tile * 64 + column < a.D)
                *(float4 *)(to + at * step +
                            column) = make_float4((y[n].x + z[n].x) * a.scale, (y[n].y + z[n].y) * a.scale,
                                                  (y[n].z + z[n].z) * a.scale, (y[n].w + z[n].w) * a.scale);
        }
    }
}

/* Adds the rest to dQ, 16 rows to a block. */
__global__ void __launch_bounds__(THREADS) add_rest(const __grid_constant__ args a, float *rest)
{
    const int b = own_sequence(a), h = own_head(a), columns = a.D / 4;
    let_next_start();
    wait_for_last();
    const span s = span_of(a, b);
    if (s.keys <= 64 * TOGETHER)
        return;
    const meeting m = meet_rest<true>(a, s);
    for (int i = threadIdx.x; i < 16 * columns; i += THREADS) {
        const int row = blockIdx.y * 16 + i / columns, column = i % columns * 4;
        if (row < m.first || row >= m.last)
            continue;
        float4 *const to = (float4 *)((float *)a.d_q.data + row_at(a.d_q, s.q_batch, h, s.q_row + row) + column);
        const float4 x = *(const float4 *)(rest_at(rest, a, b, h, row) + column), y = *to;
        *to = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
    }
}

/* ---- A block ----------------------------------------------------------------------------------------------------- */

/* Head sizes to 64 TILES, or WIDE ones. GENERAL: what the scores need beyond scale and band. */
template <int TILES, bool WIDE, bool GENERAL>
__global__ void __launch_bounds__(THREADS, 1) backward_sm90exact(const __grid_constant__ args a, float *rest)
{
#if __CUDA_ARCH__ >= 900
    constexpr int ROUND = TILES == 1 ? GROUPS * 64 : 64; /* queries */
    extern __shared__ __align__(1024) char memory[];
    auto &room = *(exact_room<TILES> *)memory;
    const int thread = threadIdx.x % SHORT_THREADS, lane = thread % 32, warp = thread / 32;
    const int group = __shfl_sync(~0u, threadIdx.x / SHORT_THREADS, 0);
    const int z = WIDE ? cluster_number() : blockIdx.z, b = a.B >= a.Hk ? blockIdx.x : z,
              hk = a.B >= a.Hk ? z : blockIdx.x;
    const int own0 = blockIdx.y * SHORT_OWN;
    const auto of_row = [] { return WIDE ? cluster_place() : 0; }; /* the block's first tile */
    const auto tile = [&] {
        return TILES == 1 ? of_row() : (int)now(group);
    }; /* the warpgroup's. They take no registers */
    let_next_start();
    wait_where_needed<GENERAL>(a);
    if (threadIdx.x == 0) {
        const span s = span_of(a, b);
        room.s = s;
        room.m = own0 < s.keys ? meet<true, GENERAL>(a, s, own0, min(own0 + SHORT_OWN, s.keys)) : meeting{};
        room.first = 0, room.last = s.rows; /* dQ of all is written by the first cluster */
        if (blockIdx.y >= TOGETHER && own0 < s.keys && (a.left < FAR || a.right < FAR)) {
            const meeting of_rest = meet_rest<GENERAL>(a, s);
            room.first = of_rest.first < of_rest.last ? round_down(of_rest.first, ROUND) : 0;
            room.last = max(of_rest.last, 1);
        }
    }
    __syncthreads();
    const span &s = room.s;
    if (own0 >= max(s.keys, 1)) /* nobody waits for those who have left */
        return;
    const meeting &m = room.m;
    const source k = key_rows<float>(a, a.k, s, hk, s.keys - 1, a.D);
    const source v = key_rows<float>(a, a.v, s, hk, s.keys - 1, a.Dv);
    wait_for_last(k.first, v.first, nullptr);

    int h = hk * a.G, row = room.first; /* of the round */
    const auto mine = [&] { return row + (TILES == 1 ? group * 64 : 0); };
    const auto busy = [&] { return mine() < m.last && mine() + 64 > m.first; };
    query_rows_coming<GENERAL> coming;
    uint32_t tiny;
    {
        constexpr int WHO = TILES == 1 ? THREADS : SHORT_THREADS; /* so many share a tile */
        const int t = TILES == 1 ? threadIdx.x : thread, at = TILES == 1 ? 0 : group;
        exact_rows<2 * TILES> K, V;
        K.load(k, tile(), own0, t, WHO), V.load(v, tile(), own0, t, WHO);
        coming.ask(a, s, busy() ? m.last : 0, h, mine(), tile());
        tiny = tiny_kinds<THREADS / 32>(room.seen[0], a.delta.data || a.d_lse.data ? OWN_X : OWN_X | OWN_Y,
                                        kind_if_large(K, OWN_X) | kind_if_large(V, OWN_Y), 0);
        put(K, room.own[0][at], t, WHO, tiny & OWN_X), put(V, room.own[1][at], t, WHO, tiny & OWN_Y);
    }
    float dK[32], dV[32];
#pragma unroll
    for (int i = 0; i < 32; i++)
        dK[i] = dV[i] = 0.0f;
    /* Else addresses are kept, in too many registers. */
    const auto met = [&](int which) -> exact_tile & { return room.met[which][now(group)]; };
    typedef exact_tile tiles[TILES];
    const auto all_met = [&](int which) -> tiles & { return *(tiles *)&room.met[which][TILES == 1 ? now(group) : 0]; };
    float2 *const lse = room.lse[TILES == 1 ? group : 0];
    /* TILES == 1: the first warpgroup adds up dK, the second dV, in the place of dS. */
    const auto leave_keys = [&] {
        float sum[32];
#pragma unroll
        for (int i = 0; i < 32; i++)
            sum[i] = group ? dK[i] : dV[i];
        leave((float4 *)room.met[1][group] + thread, sum);
    };
    const auto finish_keys = [&] {
        const auto store = [&](const float(&y)[32], bool is_v) {
            const view &to = is_v ? a.d_v : a.d_k;
            const int own = own0 + warp * 16;
            if (to.data)
                store_exact(y, is_v ? 1.0f : a.scale, to,
                            row_at(to, s.k_batch, hk, s.k_row + a.col + own * a.col_step) + tile() * 64,
                            a.col_step * to.stride[2], s.keys - own, (is_v ? a.Dv : a.D) - tile() * 64);
        };
        if constexpr (TILES == 1) {
            float sum[32];
#pragma unroll
            for (int i = 0; i < 32; i++)
                sum[i] = group ? dV[i] : dK[i];
            add_left(sum, (const float4 *)room.met[1][group ^ 1] + thread);
            store(sum, group);
        } else
            store(dK, false), store(dV, true);
    };
    cluster_arrive_empty();
#pragma unroll 1
    for (bool more = true; more;) {
        const bool now_busy = WIDE || busy(); /* who has nothing to do finds zeros, where registers are short */
        cluster_wait();                       /* all have done with the last round's dQ */
        /* What the caller has of delta may be anything: it is not to be multiplied. */
        const uint32_t kinds = a.delta.data || a.d_lse.data ? MET_X : MET_X | MET_Y,
                       large = kind_if_large(coming.q, MET_X) | kind_if_large(coming.d_o, MET_Y);
        tiny = (tiny & (OWN_X | OWN_Y)) | tiny_kinds<4 * TILES>(room.seen[1], kinds, large, TILES == 1 ? group * 4 : 0);
        if (now_busy) {
            put(coming.q, room.met[0][group], thread, SHORT_THREADS, tiny & MET_X);
            put(coming.d_o, room.met[1][group], thread, SHORT_THREADS, tiny & MET_Y);
            coming.give_facts(lse, room.delta[group], a, s, mine(), tile(), unit_of(tiny, MET_Y));
            if (WIDE && thread == 0)
                room.tiny[group] = tiny;
        }
        fence_async();
        __syncthreads();                                          /* K and V are everybody's */
        float S[32], dP[32], unit = unit_of(tiny, OWN_Y | MET_Y); /* of dP */
        if (now_busy) {
            multiply_exact<true, PRODUCTS>(S, room.own[0], all_met(0));
            if (GENERAL && !WIDE) /* there are no registers for dP now */
                wgmma_wait<0>();
            else {
                multiply_exact<true, PRODUCTS>(dP, room.own[1], all_met(1));
                wgmma_wait<WIDE ? 0 : PRODUCTS>();
            }
#pragma unroll
            for (int i = 0; i < 32; i++)
                S[i] = whole_sum<TILES>(S[i]);
            if (tiny & (OWN_X | MET_X))
#pragma unroll
                for (int i = 0; i < 32; i++)
                    S[i] *= unit_of(tiny, OWN_X | MET_X);
        }
        if constexpr (WIDE) {
            if (now_busy) {
#pragma unroll
                for (int i = 0; i < 32; i++)
                    dP[i] = whole_sum(dP[i]);
                leave(room.parts(0, group) + thread, S), leave(room.parts(1, group) + thread, dP);
            }
            cluster_arrive(), cluster_wait();
            if (now_busy)
                unit = add_up_columns(room, group, S, dP);
            __syncthreads();
        }
        if (now_busy) {
            const int q0 = mine();
            key_scores<true> t = { S, q0 + lane % 4 * 2, own0 + warp * 16 + lane / 4 }, dt = { dP, t.i0, t.n0 };
            if (GENERAL)
                score_exact(t, a, s, head_of(a, s, h));
            hide_band<GENERAL>(t, a, s, q0 >= m.inside && q0 + 64 <= m.outside && own0 + 64 <= s.keys);
            weigh<GENERAL>(t, lse + lane % 4 * 2, fmaxf(fminf(a.scale * LOG2E, 3e38f), 1.2e-38f));
            if (!WIDE) {
                if (GENERAL)
                    multiply_exact<true, PRODUCTS>(dP, room.own[1], all_met(1));
                else
                    keep_order(__float_as_int(S[0]) & INT32_MAX);
                wgmma_wait<0>();
#pragma unroll
                for (int i = 0; i < 32; i++)
                    dP[i] = whole_sum<TILES>(dP[i]);
            }
            differentiate<TILES>(t, dt, (WIDE ? room.all_of_delta : room.delta)[TILES == 1 ? group : 0] + lane % 4 * 2,
                                 1 / unit);
            {
                const left_exact P(S);
                multiply_exact(S, P, met(1)); /* dV += P^T dO */
                wgmma_wait<0>();
                add(dV, S, unit_of(tiny, MET_Y));
            }
        }
        __syncthreads(); /* all have done with dO */
        if (now_busy) {
            const left_exact dS(dP);
            put_across(met(1), dS);
            fence_async();
            multiply_exact(S, dS, met(0)); /* dK += dS^T Q */
            wgmma_wait<0>();
            add(dK, S, unit * unit_of(tiny, MET_X));
        }
        __syncthreads();
        if (now_busy) {
            multiply_exact_shared(dP, met(1), room.own[0][TILES == 1 ? 0 : now(group)]); /* dQ = dS K */
            wgmma_wait<0>();
            unit *= unit_of(tiny, OWN_X);
        }
        __syncthreads(); /* all have done with Q */
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int n = 0; n < 8; n++) {
                float2 *const to = (float2 *)&way_out(room.met[0][group], warp * 16 + lane / 4 + 8 * r,
                                                      2 * n + lane % 4 / 2) +
                                   lane % 2;
                const float *const x = dP + 4 * n + 2 * r;
                *to = busy() ? make_float2(whole_sum(x[0]) * unit, whole_sum(x[1]) * unit) : make_float2(0, 0);
            }
        const int round_h = h, round_row = row;
        if ((row += ROUND) >= room.last)
            row = room.first, h++;
        more = h < hk * a.G + a.G;
        if (TILES == 1 && !more) {
            leave_keys();
            __syncthreads(); /* as racecheck wants it */
        }
        cluster_arrive();
        if (!WIDE && more)
            coming.ask(a, s, busy() ? m.last : 0, h, mine(), tile());
        else
            coming.forget();
        cluster_wait();
        if (a.d_q.data)
            store_round<TILES, WIDE ? 1 : 2>(room, a, s, round_h, round_row, of_row(), rest);
        if (WIDE && more) /* before there are no registers for it */
            coming.ask(a, s, busy() ? m.last : 0, h, mine(), tile());
        if (more)
            cluster_arrive_empty();
    }
    finish_keys();
    cluster_arrive_empty();
    cluster_wait(); /* nobody reads from a block that has ended */
#endif
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

static bool has_rest(const heed_problem *p) { return p->full.keys > 64 * TOGETHER && p->g.d_q.data; }

size_t heed_backward_workspace_sm90exact(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    const size_t rest = has_rest(p) ? (size_t)(p->B * p->Hq * p->Sq * p->D) * sizeof(float) : 0;
    return (heed_cuda_others_bytes(p) + 15) / 16 * 16 + rest;
}

template <int TILES, bool WIDE>
static heed_status run(const args &a, const heed_plan *plan, const heed_exec *x, float *rest)
{
    constexpr size_t PARTS = WIDE ? 2 * GROUPS * 1024 * sizeof(float4) : 0,
                     BYTES = (offsetof(exact_room<TILES>, m) + sizeof(meeting) + 127) / 128 * 128;
    constexpr size_t ALL = WIDE ? sizeof(exact_room<TILES>) + PARTS : BYTES;
    static_assert(ALL <= 227 * 1024, "shared memory of a block");
    const unsigned tiles = (unsigned)tiles_of(keys_of(a), SHORT_OWN), together = tiles > 1 ? TOGETHER : 1,
                   keys = (unsigned)HEED_MAX(tiles_of(tiles, together), 1) * together,
                   columns = WIDE ? (unsigned)tiles_of(HEED_MAX(a.D, a.Dv), 64) : 1; /* blocks that share a row */
    const dim3 grid = a.B >= a.Hk ? dim3(a.B, keys, a.Hk * columns) : dim3(a.Hk, keys, a.B * columns);
    const heed_status status = launch_clusters(is_general(a) ? backward_sm90exact<TILES, WIDE, true>
                                                             : backward_sm90exact<TILES, WIDE, false>,
                                               grid, dim3(1, together, columns), THREADS, ALL, x, a, rest);
    if (status || !rest)
        return status;
    return launch_early(add_rest, grid_of(a, tiles_of(a.Sq, 16)), dim3(THREADS), 0, plan, x, a, rest);
}

heed_status heed_backward_sm90exact(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    const prologue start(p, x, DELTA_WHERE_NEEDED);
    const args &a = start.a;
    if (start.status)
        return start.status;
    float *const rest = has_rest(p) ? (float *)((char *)x->workspace + (heed_cuda_others_bytes(p) + 15) / 16 * 16)
                                    : NULL;
    const int width = HEED_MAX(a.D, a.Dv);
    return width <= 64    ? run<1, false>(a, plan, x, rest)
           : width <= 128 ? run<2, false>(a, plan, x, rest)
                          : run<1, true>(a, plan, x, rest);
}
