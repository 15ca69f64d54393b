/* Forward with mma.sync for fp16 and bf16 on sm_80 and later: the sizes that forward_mma.cuh works with there. */
#include "forward_mma.cuh"

/* The compiler for sm_120 is a few registers short. The host, which reserves the memory, takes the larger. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int KEYS_OF_64 = 64, KEYS_OF_128 = 32;
#else
constexpr int KEYS_OF_64 = 128, KEYS_OF_128 = 64;
#endif

struct ampere {
    static constexpr int SHARED_BYTES = HEED_SHARED_SMALL, HEAD_DIM = 256, UNBIASED_HEAD_DIM = 128,
                         DROPS_UNBIASED = 128;
    static constexpr bool CAPS_UNBIASED = true;
    template <int D, bool GENERAL>
    using tiles = block_tiles<4, D == 256 ? 1 : 2,
                              D == 256   ? 32
                              : D == 128 ? (GENERAL ? 32 : KEYS_OF_128)
                                         : (GENERAL ? 64 : KEYS_OF_64),
                              1, 2>;
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
