/* Backward with mma.sync on sm_80 to sm_90 for scores with a term of one kind. */
#include "backward_ampere.cuh"

heed_status heed_cuda_backward_mma_terms(const args &a, int scores, float2 *facts, const heed_plan *plan,
                                         const heed_exec *x)
{
    return a.q.dtype == HEED_F16 ? run<__half, ampere, BEGUN, WITH_ALIBI, MASKED>(a, scores, facts, plan, x)
                                 : run<__nv_bfloat16, ampere, BEGUN, WITH_ALIBI, MASKED>(a, scores, facts, plan, x);
}
