/* Backward for fp32 on tensor cores, head sizes from 129 to 256, where a block may have as much shared memory as on Hopper:
 * backward_split.cuh. The kernel also computes what backward_sm90split_wide.cu leaves. */
#include "backward_split.cuh"

static_assert(sizeof(shared_backward<256>) <= 227 * 1024, "what a block may have");

size_t heed_backward_workspace_splitwide(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return backward_split_bytes(p);
}

/* A block for each tile, and none of them marked. */
static heed_status run_whole(const args &a, const split_tensors &split, const heed_exec *x)
{
    return run_marked<256>(a, split, {}, INT64_MAX, x);
}

heed_status heed_backward_splitwide(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    return split_width_of(p) <= 128 ? heed_backward_split(p, plan, x) : backward_split_by(run_whole, p, x);
}

heed_status heed_cuda_backward_marked_wide(const args &a, const split_tensors &split, const marked &only, int blocks,
                                           const heed_exec *x)
{
    return run_marked<256>(a, split, only, blocks, x);
}
