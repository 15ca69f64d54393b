/* heed.h: "every order in memory, every packed qkv buffer and every expanded view is a matter of strides". What lies
 * between the elements is NaN, and is still there afterwards: case_forward and case_backward look. */
#include "harness.h"

static const case_shape shape = { .B = 2, .Hq = 4, .Hk = 2, .Sq = 19, .Sk = 37, .D = 24, .Dv = 17 };

static void check_layout(test_layout layout)
{
    for_each_kernel(EITHER_PASS, kernel) {
        case_shape strided = shape;
        strided.layout = layout;
        test_case c = case_new(&kernel, strided);
        c.a.causal = 1;
        case_check(&c);
        case_free(&c);
    }
}

TEST(heads_may_lie_inside_rows) { check_layout(BSHD); }

TEST(the_batch_may_lie_inside_rows) { check_layout((test_layout){ .order = { 2, 0, 1, 3 } }); }

TEST(columns_may_lie_outside_rows) { check_layout((test_layout){ .order = { 0, 1, 3, 2 } }); }

TEST(the_batch_may_be_innermost) { check_layout((test_layout){ .order = { 3, 2, 1, 0 } }); }

TEST(rows_may_be_padded) { check_layout((test_layout){ .gap = { 0, 0, 8, 0 } }); }

/* To whole 16 bytes, as the fastest kernels want them: what follows a row's last element is not theirs. */
TEST(rows_of_any_width_may_be_padded)
{
    for (int64_t width = 3; width < 8; width++)
        for_each_kernel(EITHER_PASS, kernel) {
            case_shape narrow = {
                .B = 2, .Hq = 2, .Sq = 37, .D = 16 + width, .layout = { .gap = { 0, 0, 8 - width, 0 } }
            };
            test_case c = case_new(&kernel, narrow);
            case_check(&c);
            case_free(&c);
        }
}

/* Such rows crowd into a few sets of a cache: the CPU kernels copy what they would use in place otherwise. */
TEST(rows_may_lie_a_power_of_two_apart)
{
    for_each_kernel(EITHER_PASS, kernel) {
        case_shape far = { .B = 1, .Hq = 2, .Hk = 1, .Sq = 260, .D = 32, .layout = { .gap = { 0, 0, 992, 0 } } };
        test_case c = case_new(&kernel, far);
        case_check(&c);
        case_free(&c);
    }
}

TEST(every_dimension_may_have_gaps) { check_layout((test_layout){ .gap = { 5, 3, 7, 1 } }); }

TEST(every_dimension_may_run_backwards)
{
    /* The results too: their elements do not overlap, which is all that heed.h asks of an output. */
    check_layout((test_layout){ .gap = { 0, 0, 1, 0 }, .flip = { 1, 1, 1, 1 } });
}

/* heed.h: "data must be aligned to its dtype", and to nothing more. */
TEST(data_may_start_at_any_element)
{
    for (int64_t offset = 1; offset <= 8; offset++)
        check_layout((test_layout){ .offset = offset, .gap = { 0, 0, offset % 3, 0 } });
}

/* qkv as a linear layer leaves it, [B, S, 3, H, D], and its gradient likewise. */
TEST(q_k_and_v_may_share_a_packed_buffer)
{
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, (case_shape){ .B = 2, .Hq = 3, .Sq = 29, .D = 16 });
        heed_tensor qkv = case_tensor(&c, kernel.dtype, (int64_t[]){ 2, 9, 29, 16 }, &BSHD);
        heed_tensor d_qkv = case_tensor(&c, kernel.dtype, (int64_t[]){ 2, 9, 29, 16 }, &BSHD);
        fill_normal(&qkv, 1);
        c.a.q = slice(qkv, 1, 0, 1, 3), c.g.d_q = slice(d_qkv, 1, 0, 1, 3);
        c.a.k = slice(qkv, 1, 3, 1, 3), c.g.d_k = slice(d_qkv, 1, 3, 1, 3);
        c.a.v = slice(qkv, 1, 6, 1, 3), c.g.d_v = slice(d_qkv, 1, 6, 1, 3);
        case_check(&c);
        case_free(&c);
    }
}

/* heed.h: "Inputs may have zero (broadcast) and negative strides". */
TEST(inputs_may_be_expanded)
{
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, (case_shape){ .B = 3, .Hq = 4, .Hk = 2, .Sq = 9, .Sk = 13, .D = 16 });
        c.a.k = slice(c.a.k, 0, 1, 0, 3); /* one cache for the whole batch */
        c.a.v = slice(c.a.v, 1, 0, 0, 2); /* one value head */
        c.a.q = slice(c.a.q, 2, 4, 0, 9); /* one query row */
        c.g.d_o = slice(c.g.d_o, 3, 7, 0, 16);
        case_check(&c);
        case_free(&c);
    }
}

