/* Sizes that 16 or 32 bits do not hold: more than 65,535 heads, rows and keys beyond 65,536, tensors of more than 2^31
 * elements, strides beyond 2^32. Each test puts a small problem, whose results are known, somewhere inside of a large
 * one, by heed.h's promise that a result does not depend on what else is in the batch, or by a band that hides the
 * rest. And problems that keep all of the device busy, a hundred times over: the same inputs give the same bits. Skipped
 * where there is no GPU, or one with too little memory. */
#include "harness.h"

#ifdef HEED_HAS_CUDA
#include <cuda_runtime_api.h>

#define CUDA_OK(call)                                                                                                  \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        if (error_)                                                                                                    \
            fail_msg("%s: %s", #call, cudaGetErrorString(error_));                                                     \
    } while (0)

enum { Q, K, V, D_O, O, LSE, D_Q, D_K, D_V, TENSORS };
static const char *const names[TENSORS] = { "q", "k", "v", "d_o", "o", "lse", "d_q", "d_k", "d_v" };

static heed_tensor *tensor_of(heed_attention *a, heed_gradient *g, int which)
{
    heed_tensor *all[TENSORS] = { &a->q, &a->k, &a->v, &g->d_o, &a->o, &a->lse, &g->d_q, &g->d_k, &g->d_v };
    return all[which];
}

static size_t bytes_of(const heed_tensor *t) { return (size_t)elements(t) * heed_dtype_size(t->dtype); }

/* ---- A large problem in the GPU's memory ------------------------------------------------------------------------- */

typedef struct large {
    heed_attention a;
    heed_gradient g;
    void *memory[TENSORS];
} large;

static void large_free(large *l)
{
    for (int which = 0; which < TENSORS; which++)
        cudaFree(l->memory[which]);
}

static int has_room(size_t bytes)
{
    size_t free_bytes = 0, all_bytes = 0;
    CUDA_OK(cudaMemGetInfo(&free_bytes, &all_bytes));
    if (free_bytes < bytes + ((size_t)1 << 30))
        printf("skipped: %zu MB of memory are free, %zu are needed\n", free_bytes >> 20, bytes >> 20);
    return free_bytes >= bytes + ((size_t)1 << 30);
}

/* The small problem with one dimension of some of its tensors (a bit for each) many times as long. 0: no room. */
static int large_new(large *l, const test_case *small, int dimension, int64_t times, unsigned which_grow)
{
    size_t bytes = 0;
    *l = (large){ .a = small->a, .g = small->g };
    for (int which = 0; which < TENSORS; which++) {
        heed_tensor *t = tensor_of(&l->a, &l->g, which);
        if (t->data && which_grow >> which & 1)
            t->shape[dimension] *= times;
        bytes += t->data ? bytes_of(t) : 0;
    }
    if (!has_room(bytes))
        return 0;
    for (int which = 0; which < TENSORS; which++) {
        heed_tensor *t = tensor_of(&l->a, &l->g, which);
        if (!t->data)
            continue;
        CUDA_OK(cudaMalloc(&l->memory[which], bytes_of(t)));
        t->data = l->memory[which];
        CUDA_OK(cudaMemset(t->data, 0xFF, bytes_of(t)));
    }
    return 1;
}

/* Copies of the small tensor, one behind the other, as far as the large one goes. */
static void repeat(const heed_tensor *to, const heed_tensor *small)
{
    size_t done = bytes_of(small), all = bytes_of(to);
    CUDA_OK(cudaMemcpy(to->data, small->data, done, cudaMemcpyDefault));
    for (size_t more; done < all; done += more) {
        more = HEED_MIN(done, all - done);
        CUDA_OK(cudaMemcpy((char *)to->data + done, to->data, more, cudaMemcpyDeviceToDevice));
    }
}

static void put(const heed_tensor *to, int64_t slot, const heed_tensor *small)
{
    char *at = (char *)to->data + slot * (int64_t)bytes_of(small);
    CUDA_OK(cudaMemcpy(at, small->data, bytes_of(small), cudaMemcpyDefault));
}

