/* heed in a program that has OpenMP threads of its own: it uses the same ones, all or one, and leaves them as they were.
 * (libgomp ends threads that a smaller team has no use for, and the program would pay for starting them again.) */
#include "harness.h"

#include <pthread.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#ifdef _OPENMP
enum { MOST = 64 };

static int team_of_host(pthread_t members[MOST])
{
    int size = 0;
#pragma omp parallel
    {
#pragma omp single
        size = omp_get_num_threads();
        if (omp_get_thread_num() < MOST)
            members[omp_get_thread_num()] = pthread_self();
    }
    return HEED_MIN(size, MOST);
}

static void forward_of_rows(int64_t rows, float *o)
{
    static float q[4 * 512 * 64];
    for (size_t n = 0; n < sizeof q / sizeof *q; n++)
        q[n] = (float)(n * 2654435761u % 1000) / 500 - 1;
    heed_tensor t = { .data = q, .shape = { 1, 4, rows, 64 } };
    heed_attention a = { .q = t, .k = t, .v = t, .o = t };
    a.o.data = o;
    heed_exec x = { .backend = HEED_CPU };
    assert_int_equal(heed_workspace_size(&a, NULL, &x, &x.workspace_bytes), HEED_OK);
    x.workspace = malloc(x.workspace_bytes);
    assert_int_equal(heed_forward(&a, &x), HEED_OK);
    free(x.workspace);
}

static void the_threads_of_the_host_outlive_a_call(void **state)
{
    (void)state;
    static float o[4 * 512 * 64];
    pthread_t before[MOST], after[MOST];
    omp_set_num_threads(4);
    int size = team_of_host(before);
    forward_of_rows(512, o); /* all threads */
    forward_of_rows(8, o);   /* one thread */
    assert_int_equal(team_of_host(after), size);
    for (int n = 0; n < size; n++)
        assert_true(pthread_equal(before[n], after[n]));
}

/* "One thread is used ... inside a parallel region of the caller's." */
static void calls_inside_a_parallel_region_do_not_nest(void **state)
{
    (void)state;
    static float alone[4 * 512 * 64], inside[4][4 * 512 * 64];
    forward_of_rows(512, alone);
    omp_set_num_threads(4);
    int planned[4] = { 0 };
#pragma omp parallel for schedule(static, 1)
    for (int n = 0; n < 4; n++) {
        heed_device_info info;
        if (heed_device_at(HEED_CPU, 0, &info) == HEED_OK)
            planned[n] = info.threads;
    }
    for (int n = 0; n < 4; n++)
        assert_int_equal(planned[n], 1);
    heed_tensor t = { .data = alone, .shape = { 1, 4, 512, 64 } };
    heed_status status[4];
#pragma omp parallel for schedule(static, 1)
    for (int n = 0; n < 4; n++) {
        heed_attention a = { .q = t, .k = t, .v = t, .o = t };
        a.o.data = inside[n];
        heed_exec x = { .backend = HEED_CPU };
        status[n] = heed_workspace_size(&a, NULL, &x, &x.workspace_bytes);
        x.workspace = malloc(x.workspace_bytes);
        status[n] = status[n] ? status[n] : heed_forward(&a, &x);
        free(x.workspace);
    }
    for (int n = 0; n < 4; n++) {
        assert_int_equal(status[n], HEED_OK);
        assert_memory_equal(inside[n], inside[0], sizeof inside[0]);
    }
}
#endif

int main(void)
{
#ifdef _OPENMP
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_threads_of_the_host_outlive_a_call),
        cmocka_unit_test(calls_inside_a_parallel_region_do_not_nest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
#else
    puts("built without OpenMP: nothing to look at");
    return 0;
#endif
}
