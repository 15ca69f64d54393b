/* Forward for few rows and keys on Hopper, fp32 (exact_sm90.cuh). A block takes 64 rows, and each of its warpgroups 64 keys, with
 * maxima and sums of its own; what they have is added up at the end, in order. They share Q and the tensor core, which serves one
 * after the other: while one has its Q K^T or P V, others wait for their keys, split them, or are at their exponentials. Where
 * rows are wider than 128 columns the blocks of a cluster have two tiles each of Q, K and V and of O; there is room for two
 * warpgroups then, who take every other 64 keys, with sums relative to the largest score so far. */
#include "exact_sm90.cuh"

template <int TILES, bool WIDE> constexpr int MOST_GROUPS = WIDE ? 2 : (TILES == 1 ? HEED_SHORT : HEED_SHORT_WIDE) / 64;
constexpr int ROUNDS = HEED_SHORT / 64 / MOST_GROUPS<2, true>; /* of two groups, where rows are wide */

template <int TILES> struct alignas(1024) exact_room {
    exact_tile Q[TILES];
    float most[MOST_GROUPS<1, false>][SHORT_OWN],
        sum[MOST_GROUPS<1, false>][SHORT_OWN];      /* of each row, of a group's keys */
    float weight[MOST_GROUPS<1, false>][SHORT_OWN]; /* of what a group has of the row */
    float unit[MOST_GROUPS<1, false>];              /* of V, 1 or TINY */
    uint64_t q_there, all_there;                    /* all: O of the groups and weights, where rows are wide */

    /* A group's K, when it is done with V, and at last O on its way out. */
    typedef exact_tile tiles[TILES];
    __device__ tiles &met(int group) { return ((tiles *)(this + 1))[group]; }
    /* After all of these, where there are more columns than this block's: what these make of a group's scores in a round. */
    __device__ float4 *part(int group, int round)
    {
        const int groups = blockDim.x / SHORT_THREADS;
        return (float4 *)&met(groups) + (round * groups + group) * 1024;
    }
};

/* Barriers by name: all sums are there; the tensor core is a group's (from its number on); a group by itself. */
enum { SUMS = 1, TURN = 2, GROUP = 8 };

/* Waits for all of the group; whether it is so for all. */
__device__ static bool all_of_group(int group, bool so)
{
    uint32_t all;
    asm volatile("{\n.reg .pred mine, all;\nsetp.ne.u32 mine, %3, 0;\nbar.red.and.pred all, %1, %2, mine;\n"
                 "selp.u32 %0, 1, 0, all;\n}"
                 : "=r"(all)
                 : "r"(GROUP + group), "n"(SHORT_THREADS), "r"((uint32_t)so)
                 : "memory");
    return all;
}

/* The scores of all columns from what each block's columns make of them, in their order. */
__device__ static void add_up_columns(float (&S)[32], const float4 *part)
{
    const uint32_t at = shared_address(part);
#pragma unroll
    for (int i = 0; i < 32; i++)
        S[i] = 0.0f;
#pragma unroll 1
    for (int block = 0; block < cluster_depth(); block++) {
        const bool here = block == cluster_place(); /* other blocks' are far away */
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float4 x = here ? part[n * SHORT_THREADS]
                                  : load_of_block<float4>(at + n * (SHORT_THREADS * 16), block);
            S[4 * n] += x.x, S[4 * n + 1] += x.y, S[4 * n + 2] += x.z, S[4 * n + 3] += x.w;
        }
    }
}

