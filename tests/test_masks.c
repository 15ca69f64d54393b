/* heed.h: "Key j is visible to row i when all of these agree: the band (causal, window), the key stride, the mask, the
 * lengths", and what is added to the scores. expect_close() compares with the reference, and its tolerance comes from
 * naive.c, which decides visibility on its own. */
#include "harness.h"

static const case_shape shape = { .B = 2, .Hq = 2, .Hk = 1, .Sq = 37, .Sk = 53, .D = 16 };
static const case_shape tall = { .B = 1, .Hq = 2, .Sq = 70, .Sk = 33, .D = 16 };
static const case_shape large = { .Sq = 150, .Sk = 300, .D = 8 }; /* several tiles of a kernel in both directions */

static void check_band(int causal, int windowed, int64_t left, int64_t right, int64_t key_stride)
{
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < 6; n++) {
            test_case c = case_new(&kernel, n % 3 == 0 ? shape : n % 3 == 1 ? tall : large);
            c.a.causal = causal;
            c.a.windowed = windowed;
            c.a.window_left = left, c.a.window_right = right;
            c.a.key_stride = key_stride;
            c.a.align = n < 3 ? HEED_ALIGN_TOP_LEFT : HEED_ALIGN_BOTTOM_RIGHT;
            case_check(&c);
            case_free(&c);
        }
}

TEST(causal_works_with_both_alignments) { check_band(1, 0, 0, 0, 0); }

TEST(a_window_works_on_both_sides) { check_band(0, 1, 7, 5, 0); }

TEST(a_window_may_be_open_to_the_left) { check_band(0, 1, -1, 3, 0); }

TEST(a_window_may_be_open_to_the_right) { check_band(0, 1, 4, -1, 0); }

TEST(a_window_may_be_one_key_wide) { check_band(0, 1, 0, 0, 0); }

TEST(causal_and_a_window_hold_both) { check_band(1, 1, 9, 9, 0); }

TEST(a_window_composes_with_a_key_stride) { check_band(1, 1, 11, 0, 3); }

TEST(key_strides_beyond_the_keys_leave_key_0) { check_band(0, 0, 0, 0, 1000); }

TEST(positions_may_start_anywhere_and_step)
{
    static const int64_t at[][4] = {
        { 5, 0, 1, 1 }, { 0, 7, 1, 1 }, { 3, 1, 4, 4 }, { 100, 2, 1, 3 }, { -9, -20, 2, 1 }
    };
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < COUNT(at) * 2; n++) {
            test_case c = case_new(&kernel, shape);
            c.a.align = HEED_ALIGN_POSITION;
            c.a.query_position = at[n / 2][0], c.a.key_position = at[n / 2][1];
            c.a.query_step = at[n / 2][2], c.a.key_step = at[n / 2][3];
            c.a.causal = 1;
            c.a.key_stride = n % 2 ? 3 : 0;
            case_alibi(&c, 2);
            case_check(&c);
            case_free(&c);
        }
}

/* So many tiles of keys that a kernel may take them in groups; queries at the end, or as far apart as to meet them all. */
TEST(causal_works_over_many_keys)
{
    static const case_shape many = { .B = 1, .Hq = 2, .Hk = 1, .Sq = 300, .Sk = 4200, .D = 8 };
    for_each_kernel(EITHER_PASS, kernel)
        for (int apart = 0; apart < 2; apart++) {
            test_case c = case_new(&kernel, many);
            c.a.causal = 1;
            if (apart)
                c.a.align = HEED_ALIGN_POSITION, c.a.query_step = 14;
            case_check(&c);
            case_free(&c);
        }
}

/* Whole tiles of keys that no query sees, between others that several see. */
TEST(queries_may_be_further_apart_than_a_tile_of_keys)
{
    static const case_shape far = { .B = 1, .Hq = 2, .Hk = 1, .Sq = 5, .Sk = 1300, .D = 16 };
    for_each_kernel(EITHER_PASS, kernel)
        for (int causal = 0; causal < 2; causal++) {
            test_case c = case_new(&kernel, far);
            c.a.align = HEED_ALIGN_POSITION, c.a.query_position = 10, c.a.query_step = 300;
            c.a.causal = causal, c.a.windowed = 1, c.a.window_left = 40, c.a.window_right = 9;
            case_check(&c);
            case_free(&c);
        }
}

