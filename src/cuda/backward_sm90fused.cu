/* Backward for Hopper in one kernel, fp16 and bf16, head sizes to 128: S, P and dS are computed once for all three
 * gradients, and dQ is summed in memory, by one tile of keys after the other. See backward_sm90_keys.cuh. */
#include "backward_sm90_keys.cuh"

static backward_form form_of(const heed_problem *p)
{
    const int head_dim = (int)HEED_MAX(p->D, p->Dv);
    return { heed_sm90_dkv(head_dim), heed_sm90_dq(head_dim),
             head_dim <= 64   ? keys_kernel<backward_shape<true, 64, 128, 2, 4, 4, EXACT | AHEAD | OWNER, 3>>()
             : head_dim <= 96 ? keys_kernel<backward_shape<true, 96, 128, 1, 2, 2, AHEAD | EXACT | OWNER, 2>>()
                              : keys_kernel<backward_shape<true, 128, 128, 1, 2, 2, AHEAD | OWNER, 2>>() };
}

size_t heed_backward_workspace_sm90fused(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return heed_sm90_backward_bytes(p, form_of(p));
}

heed_status heed_backward_sm90fused(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    (void)plan;
    return heed_sm90_backward(p, form_of(p), x);
}
