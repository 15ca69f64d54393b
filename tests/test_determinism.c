/* heed.h: "The same inputs give the same bits, whatever the number of threads, and the result for one (batch, head)
 * does not depend on the rest of the batch." */
#include "harness.h"

/* Fresh outputs for the case, which keeps the old ones alive; returns those. */
static void renew(test_case *c, heed_tensor old[OUTPUTS])
{
    for (int which = 0; which < OUTPUTS; which++) {
        heed_tensor *t = output_of(c, which);
        old[which] = *t;
        if (t->data)
            *t = case_tensor(c, t->dtype, t->shape, NULL);
    }
}

static void run(test_case *c)
{
    case_forward(c);
    if (c->kernel.backward)
        case_backward(c);
}

static void expect_same_results(test_case *c, const heed_tensor old[OUTPUTS], const char *when)
{
    for (int which = 0; which < (c->kernel.backward ? OUTPUTS : OUT_DQ); which++)
        if (old[which].data)
            expect_same_bits(c, when, &old[which], output_of(c, which));
}

static void expect_deterministic(case_shape shape, void (*change)(test_case *))
{
    static const int threads[] = { 1, 1, 2, 3, 5, 0 };
    for_each_kernel(EITHER_PASS, kernel) {
        if (kernel.backend == HEED_REFERENCE || !keeps_order(&kernel))
            continue;
        test_case c = case_new(&kernel, shape);
        heed_tensor first[OUTPUTS];
        change(&c);
        c.x.threads = 1;
        run(&c);
        renew(&c, first);
        for (int n = 0; n < COUNT(threads); n++) {
            int owned = c.buffer_count;
            heed_tensor ignored[OUTPUTS];
            c.x.threads = threads[n];
            renew(&c, ignored);
            run(&c);
            expect_same_results(&c, first, "same bits for any number of threads");
            for (int which = 0; which < OUTPUTS; which++)
                *output_of(&c, which) = ignored[which];
            free_since(&c, owned);
        }
        case_free(&c);
    }
}

static void nothing(test_case *c) { (void)c; }

static void causal(test_case *c) { c->a.causal = 1; }

/* A kernel may leave a head with such numbers to another one. */
static void huge_numbers_in_one_head(test_case *c)
{
    c->a.causal = 1;
    if (c->kernel.dtype != HEED_F16)
        set(&c->a.k, 0, 1, 150, 0, 1e15);
}

/* The zero that a row sums to has the sign of its own terms, or of those that its neighbours see. */
static void zeros_of_both_signs(test_case *c)
{
    c->a.causal = 1;
    for (int64_t n = 0; n < elements(&c->a.v); n++)
        heed_store(c->a.v.data, c->a.v.dtype, nth(&c->a.v, n), n / c->a.v.shape[3] % c->a.v.shape[2] < 30 ? -0.0 : 0.0);
}

static void bias_and_sink(test_case *c)
{
    case_bias(c, c->kernel.dtype, 1, 1, case_rows(c), case_keys(c)); /* d_bias sums over batch and heads */
    case_sink(c);
    case_d_lse(c);
    c->a.windowed = 1;
    c->a.window_left = 100, c->a.window_right = 30;
    c->a.dropout = 0.1f;
}

TEST(threads_do_not_change_a_bit)
{
    expect_deterministic((case_shape){ .B = 2, .Hq = 3, .Sq = 150, .Sk = 210, .D = 64 }, nothing);
}

TEST(threads_do_not_change_a_bit_of_one_long_head)
{
    expect_deterministic((case_shape){ .Hq = 1, .Sq = 700, .D = 32 }, causal);
}

TEST(threads_do_not_change_a_bit_where_one_head_has_huge_numbers)
{
    expect_deterministic((case_shape){ .Hq = 3, .Sq = 200, .D = 32 }, huge_numbers_in_one_head);
}

TEST(threads_do_not_change_the_sign_of_a_zero)
{
    expect_deterministic((case_shape){ .B = 2, .Hq = 6, .Hk = 3, .Sq = 64, .D = 56 }, zeros_of_both_signs);
}

