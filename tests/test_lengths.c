/* heed.h: "Sequences of different length". In every case here the padding holds NaN. */
#include "harness.h"

static const int32_t rows[] = { 17, 0, 40, 1 }, keys[] = { 33, 12, 0, 50 };

static void check_form(case_form form, int with_rows, int with_keys, void (*change)(test_case *))
{
    for_each_kernel(EITHER_PASS, kernel) {
        if (form == PAGED && kernel.backward)
            continue;
        test_case c = case_new(&kernel, (case_shape){ .B = 4,
                                                      .Hq = 4,
                                                      .Hk = 2,
                                                      .Sq = 40,
                                                      .Sk = 50,
                                                      .D = 20,
                                                      .Dv = 12,
                                                      .form = form,
                                                      .page = 8,
                                                      .rows_of = with_rows ? rows : NULL,
                                                      .keys_of = with_keys ? keys : NULL });
        if (change)
            change(&c);
        case_check(&c);
        case_free(&c);
    }
}

static void causal(test_case *c) { c->a.causal = 1; }

static void causal_top_left(test_case *c)
{
    c->a.causal = 1;
    c->a.align = HEED_ALIGN_TOP_LEFT;
}

static void everything(test_case *c)
{
    c->a.windowed = 1;
    c->a.window_left = 20, c->a.window_right = 5;
    c->a.key_stride = 2;
    case_bias(c, HEED_F64 == c->kernel.dtype ? HEED_F64 : HEED_F32, 4, 1, case_rows(c), case_keys(c));
    case_mask(c, 4, 4, 1, case_keys(c), 0.8);
    case_alibi(c, 1);
    case_sink(c);
    c->a.dropout = 0.2f;
}

/* heed.h: "padded: lengths_q[b] rows and lengths_k[b] keys of sequence b count, the rest is padding: never read, its
 * output and gradients are 0, its lse is -inf". */
TEST(padded_rows_and_keys_never_matter) { check_form(PADDED, 1, 1, NULL); }

TEST(only_keys_may_be_padded) { check_form(PADDED, 0, 1, NULL); }

TEST(only_rows_may_be_padded) { check_form(PADDED, 1, 0, NULL); }

TEST(causal_counts_from_the_end_of_each_padded_sequence) { check_form(PADDED, 1, 1, causal); }

TEST(causal_top_left_counts_from_the_start_of_each_padded_sequence) { check_form(PADDED, 1, 1, causal_top_left); }

TEST(padding_goes_with_everything_else) { check_form(PADDED, 1, 1, everything); }

/* Kernels may take few rows over many keys another way than over few: each sequence its own, whatever the batch holds. */
TEST(few_rows_meet_few_keys_beside_many)
{
    static const int32_t few[] = { 8, 5, 3, 8 }, some[] = { 300, 100, 0, 129 };
    static const case_form forms[] = { PADDED, RAGGED, PAGED };
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < 4; n++) {
            if (n < 3 && forms[n] == PAGED && kernel.backward)
                continue;
            case_shape s = { .B = 4, .Hq = 4, .Hk = 1, .Sq = 8, .Sk = 300, .D = 32, .page = 16 };
            if (n < 3)
                s.form = forms[n], s.rows_of = few, s.keys_of = some;
            test_case c = case_new(&kernel, s);
            c.a.causal = n < 3;
            if (n == 3) /* 75 of 300 keys */
                c.a.align = HEED_ALIGN_POSITION, c.a.query_step = c.a.key_step = 1, c.a.key_stride = 4;
            case_check(&c);
            case_free(&c);
        }
}

/* heed.h: "ragged: ... sequences lie end to end in one". */
TEST(ragged_sequences_do_not_see_each_other) { check_form(RAGGED, 1, 1, NULL); }

TEST(causal_counts_from_the_end_of_each_ragged_sequence) { check_form(RAGGED, 1, 1, causal); }

TEST(ragged_sequences_go_with_everything_else) { check_form(RAGGED, 1, 1, everything); }

/* heed.h: "key j of sequence b lies in row j % page size of page block_table[...]". */
TEST(pages_are_found_through_the_table) { check_form(PAGED, 0, 1, NULL); }

TEST(causal_counts_from_the_end_of_each_paged_sequence) { check_form(PAGED, 1, 1, causal); }

TEST(pages_go_with_everything_else) { check_form(PAGED, 1, 1, everything); }

