/* Forward with mma.sync on sm_80 to sm_90 for scores with a term of one kind, and for all but a bias. */
#include "forward_ampere.cuh"

heed_status heed_cuda_forward_mma_terms(const args &a, int scores, const heed_exec *x)
{
    return a.q.dtype == HEED_F16 ? run<__half, ampere, BEGUN, WITH_ALIBI, MASKED, UNBIASED>(a, scores, x)
                                 : run<__nv_bfloat16, ampere, BEGUN, WITH_ALIBI, MASKED, UNBIASED>(a, scores, x);
}
