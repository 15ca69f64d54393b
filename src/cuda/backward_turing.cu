/* Backward with the tensor cores of Turing, for fp16: backward_mma.cuh with products 8 deep, copies through
 * registers, and tiles for 64 KB of shared memory. It runs on chips up to Hopper, which have
 * better. */
#define HEED_LIKE_TURING
#include "backward_mma.cuh"

struct turing {
    static constexpr int SHARED_BYTES = 64 * 1024, HEAD_DIM = 128, UNBIASED_HEAD_DIM = 0, DROPS_UNBIASED = 0;
    static constexpr bool CAPS_UNBIASED = false, PAIRS = false, STARTS_EARLY = false; /* its PTX is that of Turing */
    template <int D, bool GENERAL> using query_tiles = block_tiles<4, 1, D == 64 ? 32 : 16, 2, 2>;
    template <int D, bool GENERAL> using key_tiles = block_tiles<4, 1, D == 64 ? 32 : 16, 2, 2>;
};

size_t heed_backward_workspace_turing(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return backward_workspace(p);
}

heed_status heed_backward_turing(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    backward_prologue call(p, x);
    if (call.status)
        return call.status;
    return run<__half, turing, PLAIN, GENERAL>(call.a, fitting_scores_of<turing>(call.a, plan->device), call.facts,
                                               plan, x);
}
