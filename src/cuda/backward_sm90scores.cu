/* The Hopper backward in one kernel (backward_sm90fused.cu) of scores to which a bias or ALiBi is added, or that a mask hides,
 * for head sizes to 128, and with dropout, to 96. */
#include "backward_sm90_scores.cuh"

/* One that can take heads in parts is as fast where it takes them whole. */
constexpr int WAYS = AHEAD | OWNER | SHARED;

template <bool DROPS> static backward_kernel narrow_kernel(const heed_problem *p, int head_dim)
{
    return head_dim <= 64 ? scored_kernel<scored_shape<64, 128, 2, 2, 2, EXACT | WAYS, 2, 48 * 1024, DROPS>>(p)
                          : scored_kernel<scored_shape<96, 128, 1, 2, 2, EXACT | WAYS, 2, 8 * 1024, DROPS>>(p);
}

static backward_form form_of(const heed_problem *p)
{
    const int head_dim = (int)HEED_MAX(p->D, p->Dv);
    const backward_kernel kernel = head_dim > 96   ? scored_kernel<scored_shape<128, 128, 1, 2, 2, WAYS, 2, 0>>(p)
                                   : p->drop_below ? narrow_kernel<true>(p, head_dim)
                                                   : narrow_kernel<false>(p, head_dim);
    return { {}, {}, kernel, kernel };
}

size_t heed_backward_workspace_sm90scores(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return heed_sm90_backward_bytes(p, form_of(p));
}

heed_status heed_backward_sm90scores(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    (void)plan;
    return heed_sm90_backward(p, form_of(p), x);
}
