/* Backward for Hopper in one kernel, fp16 and bf16, head sizes to 128: S, P and dS are computed once for all three
 * gradients, and dQ is summed in memory, by one tile of keys after the other. See backward_sm90_keys.cuh. */
#include "backward_sm90_keys.cuh"

/* Ordinary pieces of work have code of their own: what parts need would be in its way. */
template <int SHARED_OR_NOT> static backward_kernel kernel_of(int head_dim)
{
    constexpr int WAYS = AHEAD | OWNER | SHARED_OR_NOT;
    return head_dim <= 64   ? keys_kernel<backward_shape<true, 64, 128, 2, 4, 4, EXACT | WAYS, 3>>()
           : head_dim <= 96 ? keys_kernel<backward_shape<true, 96, 128, 1, 2, 2, EXACT | WAYS, 2>>()
                            : keys_kernel<backward_shape<true, 128, 128, 1, 2, 2, WAYS, 2>>();
}

static backward_form form_of(const heed_problem *p)
{
    const int head_dim = (int)HEED_MAX(p->D, p->Dv);
    return { heed_sm90_dkv(head_dim), heed_sm90_dq(head_dim), kernel_of<0>(head_dim), kernel_of<SHARED>(head_dim) };
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
