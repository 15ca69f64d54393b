/* Forward with mma.sync for fp16 and bf16 on sm_80 and later. */
#include "forward_ampere.cuh"

size_t heed_forward_workspace_mma(const heed_problem *p, const heed_plan *plan)
{
    (void)p, (void)plan;
    return 0;
}

heed_status heed_forward_mma(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    prologue call(p, x);
    const args &a = call.a;
    if (call.status)
        return call.status;
    const int scores = scores_of<ampere>(a, plan->device.arch);
    if (scores != PLAIN && scores != GENERAL)
        return heed_cuda_forward_mma_terms(a, scores, x);
    return scores == GENERAL       ? run<either, ampere, GENERAL>(a, scores, x)
           : a.q.dtype == HEED_F16 ? run<__half, ampere, PLAIN>(a, scores, x)
                                   : run<__nv_bfloat16, ampere, PLAIN>(a, scores, x);
}
