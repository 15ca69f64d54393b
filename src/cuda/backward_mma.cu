/* Backward with mma.sync for fp16 and bf16 on sm_80 and later: the sizes that backward_mma.cuh works with there. */
#include "backward_mma.cuh"

struct ampere {
    static constexpr int SHARED_BYTES = HEED_SHARED_SMALL, HEAD_DIM = 256;
    template <int D, bool GENERAL> static constexpr int row_tiles = D == 64 || (D == 128 && !GENERAL) ? 2 : 1;
    template <int D, bool GENERAL> static constexpr int keys_at_once = D == 256 ? 16 : D == 64 && !GENERAL ? 64 : 32;
    template <int D> static constexpr int key_tiles = D == 64 ? 2 : 1;
    template <int D, bool GENERAL>
    static constexpr int queries_at_once = D == 256   ? 16
                                           : D == 128 ? (GENERAL ? 32 : 64)
                                                      : (GENERAL ? 16 : 32);
};

size_t heed_backward_workspace_mma(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return backward_workspace(p);
}

heed_status heed_backward_mma(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    (void)plan;
    backward_prologue call(p, x);
    if (call.status)
        return call.status;
    return call.a.q.dtype == HEED_F16 ? run<__half, ampere>(call.a, call.facts, x)
                                      : run<__nv_bfloat16, ampere>(call.a, call.facts, x);
}
