/* Maps for Hopper's copy engine. The driver encodes them; its function is asked for at run time, so that the library
 * links with nothing and loads where there is no driver. */
#include "tile_sm90.cuh"

#include <pthread.h>
#include <string.h>

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

/* What a map is made of, and the map: one for one. The driver takes a third of a microsecond for each, and programs come
 * back to the same addresses: so this thread's last ones are kept. */
struct encoding {
    void *data;
    cuuint64_t sizes[4], pitches[3];
    cuuint32_t box_rows, box_columns, type, swizzle;
};
enum { KEPT = 16 };
static __thread struct {
    encoding of[KEPT];
    CUtensorMap map[KEPT];
    int next;
} recent;

static CUresult encode_or_recall(const encoding &e, CUtensorMap *map)
{
    auto &r = recent;
    for (int n = 0; n < KEPT; n++)
        if (!memcmp(&r.of[n], &e, sizeof e)) {
            *map = r.map[n];
            return CUDA_SUCCESS;
        }
    const cuuint32_t box[4] = { e.box_columns, e.box_rows, 1, 1 }, steps[4] = { 1, 1, 1, 1 };
    CUresult error = CUDA_ERROR_INVALID_CONTEXT;
    int device;
    for (int attempt = 0; error && attempt < 2; attempt++) {
        /* A thread that has not called the runtime yet has no context. */
        if (attempt && (cudaGetDevice(&device) || cudaSetDevice(device)))
            break;
        error = encode(map, (CUtensorMapDataType)e.type, 4, e.data, e.sizes, e.pitches, box, steps,
                       CU_TENSOR_MAP_INTERLEAVE_NONE, (CUtensorMapSwizzle)e.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    }
    if (!error)
        r.of[r.next] = e, r.map[r.next] = *map, r.next = (r.next + 1) % KEPT;
    return error;
}

static CUtensorMapDataType type_of(int dtype)
{
    switch (dtype) {
    case HEED_F32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case HEED_F16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case HEED_BF16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    default: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    }
}

heed_status heed_tensor_map(tensor_map *m, const view &t, int64_t columns, int64_t rows, int64_t heads, int64_t batches,
                            int box_rows, int box_columns)
{
    pthread_once(&asked, ask);
    if (!encode)
        return heed_fail(HEED_DEVICE_ERROR, "the driver has no cuTensorMapEncodeTiled");
    const int64_t size = (int64_t)heed_dtype_size((heed_dtype)t.dtype);
    m->head_on = t.stride[1] != 0, m->batch_on = t.stride[0] != 0;
    /* Where a size is 1 its stride is never used, but must be a legal one. */
    const encoding e = {
        t.data,
        { (cuuint64_t)columns, (cuuint64_t)rows, (cuuint64_t)(m->head_on ? heads : 1),
          (cuuint64_t)(m->batch_on ? batches : 1) },
        { (cuuint64_t)(t.stride[2] ? t.stride[2] * size : 16), (cuuint64_t)(m->head_on ? t.stride[1] * size : 16),
          (cuuint64_t)(m->batch_on ? t.stride[0] * size : 16) },
        (cuuint32_t)box_rows,
        (cuuint32_t)box_columns,
        (cuuint32_t)type_of(t.dtype),
        (cuuint32_t)(box_columns * size == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B)
    };
    CUresult error = encode_or_recall(e, &m->map);
    if (error)
        return heed_fail(HEED_DEVICE_ERROR, "the copy engine refused a tensor of %lld x %lld x %lld x %lld (error %d)",
                         (long long)batches, (long long)heads, (long long)rows, (long long)columns, (int)error);
    return HEED_OK;
}

static heed_status map_term(tensor_map *map, int *pieces, int *box_rows, const view &t, const args &a)
{
    if (!t.data || !a.Sk || !a.Sq)
        return HEED_OK;
    *box_rows = t.stride[2] ? 64 : 1, *pieces = heed_dtype_size((heed_dtype)t.dtype) == 4 ? 2 : 1;
    return heed_tensor_map(map, t, a.Sk, t.stride[2] ? a.Sq : 1, a.Hq, a.B, *box_rows, 64 / *pieces);
}

heed_status heed_map_terms(term_maps *m, const args &a)
{
    *m = {};
    const heed_status status = map_term(&m->bias, &m->bias_pieces, &m->bias_rows, a.bias, a);
    return status ? status : map_term(&m->mask, &m->mask_pieces, &m->mask_rows, a.mask, a);
}
