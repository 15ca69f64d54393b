/* Backward for fp32 on tensor cores, head sizes to 128, on sm_80 to sm_90: backward_split.cuh. */
#include "backward_split.cuh"

static_assert(sizeof(shared_backward<64>) <= HEED_SHARED_SMALL && sizeof(shared_backward<128>) <= HEED_SHARED_SMALL,
              "what a block may have on sm_86, 89 and 120");

size_t heed_backward_workspace_split(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return backward_split_bytes(p);
}

/* One kernel for all scores at D = 128: the lean one spills there. */
static heed_status run_either(const args &a, const split_tensors &split, const heed_exec *x)
{
    return split_width(a) == 128           ? run<128, true>(a, split, x)
           : has_extras(a) || a.scale <= 0 ? run<64, true>(a, split, x)
                                           : run<64, false>(a, split, x);
}

heed_status heed_backward_split(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    (void)plan;
    return backward_split_by(run_either, p, x);
}
