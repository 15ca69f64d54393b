/* The rows of the Hopper forward: which shape serves which head size. */
#include "forward_sm90.cuh"

template <class T, int D, int GROUPS, int KEYS, int Q_STAGES, int KV_STAGES, bool TURNS>
static heed_status run(const args &a, int units, const heed_exec *x)
{
    return forward_sm90_launch<T, forward_shape<D, GROUPS, KEYS, Q_STAGES, KV_STAGES, KV_STAGES, TURNS, true>>(a, units,
                                                                                                               x);
}

template <class T> static heed_status run(const args &a, int units, const heed_exec *x)
{
    const int width = HEED_MAX(a.D, a.Dv);
    return width <= 64    ? run<T, 64, 3, 112, 2, 4, true>(a, units, x)
           : width <= 96  ? run<T, 96, 2, 128, 2, 2, false>(a, units, x)
           : width <= 128 ? run<T, 128, 2, 128, 2, 2, false>(a, units, x)
           : width <= 192 ? run<T, 192, 2, 96, 1, 2, false>(a, units, x)
                          : run<T, 256, 2, 64, 1, 2, false>(a, units, x);
}

size_t heed_forward_workspace_sm90(const heed_problem *p, const heed_plan *plan)
{
    (void)p, (void)plan;
    return 0;
}

heed_status heed_forward_sm90(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    prologue begin(p, x);
    if (begin.status)
        return begin.status;
    const args &a = begin.a;
    const int units = plan->device.units;
    return a.q.dtype == HEED_F16 ? run<__half>(a, units, x) : run<__nv_bfloat16>(a, units, x);
}
