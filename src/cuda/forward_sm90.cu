/* The rows of the Hopper forward: which shape serves which head size, and when keys are taken in parts. */
#include "forward_sm90.cuh"

/* The shapes are those that bench/tune_sm90.py found best: its tables are in docs/tuning/hopper_forward.md. Four warpgroups in
 * turn hide each other's latencies best, where the registers suffice: short sequences are made of little else. Where there
 * are many rows and keys, three with S and O += P V together are ahead, and read K and V less often. The softcap wants
 * registers too, so there are fewer keys at once; and as it takes as long as products or longer, heads of 65 to 96 and of 129
 * to 192 take the next larger shape with it. A rule must not look at what else is in a batch, nor at the device: the rounding
 * of a result must not depend on them. Only shapes of the same bits may be chosen by these: see few_shape. */
using d64 = forward_shape<64, 4, 64, 8, false>;
using d96 = forward_shape<96, 3, 96, 2, true>;
using d96brief = forward_shape<96, 4, 64, 2, false>;
using d128 = forward_shape<128, 2, 128, 2, true>;

template <class T> static heed_status run(const args &a, const key_parts &by, int units, const heed_exec *x)
{
    const int width = HEED_MAX(a.D, a.Dv);
    const int64_t keys = a.offsets_k ? -1 : tiles_of(a.Sk, a.col_step); /* -1: who knows */
    const bool brief = keys >= 0 && keys <= 1024;
    const bool many = a.Sq > 1536 && a.left >= FAR && by.count == 1; /* rows, with all keys or all before them */
    heed_status (*launch)(const args &, const key_parts &, int, const heed_exec *);
    if (a.softcap > 0)
        launch = width <= 64    ? forward_sm90_launch<T, forward_shape<64, 4, 64, 8, false, true>>
                 : width <= 128 ? forward_sm90_launch<T, forward_shape<128, 2, 112, 2, true, true>>
                                : forward_sm90_launch<T, forward_shape<256, 2, 48, 2, true, true>>;
    else
        launch = width <= 64 && many && keys > 4096 ? forward_sm90_launch<T, forward_shape<64, 3, 128, 4, true>>
                 : width <= 64                      ? forward_sm90_launch<T, few_shape<d64, 1, 4, true>, d64>
                 : width <= 96 && brief             ? forward_sm90_launch<T, few_shape<d96brief, 1, 4, true>, d96brief>
                 : width <= 96                      ? forward_sm90_launch<T, few_shape<d96, 1, 2, false>, d96>
                 : width <= 128 && many && keys > 1000 ? forward_sm90_launch<T, forward_shape<128, 3, 64, 2, true>>
                 : width <= 128
                     ? forward_sm90_launch<T, few_shape<d128, 1, 2, false>, few_shape<d128, 2, 2, false>, d128>
                 : width <= 192 ? forward_sm90_launch<T, forward_shape<192, 2, 64, 2, true>>
                                : forward_sm90_launch<T, forward_shape<256, 2, 64, 2, true>>;
    return launch(a, by, units, x);
}

size_t heed_forward_workspace_sm90(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return forward_sm90_workspace(p);
}

heed_status heed_forward_sm90(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    return forward_sm90_run(p, plan, x, p->a.q.dtype == HEED_F16 ? run<__half> : run<__nv_bfloat16>);
}
