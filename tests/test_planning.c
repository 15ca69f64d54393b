/* Which kernel a problem gets, on chips that are here and that are not, and what the planner says about it. Nothing
 * here needs more than the numbers of a device. */
#include "internal.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static heed_tensor shape(heed_dtype dtype, int64_t b, int64_t h, int64_t s, int64_t d)
{
    return (heed_tensor){ .dtype = dtype, .shape = { b, h, s, d } };
}

/* Shapes alone: "Pointers in a may be NULL". */
static heed_attention problem(heed_dtype dtype, int64_t rows, int64_t keys, int64_t head_dim)
{
    return (heed_attention){ .q = shape(dtype, 1, 2, rows, head_dim),
                             .k = shape(dtype, 1, 2, keys, head_dim),
                             .v = shape(dtype, 1, 2, keys, head_dim),
                             .o = shape(dtype, 1, 2, rows, head_dim),
                             .lse = shape(HEED_F32, 1, 2, rows, 1) };
}

static heed_gradient gradient(heed_dtype dtype, int64_t rows, int64_t keys, int64_t head_dim)
{
    return (heed_gradient){ .d_o = shape(dtype, 1, 2, rows, head_dim),
                            .d_q = shape(dtype, 1, 2, rows, head_dim),
                            .d_k = shape(dtype, 1, 2, keys, head_dim),
                            .d_v = shape(dtype, 1, 2, keys, head_dim) };
}

static heed_plan plan_on(const char *chip, const heed_attention *a, const heed_gradient *g, const heed_exec *x)
{
    heed_problem p;
    heed_device d;
    heed_plan plan = { 0 };
    if (heed_check(a, g, x, 1, &p) || heed_device_named(chip, x, &d) || heed_choose(&p, &d, NULL, &plan, NULL))
        fail_msg("%s: %s", chip, heed_last_error());
    return plan;
}

#ifdef _OPENMP
enum { TEAM = 4 };
#else
enum { TEAM = 1 }; /* without OpenMP there is no other */
#endif
static const heed_exec on_cpu = { .backend = HEED_CPU, .threads = 4 };

/* The row that each class of processors is expected to get, for each type. */
static void every_class_of_processor_gets_its_best_kernel(void **state)
{
    (void)state;
#ifdef HEED_X86
    static const char *const expected[][4] = {
        { "plain", "cpu_plain_f32", "cpu_plain_f16", "cpu_plain_bf16" },
        { "avx2", "cpu_avx2_f32", "cpu_avx2_f16", "cpu_avx2_bf16" },
        { "avx512", "cpu_avx512_f32", "cpu_avx512_f16", "cpu_avx512_bf16" },
        { "avx512bf16", "cpu_avx512_f32", "cpu_avx512_f16", "cpu_avx512bf16_bf16" },
        { "amx", "cpu_amxsplit_f32", "cpu_amxhalf_f16", "cpu_amx_bf16" },
    };
#else
    static const char *const expected[][4] = { { "plain", "cpu_plain_f32", "cpu_plain_f16", "cpu_plain_bf16" },
                                               { "avx512bf16", "cpu_plain_f32", "cpu_plain_f16", "cpu_plain_bf16" } };
#endif
    for (size_t n = 0; n < sizeof expected / sizeof *expected; n++)
        for (int type = HEED_F32; type <= HEED_BF16; type++) {
            heed_attention a = problem((heed_dtype)type, 512, 512, 64);
            heed_gradient g = gradient((heed_dtype)type, 512, 512, 64);
            heed_plan forward = plan_on(expected[n][0], &a, NULL, &on_cpu);
            heed_plan backward = plan_on(expected[n][0], &a, &g, &on_cpu);
            assert_string_equal(forward.kernel->name + strlen("forward_"), expected[n][1 + type]);
            assert_string_equal(backward.kernel->name + strlen("backward_"), expected[n][1 + type]);
            assert_int_equal(forward.kernel->pass, HEED_FORWARD);
            assert_int_equal(backward.kernel->pass, HEED_BACKWARD);
        }
}

