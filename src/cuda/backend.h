/* The border between the C of src/ and the CUDA of src/cuda/: what either side may call of the other. */
#ifndef HEED_CUDA_BACKEND_H
#define HEED_CUDA_BACKEND_H

#ifdef __cplusplus
extern "C" {
#endif

#include "../internal.h"

/* device.cu. Devices are counted and described once and cached; without a driver there are none. */
int heed_cuda_device_count(void);
heed_status heed_cuda_device(int index, heed_device *d); /* HEED_NO_DEVICE where there is none of that index */

/* rows.cu: heed_merge() and heed_delta() on the device, asynchronous. Checked tensors. */
heed_status heed_merge_cuda(const heed_tensor tensors[4], const heed_exec *x);
heed_status heed_delta_cuda(const heed_tensor tensors[4], const heed_exec *x);

/* Rows of the kernel table. */
#define HEED_DECLARE_CUDA(family)                                                                                      \
    size_t heed_forward_workspace_##family(const heed_problem *, const heed_plan *);                                   \
    heed_status heed_forward_##family(const heed_problem *, const heed_plan *, const heed_exec *);                     \
    size_t heed_backward_workspace_##family(const heed_problem *, const heed_plan *);                                  \
    heed_status heed_backward_##family(const heed_problem *, const heed_plan *, const heed_exec *);
HEED_DECLARE_CUDA(portable)
HEED_DECLARE_CUDA(mma)

#ifdef __cplusplus
}
#endif

#endif
