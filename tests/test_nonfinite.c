/* NaN and Inf never spread beyond the rows that depend on them, to which the CPU and the reference hold to the
 * letter, and "|S| up to the largest float gives no NaN and no overflow". expect_close() asks for a result that is not
 * finite exactly where that of the reference is not. */
#include "harness.h"

#include <float.h>

static const case_shape shape = { .B = 2, .Hq = 4, .Hk = 2, .Sq = 40, .Sk = 56, .D = 16 };

/* "a GPU kernel ... may reach rows of the same tile and head, never another head or sequence": the next test is for
 * that. */
#define for_each_strict_kernel(pass, kernel)                                                                           \
    for_each_kernel(pass, kernel)                                                                                      \
        if (kernel.backend != HEED_CUDA)

/* Key head 0 of sequence 1 serves query heads 0 and 1. */
TEST(what_is_not_finite_never_leaves_its_head)
{
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, shape);
        c.a.causal = 1;
        set(&c.a.k, 1, 0, 30, 2, NAN), set(&c.a.v, 1, 0, 31, 2, INFINITY), set(&c.g.d_o, 1, 1, 5, 1, NAN);
        case_forward(&c);
        if (kernel.backward)
            case_backward(&c);
        for (int64_t n = 0; n < 2 * 4 * 40; n++) {
            int64_t b = n / 160, h = n / 40 % 4, i = n % 40;
            if (b == 1 && h < 2)
                continue;
            assert_true(isfinite(get(&c.a.o, b, h, i, 2)) && isfinite(get(&c.a.lse, b, h, i, 0)));
            assert_true(!kernel.backward || isfinite(get(&c.g.d_q, b, h, i, 2)));
            assert_true(!kernel.backward || isfinite(get(&c.g.d_k, b, h / 2, i, 2)));
            assert_true(!kernel.backward || isfinite(get(&c.g.d_v, b, h / 2, i, 2)));
        }
        case_free(&c);
    }
}

TEST(a_nan_in_a_query_row_touches_that_row_only)
{
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, shape);
        set(&c.a.q, 0, 1, 17, 3, NAN);
        case_check(&c);
        assert_true(isnan(get(&c.a.o, 0, 1, 17, 0)) && isnan(get(&c.a.lse, 0, 1, 17, 0)));
        case_free(&c);
    }
}

/* Row i sees keys up to i + 16: key 30 is not for rows 0 to 13. */
TEST(a_nan_in_a_key_touches_the_rows_that_see_it_only)
{
    for_each_strict_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, shape);
        c.a.causal = 1;
        set(&c.a.k, 1, 0, 30, 2, NAN);
        case_check(&c);
        assert_true(isfinite(get(&c.a.o, 1, 1, 13, 0)) && isnan(get(&c.a.o, 1, 1, 14, 0)));
        case_free(&c);
    }
}

TEST(a_nan_or_inf_in_a_value_touches_the_rows_that_see_it_only)
{
    for_each_strict_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < 3; n++) {
            test_case c = case_new(&kernel, shape);
            c.a.causal = 1;
            set(&c.a.v, 1, 0, 30, 2, n == 0 ? NAN : n == 1 ? INFINITY : -INFINITY);
            case_check(&c);
            assert_true(isfinite(get(&c.a.o, 1, 1, 13, 2)) && !isfinite(get(&c.a.o, 1, 1, 14, 2)));
            assert_true(isfinite(get(&c.a.o, 1, 1, 14, 3)));
            case_free(&c);
        }
}

/* src/cpu/near.h: values of many keys are looked at once, and may be known to be finite. */
TEST(a_nan_or_inf_among_many_values_touches_the_rows_that_see_it_only)
{
    for_each_strict_kernel(HEED_FORWARD, kernel)
        for (int n = 0; n < 3; n++) {
            test_case c = case_new(&kernel, (case_shape){ .Sq = 300, .Sk = 300, .D = 32 });
            c.a.causal = 1;
            set(&c.a.v, 0, 0, 285, 2, n == 0 ? NAN : n == 1 ? INFINITY : -INFINITY);
            case_check(&c);
            assert_true(isfinite(get(&c.a.o, 0, 0, 284, 2)) && !isfinite(get(&c.a.o, 0, 0, 285, 2)));
            case_free(&c);
        }
}