/* Steps that are multiples of the stride hide no key, so that there are as many as without it. */
TEST(steps_may_lie_on_the_stride)
{
    static const int64_t keys[] = { 700, 9300 };
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < COUNT(keys); n++) {
            test_case c = case_new(&kernel, (case_shape){ .Sq = 16, .Sk = keys[n], .D = 16 });
            c.a.align = HEED_ALIGN_POSITION;
            c.a.query_step = 1, c.a.key_step = c.a.key_stride = 3, c.a.key_position = -27;
            case_check(&c);
            case_free(&c);
        }
}

/* heed.h: "key j is visible only if r_j % key_stride == 0": attention over every s-th key, and the others get no
 * gradient. */
TEST(a_key_stride_is_attention_to_sliced_keys)
{
    for_each_kernel(EITHER_PASS, kernel)
        for (int64_t stride = 2; stride <= 7; stride++) {
            test_case c = case_new(&kernel, shape), sliced = case_new(&kernel, shape);
            c.a.key_stride = stride;
            case_check(&c);
            sliced.a.q = c.a.q, sliced.g.d_o = c.g.d_o;
            sliced.a.k = slice(c.a.k, 2, 0, stride, (53 + stride - 1) / stride);
            sliced.a.v = slice(c.a.v, 2, 0, stride, (53 + stride - 1) / stride);
            sliced.g.d_k = slice(sliced.g.d_k, 2, 0, stride, (53 + stride - 1) / stride);
            sliced.g.d_v = slice(sliced.g.d_v, 2, 0, stride, (53 + stride - 1) / stride);
            case_check(&sliced);
            expect_same_bits(&c, "o", &c.a.o, &sliced.a.o);
            expect_same_bits(&c, "lse", &c.a.lse, &sliced.a.lse);
            if (kernel.backward) {
                expect_same_bits(&c, "d_q", &c.g.d_q, &sliced.g.d_q);
                heed_tensor d_k = slice(c.g.d_k, 2, 0, stride, (53 + stride - 1) / stride);
                expect_same_bits(&c, "d_k", &d_k, &sliced.g.d_k);
                assert_true(get(&c.g.d_k, 1, 0, 1, 5) == 0 && get(&c.g.d_v, 1, 0, stride + 1, 5) == 0);
            }
            case_free(&sliced);
            case_free(&c);
        }
}

/* heed.h: "Each dimension of mask and bias is that of [B, Hq, Sq, Sk] or 1 (broadcast)." */
TEST(masks_broadcast_in_every_dimension)
{
    for_each_kernel(EITHER_PASS, kernel)
        for (int full = 0; full < 16; full++) {
            test_case c = case_new(&kernel, shape);
            case_mask(&c, full & 1 ? 2 : 1, full & 2 ? 2 : 1, full & 4 ? 37 : 1, full & 8 ? 53 : 1, 0.6);
            c.a.causal = full % 3 == 0;
            case_check(&c);
            case_free(&c);
        }
}

/* Tiles that a mask hides wholly, or not at all, and bytes of 0 and 1 alone, as most masks have. */
TEST(masks_may_hide_whole_tiles_or_nothing)
{
    static const case_shape large = { .B = 1, .Hq = 2, .Hk = 1, .Sq = 200, .Sk = 400, .D = 16 };
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < 6; n++) {
            test_case c = case_new(&kernel, large);
            case_mask(&c, 1, n % 2 ? 2 : 1, 200, 400, 0.7);
            for (int64_t m = 0; m < elements(&c.a.mask); m++) {
                uint8_t *byte = (uint8_t *)c.a.mask.data + m;
                const int same = m / 400 % 200 / 67 == m % 400 / 134;
                *byte = n < 2 ? *byte != 0 : n < 4 ? (uint8_t)same : (uint8_t)(same || m % 400 < 128 + *byte % 2);
            }
            c.a.causal = n == 5;
            case_check(&c);
            case_free(&c);
        }
}

TEST(biases_broadcast_in_every_dimension_and_either_type)
{
    for_each_kernel(EITHER_PASS, kernel)
        for (int full = 0; full < 32; full++) {
            test_case c = case_new(&kernel, shape);
            case_bias(&c, full & 16 || kernel.dtype == HEED_F64 ? kernel.dtype : HEED_F32, full & 1 ? 2 : 1,
                      full & 2 ? 2 : 1, full & 4 ? 37 : 1, full & 8 ? 53 : 1);
            case_check(&c);
            case_free(&c);
        }
}

