/* heed.h: "any number of threads may call it at once", and heed_last_error() is "of this thread". */
#include "harness.h"

#include <pthread.h>

enum { CALLERS = 8, ROUNDS = 5 };

typedef struct caller {
    pthread_t thread;
    test_case *c;
    heed_attention a;
    heed_gradient g;
    heed_exec x;
    heed_status status;
    int wrong_message;
} caller;

/* No assertion of cmocka in here: it jumps. */
static void *call(void *argument)
{
    caller *me = argument;
    for (int n = 0; n < ROUNDS && !me->status; n++) {
        heed_attention broken = me->a;
        broken.k.shape[3] = 100 + (int64_t)(me->a.dropout_seed);
        char expected[24];
        snprintf(expected, sizeof expected, "%lld", (long long)broken.k.shape[3]);
        heed_status refused = heed_forward(&broken, &me->x);
        me->status = heed_forward(&me->a, &me->x);
        if (!me->status)
            me->status = heed_backward(&me->a, &me->g, &me->x);
        if (refused != HEED_BAD_ARGUMENT || !strstr(heed_last_error(), expected))
            me->wrong_message = 1;
    }
    return NULL;
}

/* Each caller has its own outputs and workspace, all share the inputs; the bits are those of a call alone. */
static void expect_independent_callers(heed_backend backend, heed_dtype dtype, int threads)
{
    heed_kernel_info best = { .name = "backward", .backend = backend, .backward = 1, .dtype = dtype };
    test_case c = case_new(&best, (case_shape){ .B = 2, .Hq = 4, .Hk = 2, .Sq = 70, .Sk = 90, .D = 32 });
    caller callers[CALLERS + 1];
    size_t forward, backward;
    c.a.causal = 1;
    c.x.threads = threads;
    for (int n = 0; n <= CALLERS; n++) {
        callers[n] = (caller){ .c = &c, .a = c.a, .g = c.g, .x = c.x };
        callers[n].a.dropout_seed = (uint64_t)n;
        heed_tensor *results[] = { &callers[n].a.o, &callers[n].a.lse, &callers[n].g.d_q, &callers[n].g.d_k,
                                   &callers[n].g.d_v };
        for (int which = 0; which < COUNT(results); which++)
            *results[which] = case_tensor(&c, results[which]->dtype, results[which]->shape, NULL);
        assert_int_equal(heed_workspace_size(&callers[n].a, NULL, &c.x, &forward), HEED_OK);
        assert_int_equal(heed_workspace_size(&callers[n].a, &callers[n].g, &c.x, &backward), HEED_OK);
        callers[n].x.workspace_bytes = HEED_MAX(forward, backward);
        callers[n].x.workspace = case_memory(&c, callers[n].x.workspace_bytes, 0);
    }
    call(&callers[CALLERS]);
    for (int n = 0; n < CALLERS; n++)
        assert_int_equal(pthread_create(&callers[n].thread, NULL, call, &callers[n]), 0);
    for (int n = 0; n < CALLERS; n++)
        pthread_join(callers[n].thread, NULL);
    for (int n = 0; n < CALLERS; n++) {
        assert_int_equal(callers[n].status, HEED_OK);
        assert_false(callers[n].wrong_message);
        expect_same_bits(&c, "o", &callers[CALLERS].a.o, &callers[n].a.o);
        expect_same_bits(&c, "d_q", &callers[CALLERS].g.d_q, &callers[n].g.d_q);
        expect_same_bits(&c, "d_k", &callers[CALLERS].g.d_k, &callers[n].g.d_k);
        expect_same_bits(&c, "d_v", &callers[CALLERS].g.d_v, &callers[n].g.d_v);
    }
    case_guards(&c);
    case_free(&c);
}

TEST(many_threads_may_call_at_once)
{
    for (heed_dtype dtype = HEED_F32; dtype <= HEED_BF16; dtype++)
        expect_independent_callers(HEED_CPU, dtype, 1);
}

TEST(many_threads_may_call_the_reference_at_once) { expect_independent_callers(HEED_REFERENCE, HEED_F32, 1); }

TEST(many_threads_may_call_at_once_with_threads_of_their_own) { expect_independent_callers(HEED_CPU, HEED_F32, 3); }

TEST(as_many_threads_as_one_likes_are_no_more_than_are_of_use)
{
    const heed_kernel_info any = { .backend = HEED_CPU, .dtype = HEED_F32 };
    test_case c = case_new(&any, (case_shape){ .B = 4, .Hq = 8, .Sq = 128, .D = 64 });
    heed_device_info cpu;
    size_t all, many;
    heed_set_threads(INT32_MAX);
    assert_int_equal(heed_device_at(HEED_CPU, 0, &cpu), HEED_OK);
    heed_set_threads(0);
    assert_true(cpu.threads <= HEED_MAX(cpu.units, 256));
    c.x.threads = INT32_MAX;
    assert_int_equal(heed_workspace_size(&c.a, NULL, &c.x, &all), HEED_OK);
    c.x.threads = cpu.threads;
    assert_int_equal(heed_workspace_size(&c.a, NULL, &c.x, &many), HEED_OK);
    assert_int_equal(all, many);
    case_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_threads_may_call_at_once),
        cmocka_unit_test(many_threads_may_call_the_reference_at_once),
        cmocka_unit_test(many_threads_may_call_at_once_with_threads_of_their_own),
        cmocka_unit_test(as_many_threads_as_one_likes_are_no_more_than_are_of_use),
    };
    return RUN_TESTS(tests);
}
