/* The Hopper backward in one kernel (backward_sm90fused.cu) of scores to which a bias or ALiBi is added, or that a mask hides,
 * for head sizes to 64: with larger ones there is no room for a bias beside what passes through shared memory. */
#include "backward_sm90_scores.cuh"

/* One that can take heads in parts is as fast where it takes them whole. */
static backward_form form_of()
{
    const backward_kernel kernel =
        scored_kernel<scored_shape<64, 128, 2, 2, 2, EXACT | AHEAD | OWNER | SHARED, 2, 48 * 1024>>();
    return { {}, {}, kernel, kernel };
}

size_t heed_backward_workspace_sm90scores(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return heed_sm90_backward_bytes(p, form_of());
}

heed_status heed_backward_sm90scores(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    (void)plan;
    return heed_sm90_backward(p, form_of(), x);
}