static void every_chip_has_a_name_and_a_plan_or_a_reason(void **state)
{
    (void)state;
    heed_attention a = problem(HEED_BF16, 256, 256, 64);
    int chips = 0;
    for (const char *chip; (chip = heed_chip_name(chips)); chips++) {
        char text[4096] = "";
        heed_device d;
        assert_int_equal(heed_device_named(chip, &on_cpu, &d), HEED_OK);
        heed_status s = heed_explain(&a, NULL, &on_cpu, chip, text, sizeof text);
        if (d.backend == HEED_CPU) {
            assert_int_equal(s, HEED_OK);
            assert_non_null(strstr(text, ": taken, "));
            continue;
        }
        assert_true(d.arch >= 75 && d.units > 0 && d.shared_bytes >= 65536 && d.memory_bytes > 0);
        int rows = 0;
        for (int i = 0; i < heed_kernel_total; i++)
            rows += heed_kernels[i].backend == HEED_CUDA;
        if (!rows) {
            assert_int_equal(s, HEED_UNSUPPORTED);
            assert_non_null(strstr(heed_last_error(), "this build of heed has no forward kernel for bf16 on the CUDA"));
            assert_non_null(strstr(heed_last_error(), d.name));
        }
        assert_true(text[0] != 0);
    }
    assert_int_equal(chips, 15);
    assert_null(heed_chip_name(-1));
    char text[64] = "as it was";
    assert_int_equal(heed_explain(&a, NULL, &on_cpu, "h2000", text, sizeof text), HEED_BAD_ARGUMENT);
    assert_non_null(strstr(heed_last_error(), "chip: there is none called h2000; known are plain, avx2, "));
    assert_non_null(strstr(heed_last_error(), "rtx5090"));
    assert_string_equal(text, "as it was");
}

static void the_explanation_gives_a_line_for_each_row_passed_over(void **state)
{
    (void)state;
#ifdef HEED_X86
    heed_attention a = problem(HEED_BF16, 256, 256, 64);
    char text[4096], small[40];
    assert_int_equal(heed_explain(&a, NULL, &on_cpu, "avx2", text, sizeof text), HEED_OK);
    assert_non_null(strstr(text, "forward_cpu_avx512bf16_bf16: passed over: needs avx512bf16, this device has avx2\n"));
    assert_non_null(strstr(text, "forward_cpu_avx512_bf16: passed over: needs avx512, this device has avx2\n"));
    assert_non_null(strstr(text, "\nforward_cpu_avx2_bf16: taken, "));
    assert_null(strstr(text, "plain")); /* it comes after the one taken */
    assert_null(strstr(text, "f32"));   /* no candidate */
    memset(small, 'x', sizeof small);
    assert_int_equal(heed_explain(&a, NULL, &on_cpu, "avx2", small, sizeof small - 8), HEED_OK);
    assert_int_equal(strlen(small), sizeof small - 9);
    assert_memory_equal(small, text, sizeof small - 9);
    assert_memory_equal(small + sizeof small - 8, "xxxxxxxx", 8);
#endif
}

static void the_reference_takes_every_type_and_one_thread(void **state)
{
    (void)state;
    const heed_exec x = { .backend = HEED_REFERENCE, .threads = 4 };
    static const char *const names[] = { "forward_reference_f32", "forward_reference_f16", "forward_reference_bf16",
                                         "forward_reference_f64" };
    for (int type = HEED_F32; type <= HEED_F64; type++) {
        heed_attention a = problem((heed_dtype)type, 256, 256, 64);
        heed_plan plan = plan_on("plain", &a, NULL, &x);
        assert_string_equal(plan.kernel->name, names[type]);
        assert_int_equal(plan.threads, 1);
    }
}

