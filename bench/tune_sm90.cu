/* The compile-time variants of the Hopper forward that are worth comparing. bench/tune_sm90.py checks and times them all
 * in one process; the row that src/cuda/forward_sm90.cu takes should be the best of its head size there. The backward's
 * are in tune_sm90_backward.cu.
 *
 *     cmake -B build-tune -G Ninja -DHEED_BENCH=ON -DHEED_CUDA_ARCHITECTURES=90a-real && ninja -C build-tune tune_sm90
 *     python3 bench/tune_sm90.py --lib build-tune/libtune_sm90.so */
#include "cuda/forward_sm90.cuh"

struct variant {
    const char *name;
    heed_dtype dtype;
    int head_dim;
    heed_status (*launch)(const args &, const key_parts &, int units, const heed_exec *);
};

/* Head size; warpgroups, keys at once, buffers for K and for V; S and O += P V together; softcap. */
#define BF16(D, ...)                                                                                                   \
    {                                                                                                                  \
        "bf16 d" #D ": " #__VA_ARGS__, HEED_BF16, D, forward_sm90_launch<__nv_bfloat16, forward_shape<D, __VA_ARGS__>> \
    }
#define F16(D, ...)                                                                                                    \
    {                                                                                                                  \
        "fp16 d" #D ": " #__VA_ARGS__, HEED_F16, D, forward_sm90_launch<__half, forward_shape<D, __VA_ARGS__>>         \
    }
static const variant variants[] = {
    BF16(64, 4, 64, 8, false), BF16(64, 4, 96, 4, false),  BF16(64, 3, 112, 4, true),  BF16(64, 2, 128, 4, true),
    BF16(96, 4, 64, 2, false), BF16(96, 4, 48, 4, false),  BF16(96, 3, 96, 2, true),   BF16(128, 2, 128, 2, true),
    BF16(128, 2, 64, 4, true), BF16(128, 3, 64, 4, false), BF16(128, 3, 96, 2, false), BF16(192, 2, 96, 2, true),
    BF16(192, 2, 64, 2, true), BF16(192, 3, 64, 2, false), BF16(256, 2, 64, 2, true),  F16(64, 4, 64, 8, false),
    F16(128, 2, 128, 2, true), F16(256, 2, 64, 2, true),
};

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int tune_count(void) { return sizeof variants / sizeof *variants; }
EXPORT const char *tune_name(int n) { return variants[n].name; }
EXPORT int tune_dtype(int n) { return variants[n].dtype; }
EXPORT int tune_head_dim(int n) { return variants[n].head_dim; }
EXPORT const char *tune_error(void) { return heed_last_error(); }

EXPORT int tune_forward(int n, const heed_attention *a, const heed_exec *x)
{
    heed_problem p;
    heed_device d;
    heed_status status = heed_check(a, NULL, x, 0, &p);
    if (!status)
        status = heed_device_of(x, &d);
    if (status)
        return status;
    prologue begin(&p, x);
    return begin.status ? begin.status : variants[n].launch(begin.a, { 1, INT32_MAX, NULL, NULL }, d.units, x);
}
