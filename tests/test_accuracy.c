/* docs/numerics.md: "error against the fp64 reference, maximum and RMS, at most that of the plain computation in the
 * same type" for o, "at most twice that" for gradients, and "fp32 is fp32".
 *
 * The largest of a few thousand rounding errors is a matter of luck, so each promise is tested on several draws: RMS over
 * all of them, and of the maxima the geometric mean of kernel / plain computation, which still varies by a seventh. Causal
 * gradients vary most: where a row sees one key the plain computation's are exactly zero. */
#include "harness.h"

#define DRAWS 8
#define MAX_ROOM 1.25

typedef struct errors {
    double ratio, sum, naive_sum, largest; /* ratio: product over the draws; sums of squares; largest result */
} errors;

/* The largest error; adds the squares of all to *sum. */
static double measure(const double *x, const double *expected, int64_t count, double *sum)
{
    double max = 0;
    for (int64_t n = 0; n < count; n++) {
        double error = fabs(x[n] - expected[n]);
        max = error > max || error != error ? error : max;
        *sum += error * error;
    }
    return max;
}

static void add_errors(test_case *c, int which, const results *got, const results *expected, const results *naive,
                       errors *e)
{
    int64_t count = elements(output_of(c, which));
    double max = measure(got->at[which], expected->at[which], count, &e->sum);
    double naive_max = measure(naive->at[which], expected->at[which], count, &e->naive_sum);
    for (int64_t n = 0; n < count; n++)
        e->largest = HEED_MAX(e->largest, fabs(expected->at[which][n]));
    e->ratio *= max / HEED_MAX(naive_max, 1e-9 * e->largest);
}

static void expect_small(const test_case *c, int which, const errors *e, double times)
{
    double max = pow(e->ratio, 1.0 / DRAWS), rms = sqrt(e->sum / e->naive_sum);
    if (getenv("HEED_TEST_VERBOSE"))
        printf("%-28s output %d: max %.2f, rms %.2f of naive\n", c->kernel.name, which, max, rms);
    if (!(max <= MAX_ROOM * times) || !(rms <= times))
        fail_msg("output %d: errors are %.2f (max) and %.2f (rms) times those of the naive computation; %s", which, max,
                 rms, case_text(c));
}

/* The fp64 row is left out: naive fp64 has no error worth the name, and lse, which backward reads, is fp32. */
static void expect_accurate(heed_pass pass, case_shape shape, int causal, double sigma)
{
    int first = pass == HEED_FORWARD ? OUT_O : OUT_DQ, last = pass == HEED_FORWARD ? OUT_O : OUT_DV;
    for_each_kernel(pass, kernel) {
        if (kernel.dtype == HEED_F64)
            continue;
        errors e[OUTPUTS];
        for (int which = first; which <= last; which++)
            e[which] = (errors){ .ratio = 1 };
        for (int draw = 0; draw < DRAWS; draw++) {
            test_case c = case_new(&kernel, shape);
            c.a.causal = causal;
            fill_normal(&c.a.q, sigma);
            case_forward(&c);
            if (pass == HEED_BACKWARD)
                case_backward(&c);
            results got = case_results(&c), expected = case_reference(&c), magnitude,
                    naive = case_naive(&c, &magnitude);
            for (int which = first; which <= last; which++) {
                add_errors(&c, which, &got, &expected, &naive, &e[which]);
                if (draw == DRAWS - 1)
                    expect_small(&c, which, &e[which], pass == HEED_BACKWARD ? 2 : 1);
            }
            case_free(&c);
        }
    }
}

#define DENSE_SHAPE                                                                                                    \
    (case_shape) { .Hq = 2, .Sq = 160, .D = 64 }
#define LONG_SHAPE                                                                                                     \
    (case_shape) { .Hq = 2, .Hk = 1, .Sq = 24, .Sk = 1100, .D = 80, .Dv = 48 }

TEST(o_is_as_accurate_as_the_naive_computation) { expect_accurate(HEED_FORWARD, DENSE_SHAPE, 0, 1); }

TEST(causal_o_is_as_accurate_as_the_naive_computation) { expect_accurate(HEED_FORWARD, DENSE_SHAPE, 1, 1); }

TEST(o_of_sharp_rows_is_as_accurate_as_the_naive_computation) { expect_accurate(HEED_FORWARD, DENSE_SHAPE, 0, 5); }

TEST(o_of_flat_rows_is_as_accurate_as_the_naive_computation) { expect_accurate(HEED_FORWARD, DENSE_SHAPE, 0, 0.05); }

TEST(o_over_many_keys_is_as_accurate_as_the_naive_computation) { expect_accurate(HEED_FORWARD, LONG_SHAPE, 0, 1); }

/* src/cpu/near.h: weights that are not relative to the largest, of all rows and of some. */
#define NEAR_SHAPE                                                                                                     \
    (case_shape) { .Sq = 66, .Sk = 516, .D = 64 }

TEST(o_of_rows_near_their_keys_is_as_accurate_as_the_naive_computation)
{
    expect_accurate(HEED_FORWARD, NEAR_SHAPE, 0, 1);
}

TEST(o_beside_rows_near_their_keys_is_as_accurate_as_the_naive_computation)
{
    expect_accurate(HEED_FORWARD, NEAR_SHAPE, 0, 2.8);
}

TEST(gradients_are_within_twice_the_error_of_naive_ones) { expect_accurate(HEED_BACKWARD, DENSE_SHAPE, 0, 1); }

TEST(causal_gradients_are_within_twice_the_error_of_naive_ones) { expect_accurate(HEED_BACKWARD, DENSE_SHAPE, 1, 1); }

