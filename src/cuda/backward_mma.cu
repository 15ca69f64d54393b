/* Backward with mma.sync for fp16 and bf16 on sm_80 and later: the sizes that backward_mma.cuh works with there. */
#include "backward_mma.cuh"

/* Blackwell's compilers are a few registers short. The host, which reserves the memory, takes the larger. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int KEYS_OF_128 = 16;
#else
constexpr int KEYS_OF_128 = 32;
#endif

struct ampere {
    static constexpr int SHARED_BYTES = HEED_SHARED_SMALL, HEAD_DIM = 256, UNBIASED_HEAD_DIM = 128,
                         DROPS_UNBIASED = 128;
    static constexpr bool CAPS_UNBIASED = false, PAIRS = true, STARTS_EARLY = true;
    template <int D, bool GENERAL>
    using query_tiles = block_tiles<4, D == 64 || (D == 128 && !GENERAL) ? 2 : 1,
                                    D == 256               ? 16
                                    : D == 128 && !GENERAL ? KEYS_OF_128
                                    : D == 64 && !GENERAL  ? 64
                                                           : 32,
                                    D == 256 && GENERAL ? 1 : 2, 2>;
    template <int D, bool GENERAL>
    using key_tiles = block_tiles<4, D == 64 ? 2 : 1,
                                  D == 256   ? 16
                                  : D == 128 ? (GENERAL ? 32 : 64)
                                             : (GENERAL ? 16 : 32),
                                  D == 256 && GENERAL ? 1 : 2, 2>;
};

size_t heed_backward_workspace_mma(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return backward_workspace(p);
}

heed_status heed_backward_mma(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    backward_prologue call(p, x);
    if (call.status)
        return call.status;
    return call.a.q.dtype == HEED_F16 ? run<__half, ampere>(call.a, call.facts, plan, x)
                                      : run<__nv_bfloat16, ampere>(call.a, call.facts, plan, x);
}