TEST(pages_may_have_any_size)
{
    static const int64_t sizes[] = { 1, 3, 16, 37, 64, 256 };
    for_each_kernel(HEED_FORWARD, kernel)
        for (int n = 0; n < COUNT(sizes); n++) {
            test_case c = case_new(
                &kernel,
                (case_shape){
                    .B = 4, .Hq = 2, .Sq = 2, .Sk = 50, .D = 16, .form = PAGED, .page = sizes[n], .keys_of = keys });
            c.a.causal = 1;
            c.a.key_stride = n % 2 ? 3 : 0;
            case_check(&c);
            case_free(&c);
        }
}

/* heed.h: "A ragged q goes with a ragged k or a paged k." */
TEST(a_ragged_q_goes_with_pages)
{
    for_each_kernel(HEED_FORWARD, kernel) {
        test_case ragged = case_new(&kernel,
                                    (case_shape){
                                        .B = 4, .Hq = 2, .D = 16, .form = RAGGED, .rows_of = rows, .keys_of = keys });
        test_case c = case_new(&kernel,
                               (case_shape){ .B = 4, .Hq = 2, .Sk = 50, .D = 16, .form = PAGED, .keys_of = keys });
        c.a.q = ragged.a.q, c.a.o = ragged.a.o, c.a.lse = ragged.a.lse;
        c.a.offsets_q = ragged.a.offsets_q;
        c.a.sequences = 4, c.a.max_rows = 40;
        c.a.causal = 1;
        case_check(&c);
        case_free(&ragged);
        case_free(&c);
    }
}

/* heed.h: "lengths_k may shorten a ragged k". The keys cut off are padding: NaN here, and their gradient is 0. */
TEST(lengths_may_shorten_ragged_keys)
{
    static const int32_t shorter[] = { 20, 12, 0, 7 };
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel,
                               (case_shape){
                                   .B = 4, .Hq = 2, .D = 16, .form = RAGGED, .rows_of = rows, .keys_of = keys });
        c.a.lengths_k = case_int32s(&c, shorter, 4);
        for (int64_t b = 0; b < 4; b++)
            for (int64_t j = shorter[b]; j < keys[b]; j++)
                for (int64_t h = 0; h < 2; h++)
                    fill_row(&c.a.k, 0, h, c.a.offsets_k[b] + j, NAN),
                        fill_row(&c.a.v, 0, h, c.a.offsets_k[b] + j, NAN);
        c.a.causal = 1;
        case_check(&c);
        assert_true(!kernel.backward || get(&c.g.d_v, 0, 1, 25, 3) == 0);
        case_free(&c);
    }
}

/* heed.h: "Rows outside of all sequences are padding, too." Here those of the first and the last member, which hold NaN. */
TEST(rows_of_no_sequence_are_padding)
{
    static const int32_t all_rows[] = { 5, 17, 0, 9 }, all_keys[] = { 6, 20, 3, 4 };
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(
            &kernel,
            (case_shape){ .B = 4, .Hq = 2, .D = 16, .form = RAGGED, .rows_of = all_rows, .keys_of = all_keys });
        c.a.offsets_q++, c.a.offsets_k++, c.a.sequences = 2;
        const int32_t *rows_at = c.a.offsets_q, *keys_at = c.a.offsets_k;
        for (int64_t h = 0; h < 2; h++) {
            for (int64_t i = 0; i < c.a.q.shape[2]; i++)
                if (i < rows_at[0] || i >= rows_at[2])
                    fill_row(&c.a.q, 0, h, i, NAN), fill_row(&c.g.d_o, 0, h, i, NAN);
            for (int64_t j = 0; j < c.a.k.shape[2]; j++)
                if (j < keys_at[0] || j >= keys_at[2])
                    fill_row(&c.a.k, 0, h, j, NAN), fill_row(&c.a.v, 0, h, j, NAN);
        }
        case_check(&c);
        for (int64_t h = 0; h < 2; h++) {
            for (int64_t i = 0; i < c.a.q.shape[2]; i++) {
                const int is_in = i >= rows_at[0] && i < rows_at[2];
                assert_true(is_in || get(&c.a.lse, 0, h, i, 0) == -INFINITY);
                for (int64_t d = 0; d < 16; d++) {
                    assert_true(is_in || get(&c.a.o, 0, h, i, d) == 0);
                    assert_true(is_in || !kernel.backward || get(&c.g.d_q, 0, h, i, d) == 0);
                }
            }
            for (int64_t j = 0; kernel.backward && j < c.a.k.shape[2]; j++)
                for (int64_t d = 0; d < 16 && (j < keys_at[0] || j >= keys_at[2]); d++)
                    assert_true(get(&c.g.d_k, 0, h, j, d) == 0 && get(&c.g.d_v, 0, h, j, d) == 0);
        }
        case_free(&c);
    }
}