/* Kernels may begin with such a bias where others copy it first: rows that start at multiples of 16 bytes, of eight keys
 * each time, for scales that are powers of two and others. */
TEST(a_bias_of_aligned_rows_is_like_any_other)
{
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < 8; n++) {
            test_case c = case_new(&kernel, (case_shape){
                                                .B = 1, .Hq = 2, .Hk = 1, .Sq = 70, .Sk = 136, .D = n & 1 ? 128 : 64 });
            case_bias(&c, n & 2 || kernel.dtype == HEED_F64 ? kernel.dtype : HEED_F32, 1, 2, 70, 136);
            c.a.causal = n & 4 ? 1 : 0;
            for (int64_t m = 0; n & 4 && m < 70 * 136; m++)
                if (one_in(5))
                    set(&c.a.bias, 0, m % 2, m / 136, m % 136, -INFINITY);
            case_check(&c);
            case_free(&c);
        }
}

/* Rows that start at multiples of 16 bytes, which some kernels ask for: every dimension broadcast or not, mask and bias alone
 * and together, with a band and all else, over several tiles in both directions. The head sizes are those of different GPU
 * kernels; to a CPU's they are more of the same. */
TEST(masks_and_biases_of_aligned_rows_compose)
{
    static const int32_t rows[] = { 140, 77 }, keys[] = { 272, 100 };
    static const int64_t head_dims[] = { 128, 64, 80 };
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < 24; n++) {
            case_shape shape = { .B = 2, .Hq = 4, .Hk = 2, .Sq = 140, .Sk = 272, .D = head_dims[n / 3 % 3] };
            if (kernel.backend != HEED_CUDA)
                shape.D /= 4;
            if (n % 4 == 1)
                shape.form = n % 8 == 1 ? PADDED : RAGGED, shape.rows_of = rows, shape.keys_of = keys;
            test_case c = case_new(&kernel, shape);
            const int64_t B = n & 1 ? 2 : 1, H = n & 2 ? 4 : 1, Sq = n & 4 ? 140 : 1;
            if (n % 3 != 1)
                case_bias(&c, n & 8 || kernel.dtype == HEED_F64 ? kernel.dtype : HEED_F32, B, H, Sq, 272);
            if (n % 3 != 0)
                case_mask(&c, n & 8 ? 2 : 1, n & 4 ? 4 : 1, n & 2 ? 140 : 1, 272, n & 1 ? 0.5 : 0.02);
            c.a.causal = n % 5 == 1;
            if (n % 5 == 2)
                c.a.windowed = 1, c.a.window_left = 37, c.a.window_right = 50;
            if (n % 7 == 2)
                case_alibi(&c, 2);
            if (n % 7 == 3)
                case_sink(&c);
            case_check(&c);
            case_free(&c);
        }
}

/* Kernels may take a row's maximum from the first keys that they meet and leave it alone: what follows may be far larger. */
TEST(biases_may_rise_or_fall_along_the_keys)
{
    static const double by[] = { 0.2, 3, 1e4, 1e8, -0.2, -3, -1e4, -1e8 };
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < COUNT(by) * 2; n++) {
            test_case c = case_new(&kernel, (case_shape){ .Hq = 2, .Sq = 70, .Sk = 272, .D = n & 1 ? 80 : 64 });
            case_bias(&c, kernel.dtype == HEED_F64 ? HEED_F64 : HEED_F32, 1, 2, n & 2 ? 70 : 1, 272);
            for (int64_t m = 0; m < elements(&c.a.bias); m++) {
                const double step = by[n / 2], at = (double)(m % 272);
                /* as slopes, or, as padding is written, of the last keys alone */
                heed_store(c.a.bias.data, c.a.bias.dtype, m,
                           fabs(step) < 1e3           ? step * at
                           : (step > 0) == (at < 100) ? -fabs(step)
                                                      : 0);
            }
            case_check(&c);
            case_free(&c);
        }
}

