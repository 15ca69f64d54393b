/* heed.h: calls on a GPU are asynchronous on the caller's stream, may be captured in a graph, may come from many threads
 * at once, and leave the caller's device as it was. Skipped where there is no GPU. */
#include "harness.h"

#ifdef HEED_HAS_CUDA
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#define CUDA_OK(call)                                                                                                  \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        if (error_)                                                                                                    \
            fail_msg("%s: %s", #call, cudaGetErrorString(error_));                                                     \
    } while (0)

#define for_each_gpu_kernel(pass, kernel)                                                                              \
    for_each_kernel(pass, kernel)                                                                                      \
        if (kernel.backend == HEED_CUDA)

static const case_shape usual = { .B = 2, .Hq = 4, .Hk = 2, .Sq = 130, .Sk = 150, .D = 64 },
                        small = { .B = 2, .Hq = 4, .Hk = 2, .Sq = 50, .Sk = 70, .D = 64 };

/* One that the row itself takes: some are for small problems, or for few rows, alone. */
static test_case taken_case(const heed_kernel_info *kernel)
{
    test_case c = case_new(kernel, usual);
    if (!case_takes(&c, kernel)) {
        case_free(&c);
        c = case_new(kernel, small);
    }
    assert_true(case_takes(&c, kernel));
    return c;
}

/* A case that ran once, what it then left in its outputs, and how to run it again on a stream. */
typedef struct rerun {
    test_case c;
    heed_exec x[2];
    heed_tensor want[OUTPUTS];
    int backward;
} rerun;

static rerun rerun_new(const heed_kernel_info *kernel, cudaStream_t stream)
{
    rerun r = { .c = taken_case(kernel), .backward = kernel->backward };
    test_case *c = &r.c;
    c->a.causal = 1;
    for (int pass = 0; pass <= r.backward; pass++) {
        pass ? case_backward(c) : case_forward(c);
        assert_int_equal(case_exec(c, (heed_pass)pass, &r.x[pass]), HEED_OK);
        r.x[pass].workspace = case_memory(c, r.x[pass].workspace_bytes, 0);
        r.x[pass].stream = stream;
    }
    for (int which = 0; which < (r.backward ? OUT_DBIAS : OUT_DQ); which++) {
        heed_tensor *out = output_of(c, which);
        r.want[which] = case_tensor(c, out->dtype, out->shape, NULL);
        memcpy(r.want[which].data, out->data, (size_t)elements(out) * heed_dtype_size(out->dtype));
    }
    return r;
}

static void rerun_spoil(rerun *r)
{
    for (int which = 0; which < OUTPUTS; which++)
        if (r->want[which].data)
            fill_bytes(output_of(&r->c, which), 0xFF);
}

static heed_status rerun_start(const rerun *r)
{
    heed_status status = heed_forward(&r->c.a, &r->x[0]);
    return status || !r->backward ? status : heed_backward(&r->c.a, &r->c.g, &r->x[1]);
}

static void rerun_expect_same(rerun *r)
{
    static const char *const names[] = { "o", "lse", "d_q", "d_k", "d_v" };
    for (int which = 0; which < COUNT(names); which++)
        if (r->want[which].data)
            expect_same_bits(&r->c, names[which], &r->want[which], output_of(&r->c, which));
    case_guards(&r->c);
}

/* Strictest mode: an allocation or a synchronisation anywhere in the process would break the capture. */
TEST(a_call_can_be_captured_in_a_graph)
{
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for_each_gpu_kernel(EITHER_PASS, kernel)
    {
        rerun r = rerun_new(&kernel, stream);
        cudaGraph_t graph;
        cudaGraphExec_t ready;
        CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        heed_status status = rerun_start(&r);
        CUDA_OK(cudaStreamEndCapture(stream, &graph));
        if (status)
            fail_msg("%s; %s", heed_last_error(), case_text(&r.c));
        CUDA_OK(cudaGraphInstantiate(&ready, graph, 0));
        for (int n = 0; n < 3; n++) {
            rerun_spoil(&r);
            CUDA_OK(cudaGraphLaunch(ready, stream));
            CUDA_OK(cudaStreamSynchronize(stream));
            rerun_expect_same(&r);
        }
        CUDA_OK(cudaGraphExecDestroy(ready));
        CUDA_OK(cudaGraphDestroy(graph));
        case_free(&r.c);
    }
    CUDA_OK(cudaStreamDestroy(stream));
}

/* ---- Asynchronous ------------------------------------------------------------------------------------------------ */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Holds up a stream until it is opened, though not for ever, so that a call that waits fails and does not hang. */
typedef struct gate {
    atomic_int open, gave_up;
} gate;