/* Head sizes to TILES times WIDTH, or WIDE ones. GENERAL: what the scores need beyond scale and band. */
template <int TILES, int WIDTH, bool WIDE, bool GENERAL>
__global__ void __launch_bounds__(SHORT_THREADS *MOST_GROUPS<TILES, WIDE>, 1)
    forward_sm90exact(const __grid_constant__ args a)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(1024) char memory[];
    auto &room = *(exact_room<TILES> *)memory;
    constexpr int GROUPS = MOST_GROUPS<TILES, WIDE>, ROW = TILES * WIDTH / 4;
    /* Tiles of keys to a group. General scores leave no registers for O meanwhile. */
    constexpr bool MANY = WIDE && !GENERAL;
    const int thread = threadIdx.x % SHORT_THREADS, lane = thread % 32, i0 = blockIdx.y * SHORT_OWN;
    const int group = __shfl_sync(~0u, threadIdx.x / SHORT_THREADS, 0);
    let_next_start();
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&room.q_there), blockDim.x / 32);
        barrier_init(shared_address(&room.all_there), blockDim.x);
        barrier_init_done();
    }
    __syncthreads();
    wait_where_needed<GENERAL>(a);
    const int z = WIDE ? cluster_number() : blockIdx.z,
              of_row = WIDE ? cluster_place() * TILES : 0; /* its first tile */
    const span s = span_of(a, a.B >= a.Hq ? blockIdx.x : z);
    if (i0 >= s.rows)
        return;
    const head x = head_of(a, s, a.B >= a.Hq ? z : blockIdx.x);
    const int hk = a.G == 1 ? x.h : x.hk, own = thread / 32 * 16 + lane / 4; /* a division takes its time */
    const meeting see = meet<false, GENERAL>(a, s, i0, min(i0 + SHORT_OWN, s.rows));
    /* The tiles of keys that there is something to do with, one at least, and who has them: with wide rows every other. */
    const int first = see.first / 64, last = max((see.last + 63) / 64, first + 1);
    const int begin = MANY ? (last - first > 1 ? 0 : first % GROUPS) : first;
    const int end = begin + (MANY ? min(last - first, GROUPS) : last - first), threads = (end - begin) * SHORT_THREADS;
    const int own_tile = MANY ? first + (group + first) % GROUPS : group; /* the group's first */
    const bool busy = own_tile >= first && own_tile < last;
    const source q = query_rows<float>(a.q, s, x.h, min(i0 + SHORT_OWN, s.rows) - 1, a.D);
    const source k = key_rows<float>(a, a.k, s, hk, see.last - 1, a.D);
    const source v = key_rows<float>(a, a.v, s, hk, see.last - 1, a.Dv);
    auto &met = room.met(group);
    wait_for_last(q.first, k.first, v.first);
    {
        exact_rows<2, WIDTH> Q[TILES];
        exact_rows<4, WIDTH> K[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            Q[tile].load(q, of_row + tile, i0, threadIdx.x, blockDim.x);
        if (busy)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                K[tile].load(k, of_row + tile, own_tile * 64, thread);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            Q[tile].put(room.Q[tile], threadIdx.x, blockDim.x);
        fence_async();
        __syncwarp();
        if (lane == 0)
            arrive(shared_address(&room.q_there));
        if (!busy) { /* nobody waits for those who have left */
            if (WIDE)
                arrive(shared_address(&room.all_there));
            return;
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            K[tile].put(met[tile], thread);
    }
    const float scale = GENERAL ? 1.0f : a.scale, c = fmaxf(fminf(scale * LOG2E, 3e38f), 1.2e-38f);
    float O[TILES][WIDTH / 2], most[2] = { -CUDART_INF_F, -CUDART_INF_F }, sum[2] = {}, unit = 0.0f; /* of O */
#pragma unroll 1
    for (int met_tile = own_tile, round = 0;; met_tile += GROUPS, round++) {
        const int n0 = met_tile * 64;
        if (MANY && met_tile >= last) { /* others have a round more */
            cluster_arrive(), cluster_wait();
            break;
        }
        fence_async();
        /* V is asked for now and not before: all multiprocessors ask at the same time, and Q K^T would wait for it too. */
        exact_rows<4, WIDTH> V[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            V[tile].load(v, of_row + tile, n0, thread);
        named_sync(GROUP + group, SHORT_THREADS);
        wait(shared_address(&room.q_there), 0);
        if (met_tile > first)
            named_sync(TURN + group, 2 * SHORT_THREADS);
        float S[32];
        {
            float T[TILES][32];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                multiply_exact<false, 1, WIDTH>(T[tile], room.Q[tile], met[tile]);
            if (met_tile + 1 < last)
                named_arrive(TURN + (MANY ? 1 - group : group + 1), 2 * SHORT_THREADS);
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < 32; i++) /* as the backward adds them up */
                S[i] = TILES == 1 ? whole_sum(T[0][i]) : whole_sum(T[0][i]) + whole_sum(T[TILES - 1][i]);
        }
        if (WIDE) {
            leave(room.part(group, round) + thread, S);
            cluster_arrive();
        }
        /* Parts of such V would not be normal numbers. The group has done with K. */
        uint32_t bits = 0;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            bits |= V[tile].bits();
        const bool tiny = all_of_group(group, is_tiny(bits));
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            if (tiny)
                V[tile].multiply(1 / TINY);
            V[tile].put(met[tile], thread);
        }
        fence_async();
        if (WIDE) {
            cluster_wait();
            add_up_columns(S, room.part(group, round) + thread);
        }
        query_scores<64, true> t = { S, i0 + own, n0 + lane % 4 * 2 };
        const bool whole = n0 >= see.inside && n0 + 64 <= see.outside;
        if (GENERAL)
            score_exact(t, a, s, x);
        hide_band<GENERAL>(t, a, s, whole);
        float before[2], now[2]; /* what O so far and what is added to it are multiplied by */
        const float of_v = tiny ? TINY : 1.0f, larger = fmaxf(unit, of_v);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = t.at(r, 0), part[2] = {};
#pragma unroll
            for (int i = 1; i < t.C; i++)
                top = fmaxf(top, t.at(r, i));
            top = quad_max(top);
            now[r] = top == -CUDART_INF_F ? 0.0f : of_v / larger;
            top = fmaxf(top, most[r]);
            const exponent e(c, top);
            if (e.large()) {
#pragma unroll
                for (int i = 0; i < t.C; i++)
                    t.at(r, i) -= e.first;
            }
#pragma unroll
            for (int i = 0; i < t.C; i++)
                part[i % 2] += t.at(r, i) = exp2_fast(fmaf(t.at(r, i), c, -e.then));
            const float all = quad_sum(part[0] + part[1]), less = MANY ? e.of_most(most[r]) : 0.0f;
            sum[r] = MANY ? fmaf(less, sum[r], all) : all;
            before[r] = less * (unit / larger);
            most[r] = top;
        }
        unit = larger;
        if (!MANY || met_tile + GROUPS >= last) { /* its last */
            if (lane % 4 == 0)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    room.most[group][own + 8 * r] = most[r], room.sum[group][own + 8 * r] = sum[r];
            if (thread == 0)
                room.unit[group] = unit;
            if (group > begin)
                named_arrive(SUMS, threads);
        }
        const left_exact P(S);
        named_sync(GROUP + group, SHORT_THREADS); /* V is there */
        if constexpr (MANY) {
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) { /* one after the other, for the sake of registers */
                float T[WIDTH / 2];
                multiply_exact(T, P, met[tile]);
                wgmma_wait<0>();
#pragma unroll
                for (int i = 0; i < WIDTH / 2; i++) { /* what is not wanted may be anything */
                    float &y = O[tile][i];
                    const int r = i / 2 % 2;
                    y = before[r] == 0.0f ? 0.0f : y * before[r];
                    y = now[r] == 0.0f ? y : fmaf(whole_sum(T[i]), now[r], y);
                }
            }
        } else {
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                multiply_exact(O[tile], P, met[tile]);
            wgmma_wait<0>();
        }
        named_sync(GROUP + group, SHORT_THREADS); /* the group has done with V */
        if (!MANY || first + (round + 1) * GROUPS >= last)
            break;
        if (met_tile + GROUPS < last) {
            exact_rows<4, WIDTH> K[TILES];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                K[tile].load(k, of_row + tile, n0 + 64 * GROUPS, thread);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                K[tile].put(met[tile], thread);
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++) {
                float2 *const to = (float2 *)&way_out(met[tile], own + 8 * r, 2 * n + lane % 4 / 2) + lane % 2;
                const float *const x = O[tile] + 4 * n + 2 * r;
                *to = MANY ? make_float2(x[0], x[1]) : make_float2(whole_sum(x[0]), whole_sum(x[1]));
            }
    if (group == begin) { /* who began first is done first */
        named_sync(SUMS, threads);
        if (thread < SHORT_OWN && i0 + thread < s.rows) {
            float most = -CUDART_INF_F, sum = 0.0f;
#pragma unroll 1
            for (int g = begin; g < end; g++)
                most = fmaxf(most, room.most[g][thread]);
            const exponent e(c, most);
#pragma unroll 1
            for (int g = begin; g < end; g++)
                sum = fmaf(e.of_most(room.most[g][thread]), room.sum[g][thread], sum);
            const float sink = a.sink.data ? load(a.sink, row_at(a.sink, 0, x.h, 0)) : -CUDART_INF_F;
            const merged_row y(make_float2(most, sum), make_float2(-CUDART_INF_F, 0.0f), c, scale, sink);
#pragma unroll 1
            for (int g = begin; g < end; g++) {
                const float weight = e.of_most(room.most[g][thread]) * y.weight[0] * room.unit[g];
                room.weight[g][thread] = y.sum == 0.0f ? 0.0f : weight;
            }
            if (a.lse.data && of_row == 0)
                ((float *)a.lse.data)[row_at(a.lse, s.q_batch, x.h, s.q_row + i0 + thread)] = y.lse(scale, sink);
        }
    }
    if (WIDE) { /* racecheck would lose count of a barrier by number beside those of groups that have more rounds than others */
        cluster_arrive_empty();
        arrive(shared_address(&room.all_there));
        wait(shared_address(&room.all_there), 0);
    } else
        __syncthreads();
    float *const o = (float *)a.o.data + row_at(a.o, s.q_batch, x.h, s.q_row + i0);
