/* Backward with mma.sync on sm_80 to sm_90 for scores with terms of any kind but a bias. */
#include "backward_ampere.cuh"

heed_status heed_cuda_backward_mma_unbiased(const args &a, float2 *facts, const heed_plan *plan, const heed_exec *x)
{
    return a.q.dtype == HEED_F16 ? run<__half, ampere, UNBIASED>(a, UNBIASED, facts, plan, x)
                                 : run<__nv_bfloat16, ampere, UNBIASED>(a, UNBIASED, facts, plan, x);
}
