/* The devices of this machine, described once; errors of the CUDA runtime as statuses; the kernels' arguments. */
#include "launch.cuh"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

heed_status heed_cuda_status(cudaError_t error, const char *doing)
{
    if (!error)
        return HEED_OK;
    return heed_fail(HEED_DEVICE_ERROR, "%s: %s (%s)", doing, cudaGetErrorString(error), cudaGetErrorName(error));
}

#define MOST_DEVICES 64

static pthread_once_t asked = PTHREAD_ONCE_INIT;
static int device_count;
static heed_device devices[MOST_DEVICES];

static void ask(void)
{
    int count = 0;
    if (cudaGetDeviceCount(&count)) { /* no driver, no device: both mean none */
        cudaGetLastError();
        return;
    }
    count = HEED_MIN(count, MOST_DEVICES);
    for (int i = 0; i < count; i++) {
        cudaDeviceProp properties;
        if (cudaGetDeviceProperties(&properties, i))
            return;
        heed_device *d = &devices[i];
        d->backend = HEED_CUDA;
        snprintf(d->name, sizeof d->name, "%.127s", properties.name);
        d->units = properties.multiProcessorCount;
        d->arch = 10 * properties.major + properties.minor;
        d->shared_bytes = properties.sharedMemPerBlockOptin;
        d->memory_bytes = properties.totalGlobalMem;
        device_count = i + 1;
    }
}

int heed_cuda_device_count(void)
{
    pthread_once(&asked, ask);
    return device_count;
}