static void a_forced_kernel_is_taken_or_refused_with_the_reason(void **state)
{
    (void)state;
    const struct {
        const char *kernel, *chip;
        heed_dtype dtype;
        heed_status status;
        const char *message;
    } cases[] = {
        { "forward_cpu_plain_f32", "avx512", HEED_F32, HEED_OK, "forward_cpu_plain_f32: taken" },
        { "forward_cpu_plain_f32", "plain", HEED_F16, HEED_UNSUPPORTED,
          "is for the forward in fp32 on the CPU, this is the forward in fp16 on the CPU" },
        { "backward_cpu_plain_f32", "plain", HEED_F32, HEED_UNSUPPORTED, "is for the backward in fp32" },
        { "forward_reference_f32", "plain", HEED_F32, HEED_UNSUPPORTED, "on the reference, this is" },
        { "forward_cpu_plain_f32", "h200", HEED_F32, HEED_UNSUPPORTED,
          "on the CPU, this is the forward in fp32 on the CUDA" },
        { "forward_cpu_magic", "plain", HEED_F32, HEED_BAD_ARGUMENT,
          "kernel: there is no forward_cpu_magic; `heed info`" },
#ifdef HEED_X86
        { "forward_cpu_avx512_f32", "avx2", HEED_F32, HEED_UNSUPPORTED,
          "forward_cpu_avx512_f32 needs avx512, this device has avx2" },
#endif
    };
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        heed_attention a = problem(cases[n].dtype, 256, 256, 64);
        heed_exec x = { .backend = HEED_CPU, .kernel = cases[n].kernel };
        char text[4096] = "";
        assert_int_equal(heed_explain(&a, NULL, &x, cases[n].chip, text, sizeof text), cases[n].status);
        const char *said = cases[n].status ? heed_last_error() : text;
        if (!strstr(said, cases[n].message))
            fail_msg("\"%s\" instead of \"%s\"", said, cases[n].message);
    }
}

/* A kernel with limits, as later rows will have: the planner walks the table it is built with, so the limits are tested
 * by a problem that goes beyond those of every row. */
static void what_no_kernel_takes_is_unsupported(void **state)
{
    (void)state;
    heed_attention a = problem(HEED_F32, 16, 16, 64);
    heed_problem p;
    heed_device d;
    heed_plan plan;
    char text[4096] = "";
    assert_int_equal(heed_check(&a, NULL, &on_cpu, 1, &p), HEED_OK);
    assert_int_equal(heed_device_named("avx2", &on_cpu, &d), HEED_OK);
    p.Dv = HEED_MAX_HEAD_DIM + 1;
    assert_int_equal(heed_choose(&p, &d, NULL, &plan, &(heed_text){ text, sizeof text, 0 }), HEED_UNSUPPORTED);
    assert_non_null(strstr(heed_last_error(), "no forward kernel for fp32 takes this problem on a CPU with AVX2"));
    assert_non_null(strstr(text, "forward_cpu_plain_f32: passed over: takes head_dim up to 512, this is 513\n"));
}

static int threads_of(int64_t rows, int64_t keys, int64_t head_dim, int causal, int64_t key_stride, int backward)
{
    heed_attention a = problem(HEED_F32, rows, keys, head_dim);
    heed_gradient g = gradient(HEED_F32, rows, keys, head_dim);
    a.causal = causal;
    a.key_stride = key_stride;
    return plan_on("plain", &a, backward ? &g : NULL, &on_cpu).threads;
}

/* All threads or one, by 2.5 million FLOP; two heads here, 4 * 2 * rows * keys * head_dim. */
static void small_work_runs_on_one_thread(void **state)
{
    (void)state;
    assert_int_equal(threads_of(64, 64, 64, 0, 1, 0), 1);       /* 2.1 MFLOP */
    assert_int_equal(threads_of(72, 72, 64, 0, 1, 0), TEAM);    /* 2.7 */
    assert_int_equal(threads_of(64, 64, 64, 0, 1, 1), TEAM);    /* 5.2: backward is two and a half times as much */
    assert_int_equal(threads_of(72, 72, 64, 1, 1, 0), 1);       /* causal is half */
    assert_int_equal(threads_of(128, 128, 64, 0, 1, 0), TEAM);  /* 8.4 */
    assert_int_equal(threads_of(128, 128, 64, 0, 4, 0), 1);     /* every fourth key */
    assert_int_equal(threads_of(1, 100000, 64, 0, 1, 0), TEAM); /* one query, a long cache */
    assert_int_equal(threads_of(4096, 0, 64, 0, 1, 0), 1);
    heed_attention a = problem(HEED_F32, 1024, 1024, 64);
    a.windowed = 1, a.window_left = 2;
    assert_int_equal(plan_on("plain", &a, NULL, &on_cpu).threads, 1); /* three keys a row */
    a.window_left = 200;
    assert_int_equal(plan_on("plain", &a, NULL, &on_cpu).threads, TEAM);
}