static void expect_slot(test_case *c, int which, const heed_tensor *from, int64_t slot)
{
    const heed_tensor *want = tensor_of(&c->a, &c->g, which);
    const int buffers = c->buffer_count;
    heed_tensor got = case_tensor(c, want->dtype, want->shape, NULL);
    const char *at = (const char *)from->data + slot * (int64_t)bytes_of(want);
    CUDA_OK(cudaMemcpy(got.data, at, bytes_of(want), cudaMemcpyDefault));
    char name[64];
    snprintf(name, sizeof name, "%s of slot %lld", names[which], (long long)slot);
    expect_same_bits(c, name, want, &got);
    free_since(c, buffers);
}

static void run(const test_case *small, large *l, int backward)
{
    for (int pass = 0; pass <= backward; pass++) {
        const heed_gradient *g = pass ? &l->g : NULL;
        test_case c = *small; /* its kernel, the large problem */
        heed_exec x;
        c.a = l->a, c.g = l->g;
        if (case_exec(&c, (heed_pass)pass, &x))
            fail_msg("%s; %s", heed_last_error(), case_text(small));
        CUDA_OK(cudaMalloc(&x.workspace, x.workspace_bytes + 1));
        heed_status status = g ? heed_backward(&l->a, g, &x) : heed_forward(&l->a, &x);
        if (status)
            fail_msg("%s; %s", heed_last_error(), case_text(small));
        CUDA_OK(cudaDeviceSynchronize());
        CUDA_OK(cudaFree(x.workspace));
    }
}

static int large_is_taken(const large *l, const test_case *small)
{
    test_case c = *small;
    c.a = l->a, c.g = l->g;
    return case_takes(&c, &c.kernel);
}

static void run_small(test_case *c)
{
    case_forward(c);
    if (c->kernel.backward)
        case_backward(c);
}

/* ---- Many heads, many rows --------------------------------------------------------------------------------------- */

/* Two small problems: `common` fills every slot but a few, which hold `rare`, and which slots would be mistaken for
 * others if an index were cut to 16 or 32 bits. 0: the row does not take the large problem, and another, with other bits,
 * would. */
static int expect_slots(const heed_kernel_info *kernel, case_shape shape, int dimension, int64_t times, unsigned grow)
{
    test_case common = case_new(kernel, shape), rare = case_new(kernel, shape);
    const int64_t rare_slots[] = { times / 2 + 1, HEED_MIN(65536, times - 2), times - 1 };
    const int64_t common_slots[] = { 0, 1, times / 2, HEED_MIN(65535, times - 3), times - 3 };
    int taken = 0;
    large l;
    for (int which = Q; which <= D_O; which++) { /* what does not grow is shared */
        const heed_tensor *t = tensor_of(&common.a, &common.g, which);
        if (!(grow >> which & 1))
            memcpy(tensor_of(&rare.a, &rare.g, which)->data, t->data, bytes_of(t));
    }
    for (int which = O; which < TENSORS; which++)
        if (!(grow >> which & 1)) { /* a sum over slots: not asked for */
            tensor_of(&common.a, &common.g, which)->data = NULL;
            tensor_of(&rare.a, &rare.g, which)->data = NULL;
        }
    if (large_new(&l, &common, dimension, times, grow) && (taken = large_is_taken(&l, &common))) {
        run_small(&common);
        run_small(&rare);
        for (int which = Q; which <= D_O; which++) {
            const heed_tensor *t = tensor_of(&l.a, &l.g, which);
            repeat(t, tensor_of(&common.a, &common.g, which));
            for (int n = 0; n < COUNT(rare_slots) && grow >> which & 1; n++)
                put(t, rare_slots[n], tensor_of(&rare.a, &rare.g, which));
        }
        run(&common, &l, kernel->backward);
        for (int which = O; which < (kernel->backward ? TENSORS : D_Q); which++) {
            const heed_tensor *t = tensor_of(&l.a, &l.g, which);
            for (int n = 0; n < COUNT(common_slots) && t->data; n++)
                expect_slot(&common, which, t, common_slots[n]);
            for (int n = 0; n < COUNT(rare_slots) && t->data; n++)
                expect_slot(&rare, which, t, rare_slots[n]);
        }
    }
    large_free(&l);
    case_free(&common);
    case_free(&rare);
    return taken;
}