/* heed.h: bias, "-inf hides the key as a mask does"; for a whole row too. */
TEST(a_bias_of_minus_infinity_hides_the_key)
{
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, shape);
        case_bias(&c, kernel.dtype, 1, 2, 37, 53);
        for (int64_t n = 0; n < 37 * 53; n++)
            if (n / 53 == 5 || one_in(3))
                set(&c.a.bias, 0, n % 2, n / 53, n % 53, -INFINITY);
        fill_row(&c.a.bias, 0, 1, 36, -INFINITY);
        case_check(&c);
        assert_true(get(&c.a.lse, 0, 1, 36, 0) == -INFINITY && get(&c.a.o, 1, 1, 36, 3) == 0);
        case_free(&c);
    }
}

TEST(slopes_may_differ_by_batch_and_head)
{
    for_each_kernel(EITHER_PASS, kernel)
        for (int64_t n = 0; n < 4; n++) {
            test_case c = case_new(&kernel, n & 1 ? tall : shape);
            case_alibi(&c, n & 1 ? 1 : 2);
            c.a.causal = n >= 2;
            c.a.align = (heed_align)(n & 1);
            case_check(&c);
            case_free(&c);
        }
}

/* Of positions the difference counts, also where they are beyond what a double tells apart. */
TEST(slopes_are_exact_at_far_positions)
{
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < 2; n++) {
            test_case c = case_new(&kernel, shape);
            case_alibi(&c, 1);
            c.a.align = HEED_ALIGN_POSITION;
            c.a.key_position = (n ? -1 : 1) * ((int64_t)1 << 60);
            c.a.query_position = c.a.key_position + 21;
            c.a.causal = n;
            case_check(&c);
            case_free(&c);
        }
}

TEST(softcap_bounds_the_scores)
{
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < 3; n++) {
            test_case c = case_new(&kernel, shape);
            c.a.softcap = (float[]){ 0.5f, 3, 50 }[n];
            c.a.scale = 2;
            c.a.causal = n == 1;
            case_check(&c);
            case_free(&c);
        }
}

TEST(a_softcap_may_be_tiny)
{
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < 2; n++) {
            test_case c = case_new(&kernel, shape);
            c.a.softcap = (float[]){ 0x1p-149f, 0x1p-120f }[n];
            c.a.scale = 2;
            fill_row(&c.a.q, 0, 0, 3, 0); /* its products are 0, whose share of the softcap is no NaN */
            case_check(&c);
            case_free(&c);
        }
}

TEST(a_sink_takes_its_share)
{
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < 3; n++) {
            test_case c = case_new(&kernel, shape);
            case_sink(&c);
            set(&c.a.sink, 0, 1, 0, 0, (double[]){ 30, -30, -INFINITY }[n]);
            c.a.causal = n == 1;
            case_check(&c);
            case_free(&c);
        }
}

/* heed.h: "A row that sees no key has o = 0 and lse = -inf, sink or not, and all its gradients are 0." */
TEST(rows_that_see_no_key_are_zero)
{
    for_each_kernel(EITHER_PASS, kernel)
        for (int with_sink = 0; with_sink < 2; with_sink++) {
            test_case c = case_new(&kernel, tall); /* causal, bottom right: rows 0 to 36 stand before key 0 */
            c.a.causal = 1;
            if (with_sink)
                case_sink(&c);
            case_check(&c);
            for (int64_t i = 0; i < 37; i++) {
                assert_true(get(&c.a.o, 0, 1, i, 15) == 0 && get(&c.a.lse, 0, 1, i, 0) == -INFINITY);
                assert_true(!kernel.backward || get(&c.g.d_q, 0, 1, i, 15) == 0);
            }
            assert_true(isfinite(get(&c.a.lse, 0, 1, 37, 0)));
            case_free(&c);
        }
}

TEST(a_mask_that_hides_everything_gives_zeros)
{
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, shape);
        case_mask(&c, 1, 1, 1, 1, 0);
        case_sink(&c);
        case_check(&c);
        assert_true(get(&c.a.o, 1, 1, 36, 15) == 0 && get(&c.a.lse, 1, 1, 36, 0) == -INFINITY);
        assert_true(!kernel.backward || (get(&c.g.d_v, 1, 0, 52, 15) == 0 && get(&c.g.d_sink, 0, 1, 0, 0) == 0));
        case_free(&c);
    }
}