TEST(threads_do_not_change_a_bit_of_shared_key_heads)
{
    expect_deterministic((case_shape){ .B = 1, .Hq = 8, .Hk = 2, .Sq = 100, .Sk = 300, .D = 40, .Dv = 24 }, causal);
}

TEST(threads_do_not_change_a_bit_of_summed_gradients)
{
    expect_deterministic((case_shape){ .B = 3, .Hq = 4, .Hk = 2, .Sq = 90, .Sk = 120, .D = 32 }, bias_and_sink);
}

TEST(threads_do_not_change_a_bit_of_one_query_over_a_long_cache)
{
    expect_deterministic((case_shape){ .B = 1, .Hq = 8, .Hk = 2, .Sq = 1, .Sk = 9000, .D = 64 }, nothing);
}

TEST(threads_do_not_change_a_bit_of_merge_and_delta)
{
    const heed_kernel_info fp32 = { .name = "forward_reference_f32", .backend = HEED_REFERENCE };
    const int64_t shape[4] = { 2, 4, 300, 64 }, row[4] = { 2, 4, 300, 1 };
    test_case c = case_new(&fp32, (case_shape){ .B = 2, .Hq = 4, .Sq = 300, .D = 64 });
    heed_tensor o[2], lse[2], delta[2], lse2 = case_tensor(&c, HEED_F32, row, NULL);
    fill_normal(&c.a.lse, 3);
    fill_normal(&lse2, 3);
    for (int n = 0; n < 2; n++) {
        heed_exec x = { .threads = n ? 5 : 1 };
        o[n] = case_tensor(&c, HEED_F32, shape, NULL);
        lse[n] = case_tensor(&c, HEED_F32, row, NULL);
        delta[n] = case_tensor(&c, HEED_F32, row, NULL);
        memcpy(o[n].data, c.a.v.data, (size_t)elements(&c.a.v) * sizeof(float));
        memcpy(lse[n].data, c.a.lse.data, (size_t)elements(&c.a.lse) * sizeof(float));
        assert_int_equal(heed_merge(&o[n], &lse[n], &c.a.k, &lse2, &x), HEED_OK);
        assert_int_equal(heed_delta(&o[n], &c.g.d_o, NULL, &delta[n], &x), HEED_OK);
    }
    expect_same_bits(&c, "merged o", &o[0], &o[1]);
    expect_same_bits(&c, "merged lse", &lse[0], &lse[1]);
    expect_same_bits(&c, "delta", &delta[0], &delta[1]);
    case_free(&c);
}

/* src/cpu: a row's bits do not depend on those it is computed with, also where its own scores are near 0 and theirs are not. */
TEST(rows_do_not_depend_on_their_neighbours)
{
    for_each_kernel(HEED_FORWARD, kernel) {
        if (kernel.backend != HEED_CPU)
            continue;
        test_case c = case_new(&kernel, (case_shape){ .Sq = 130, .Sk = 600, .D = 64 });
        case_forward(&c);
        heed_tensor before = c.a.o;
        c.a.o = case_tensor(&c, kernel.dtype, before.shape, NULL);
        fill_row(&c.a.q, 0, 0, 41, 50), fill_row(&c.a.q, 0, 0, 113, -50);
        case_forward(&c);
        static const int64_t begin[] = { 0, 42, 114 }, count[] = { 41, 71, 16 };
        for (int n = 0; n < COUNT(begin); n++) {
            heed_tensor x = slice(before, 2, begin[n], 1, count[n]), y = slice(c.a.o, 2, begin[n], 1, count[n]);
            expect_same_bits(&c, "rows beside others", &x, &y);
        }
        case_free(&c);
    }
}

