/* The sizes that forward_mma.cuh works with on sm_80 and later. */
#ifndef HEED_CUDA_FORWARD_AMPERE_CUH
#define HEED_CUDA_FORWARD_AMPERE_CUH

#include "forward_mma.cuh"

struct ampere {
    static constexpr int SHARED_BYTES = HEED_SHARED_SMALL, HEAD_DIM = 256, UNBIASED_HEAD_DIM = 128,
                         DROPS_UNBIASED = 128;
    static constexpr bool CAPS_UNBIASED = true;
    template <int D, int SCORES> static constexpr bool V_EARLY = SCORES != BEGUN; /* which is short of registers */
    template <int D, int SCORES>
    using tiles =
        block_tiles<4, D == 256 ? 1 : 2, D == 256 ? 32 : (D == 128 ? 64 : 128) / (SCORES == GENERAL ? 2 : 1), 1, 2>;
};

/* forward_mma_terms.cu: scores that are neither plain nor general. */
heed_status heed_cuda_forward_mma_terms(const args &a, int scores, const heed_exec *x);

#endif
