/* Backward for few rows and keys on Hopper, fp32 (exact_sm90.cuh). A block owns 64 keys, of which it makes dK and dV, and meets the
 * queries in rounds, with two warpgroups:
 *
 *     head sizes to 64    each takes 64 queries of its own; dK and dV of the two are added at the end. Or each takes a head, where
 *                         queries are three times 64 and heads many: the same sums in the same order, and nobody idle
 *     to 128              both take the same 64 queries and each half of the columns: what these make of S and dP is added up
 *     above               the same in two blocks of a cluster
 *
 * Of a round's dQ each block has what its keys make. The blocks of two neighbouring tiles of keys are in one cluster, and add it
 * up, some rows each; where there are more than two, what the others make is added by a second launch. Rows of two blocks have a
 * cluster for each tile then: of four blocks, of a multiprocessor each, few fit. Products of 64 terms are made anew and added in
 * fp32. */
#include "backward_sm90exact.cuh"

constexpr int GROUPS = 2, THREADS = GROUPS * SHORT_THREADS;
constexpr int TOGETHER = 2; /* tiles of keys that a cluster has at most */

enum shared_out { QUERIES, HEADS, COLUMNS }; /* between the warpgroups of a block */

template <int TILES> struct alignas(1024) exact_room {
    exact_tile own[2][TILES];  /* K and V */
    exact_tile met[2][GROUPS]; /* Q and dO, each warpgroup's. In the end, in the place of Q: dQ on its way; of dO: dS */
    float2 lse[GROUPS][64];    /* of the queries: a weight_of_row, or lse where GENERAL */
    float delta[GROUPS][64];   /* so far as a warpgroup's columns make it */
    float all_of_delta[64];    /* of all of them */
    uint32_t seen[2][THREADS / 32]; /* traits of what each warp has loaded, of keys and of queries */
    uint32_t tiny;                  /* kinds of tiles that are in units of TINY */
    span s;                         /* the same for all: here they take no registers */
    int first, last;                /* queries that rounds are made of: those that the keys of the cluster meet */
    meeting m;

    /* Of two tiles: what their columns make of S and dP. */
    __device__ float4 *part(int which) { return (float4 *)(this + 1) + which * 1024; }
};

/* Barriers by name: the tensor core is the second warpgroup's too; a warpgroup by itself, from its number on. */
enum { TURN = 1, GROUP = 2 };

/* Waits for the warpgroup; by columns for both, as racecheck makes nothing of barriers of all beside those. */
template <shared_out BY> __device__ static void sync_group(int group)
{
    if (BY == COLUMNS)
        __syncthreads();
    else
        named_sync(GROUP + group, SHORT_THREADS);
}

/* ---- Clusters ---------------------------------------------------------------------------------------------------- */

/* The tile of keys that is this block's of the one or two in its cluster, and the cluster among those of its head. */
__device__ static int place_together() { return blockIdx.y & (cluster_height() - 1); }
__device__ static int cluster_of_head() { return blockIdx.y >> (cluster_height() - 1); }

/* The block of the cluster with the same keys and those columns, and with the same columns and those keys. */
__device__ static int block_of_columns(int tile) { return place_together() + tile * cluster_height(); }
__device__ static int block_of_keys(int keys) { return keys + cluster_place() * cluster_height(); }

/* S, dP and delta of all columns, of 64 queries, from what each warpgroup's columns make of them. Those of a block meet in shared
 * memory, S in the first warpgroup and dP in the second; then those of two blocks, where there are two. Each sum is of the same
 * two numbers whoever finds it. Waits for all; returns the unit of dP, the larger one of theirs. */
