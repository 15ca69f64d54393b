/* The Hopper forward of scores to which a bias or ALiBi is added, or that a mask hides. */
#include "scores_sm90.cuh"

/* Boxes of one row, or of a warpgroup's, and of the keys of a block or of half of one. */
static heed_status map_term(tensor_map *map, int *pieces, int *box_rows, const view &t, const args &a)
{
    const int size = (int)heed_dtype_size((heed_dtype)t.dtype);
    *box_rows = t.stride[2] ? 64 : 1, *pieces = size == 4 ? 2 : 1;
    return heed_tensor_map(map, t, a.Sk, t.stride[2] ? a.Sq : 1, a.Hq, a.B, *box_rows, 64 / *pieces);
}

template <class T, class S> static heed_status start(const args &a, const key_parts &by, int units, const heed_exec *x)
{
    term_maps m = {};
    heed_status status = HEED_OK;
    if (a.bias.data && a.Sk && a.Sq)
        status = map_term(&m.bias, &m.bias_pieces, &m.bias_rows, a.bias, a);
    if (!status && a.mask.data && a.Sk && a.Sq)
        status = map_term(&m.mask, &m.mask_pieces, &m.mask_rows, a.mask, a);
    return status ? status : forward_sm90_start<S, scored_shared<S>>(forward_sm90scores<T, S>, a, by, units, x, m);
}

template <class T> static heed_status run(const args &a, const key_parts &by, int units, const heed_exec *x)
{
    return HEED_MAX(a.D, a.Dv) <= 64 ? start<T, scored_shape<T, 64, 4, 4, false, 2>>(a, by, units, x)
                                     : start<T, scored_shape<T, 128, 3, 2, true, 3>>(a, by, units, x);
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