static void CUDART_CB wait_at(void *argument)
{
    gate *g = argument;
    double start = now();
    while (!atomic_load(&g->open))
        if (now() - start > 5) {
            atomic_store(&g->gave_up, 1);
            return;
        }
}

/* heed.h: "Calls return before the work is done." */
TEST(a_call_waits_for_nothing)
{
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for_each_gpu_kernel(EITHER_PASS, kernel)
    {
        rerun r = rerun_new(&kernel, stream); /* has run: code that is loaded at its first use is here */
        gate g = { 0 };
        assert_int_equal(rerun_start(&r), HEED_OK);
        CUDA_OK(cudaStreamSynchronize(stream));
        rerun_spoil(&r);
        CUDA_OK(cudaLaunchHostFunc(stream, wait_at, &g));
        heed_status status = rerun_start(&r);
        int waited = atomic_load(&g.gave_up);
        for (int64_t n = 0; n < elements(&r.c.a.lse) && !waited; n++)
            assert_true(isnan(((const float *)r.c.a.lse.data)[n])); /* nothing has run yet */
        atomic_store(&g.open, 1);
        CUDA_OK(cudaStreamSynchronize(stream));
        assert_int_equal(status, HEED_OK);
        if (waited)
            fail_msg("the call waited for the stream; %s", case_text(&r.c));
        rerun_expect_same(&r);
        case_free(&r.c);
    }
    CUDA_OK(cudaStreamDestroy(stream));
}

/* ---- Several at once --------------------------------------------------------------------------------------------- */

enum { AT_ONCE = 6, ROUNDS = 20 };

TEST(several_streams_do_not_disturb_each_other)
{
    cudaStream_t streams[AT_ONCE];
    static rerun runs[AT_ONCE];
    for (int n = 0; n < AT_ONCE; n++)
        CUDA_OK(cudaStreamCreateWithFlags(&streams[n], cudaStreamNonBlocking));
    for_each_gpu_kernel(HEED_BACKWARD, kernel)
    {
        for (int n = 0; n < AT_ONCE; n++) {
            runs[n] = rerun_new(&kernel, streams[n]);
            rerun_spoil(&runs[n]);
        }
        for (int round = 0; round < ROUNDS; round++)
            for (int n = 0; n < AT_ONCE; n++)
                assert_int_equal(rerun_start(&runs[n]), HEED_OK);
        CUDA_OK(cudaDeviceSynchronize());
        for (int n = 0; n < AT_ONCE; n++) {
            rerun_expect_same(&runs[n]);
            case_free(&runs[n].c);
        }
    }
    for (int n = 0; n < AT_ONCE; n++)
        CUDA_OK(cudaStreamDestroy(streams[n]));
}

typedef struct caller {
    pthread_t thread;
    rerun r;
    int device_changed;
    heed_status status;
    char said[200];
    cudaError_t error;
} caller;

/* No assertion of cmocka in here: it jumps. */
static void *call(void *argument)
{
    caller *me = argument;
    int device = -1;
    for (int round = 0; round < ROUNDS && !me->status; round++)
        me->status = rerun_start(&me->r);
    if (me->status)
        snprintf(me->said, sizeof me->said, "%s", heed_last_error());
    me->error = cudaStreamSynchronize(me->r.x[0].stream);
    me->device_changed = cudaGetDevice(&device) || device != 0;
    return NULL;
}

TEST(many_threads_may_call_at_once)
{
    static caller callers[AT_ONCE];
    cudaStream_t streams[AT_ONCE];
    for (int n = 0; n < AT_ONCE; n++)
        CUDA_OK(cudaStreamCreateWithFlags(&streams[n], cudaStreamNonBlocking));
    for_each_gpu_kernel(HEED_BACKWARD, kernel)
    {
        for (int n = 0; n < AT_ONCE; n++) {
            callers[n] = (caller){ .r = rerun_new(&kernel, streams[n]) };
            rerun_spoil(&callers[n].r);
        }
        for (int n = 0; n < AT_ONCE; n++)
            assert_int_equal(pthread_create(&callers[n].thread, NULL, call, &callers[n]), 0);
        for (int n = 0; n < AT_ONCE; n++)
            pthread_join(callers[n].thread, NULL);
        for (int n = 0; n < AT_ONCE; n++) {
            assert_string_equal(callers[n].said, "");
            assert_int_equal(callers[n].status, HEED_OK);
            assert_int_equal(callers[n].error, cudaSuccess);
            assert_int_equal(callers[n].device_changed, 0);
            rerun_expect_same(&callers[n].r);
            case_free(&callers[n].r.c);
        }
    }
    for (int n = 0; n < AT_ONCE; n++)
        CUDA_OK(cudaStreamDestroy(streams[n]));
}

