/* The reference is right: by hand, by finite differences, and by the second opinion of naive.c. */
#include "harness.h"

static const heed_kernel_info fp64 = {
    .name = "backward_reference_f64", .backend = HEED_REFERENCE, .backward = 1, .dtype = HEED_F64
};

static void expect_near(double x, double expected, double tolerance)
{
    if (!(fabs(x - expected) <= tolerance))
        fail_msg("is %.15g, should be %.15g", x, expected);
}

/* One query 1, keys 0 and ln 3, values 0 and 4: P is 1/4 and 3/4. */
static test_case one_row_two_keys(void)
{
    test_case c = case_new(&fp64, (case_shape){ .Sq = 1, .Sk = 2, .D = 1 });
    set(&c.a.q, 0, 0, 0, 0, 1);
    set(&c.a.k, 0, 0, 0, 0, 0);
    set(&c.a.k, 0, 0, 1, 0, log(3));
    set(&c.a.v, 0, 0, 0, 0, 0);
    set(&c.a.v, 0, 0, 1, 0, 4);
    set(&c.g.d_o, 0, 0, 0, 0, 1);
    return c;
}

TEST(two_keys_computed_by_hand)
{
    test_case c = one_row_two_keys();
    case_forward(&c);
    case_backward(&c);
    expect_near(get(&c.a.o, 0, 0, 0, 0), 3, 1e-14);
    expect_near(get(&c.a.lse, 0, 0, 0, 0), log(4), 1e-7);
    expect_near(get(&c.g.d_v, 0, 0, 0, 0), 0.25, 1e-7);
    expect_near(get(&c.g.d_v, 0, 0, 1, 0), 0.75, 1e-7);
    expect_near(get(&c.g.d_k, 0, 0, 0, 0), -0.75, 1e-6);
    expect_near(get(&c.g.d_k, 0, 0, 1, 0), 0.75, 1e-6);
    expect_near(get(&c.g.d_q, 0, 0, 0, 0), 0.75 * log(3), 1e-6);
    case_free(&c);
}

/* heed.h: "sink ... one more logit in each row's l_i, with no value". */
TEST(a_sink_computed_by_hand)
{
    test_case c = one_row_two_keys();
    case_sink(&c);
    set(&c.a.sink, 0, 0, 0, 0, log(4));
    case_forward(&c);
    case_backward(&c);
    expect_near(get(&c.a.o, 0, 0, 0, 0), 1.5, 1e-7);
    expect_near(get(&c.a.lse, 0, 0, 0, 0), log(8), 2e-7);
    expect_near(get(&c.g.d_sink, 0, 0, 0, 0), -0.75, 1e-6);
    case_free(&c);
}

/* heed.h: "softcap(x) = c tanh(x/c)", "slope_h * |p_i - r_j|": row 0 of 1 stands at key 1 of 2. */
TEST(softcap_and_alibi_computed_by_hand)
{
    test_case c = one_row_two_keys();
    c.a.softcap = 2;
    case_alibi(&c, 1);
    set(&c.a.alibi, 0, 0, 0, 0, 0.5);
    case_forward(&c);
    double S0 = -0.5, S1 = 2 * tanh(log(3) / 2);
    expect_near(get(&c.a.o, 0, 0, 0, 0), 4 * exp(S1) / (exp(S0) + exp(S1)), 1e-14);
    case_free(&c);
}

/* heed.h: "A row that sees no key has o = 0 and lse = -inf, sink or not, and all its gradients are 0." */
TEST(a_row_that_sees_no_key_is_zero)
{
    test_case c = one_row_two_keys();
    case_sink(&c);
    case_mask(&c, 1, 1, 1, 2, 0);
    case_forward(&c);
    case_backward(&c);
    assert_true(get(&c.a.o, 0, 0, 0, 0) == 0 && get(&c.a.lse, 0, 0, 0, 0) == -INFINITY);
    assert_true(get(&c.g.d_q, 0, 0, 0, 0) == 0 && get(&c.g.d_sink, 0, 0, 0, 0) == 0);
    assert_true(get(&c.g.d_k, 0, 0, 0, 0) == 0 && get(&c.g.d_v, 0, 0, 1, 0) == 0);
    case_free(&c);
}