__device__ static float add_up_columns(exact_room<2> &room, int group, float (&S)[32], float (&dP)[32], float unit)
{
    const int thread = threadIdx.x % SHORT_THREADS;
    const bool two = cluster_depth() > 1;
    float sum[32];
#pragma unroll
    for (int i = 0; i < 32; i++)
        sum[i] = group ? S[i] : dP[i];
    leave(room.part(group ^ 1) + thread, sum);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 32; i++)
        sum[i] = group ? dP[i] : S[i];
    add_left(sum, room.part(group) + thread);
    leave(room.part(group) + thread, sum);
    if (two)
        cluster_arrive(), cluster_wait();
    else
        __syncthreads();
    get_left(S, room.part(0) + thread), get_left(dP, room.part(1) + thread);
    float delta = 0.0f;
    if (threadIdx.x < 64)
        delta = room.delta[0][thread] + room.delta[1][thread];
    if (two) {
        const int block = block_of_columns(cluster_place() ^ 1);
        const uint32_t tiny = __float_as_uint(load_of_block<float>(shared_address(&room.tiny), block)),
                       at = shared_address(room.part(0) + thread);
        const float its = unit_of(tiny, OWN_Y | MET_Y), largest = fmaxf(unit, its);
        const float by = unit / largest, its_by = its / largest; /* powers of two */
        if (threadIdx.x < 64)
            delta += load_of_block<float>(shared_address(&room.delta[0][thread]), block) +
                     load_of_block<float>(shared_address(&room.delta[1][thread]), block);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float4 x = load_of_block<float4>(at + n * SHORT_THREADS * 16, block);
            S[4 * n] += x.x, S[4 * n + 1] += x.y, S[4 * n + 2] += x.z, S[4 * n + 3] += x.w;
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float4 x = load_of_block<float4>(at + (1024 + n * SHORT_THREADS) * 16, block);
            dP[4 * n] = fmaf(x.x, its_by, dP[4 * n] * by), dP[4 * n + 1] = fmaf(x.y, its_by, dP[4 * n + 1] * by);
            dP[4 * n + 2] = fmaf(x.z, its_by, dP[4 * n + 2] * by),
                       dP[4 * n + 3] = fmaf(x.w, its_by, dP[4 * n + 3] * by);
        }
        unit = largest;
    }
    if (threadIdx.x < 64)
        room.all_of_delta[thread] = delta;
    __syncthreads();
    return unit;
}

/* Who meets the keys of a cluster, of so many keys each. */
template <bool STEPS> __device__ static meeting meet_cluster(const args &a, const span &s, int cluster, int each)
{
    const int first = cluster * each;
    return first < s.keys ? meet<true, STEPS>(a, s, first, min(first + each, s.keys)) : meeting{};
}

/* Where what the keys beyond those of the first cluster make of dQ waits: at [cluster - 1][sequence][head][row], rows as wide as
 * those of dQ. */
__device__ static float *rest_at(float *rest, const args &a, int cluster, int b, int h, int row)
{
    return rest + ((((int64_t)(cluster - 1) * a.B + b) * a.Hq + h) * a.Sq + row) * a.D;
}

/* A round's dQ, of queries from `row` on of head h, from what all keys of the cluster make of it: this block's share. */
template <shared_out BY, int WIDTH, class Room>
__device__ static void store_round(Room &room, const args &a, const span &s, int h, int row, int tile, float *rest)
{
    constexpr int ROW = WIDTH / 4, ALL = 64 * ROW;
    constexpr int ONCE = WIDTH < 64 ? 3 : 2; /* loads that are on their way together: a divisor of all */
    const int cluster = cluster_of_head(),
              blocks = cluster * TOGETHER * 64 + 64 < s.keys ? cluster_height() : 1; /* of it that have keys */
    const bool first = cluster == 0;
    float *const to = (first ? (float *)a.d_q.data + row_at(a.d_q, s.q_batch, h, s.q_row)
                             : rest_at(rest, a, cluster, s.b, h, 0)) +
                      tile * WIDTH;
    const int64_t step = first ? a.d_q.stride[2] : a.D, head = first ? a.d_q.stride[1] : (int64_t)a.Sq * a.D;
#pragma unroll 1
    for (int begin = place_together() * THREADS + threadIdx.x; begin < GROUPS * ALL; begin += ONCE * blocks * THREADS) {
        float4 y[ONCE], z[ONCE] = {};
#pragma unroll
        for (int n = 0; n < ONCE; n++) {
            const int i = begin + n * blocks * THREADS;
            const uint32_t at = shared_address(&way_out(room.met[0][i / ALL], i / ROW % 64, i % ROW));
            y[n] = load_of_block<float4>(at, block_of_keys(0));
            if (blocks > 1)
                z[n] = load_of_block<float4>(at, block_of_keys(1));
        }
#pragma unroll
        for (int n = 0; n < ONCE; n++) {
            const int i = begin + n * blocks * THREADS, group = i / ALL,
                      at = row + (BY == QUERIES ? i / ROW : i / ROW % 64),
                      column = (BY == COLUMNS ? group * WIDTH : 0) + i % ROW * 4;
            if (at < s.rows && tile * WIDTH + column < a.D)
                *(float4 *)(to + at * step + (BY == HEADS ? group * head : 0) +
                            column) = make_float4((y[n].x + z[n].x) * a.scale, (y[n].y + z[n].y) * a.scale,
                                                  (y[n].z + z[n].z) * a.scale, (y[n].w + z[n].w) * a.scale);
        }
    }
}