/* ---- Devices ----------------------------------------------------------------------------------------------------- */

TEST(the_callers_device_stays_current)
{
    int count = 0, device = -1;
    CUDA_OK(cudaGetDeviceCount(&count));
    for (int current = 0; current < count; current++)
        for_each_gpu_kernel(EITHER_PASS, kernel)
        {
            rerun r = rerun_new(&kernel, NULL);
            CUDA_OK(cudaSetDevice(current));
            for (r.x[0].device = r.x[1].device = 0; r.x[0].device < count; r.x[1].device = ++r.x[0].device) {
                rerun_spoil(&r);
                assert_int_equal(rerun_start(&r), HEED_OK);
                CUDA_OK(cudaGetDevice(&device));
                assert_int_equal(device, current);
                CUDA_OK(cudaSetDevice(r.x[0].device));
                CUDA_OK(cudaDeviceSynchronize());
                rerun_expect_same(&r);
                CUDA_OK(cudaSetDevice(current));
            }
            CUDA_OK(cudaSetDevice(0));
            case_free(&r.c);
        }
    heed_exec nowhere = { .backend = HEED_CUDA, .device = count };
    size_t bytes;
    test_case c = case_new(&(heed_kernel_info){ .name = "forward", .backend = HEED_CUDA }, usual);
    assert_int_equal(heed_workspace_size(&c.a, NULL, &nowhere, &bytes), HEED_NO_DEVICE);
    case_free(&c);
}

/* ---- Lengths that lie -------------------------------------------------------------------------------------------- */

static void overwrite(const int32_t *values, int64_t count)
{
    static const int32_t wild[] = { INT32_MIN, -1, INT32_MAX, 1 << 20, 0, -1000000, 3, 1 << 30 };
    for (int64_t n = 0; values && n < count; n++)
        ((int32_t *)values)[n] = wild[random_int(0, COUNT(wild) - 1)]; /* memory of the case, which is not constant */
}

/* "on the GPU nothing is read or written out of bounds": the guards and, under compute-sanitizer, memcheck would tell. */
TEST(lengths_offsets_and_pages_beyond_memory_are_bounded)
{
    for_each_gpu_kernel(EITHER_PASS, kernel) for (int form = PADDED; form <= (kernel.backward ? RAGGED : PAGED);
                                                  form++) for (int n = 0; n < 8; n++)
    {
        test_case c = case_new(&kernel, (case_shape){ .B = 4,
                                                      .Hq = 2,
                                                      .Sq = n / 2 % 2 ? 70 : 40,
                                                      .Sk = n / 2 % 2 ? 90 : 78,
                                                      .D = 64,
                                                      .form = (case_form)form });
        c.a.causal = n % 2;
        overwrite(c.a.lengths_q, 4);
        overwrite(c.a.lengths_k, 4);
        overwrite(c.a.offsets_q, 5);
        overwrite(c.a.offsets_k, 5);
        overwrite(c.a.block_table, c.a.block_table ? 4 * c.a.block_table_stride : 0);
        case_forward(&c);
        if (kernel.backward)
            case_backward(&c);
        case_free(&c);
    }
}

/* ---- A new context ----------------------------------------------------------------------------------------------- */

TEST(a_call_works_after_a_reset)
{
    for (int contexts = 0; contexts < 2; contexts++) {
        for_each_gpu_kernel(EITHER_PASS, kernel)
        {
            rerun r = rerun_new(&kernel, NULL);
            rerun_spoil(&r);
            assert_int_equal(rerun_start(&r), HEED_OK);
            CUDA_OK(cudaDeviceSynchronize());
            rerun_expect_same(&r);
            case_free(&r.c);
        }
        assert_null(gpu_reset());
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_call_can_be_captured_in_a_graph),
        cmocka_unit_test(a_call_waits_for_nothing),
        cmocka_unit_test(several_streams_do_not_disturb_each_other),
        cmocka_unit_test(many_threads_may_call_at_once),
        cmocka_unit_test(the_callers_device_stays_current),
        cmocka_unit_test(lengths_offsets_and_pages_beyond_memory_are_bounded),
        cmocka_unit_test(a_call_works_after_a_reset),
    };
    setenv("CUDA_LAUNCH_BLOCKING", "0", 1);
    if (!has_gpu()) {
        puts("skipped: no GPU");
        return 77;
    }
    return RUN_TESTS(tests);
}

#else

int main(void)
{
    puts("skipped: built without CUDA");
    return 77;
}

#endif
