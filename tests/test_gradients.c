/* heed.h: heed_gradient. What each kernel returns for each gradient, against the reference; that the reference itself
 * is right is test_reference's business. */
#include "harness.h"

static const case_shape shape = { .B = 2, .Hq = 4, .Hk = 2, .Sq = 45, .Sk = 61, .D = 24, .Dv = 32 };

TEST(every_gradient_matches_the_reference_with_everything_on)
{
    for_each_kernel(HEED_BACKWARD, kernel)
        for (int aligned = 0; aligned < 2; aligned++) {
            test_case c = case_new(&kernel,
                                   (case_shape){ .Hq = 2, .Hk = 1, .Sq = 150, .Sk = 304, .D = aligned ? 16 : 12 });
            case_bias(&c, kernel.dtype, 1, 2, 150, 304);
            case_mask(&c, 1, 1, 150, 304, 0.8);
            case_alibi(&c, 1);
            case_sink(&c);
            case_d_lse(&c);
            c.a.causal = 1;
            c.a.softcap = 4;
            c.a.dropout = 0.1f;
            c.a.dropout_seed = 99;
            case_check(&c);
            case_free(&c);
        }
}

/* heed.h: "d_bias ... summed over the dimensions that bias broadcasts", in fp32 or bias's dtype. */
TEST(the_gradient_of_a_broadcast_bias_is_a_sum)
{
    for_each_kernel(HEED_BACKWARD, kernel)
        for (int full = 0; full < 16; full++) {
            test_case c = case_new(&kernel, shape);
            case_bias(&c, kernel.dtype, full & 1 ? 2 : 1, full & 2 ? 4 : 1, full & 4 ? 45 : 1, full & 8 ? 61 : 1);
            if (full % 3 && kernel.dtype != HEED_F64)
                c.g.d_bias = case_tensor(&c, HEED_F32, c.a.bias.shape, NULL);
            c.a.causal = full % 5 == 0;
            c.a.key_stride = full % 5 == 1 ? 3 : 0;
            case_check(&c);
            case_free(&c);
        }
}

/* Sequences share the columns of a bias even where the first of them has no key on the stride. */
TEST(sequences_without_keys_do_not_move_the_gradient_of_a_shared_bias)
{
    static const int32_t keys[] = { 0, 2, 20 };
    for_each_kernel(HEED_BACKWARD, kernel) {
        test_case c = case_new(&kernel,
                               (case_shape){
                                   .B = 3, .Hq = 2, .Sq = 4, .Sk = 20, .D = 8, .form = PADDED, .keys_of = keys });
        case_bias(&c, kernel.dtype, 1, 1, 1, 20);
        c.a.align = HEED_ALIGN_POSITION;
        c.a.key_position = 1;
        c.a.key_stride = 4;
        case_check(&c);
        case_free(&c);
    }
}

TEST(the_gradient_of_lse_flows_back)
{
    for_each_kernel(HEED_BACKWARD, kernel) {
        test_case c = case_new(&kernel, shape);
        case_d_lse(&c);
        fill_normal(&c.g.d_lse, 5);
        case_check(&c);
        case_free(&c);
    }
}

TEST(the_gradient_of_a_sink_sums_over_batch_and_rows)
{
    for_each_kernel(HEED_BACKWARD, kernel) {
        test_case c = case_new(&kernel, shape);
        case_sink(&c);
        case_d_lse(&c);
        c.a.causal = 1;
        case_check(&c);
        case_free(&c);
    }
}

/* heed.h: d_q is "like q, in q's dtype or fp32". */
/* Many tiles of keys, which all add to dQ, and some of which see few queries or none. */
TEST(sums_may_be_taken_in_any_order)
{
    for_each_kernel(HEED_BACKWARD, kernel)
        for (int variant = 0; variant < 4; variant++) {
            test_case c = case_new(&kernel, (case_shape){ .Hq = 2, .Hk = 1, .Sq = 300, .Sk = 700, .D = 64 });
            c.x.nondeterministic = 1;
            c.a.causal = variant == 1;
            if (variant == 2)
                c.a.windowed = 1, c.a.window_left = 150, c.a.window_right = 20;
            c.a.key_stride = variant == 3 ? 3 : 0;
            case_check(&c);
            case_free(&c);
        }
}

/* With gradients of fp32; alone: o and d_o are of q's type. */
static case_shape fp32_shape(int alone)
{
    case_shape s = shape;
    s.fp32_results = !alone;
    s.fp32_gradients = alone;
    return s;
}

TEST(gradients_of_16_bit_inputs_may_be_fp32)
{
    for_each_kernel(HEED_BACKWARD, kernel)
        for (int alone = 0; alone < 2; alone++) {
            test_case c = case_new(&kernel, fp32_shape(alone));
            case_check(&c);
            case_free(&c);
        }
}