heed_status heed_cuda_device(int index, heed_device *d)
{
    int count = heed_cuda_device_count();
    if (index < 0 || index >= count)
        return heed_fail(HEED_NO_DEVICE, "device: there is no CUDA device %d, this machine has %d", index, count);
    *d = devices[index];
    return HEED_OK;
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

/* More shared memory than every kernel may have is asked for once for each kernel and device. Who has been granted how
 * much: a table by the kernel's address, whose readers take no lock; a kernel that finds no room in it asks each time. */
enum { FREE_TO_ALL = 48 * 1024, GRANTS = 512, PROBES = 8 };
static struct {
    uint64_t key; /* 0: nobody's */
    uint64_t bytes;
} grants[GRANTS];
static pthread_mutex_t granting = PTHREAD_MUTEX_INITIALIZER;

/* place: where in the table, or GRANTS. */
static uint64_t granted(uint64_t key, unsigned *place)
{
    for (unsigned n = 0; n < PROBES; n++) {
        *place = (unsigned)((key * 0x9E3779B97F4A7C15u >> 48) + n) % GRANTS;
        uint64_t found = __atomic_load_n(&grants[*place].key, __ATOMIC_ACQUIRE);
        if (found == key)
            return __atomic_load_n(&grants[*place].bytes, __ATOMIC_RELAXED);
        if (!found)
            return 0;
    }
    *place = GRANTS;
    return 0;
}

static cudaError_t reserve(const void *kernel, size_t shared_bytes, int device, bool again)
{
    const uint64_t key = (uint64_t)(uintptr_t)kernel | (uint64_t)(device + 1) << 48;
    unsigned place;
    if (shared_bytes <= FREE_TO_ALL || (!again && granted(key, &place) >= shared_bytes))
        return cudaSuccess;
    pthread_mutex_lock(&granting);
    const uint64_t bytes = HEED_MAX(granted(key, &place),
                                    shared_bytes); /* what was granted may be in use: it only grows */
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (!error && place < GRANTS) {
        __atomic_store_n(&grants[place].bytes, bytes, __ATOMIC_RELAXED);
        __atomic_store_n(&grants[place].key, key, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&granting);
    return error;
}

heed_status heed_cuda_launch_grid(const void *kernel, dim3 blocks, dim3 threads, size_t shared_bytes, bool early,
                                  const heed_exec *x, void **arguments)
{
    if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0)
        return HEED_OK;
    cudaError_t error = reserve(kernel, shared_bytes, x->device, false);
    if (error)
        return heed_cuda_status(error, "reserving shared memory");
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks, config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = (cudaStream_t)x->stream;
    config.attrs = &attribute, config.numAttrs = early;
    error = cudaLaunchKernelExC(&config, kernel, arguments);
    if (error == cudaErrorInvalidValue && shared_bytes > FREE_TO_ALL) { /* the device may have been reset since */
        cudaGetLastError();
        error = reserve(kernel, shared_bytes, x->device, true);
        if (!error)
            error = cudaLaunchKernelExC(&config, kernel, arguments);
    }
    return heed_cuda_status(error, "launching a kernel");
}

heed_status heed_cuda_launch(const void *kernel, int64_t blocks, int threads, size_t shared_bytes, const heed_exec *x,
                             void **arguments)
{
    if (blocks > INT32_MAX)
        return heed_fail(HEED_UNSUPPORTED, "the problem needs %lld blocks, a launch holds %d", (long long)blocks,
                         INT32_MAX);
    return heed_cuda_launch_grid(kernel, dim3((unsigned)blocks), dim3(threads), shared_bytes, false, x, arguments);
}

/* ---- Arguments --------------------------------------------------------------------------------------------------- */

view heed_cuda_view(const heed_tensor &t)
{
    view v;
    v.data = (char *)t.data;
    v.dtype = t.dtype;
    int64_t size = (int64_t)heed_dtype_size(t.dtype);
    uint64_t all = (uint64_t)(uintptr_t)t.data;
    for (int d = 0; d < 4; d++) {
        v.stride[d] = t.stride[d];
        if (d < 3 && t.shape[d] > 1)
            all |= (uint64_t)(t.stride[d] * size);
    }
    v.vector = all % 16 == 0 && (t.stride[3] == 1 || t.shape[3] == 1);
    return v;
}

/* A tensor that need not be there: most are not, and this is done for each call. */
static void place(const heed_tensor &t, view *v)
{
    if (t.data)
        *v = heed_cuda_view(t);
}

/* The stride and the positions, which are the same for every sequence. */
static void place_keys(const heed_problem *p, args *a)
{
    const heed_span &s = p->full;
    a->col = s.keys ? s.col : INT32_MAX;                         /* none is on the stride */
    a->col_step = s.keys == 1 ? HEED_MAX(p->Sk, 1) : s.col_step; /* then s says nothing of the step */
    a->p0 = s.p0, a->p_step = s.p_step, a->r0 = s.r0, a->r_step = s.r_step;
}

heed_status heed_cuda_args(const heed_problem *p, args *a)
{
    const heed_attention &in = p->a;
    const heed_gradient &g = p->g;
    const int64_t sizes[] = { p->B, p->Hq, p->Sq, p->Sk, in.q.shape[2], in.k.shape[2], in.k.shape[0] };
    for (int64_t size : sizes)
        if (size > INT32_MAX - 256)
            return heed_fail(HEED_UNSUPPORTED, "a size is %lld, the CUDA kernels count to %d", (long long)size,
                             INT32_MAX - 256);
    memset(a, 0, sizeof *a);
    a->q = heed_cuda_view(in.q), a->k = heed_cuda_view(in.k), a->v = heed_cuda_view(in.v), a->o = heed_cuda_view(in.o);
    place(in.lse, &a->lse), place(in.mask, &a->mask), place(in.bias, &a->bias);
    place(in.alibi, &a->alibi), place(in.sink, &a->sink);
    if (p->pass == HEED_BACKWARD) {
        a->d_o = heed_cuda_view(g.d_o);
        place(g.d_lse, &a->d_lse), place(g.delta, &a->delta);
        place(g.d_q, &a->d_q), place(g.d_k, &a->d_k), place(g.d_v, &a->d_v);
        place(g.d_bias, &a->d_bias), place(g.d_sink, &a->d_sink);
        a->accumulate = g.accumulate;
        for (int d = 0; d < 4; d++)
            a->bias_shape[d] = (int)g.d_bias.shape[d];
    }
    a->B = (int)p->B, a->Hq = (int)p->Hq, a->Hk = (int)p->Hk, a->G = (int)p->G;
    a->Sq = (int)p->Sq, a->Sk = (int)p->Sk, a->D = (int)p->D, a->Dv = (int)p->Dv;
    a->q_rows = (int)in.q.shape[2], a->k_rows = p->page ? a->Sk : (int)in.k.shape[2];
    a->scale = in.scale, a->softcap = in.softcap;
    a->scale_log2 = in.scale * 1.4426950408889634f;
    a->align = in.align, a->left = p->left, a->right = p->right;
    place_keys(p, a);
    a->lengths_q = in.lengths_q, a->lengths_k = in.lengths_k;
    a->offsets_q = in.offsets_q, a->offsets_k = in.offsets_k;
    a->block_table = in.block_table, a->block_table_stride = in.block_table_stride;
    a->page = (int)p->page, a->pages = (int)in.k.shape[0];
    a->drop_below = p->drop_below;
    a->keep_scale = 65536.0f / (65536.0f - (float)p->drop_below);
    a->seed = in.dropout_seed, a->seed_at = in.dropout_seed_at;
    if (!a->lengths_q && !a->lengths_k && !a->offsets_q && !a->offsets_k) {
        a->all = span_of(*a, 0);
        a->uniform = 1;
    }
    return HEED_OK;
}

prologue::prologue(const heed_problem *p, const heed_exec *x, size_t delta_offset)
    : device(x->device), status(device.status)
{
    heed_exec at_delta = *x;
    if (x->workspace && delta_offset != DELTA_WHERE_NEEDED)
        at_delta.workspace = (char *)x->workspace + delta_offset;
    if (!status)
        status = heed_cuda_args(p, &a);
    if (delta_offset == DELTA_WHERE_NEEDED) {
        status = status ? status : heed_cuda_prepare_others(p, &a, x);
        return;
    }
    if (!status)
        status = p->pass == HEED_FORWARD ? heed_cuda_prepare_forward(p, a, x)
                                         : heed_cuda_prepare_backward(p, &a, &at_delta);
    if (!status && p->pass == HEED_BACKWARD)
        status = heed_cuda_sink_gradient(a, x);
    if (!status && p->pass == HEED_BACKWARD)
        status = heed_cuda_bias_gradient(a, x);
}