#define EVERY ((1u << TENSORS) - 1)
#define BY_ROW (1u << Q | 1u << D_O | 1u << O | 1u << LSE | 1u << D_Q)

#define for_each_gpu_kernel(pass, kernel)                                                                              \
    for_each_kernel(pass, kernel)                                                                                      \
        if (kernel.backend == HEED_CUDA)

TEST(more_than_65535_batches)
{
    for_each_gpu_kernel(EITHER_PASS, kernel) expect_slots(&kernel, (case_shape){ .Sq = 32, .D = 16 }, 0, 70001, EVERY);
}

TEST(more_than_65535_heads)
{
    for_each_gpu_kernel(EITHER_PASS, kernel)
        expect_slots(&kernel, (case_shape){ .Sq = 24, .Sk = 40, .D = 16 }, 1, 70001, EVERY);
}

/* 2^31 + 262,144 elements in q, d_o, o and d_q. A slot of 4096 rows is a multiple of any tile; those who do not take so many rows
 * in one sequence, or any that are long, have them in many heads. */
TEST(more_than_two_to_the_31_elements)
{
    static const struct {
        int64_t rows, times;
        int dimension;
        unsigned grow;
    } ways[] = { { 4096, 8193, 2, BY_ROW }, { 4096, 8193, 1, BY_ROW }, { 64, 524352, 1, EVERY } };
    for_each_gpu_kernel(EITHER_PASS, kernel)
    {
        int met = 0;
        for (int n = 0; n < COUNT(ways) && !met; n++) {
            const case_shape slot = { .Sq = ways[n].rows, .Sk = 64, .D = 64 };
            met = expect_slots(&kernel, slot, ways[n].dimension, ways[n].times, ways[n].grow);
        }
        if (!met)
            printf("%s: takes none of these\n", kernel.name);
    }
}

/* ---- Long sequences ---------------------------------------------------------------------------------------------- */

/* Into row `to` and after of a tensor of the case, `rows` rows of the large one from row `from`. */
static void take_rows(test_case *c, int which, const large *l, int64_t from, int64_t to, int64_t rows)
{
    heed_attention a = l->a;
    heed_gradient g = l->g;
    const heed_tensor *small = tensor_of(&c->a, &c->g, which), *t = tensor_of(&a, &g, which);
    size_t row = (size_t)t->shape[3] * heed_dtype_size(t->dtype);
    CUDA_OK(cudaMemcpy((char *)small->data + (size_t)to * row, (const char *)t->data + (size_t)from * row,
                       (size_t)rows * row, cudaMemcpyDefault));
}

/* A row sees LEFT keys before its own position. Of a piece of the sequence, all but the first LEFT rows see in it what
 * they see in the whole, and but for twice as many keys all of what depends on them is in it. */
enum { LEFT = 150, PIECE = 1024 };

/* Pieces repeat along the sequence, so that each of them could stand anywhere. */
TEST(rows_and_keys_beyond_65536)
{
    for_each_gpu_kernel(EITHER_PASS, kernel)
    {
        test_case c = case_new(&kernel, (case_shape){ .Sq = PIECE, .D = 64 });
        large l;
        c.a.causal = c.a.windowed = 1, c.a.window_left = LEFT;
        if (large_new(&l, &c, 2, 97, EVERY)) { /* 99,328 tokens */
            for (int which = Q; which <= D_O; which++)
                repeat(tensor_of(&l.a, &l.g, which), tensor_of(&c.a, &c.g, which));
            run(&c, &l, kernel.backward);
            run_small(&c);
            for (int which = O; which < (kernel.backward ? TENSORS : D_Q); which++) {
                int64_t skip = which == D_K || which == D_V ? 2 * LEFT : LEFT;
                take_rows(&c, which, &l, 96 * PIECE + skip, skip, PIECE - skip);
            }
            expect_close(&c, kernel.backward ? HEED_BACKWARD : HEED_FORWARD);
        }
        large_free(&l);
        case_free(&c);
    }
}