#pragma unroll 1
    for (int i = (group - begin) * SHORT_THREADS + thread; i < ROW * min(SHORT_OWN, s.rows - i0); i += threads) {
        const int row = i / ROW, column = i % ROW * 4;
        float4 y = make_float4(0, 0, 0, 0);
        if (of_row * WIDTH + column >= a.Dv)
            continue;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const float weight = g >= begin && g < end ? room.weight[g][row] : 0.0f;
            if (weight != 0.0f) { /* else O may be anything */
                const float4 p = way_out(room.met(g)[column / WIDTH], row, column % WIDTH / 4);
                y.x = fmaf(p.x, weight, y.x), y.y = fmaf(p.y, weight, y.y);
                y.z = fmaf(p.z, weight, y.z), y.w = fmaf(p.w, weight, y.w);
            }
        }
        *(float4 *)(o + row * a.o.stride[2] + of_row * WIDTH + column) = y;
    }
    if (WIDE)
        cluster_wait(); /* nobody reads from a block that has ended */
#endif
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

size_t heed_forward_workspace_sm90exact(const heed_problem *p, const heed_plan *plan)
{
    (void)p, (void)plan;
    return 0;
}

template <int TILES, int WIDTH, bool WIDE>
static heed_status run(const args &a, const heed_plan *plan, const heed_exec *x)
{
    constexpr size_t EACH = TILES * sizeof(exact_tile) + (WIDE ? ROUNDS * 1024 * sizeof(float4) : 0);
    static_assert(sizeof(exact_room<TILES>) + MOST_GROUPS<TILES, WIDE> * EACH <= 227 * 1024,
                  "shared memory of a block");
    const int groups = WIDE ? MOST_GROUPS<TILES, WIDE>
                            : (int)HEED_MAX(tiles_of(keys_of(a), 64),
                                            2); /* with one there are no registers for all of Q */
    const unsigned blocks = WIDE ? (unsigned)tiles_of(HEED_MAX(a.D, a.Dv), WIDTH * TILES) : 1; /* that share a row */
    dim3 grid = grid_of(a, tiles_of(a.Sq, SHORT_OWN));
    grid.z *= blocks;
    return launch_clusters(is_general(a) ? forward_sm90exact<TILES, WIDTH, WIDE, true>
                                         : forward_sm90exact<TILES, WIDTH, WIDE, false>,
                           grid, dim3(1, 1, blocks), SHORT_THREADS * groups,
                           room_for_one(sizeof(exact_room<TILES>) + groups * EACH, grid, plan), x, a);
}

heed_status heed_forward_sm90exact(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    const prologue start(p, x);
    const args &a = start.a;
    if (start.status)
        return start.status;
    const int width = HEED_MAX(a.D, a.Dv);
    const bool narrow = columns_of_tile(a) < 64;
    return width <= 64    ? run<1, 64, false>(a, plan, x)
           : width <= 128 ? (narrow ? run<2, 48, false>(a, plan, x) : run<2, 64, false>(a, plan, x))
           : narrow       ? run<2, 48, true>(a, plan, x)
                          : run<2, 64, true>(a, plan, x);
}
