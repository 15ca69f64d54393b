/* heed.h: "q ... [B, Hq, Sq, D] ... Hq is a multiple of Hk ... D from 1 to 512 ... Dv from 1 to 512". */
#include "harness.h"

static void check_shape_on(const heed_kernel_info *kernel, case_shape shape)
{
    test_case c = case_new(kernel, shape);
    case_check(&c);
    case_free(&c);
}

/* Each of the four sizes takes every value from 1 to 70 once. */
TEST(every_size_from_1_to_70_works)
{
    for_each_kernel(EITHER_PASS, kernel)
        for (int64_t n = 1; n <= 70; n++)
            check_shape_on(&kernel, (case_shape){ .Sq = n, .Sk = n * 37 % 71, .D = n * 13 % 71, .Dv = n * 29 % 71 });
}

TEST(head_sizes_up_to_512_work)
{
    static const int64_t sizes[] = { 96, 127, 128, 129, 160, 192, 255, 256, 257, 384, 500, 511, 512 };
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < COUNT(sizes) && sizes[n] <= kernel.max_head_dim; n++)
            check_shape_on(&kernel, (case_shape){ .Hq = 2, .Sq = 9, .Sk = 19, .D = sizes[n] });
}

TEST(keys_and_values_may_differ_in_size)
{
    static const int64_t sizes[][2] = { { 1, 64 }, { 64, 1 }, { 192, 128 }, { 128, 192 }, { 64, 512 }, { 512, 64 } };
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < COUNT(sizes); n++)
            check_shape_on(&kernel, (case_shape){ .Sq = 21, .Sk = 11, .D = sizes[n][0], .Dv = sizes[n][1] });
}

TEST(query_heads_share_key_heads)
{
    static const int64_t heads[][2] = { { 1, 1 }, { 3, 3 }, { 7, 1 }, { 6, 2 }, { 6, 3 }, { 17, 1 } };
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < COUNT(heads); n++)
            check_shape_on(&kernel,
                           (case_shape){ .B = 2, .Hq = heads[n][0], .Hk = heads[n][1], .Sq = 18, .Sk = 23, .D = 16 });
}

TEST(sizes_around_the_tiles_of_a_kernel_work)
{
    static const int64_t sizes[] = { 63, 64, 65, 127, 128, 129, 255, 256, 257, 300 };
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < COUNT(sizes); n++) {
            check_shape_on(&kernel, (case_shape){ .Sq = sizes[n], .Sk = sizes[COUNT(sizes) - 1 - n], .D = 12 });
            check_shape_on(&kernel, (case_shape){ .Sq = 3, .Sk = sizes[n], .D = sizes[n] });
        }
}

/* Kernels of a GPU have tiles of their own for each head size, and go through several of them. */
TEST(sizes_around_the_tiles_of_each_head_size_work)
{
    static const int64_t head_dims[] = { 64, 96, 128, 192, 256 }, sizes[] = { 1, 63, 64, 65, 127, 129, 260 };
    for_each_kernel(HEED_FORWARD, kernel) {
        if (kernel.backend != HEED_CUDA)
            continue;
        for (int n = 0; n < COUNT(sizes) * COUNT(head_dims); n++) {
            const int64_t size = sizes[n / COUNT(head_dims)], D = head_dims[n % COUNT(head_dims)];
            if (D > kernel.max_head_dim)
                continue;
            test_case c = case_new(&kernel, (case_shape){ .Hq = 2, .Sq = size, .D = D });
            c.a.causal = n % 2;
            case_check(&c);
            case_free(&c);
        }
        check_shape_on(&kernel, (case_shape){ .Sq = 1000, .D = 64 });
    }
}

/* The Hopper forward has other shapes for many rows and keys. */
TEST(many_rows_meet_many_keys)
{
    for_each_kernel(HEED_FORWARD, kernel)
        for (int causal = 0; causal < 2; causal++) {
            if (!strstr(kernel.name, "_cuda_sm90_"))
                continue;
            test_case c = case_new(&kernel, causal ? (case_shape){ .Sq = 1550, .D = 104 }
                                                   : (case_shape){ .Sq = 1550, .Sk = 4100, .D = 8 });
            c.a.causal = causal;
            case_check(&c);
            case_free(&c);
        }
}

/* The Hopper backward takes many heads over the same keys in parts, where their rows are many. */
TEST(many_heads_over_one_meet_many_rows)
{
    for_each_kernel(HEED_BACKWARD, kernel)
        for (int n = 0; n < 3; n++) {
            static const case_shape shapes[] = { { .Hq = 32, .Hk = 1, .Sq = 1040, .Sk = 250, .D = 64 },
                                                 { .Hq = 20, .Hk = 1, .Sq = 1680, .Sk = 120, .D = 96 },
                                                 { .Hq = 20, .Hk = 1, .Sq = 1680, .Sk = 120, .D = 128 } };
            if (!strstr(kernel.name, "_cuda_sm90fused_"))
                continue;
            test_case c = case_new(&kernel, shapes[n]);
            c.a.causal = n > 0, c.a.align = HEED_ALIGN_BOTTOM_RIGHT;
            case_check(&c);
            case_free(&c);
        }
}