static int threads_now(int asked)
{
    heed_device d;
    assert_int_equal(heed_device_of(&(heed_exec){ .threads = asked }, &d), HEED_OK);
    return d.threads;
}

static void threads_follow_the_call_then_the_process_then_openmp(void **state)
{
    (void)state;
#ifdef _OPENMP
    omp_set_num_threads(3);
    assert_int_equal(threads_now(0), 3);
    heed_set_threads(2);
    assert_int_equal(threads_now(0), 2);
    assert_int_equal(threads_now(5), 5);
    heed_set_threads(-1);
    assert_int_equal(threads_now(0), 3);
    int inside[2] = { 0, 0 };
#pragma omp parallel num_threads(2)
    inside[omp_get_thread_num()] = threads_now(7);
    assert_true(inside[0] == 1);
#else
    assert_int_equal(threads_now(5), 1);
#endif
}

/* Pointers that are missing are taken as there, by shape or by count. */
static void planning_needs_no_pointers(void **state)
{
    (void)state;
    heed_attention a = problem(HEED_F32, 10, 20, 8);
    heed_problem p;
    a.mask = shape(HEED_BOOL, 1, 1, 10, 20);
    assert_int_equal(heed_check(&a, NULL, &on_cpu, 1, &p), HEED_OK);
    assert_true(p.a.q.data && p.a.lse.data && p.a.mask.data && !p.a.bias.data && p.aligned);
    assert_int_equal(heed_check(&a, NULL, &on_cpu, 0, &p), HEED_BAD_ARGUMENT);

    a = problem(HEED_F32, 10, 20, 8);
    a.sequences = 4, a.max_rows = 3, a.max_keys = 5;
    assert_int_equal(heed_check(&a, NULL, &on_cpu, 1, &p), HEED_OK);
    assert_true(p.B == 4 && p.Sq == 3 && p.Sk == 5 && p.a.offsets_q && p.a.offsets_k);

    a = problem(HEED_F32, 10, 20, 8);
    a.block_table_columns = 6;
    assert_int_equal(heed_check(&a, NULL, &on_cpu, 1, &p), HEED_OK);
    assert_true(p.page == 20 && p.Sk == 120 && p.B == 1 && p.a.lengths_k);
    a.sequences = 4, a.max_rows = 3;
    assert_int_equal(heed_check(&a, NULL, &on_cpu, 1, &p), HEED_OK);
    assert_true(p.page == 20 && p.Sk == 120 && p.B == 4 && p.Sq == 3 && p.a.offsets_q && !p.a.offsets_k);
}

static void the_size_of_the_workspace_is_the_plans(void **state)
{
    (void)state;
    heed_attention a = problem(HEED_F32, 40, 50, 16);
    static float data[4][2 * 50 * 16];
    heed_tensor *tensors[4] = { &a.q, &a.k, &a.v, &a.o };
    for (int n = 0; n < 4; n++)
        tensors[n]->data = data[n];
    a.lse = (heed_tensor){ 0 };
    const heed_exec x = { .backend = HEED_CPU, .threads = 2, .kernel = "forward_cpu_plain_f32" };
    size_t bytes = 0;
    assert_int_equal(heed_workspace_size(&a, NULL, &x, &bytes), HEED_OK);
    assert_int_equal(bytes, plan_on("plain", &a, NULL, &x).workspace_bytes);
}

