/* The compile-time variants of the Hopper backward's kernels for keys that are worth comparing: those of dK and dV
 * alone, and those that sum dQ beside them. bench/tune_sm90.py --backward checks and times them all in one process; the
 * ones that src/cuda/backward_sm90_keys.cu and backward_sm90fused.cu take should be the best of their head size there. */
#include "cuda/backward_sm90_keys.cuh"

struct variant {
    const char *name;
    int head_dim;
    backward_kernel kernel;
    bool all;
};

template <class C> static heed_status run_bf16(const backward_job &p, int blocks, const heed_exec *x)
{
    return launch(dkv_sm90<__nv_bfloat16, C, false>, blocks, C::THREADS, sizeof(backward_shared<C>), x, p);
}

template <class C> static backward_kernel kernel() { return { C::D, C::ROWS, run_bf16<C> }; }

/* Head size; own tiles, stages of Q and of dO, ways; with sums, tiles of dS. */
#define DKV(D, ...)                                                                                                    \
    {                                                                                                                  \
        "d" #D " dK dV: " #__VA_ARGS__, D, kernel<backward_shape<true, D, 128, __VA_ARGS__>>(), false                  \
    }
#define ALL(D, ...)                                                                                                    \
    {                                                                                                                  \
        "d" #D " all: " #__VA_ARGS__, D, kernel<backward_shape<true, D, 128, __VA_ARGS__>>(), true                     \
    }
static const variant variants[] = {
    DKV(64, 2, 4, 4, EARLY | LATE | EXACT | AHEAD),
    DKV(64, 2, 4, 4, EARLY | EXACT | AHEAD),
    DKV(64, 2, 4, 4, EARLY | LATE | AHEAD),
    DKV(96, 2, 2, 2, EARLY | AHEAD),
    DKV(128, 2, 2, 2),
    DKV(128, 2, 2, 2, EARLY),
    DKV(128, 1, 4, 4),
    ALL(64, 2, 4, 4, EARLY | EXACT | AHEAD | OWNER, 3),
    ALL(64, 2, 4, 4, EARLY | EXACT | AHEAD, 3),
    ALL(96, 1, 2, 2, EARLY | AHEAD | OWNER, 3),
    ALL(96, 1, 2, 2, EARLY | AHEAD, 3),
    ALL(128, 1, 2, 2, 0, 3),
};

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int tune_backward_count(void) { return sizeof variants / sizeof *variants; }
EXPORT const char *tune_backward_name(int n) { return variants[n].name; }
EXPORT int tune_backward_head_dim(int n) { return variants[n].head_dim; }

/* With no workspace, says how large it must be. */
EXPORT int tune_backward(int n, const heed_attention *a, const heed_gradient *g, const heed_exec *x, size_t *bytes)
{
    const variant &v = variants[n];
    const backward_form form = { v.all ? heed_sm90_dkv(v.head_dim) : v.kernel, heed_sm90_dq(v.head_dim),
                                 v.all ? v.kernel : backward_kernel() };
    heed_problem p;
    heed_status status = heed_check(a, g, x, 0, &p);
    if (status)
        return status;
    *bytes = heed_sm90_backward_bytes(&p, form);
    return x->workspace ? heed_sm90_backward(&p, form, x) : HEED_OK;
}
