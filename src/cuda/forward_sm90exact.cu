/* Forward for up to 256 rows and keys on Hopper, fp32, head sizes to 64 (exact_sm90.cuh). A block takes 64 rows, and each of its
 * warpgroups 64 keys; they agree on the largest score, and their sums are added at the end, in order. */
#include "exact_sm90.cuh"

constexpr int MOST_GROUPS = HEED_SHORT / 64;

struct alignas(1024) exact_room {
    exact_tile Q;
    float most[MOST_GROUPS][SHORT_OWN], sum[MOST_GROUPS][SHORT_OWN], weight[SHORT_OWN]; /* of each row */

    /* A group's K, when it is done with V, and at last O on its way out. */
    __device__ exact_tile &met(int group) { return ((exact_tile *)(this + 1))[group]; }
};

/* Four columns of a row of O on its way out. */
__device__ static float4 &way_out(exact_tile &x, int row, int four)
{
    return ((float4 *)x)[row * 16 + (four ^ row % 4 * 2)];
}

/* GENERAL: what the scores need beyond scale and band. */
template <bool GENERAL>
__global__ void __launch_bounds__(SHORT_THREADS *MOST_GROUPS, 1) forward_sm90exact(const __grid_constant__ args a)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(1024) char memory[];
    auto &room = *(exact_room *)memory;
    const int thread = threadIdx.x % SHORT_THREADS, lane = thread % 32, i0 = blockIdx.y * SHORT_OWN;
    const int group = __shfl_sync(~0u, threadIdx.x / SHORT_THREADS, 0);
    let_next_start();
    if (GENERAL || is_ragged(a))
        wait_for_last();
    const span s = span_of(a, own_sequence(a));
    if (i0 >= s.rows)
        return;
    const head x = head_of(a, s, own_head(a));
    const int hk = a.G == 1 ? x.h : x.hk, own = thread / 32 * 16 + lane / 4; /* a division takes its time */
    const meeting see = meet<false, GENERAL>(a, s, i0, min(i0 + SHORT_OWN, s.rows));
    const int n0 = group * 64, first = see.first / 64; /* of the groups that have something to do, one at least */
    const int last = max((see.last + 63) / 64, first + 1), threads = (last - first) * SHORT_THREADS;
    const bool busy = group >= first && group < last;
    const source q = query_rows<float>(a.q, s, x.h, min(i0 + SHORT_OWN, s.rows) - 1, a.D);
    const source k = key_rows<float>(a, a.k, s, hk, see.last - 1, a.D);
    const source v = key_rows<float>(a, a.v, s, hk, see.last - 1, a.Dv);
    exact_tile &met = room.met(group);
    wait_for_last(q.first, k.first, v.first);
    exact_rows<4> V;
    {
        exact_rows<2> Q;
        exact_rows<4> K;
        Q.load(q, i0, threadIdx.x, blockDim.x);
        if (busy)
            K.load(k, n0, thread);
        Q.put(room.Q, threadIdx.x, blockDim.x);
        if (busy)
            K.put(met, thread);
    }
    fence_async();
    if (busy) /* not before: all multiprocessors ask at the same time, and Q K^T would wait for V too */
        V.load(v, n0, thread);
    __syncthreads();
    if (!busy) /* nobody waits for those who have left */
        return;
    const float scale = GENERAL ? 1.0f : a.scale, c = fmaxf(fminf(scale * LOG2E, 3e38f), 1.2e-38f);
    float S[32];
    multiply_exact<false, 1>(S, room.Q, met);
    wgmma_wait<0>();
    /* Parts of such V would not be normal numbers. All have done with K. */
    const bool tiny = __syncthreads_and(is_tiny(V.bits()));
    if (tiny)
        V.multiply(1 / TINY);
    V.put(met, thread);
    fence_async();
#pragma unroll
    for (int i = 0; i < 32; i++)
        S[i] = whole_sum(S[i]);
    query_scores<64, true> t = { S, i0 + own, n0 + lane % 4 * 2 };
    const bool whole = n0 >= see.inside && n0 + 64 <= see.outside;
    find_scores<GENERAL>(t, a, s, x, whole);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float most = t.at(r, 0);