/* One sequence and one group of heads by themselves have the bits that they have in the batch. */
TEST(a_batch_is_its_members)
{
    for_each_kernel(EITHER_PASS, kernel) {
        if (!keeps_order(&kernel))
            continue;
        test_case c = case_new(&kernel, (case_shape){ .B = 3, .Hq = 4, .Hk = 2, .Sq = 75, .Sk = 130, .D = 40 });
        heed_tensor *parts[] = { &c.a.q, &c.a.k, &c.a.v, &c.g.d_o, &c.a.o, &c.a.lse, &c.g.d_q, &c.g.d_k, &c.g.d_v };
        c.a.causal = 1;
        run(&c);
        test_case one = c;
        heed_tensor whole[OUTPUTS];
        renew(&c, whole);
        one.a = c.a, one.g = c.g;
        heed_tensor *single[] = { &one.a.q,   &one.a.k,   &one.a.v,   &one.g.d_o, &one.a.o,
                                  &one.a.lse, &one.g.d_q, &one.g.d_k, &one.g.d_v };
        for (int n = 0; n < COUNT(parts); n++)
            *single[n] = slice(slice(*parts[n], 0, 1, 1, 1), 1, parts[n]->shape[1] / 2, 1, parts[n]->shape[1] / 2);
        run(&one);
        for (int which = 0; which < (kernel.backward ? OUT_DBIAS : OUT_DQ); which++) {
            int64_t half = whole[which].shape[1] / 2;
            heed_tensor member = slice(slice(whole[which], 0, 1, 1, 1), 1, half, 1, half);
            expect_same_bits(&c, "a sequence of the batch", &member, output_of(&one, which));
        }
        case_free(&c);
    }
}

/* A query head by itself has the bits that it has among those that share its keys. left: of a window; 0: none. */
static void expect_head(const heed_kernel_info *kernel, int64_t rows, int64_t keys, int64_t left)
{
    test_case c = case_new(kernel, (case_shape){ .Hq = 10, .Hk = 2, .Sq = rows, .Sk = keys, .D = 40 });
    heed_tensor *parts[] = { &c.a.q, &c.a.o, &c.a.lse, &c.g.d_o, &c.g.d_q, &c.a.k, &c.a.v, &c.g.d_k, &c.g.d_v };
    c.a.causal = 1;
    c.a.windowed = left != 0, c.a.window_left = left;
    run(&c);
    test_case one = c;
    heed_tensor whole[OUTPUTS];
    renew(&c, whole);
    one.a = c.a, one.g = c.g;
    heed_tensor *single[] = { &one.a.q, &one.a.o, &one.a.lse, &one.g.d_o, &one.g.d_q,
                              &one.a.k, &one.a.v, &one.g.d_k, &one.g.d_v };
    for (int n = 0; n < COUNT(parts); n++)
        *single[n] = slice(*parts[n], 1, n < 5 ? 7 : 1, 1, 1); /* query head 7 reads key head 1 */
    run(&one);
    for (int which = 0; which < (kernel->backward ? OUT_DK : OUT_DQ); which++) {
        heed_tensor member = slice(whole[which], 1, 7, 1, 1);
        expect_same_bits(&c, "a query head of a group", &member, output_of(&one, which));
    }
    case_free(&c);
}

/* Of few and many rows, over one and several chunks of keys. */
TEST(a_group_is_its_heads)
{
    for_each_kernel(EITHER_PASS, kernel) {
        if (!keeps_order(&kernel))
            continue;
        expect_head(&kernel, 1, 2100, 0);
        expect_head(&kernel, 3, 50, 0);
        expect_head(&kernel, 14, 1100, 0);
        expect_head(&kernel, 75, 130, 0);
        expect_head(&kernel, 6, 1300, 601); /* of which rows of a group begin with different keys */
    }
}

/* Some rows meet a first key that is far above what they saw of the others, which come before it on a GPU. */
static void steep(test_case *c)
{
    for (int64_t h = 0; h < c->a.q.shape[1]; h++)
        fill_row(&c->a.q, 0, h, HEED_MIN(70, c->a.q.shape[2] - 1), 20), fill_row(&c->a.k, 0, h / 2, 3, 20);
}

static void windowed(test_case *c)
{
    c->a.windowed = 1;
    c->a.window_left = 150, c->a.window_right = 30;
}