/* q = k = v, as in self-attention of x with itself. */
TEST(inputs_may_be_the_same_memory)
{
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, (case_shape){ .Hq = 2, .Sq = 33, .D = 16 });
        c.a.k = c.a.v = c.g.d_o = c.a.q;
        case_check(&c);
        case_free(&c);
    }
}

TEST(mask_and_bias_may_have_any_strides)
{
    static const test_layout layouts[] = { { .order = { 0, 1, 3, 2 } },
                                           { .gap = { 1, 2, 3, 1 }, .offset = 1 },
                                           { .flip = { 0, 1, 1, 1 }, .gap = { 0, 0, 1, 0 } } };
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < COUNT(layouts); n++) {
            test_case c = case_new(&kernel, (case_shape){ .B = 2, .Hq = 2, .Sq = 21, .Sk = 34, .D = 8 });
            const int64_t full[4] = { 2, 2, 21, 34 };
            c.a.mask = case_tensor(&c, HEED_BOOL, full, &layouts[n]);
            c.a.bias = case_tensor(&c, kernel.dtype, full, &layouts[n]);
            c.g.d_bias = case_tensor(&c, kernel.dtype, full, &layouts[n]);
            fill_normal(&c.a.bias, 1);
            for (int64_t j = 0; j < 34; j++)
                for (int64_t i = 0; i < 21; i++)
                    for (int64_t b = 0; b < 2; b++)
                        set(&c.a.mask, b, 0, i, j, !one_in(3)), set(&c.a.mask, b, 1, i, j, !one_in(3));
            case_check(&c);
            case_free(&c);
        }
}

/* A bias that is expanded by zero strides, its gradient being of the full size. */
TEST(a_bias_may_be_expanded_by_strides)
{
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, (case_shape){ .B = 2, .Hq = 3, .Sq = 10, .Sk = 20, .D = 8 });
        case_bias(&c, HEED_F64 == kernel.dtype ? HEED_F64 : HEED_F32, 2, 3, 10, 20);
        c.a.bias = slice(slice(c.a.bias, 0, 1, 0, 2), 2, 3, 0, 10);
        case_check(&c);
        case_free(&c);
    }
}

TEST(lse_and_its_gradient_may_have_any_strides)
{
    static const test_layout layout = { .order = { 2, 0, 3, 1 }, .gap = { 1, 2, 1, 0 }, .flip = { 0, 1, 0, 0 } };
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, shape);
        c.a.lse = case_tensor(&c, HEED_F32, c.a.lse.shape, &layout);
        c.g.d_lse = case_tensor(&c, HEED_F32, c.a.lse.shape, &layout);
        fill_normal(&c.g.d_lse, 1);
        case_check(&c);
        case_free(&c);
    }
}

TEST(slopes_and_sinks_may_have_any_strides)
{
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, shape);
        case_sink(&c);
        heed_tensor numbers = case_tensor(&c, HEED_F32, (int64_t[]){ 2, 9, 1, 1 }, NULL);
        fill_normal(&numbers, 0.2);
        c.a.alibi = slice(numbers, 1, 1, 2, 4);
        c.a.sink = slice(slice(numbers, 0, 1, 1, 1), 1, 7, -2, 4);
        case_check(&c);
        case_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_may_lie_inside_rows),
        cmocka_unit_test(the_batch_may_lie_inside_rows),
        cmocka_unit_test(columns_may_lie_outside_rows),
        cmocka_unit_test(the_batch_may_be_innermost),
        cmocka_unit_test(rows_may_be_padded),
        cmocka_unit_test(rows_of_any_width_may_be_padded),
        cmocka_unit_test(rows_may_lie_a_power_of_two_apart),
        cmocka_unit_test(every_dimension_may_have_gaps),
        cmocka_unit_test(every_dimension_may_run_backwards),
        cmocka_unit_test(data_may_start_at_any_element),
        cmocka_unit_test(q_k_and_v_may_share_a_packed_buffer),
        cmocka_unit_test(inputs_may_be_expanded),
        cmocka_unit_test(inputs_may_be_the_same_memory),
        cmocka_unit_test(mask_and_bias_may_have_any_strides),
        cmocka_unit_test(a_bias_may_be_expanded_by_strides),
        cmocka_unit_test(lse_and_its_gradient_may_have_any_strides),
        cmocka_unit_test(slopes_and_sinks_may_have_any_strides),
    };
    return RUN_TESTS(tests);
}
