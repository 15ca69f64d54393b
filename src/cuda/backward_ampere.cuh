/* The sizes that backward_mma.cuh works with on sm_80 and later. */
#ifndef HEED_CUDA_BACKWARD_AMPERE_CUH
#define HEED_CUDA_BACKWARD_AMPERE_CUH

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

/* backward_mma_terms.cu, backward_mma_unbiased.cu and backward_mma_general.cu: scores that are not plain. */
heed_status heed_cuda_backward_mma_terms(const args &a, int scores, float2 *facts, const heed_plan *plan,
                                         const heed_exec *x);
heed_status heed_cuda_backward_mma_unbiased(const args &a, float2 *facts, const heed_plan *plan, const heed_exec *x);
heed_status heed_cuda_backward_mma_general(const args &a, float2 *facts, const heed_plan *plan, const heed_exec *x);

#endif