static void kernels_and_devices_can_be_listed(void **state)
{
    (void)state;
    heed_kernel_info kernel;
    heed_device_info device;
    int total = 0, here = 0;
    for (; heed_kernel_at(total, &kernel) == HEED_OK; total++) {
        assert_non_null(strstr(kernel.name, kernel.backward ? "backward_" : "forward_"));
        assert_true(kernel.max_head_dim > 0);
        here += kernel.runs_here;
        for (int other = 0; other < total; other++)
            assert_string_not_equal(heed_kernels[other].name, kernel.name);
    }
    assert_int_equal(total, heed_kernel_total);
    assert_non_null(strstr(heed_last_error(), "the table has"));
    assert_true(here >= 14); /* plain and reference run everywhere */
    assert_int_equal(heed_kernel_at(-1, &kernel), HEED_BAD_ARGUMENT);
    assert_int_equal(heed_kernel_at(0, NULL), HEED_BAD_ARGUMENT);

    assert_int_equal(heed_device_at(HEED_CPU, 0, &device), HEED_OK);
    assert_true(device.name[0] && device.features[0] && device.units >= 1 && device.threads >= 1);
    assert_int_equal(heed_device_at(HEED_CPU, 1, &device), HEED_NO_DEVICE);
    assert_int_equal(heed_device_at(HEED_CPU, -1, &device), HEED_BAD_ARGUMENT);
    assert_int_equal(heed_device_at((heed_backend)7, 0, &device), HEED_BAD_ARGUMENT);
    assert_int_equal(heed_device_at(HEED_CPU, 0, NULL), HEED_BAD_ARGUMENT);
    if (heed_device_at(HEED_CUDA, 0, &device) == HEED_NO_DEVICE)
        assert_true(heed_last_error()[0] != 0);
}

static void *look(void *out)
{
    *(const char **)out = heed_kernel_of_environment();
    return NULL;
}

/* Comes first: HEED_KERNEL counts as it stood at the first call, whichever thread makes it. */
static void the_environment_is_read_once(void **state)
{
    (void)state;
    pthread_t threads[8];
    const char *seen[8] = { NULL };
    setenv("HEED_KERNEL", "forward_cpu_plain_f32", 1);
    for (int n = 0; n < 8; n++)
        assert_int_equal(pthread_create(&threads[n], NULL, look, &seen[n]), 0);
    for (int n = 0; n < 8; n++) {
        pthread_join(threads[n], NULL);
        assert_string_equal(seen[n], "forward_cpu_plain_f32");
    }
    setenv("HEED_KERNEL", "another", 1);
    assert_string_equal(heed_kernel_of_environment(), "forward_cpu_plain_f32");

    heed_attention a = problem(HEED_F32, 256, 256, 64), b = problem(HEED_F16, 256, 256, 64);
    char text[256];
    assert_int_equal(heed_explain(&a, NULL, &on_cpu, "avx512", text, sizeof text), HEED_OK);
    assert_memory_equal(text, "forward_cpu_plain_f32: taken", 28);
    assert_int_equal(heed_explain(&b, NULL, &on_cpu, NULL, text, sizeof text), HEED_UNSUPPORTED);

    /* heed.h: "unless it is one of the other pass" */
    heed_gradient g = { .d_o = a.o, .d_q = a.q };
    a.lse = (heed_tensor){ .shape = { a.q.shape[0], a.q.shape[1], a.q.shape[2], 1 } };
    assert_int_equal(heed_explain(&a, &g, &on_cpu, "avx2", text, sizeof text), HEED_OK);
    assert_non_null(strstr(text, "backward_cpu_avx2_f32: taken"));
}

int main(int argc, char **argv)
{
    const struct CMUnitTest environment[] = { cmocka_unit_test(the_environment_is_read_once) };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_class_of_processor_gets_its_best_kernel),
        cmocka_unit_test(every_chip_has_a_name_and_a_plan_or_a_reason),
        cmocka_unit_test(the_explanation_gives_a_line_for_each_row_passed_over),
        cmocka_unit_test(the_reference_takes_every_type_and_one_thread),
        cmocka_unit_test(a_forced_kernel_is_taken_or_refused_with_the_reason),
        cmocka_unit_test(what_no_kernel_takes_is_unsupported),
        cmocka_unit_test(small_work_runs_on_one_thread),
        cmocka_unit_test(threads_follow_the_call_then_the_process_then_openmp),
        cmocka_unit_test(planning_needs_no_pointers),
        cmocka_unit_test(the_size_of_the_workspace_is_the_plans),
        cmocka_unit_test(kernels_and_devices_can_be_listed),
    };
    /* The environment is read once in a process: a second process, this program called by itself, looks at that. */
    if (argc > 1)
        return cmocka_run_group_tests_name("environment", environment, NULL, NULL);
    char command[4096];
    unsetenv("HEED_KERNEL");
    snprintf(command, sizeof command, "'%s' environment", argv[0]);
    return cmocka_run_group_tests_name("planning", tests, NULL, NULL) + (system(command) != 0);
}
