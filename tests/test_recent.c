/* A call that repeats an earlier one with other addresses is checked and planned by comparison: recent.c. Nothing of that
 * may be seen. */
#include "harness.h"

#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { D = 16, ROWS = 5, COUNT_OF_ELEMENTS = ROWS * D };

typedef struct memory {
    _Alignas(64) float q[COUNT_OF_ELEMENTS + 1], k[COUNT_OF_ELEMENTS], v[COUNT_OF_ELEMENTS], o[2 * COUNT_OF_ELEMENTS],
        lse[ROWS], d_o[COUNT_OF_ELEMENTS], d_q[COUNT_OF_ELEMENTS], workspace[1 << 16];
} memory;

static heed_tensor rows(float *data, int64_t columns)
{
    return (heed_tensor){ .data = data, .dtype = HEED_F32, .shape = { 1, 1, ROWS, columns } };
}

static heed_attention problem_in(memory *m)
{
    return (heed_attention){
        .q = rows(m->q, D), .k = rows(m->k, D), .v = rows(m->v, D), .o = rows(m->o, D), .lse = rows(m->lse, 1)
    };
}

static heed_gradient gradient_in(memory *m)
{
    return (heed_gradient){ .d_o = rows(m->d_o, D), .d_q = rows(m->d_q, D) };
}

static heed_exec exec_in(memory *m)
{
    return (heed_exec){ .backend = HEED_CPU, .workspace = m->workspace, .workspace_bytes = sizeof m->workspace };
}

static memory *memory_new(int seed)
{
    memory *m = aligned_alloc(64, sizeof *m);
    assert_non_null(m);
    for (int n = 0; n < COUNT_OF_ELEMENTS; n++) {
        m->q[n] = (float)((n * 7 + seed) % 11) / 11, m->k[n] = (float)((n * 5 + seed) % 13) / 13;
        m->v[n] = (float)((n * 3 + seed) % 17) / 17, m->d_o[n] = (float)((n + seed) % 19) / 19;
    }
    return m;
}

static void compute(memory *m)
{
    heed_attention a = problem_in(m);
    heed_gradient g = gradient_in(m);
    heed_exec x = exec_in(m);
    assert_int_equal(heed_forward(&a, &x), HEED_OK);
    assert_int_equal(heed_backward(&a, &g, &x), HEED_OK);
}

TEST(a_repeated_call_computes_with_its_own_addresses)
{
    memory *first = memory_new(1), *second = memory_new(2), *again = memory_new(2);
    compute(first);
    compute(second);
    compute(first);
    compute(again);
    assert_memory_equal(second->o, again->o, COUNT_OF_ELEMENTS * sizeof(float));
    assert_memory_equal(second->lse, again->lse, sizeof again->lse);
    assert_memory_equal(second->d_q, again->d_q, sizeof again->d_q);
    assert_memory_not_equal(first->o, again->o, COUNT_OF_ELEMENTS * sizeof(float));
    free(first), free(second), free(again);
}

/* The same shapes and strides each time; only addresses and what is not in the descriptor's tensors change. */
TEST(what_an_address_breaks_is_found_in_a_repeated_call)
{
    memory *m = memory_new(3);
    compute(m);
    heed_attention a = problem_in(m);
    heed_exec x = exec_in(m);
    a.o.data = m->q;
    assert_int_equal(heed_forward(&a, &x), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "o: overlaps q, expected memory of its own");
    a.o.data = m->o;
    a.lse.data = m->o + COUNT_OF_ELEMENTS - 1;
    assert_int_equal(heed_forward(&a, &x), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "o: overlaps lse, expected memory of its own");
    a.lse.data = m->o + COUNT_OF_ELEMENTS;
    assert_int_equal(heed_forward(&a, &x), HEED_OK);
    a.q.data = (char *)m->q + 1;
    assert_int_equal(heed_forward(&a, &x), HEED_BAD_ARGUMENT);
    a.q.data = NULL;
    assert_int_equal(heed_forward(&a, &x), HEED_BAD_ARGUMENT);
    a.q.data = m->q;
    x.threads = -1;
    assert_int_equal(heed_forward(&a, &x), HEED_BAD_ARGUMENT);
    x.threads = 0, x.kernel = "forward_reference_f32";
    assert_int_equal(heed_forward(&a, &x), HEED_UNSUPPORTED);
    x.kernel = NULL, x.workspace_bytes = 0;
    heed_gradient g = gradient_in(m);
    g.d_q.data = m->d_o;
    assert_int_equal(heed_backward(&a, &g, &x), HEED_BAD_ARGUMENT);
    free(m);
}