TEST(one_query_meets_a_long_cache)
{
    for_each_kernel(EITHER_PASS, kernel) {
        check_shape_on(&kernel, (case_shape){ .Hq = 4, .Hk = 1, .Sq = 1, .Sk = 2500, .D = 16 });
        check_shape_on(&kernel, (case_shape){ .B = 2, .Sq = 2, .Sk = 1025, .D = 32 });
    }
}

/* Kernels may take many keys in parts where there are few rows: with a band, a sink, and keys that end early. */
TEST(few_rows_meet_many_keys)
{
    static const case_shape few = { .B = 2, .Hq = 2, .Hk = 1, .Sq = 5, .Sk = 4100, .D = 40 };
    static const case_shape more = { .Sq = 63, .Sk = 4100, .D = 24 };
    for_each_kernel(EITHER_PASS, kernel)
        for (int kind = 0; kind < 4; kind++) {
            test_case c = case_new(&kernel, kind < 2 ? few : more);
            c.a.causal = kind > 0;
            c.a.align = HEED_ALIGN_BOTTOM_RIGHT;
            if (kind == 2)
                c.a.windowed = 1, c.a.window_left = 1500, c.a.window_right = 0;
            if (kind == 3)
                case_sink(&c);
            case_check(&c);
            case_free(&c);
        }
}

/* Where heads are many, a block on a GPU has several parts of the keys, or all of a head's. */
TEST(few_rows_of_many_heads_meet_many_keys)
{
    static const case_shape all = { .Hq = 560, .Hk = 280, .Sq = 1, .Sk = 300, .D = 16 },
                            some = { .Hq = 140, .Sq = 1, .Sk = 1100, .D = 24 };
    for_each_kernel(HEED_FORWARD, kernel)
        for (int kind = 0; kind < 4; kind++) {
            test_case c = case_new(&kernel, kind % 2 ? some : all);
            if (kind >= 2)
                c.a.windowed = 1, c.a.window_left = kind == 2 ? 20 : 400, c.a.window_right = -1;
            case_check(&c);
            case_free(&c);
        }
}

TEST(one_key_meets_many_queries)
{
    for_each_kernel(EITHER_PASS, kernel)
        check_shape_on(&kernel, (case_shape){ .Hq = 2, .Sq = 700, .Sk = 1, .D = 24 });
}

/* heed.h: "A row that sees no key has o = 0 and lse = -inf". Sizes of 0 are legal. */
TEST(without_keys_the_result_is_zero)
{
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, (case_shape){ .B = 2, .Sq = 3, .Sk = EMPTY, .D = 4 });
        c.a.k.data = c.a.v.data = c.g.d_k.data = c.g.d_v.data = NULL; /* legal where a tensor holds no element */
        case_check(&c);
        assert_true(get(&c.a.o, 1, 0, 2, 3) == 0 && get(&c.a.lse, 1, 0, 2, 0) == -INFINITY);
        assert_true(!kernel.backward || get(&c.g.d_q, 1, 0, 2, 3) == 0);
        case_free(&c);
    }
}

TEST(without_rows_the_gradients_of_keys_are_zero)
{
    for_each_kernel(EITHER_PASS, kernel) {
        test_case c = case_new(&kernel, (case_shape){ .B = 2, .Sq = EMPTY, .Sk = 3, .D = 4 });
        c.a.q.data = c.a.o.data = NULL;
        case_check(&c);
        assert_true(!kernel.backward || (get(&c.g.d_k, 1, 0, 2, 3) == 0 && get(&c.g.d_v, 1, 0, 2, 3) == 0));
        case_free(&c);
    }
}

TEST(an_empty_batch_is_no_error)
{
    for_each_kernel(EITHER_PASS, kernel)
        check_shape_on(&kernel, (case_shape){ .B = EMPTY, .Hq = 2, .Sq = 3, .D = 4 });
}

/* heed.h: "scale: 0 means 1/sqrt(D). For a scale of exactly zero leave it 0 and set zero_scale." */
TEST(the_scale_may_be_zero_or_negative)
{
    for_each_kernel(EITHER_PASS, kernel)
        for (int sign = -1; sign <= 0; sign++) {
            test_case c = case_new(&kernel, (case_shape){ .Sq = 20, .Sk = 33, .D = 8 });
            c.a.scale = 0.3f * (float)sign;
            c.a.zero_scale = sign == 0;
            case_check(&c);
            case_free(&c);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_size_from_1_to_70_works),
        cmocka_unit_test(head_sizes_up_to_512_work),
        cmocka_unit_test(keys_and_values_may_differ_in_size),
        cmocka_unit_test(query_heads_share_key_heads),
        cmocka_unit_test(sizes_around_the_tiles_of_a_kernel_work),
        cmocka_unit_test(sizes_around_the_tiles_of_each_head_size_work),
        cmocka_unit_test(many_rows_meet_many_keys),
        cmocka_unit_test(many_heads_over_one_meet_many_rows),
        cmocka_unit_test(one_query_meets_a_long_cache),
        cmocka_unit_test(few_rows_meet_many_keys),
        cmocka_unit_test(few_rows_of_many_heads_meet_many_keys),
        cmocka_unit_test(one_key_meets_many_queries),
        cmocka_unit_test(without_keys_the_result_is_zero),
        cmocka_unit_test(without_rows_the_gradients_of_keys_are_zero),
        cmocka_unit_test(an_empty_batch_is_no_error),
        cmocka_unit_test(the_scale_may_be_zero_or_negative),
    };
    return RUN_TESTS(tests);
}
