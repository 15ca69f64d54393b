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

/* ---- Rows of the kernel table ----------------------------------------------------------------------------------- */

/* What the kernels of a family need and take, which the planner goes by: the oldest and the newest compute capability,
 * the most shared memory that a block may want, the largest head size, features. */
#define HEED_SHARED_SMALL (99 * 1024) /* of sm_86, 89 and 120; sm_80 has more */
#define HEED_NEEDS_forward_portable 75, HEED_ANY_ARCH, 64 * 1024, HEED_MAX_HEAD_DIM, HEED_USES_ALL
#define HEED_NEEDS_backward_portable 75, HEED_ANY_ARCH, 64 * 1024, HEED_MAX_HEAD_DIM, HEED_USES_ALL
#define HEED_NEEDS_forward_decode                                                                                      \
    80, HEED_ANY_ARCH, HEED_SHARED_SMALL, HEED_MAX_HEAD_DIM, (HEED_USES_ALL & ~HEED_USES_UNALIGNED) | HEED_FOR_FEW
#define HEED_NEEDS_forward_mma 80, HEED_ANY_ARCH, HEED_SHARED_SMALL, 256, HEED_USES_ALL & ~HEED_USES_UNALIGNED
#define HEED_NEEDS_backward_mma                                                                                        \
    80, HEED_ANY_ARCH, HEED_SHARED_SMALL, 256, HEED_USES_ALL & ~HEED_USES_UNALIGNED & ~HEED_USES_RESULTS
#define HEED_NEEDS_forward_turing 75, 90, 64 * 1024, 128, HEED_USES_ALL & ~HEED_USES_UNALIGNED
#define HEED_NEEDS_backward_turing 75, 90, 64 * 1024, 128, HEED_USES_ALL & ~HEED_USES_UNALIGNED & ~HEED_USES_RESULTS
#define HEED_NEEDS_forward_sm90                                                                                        \
    90, 90, 227 * 1024, 256,                                                                                           \
        HEED_USES_BAND | HEED_USES_STRIDE | HEED_USES_SINK | HEED_USES_LENGTHS | HEED_USES_UNEQUAL | HEED_USES_SOFTCAP
#define HEED_NEEDS_forward_sm90scores                                                                                  \
    90, 90, 227 * 1024, 128,                                                                                           \
        HEED_USES_BAND | HEED_USES_STRIDE | HEED_USES_MASK | HEED_USES_BIAS | HEED_USES_ALIBI | HEED_USES_SINK |       \
            HEED_USES_DROPOUT | HEED_USES_LENGTHS | HEED_USES_UNEQUAL | HEED_USES_LOOSE | HEED_FOR_TERMS
#define HEED_NEEDS_backward_sm90                                                                                       \
    90, 90, 227 * 1024, 256,                                                                                           \
        HEED_USES_BAND | HEED_USES_STRIDE | HEED_USES_SOFTCAP | HEED_USES_SINK | HEED_USES_LENGTHS |                   \
            HEED_USES_UNEQUAL | HEED_USES_SCALE | HEED_USES_GRADIENTS | HEED_USES_ORDER | HEED_FOR_ROOM
#define HEED_NEEDS_backward_sm90fused                                                                                  \
    90, 90, 227 * 1024, 128,                                                                                           \
        HEED_USES_BAND | HEED_USES_STRIDE | HEED_USES_SOFTCAP | HEED_USES_SINK | HEED_USES_LENGTHS |                   \
            HEED_USES_UNEQUAL | HEED_USES_SCALE | HEED_USES_GRADIENTS | HEED_USES_ORDER | HEED_FOR_LONG |              \
            HEED_FOR_ROOM

#define HEED_NEEDS_backward_sm90scores                                                                                 \
    90, 90, 227 * 1024, 128,                                                                                           \
        HEED_USES_BAND | HEED_USES_STRIDE | HEED_USES_MASK | HEED_USES_BIAS | HEED_USES_ALIBI | HEED_USES_SINK |       \
            HEED_USES_DROPOUT | HEED_USES_LENGTHS | HEED_USES_UNEQUAL | HEED_USES_SCALE | HEED_USES_GRADIENTS |        \
            HEED_USES_ORDER | HEED_USES_LOOSE | HEED_FOR_TERMS | HEED_FOR_ROOM