TEST(a_mask_keeps_nan_and_inf_out)
{
    for_each_strict_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, shape);
        case_mask(&c, 2, 4, 40, 56, 0.9);
        for (int64_t i = 0; i < 40; i++)
            for (int64_t h = 0; h < 4; h++)
                set(&c.a.mask, 1, h, i, 7, 0), set(&c.a.mask, 1, h, i, 55, i == 39);
        fill_row(&c.a.k, 1, 1, 7, NAN), fill_row(&c.a.v, 1, 1, 7, INFINITY);
        fill_row(&c.a.k, 1, 1, 55, NAN), fill_row(&c.a.v, 1, 1, 55, NAN);
        case_check(&c);
        assert_true(isfinite(get(&c.a.o, 1, 3, 38, 0)) && isnan(get(&c.a.o, 1, 3, 39, 0)));
        case_free(&c);
    }
}

TEST(a_window_keeps_nan_out_on_both_sides)
{
    for_each_strict_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, shape);
        c.a.windowed = 1;
        c.a.window_left = 6, c.a.window_right = 2;
        fill_row(&c.a.k, 0, 0, 25, NAN), fill_row(&c.a.v, 0, 0, 25, NAN);
        case_check(&c);
        case_free(&c);
    }
}

/* Keys that no query of the problem may see may hold anything. Bounds of the window at odd keys: where keys are multiplied in
 * pairs, a pair reaches over the edge. One query, and enough of them for tiles. */
TEST(a_window_with_odd_edges_keeps_nan_out)
{
    for_each_strict_kernel(HEED_FORWARD, kernel)
        for (int64_t rows = 1; rows <= 9; rows += 8) {
            test_case c = case_new(&kernel, (case_shape){ .Hq = 16, .Hk = 1, .Sq = rows, .Sk = 60, .D = 32 });
            c.a.windowed = 1;
            c.a.window_left = 27 + rows, c.a.window_right = -1; /* the first row sees keys 33 - 2 rows to 59 */
            fill_row(&c.a.v, 0, 0, 32 - 2 * rows, NAN);
            case_check(&c);
            c.a.align = HEED_ALIGN_TOP_LEFT;
            c.a.window_left = -1, c.a.window_right = 0; /* the last row sees keys 0 to rows - 1 */
            fill_row(&c.a.v, 0, 0, rows, NAN);
            case_check(&c);
            case_free(&c);
        }
}

/* heed.h: a bias of "-inf hides the key as a mask does". */
TEST(a_bias_of_minus_infinity_keeps_nan_out)
{
    for_each_strict_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, shape);
        c.a.bias = case_tensor(&c, HEED_F32, (int64_t[]){ 1, 1, 1, c.a.k.shape[2] }, NULL);
        fill_bytes(&c.a.bias, 0);
        ((float *)c.a.bias.data)[7] = -INFINITY;
        for (int64_t h = 0; h < c.a.k.shape[1]; h++)
            fill_row(&c.a.k, 0, h, 7, NAN), fill_row(&c.a.v, 0, h, 7, NAN);
        case_check(&c);
        case_free(&c);
    }
}

/* heed.h: of "A row that sees no key ... all its gradients are 0", whatever comes in for it. */
TEST(a_nan_gradient_of_the_lse_of_a_row_without_keys_is_ignored)
{
    for_each_strict_kernel(HEED_BACKWARD, kernel) {
        test_case c = case_new(&kernel, shape);
        int64_t rows = c.a.q.shape[2];
        c.a.mask = case_tensor(&c, HEED_BOOL, (int64_t[]){ 1, 1, rows, 1 }, NULL);
        memset(c.a.mask.data, 1, (size_t)rows);
        ((uint8_t *)c.a.mask.data)[3] = 0;
        c.g.d_lse = case_tensor(&c, HEED_F32, (int64_t[]){ c.a.q.shape[0], c.a.q.shape[1], rows, 1 }, NULL);
        fill_bytes(&c.g.d_lse, 0);
        ((float *)c.g.d_lse.data)[3] = NAN;
        case_check(&c);
        case_free(&c);
    }
}

TEST(a_large_scale_does_not_overflow_what_the_score_does_not)
{
    for_each_kernel(HEED_FORWARD, kernel) {
        if (kernel.dtype == HEED_F16)
            continue;
        test_case c = case_new(&kernel, (case_shape){ .Sq = 20, .Sk = 20, .D = 16 });
        for (int64_t i = 0; i < 20; i++)
            fill_row(&c.a.q, 0, 0, i, 0x1p-90), fill_row(&c.a.k, 0, 0, i, 0x1p100 * (double)(i + 1) / 20);
        c.a.scale = 0x1p40f;
        case_forward(&c);
        for (int64_t n = 0; n < 20 * 16; n++) { /* the largest score takes all */
            double v = get(&c.a.v, 0, 0, 19, n % 16);
            assert_true(fabs(get(&c.a.o, 0, 0, n / 16, n % 16) - v) <= 0x1p-22 * fabs(v));
        }
        case_free(&c);
    }
}

