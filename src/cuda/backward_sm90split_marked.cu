/* What the backward of backward_sm90split.cu leaves: rows whose numbers two of fp16 cannot hold, by backward_split.cuh. Those
 * of backward_sm90split_wide.cu a kernel of backward_splitwide.cu computes, which is there anyway. */
#include "backward_split.cuh"

heed_status heed_cuda_backward_marked(const args &a, const split_tensors &split, const marked &only, int blocks,
                                      const heed_exec *x)
{
    const int width = split_width(a);
    return width == 64    ? run_marked<64>(a, split, only, blocks, x)
           : width == 128 ? run_marked<128>(a, split, only, blocks, x)
                          : heed_cuda_backward_marked_wide(a, split, only, blocks, x);
}
