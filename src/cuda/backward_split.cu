/* Backward for fp32 on tensor cores, head sizes to 128, on sm_80 to sm_90: backward_split.cuh. */
#include "backward_split.cuh"

static_assert(sizeof(shared_backward<64>) <= HEED_SHARED_SMALL && sizeof(shared_backward<128>) <= HEED_SHARED_SMALL,
              "what a block may have on sm_86, 89 and 120");

/* The rows that the kernels of Hopper have marked, by few blocks, as there are seldom any. */
template <int D, bool GENERAL>
__global__ void __launch_bounds__(threads_of<D>, D > 128 ? 1 : 2)
    backward_marked(const __grid_constant__ args a, const __grid_constant__ split_tensors split, kinds n,
                    int exact_below, marked only)
{
#if HEED_SPLIT_HERE && __CUDA_ARCH__ >= 900
    wait_for_last();
    if (*only.any)
#pragma unroll 1
        for (int block = blockIdx.x; block < n.dk + n.dv + n.dq; block += gridDim.x) {
            compute_block<D, GENERAL, true>(a, split, n, block, exact_below, only);
            __syncthreads();
        }
#endif
}

template <int D, bool GENERAL>
static heed_status run_marked(const args &a, const split_tensors &split, const marked &only, int blocks,
                              const heed_exec *x)
{
    const kinds n = kinds_of<D>(a);
    return launch_next(backward_marked<D, GENERAL>, HEED_MIN(n.dk + n.dv + n.dq, blocks), threads_of<D>,
                       sizeof(shared_backward<D>), x, a, split, n, split_exact_below(a), only);
}

heed_status heed_cuda_backward_marked(const args &a, const split_tensors &split, const marked &only, int blocks,
                                      const heed_exec *x)
{
    const int width = split_width(a);
    if (width == 64 && !has_extras(a) && a.scale > 0)
        return run_marked<64, false>(a, split, only, blocks, x);
    return width == 64    ? run_marked<64, true>(a, split, only, blocks, x)
           : width == 128 ? run_marked<128, true>(a, split, only, blocks, x)
                          : run_marked<256, true>(a, split, only, blocks, x);
}

size_t heed_backward_workspace_split(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return backward_split_bytes(p);
}

/* One kernel for all scores at D = 128: the lean one spills there. */
static heed_status run_either(const args &a, const split_tensors &split, const heed_exec *x)
{
    return split_width(a) == 128           ? run<128, true>(a, split, x)
           : has_extras(a) || a.scale <= 0 ? run<64, true>(a, split, x)
                                           : run<64, false>(a, split, x);
}

heed_status heed_backward_split(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    (void)plan;
    return backward_split_by(run_either, p, x);
}