TEST(keys_off_the_stride_may_hold_anything)
{
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, shape);
        c.a.key_stride = 3;
        for (int64_t j = 0; j < 56; j++)
            if (j % 3)
                fill_row(&c.a.k, 0, 1, j, NAN), fill_row(&c.a.v, 0, 1, j, INFINITY);
        case_check(&c);
        assert_true(isfinite(get(&c.a.o, 0, 3, 39, 15)));
        case_free(&c);
    }
}

TEST(a_nan_in_the_gradient_of_a_row_stays_with_what_the_row_sees)
{
    for_each_strict_kernel(HEED_BACKWARD, kernel) {
        test_case c = case_new(&kernel, shape);
        c.a.causal = 1;
        set(&c.g.d_o, 0, 2, 5, 1, NAN);
        case_check(&c);
        assert_true(isfinite(get(&c.g.d_k, 0, 1, 22, 0)) && isnan(get(&c.g.d_k, 0, 1, 21, 0)));
        assert_true(isfinite(get(&c.g.d_q, 0, 2, 6, 0)) && isnan(get(&c.g.d_q, 0, 2, 5, 0)));
        case_free(&c);
    }
}

/* Two groups of keys whose scores are as far apart as fp32 allows: row i takes the mean of the upper group. The second
 * column makes the scores no numbers of fp32, as lse is: exp(S - lse) must not run away. */
TEST(scores_up_to_the_largest_float_do_not_overflow)
{
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, (case_shape){ .Hq = 2, .Sq = 20, .Sk = 40, .D = 2, .Dv = 16 });
        double size = kernel.dtype == HEED_F16 ? 60000 : 1.75 * 0x1p63; /* its square is 2.6e38 */
        for (int64_t n = 0; n < 80; n++) {
            set(&c.a.k, 0, n / 40, n % 40, 0, n % 4 == 1 ? size : -size);
            set(&c.a.k, 0, n / 40, n % 40, 1, kernel.dtype == HEED_F16 ? 10 : 0x1p45);
        }
        for (int64_t n = 0; n < 40; n++) {
            set(&c.a.q, 0, n / 20, n % 20, 0, size);
            set(&c.a.q, 0, n / 20, n % 20, 1, kernel.dtype == HEED_F16 ? 10 : 0x1p45);
        }
        c.a.scale = 1;
        case_forward(&c);
        if (kernel.backward)
            case_backward(&c);
        for (int64_t d = 0; d < 16; d++) {
            double mean = 0;
            for (int64_t j = 1; j < 40; j += 4)
                mean += get(&c.a.v, 0, 1, j, d) / 10;
            assert_true(fabs(get(&c.a.o, 0, 1, 19, d) - mean) < 2e-2 && isfinite(get(&c.a.lse, 0, 1, 19, 0)));
            assert_true(!kernel.backward || isfinite(get(&c.g.d_v, 0, 1, 1, d)));
        }
        assert_true(!kernel.backward || !isnan(get(&c.g.d_k, 0, 1, 1, 0)));
        assert_true(!kernel.backward || !isnan(get(&c.g.d_q, 0, 1, 19, 0)));
        case_free(&c);
    }
}

/* Masks written as a bias of the lowest float, as frameworks do. Where it covers a row, all its keys are equal. */
TEST(a_bias_of_the_lowest_float_is_a_mask)
{
    for_each_kernel(EITHER_PASS, kernel) {
        if (kernel.dtype == HEED_F16) /* 65504 is a number like others */
            continue;
        test_case c = case_new(&kernel, shape);
        case_bias(&c, kernel.dtype, 1, 1, 40, 56);
        double lowest = kernel.dtype == HEED_BF16 ? -0x1.FEp127 : -FLT_MAX;
        for (int64_t n = 0; n < 40 * 56; n++)
            if (n / 56 == 11 || n % 3)
                set(&c.a.bias, 0, 0, n / 56, n % 56, lowest);
        case_forward(&c);
        if (kernel.backward)
            case_backward(&c);
        results got = case_results(&c), expected = case_reference(&c);
        double room = kernel.dtype == HEED_BF16 ? 3e-2 : 1e-5;
        for (int which = 0; which < (kernel.backward ? OUTPUTS : OUT_LSE); which++)
            for (int64_t n = 0; n < elements(output_of(&c, which)) && got.at[which]; n++)
                assert_true(which == OUT_LSE ||
                            fabs(got.at[which][n] - expected.at[which][n]) <=
                                room * (1 + fabs(expected.at[which][n])) * (which == OUT_O ? 1 : 8));
        case_free(&c);
    }
}

