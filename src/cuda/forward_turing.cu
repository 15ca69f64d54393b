/* Forward with the tensor cores of Turing, for fp16: forward_mma.cuh with products 8 deep, copies through registers,
 * and tiles for 64 KB of shared memory. It runs on chips up to Hopper, which have
 * better. */
#define HEED_LIKE_TURING
#include "forward_mma.cuh"

struct turing {
    static constexpr int SHARED_BYTES = 64 * 1024, HEAD_DIM = 128, UNBIASED_HEAD_DIM = 0, DROPS_UNBIASED = 0;
    static constexpr bool CAPS_UNBIASED = false;
    template <int D, int SCORES> static constexpr bool V_EARLY = true;
    template <int D, int SCORES> using tiles = block_tiles<4, 1, D == 128 && SCORES == GENERAL ? 32 : 64, 1, 2>;
};

size_t heed_forward_workspace_turing(const heed_problem *p, const heed_plan *plan)
{
    (void)p, (void)plan;
    return 0;
}

heed_status heed_forward_turing(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    prologue call(p, x);
    if (call.status)
        return call.status;
    return run<__half, turing, PLAIN, GENERAL>(call.a, scores_of<turing>(call.a, plan->device.arch), x);
}