/* heed.h: "Any of the results may be absent: then it is not computed." The others keep their bits; each is left out
 * once and left alone once. */
TEST(absent_gradients_change_nothing)
{
    for_each_kernel(HEED_BACKWARD, kernel) {
        test_case c = case_new(&kernel, shape);
        case_bias(&c, kernel.dtype, 1, 4, 45, 61);
        case_sink(&c);
        case_forward(&c);
        case_backward(&c);
        heed_tensor all[OUTPUTS];
        for (int which = OUT_DQ; which < OUTPUTS; which++)
            all[which] = *output_of(&c, which);
        for (int n = 0; n < 10; n++) {
            int owned = c.buffer_count, absent = n < 5 ? 1 << n : 31 - (1 << (n - 5));
            for (int which = OUT_DQ; which < OUTPUTS; which++) {
                *output_of(&c, which) = case_tensor(&c, all[which].dtype, all[which].shape, NULL);
                if (absent >> (which - OUT_DQ) & 1)
                    output_of(&c, which)->data = NULL;
            }
            case_backward(&c);
            for (int which = OUT_DQ; which < OUTPUTS; which++)
                if (output_of(&c, which)->data)
                    expect_same_bits(&c, "a gradient", &all[which], output_of(&c, which));
            free_since(&c, owned);
        }
        case_free(&c);
    }
}

/* heed.h: "delta ... of heed_delta(): o and d_lse are then not read". */
TEST(delta_stands_for_o_and_d_lse)
{
    for_each_kernel(HEED_BACKWARD, kernel) {
        test_case c = case_new(&kernel, shape);
        case_d_lse(&c);
        case_forward(&c);
        heed_tensor delta = case_tensor(&c, HEED_F32, c.a.lse.shape, NULL);
        assert_int_equal(heed_delta(&c.a.o, &c.g.d_o, &c.g.d_lse, &delta, &c.x), HEED_OK);
        c.g.delta = delta;
        fill_bytes(&c.a.o, 0xFF);
        heed_tensor d_lse = c.g.d_lse;
        c.g.d_lse = case_tensor(&c, HEED_F32, c.a.lse.shape, NULL); /* NaN */
        case_backward(&c);
        c.g.d_lse = d_lse;
        expect_close(&c, HEED_BACKWARD);
        case_free(&c);
    }
}

/* heed.h: accumulate, "1: add to d_q, d_k and d_v, which are fp32, in place of overwriting them". */
TEST(accumulate_adds_to_what_is_there)
{
    for_each_kernel(HEED_BACKWARD, kernel)
        for (int alone = 0; alone < 2; alone++) {
            if (kernel.dtype == HEED_F64)
                continue;
            test_case c = case_new(&kernel, fp32_shape(alone));
            c.a.causal = 1;
            case_check(&c);
            results once = case_results(&c);
            c.g.accumulate = 1;
            case_backward(&c);
            results twice = case_results(&c);
            for (int which = OUT_DQ; which <= OUT_DV; which++)
                for (int64_t n = 0; n < elements(output_of(&c, which)); n++)
                    assert_true(fabs(twice.at[which][n] - 2 * once.at[which][n]) <=
                                1e-6 * (1 + fabs(once.at[which][n])));
            case_free(&c);
        }
}

/* Backward works from lse alone where no gradient flows but that of lse: d_o = 0. */
TEST(zero_gradients_in_give_zero_gradients_out)
{
    for_each_kernel(HEED_BACKWARD, kernel) {
        test_case c = case_new(&kernel, shape);
        fill_bytes(&c.g.d_o, 0);
        case_forward(&c);
        case_backward(&c);
        results r = case_results(&c);
        for (int which = OUT_DQ; which <= OUT_DV; which++)
            for (int64_t n = 0; n < elements(output_of(&c, which)); n++)
                assert_true(r.at[which][n] == 0);
        case_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_gradient_matches_the_reference_with_everything_on),
        cmocka_unit_test(the_gradient_of_a_broadcast_bias_is_a_sum),
        cmocka_unit_test(sequences_without_keys_do_not_move_the_gradient_of_a_shared_bias),
        cmocka_unit_test(the_gradient_of_lse_flows_back),
        cmocka_unit_test(the_gradient_of_a_sink_sums_over_batch_and_rows),
        cmocka_unit_test(sums_may_be_taken_in_any_order),
        cmocka_unit_test(gradients_of_16_bit_inputs_may_be_fp32),
        cmocka_unit_test(absent_gradients_change_nothing),
        cmocka_unit_test(delta_stands_for_o_and_d_lse),
        cmocka_unit_test(accumulate_adds_to_what_is_there),
        cmocka_unit_test(zero_gradients_in_give_zero_gradients_out),
    };
    return RUN_TESTS(tests);
}
