/* Forward with mma.sync for fp16 and bf16 on sm_80 and later: the sizes that forward_mma.cuh works with there. */
#include "forward_mma.cuh"

/* Blackwell's compilers are a few registers short. The host, which reserves the memory, takes the larger tiles. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool SHORT_OF_REGISTERS = true;
#else
constexpr bool SHORT_OF_REGISTERS = false;
#endif

struct ampere {
    static constexpr int SHARED_BYTES = HEED_SHARED_SMALL, HEAD_DIM = 256, UNBIASED_HEAD_DIM = 128,
                         DROPS_UNBIASED = 128;
    static constexpr bool CAPS_UNBIASED = true;
    template <int D, int SCORES>
    static constexpr bool V_EARLY = SCORES != BEGUN && (D > 64 || !SHORT_OF_REGISTERS); /* BEGUN is short everywhere */
    template <int SCORES> static constexpr bool FEW = SCORES == GENERAL || (SCORES == UNBIASED && SHORT_OF_REGISTERS);
    template <int D, int SCORES>
    using tiles = block_tiles<4, D == 256 ? 1 : 2, D == 256 ? 32 : (D == 128 ? 64 : 128) / (FEW<SCORES> ? 2 : 1), 1, 2>;
};

size_t heed_forward_workspace_mma(const heed_problem *p, const heed_plan *plan)
{
    (void)p, (void)plan;
    return 0;
}

heed_status heed_forward_mma(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    prologue call(p, x);
    if (call.status)
        return call.status;
    return call.a.q.dtype == HEED_F16 ? run<__half, ampere>(call.a, plan->device.arch, x)
                                      : run<__nv_bfloat16, ampere>(call.a, plan->device.arch, x);
}
