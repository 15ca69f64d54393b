/* What the forward of forward_sm90split.cu leaves: rows whose numbers two of fp16 cannot hold, by forward_split.cuh. */
#include "forward_split.cuh"

/* The tiles that it has marked, by few blocks, as there are seldom any. */
template <int D>
__global__ void __launch_bounds__(THREADS, 2)
    forward_marked(const __grid_constant__ args a, const __grid_constant__ split_tensors split, int tiles,
                   int exact_below, marked only)
{
#if HEED_SPLIT_HERE && __CUDA_ARCH__ >= 900
    wait_for_last();
    if (!*only.any)
        return;
    if constexpr (D <= 128) {
#pragma unroll 1
        for (int number = blockIdx.x; number < tiles * a.Hq * a.B; number += gridDim.x) {
            compute_tile<D, true, true, true, 2>(a, split, number, tiles, exact_below, only.queries);
            __syncthreads();
        }
    } else /* a block for each: there are no registers for the loop */
        compute_tile<D, true, false, true, 3>(a, split, blockIdx.x, tiles, exact_below, only.queries);
#endif
}

template <int D>
static heed_status run_marked(const args &a, const split_tensors &split, const marked &only, int blocks,
                              const heed_exec *x)
{
    constexpr bool ALONE = D <= 128;
    constexpr int SLOTS = ALONE ? 2 : 3;
    static_assert(shape<D, ALONE, SLOTS>::BR == SPLIT_ROWS, "a mark for each tile");
    const int64_t tiles = tiles_of(a.Sq, SPLIT_ROWS), all = tiles * a.Hq * a.B;
    return launch_next(forward_marked<D>, ALONE ? HEED_MIN(all, blocks) : all, THREADS,
                       sizeof(shared_split<D, ALONE, SLOTS>), x, a, split, (int)tiles, split_exact_below(a), only);
}

heed_status heed_cuda_forward_marked(const args &a, const split_tensors &split, const marked &only, int blocks,
                                     const heed_exec *x)
{
    const int width = split_width(a);
    return width == 64    ? run_marked<64>(a, split, only, blocks, x)
           : width == 128 ? run_marked<128>(a, split, only, blocks, x)
                          : run_marked<256>(a, split, only, blocks, x);
}
