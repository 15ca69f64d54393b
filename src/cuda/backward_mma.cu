/* Backward with mma.sync for fp16 and bf16 on sm_80 and later. */
#include "backward_ampere.cuh"

size_t heed_backward_workspace_mma(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return backward_workspace(p);
}

heed_status heed_backward_mma(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    backward_prologue call(p, x);
    const args &a = call.a;
    if (call.status)
        return call.status;
    const int scores = fitting_scores_of<ampere>(a, plan->device);
    if (scores == GENERAL)
        return heed_cuda_backward_mma_general(a, call.facts, plan, x);
    if (scores == UNBIASED)
        return heed_cuda_backward_mma_unbiased(a, call.facts, plan, x);
    if (scores != PLAIN)
        return heed_cuda_backward_mma_terms(a, scores, call.facts, plan, x);
    return a.q.dtype == HEED_F16 ? run<__half, ampere, PLAIN>(a, scores, call.facts, plan, x)
                                 : run<__nv_bfloat16, ampere, PLAIN>(a, scores, call.facts, plan, x);
}