static heed_call *recalled(const heed_attention *a, const heed_exec *x)
{
    size_t bytes;
    assert_int_equal(heed_workspace_size(a, NULL, x, &bytes), HEED_OK);
    return heed_recall(a, NULL, x);
}

TEST(only_a_repeated_call_is_recalled)
{
    memory *m = memory_new(4);
    heed_attention a = problem_in(m), b = a;
    heed_exec x = exec_in(m);
    assert_non_null(recalled(&a, &x));
    assert_true(recalled(&a, &x)->problem.aligned);
    b.q.data = m->q + 1;
    assert_null(heed_recall(&b, NULL, &x));
    assert_false(recalled(&b, &x)->problem.aligned);
    b = a, b.scale = 0.5f;
    assert_null(heed_recall(&b, NULL, &x));
    b = a, b.k.shape[2] = ROWS - 1;
    assert_null(heed_recall(&b, NULL, &x));
    b = a, b.dropout_seed = 77;
    assert_int_equal(heed_recall(&b, NULL, &x)->problem.a.dropout_seed, 77);
    heed_exec y = x;
    y.nondeterministic = 1;
    assert_null(heed_recall(&a, NULL, &y));
    y = x, y.kernel = "forward_cpu_plain_f32";
    assert_null(heed_recall(&a, NULL, &y));
    assert_string_equal(recalled(&a, &y)->plan.kernel->name, y.kernel);
    free(m);
}

TEST(the_number_of_threads_is_the_one_of_the_moment)
{
#ifdef _OPENMP
    memory *m = memory_new(5);
    heed_attention a = problem_in(m);
    heed_exec x = exec_in(m);
    assert_non_null(recalled(&a, &x));
    heed_set_threads(omp_get_max_threads() + 1);
    assert_null(heed_recall(&a, NULL, &x));
    assert_int_equal(recalled(&a, &x)->plan.device.threads, omp_get_max_threads() + 1);
    heed_set_threads(0);
    free(m);
#else
    skip();
#endif
}

/* As many different calls as there is room for, and more, over and over. */
TEST(calls_by_turns_do_not_mix)
{
    memory *m = memory_new(6);
    for (int n = 0; n < 40; n++) {
        heed_attention a = problem_in(m);
        heed_exec x = exec_in(m);
        a.q.shape[2] = a.o.shape[2] = a.lse.shape[2] = 1 + n % (n < 20 ? 3 : 5);
        heed_call *call = recalled(&a, &x);
        assert_int_equal(call->problem.Sq, a.q.shape[2]);
        assert_ptr_equal(call->problem.a.v.data, m->v);
    }
    free(m);
}

/* As with tensors, so with memory that none describes: the workspace, and integers, which the CPU reads. */
TEST(what_the_workspace_and_integers_overlap_is_found_in_a_repeated_call)
{
    memory *m = memory_new(7);
    static const int32_t lengths[1] = { ROWS };
    heed_attention a = problem_in(m);
    heed_gradient g = gradient_in(m);
    heed_exec x = exec_in(m);
    a.lengths_k = lengths;
    for (int n = 0; n < 2; n++) {
        assert_int_equal(heed_forward(&a, &x), HEED_OK);
        assert_int_equal(heed_backward(&a, &g, &x), HEED_OK);
    }
    x.workspace = m->v + 16, x.workspace_bytes = 64;
    assert_int_equal(heed_forward(&a, &x), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "workspace: overlaps v, expected memory of its own");
    x.workspace = m->d_q;
    assert_int_equal(heed_backward(&a, &g, &x), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "workspace: overlaps d_q, expected memory of its own");
    x = exec_in(m);
    a.lengths_k = (const int32_t *)m->workspace;
    assert_int_equal(heed_forward(&a, &x), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "workspace: overlaps lengths_k, expected memory of its own");
    a.lengths_k = (const int32_t *)m->o + 4;
    assert_int_equal(heed_forward(&a, &x), HEED_BAD_ARGUMENT);
    assert_string_equal(heed_last_error(), "o: overlaps lengths_k, expected memory of its own");
    a.lengths_k = lengths;
    assert_non_null(heed_recall(&a, NULL, &x));
    assert_non_null(heed_recall(&a, &g, &x));
    free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_repeated_call_computes_with_its_own_addresses),
        cmocka_unit_test(what_an_address_breaks_is_found_in_a_repeated_call),
        cmocka_unit_test(only_a_repeated_call_is_recalled),
        cmocka_unit_test(the_number_of_threads_is_the_one_of_the_moment),
        cmocka_unit_test(calls_by_turns_do_not_mix),
        cmocka_unit_test(what_the_workspace_and_integers_overlap_is_found_in_a_repeated_call),
    };
    return RUN_TESTS(tests);
}
