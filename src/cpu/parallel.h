/* The one place of the kernels that knows of OpenMP. Calls body(context, index, thread) for index = 0 .. count-1; indices are handed
 * out in ascending order, one at a time, so an index may wait for a smaller one. With one thread it is a plain loop
 * that does not touch the OpenMP runtime: a caller inside its own parallel region is safe. */
typedef void parallel_body(void *context, int64_t index, int thread);

#ifdef _OPENMP
#include <omp.h>
#endif

static void parallel_for(int threads, int64_t count, parallel_body *body, void *context)
{
#ifdef _OPENMP
    if (threads > 1 && count > 1) {
#pragma omp parallel for num_threads(threads) schedule(monotonic : dynamic, 1)
        for (int64_t index = 0; index < count; index++) {
            body(context, index, omp_get_thread_num());
            leave_tiles();
        }
        return;
    }
#endif
    (void)threads;
    for (int64_t index = 0; index < count; index++)
        body(context, index, 0);
    leave_tiles();
}

/* A workspace is cut into pieces by this counter; the same code counts and hands out. */
static inline size_t take(size_t *used, int64_t floats)
{
    size_t at = *used;
    *used += ((size_t)floats * sizeof(float) + 63) / 64 * 64;
    return at;
}
