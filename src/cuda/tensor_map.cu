/* Maps for Hopper's copy engine. The driver encodes them; its function is asked for at run time, so that the library
 * links with nothing and loads where there is no driver. */
#include "tile_sm90.cuh"

#include <pthread.h>

typedef decltype(&cuTensorMapEncodeTiled) encode_function;

static pthread_once_t asked = PTHREAD_ONCE_INIT;
static encode_function encode;

static void ask(void)
{
    void *function = NULL;
    cudaDriverEntryPointQueryResult found;
    if (!cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) &&
        found == cudaDriverEntryPointSuccess)
        encode = (encode_function)function;
}

heed_status heed_tensor_map(tensor_map *m, const view &t, int64_t columns, int64_t rows, int64_t heads, int64_t batches,
                            int box_rows)
{
    pthread_once(&asked, ask);
    if (!encode)
        return heed_fail(HEED_DEVICE_ERROR, "the driver has no cuTensorMapEncodeTiled");
    m->head_on = t.stride[1] != 0, m->batch_on = t.stride[0] != 0;
    const cuuint64_t sizes[4] = { (cuuint64_t)columns, (cuuint64_t)rows, (cuuint64_t)(m->head_on ? heads : 1),
                                  (cuuint64_t)(m->batch_on ? batches : 1) };
    /* Where a size is 1 its stride is never used, but must be a legal one. */
    const cuuint64_t pitches[3] = { (cuuint64_t)(t.stride[2] ? t.stride[2] * 2 : 16),
                                    (cuuint64_t)(m->head_on ? t.stride[1] * 2 : 16),
                                    (cuuint64_t)(m->batch_on ? t.stride[0] * 2 : 16) };
    const cuuint32_t box[4] = { 64, (cuuint32_t)box_rows, 1, 1 }, steps[4] = { 1, 1, 1, 1 };
    const CUtensorMapDataType type = t.dtype == HEED_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                         : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    CUresult error = CUDA_ERROR_INVALID_CONTEXT;
    int device;
    for (int attempt = 0; error && attempt < 2; attempt++) {
        /* A thread that has not called the runtime yet has no context. */
        if (attempt && (cudaGetDevice(&device) || cudaSetDevice(device)))
            break;
        error = encode(&m->map, type, 4, t.data, sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                       CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    }
    if (error)
        return heed_fail(HEED_DEVICE_ERROR, "the copy engine refused a tensor of %lld x %lld x %lld x %lld (error %d)",
                         (long long)batches, (long long)heads, (long long)rows, (long long)columns, (int)error);
    return HEED_OK;
}
