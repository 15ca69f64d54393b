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
    int scores = scores_of<ampere>(a, plan->device.arch);
    if (plan->device.arch >= UNMEASURED_ARCH && scores != PLAIN)
        scores = GENERAL; /* for others Blackwell's compilers are a few registers short */
    if (scores != PLAIN && scores != GENERAL)
        return heed_cuda_forward_mma_terms(a, scores, x);
    return a.q.dtype == HEED_F16 ? run<__half, ampere, PLAIN, GENERAL>(a, scores, x)
                                 : run<__nv_bfloat16, ampere, PLAIN, GENERAL>(a, scores, x);
}