/* glibc's rand() in its default state, so that the numbers are the same with every C library. */
static double demo_random(void)
{
    static uint32_t ring[31] = { 1 };
    static int at = -1;
    if (at < 0) {
        for (int n = 1; n < 31; n++)
            ring[n] = (uint32_t)(16807 * (uint64_t)ring[n - 1] % 2147483647);
        at = 0;
        for (int n = 0; n < 310; n++, at = (at + 1) % 31)
            ring[(at + 3) % 31] += ring[at];
    }
    uint32_t sum = ring[(at + 3) % 31] += ring[at];
    at = (at + 1) % 31;
    return 2 * (double)(sum >> 1) / 2147483647 - 1;
}

/* The demo: "128 tokens, 32 dimensions, one head, fp32, unmasked, scale 1/sqrt(32)". */
TEST(the_demo_has_the_published_numbers)
{
    static const double O[9] = { 0.016065, -0.0290427, -0.027025,  0.011394,  -0.00482534,
                                 -0.03082, 0.0286616,  -0.0218805, -0.0718517 };
    static const double dQ[9] = { 0.00946975, 0.00569055,  0.000785498, -0.00670553, -0.00763953,
                                  -0.0156887, -0.00887811, 0.0160615,   0.0198677 };
    static const double dK[9] = { 0.00480869, -0.00776059, -0.00402077, 0.0102126, 0.0126519,
                                  0.0243553,  0.00513837,  0.0136316,   0.0141893 };
    static const double dV[9] = { -0.0712795, -0.00727661, -0.00910686, -0.0345493, -0.0283635,
                                  0.00945967, -0.0471181,  0.000656001, -0.015904 };
    heed_kernel_info fp32 = { .name = "backward_reference_f32", .backend = HEED_REFERENCE, .backward = 1 };
    test_case c = case_new(&fp32, (case_shape){ .Sq = 128, .D = 32 });
    for (int64_t n = 0; n < 128 * 32; n++) {
        set(&c.a.q, 0, 0, n / 32, n % 32, demo_random());
        set(&c.a.k, 0, 0, n / 32, n % 32, demo_random());
        set(&c.a.v, 0, 0, n / 32, n % 32, demo_random());
        set(&c.g.d_o, 0, 0, n / 32, n % 32, demo_random());
    }
    expect_near(get(&c.a.q, 0, 0, 0, 1), 0.823295, 1e-6);
    case_forward(&c);
    case_backward(&c);
    for (int64_t n = 0; n < 9; n++) {
        expect_near(get(&c.a.o, 0, 0, n / 3, n % 3), O[n], 5.1e-6 * fabs(O[n]) + 1e-8);
        expect_near(get(&c.g.d_q, 0, 0, n / 3, n % 3), dQ[n], 5.1e-6 * fabs(dQ[n]) + 1e-8);
        expect_near(get(&c.g.d_k, 0, 0, n / 3, n % 3), dK[n], 5.1e-6 * fabs(dK[n]) + 1e-8);
        expect_near(get(&c.g.d_v, 0, 0, n / 3, n % 3), dV[n], 5.1e-6 * fabs(dV[n]) + 1e-8);
    }
    case_free(&c);
}

/* ---- Finite differences ----------------------------------------------------------------------------------------- */

static double loss(test_case *c)
{
    int owned = c->buffer_count;
    results r = case_reference(c);
    double *dO = unpack(c, &c->g.d_o), *dlse = unpack(c, &c->g.d_lse), sum = 0;
    for (int64_t n = 0; n < elements(&c->a.o); n++)
        sum += r.at[OUT_O][n] != 0 ? dO[n] * r.at[OUT_O][n] : 0;
    for (int64_t n = 0; n < elements(&c->a.lse) && dlse; n++)
        sum += r.at[OUT_LSE][n] == -INFINITY ? 0 : dlse[n] * r.at[OUT_LSE][n];
    free_since(c, owned);
    return sum;
}

/* x is packed memory of the case. */
static void expect_gradient(test_case *c, const char *name, const heed_tensor *x, const double *gradient)
{
    for (int64_t n = 0; n < elements(x) && x->data; n++) {
        double value = heed_load(x->data, x->dtype, n), step = x->dtype == HEED_F64 ? 1e-5 : 0x1p-9;
        heed_store(x->data, x->dtype, n, value + step);
        double more = loss(c), width = heed_load(x->data, x->dtype, n);
        heed_store(x->data, x->dtype, n, value - step);
        double less = loss(c);
        width -= heed_load(x->data, x->dtype, n);
        heed_store(x->data, x->dtype, n, value);
        double slope = isfinite(value) ? (more - less) / width : 0;
        if (!(fabs(slope - gradient[n]) <= (x->dtype == HEED_F64 ? 1e-7 : 1e-4) * (1 + fabs(slope))))
            fail_msg("d_%s[%lld] is %.9g, by differences %.9g; %s", name, (long long)n, gradient[n], slope,
                     case_text(c));
    }
}

