/* Backward for Hopper in one kernel, fp16 and bf16, head sizes to 128: S, P and dS are computed once for all three
 * gradients, and dQ is summed in memory, in no particular order. See backward_sm90_keys.cuh. */
#include "backward_sm90_keys.cuh"

template <int D> struct all_shape;
template <> struct all_shape<64> : backward_shape<true, 64, 128, 2, 4, 4, 0, BY_ONE> {
};
template <> struct all_shape<96> : backward_shape<true, 96, 128, 1, 2, 2, 0, BY_ONE> {
};
template <> struct all_shape<128> : backward_shape<true, 128, 128, 1, 2, 2, 0, BY_ALL> {
};

static heed_status run(const backward_job &p, int head_dim, int blocks, const heed_exec *x)
{
    return head_dim <= 64   ? run_shape<all_shape<64>>(p, blocks, x)
           : head_dim <= 96 ? run_shape<all_shape<96>>(p, blocks, x)
                            : run_shape<all_shape<128>>(p, blocks, x);
}

size_t heed_backward_workspace_sm90fused(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return heed_sm90_backward_bytes(p, true);
}

heed_status heed_backward_sm90fused(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    (void)plan;
    return heed_sm90_backward(p, run, x);
}