/* The first `some` heads by themselves. */
static void expect_some_heads(test_case *c, const heed_tensor whole[OUTPUTS], int64_t some)
{
    test_case one = *c;
    heed_tensor *parts[] = { &one.a.q, &one.a.o, &one.a.lse, &one.a.k, &one.a.v };
    for (int n = 0; n < COUNT(parts); n++)
        *parts[n] = slice(*parts[n], 1, 0, 1, n < 3 ? some : some / 2);
    case_forward(&one);
    for (int which = 0; which < OUT_DQ; which++) {
        heed_tensor member = slice(whole[which], 1, 0, 1, some);
        expect_same_bits(c, "heads without the others", &member, output_of(&one, which));
    }
}

/* A GPU that few heads do not fill may take smaller tiles of rows, and fewer keys for each block: of a few heads, of more, and of
 * all that there are. */
TEST(heads_do_not_depend_on_how_many_there_are)
{
    static const struct {
        case_shape shape;
        int64_t some[2];
    } sizes[] = {
        { { .Hq = 80, .Hk = 40, .Sq = 300, .D = 64 }, { 2, 30 } },
        { { .Hq = 40, .Hk = 20, .Sq = 290, .D = 96 }, { 2, 20 } },
        { { .Hq = 40, .Hk = 20, .Sq = 290, .Sk = 1100, .D = 80 }, { 2, 20 } },
        { { .Hq = 60, .Hk = 30, .Sq = 300, .D = 128 }, { 2, 40 } },
        { { .Hq = 12, .Hk = 6, .Sq = 1500, .D = 128 }, { 4, 8 } },
        { { .Hq = 800, .Hk = 400, .Sq = 2, .Sk = 400, .D = 24 }, { 2, 300 } },
        { { .Hq = 300, .Hk = 150, .Sq = 1, .Sk = 1100, .D = 40 }, { 2, 120 } },
    };
    void (*const changes[])(test_case *) = { nothing, causal, windowed, steep };
    for_each_kernel(HEED_FORWARD, kernel)
        for (int n = 0; n < COUNT(sizes) * COUNT(changes) && kernel.backend == HEED_CUDA; n++) {
            test_case c = case_new(&kernel, sizes[n / COUNT(changes)].shape);
            changes[n % COUNT(changes)](&c);
            if (case_takes(&c, &kernel)) {
                heed_tensor whole[OUTPUTS];
                case_forward(&c);
                renew(&c, whole);
                for (int i = 0; i < 2; i++)
                    expect_some_heads(&c, whole, sizes[n / COUNT(changes)].some[i]);
            }
            case_free(&c);
        }
}

/* The same for a member of a ragged batch, whatever lies beside it. */
static void expect_member(const heed_kernel_info *kernel, test_case *c, const int32_t rows[], const int32_t keys[],
                          int member)
{
    int64_t row = 0, key = 0, n = rows[member], m = keys[member];
    for (int before = 0; before < member; before++)
        row += rows[before], key += keys[before];
    test_case one = case_new(kernel, (case_shape){ .Hq = 2, .Sq = n, .Sk = m, .D = c->a.q.shape[3] });
    one.a.q = slice(c->a.q, 2, row, 1, n), one.g.d_o = slice(c->g.d_o, 2, row, 1, n);
    one.a.k = slice(c->a.k, 2, key, 1, m), one.a.v = slice(c->a.v, 2, key, 1, m);
    run(&one);
    for (int which = 0; which < (kernel->backward ? OUT_DBIAS : OUT_DQ); which++) {
        int of_keys = which == OUT_DK || which == OUT_DV;
        heed_tensor part = slice(*output_of(c, which), 2, of_keys ? key : row, 1, of_keys ? m : n);
        expect_same_bits(c, "a sequence of the batch", &part, output_of(&one, which));
    }
    case_free(&one);
}

/* Sequences of few and many rows, of one and several blocks of keys: each as if it were alone. The second batch is one that
 * every row of the table takes. */
TEST(a_ragged_batch_is_its_members)
{
    static const int32_t rows[] = { 50, 1, 3, 190 }, keys[2][4] = { { 70, 2100, 20, 300 }, { 70, 200, 20, 130 } };
    for_each_kernel(EITHER_PASS, kernel)
        for (int n = 0; n < 2; n++) {
            test_case c = case_new(&kernel,
                                   (case_shape){
                                       .B = 4, .Hq = 2, .D = 24, .form = RAGGED, .rows_of = rows, .keys_of = keys[n] });
            if (keeps_order(&kernel) && case_takes(&c, &kernel)) {
                run(&c);
                for (int member = 0; member < 4; member++)
                    expect_member(&kernel, &c, rows, keys[n], member);
            }
            case_free(&c);
        }
}