/* A ragged k with a dense q: one step of decoding over sequences that lie end to end. */
TEST(only_keys_may_be_ragged)
{
    for_each_kernel(EITHER_PASS, kernel) {
        test_case ragged = case_new(&kernel, (case_shape){ .B = 4, .Hq = 2, .D = 16, .form = RAGGED, .keys_of = keys });
        test_case c = case_new(&kernel, (case_shape){ .B = 4, .Hq = 2, .Sq = 3, .D = 16 });
        c.a.k = ragged.a.k, c.a.v = ragged.a.v, c.g.d_k = ragged.g.d_k, c.g.d_v = ragged.g.d_v;
        c.a.offsets_k = ragged.a.offsets_k;
        c.a.sequences = 4, c.a.max_keys = 50;
        c.a.causal = 1;
        case_check(&c);
        case_free(&ragged);
        case_free(&c);
    }
}

/* The three forms are three ways to write down the same thing: the same bits. */
TEST(padded_and_ragged_agree_bit_for_bit)
{
    for_each_kernel(HEED_FORWARD, kernel) {
        test_case padded = case_new(
            &kernel,
            (case_shape){ .B = 4, .Sq = 40, .Sk = 50, .D = 16, .form = PADDED, .rows_of = rows, .keys_of = keys });
        test_case ragged = case_new(&kernel,
                                    (case_shape){ .B = 4, .D = 16, .form = RAGGED, .rows_of = rows, .keys_of = keys });
        for (int64_t b = 0; b < 4; b++)
            for (int64_t n = 0; n < 50 * 16; n++) {
                if (n / 16 < rows[b])
                    set(&ragged.a.q, 0, 0, ragged.a.offsets_q[b] + n / 16, n % 16,
                        get(&padded.a.q, b, 0, n / 16, n % 16));
                if (n / 16 < keys[b]) {
                    set(&ragged.a.k, 0, 0, ragged.a.offsets_k[b] + n / 16, n % 16,
                        get(&padded.a.k, b, 0, n / 16, n % 16));
                    set(&ragged.a.v, 0, 0, ragged.a.offsets_k[b] + n / 16, n % 16,
                        get(&padded.a.v, b, 0, n / 16, n % 16));
                }
            }
        padded.a.causal = ragged.a.causal = 1;
        case_forward(&padded);
        case_forward(&ragged);
        for (int64_t b = 0; b < 4; b++) {
            heed_tensor x = slice(slice(padded.a.o, 0, b, 1, 1), 2, 0, 1, rows[b]);
            heed_tensor y = slice(ragged.a.o, 2, ragged.a.offsets_q[b], 1, rows[b]);
            expect_same_bits(&padded, "o", &x, &y);
        }
        case_free(&ragged);
        case_free(&padded);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(padded_rows_and_keys_never_matter),
        cmocka_unit_test(only_keys_may_be_padded),
        cmocka_unit_test(only_rows_may_be_padded),
        cmocka_unit_test(causal_counts_from_the_end_of_each_padded_sequence),
        cmocka_unit_test(causal_top_left_counts_from_the_start_of_each_padded_sequence),
        cmocka_unit_test(padding_goes_with_everything_else),
        cmocka_unit_test(few_rows_meet_few_keys_beside_many),
        cmocka_unit_test(ragged_sequences_do_not_see_each_other),
        cmocka_unit_test(causal_counts_from_the_end_of_each_ragged_sequence),
        cmocka_unit_test(ragged_sequences_go_with_everything_else),
        cmocka_unit_test(pages_are_found_through_the_table),
        cmocka_unit_test(causal_counts_from_the_end_of_each_paged_sequence),
        cmocka_unit_test(pages_go_with_everything_else),
        cmocka_unit_test(pages_may_have_any_size),
        cmocka_unit_test(a_ragged_q_goes_with_pages),
        cmocka_unit_test(lengths_may_shorten_ragged_keys),
        cmocka_unit_test(rows_of_no_sequence_are_padding),
        cmocka_unit_test(only_keys_may_be_ragged),
        cmocka_unit_test(padded_and_ragged_agree_bit_for_bit),
    };
    return RUN_TESTS(tests);
}
