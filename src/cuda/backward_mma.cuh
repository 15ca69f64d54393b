/* The tensor-core backward for fp16 and bf16, head sizes to 256, without atomics:
 *
 *     dK/dV kernel    owns 64 or 128 keys, 16 MT to a warp, and meets the queries of its group's heads
 *     dQ kernel       owns 64 or 128 queries, likewise, and meets the keys
 *
 * Either keeps its results in registers, computes S and dP with its own side as rows, and so has P and dS in the layout
 * of a left operand: neither leaves the lanes that computed it, but where two warps share their keys (in_pairs). What a kernel
 * meets is copied two tiles deep. At D = 256 the registers of a warp hold dK or dV of its 16 keys, not both: then there is a
 * kernel for each. dQ needs nothing of dK and dV, and begins on multiprocessors that those leave idle in the end.
 *
 * A Chip says how many rows and columns to take at once, SCORES what is needed beyond scale and band (scores_mma.cuh). */
#ifndef HEED_CUDA_BACKWARD_MMA_CUH
#define HEED_CUDA_BACKWARD_MMA_CUH

#include "backward_mma_queries.cuh"
#include "backward_mma_keys.cuh"

static int64_t keys_on_stride(const args &a) { return a.Sk > a.col ? (a.Sk - 1 - a.col) / a.col_step + 1 : 0; }

template <class T, int D, int SCORES, int WHICH, class Chip>
static heed_status run_keys(const args &a, const float2 *facts, const heed_plan *plan, const heed_exec *x)
{
    typedef typename Chip::template key_tiles<D, SCORES == GENERAL> Tiles;
    typedef shared_dkv<D, Tiles> shared;
    static_assert(SCORES == MASKED || SCORES == UNBIASED ||
                  sizeof(shared) + Tiles::SLOTS * shared::extras::most_bytes(SCORES) <= Chip::SHARED_BYTES);
    const tile_order order = order_tiles(tiles_of(keys_on_stride(a), Tiles::OWN), a.Hk, (int64_t)a.Sq * a.G, a);
    const bool near = near_bias<D>(SCORES, plan->device.arch);
    const size_t bytes = sizeof(shared) + Tiles::SLOTS * shared::extras::bytes(a, SCORES, near),
                 halves = in_pairs<D, Chip>(SCORES) ? shared::HALVES : 0;
    return launch(dkv_mma<T, D, SCORES, WHICH, Chip>, order.blocks(), Tiles::THREADS,
                  bytes + (bytes + halves <= plan->device.shared_bytes ? halves : 0), x, with_unit<SCORES>(a), facts,
                  order);
}

template <class T, int D, int SCORES, class Chip>
static heed_status run_queries(const args &a, const float2 *facts, bool early, const heed_plan *plan,
                               const heed_exec *x)
{
    typedef typename Chip::template query_tiles<D, SCORES == GENERAL> Tiles;
    typedef shared_dq<D, Tiles> shared;
    static_assert(SCORES == MASKED || SCORES == UNBIASED ||
                  sizeof(shared) + shared::extras::most_bytes(SCORES) <= Chip::SHARED_BYTES);
    const tile_order order = order_tiles(tiles_of(a.Sq, Tiles::OWN), a.Hq, (int64_t)a.Sk / a.G, a);
    const bool near = near_bias<D>(SCORES, plan->device.arch);
    const size_t bytes = sizeof(shared) + shared::extras::bytes(a, SCORES, near);
    const auto kernel = dq_mma<T, D, SCORES, Chip>;
    const bool waits = Chip::STARTS_EARLY && SCORES < UNBIASED; /* the others' code is of before sm_90 on all chips */
    return early && waits && plan->device.arch >= 90
               ? launch_next(kernel, order.blocks(), Tiles::THREADS, bytes, x, with_unit<SCORES>(a), facts, order)
               : launch(kernel, order.blocks(), Tiles::THREADS, bytes, x, with_unit<SCORES>(a), facts, order);
}

template <class T, int D, int SCORES, class Chip>
static heed_status run_scores(const args &a, float2 *facts, const heed_plan *plan, const heed_exec *x)
{
    heed_status status = heed_cuda_row_facts(a, unit_of_lse<SCORES>(a), facts, x);
    if (status)
        return status;
    const bool keys = (a.d_k.data || a.d_v.data) && keys_on_stride(a) > 0;
    if constexpr (D == 256) {
        if (a.d_v.data)
            status = run_keys<T, D, SCORES, ONLY_DV, Chip>(a, facts, plan, x);
        if (!status && a.d_k.data)
            status = run_keys<T, D, SCORES, ONLY_DK, Chip>(a, facts, plan, x);
    } else if (keys)
        status = run_keys<T, D, SCORES, BOTH, Chip>(a, facts, plan, x);
    if (!status && a.d_q.data)
        status = run_queries<T, D, SCORES, Chip>(a, facts, keys, plan, x);
    return status;
}

/* The plain kernels' tiles leave room for more on some chips only. */
template <int D, class Chip> static bool fits(const args &a, int scores, size_t shared_bytes)
{
    typedef shared_dkv<D, typename Chip::template key_tiles<D, false>> keys;
    typedef shared_dq<D, typename Chip::template query_tiles<D, false>> queries;
    return HEED_MAX(sizeof(keys) + keys::SLOTS * keys::extras::bytes(a, scores),
                    sizeof(queries) + queries::extras::bytes(a, scores)) <= shared_bytes;
}

/* The least that will do, and fits. */
template <class Chip> static int fitting_scores_of(const args &a, const heed_device &device)
{
    const int scores = scores_of<Chip>(a, device.arch), width = width_of(a);
    return scores == PLAIN || (width == 64 && fits<64, Chip>(a, scores, device.shared_bytes)) ||
                   (width == 128 && fits<128, Chip>(a, scores, device.shared_bytes))
               ? scores
               : GENERAL;
}

template <class T, class Chip, int... KINDS>
static heed_status run(const args &a, int scores, float2 *facts, const heed_plan *plan, const heed_exec *x)
{
    return run_kind<Chip, KINDS...>(a, scores, [&](auto width, auto kind) {
        return run_scores<T, decltype(width)::value, decltype(kind)::value, Chip>(a, facts, plan, x);
    });
}

/* How a launch begins: all that prologue does. At the workspace's start there is room for the facts of each row of q. */
struct backward_prologue : prologue {
    float2 *facts;
    backward_prologue(const heed_problem *p, const heed_exec *x)
        : prologue(p, x, heed_cuda_facts_bytes(p)), facts((float2 *)x->workspace)
    {
    }
};

inline size_t backward_workspace(const heed_problem *p) { return heed_cuda_facts_bytes(p) + heed_cuda_delta_bytes(p); }

#endif
