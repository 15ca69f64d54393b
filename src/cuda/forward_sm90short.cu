/* Forward for up to 256 rows and keys on Hopper, fp16 and bf16: short_sm90.cuh. */
#include "short_sm90.cuh"

/* Of rows of D columns, in boxes of 64. Q is also the way out. V has a place of its own, or takes K's: then more blocks are at work
 * on a multiprocessor at once, each of which waits twice. */
template <int D, int KEYS> struct forward_room {
    static constexpr int BOXES = (D + 63) / 64;
    char Q[BOXES][SHORT_OWN * 128], K[BOXES][KEYS * 128], V[BOXES][KEYS * 128];
};

/* lse of a row, and what its O is to be multiplied by: 0 where it saw no key. */
template <bool GENERAL>
__device__ static float conclude(float m, float sum, float c, float scale, float sink, float &weight)
{
    if (GENERAL && sink != -CUDART_INF_F) {
        const merged_row y(make_float2(m, sum), make_float2(-CUDART_INF_F, 0.0f), c, scale, sink);
        weight = y.weight[0];
        return y.lse(scale, sink);
    }
    const float LN2 = 0.693147182f, log = __logf(sum);
    const exponent e(c, m);
    weight = sum == 0.0f ? 0.0f : reciprocal_fast(sum);
    return sum == 0.0f ? -CUDART_INF_F : e.large() ? fmaf(e.m, scale, log) : fmaf(e.then, LN2, log);
}

/* So many on a multiprocessor, where the GPU is full. */
template <int D, int KEYS>
constexpr int most_blocks = D > 192       ? 2
                            : D > 128     ? 3
                            : D > 64      ? 4
                            : KEYS <= 64  ? 6
                            : KEYS <= 96  ? 5
                            : KEYS <= 192 ? 4
                                          : 3;

template <int N> struct number {
    static constexpr int value = N;
};

/* Keys are met N at once and then LAST, where there are so many. GENERAL: a sink, or what the scores need beyond scale and a band
 * of steps of 1. group: queries' heads for each of keys, by which a division would take its time. in_turn: V takes K's place. */
