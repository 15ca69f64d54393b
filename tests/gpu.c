/* Memory for test cases, and the GPU where there is one. harness.h says what is what. */
#include "harness.h"

#ifdef HEED_HAS_CUDA
#include <cuda_runtime_api.h>

int has_gpu(void)
{
    static int known, count;
    if (!known) {
        known = 1;
        setenv("CUDA_LAUNCH_BLOCKING", "1", 0);
        if (cudaGetDeviceCount(&count))
            count = 0;
    }
    return count > 0;
}

/* Pinned memory takes long to get: blocks are kept, by powers of two, for the next case. The first bytes of a kept block
 * point to the next one. */
enum { LEAST = 10 };
static void *kept[64];

static int class_of(size_t bytes)
{
    int class = LEAST;
    while (((size_t)1 << class) < bytes)
        class ++;
    return class;
}

void *block_new(size_t bytes)
{
    int class = class_of(bytes);
    void *block = NULL;
    if (!has_gpu())
        return aligned_alloc(64, bytes);
    if (!kept[class])
        return cudaMallocHost(&block, (size_t)1 << class) ? NULL : block;
    block = kept[class];
    memcpy(&kept[class], block, sizeof block);
    return block;
}

void block_free(void *block, size_t bytes)
{
    int class = class_of(bytes);
    if (!has_gpu()) {
        free(block);
        return;
    }
    memcpy(block, &kept[class], sizeof block);
    kept[class] = block;
}

const char *gpu_finish(void)
{
    cudaError_t error = has_gpu() ? cudaDeviceSynchronize() : cudaSuccess;
    return error ? cudaGetErrorString(error) : NULL;
}

const char *gpu_reset(void)
{
    memset(kept, 0, sizeof kept);
    cudaError_t error = has_gpu() ? cudaDeviceReset() : cudaSuccess;
    return error ? cudaGetErrorString(error) : NULL;
}

#else

int has_gpu(void) { return 0; }

void *block_new(size_t bytes) { return aligned_alloc(64, bytes); }

void block_free(void *block, size_t bytes)
{
    (void)bytes;
    free(block);
}

const char *gpu_finish(void) { return NULL; }

const char *gpu_reset(void) { return NULL; }

#endif