/* ---- Where the planner chooses ---------------------------------------------------------------------------------- *
 *
 * It goes by the longest sequence of a ragged batch. A short one by itself may get another row: AMX leaves it to that one
 * (scores.h), which no row that is forced does. */

#ifdef HEED_X86
static void expect_row_on_amx(const test_case *c, const char *family)
{
    for (int backward = 0; backward < 2; backward++) {
        char text[2048], taken[64];
        snprintf(taken, sizeof taken, "%s_cpu_%s: taken", backward ? "backward" : "forward", family);
        assert_int_equal(heed_explain(&c->a, backward ? &c->g : NULL, &c->x, "amx", text, sizeof text), HEED_OK);
        if (!strstr(text, taken))
            fail_msg("no \"%s\" in:\n%s", taken, text);
    }
}

/* What the tests below are about: on AMX these sequences get different rows by themselves, and one of these together. */
TEST(long_and_short_sequences_differ_in_rows_on_amx)
{
    static const char *const rows[][2] = { { "avx512_f32", "amxsplit_f32" },
                                           { "avx512_f16", "amxhalf_f16" },
                                           { "amx_bf16", "amx_bf16" } };
    static const int32_t lengths[] = { 3, 600 };
    for (heed_dtype dtype = HEED_F32; dtype <= HEED_BF16; dtype++)
        for (int n = 0; n < 3; n++) { /* the short one, the long one, both */
            const heed_kernel_info any = { .backend = HEED_CPU, .backward = 1, .dtype = dtype };
            case_shape shape = { .Hq = 2, .Sq = n < 2 ? lengths[n] : 0, .D = 64 };
            if (n == 2)
                shape.B = 2, shape.form = RAGGED, shape.rows_of = shape.keys_of = lengths;
            test_case c = case_new(&any, shape);
            expect_row_on_amx(&c, rows[dtype][n > 0]);
            case_free(&c);
        }
}
#endif

TEST(a_ragged_batch_is_its_members_whichever_rows_are_chosen)
{
    static const int32_t lengths[] = { 3, 600, 3 };
    for (heed_dtype dtype = HEED_F32; dtype <= HEED_BF16; dtype++)
        for (int threads = 1; threads <= 3; threads += 2) {
            const heed_kernel_info any = { .backend = HEED_CPU, .backward = 1, .dtype = dtype };
            const case_shape shape = {
                .B = 3, .Hq = 2, .D = 64, .form = RAGGED, .rows_of = lengths, .keys_of = lengths
            };
            test_case c = case_new(&any, shape);
            c.x.threads = threads;
            run(&c);
            for (int member = 0; member < 3; member++)
                expect_member(&any, &c, lengths, lengths, member);
            case_free(&c);
        }
}

typedef heed_status left_kernel(const heed_problem *, const heed_plan *, const heed_exec *, unsigned char *);

/* Runs one pass of the case's row over the heads that are left, and only these. */
static void run_left(test_case *c, heed_pass pass, left_kernel *kernel, unsigned char *left)
{
    heed_exec x;
    heed_problem p;
    heed_device d;
    heed_plan plan;
    assert_int_equal(case_exec(c, pass, &x), HEED_OK);
    x.workspace = case_memory(c, x.workspace_bytes, 0);
    assert_int_equal(heed_check(&c->a, pass == HEED_BACKWARD ? &c->g : NULL, &x, 0, &p), HEED_OK);
    assert_int_equal(heed_device_of(&x, &d), HEED_OK);
    assert_int_equal(heed_choose(&p, &d, x.kernel, &plan, NULL), HEED_OK);
    assert_int_equal(kernel(&p, &plan, &x, left), HEED_OK);
    case_guards(c);
}

/* The other side of it, on any machine: the row that takes what was left computes those heads, with the bits that it gives
 * them by itself, and touches no other. */