/* 2^31 + 262,144 elements in k, v, d_k and d_v, of which a window lets the last keys be seen. */
TEST(more_than_two_to_the_31_elements_of_keys)
{
    const unsigned by_key = 1u << K | 1u << V | 1u << D_K | 1u << D_V;
    for_each_gpu_kernel(EITHER_PASS, kernel)
    {
        test_case c = case_new(&kernel, (case_shape){ .Sq = 128, .Sk = 4096, .D = 64 });
        large l;
        c.a.causal = c.a.windowed = 1, c.a.window_left = LEFT;
        if (large_new(&l, &c, 2, 8193, by_key)) {
            for (int which = Q; which <= D_O; which++)
                repeat(tensor_of(&l.a, &l.g, which), tensor_of(&c.a, &c.g, which));
            run(&c, &l, kernel.backward);
            for (int which = O; which < (kernel.backward ? TENSORS : D_Q); which++) {
                const int is_key = which == D_K || which == D_V;
                take_rows(&c, which, &l, is_key ? (int64_t)8192 * 4096 : 0, 0, is_key ? 4096 : 128);
            }
            expect_close(&c, kernel.backward ? HEED_BACKWARD : HEED_FORWARD);
            for (int which = D_K; which <= D_V && kernel.backward; which++) { /* keys that nobody sees */
                take_rows(&c, which, &l, (int64_t)4096 * 4096, 0, 4096);
                for (int64_t n = 0; n < 4096 * 64; n++)
                    assert_true(heed_load(tensor_of(&c.a, &c.g, which)->data, tensor_of(&c.a, &c.g, which)->dtype, n) ==
                                0);
            }
        }
        large_free(&l);
        case_free(&c);
    }
}

/* ---- Strides ----------------------------------------------------------------------------------------------------- */

/* Every tensor's batches lie 2^32 + 64 elements apart, all tensors interleaved in one block. */
TEST(strides_beyond_32_bits)
{
    const int64_t step = ((int64_t)1 << 32) + 64;
    for_each_gpu_kernel(EITHER_PASS, kernel)
    {
        const case_shape shape = { .Hq = 2, .Sq = 70, .D = 64 };
        test_case c[2] = { case_new(&kernel, shape), case_new(&kernel, shape) };
        large l = { .a = c[0].a, .g = c[0].g };
        size_t size = heed_dtype_size(kernel.dtype), slot = 1 << 20;
        size_t bytes = (size_t)step * size + TENSORS * slot;
        if (has_room(bytes)) {
            CUDA_OK(cudaMalloc(&l.memory[0], bytes));
            for (int which = 0; which < TENSORS; which++) {
                heed_tensor *t = tensor_of(&l.a, &l.g, which);
                const int64_t *n = t->shape, own = step * (int64_t)size / (int64_t)heed_dtype_size(t->dtype);
                const int64_t strides[4] = { own, n[2] * n[3], n[3], 1 };
                memcpy(t->stride, strides, sizeof strides);
                t->data = (char *)l.memory[0] + (size_t)which * slot;
                t->shape[0] = 2;
                for (int b = 0; b < 2; b++) {
                    const heed_tensor *small = tensor_of(&c[b].a, &c[b].g, which);
                    char *at = (char *)t->data + (size_t)b * (size_t)step * size;
                    assert_true(bytes_of(small) <= slot);
                    if (which <= D_O)
                        CUDA_OK(cudaMemcpy(at, small->data, bytes_of(small), cudaMemcpyDefault));
                    else
                        CUDA_OK(cudaMemset(at, 0xFF, bytes_of(small)));
                }
            }
            run(&c[0], &l, kernel.backward);
            for (int b = 0; b < 2; b++) {
                run_small(&c[b]);
                for (int which = O; which < (kernel.backward ? TENSORS : D_Q); which++) {
                    heed_tensor at = *tensor_of(&l.a, &l.g, which);
                    at.data = (char *)at.data + (size_t)b * (size_t)step * size;
                    expect_slot(&c[b], which, &at, 0);
                }
            }
        }
        large_free(&l);
        case_free(&c[0]);
        case_free(&c[1]);
    }
}

