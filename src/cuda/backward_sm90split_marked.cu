/* What the backward of backward_sm90split.cu leaves: rows whose numbers two of fp16 cannot hold, by backward_split.cuh. */
#include "backward_split.cuh"

/* The rows that it has marked, by few blocks, as there are seldom any. */
template <int D>
__global__ void __launch_bounds__(threads_of<D>, D > 128 ? 1 : 2)
    backward_marked(const __grid_constant__ args a, const __grid_constant__ split_tensors split, kinds n,
                    int exact_below, marked only)
{
#if HEED_SPLIT_HERE && __CUDA_ARCH__ >= 900
    wait_for_last();
    if (*only.any)
#pragma unroll 1
        for (int block = blockIdx.x; block < n.dk + n.dv + n.dq; block += gridDim.x) {
            compute_block<D, true, true>(a, split, n, block, exact_below, only);
            __syncthreads();
        }
#endif
}

template <int D>
static heed_status run_marked(const args &a, const split_tensors &split, const marked &only, int blocks,
                              const heed_exec *x)
{
    const kinds n = kinds_of<D>(a);
    return launch_next(backward_marked<D>, HEED_MIN(n.dk + n.dv + n.dq, blocks), threads_of<D>,
                       sizeof(shared_backward<D>), x, a, split, n, split_exact_below(a), only);
}

heed_status heed_cuda_backward_marked(const args &a, const split_tensors &split, const marked &only, int blocks,
                                      const heed_exec *x)
{
    const int width = split_width(a);
    return width == 64    ? run_marked<64>(a, split, only, blocks, x)
           : width == 128 ? run_marked<128>(a, split, only, blocks, x)
                          : run_marked<256>(a, split, only, blocks, x);
}
