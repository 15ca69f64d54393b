/* Backward with mma.sync for scores with terms of any kind. */
#include "backward_ampere.cuh"

heed_status heed_cuda_backward_mma_general(const args &a, float2 *facts, const heed_plan *plan, const heed_exec *x)
{
    return run<either, ampere, GENERAL>(a, GENERAL, facts, plan, x);
}