template <class T, int D, int N, int LAST, bool GENERAL>
__global__ void __launch_bounds__(SHORT_THREADS, most_blocks<D, N + LAST> - (D <= 128 && GENERAL))
    forward_sm90short(const __grid_constant__ args a, divisor group, int in_turn)
{
#if __CUDA_ARCH__ >= 900
    constexpr int KEYS = N + LAST;
    extern __shared__ __align__(1024) char memory[];
    auto &room = *(forward_room<D, KEYS> *)memory;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i0 = blockIdx.y * SHORT_OWN;
    const bool turns = D > 64 && in_turn;
    let_next_start();
    wait_where_needed<GENERAL>(a);
    const span s = span_of(a, own_sequence(a));
    if (i0 >= s.rows)
        return;
    const head x = head_of(a, s, own_head(a));
    const int hk = group.divide(x.h), row = i0 + warp * 16 + lane / 4;
    const meeting see = meet<false, GENERAL>(a, s, i0, min(i0 + SHORT_OWN, s.rows));
    const int first = see.first & ~7;
    const source q = query_rows<T>(a.q, s, x.h, s.rows - 1, a.D);
    const source k = key_rows<T>(a, a.k, s, hk, see.last - 1, a.D);
    const source v = key_rows<T>(a, a.v, s, hk, see.last - 1, a.Dv);
    char *const V = turns ? room.K[0] : room.V[0];
    wait_for_last(q.first, k.first, v.first);
    copy_boxes<D>(room.Q[0], q, i0, SHORT_OWN, sizeof(room.Q[0]));
    copy_boxes<D, true>(room.K[0], k, first, N, KEYS * 128);
    commit_copies();
    if (!turns) {
        copy_boxes<D, true>(V, v, first, N, KEYS * 128);
        commit_copies();
    }
    if (LAST) {
        copy_boxes<D, true>(room.K[0] + N * 128, k, first + N, LAST, KEYS * 128);
        commit_copies();
        if (!turns) {
            copy_boxes<D, true>(V + N * 128, v, first + N, LAST, KEYS * 128);
            commit_copies();
        }
    }
    const float scale = GENERAL ? 1.0f : a.scale, c = fmaxf(fminf(scale * LOG2E, 3e38f), 1.2e-38f);
    float O[D / 2], m[2] = { -CUDART_INF_F, -CUDART_INF_F }, l[2] = {};
    const auto meet_keys =
        [&](auto size, int met) { /* so many, of which the first is number `met` of all */
                                  constexpr int M = decltype(size)::value;
                                  const int n0 = first + met,
                                            pending = LAST && !met ? (turns ? 1 : 2) : 0; /* of the next keys */
                                  float S[M / 2];
                                  query_scores<M> t = { S, row, n0 + lane % 4 * 8 };
                                  query_terms<T, M> terms;
                                  if (GENERAL)
                                      terms.ask(a, s, x, t);
                                  wait_for_tiles(turns ? pending : pending + 1);
                                  wgmma_fence();
                                  multiply_rows<T, D, SHORT_OWN, KEYS, M>(S, tile_at(shared_address(room.Q)),
                                                                          tile_at(shared_address(room.K) + met * 128));
                                  wgmma_commit();
                                  if (!turns)
                                      wait_for_tiles(pending);
                                  wgmma_wait<0>();
                                  if (turns) {
                                      __syncthreads(); /* all have done with K */
                                      copy_boxes<D, true>(V + met * 128, v, n0, M, KEYS * 128);
                                      commit_copies();
                                  }
                                  const bool whole = n0 >= see.inside && n0 + M <= see.outside;
                                  if (GENERAL)
                                      terms.score(t, a, s, x);
                                  hide_band<GENERAL>(t, a, s, whole);
                                  float rescale[2];
                                  softmax_step(t, m, l, rescale, c);
                                  if (LAST && met)
#pragma unroll
                                      for (int i = 0; i < D / 2; i++)
                                          O[i] *= rescale[i / 2 % 2];
                                  uint32_t P[M / 16][4];
                                  pack_rows<T, M>(P, S);
                                  if (turns)
                                      wait_for_tiles();
                                  wgmma_fence();
                                  multiply_columns<T, D, M>(O, P, tile_at(shared_address(V) + met * 128, KEYS * 128),
                                                            met); /* O += P V */
                                  wgmma_commit();
                                  if (LAST)
                                      wgmma_wait<0>();
        };
    if constexpr (LAST == N) {
        int met = 0;
        do /* once at least: what it meets may be hidden */
            meet_keys(number<N>(), met);
        while ((met += N) < N + LAST && first + met < see.last);
    } else {
        meet_keys(number<N>(), 0);
        if constexpr (LAST > 0)
            if (first + N < see.last)
                meet_keys(number<LAST>(), N);
    }
    const float sink = GENERAL && a.sink.data ? load(a.sink, row_at(a.sink, 0, x.h, 0)) : -CUDART_INF_F;
    float weight[2], lse[2];
#pragma unroll
    for (int r = 0; r < 2; r++)
        lse[r] = conclude<GENERAL>(m[r], quad_sum(l[r]), c, scale, sink, weight[r]);
    if (a.lse.data && lane % 4 == 0) {
        float *const to = (float *)a.lse.data + row_at(a.lse, (unsigned)s.q_batch, (unsigned)x.h, s.q_row + row);
        if (row < s.rows)
            to[0] = lse[0];
        if (row + 8 < s.rows)
            to[8 * a.lse.stride[2]] = lse[1];
    }
    wgmma_wait<0>();
    wait_for_tiles(); /* all have done with Q */
    const int own = i0 + warp * 16;
    store_rows<T>(room.Q[0] + warp * (16 * 128), O, weight[0], weight[1], a.o,
                  row_at(a.o, (unsigned)s.q_batch, (unsigned)x.h, s.q_row + own), a.o.stride[2], s.rows - own, a.Dv);
#endif
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

template <class T, int D, int N, int LAST, bool GENERAL>
static heed_status run_kernel(const args &a, const heed_plan *plan, const heed_exec *x)
{
    typedef forward_room<D, N + LAST> room;
    const dim3 grid = grid_of(a, tiles_of(a.Sq, SHORT_OWN));
    const int64_t blocks = (int64_t)grid.x * grid.y * grid.z, held = plan->device.shared_bytes / sizeof(room);
    const int in_turn = D > 64 && blocks > held * plan->device.units;
    return launch_early(forward_sm90short<T, D, N, LAST, GENERAL>, grid, dim3(SHORT_THREADS),
                        room_for_one(in_turn ? sizeof(room) - sizeof(room::V) : sizeof(room), grid, plan), plan, x, a,
                        divisor_of(a.G), in_turn);
}

static bool needs_general(const args &a) { return is_general(a) || a.sink.data; }

/* Where few will need it, one kernel for all keys: those that are not there add zeros. */
template <class T, int D> static heed_status run_wide(const args &a, const heed_plan *plan, const heed_exec *x)
{
    const int keys = keys_of(a);
    if (needs_general(a))
        return run_kernel<T, D, 128, 0, true>(a, plan, x);
    return keys <= 64   ? run_kernel<T, D, 64, 0, false>(a, plan, x)
           : keys <= 96 ? run_kernel<T, D, 96, 0, false>(a, plan, x)
                        : run_kernel<T, D, 128, 0, false>(a, plan, x);
}

template <class T, int N, int LAST>
static heed_status run_narrow(const args &a, const heed_plan *plan, const heed_exec *x)
{
    return needs_general(a) ? run_kernel<T, 64, N, LAST, true>(a, plan, x)
                            : run_kernel<T, 64, N, LAST, false>(a, plan, x);
}

template <class T> static heed_status run(const args &a, const heed_plan *plan, const heed_exec *x)
{
    const int keys = keys_of(a), width = HEED_MAX(a.D, a.Dv);
    if (width > 64)
        return width <= 96    ? run_wide<T, 96>(a, plan, x)
               : width <= 128 ? run_wide<T, 128>(a, plan, x)
               : width <= 192 ? run_wide<T, 192>(a, plan, x)
                              : run_wide<T, 256>(a, plan, x);
    return keys <= 64    ? run_narrow<T, 64, 0>(a, plan, x)
           : keys <= 96  ? run_narrow<T, 96, 0>(a, plan, x)
           : keys <= 128 ? run_narrow<T, 128, 0>(a, plan, x)
           : keys <= 192 ? run_narrow<T, 128, 64>(a, plan, x)
                         : run_narrow<T, 128, 128>(a, plan, x);
}

size_t heed_forward_workspace_sm90short(const heed_problem *p, const heed_plan *plan)
{
    (void)p, (void)plan;
    return 0;
}

heed_status heed_forward_sm90short(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    const prologue start(p, x);
    const args &a = start.a;
    if (start.status)
        return start.status;
    return a.q.dtype == HEED_F16 ? run<__half>(a, plan, x) : run<__nv_bfloat16>(a, plan, x);
}