static void expect_gradients(test_case *c)
{
    case_d_lse(c);
    results r = case_reference(c);
    expect_gradient(c, "q", &c->a.q, r.at[OUT_DQ]);
    expect_gradient(c, "k", &c->a.k, r.at[OUT_DK]);
    expect_gradient(c, "v", &c->a.v, r.at[OUT_DV]);
    expect_gradient(c, "bias", &c->a.bias, r.at[OUT_DBIAS]);
    expect_gradient(c, "sink", &c->a.sink, r.at[OUT_DSINK]);
    case_free(c);
}

static const case_shape small = { .B = 2, .Hq = 2, .Hk = 1, .Sq = 3, .Sk = 5, .D = 3, .Dv = 2 };

TEST(plain_gradients_match_finite_differences)
{
    test_case c = case_new(&fp64, small);
    expect_gradients(&c);
}

TEST(gradients_in_a_band_match_finite_differences)
{
    test_case c = case_new(&fp64, small);
    c.a.causal = c.a.windowed = 1;
    c.a.window_left = 2, c.a.window_right = 1;
    c.a.key_stride = 2;
    expect_gradients(&c);
}

TEST(gradients_of_softcap_and_scale_match_finite_differences)
{
    test_case c = case_new(&fp64, small);
    c.a.softcap = 0.7f;
    c.a.scale = -1.3f;
    expect_gradients(&c);
}

TEST(gradients_of_every_broadcast_bias_match_finite_differences)
{
    for (int full = 0; full < 16; full++) {
        test_case c = case_new(&fp64, small);
        case_bias(&c, HEED_F64, full & 1 ? 2 : 1, full & 2 ? 2 : 1, full & 4 ? 3 : 1, full & 8 ? 5 : 1);
        expect_gradients(&c);
    }
}

TEST(gradients_of_a_sink_and_alibi_match_finite_differences)
{
    test_case c = case_new(&fp64, small);
    case_sink(&c);
    case_alibi(&c, 2);
    expect_gradients(&c);
}

TEST(gradients_with_dropout_and_a_mask_match_finite_differences)
{
    test_case c = case_new(&fp64, small);
    case_mask(&c, 2, 1, 3, 5, 0.7);
    c.a.dropout = 0.3f;
    c.a.dropout_seed = 5;
    expect_gradients(&c);
}

TEST(gradients_of_ragged_sequences_match_finite_differences)
{
    static const int32_t rows[] = { 2, 0, 3 }, keys[] = { 4, 2, 1 };
    test_case c = case_new(&fp64,
                           (case_shape){ .B = 3, .Hq = 2, .D = 2, .form = RAGGED, .rows_of = rows, .keys_of = keys });
    c.a.causal = 1;
    case_bias(&c, HEED_F64, 3, 1, 3, 4);
    expect_gradients(&c);
}

TEST(gradients_with_everything_at_once_match_finite_differences)
{
    test_case c = case_new(&fp64, small);
    case_bias(&c, HEED_F64, 1, 2, 1, 5);
    set(&c.a.bias, 0, 0, 0, 1, -INFINITY);
    case_mask(&c, 1, 2, 3, 1, 0.9);
    case_sink(&c);
    case_alibi(&c, 1);
    c.a.softcap = 3;
    c.a.windowed = 1;
    c.a.window_left = 3, c.a.window_right = -1;
    c.a.dropout = 0.25f;
    expect_gradients(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_keys_computed_by_hand),
        cmocka_unit_test(a_sink_computed_by_hand),
        cmocka_unit_test(softcap_and_alibi_computed_by_hand),
        cmocka_unit_test(a_row_that_sees_no_key_is_zero),
        cmocka_unit_test(the_demo_has_the_published_numbers),
        cmocka_unit_test(plain_gradients_match_finite_differences),
        cmocka_unit_test(gradients_in_a_band_match_finite_differences),
        cmocka_unit_test(gradients_of_softcap_and_scale_match_finite_differences),
        cmocka_unit_test(gradients_of_every_broadcast_bias_match_finite_differences),
        cmocka_unit_test(gradients_of_a_sink_and_alibi_match_finite_differences),
        cmocka_unit_test(gradients_with_dropout_and_a_mask_match_finite_differences),
        cmocka_unit_test(gradients_of_ragged_sequences_match_finite_differences),
        cmocka_unit_test(gradients_with_everything_at_once_match_finite_differences),
    };
    return RUN_TESTS(tests);
}
