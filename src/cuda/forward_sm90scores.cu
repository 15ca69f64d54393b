/* The Hopper forward of scores to which a bias or ALiBi is added, or that a mask hides, and with dropout. */
#include "scores_sm90.cuh"

template <class T, class S> static heed_status start(const args &a, const key_parts &by, int units, const heed_exec *x)
{
    term_maps m;
    const heed_status status = heed_map_terms(&m, a);
    return status ? status : forward_sm90_start<S, scored_shared<S>>(forward_sm90scores<T, S>, a, by, units, x, m);
}

template <class T, bool DROPS>
static heed_status run_sized(const args &a, const key_parts &by, int units, const heed_exec *x)
{
    return HEED_MAX(a.D, a.Dv) <= 64 ? start<T, scored_shape<T, 64, 4, 4, false, 2, DROPS>>(a, by, units, x)
                                     : start<T, scored_shape<T, 128, 3, 2, true, 3, DROPS>>(a, by, units, x);
}

template <class T> static heed_status run(const args &a, const key_parts &by, int units, const heed_exec *x)
{
    return (a.drop_below ? run_sized<T, true> : run_sized<T, false>)(a, by, units, x);
}

size_t heed_forward_workspace_sm90scores(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return forward_sm90_workspace(p);
}

heed_status heed_forward_sm90scores(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    return forward_sm90_run(p, plan, x, p->a.q.dtype == HEED_F16 ? run<__half> : run<__nv_bfloat16>);
}