TEST(a_row_whose_scores_are_all_very_low_is_an_ordinary_row)
{
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, shape);
        case_bias(&c, HEED_F64 == kernel.dtype ? HEED_F64 : HEED_F32, 1, 1, 40, 1);
        for (int64_t i = 0; i < 40; i++)
            set(&c.a.bias, 0, 0, i, 0, i % 2 ? -1000 : 1000);
        case_check(&c);
        case_free(&c);
    }
}

/* A kernel may take the maximum of a row from the first keys that it meets, or move it seldom: logits that rise by up to
 * 33 from key to key, to 1e4, or fall, must not show it. With a band, and rows that see no key. */
TEST(logits_may_rise_steeply_along_the_keys)
{
    static const int64_t head_dims[] = { 64, 96, 128, 192, 256 };
    static const double slopes[] = { 0.1, 1, 33, -0.1, -1, -33 };
    for_each_kernel(HEED_FORWARD, kernel) {
        if (heed_dtype_size(kernel.dtype) != 2) /* of logits of 1e4 fp32 has four digits: o must not ask for more */
            continue;
        for (int n = 0; n < 2 * COUNT(slopes); n++) {
            const int64_t D = head_dims[n % COUNT(head_dims)];
            test_case c = case_new(&kernel, (case_shape){ .Sq = n % 2 ? 330 : 20, .Sk = 300, .D = D });
            c.a.scale = 1; /* the plain computation in fp16, which sets the tolerance, multiplies first */
            fill_normal(&c.a.q, 1 / sqrt((double)D));
            for (int64_t i = 0; i < case_rows(&c); i++)
                set(&c.a.q, 0, 0, i, 0, 64);
            for (int64_t j = 0; j < 300; j++)
                set(&c.a.k, 0, 0, j, 0, slopes[n / 2] * (double)j / 64);
            c.a.causal = n % 2;
            c.a.lse.data = NULL;
            case_check(&c);
            case_free(&c);
        }
    }
}

/* All scores alike, of 26 and of -26: weights that are not relative to the largest would be 2^38 and 2^-38, and values of
 * 2^100 and 2^-100 beyond the range of floats with them. */
TEST(values_may_be_huge_or_tiny_where_scores_are_high_or_low)
{
    for_each_kernel(HEED_FORWARD, kernel) {
        if (kernel.dtype == HEED_F16)
            continue;
        for (int n = 0; n < 4; n++) {
            test_case c = case_new(&kernel, (case_shape){ .Sq = 64, .Sk = 512, .D = 64 });
            for (int64_t d = 0; d < 64; d++) {
                for (int64_t i = 0; i < 64; i++)
                    set(&c.a.q, 0, 0, i, d, n % 2 ? 1.8125 : -1.8125);
                for (int64_t j = 0; j < 512; j++) {
                    set(&c.a.k, 0, 0, j, d, 1.8125);
                    set(&c.a.v, 0, 0, j, d, get(&c.a.v, 0, 0, j, d) * (n / 2 ? 0x1p100 : 0x1p-100));
                }
            }
            case_check(&c);
            case_free(&c);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_not_finite_never_leaves_its_head),
        cmocka_unit_test(a_nan_in_a_query_row_touches_that_row_only),
        cmocka_unit_test(a_nan_in_a_key_touches_the_rows_that_see_it_only),
        cmocka_unit_test(a_nan_or_inf_in_a_value_touches_the_rows_that_see_it_only),
        cmocka_unit_test(a_nan_or_inf_among_many_values_touches_the_rows_that_see_it_only),
        cmocka_unit_test(a_mask_keeps_nan_and_inf_out),
        cmocka_unit_test(a_window_keeps_nan_out_on_both_sides),
        cmocka_unit_test(a_window_with_odd_edges_keeps_nan_out),
        cmocka_unit_test(a_bias_of_minus_infinity_keeps_nan_out),
        cmocka_unit_test(a_nan_gradient_of_the_lse_of_a_row_without_keys_is_ignored),
        cmocka_unit_test(a_large_scale_does_not_overflow_what_the_score_does_not),
        cmocka_unit_test(keys_off_the_stride_may_hold_anything),
        cmocka_unit_test(a_nan_in_the_gradient_of_a_row_stays_with_what_the_row_sees),
        cmocka_unit_test(scores_up_to_the_largest_float_do_not_overflow),
        cmocka_unit_test(a_bias_of_the_lowest_float_is_a_mask),
        cmocka_unit_test(a_row_whose_scores_are_all_very_low_is_an_ordinary_row),
        cmocka_unit_test(logits_may_rise_steeply_along_the_keys),
        cmocka_unit_test(values_may_be_huge_or_tiny_where_scores_are_high_or_low),
    };
    return RUN_TESTS(tests);
}