TEST(gradients_over_many_keys_are_within_twice_the_error_of_naive_ones)
{
    expect_accurate(HEED_BACKWARD, LONG_SHAPE, 0, 1);
}

/* heed.h: "o ... q's dtype, or fp32": an fp32 o of 16-bit inputs is not a rounded one. */
TEST(an_fp32_o_has_more_than_16_bits)
{
    for_each_kernel(HEED_FORWARD, kernel) {
        test_case c = case_new(&kernel, (case_shape){ .Sq = 40, .D = 32, .fp32_results = 1 });
        case_forward(&c);
        int more = 0;
        for (int64_t i = 0; i < 40 && c.a.o.dtype == HEED_F32; i++) {
            float x = (float)get(&c.a.o, 0, 0, i, 0);
            more += heed_bf16_to_f32(heed_f32_to_bf16(x)) != x && heed_f16_to_f32(heed_f32_to_f16(x)) != x;
        }
        assert_true(more >= 36 || c.a.o.dtype == HEED_F64);
        case_free(&c);
    }
}

/* heed.h: "fp32 inputs are multiplied with fp32 accuracy": 1 + 2^-20 is no number of tf32 or bf16. */
TEST(fp32_means_fp32)
{
    for_each_kernel(HEED_FORWARD, kernel) {
        if (kernel.dtype != HEED_F32)
            continue;
        test_case c = case_new(&kernel, (case_shape){ .Sq = 1, .Sk = 2, .D = 1 });
        c.a.scale = 1;
        set(&c.a.q, 0, 0, 0, 0, 1024);
        set(&c.a.k, 0, 0, 0, 0, 1);
        set(&c.a.k, 0, 0, 1, 0, 1 + 0x1p-10 + 0x1p-20);
        set(&c.a.v, 0, 0, 0, 0, 0);
        set(&c.a.v, 0, 0, 1, 0, 1 + 0x1p-20);
        case_forward(&c);
        double P = 1 / (1 + exp(-1 - 0x1p-10));
        assert_true(fabs(get(&c.a.o, 0, 0, 0, 0) - P * (1 + 0x1p-20)) < 2e-7);
        case_free(&c);
    }
}

/* The same of gradients: weights down to 1e-26 have as many bits as those of 1. */
TEST(keys_of_small_weight_have_exact_gradients)
{
    enum { KEYS = 61 };
    for_each_kernel(HEED_BACKWARD, kernel) {
        if (kernel.dtype != HEED_F32)
            continue;
        test_case c = case_new(&kernel, (case_shape){ .Sq = 70, .Sk = KEYS, .D = 8 });
        c.a.scale = 1;
        for (int64_t i = 0; i < 70; i++)
            set(&c.a.q, 0, 0, i, 0, 1);
        for (int64_t j = 0; j < KEYS; j++)
            for (int64_t d = 0; d < 8; d++)
                set(&c.a.k, 0, 0, j, d, d ? 0 : -(double)j); /* P is exp(-j) over their sum */
        case_check(&c);
        case_free(&c);
    }
}

/* heed.h: HEED_TF32, "may be multiplied in tf32", which has 11 bits: more may be lost, but not range. */
TEST(tf32_has_eleven_bits_and_the_range_of_fp32)
{
    for_each_kernel(HEED_BACKWARD, kernel) {
        if (kernel.dtype != HEED_F32)
            continue;
        for (int large = 0; large < 2; large++) {
            test_case c = case_new(&kernel, DENSE_SHAPE);
            c.x.precision = HEED_TF32;
            fill_normal(&c.a.v, large ? 1e15 : 1e-15);
            case_forward(&c);
            case_backward(&c);
            results got = case_results(&c), expected = case_reference(&c);
            const int which[] = { OUT_O, OUT_DQ, OUT_DK, OUT_DV };
            for (int n = 0; n < COUNT(which); n++) {
                const int64_t count = elements(output_of(&c, which[n]));
                double sum = 0, size = 0;
                measure(got.at[which[n]], expected.at[which[n]], count, &sum);
                for (int64_t i = 0; i < count; i++)
                    size += expected.at[which[n]][i] * expected.at[which[n]][i];
                if (!(sum <= size * 0x1p-20))
                    fail_msg("output %d: the RMS error is %.1e of the result; %s", which[n], sqrt(sum / size),
                             case_text(&c));
            }
            case_free(&c);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(o_is_as_accurate_as_the_naive_computation),
        cmocka_unit_test(causal_o_is_as_accurate_as_the_naive_computation),
        cmocka_unit_test(o_of_sharp_rows_is_as_accurate_as_the_naive_computation),
        cmocka_unit_test(o_of_flat_rows_is_as_accurate_as_the_naive_computation),
        cmocka_unit_test(o_over_many_keys_is_as_accurate_as_the_naive_computation),
        cmocka_unit_test(o_of_rows_near_their_keys_is_as_accurate_as_the_naive_computation),
        cmocka_unit_test(o_beside_rows_near_their_keys_is_as_accurate_as_the_naive_computation),
        cmocka_unit_test(gradients_are_within_twice_the_error_of_naive_ones),
        cmocka_unit_test(causal_gradients_are_within_twice_the_error_of_naive_ones),
        cmocka_unit_test(gradients_over_many_keys_are_within_twice_the_error_of_naive_ones),
        cmocka_unit_test(an_fp32_o_has_more_than_16_bits),
        cmocka_unit_test(fp32_means_fp32),
        cmocka_unit_test(keys_of_small_weight_have_exact_gradients),
        cmocka_unit_test(tf32_has_eleven_bits_and_the_range_of_fp32),
    };
    return RUN_TESTS(tests);
}
