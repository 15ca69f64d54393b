/* The devices of this machine, described once; errors of the CUDA runtime as statuses; the kernels' arguments. */
#include "launch.cuh"

#include <cuda.h>
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

/* Kernels are launched by the driver: the runtime takes some tenths of a microsecond more, to find out which function a kernel
 * is in the current context. Here that is a table by the kernel's address and the context's number, which no later context
 * has; its readers take no lock. A kernel that finds no room in it is looked for each time. */
enum { FREE_TO_ALL = 48 * 1024, FUNCTIONS = 1024, PROBES = 8 };
struct function {
    const void *kernel; /* NULL: nobody's */
    uint64_t context;
    CUfunction handle;
    uint64_t shared_bytes; /* what it may have: more than every kernel may is asked for once */
};
static function functions[FUNCTIONS];
static pthread_mutex_t finding = PTHREAD_MUTEX_INITIALIZER;

static struct {
    CUresult (*current)(CUcontext *context);
    CUresult (*number)(CUcontext context, unsigned long long *number);
    CUresult (*launch)(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra);
} driver;
static pthread_once_t driver_asked = PTHREAD_ONCE_INIT;

static void ask_driver(void)
{
    const struct {
        void *to;
        const char *name;
    } entries[] = { { &driver.current, "cuCtxGetCurrent" },
                    { &driver.number, "cuCtxGetId" },
                    { &driver.launch, "cuLaunchKernelEx" } };
    for (const auto &entry : entries) {
        cudaDriverEntryPointQueryResult found;
        if (cudaGetDriverEntryPointByVersion(entry.name, (void **)entry.to, 12000, cudaEnableDefault, &found))
            cudaGetLastError();
    }
}

static CUresult ask_context(unsigned long long *number)
{
    CUcontext context = NULL;
    const CUresult error = driver.current(&context);
    if (error || !context)
        return error ? error : CUDA_ERROR_INVALID_CONTEXT;
    return driver.number(context, number);
}

/* The number of the current context. There is none on a thread that has not called the runtime yet, nor after a reset: any call
 * of the runtime makes one. */
static cudaError_t context_number(unsigned long long *number)
{
    pthread_once(&driver_asked, ask_driver);
    if (!driver.current || !driver.number || !driver.launch)
        return cudaErrorInsufficientDriver;
    if (!ask_context(number))
        return cudaSuccess;
    const cudaError_t failed = cudaFree(NULL);
    return failed ? failed : (cudaError_t)ask_context(number); /* the driver's numbers of errors are the runtime's */
}

/* Its place in the table; else a free one, and *known is false; NULL: there is none. */
static function *place_of(const void *kernel, uint64_t context, bool *known)
{
    const uint64_t hash = ((uint64_t)(uintptr_t)kernel + context) * 0x9E3779B97F4A7C15u >> 32;
    for (unsigned n = 0; n < PROBES; n++) {
        function *f = &functions[(hash + n) % FUNCTIONS];
        const void *found = __atomic_load_n(&f->kernel, __ATOMIC_ACQUIRE);
        *known = found == kernel && f->context == context;
        if (!found || *known)
            return f;
    }
    return NULL;
}

static cudaError_t find(const void *kernel, uint64_t context, size_t shared_bytes, CUfunction *handle)
{
    bool known;
    function *f = place_of(kernel, context, &known);
    if (known && __atomic_load_n(&f->shared_bytes, __ATOMIC_RELAXED) >= shared_bytes) {
        *handle = f->handle;
        return cudaSuccess;
    }
    pthread_mutex_lock(&finding);
    f = place_of(kernel, context, &known);
    const uint64_t before = known ? f->shared_bytes : (uint64_t)FREE_TO_ALL;
    cudaError_t error = cudaGetFuncBySymbol(handle, kernel);
    if (!error && shared_bytes > before) /* it only grows: what was granted may be in use */
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    if (!error && f) {
        f->context = context, f->handle = *handle;
        __atomic_store_n(&f->shared_bytes, HEED_MAX(before, shared_bytes), __ATOMIC_RELAXED);
        __atomic_store_n(&f->kernel, kernel, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&finding);
    return error;
}

heed_status heed_cuda_launch_grid(const void *kernel, dim3 blocks, dim3 threads, size_t shared_bytes, bool early,
                                  const heed_exec *x, void **arguments, dim3 cluster)
{
    if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0)
        return HEED_OK;
    unsigned long long context;
    CUfunction handle;
    cudaError_t error = context_number(&context);
    if (!error)
        error = find(kernel, context, shared_bytes, &handle);
    if (error)
        return heed_cuda_status(error, "finding a kernel");
    CUlaunchAttribute attributes[2];
    unsigned count = 0;
    if (early) {
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[count++].value.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster.x * cluster.y * cluster.z > 1) {
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[count++].value.clusterDim = { cluster.x, cluster.y, cluster.z };
    }
    const CUlaunchConfig config = {
        blocks.x,   blocks.y, blocks.z, threads.x, threads.y, threads.z, (unsigned)shared_bytes, (CUstream)x->stream,
        attributes, count
    };
    return heed_cuda_status((cudaError_t)driver.launch(&config, handle, arguments, NULL), "launching a kernel");
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
