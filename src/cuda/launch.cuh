/* Launching: the caller's device and stream, errors as statuses. */
#ifndef HEED_CUDA_LAUNCH_CUH
#define HEED_CUDA_LAUNCH_CUH

#include "problem.cuh"

heed_status heed_cuda_status(cudaError_t error, const char *doing);

heed_status heed_cuda_launch(const void *kernel, int64_t blocks, int threads, size_t shared_bytes, const heed_exec *x,
                             void **arguments);
/* early: before the kernel before it has ended. Only for kernels that wait for that themselves, on sm_90 and later. cluster: so
 * many blocks are one, likewise. */
heed_status heed_cuda_launch_grid(const void *kernel, dim3 blocks, dim3 threads, size_t shared_bytes, bool early,
                                  const heed_exec *x, void **arguments, dim3 cluster = dim3(1));

/* Makes the call's device current and puts back the caller's on leaving the scope. Where there is but one, it is current. */
struct on_device {
    int before = -1;
    heed_status status = HEED_OK;
    explicit on_device(int device)
    {
        if (heed_cuda_device_count() == 1)
            return;
        cudaError_t error = cudaGetDevice(&before);
        if (!error && before != device)
            error = cudaSetDevice(device);
        else if (!error)
            before = -1; /* nothing to put back */
        status = heed_cuda_status(error, "choosing the device");
    }
    ~on_device()
    {
        if (before >= 0)
            cudaSetDevice(before);
    }
};

/* One launch of a one-dimensional grid. No blocks: nothing to do. The arguments have exactly the kernel's types. The
 * <<<>>> form would need the C++ library, for a guarded static in each stub. */
template <class Kernel, class... Rest>
heed_status launch(Kernel kernel, int64_t blocks, int threads, size_t shared_bytes, const heed_exec *x,
                   const Rest &...rest)
{
    void *arguments[] = { (void *)&rest... };
    return heed_cuda_launch((const void *)kernel, blocks, threads, shared_bytes, x, arguments);
}

/* ---- One kernel after the other ---------------------------------------------------------------------------------- */

/* From sm_90 on a kernel may be started while the one before it still runs, so that blocks are placed and find out what
 * is theirs to do in the meantime. let_next_start(): the next one may be; wait_for_last(): what came before is done and
 * its results can be seen. Every thread waits before it touches memory. */
__device__ inline void let_next_start()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void wait_for_last()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The same, once these addresses are known, of which one is not 0: else the compiler would compute them afterwards. */
__device__ inline void wait_for_last(const void *x, const void *y, const void *z)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred known;\nsetp.ne.u64 known, %0, 0;\n@known griddepcontrol.wait;\n}" ::"l"(
                     (uint64_t)x | (uint64_t)y | (uint64_t)z)
                 : "memory");
#endif
}

/* launch() for kernels that wait_for_last(), or follow one that waited for all that they need. */
template <class Kernel, class... Rest>
heed_status launch_early(Kernel kernel, dim3 blocks, dim3 threads, size_t shared_bytes, const heed_plan *plan,
                         const heed_exec *x, const Rest &...rest)
{
    void *arguments[] = { (void *)&rest... };
    return heed_cuda_launch_grid((const void *)kernel, blocks, threads, shared_bytes, plan->device.arch >= 90, x,
                                 arguments);
}

/* Shared memory to ask for: where no multiprocessor needs more than one block, just so much that none is given two, of which the
 * system takes a KB each. A kernel that starts before the one before it has ended would find but few of them empty. */
inline size_t room_for_one(size_t bytes, dim3 grid, const heed_plan *plan)
{
    const int64_t blocks = (int64_t)grid.x * grid.y * grid.z;
    return blocks <= plan->device.units ? HEED_MAX(bytes, (plan->device.shared_bytes - 1024) / 2 + 128) : bytes;
}