static void expect_left(const char *row, left_kernel *forward, left_kernel *backward)
{
    static const int32_t lengths[] = { 3, 300, 90 };
    unsigned char left[6] = { 1, 1, 0, 1, 0, 0 }; /* of three sequences with two key heads */
    const heed_kernel_info kernel = { .name = row, .backend = HEED_CPU, .backward = 1 };
    const case_shape shape = {
        .B = 3, .Hq = 4, .Hk = 2, .D = 64, .form = RAGGED, .rows_of = lengths, .keys_of = lengths
    };
    test_case c = case_new(&kernel, shape);
    heed_tensor whole[OUTPUTS], unwritten = case_tensor(&c, HEED_F32, c.a.q.shape, NULL);
    run(&c);
    renew(&c, whole);
    run_left(&c, HEED_FORWARD, forward, left);
    for (int pass = 0; pass < 2; pass++) {
        if (pass) {
            c.a.o = whole[OUT_O], c.a.lse = whole[OUT_LSE];
            run_left(&c, HEED_BACKWARD, backward, left);
        }
        for (int which = pass ? OUT_DQ : 0; which < (pass ? OUT_DBIAS : OUT_DQ); which++)
            for (int64_t n = 0, at = 0; n < 6; at += n % 2 ? lengths[n / 2] : 0, n++) {
                heed_tensor *t = output_of(&c, which), parts[2];
                const int64_t heads = t->shape[1] / 2, columns = t->shape[3];
                for (int side = 0; side < 2; side++) {
                    heed_tensor of = side ? *t : left[n] ? whole[which] : slice(unwritten, 3, 0, 1, columns);
                    parts[side] = slice(slice(of, 1, n % 2 * heads, 1, heads), 2, at, 1, lengths[n / 2]);
                }
                expect_same_bits(&c, left[n] ? "a head that was left" : "a head that was not", &parts[0], &parts[1]);
            }
    }
    case_free(&c);
}

TEST(heads_that_are_left_to_another_row_are_computed_and_no_others)
{
    expect_left("backward_cpu_plain_f32", heed_forward_left_plain, heed_backward_left_plain);
#ifdef HEED_X86
    heed_device d;
    assert_int_equal(heed_device_of(&(heed_exec){ 0 }, &d), HEED_OK);
    if (d.isa >= HEED_ISA_AVX512)
        expect_left("backward_cpu_avx512_f32", heed_forward_left_avx512, heed_backward_left_avx512);
#endif
}

/* Gradients of a long member, given the same o and lse, too: a lone sequence may get other tiles of the forward. */
static void expect_gradients_of_member(const heed_kernel_info *kernel, test_case *c, int64_t at, int64_t n)
{
    const case_shape shape = { .Hq = c->a.q.shape[1], .Hk = c->a.k.shape[1], .Sq = n, .D = c->a.q.shape[3] };
    test_case one = case_new(kernel, shape);
    one.a.causal = c->a.causal;
    one.a.q = slice(c->a.q, 2, at, 1, n), one.a.k = slice(c->a.k, 2, at, 1, n), one.a.v = slice(c->a.v, 2, at, 1, n);
    one.a.o = slice(c->a.o, 2, at, 1, n), one.a.lse = slice(c->a.lse, 2, at, 1, n);
    one.g.d_o = slice(c->g.d_o, 2, at, 1, n);
    case_backward(&one);
    for (int which = OUT_DQ; which < OUT_DBIAS; which++) {
        heed_tensor part = slice(*output_of(c, which), 2, at, 1, n);
        expect_same_bits(c, "gradients of a long sequence of the batch", &part, output_of(&one, which));
    }
    case_free(&one);
}

