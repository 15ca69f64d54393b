/* heed.h: "Dropout of P after normalisation, scaled by 1/(1-p) ... The bits depend on seed, batch, head, p_i and r_j
 * alone: they are the same on every backend, in the backward, and for any cut into parts." */
#include "harness.h"

#include <float.h>

static const case_shape shape = { .B = 2, .Hq = 4, .Hk = 2, .Sq = 40, .Sk = 67, .D = 16 };

/* With q = 0 every P is 1/Sk, and with v = 1 the result counts the pairs that were kept. */
static double mean_kept(const heed_kernel_info *kernel, float dropout, uint64_t seed)
{
    test_case c = case_new(kernel, (case_shape){ .B = 2, .Hq = 2, .Sq = 64, .Sk = 256, .D = 1, .fp32_results = 1 });
    fill_bytes(&c.a.q, 0);
    for (int64_t n = 0; n < 2 * 2 * 256; n++)
        set(&c.a.v, n / 512, n / 256 % 2, n % 256, 0, 1);
    c.a.dropout = dropout;
    c.a.dropout_seed = seed;
    case_forward(&c);
    double sum = 0;
    for (int64_t n = 0; n < 2 * 2 * 64; n++)
        sum += get(&c.a.o, n / 128, n / 64 % 2, n % 64, 0);
    case_free(&c);
    return sum / (2 * 2 * 64);
}

TEST(the_expected_result_is_that_without_dropout)
{
    for_each_kernel(HEED_FORWARD, kernel)
        for (int n = 1; n < 10; n++) {
            double p = n / 10.0, deviation = sqrt(p / (1 - p) / (2 * 2 * 64 * 256.0));
            assert_true(fabs(mean_kept(&kernel, (float)p, (uint64_t)n) - 1) < 5 * deviation + 1e-3);
        }
}

TEST(every_kernel_drops_the_same_pairs)
{
    for_each_kernel(EITHER_PASS, kernel)
        for (uint64_t seed = 0; seed < 3; seed++) {
            test_case c = case_new(&kernel, shape);
            c.a.dropout = (float[]){ 0.5f, 0.1f, 0.97f }[seed];
            c.a.dropout_seed = seed * 0x123456789ABCDEFu;
            c.a.causal = seed == 1;
            c.a.key_stride = seed == 2 ? 2 : 0;
            case_check(&c);
            case_free(&c);
        }
}

/* Rows and keys of several tiles, shared heads and all that a kernel may have beside dropout. Keys do not begin where those of
 * one draw do, or are not neighbours, in every other. */
TEST(dropout_goes_with_all_else)
{
    static const case_shape shapes[] = {
        { .B = 2, .Hq = 4, .Hk = 2, .Sq = 150, .Sk = 272, .D = 64 },
        { .B = 1, .Hq = 2, .Sq = 210, .Sk = 336, .D = 120, .Dv = 96 },
    };
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < 8; n++) {
            const case_shape s = shapes[n % 2];
            test_case c = case_new(&kernel, s);
            c.a.dropout = (float[]){ 0.1f, 0.3f, 0.7f, 0.9f }[n / 2];
            c.a.dropout_seed = 0xFEDCBA9876543210u + (uint64_t)n;
            c.a.causal = n / 2 % 2;
            if (n / 4) {
                c.a.align = HEED_ALIGN_POSITION;
                c.a.query_position = 130, c.a.key_position = n / 2 % 2 ? -8 : 5;
            } else if (n / 2)
                c.a.key_stride = 3;
            if (n < 2)
                case_mask(&c, s.B, 1, s.Sq, s.Sk, 0.7);
            else if (n < 4)
                case_alibi(&c, 1);
            else if (n < 6)
                case_bias(&c, kernel.dtype, 1, s.Hq, s.Sq, s.Sk);
            case_check(&c);
            case_free(&c);
        }
}

TEST(bits_follow_positions_even_negative_ones)
{
    for_each_kernel(EITHER_PASS, kernel)
        for (int64_t n = 0; n < 6; n++) { /* keys with a draw for several, and for each */
            test_case c = case_new(&kernel, shape);
            c.a.align = HEED_ALIGN_POSITION;
            c.a.query_position = -17 + 4 * n, c.a.key_position = 5 - 30 * n;
            c.a.query_step = 1 + n, c.a.key_step = 1 + 2 * n;
            c.a.dropout = 0.4f;
            case_check(&c);
            case_free(&c);
        }
}

/* heed.h: "taken to the nearest multiple of 2^-16". */
TEST(a_rate_below_2_to_the_minus_17_is_none)
{
    for_each_kernel(HEED_FORWARD, kernel) {
        test_case c = case_new(&kernel, shape);
        case_forward(&c);
        heed_tensor without = c.a.o;
        c.a.o = case_tensor(&c, kernel.dtype, without.shape, NULL);
        c.a.dropout = FLT_MIN;
        case_forward(&c);
        expect_same_bits(&c, "o", &without, &c.a.o);
        case_free(&c);
    }
}

/* heed.h: "dropout_seed_at: ... its value is added to dropout_seed when the work runs". */
TEST(the_seed_in_memory_is_added)
{
    for_each_kernel(HEED_FORWARD, kernel) {
        test_case c = case_new(&kernel, shape);
        uint64_t *seed_at = case_memory(&c, sizeof *seed_at, 0);
        *seed_at = 1000;
        c.a.dropout = 0.3f;
        c.a.dropout_seed = 1042;
        case_forward(&c);
        heed_tensor direct = c.a.o;
        c.a.o = case_tensor(&c, kernel.dtype, direct.shape, NULL);
        c.a.dropout_seed = 42;
        c.a.dropout_seed_at = seed_at;
        case_forward(&c);
        expect_same_bits(&c, "o", &direct, &c.a.o);
        if (kernel.dtype == HEED_F32)
            expect_close(&c, HEED_FORWARD);
        case_free(&c);
    }
}

/* Each of seed, batch, head, row and key changes the bits: about half of them at p = 1/2. */
TEST(neighbours_draw_different_bits)
{
    int same[5] = { 0 };
    for (int64_t n = 0; n < 4096; n++) {
        int64_t p = n / 64, r = n % 64;
        int kept = heed_keep(7, 32768, 1, 1, p, r);
        same[0] += kept == heed_keep(8, 32768, 1, 1, p, r);
        same[1] += kept == heed_keep(7, 32768, 2, 1, p, r);
        same[2] += kept == heed_keep(7, 32768, 1, 2, p, r);
        same[3] += kept == heed_keep(7, 32768, 1, 1, p + 1, r);
        same[4] += kept == heed_keep(7, 32768, 1, 1, p, r + 1);
    }
    for (int n = 0; n < 5; n++)
        assert_in_range(same[n], 2048 - 160, 2048 + 160); /* five standard deviations */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_expected_result_is_that_without_dropout),
        cmocka_unit_test(every_kernel_drops_the_same_pairs),
        cmocka_unit_test(dropout_goes_with_all_else),
        cmocka_unit_test(bits_follow_positions_even_negative_ones),
        cmocka_unit_test(a_rate_below_2_to_the_minus_17_is_none),
        cmocka_unit_test(the_seed_in_memory_is_added),
        cmocka_unit_test(neighbours_draw_different_bits),
    };
    return RUN_TESTS(tests);
}