#pragma unroll
        for (int i = 1; i < t.C; i++)
            most = fmaxf(most, t.at(r, i));
        most = quad_max(most);
        if (lane % 4 == 0)
            room.most[group][own + 8 * r] = most;
    }
    __syncthreads(); /* V and the largest scores are there */
    const auto largest = [&](int row) {
        float most = -CUDART_INF_F;
#pragma unroll
        for (int g = 0; g < MOST_GROUPS; g++)
            if (g >= first && g < last)
                most = fmaxf(most, room.most[g][row]);
        return most;
    };
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const exponent e(c, largest(own + 8 * r));
        float sum[2] = {};
        if (e.large()) {
#pragma unroll
            for (int i = 0; i < t.C; i++)
                t.at(r, i) -= e.first;
        }
#pragma unroll
        for (int i = 0; i < t.C; i++)
            sum[i % 2] += t.at(r, i) = exp2_fast(fmaf(t.at(r, i), c, -e.then));
        const float all = quad_sum(sum[0] + sum[1]);
        if (lane % 4 == 0)
            room.sum[group][own + 8 * r] = all;
    }
    const left_exact P(S);
    float O[32];
    multiply_exact(O, P, met);
    __syncthreads(); /* the sums are there */
    if (group == first && thread < SHORT_OWN && i0 + thread < s.rows) {
        float sum = 0.0f;
#pragma unroll
        for (int g = 0; g < MOST_GROUPS; g++)
            if (g >= first && g < last)
                sum += room.sum[g][thread];
        const float sink = a.sink.data ? load(a.sink, row_at(a.sink, 0, x.h, 0)) : -CUDART_INF_F;
        const merged_row y(make_float2(largest(thread), sum), make_float2(-CUDART_INF_F, 0.0f), c, scale, sink);
        room.weight[thread] = y.sum == 0.0f ? 0.0f : tiny ? y.weight[0] * TINY : y.weight[0];
        if (a.lse.data)
            ((float *)a.lse.data)[row_at(a.lse, s.q_batch, x.h, s.q_row + i0 + thread)] = y.lse(scale, sink);
    }
    wgmma_wait<0>();
    __syncthreads(); /* all have done with V */
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float2 *const to = (float2 *)&way_out(met, own + 8 * r, 2 * n + lane % 4 / 2) + lane % 2;
            *to = make_float2(whole_sum(O[4 * n + 2 * r]), whole_sum(O[4 * n + 2 * r + 1]));
        }
    __syncthreads();
    const int four = thread % 16;
    if (four * 4 >= a.Dv)
        return;
    float *const o = (float *)a.o.data + row_at(a.o, s.q_batch, x.h, s.q_row + i0) + four * 4;
#pragma unroll 1
    for (int row = ((group - first) * SHORT_THREADS + thread) / 16; row < min(SHORT_OWN, s.rows - i0);
         row += threads / 16) {
        const float weight = room.weight[row];
        float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int g = 0; g < MOST_GROUPS; g++)
            if (g >= first && g < last && weight != 0.0f) {
                const float4 p = way_out(room.met(g), row, four);
                y.x += p.x, y.y += p.y, y.z += p.z, y.w += p.w;
            }
        *(float4 *)(o + row * a.o.stride[2]) = make_float4(y.x * weight, y.y * weight, y.z * weight, y.w * weight);
    }
#endif
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

size_t heed_forward_workspace_sm90exact(const heed_problem *p, const heed_plan *plan)
{
    (void)p, (void)plan;
    return 0;
}

heed_status heed_forward_sm90exact(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    const prologue start(p, x);
    const args &a = start.a;
    if (start.status)
        return start.status;
    const int groups = (int)HEED_MAX(tiles_of(keys_of(a), 64), 2); /* with one there are no registers for all of Q */
    const dim3 grid = grid_of(a, tiles_of(a.Sq, SHORT_OWN));
    return launch_early(is_general(a) ? forward_sm90exact<true> : forward_sm90exact<false>, grid,
                        dim3(SHORT_THREADS * groups),
                        room_for_one(sizeof(exact_room) + groups * sizeof(exact_tile), grid, plan), plan, x, a);
}
