/* The entry points: check the arguments, find the device, choose the kernel, launch it. No arithmetic. */
#include "internal.h"

#include <string.h>
#ifdef HEED_HAS_CUDA
#include "cuda/backend.h"
#endif

/* HEED_KERNEL names one row; calls of the other pass are not its business. */
static const char *forced_kernel(const heed_exec *x, const heed_problem *p)
{
    const char *name = x->kernel ? x->kernel : heed_kernel_of_environment();
    for (int i = 0; name && !x->kernel && i < heed_kernel_total; i++)
        if (!strcmp(heed_kernels[i].name, name) && heed_kernels[i].pass != p->pass)
            return NULL;
    return name;
}

/* *call: one of this thread's recent ones where this repeats it, else made. */
static heed_status plan_call(const heed_attention *a, const heed_gradient *g, const heed_exec *x, heed_call *made,
                             heed_call **call)
{
    heed_device d;
    heed_status s;
    if ((*call = heed_recall(a, g, x)))
        return HEED_OK;
    *call = made;
    if ((s = heed_check(a, g, x, 0, &made->problem)) || (s = heed_device_of(x, &d)) ||
        (s = heed_choose(&made->problem, &d, forced_kernel(x, &made->problem), &made->plan, NULL)))
        return s;
    heed_remember(a, g, x, made);
    return HEED_OK;
}

static heed_status check_workspace(const heed_plan *plan, const heed_exec *x)
{
    const char *name = plan->kernel->name;
    if (plan->workspace_bytes == 0)
        return HEED_OK;
    if (!x->workspace)
        return heed_fail(HEED_NO_WORKSPACE, "workspace: is NULL, %s needs %zu bytes", name, plan->workspace_bytes);
    if (x->workspace_bytes < plan->workspace_bytes)
        return heed_fail(HEED_NO_WORKSPACE, "workspace_bytes: is %zu, %s needs %zu", x->workspace_bytes, name,
                         plan->workspace_bytes);
    if ((uintptr_t)x->workspace % 16)
        return heed_fail(HEED_BAD_ARGUMENT, "workspace: is %p, expected a multiple of 16 bytes", x->workspace);
    return HEED_OK;
}

static int writes(const heed_tensor *t) { return t->data && heed_elements(t) > 0; }

static int has_results(const heed_problem *p)
{
    const heed_gradient *g = &p->g;
    if (p->pass == HEED_FORWARD)
        return writes(&p->a.o);
    return writes(&g->d_q) || writes(&g->d_k) || writes(&g->d_v) || writes(&g->d_bias) || writes(&g->d_sink);
}

/* What a CPU call may read now and a GPU reads only when the work runs. */
static heed_status read_host_memory(heed_problem *p)
{
    if (p->drop_below && p->a.dropout_seed_at)
        p->a.dropout_seed += *p->a.dropout_seed_at;
    p->a.dropout_seed_at = NULL;
    return heed_check_lengths(p);
}

static heed_status run(const heed_attention *a, const heed_gradient *g, const heed_exec *x)
{
    heed_call made, *call;
    heed_status s;
    if ((s = plan_call(a, g, x, &made, &call)) || (s = check_workspace(&call->plan, x)))
        return s;
    if (x->backend != HEED_CUDA && (s = read_host_memory(&call->problem)))
        return s;
    if (!has_results(&call->problem))
        return HEED_OK;
    if (x->backend != HEED_CUDA)
        heed_fill_strays(&call->problem);
    return call->plan.kernel->launch(&call->problem, &call->plan, x);
}

heed_status heed_forward(const heed_attention *a, const heed_exec *x) { return run(a, NULL, x); }

heed_status heed_backward(const heed_attention *a, const heed_gradient *g, const heed_exec *x)
{
    if (!g)
        return heed_fail(HEED_BAD_ARGUMENT, "gradient: is NULL");
    return run(a, g, x);
}

heed_status heed_workspace_size(const heed_attention *a, const heed_gradient *g, const heed_exec *x, size_t *bytes)
{
    heed_call made, *call;
    heed_status s;
    heed_exec asking = { 0 };
    if (!bytes)
        return heed_fail(HEED_BAD_ARGUMENT, "bytes: is NULL");
    if (x)
        asking = *x, asking.workspace = NULL; /* one that was used before says nothing about the one to come */
    if ((s = plan_call(a, g, x ? &asking : NULL, &made, &call)))
        return s;
    *bytes = call->plan.workspace_bytes;
    return HEED_OK;
}

heed_status heed_explain(const heed_attention *a, const heed_gradient *g, const heed_exec *x, const char *chip,
                         char *text, size_t size)
{
    heed_problem p;
    heed_device d;
    heed_plan plan;
    heed_status s;
    if (!text || size == 0)
        return heed_fail(HEED_BAD_ARGUMENT, "text: is %s, size is %zu; expected room for text", text ? "given" : "NULL",
                         size);
    if ((s = heed_check(a, g, x, 1, &p)))
        return s;
    if ((s = chip ? heed_device_named(chip, x, &d) : heed_device_of(x, &d)))
        return s;
    text[0] = 0;
    return heed_choose(&p, &d, forced_kernel(x, &p), &plan, &(heed_text){ text, size, 0 });
}

/* The small calls touch each element once: some nanoseconds for each. */
static int threads_for_elements(const heed_device *d, const heed_tensor *o)
{
    return heed_threads_for(d, (double)heed_elements(o) * 2e-3);
}

heed_status heed_merge(const heed_tensor *o, const heed_tensor *lse, const heed_tensor *o2, const heed_tensor *lse2,
                       const heed_exec *x)
{
    heed_tensor normal[4];
    heed_device d;
    heed_status s;
    if ((s = heed_check_exec(x)) || (s = heed_check_merge(o, lse, o2, lse2, normal)) || (s = heed_device_of(x, &d)))
        return s;
#ifdef HEED_HAS_CUDA
    if (x->backend == HEED_CUDA)
        return heed_merge_cuda(normal, x);
#endif
    heed_merge_cpu(normal, threads_for_elements(&d, normal));
    return HEED_OK;
}

heed_status heed_delta(const heed_tensor *o, const heed_tensor *d_o, const heed_tensor *d_lse, const heed_tensor *delta,
                       const heed_exec *x)
{
    heed_tensor normal[4];
    heed_device d;
    heed_status s;
    if ((s = heed_check_exec(x)) || (s = heed_check_delta(o, d_o, d_lse, delta, normal)) || (s = heed_device_of(x, &d)))
        return s;
#ifdef HEED_HAS_CUDA
    if (x->backend == HEED_CUDA)
        return heed_delta_cuda(normal, x);
#endif
    heed_delta_cpu(normal, threads_for_elements(&d, normal));
    return HEED_OK;
}