/* Adds the rest to dQ, 16 rows to a block, in the order of the keys. A cluster has so many. */
__global__ void __launch_bounds__(THREADS) add_rest(const __grid_constant__ args a, float *rest, int each)
{
    constexpr int MOST = HEED_SHORT / 64 - 1;
    const int b = own_sequence(a), h = own_head(a), columns = a.D / 4;
    let_next_start();
    wait_for_last();
    const span s = span_of(a, b);
    if (s.keys <= each)
        return;
    meeting m[MOST];
    int first = s.rows, last = 0; /* rows that have anything to add */
#pragma unroll
    for (int n = 0; n < MOST; n++) {
        m[n] = meet_cluster<true>(a, s, n + 1, each);
        if (m[n].first < m[n].last)
            first = min(first, m[n].first), last = max(last, m[n].last);
    }
    for (int i = threadIdx.x; i < 16 * columns; i += THREADS) {
        const int row = blockIdx.y * 16 + i / columns, column = i % columns * 4;
        if (row < first || row >= last)
            continue;
        float4 *const to = (float4 *)((float *)a.d_q.data + row_at(a.d_q, s.q_batch, h, s.q_row + row) + column);
        float4 y = *to;
#pragma unroll
        for (int n = 0; n < MOST; n++)
            if (row >= m[n].first && row < m[n].last) {
                const float4 x = *(const float4 *)(rest_at(rest, a, n + 1, b, h, row) + column);
                y = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
            }
        *to = y;
    }
}

/* ---- A block ----------------------------------------------------------------------------------------------------- */