/* style: later keys may change as they like, the bits of a causal row stay. */
static void expect_no_later_keys(const heed_kernel_info *kernel, int64_t rows, int64_t later)
{
    test_case c = case_new(kernel, (case_shape){ .Hq = 2, .Sq = rows, .D = 64 });
    c.a.causal = 1;
    case_forward(&c);
    heed_tensor before = c.a.o;
    c.a.o = case_tensor(&c, kernel->dtype, before.shape, NULL);
    /* docs/numerics.md: where fp32 is split, later keys share the power of two of their tile. */
    const double size = strstr(kernel->name, "split_") ? 4 : 1e4;
    for (int64_t j = later; j < rows; j++)
        fill_row(&c.a.k, 0, 1, j, size), fill_row(&c.a.v, 0, 1, j, -size);
    case_forward(&c);
    heed_tensor x = slice(before, 2, 0, 1, later), y = slice(c.a.o, 2, 0, 1, later);
    expect_same_bits(&c, "rows before the later keys", &x, &y);
    case_free(&c);
}

TEST(causal_rows_ignore_later_keys)
{
    for_each_kernel(HEED_FORWARD, kernel) {
        expect_no_later_keys(&kernel, 130, 77);
        if (kernel.backend == HEED_CPU)
            expect_no_later_keys(&kernel, 600, 577);
    }
}

/* src/cpu/near.h: the same of earlier keys that the row's window leaves out. */
TEST(windowed_rows_ignore_earlier_keys)
{
    for_each_kernel(HEED_FORWARD, kernel) {
        if (kernel.backend != HEED_CPU || strstr(kernel.name, "split_"))
            continue;
        test_case c = case_new(&kernel, (case_shape){ .Sq = 600, .D = 64 });
        c.a.windowed = 1, c.a.window_left = 200, c.a.window_right = 70;
        case_forward(&c);
        heed_tensor before = c.a.o;
        c.a.o = case_tensor(&c, kernel.dtype, before.shape, NULL);
        for (int64_t j = 0; j < 277; j++)
            fill_row(&c.a.k, 0, 0, j, 1e4), fill_row(&c.a.v, 0, 0, j, -1e4);
        case_forward(&c);
        heed_tensor x = slice(before, 2, 477, 1, 123), y = slice(c.a.o, 2, 477, 1, 123);
        expect_same_bits(&c, "rows after the earlier keys", &x, &y);
        case_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(causal_works_with_both_alignments),
        cmocka_unit_test(a_window_works_on_both_sides),
        cmocka_unit_test(a_window_may_be_open_to_the_left),
        cmocka_unit_test(a_window_may_be_open_to_the_right),
        cmocka_unit_test(a_window_may_be_one_key_wide),
        cmocka_unit_test(causal_and_a_window_hold_both),
        cmocka_unit_test(a_window_composes_with_a_key_stride),
        cmocka_unit_test(key_strides_beyond_the_keys_leave_key_0),
        cmocka_unit_test(positions_may_start_anywhere_and_step),
        cmocka_unit_test(causal_works_over_many_keys),
        cmocka_unit_test(queries_may_be_further_apart_than_a_tile_of_keys),
        cmocka_unit_test(steps_may_lie_on_the_stride),
        cmocka_unit_test(a_key_stride_is_attention_to_sliced_keys),
        cmocka_unit_test(masks_broadcast_in_every_dimension),
        cmocka_unit_test(masks_may_hide_whole_tiles_or_nothing),
        cmocka_unit_test(biases_broadcast_in_every_dimension_and_either_type),
        cmocka_unit_test(a_bias_of_aligned_rows_is_like_any_other),
        cmocka_unit_test(masks_and_biases_of_aligned_rows_compose),
        cmocka_unit_test(biases_may_rise_or_fall_along_the_keys),
        cmocka_unit_test(a_bias_of_minus_infinity_hides_the_key),
        cmocka_unit_test(slopes_may_differ_by_batch_and_head),
        cmocka_unit_test(slopes_are_exact_at_far_positions),
        cmocka_unit_test(softcap_bounds_the_scores),
        cmocka_unit_test(a_softcap_may_be_tiny),
        cmocka_unit_test(a_sink_takes_its_share),
        cmocka_unit_test(rows_that_see_no_key_are_zero),
        cmocka_unit_test(a_mask_that_hides_everything_gives_zeros),
        cmocka_unit_test(causal_rows_ignore_later_keys),
        cmocka_unit_test(windowed_rows_ignore_earlier_keys),
    };
    return RUN_TESTS(tests);
}