/* So long that a GPU's tiles of keys may be taken in another order than theirs, and heads over the same keys in parts. */
TEST(gradients_of_a_long_ragged_batch_are_its_members)
{
    static const int32_t lengths[] = { 150, 2300, 5190, 700 };
    for_each_kernel(HEED_BACKWARD, kernel)
        for (int n = 0; n < 4 && kernel.backend == HEED_CUDA && keeps_order(&kernel); n++) {
            case_shape shape = { .B = 4, .Hq = n % 2 ? 8 : 2, .Hk = 2 - n % 2, .D = 64 << n % 2, .form = RAGGED };
            shape.rows_of = shape.keys_of = lengths;
            test_case c = case_new(&kernel, shape);
            c.a.causal = n / 2;
            if (case_takes(&c, &kernel)) {
                run(&c);
                for (int64_t member = 0, at = 0; member < 4; at += lengths[member++])
                    expect_gradients_of_member(&kernel, &c, at, lengths[member]);
            }
            case_free(&c);
        }
}

/* Gradients of one head's bias, given the same o and lse. */
static void expect_bias_of_head(const heed_kernel_info *kernel, test_case *c, int64_t h)
{
    const case_shape shape = { .Sq = case_rows(c), .Sk = case_keys(c), .D = c->a.q.shape[3] };
    test_case one = case_new(kernel, shape);
    one.a.causal = c->a.causal;
    one.a.q = slice(c->a.q, 1, h, 1, 1), one.a.k = slice(c->a.k, 1, h, 1, 1), one.a.v = slice(c->a.v, 1, h, 1, 1);
    one.a.o = slice(c->a.o, 1, h, 1, 1), one.a.lse = slice(c->a.lse, 1, h, 1, 1);
    one.a.bias = slice(c->a.bias, 1, h, 1, 1), one.g.d_o = slice(c->g.d_o, 1, h, 1, 1);
    one.g.d_bias = case_tensor(&one, c->g.d_bias.dtype, one.a.bias.shape, NULL);
    case_backward(&one);
    heed_tensor part = slice(c->g.d_bias, 1, h, 1, 1);
    expect_same_bits(c, "gradient of the bias of a head", &part, &one.g.d_bias);
    case_free(&one);
}

/* So many that a block of a GPU has several tiles of the gradient to write, where of one head it has one. */
TEST(gradients_of_many_biases_are_those_of_each_head)
{
    for_each_kernel(HEED_BACKWARD, kernel)
        for (int n = 0; n < 2 && kernel.backend == HEED_CUDA && keeps_order(&kernel); n++) {
            test_case c = case_new(&kernel, (case_shape){ .Hq = 34, .Sq = 130, .Sk = 4096, .D = n ? 128 : 40 });
            case_bias(&c, kernel.dtype, 1, 34, 130, 4096);
            c.a.causal = n;
            if (case_takes(&c, &kernel)) {
                run(&c);
                expect_bias_of_head(&kernel, &c, 0);
                expect_bias_of_head(&kernel, &c, 33);
            }
            case_free(&c);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_do_not_change_a_bit),
        cmocka_unit_test(threads_do_not_change_a_bit_of_one_long_head),
        cmocka_unit_test(threads_do_not_change_a_bit_where_one_head_has_huge_numbers),
        cmocka_unit_test(threads_do_not_change_the_sign_of_a_zero),
        cmocka_unit_test(threads_do_not_change_a_bit_of_shared_key_heads),
        cmocka_unit_test(threads_do_not_change_a_bit_of_summed_gradients),
        cmocka_unit_test(threads_do_not_change_a_bit_of_one_query_over_a_long_cache),
        cmocka_unit_test(threads_do_not_change_a_bit_of_merge_and_delta),
        cmocka_unit_test(rows_do_not_depend_on_their_neighbours),
        cmocka_unit_test(a_batch_is_its_members),
        cmocka_unit_test(a_group_is_its_heads),
        cmocka_unit_test(heads_do_not_depend_on_how_many_there_are),
        cmocka_unit_test(a_ragged_batch_is_its_members),
#ifdef HEED_X86
        cmocka_unit_test(long_and_short_sequences_differ_in_rows_on_amx),
#endif
        cmocka_unit_test(a_ragged_batch_is_its_members_whichever_rows_are_chosen),
        cmocka_unit_test(heads_that_are_left_to_another_row_are_computed_and_no_others),
        cmocka_unit_test(gradients_of_a_long_ragged_batch_are_its_members),
        cmocka_unit_test(gradients_of_many_biases_are_those_of_each_head),
    };
    return RUN_TESTS(tests);
}