/* Tiles are of so many columns. GENERAL: what the scores need beyond scale and band. */
template <shared_out BY, int WIDTH, bool GENERAL>
__global__ void __launch_bounds__(THREADS, 1) backward_sm90exact(const __grid_constant__ args a, float *rest)
{
#if __CUDA_ARCH__ >= 900
    constexpr int TILES = BY == QUERIES ? 1 : GROUPS, ROUND = BY == COLUMNS ? 64 : 128; /* queries */
    extern __shared__ __align__(1024) char memory[];
    auto &room = *(exact_room<TILES> *)memory;
    const int thread = threadIdx.x % SHORT_THREADS, lane = thread % 32, warp = thread / 32;
    const int group = __shfl_sync(~0u, threadIdx.x / SHORT_THREADS, 0);
    const int z = cluster_number(), b = a.B >= a.Hk ? blockIdx.x : z;
    const auto first_head = [&] { return (BY == HEADS ? 2 : 1) * (a.B >= a.Hk ? z : blockIdx.x); };
    const int hk = first_head() + (BY == HEADS ? group : 0);
    const int own0 = blockIdx.y * SHORT_OWN;
    const auto of_row = [] { return BY == COLUMNS ? 2 * cluster_place() : 0; }; /* the block's first tile */
    const auto tile = [&] {
        return BY == COLUMNS ? of_row() + (int)now(group) : 0;
    }; /* the warpgroup's. They take no registers */
    let_next_start();
    wait_where_needed<GENERAL>(a);
    if (threadIdx.x == 0) {
        const span s = span_of(a, b);
        room.s = s;
        room.m = own0 < s.keys ? meet<true, GENERAL>(a, s, own0, min(own0 + SHORT_OWN, s.keys)) : meeting{};
        room.first = 0, room.last = s.rows; /* dQ of all is written by the first cluster */
        if (cluster_of_head() > 0 && own0 < s.keys && (a.left < FAR || a.right < FAR)) {
            const meeting all = meet_cluster<GENERAL>(a, s, cluster_of_head(), 64 * cluster_height());
            room.first = all.first < all.last ? round_down(all.first, ROUND) : 0;
            room.last = max(all.last, 1);
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
    const auto mine = [&] { return row + (BY == QUERIES ? group * 64 : 0); };
    const auto busy = [&] { return mine() < m.last && mine() + 64 > m.first; };
    query_rows_coming<GENERAL, WIDTH> coming;
    uint32_t tiny;
    {
        constexpr int WHO = BY == QUERIES ? THREADS : SHORT_THREADS; /* so many share a tile */
        const int t = BY == QUERIES ? threadIdx.x : thread, at = BY == QUERIES ? 0 : group;
        exact_rows<2 * TILES, WIDTH> K, V;
        K.load(k, tile(), own0, t, WHO), V.load(v, tile(), own0, t, WHO);
        coming.ask(a, s, busy() ? m.last : 0, h, mine(), tile());
        constexpr int WARPS = BY == HEADS ? 4 : 8; /* that have loaded what is this warpgroup's */
        tiny = tiny_kinds<WARPS>(room.seen[0], a.delta.data || a.d_lse.data ? OWN_X : OWN_X | OWN_Y,
                                 kind_if_large(K, OWN_X) | kind_if_large(V, OWN_Y), BY == HEADS ? group * 4 : 0,
                                 [] { __syncthreads(); });
        put(K, room.own[0][at], t, WHO, tiny & OWN_X), put(V, room.own[1][at], t, WHO, tiny & OWN_Y);
    }
    float dK[WIDTH / 2], dV[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++)
        dK[i] = dV[i] = 0.0f;
    /* Else addresses are kept, in too many registers. */
    const auto met = [&](int which) -> exact_tile & { return room.met[which][now(group)]; };
    const auto own = [&](int which) -> exact_tile & { return room.own[which][BY == QUERIES ? 0 : now(group)]; };
    float2 *const lse = room.lse[BY == COLUMNS ? 0 : group];
    /* By queries: the first warpgroup adds up dK, the second dV, in the place of dS. */
    const auto leave_keys = [&] {
        if constexpr (BY == QUERIES) {
            float sum[32];
#pragma unroll
            for (int i = 0; i < 32; i++)
                sum[i] = group ? dK[i] : dV[i];
            leave((float4 *)room.met[1][group] + thread, sum);
        }
    };
    const auto finish_keys = [&] {
        const auto store = [&](const auto &y, bool is_v) {
            const view &to = is_v ? a.d_v : a.d_k;
            const int own = own0 + warp * 16;
            if (to.data)
                store_exact(y, is_v ? 1.0f : a.scale, to,
                            row_at(to, s.k_batch, hk, s.k_row + a.col + own * a.col_step) + tile() * WIDTH,
                            a.col_step * to.stride[2], s.keys - own, (is_v ? a.Dv : a.D) - tile() * WIDTH);
        };
        if constexpr (BY == QUERIES) {
            float sum[32];
#pragma unroll
            for (int i = 0; i < 32; i++)
                sum[i] = group ? dV[i] : dK[i];
            add_left(sum, (const float4 *)room.met[1][group ^ 1] + thread);
            store(sum, group);
        } else
            store(dK, false), store(dV, true);
    };
    fence_async();
    cluster_arrive_empty();
#pragma unroll 1
    for (bool more = true; more;) {
        cluster_wait(); /* all have done with the last round's dQ */
        if (BY != COLUMNS)
            __syncthreads(); /* K and V are everybody's; and as racecheck wants it */
        const bool now_busy = busy(), other_busy = BY == HEADS || (group ? row + 64 > m.first : row + 64 < m.last);
        float S[32], dP[32], unit = 1.0f;                                   /* of dP */
        auto &X = *(float(*)[WIDTH / 2]) S, &Y = *(float(*)[WIDTH / 2]) dP; /* products, in their places */
        if (now_busy) {
            /* What the caller has of delta may be anything: it is not to be multiplied. */
            const uint32_t kinds = a.delta.data || a.d_lse.data ? MET_X : MET_X | MET_Y,
                           large = kind_if_large(coming.q, MET_X) | kind_if_large(coming.d_o, MET_Y);
            constexpr int WARPS = BY == COLUMNS ? 8 : 4;
            tiny = (tiny & (OWN_X | OWN_Y)) |
                   tiny_kinds<WARPS>(room.seen[1], kinds, large, BY == COLUMNS ? 0 : group * 4,
                                     [&] { sync_group<BY>(group); });
            put(coming.q, room.met[0][group], thread, SHORT_THREADS, tiny & MET_X);
            put(coming.d_o, room.met[1][group], thread, SHORT_THREADS, tiny & MET_Y);
            coming.give_facts(lse, room.delta[group], a, s, mine(), tile(), unit_of(tiny, MET_Y));
            if (BY == COLUMNS && threadIdx.x == 0)
                room.tiny = tiny;
            fence_async();
            sync_group<BY>(group);
            unit = unit_of(tiny, OWN_Y | MET_Y);
            /* One after the other, so that one has scores while the other finds them. */
            if (BY != COLUMNS && group && other_busy)
                named_sync(TURN, THREADS);
            multiply_exact<true, PRODUCTS, WIDTH>(S, own(0), met(0));
            if (!GENERAL || BY == COLUMNS) /* else there are no registers for dP now */
                multiply_exact<true, PRODUCTS, WIDTH>(dP, own(1), met(1));
            if (BY != COLUMNS && !group && other_busy)
                named_arrive(TURN, THREADS);
            wgmma_wait<BY != COLUMNS && !GENERAL ? PRODUCTS : 0>();
#pragma unroll
            for (int i = 0; i < 32; i++)
                S[i] = whole_sum(S[i]);
            if (tiny & (OWN_X | MET_X))
#pragma unroll
                for (int i = 0; i < 32; i++)
                    S[i] *= unit_of(tiny, OWN_X | MET_X);
        }
        if constexpr (BY == COLUMNS) {
            if (now_busy) {
#pragma unroll
                for (int i = 0; i < 32; i++)
                    dP[i] = whole_sum(dP[i]);
                unit = add_up_columns(room, group, S, dP, unit);
            } else if (cluster_depth() > 1)
                cluster_arrive(), cluster_wait();
        }
        if (now_busy) {
            const int q0 = mine();
            key_scores<true> t = { S, q0 + lane % 4 * 2, own0 + warp * 16 + lane / 4 }, dt = { dP, t.i0, t.n0 };
            if (GENERAL)
                score_exact(t, a, s, head_of(a, s, h));
            hide_band<GENERAL>(t, a, s, q0 >= m.inside && q0 + 64 <= m.outside && own0 + 64 <= s.keys);
            weigh<GENERAL>(t, lse + lane % 4 * 2, fmaxf(fminf(a.scale * LOG2E, 3e38f), 1.2e-38f));
            if (BY != COLUMNS) {
                if (GENERAL)
                    multiply_exact<true, PRODUCTS, WIDTH>(dP, own(1), met(1));
                else
                    keep_order(__float_as_int(S[0]) & INT32_MAX);
                wgmma_wait<0>();
#pragma unroll
                for (int i = 0; i < 32; i++)
                    dP[i] = whole_sum(dP[i]);
            }
            differentiate(t, dt, (BY == COLUMNS ? room.all_of_delta : room.delta[group]) + lane % 4 * 2, 1 / unit);
            {
                const left_exact P(S);
                multiply_exact(X, P, met(1)); /* dV += P^T dO */
                wgmma_wait<0>();
                add(dV, X, unit_of(tiny, MET_Y));
            }
            sync_group<BY>(group); /* the group has done with dO */
            const left_exact dS(dP);
            put_across(met(1), dS);
            fence_async();
            multiply_exact(X, dS, met(0)); /* dK += dS^T Q */
            sync_group<BY>(group);
            multiply_exact_shared(Y, met(1), own(0)); /* dQ = dS K */
            wgmma_wait<1>();
            add(dK, X, unit * unit_of(tiny, MET_X));
            wgmma_wait<0>();
            unit *= unit_of(tiny, OWN_X);
            sync_group<BY>(group); /* the group has done with Q */
        }
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++) {
                float2 *const to = (float2 *)&way_out(room.met[0][group], warp * 16 + lane / 4 + 8 * r,
                                                      2 * n + lane % 4 / 2) +
                                   lane % 2;
                const float *const x = Y + 4 * n + 2 * r;
                *to = now_busy ? make_float2(whole_sum(x[0]) * unit, whole_sum(x[1]) * unit) : make_float2(0, 0);
            }
        const int round_h = h, round_row = row;
        row += ROUND;
        if (BY == HEADS && row >= room.last && row % ROUND == 0) /* in the order of the sums by queries */
            row = room.first + 64;
        if (row >= room.last)
            row = room.first, h++;
        more = h < hk * a.G + a.G;
        if (BY == QUERIES && !more)
            leave_keys();
        if (BY != COLUMNS)
            __syncthreads(); /* as racecheck wants it */
        cluster_arrive();
        if (more)
            coming.ask(a, s, busy() ? m.last : 0, h, mine(), tile());
        else
            coming.forget();
        cluster_wait();
        if (a.d_q.data)
            store_round<BY, WIDTH>(room, a, s, BY == HEADS ? first_head() : round_h, round_row, of_row(), rest);
        cluster_arrive_empty();
    }
    finish_keys();
    cluster_wait(); /* nobody reads from a block that has ended */
#endif
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

/* Tiles of keys in a cluster. */
static int tiles_together(int64_t head_dim, int64_t keys)
{
    return keys <= 64 || (head_dim > 128 && keys > 64 * TOGETHER) ? 1 : TOGETHER;
}

/* Clusters of a head beyond the first. */
static int64_t rests_of(const heed_problem *p)
{
    const int64_t keys = p->full.keys, each = 64 * tiles_together(HEED_MAX(p->D, p->Dv), keys);
    return p->g.d_q.data && keys > 0 ? tiles_of(keys, each) - 1 : 0;
}

size_t heed_backward_workspace_sm90exact(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    const size_t rest = (size_t)(rests_of(p) * p->B * p->Hq * p->Sq * p->D) * sizeof(float);
    return (heed_cuda_others_bytes(p) + 15) / 16 * 16 + rest;
}

template <shared_out BY, int WIDTH = 64>
static heed_status run(const args &a, const heed_plan *plan, const heed_exec *x, float *rest)
{
    typedef exact_room<BY == QUERIES ? 1 : GROUPS> room;
    constexpr size_t PARTS = BY == COLUMNS ? 2 * 1024 * sizeof(float4) : 0, ALL = sizeof(room) + PARTS;
    static_assert(ALL <= 227 * 1024, "shared memory of a block");
    const unsigned together = (unsigned)tiles_together(HEED_MAX(a.D, a.Dv), keys_of(a)),
                   keys = (unsigned)HEED_MAX(tiles_of(keys_of(a), SHORT_OWN * together), 1) * together,
                   heads = BY == HEADS ? (unsigned)a.Hk / 2 : (unsigned)a.Hk,
                   columns = BY == COLUMNS ? (unsigned)tiles_of(HEED_MAX(a.D, a.Dv), 2 * WIDTH)
                                           : 1; /* blocks that share a row */
    const dim3 grid = a.B >= a.Hk ? dim3(a.B, keys, heads * columns) : dim3(heads, keys, a.B * columns);
    const bool general = BY != HEADS && is_general(a);
    constexpr shared_out GENERALLY = BY == HEADS ? QUERIES : BY;
    const auto kernel = general ? backward_sm90exact<GENERALLY, WIDTH, true> : backward_sm90exact<BY, WIDTH, false>;
    const heed_status status = launch_clusters(kernel, grid, dim3(1, together, columns), THREADS, ALL, x, a, rest);
    if (status || !rest)
        return status;
    return launch_early(add_rest, grid_of(a, tiles_of(a.Sq, 16)), dim3(THREADS), 0, plan, x, a, rest,
                        (int)(SHORT_OWN * together));
}

/* Whether each warpgroup should take a head: by queries, one of the four would have none, and there are enough of such blocks to
 * keep the multiprocessors busy. */
static bool by_heads(const args &a, const heed_plan *plan)
{
    return tiles_of(a.Sq, 64) == 3 && a.G == 1 && a.Hk % 2 == 0 && !is_general(a) &&
           (int64_t)a.B * a.Hk * tiles_of(keys_of(a), SHORT_OWN) >= 4 * plan->device.units;
}

heed_status heed_backward_sm90exact(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    const prologue start(p, x, DELTA_WHERE_NEEDED);
    const args &a = start.a;
    if (start.status)
        return start.status;
    float *const rest = rests_of(p) ? (float *)((char *)x->workspace + (heed_cuda_others_bytes(p) + 15) / 16 * 16)
                                    : NULL;
    if (HEED_MAX(a.D, a.Dv) > 64)
        return columns_of_tile(a) < 64 ? run<COLUMNS, 48>(a, plan, x, rest) : run<COLUMNS>(a, plan, x, rest);
    return by_heads(a, plan) ? run<HEADS>(a, plan, x, rest) : run<QUERIES>(a, plan, x, rest);
}