#define HEED_NEEDS_forward_split 80, 90, HEED_SHARED_SMALL, 256, HEED_USES_ALL & ~(HEED_USES_PAGES | HEED_USES_PLAIN)
#define HEED_NEEDS_backward_split 80, 90, HEED_SHARED_SMALL, 128, HEED_USES_ALL & ~(HEED_USES_PAGES | HEED_USES_PLAIN)
#define HEED_NEEDS_backward_splitwide 90, 90, 227 * 1024, 256, HEED_USES_ALL & ~(HEED_USES_PAGES | HEED_USES_PLAIN)
#define HEED_NEEDS_sm90split                                                                                           \
    90, 90, 227 * 1024, 256,                                                                                           \
        HEED_USES_BAND | HEED_USES_STRIDE | HEED_USES_MASK | HEED_USES_BIAS | HEED_USES_SOFTCAP | HEED_USES_ALIBI |    \
            HEED_USES_SINK | HEED_USES_DROPOUT | HEED_USES_LENGTHS | HEED_USES_UNEQUAL | HEED_USES_SCALE |             \
            HEED_USES_UNALIGNED | HEED_USES_REVERSED | HEED_USES_ORDER | HEED_USES_LOOSE | HEED_USES_STRAY |           \
            HEED_USES_STEEP | HEED_FOR_LONG
#define HEED_NEEDS_forward_sm90split HEED_NEEDS_sm90split
#define HEED_NEEDS_backward_sm90split HEED_NEEDS_sm90split

#define HEED_USES_SHORT                                                                                                \
    HEED_USES_BAND | HEED_USES_STRIDE | HEED_USES_MASK | HEED_USES_BIAS | HEED_USES_ALIBI | HEED_USES_SINK |           \
        HEED_USES_LENGTHS | HEED_USES_REVERSED | HEED_USES_UNEQUAL | HEED_USES_SCALE | HEED_USES_SPREAD |              \
        HEED_USES_ORDER | HEED_USES_STRAY | HEED_ONLY_SHORT
#define HEED_NEEDS_forward_sm90short 90, 90, 227 * 1024, 256, HEED_USES_SHORT
#define HEED_NEEDS_backward_sm90short 90, 90, 227 * 1024, 128, HEED_USES_SHORT
#define HEED_NEEDS_forward_sm90exact 90, 90, 227 * 1024, 256, HEED_USES_SHORT | HEED_USES_LOOSE
#define HEED_NEEDS_backward_sm90exact HEED_NEEDS_forward_sm90exact

#define HEED_NEEDS_forward_small                                                                                       \
    80, HEED_ANY_ARCH, HEED_SHARED_SMALL, 64,                                                                          \
        (HEED_USES_ALL & ~(HEED_USES_UNALIGNED | HEED_USES_PAGES | HEED_USES_PLAIN)) | HEED_ONLY_SMALL
#define HEED_NEEDS_backward_small                                                                                      \
    80, HEED_ANY_ARCH, HEED_SHARED_SMALL, 64,                                                                          \
        (HEED_USES_ALL & ~(HEED_USES_UNALIGNED | HEED_USES_PAGES | HEED_USES_PLAIN | HEED_USES_RESULTS)) |             \
            HEED_ONLY_SMALL

#define HEED_DECLARE_CUDA(way, family)                                                                                 \
    size_t heed_##way##_workspace_##family(const heed_problem *, const heed_plan *);                                   \
    heed_status heed_##way##_##family(const heed_problem *, const heed_plan *, const heed_exec *);
HEED_DECLARE_CUDA(forward, portable)
HEED_DECLARE_CUDA(backward, portable)
HEED_DECLARE_CUDA(forward, decode)
HEED_DECLARE_CUDA(forward, mma)
HEED_DECLARE_CUDA(backward, mma)
HEED_DECLARE_CUDA(forward, turing)
HEED_DECLARE_CUDA(backward, turing)
HEED_DECLARE_CUDA(forward, sm90)
HEED_DECLARE_CUDA(forward, sm90scores)
HEED_DECLARE_CUDA(forward, small)
HEED_DECLARE_CUDA(forward, sm90short)
HEED_DECLARE_CUDA(backward, sm90short)
HEED_DECLARE_CUDA(forward, sm90exact)
HEED_DECLARE_CUDA(backward, sm90exact)
HEED_DECLARE_CUDA(backward, small)
HEED_DECLARE_CUDA(forward, split)
HEED_DECLARE_CUDA(forward, sm90split)
HEED_DECLARE_CUDA(backward, split)
HEED_DECLARE_CUDA(backward, sm90split)
HEED_DECLARE_CUDA(backward, splitwide)
HEED_DECLARE_CUDA(backward, sm90)
HEED_DECLARE_CUDA(backward, sm90fused)
HEED_DECLARE_CUDA(backward, sm90scores)

#ifdef __cplusplus
}
#endif

#endif