/* The same for kernels that are for sm_90 alone, in a one-dimensional grid. */
template <class Kernel, class... Rest>
heed_status launch_next(Kernel kernel, int64_t blocks, int threads, size_t shared_bytes, const heed_exec *x,
                        const Rest &...rest)
{
    void *arguments[] = { (void *)&rest... };
    if (blocks > INT32_MAX)
        return launch(kernel, blocks, threads, shared_bytes, x, rest...); /* says that it cannot */
    return heed_cuda_launch_grid((const void *)kernel, dim3((unsigned)blocks), dim3(threads), shared_bytes, true, x,
                                 arguments);
}

/* The same in clusters. */
template <class Kernel, class... Rest>
heed_status launch_clusters(Kernel kernel, dim3 blocks, dim3 cluster, int threads, size_t shared_bytes,
                            const heed_exec *x, const Rest &...rest)
{
    void *arguments[] = { (void *)&rest... };
    return heed_cuda_launch_grid((const void *)kernel, blocks, dim3(threads), shared_bytes, true, x, arguments,
                                 cluster);
}

/* ---- rows.cu: operations on whole rows that the kernels share ---------------------------------------------------- */

/* Sets every element of t, of the given shape, where t is present. */
heed_status heed_cuda_fill(const view &t, const int64_t shape[4], float value, const heed_exec *x);

/* What forward does before its kernel: o and lse of padding. */
heed_status heed_cuda_prepare_forward(const heed_problem *p, const args &a, const heed_exec *x);

/* What backward does before and after its kernels. prepare: a->delta becomes present (computed into the workspace
 * where the caller gave none) and gradients that the kernels may not reach become zero; gaps: those of keys off the stride
 * are among them. */
size_t heed_cuda_delta_bytes(const heed_problem *p);
heed_status heed_cuda_prepare_backward(const heed_problem *p, args *a, const heed_exec *x, bool gaps = true);

/* The same for kernels that compute delta where they need it, and also the gradients of sink and bias: those are made by
 * kernels that want delta in memory, but the other gradients do not depend on whether they are wanted. */
size_t heed_cuda_others_bytes(const heed_problem *p);
heed_status heed_cuda_prepare_others(const heed_problem *p, args *a, const heed_exec *x, bool gaps = true);

/* For each row of q { lse * unit, delta }, the first within the range of finite numbers, or { +inf, 0 } for a row without
 * gradient: its P is then 0. */
size_t heed_cuda_facts_bytes(const heed_problem *p);
heed_status heed_cuda_row_facts(const args &a, float unit, float2 *facts, const heed_exec *x);

/* o and lse from those of so many parts of the keys, [part][batch][head][row]; here the sink joins them. With sums, o is still
 * to be divided by them, and lse is the largest score: its sum with a logarithm would be rounded once more. */
heed_status heed_cuda_merge_parts(const args &a, int parts, const float *o, const float *lse, const float *sums,
                                  const heed_plan *plan, const heed_exec *x);

heed_status heed_cuda_sink_gradient(const args &a, const heed_exec *x);

/* dbias_mma.cu: d_bias, for every family. In fp32, on Turing and for rows that are not aligned it is computed by
 * backward_portable_bias.cu, from so many keys on the stride. */
heed_status heed_cuda_bias_gradient(const args &a, const heed_exec *x);
heed_status heed_cuda_bias_gradient_portable(const args &a, int keys, const heed_exec *x);

/* How every launch begins. While it lives the call's device is current; a holds the kernels' arguments, and what all
 * families share is done or under way: rows of padding, delta, the gradients of sink and bias. status: the first error.
 * delta_offset: where in the workspace delta may lie (heed_cuda_delta_bytes() long). */
struct prologue {
    on_device device;
    args a;
    heed_status status;
    prologue(const heed_problem *p, const heed_exec *x, size_t delta_offset = 0);
};

/* A delta_offset for kernels that compute delta where they need it: see heed_cuda_prepare_others(). */
constexpr size_t DELTA_WHERE_NEEDED = SIZE_MAX;

inline int64_t tiles_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

#endif