/* ---- Again and again --------------------------------------------------------------------------------------------- */

/* The small problem with more heads, `times` runs of its backward; returns whether there was room. */
static int expect_same_again(test_case *c, int heads, int times)
{
    heed_tensor want[TENSORS], got[TENSORS];
    test_case again = *c; /* its kernel, the large problem */
    heed_exec x;
    large l;
    if (!large_new(&l, c, 1, heads, EVERY))
        return 0;
    for (int which = 0; which < TENSORS; which++) {
        const heed_tensor *t = tensor_of(&l.a, &l.g, which);
        if (which <= D_O)
            repeat(t, tensor_of(&c->a, &c->g, which));
        else
            want[which] = case_tensor(c, t->dtype, t->shape, NULL),
            got[which] = case_tensor(c, t->dtype, t->shape, NULL);
    }
    run(c, &l, 0);
    again.a = l.a, again.g = l.g;
    assert_int_equal(case_exec(&again, HEED_BACKWARD, &x), HEED_OK);
    CUDA_OK(cudaMalloc(&x.workspace, x.workspace_bytes + 1));
    for (int n = 0; n < times; n++) {
        if (heed_backward(&l.a, &l.g, &x))
            fail_msg("%s; %s", heed_last_error(), case_text(c));
        for (int which = D_Q; which < TENSORS; which++) {
            const heed_tensor *t = tensor_of(&l.a, &l.g, which);
            CUDA_OK(cudaMemcpy((n ? got : want)[which].data, t->data, bytes_of(t), cudaMemcpyDefault));
            if (n && memcmp(got[which].data, want[which].data, bytes_of(t)))
                fail_msg("%s of run %d has other bits; %s", names[which], n + 1, case_text(c));
        }
    }
    CUDA_OK(cudaFree(x.workspace));
    large_free(&l);
    return 1;
}

/* Short and long sequences by themselves, with heads that share keys, and in a batch. Random problems find rarely what
 * takes many blocks and their timing. */
TEST(a_hundred_runs_have_the_same_bits)
{
    static const int32_t lengths[] = { 700, 2200, 40 };
    static const case_shape shapes[] = { { .Hq = 2, .Sq = 700 },
                                         { .Hq = 4, .Hk = 1, .Sq = 2200 },
                                         { .B = 3, .Hq = 2, .form = RAGGED, .rows_of = lengths, .keys_of = lengths } };
    for_each_gpu_kernel(HEED_BACKWARD, kernel)
    {
        int problems = 0;
        for (int n = 0; n < COUNT(shapes) * 6 && keeps_order(&kernel); n++) {
            case_shape shape = shapes[n % COUNT(shapes)];
            shape.D = 64 << n / COUNT(shapes) % 3;
            test_case c = case_new(&kernel, shape);
            c.a.causal = n / COUNT(shapes) / 3;
            if (case_takes(&c, &kernel))
                problems += expect_same_again(&c, (int)(1024 / shape.D / shape.Hq), 100);
            case_free(&c);
        }
        printf("%s: %d problems, 100 runs each, the same bits\n", kernel.name, problems);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(more_than_65535_batches),
        cmocka_unit_test(more_than_65535_heads),
        cmocka_unit_test(more_than_two_to_the_31_elements),
        cmocka_unit_test(rows_and_keys_beyond_65536),
        cmocka_unit_test(more_than_two_to_the_31_elements_of_keys),
        cmocka_unit_test(strides_beyond_32_bits),
        cmocka_unit_test(a_hundred_runs_have_the_same_bits),
    };
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
