/* Forward for fp32 on tensor cores, head sizes to 256, on sm_80 to sm_90: which of the kernels of forward_split.cuh, and when
 * keys are split before it. */
#include "forward_split.cuh"

/* From this many keys on, splitting them once for all blocks is worth a launch. */
constexpr int MANY_KEYS = 512;

template <int D, bool GENERAL, bool ALONE, int SLOTS>
__global__ void __launch_bounds__(THREADS, 2)
    forward_split(const __grid_constant__ args a, const __grid_constant__ split_tensors split, int tiles,
                  int exact_below)
{
#if HEED_SPLIT_HERE
    compute_tile<D, GENERAL, ALONE, false, SLOTS>(a, split, blockIdx.x, tiles, exact_below, NULL);
#endif
}

template <int D, bool GENERAL, bool ALONE, int SLOTS = 2>
static heed_status run(const args &a, const split_tensors &split, const heed_exec *x)
{
    constexpr int BYTES = sizeof(shared_split<D, ALONE, SLOTS>);
    static_assert(BYTES <= (SLOTS == 2 ? HEED_SHARED_SMALL : SHARED_HALF), "what a block may have");
    const int64_t tiles = tiles_of(a.Sq, shape<D, ALONE, SLOTS>::BR), blocks = tiles * a.Hq * a.B;
    return launch(forward_split<D, GENERAL, ALONE, SLOTS>, blocks, THREADS, BYTES, x, a, split, (int)tiles,
                  split_exact_below(a));
}

static bool is_general(const heed_attention &a, uint32_t drop_below)
{
    return a.softcap > 0 || a.bias.data || a.alibi.data || a.mask.data || drop_below || a.scale <= 0;
}

/* General scores beside 32 rows for each warp, as blocks that find their keys split have them at D = 64, would spill. */
static bool splits_alone(const heed_problem *p)
{
    return split_width_of(p) <= 128 &&
           (p->Sk / p->a.key_stride < MANY_KEYS || (is_general(p->a, p->drop_below) && split_width_of(p) == 64));
}

static int split_before(const heed_problem *p) { return SPLIT_KEYS | (split_width_of(p) == 256 ? SPLIT_QUERIES : 0); }

size_t heed_forward_workspace_split(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    split_tensors split = {};
    return splits_alone(p) ? 0 : split_place(p, split_before(p), NULL, split);
}

heed_status heed_forward_split(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    const prologue start(p, x);
    const args &a = start.a;
    const bool narrow = split_width(a) == 64, wide = split_width(a) == 256, general = is_general(p->a, p->drop_below);
    split_tensors split = {};
    if (start.status)
        return start.status;
    if (splits_alone(p) && narrow)
        return general ? run<64, true, true>(a, split, x) : run<64, false, true>(a, split, x);
    if (splits_alone(p))
        return general ? run<128, true, true>(a, split, x) : run<128, false, true>(a, split, x);
    split_place(p, split_before(p), (char *)x->workspace, split);
    const heed_status status = heed_cuda_split(a, split, false, NULL, x);
    if (status)
        return status;
    if (wide)
        return plan->device.shared_bytes >= SHARED_HALF ? run<256, true, false, 3>(a, split, x)
                                                        : run<256, true, false>(a, split, x); /* ptxas spills others */
    return narrow    ? run<64, false, false>(a, split, x)
           : general ? run<128, true, false>(a, split, x)
                     : run<128, false, false>(a, split, x);
}
