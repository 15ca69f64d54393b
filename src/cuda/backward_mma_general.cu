/* Backward with mma.sync for scores with terms of any kind. */
#include "backward_ampere.cuh"

heed_status heed_cuda_backward_mma_general(const args &a, int scores, float2 *facts, const heed_plan *plan,
                                           const heed_exec *x)
{
    return a.q.dtype == HEED_F16 ? run<__half, ampere, UNBIASED, GENERAL>(a, scores, facts, plan, x)
                                 : run<__nv_bfloat16, ampere, UNBIASED, GENERAL>(a, scores, facts, plan, x);
}
