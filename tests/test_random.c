/* Random problems by the thousand: any combination of features, dtype, layout and kernel row, forward and backward,
 * against the reference. Problem n uses seed HEED_TEST_SEED + n, and the message of a failure ends in its seed: with
 * that and HEED_TEST_CASES=1 it comes back alone. */
#include "harness.h"

#include <float.h>
#include <time.h>

/* Small numbers mostly, with the odd larger one. */
static int64_t any_size(int64_t most) { return one_in(4) ? random_int(1, most) : random_int(1, HEED_MIN(most, 20)); }

static heed_kernel_info any_kernel(void)
{
    heed_kernel_info all[128];
    int count = 0;
    for_each_kernel(EITHER_PASS, kernel)
        if (count < COUNT(all))
            all[count++] = kernel;
    return count ? all[random_int(0, count - 1)] : (heed_kernel_info){ 0 };
}

/* aligned: rows of whole 16 bytes, contiguous, which is what the fastest kernels ask for. */
static test_layout any_layout(int aligned)
{
    static const int orders[][4] = { { 0, 1, 2, 3 }, { 0, 2, 1, 3 }, { 2, 0, 1, 3 }, { 0, 1, 3, 2 } };
    test_layout l = { 0 };
    if (one_in(2))
        return l;
    memcpy(l.order, orders[random_int(0, aligned ? 1 : 3)], sizeof l.order);
    if (aligned)
        return l;
    for (int d = 0; d < 4; d++) {
        l.gap[d] = one_in(3) ? random_int(1, 9) : 0;
        l.flip[d] = one_in(8);
    }
    l.offset = one_in(3) ? random_int(1, 9) : 0;
    return l;
}

static const int32_t *any_lengths(int32_t lengths[], int64_t B, int64_t most)
{
    for (int64_t b = 0; b < B; b++)
        lengths[b] = (int32_t)(one_in(6) ? 0 : random_int(0, most));
    return lengths;
}

static int64_t full_or_1(int64_t size) { return one_in(2) ? size : 1; }

static void any_band(heed_attention *a)
{
    a->causal = one_in(3);
    a->windowed = one_in(3);
    if (a->windowed)
        a->window_left = random_int(-1, 30), a->window_right = random_int(-1, 30);
    a->align = (heed_align)random_int(0, 2);
    if (a->align == HEED_ALIGN_POSITION) {
        a->query_position = random_int(-40, 40), a->key_position = random_int(-40, 40);
        a->query_step = random_int(0, 4), a->key_step = random_int(0, 4);
    }
    a->key_stride = one_in(3) ? random_int(1, 7) : 0;
}

/* Plain problems too: some rows of the table take little else. */
static void any_extras(test_case *c)
{
    c->x.threads = (int)random_int(0, 4);
    c->x.nondeterministic = one_in(2);
    if (one_in(3))
        return;
    int64_t B = case_sequences(c), H = c->a.q.shape[1], Sq = case_rows(c), Sk = case_keys(c);
    if (one_in(4))
        case_mask(c, full_or_1(B), full_or_1(H), full_or_1(Sq), full_or_1(Sk), (double)random_int(0, 10) / 10);
    if (one_in(4)) {
        heed_dtype dtype = one_in(2) && c->kernel.dtype != HEED_F64 ? HEED_F32 : c->kernel.dtype;
        case_bias(c, dtype, full_or_1(B), full_or_1(H), full_or_1(Sq), full_or_1(Sk));
        for (int64_t n = 0; n < elements(&c->a.bias) && one_in(2); n += random_int(1, 5))
            heed_store(c->a.bias.data, dtype, n, -INFINITY);
    }
    if (one_in(4))
        case_alibi(c, full_or_1(B));
    if (one_in(4))
        case_sink(c);
    if (one_in(4))
        case_d_lse(c);
    c->a.softcap = one_in(4) ? (float)random_int(1, 40) / 4 : 0;
    c->a.scale = one_in(4) ? (float)random_int(-20, 20) / 20 : 0;
    c->a.zero_scale = c->a.scale == 0 && one_in(10);
    c->a.dropout = one_in(4) ? (float)random_int(0, 95) / 100 : 0;
    c->a.dropout_seed = random_bits();
}

static test_case any_problem(const heed_kernel_info *kernel)
{
    int32_t rows[4], keys[4];
    int large = one_in(15), aligned = one_in(3); /* large: several tiles of a kernel in both directions */
    int64_t most = large ? 40 : 130;
    case_shape s = { .B = random_int(1, 3),
                     .Hk = random_int(1, large ? 1 : 3),
                     .Sq = large ? random_int(1, 300) : any_size(80),
                     .Sk = large ? random_int(1, 700) : any_size(140),
                     .D = aligned ? 8 * random_int(1, most / 4) : any_size(most),
                     .Dv = aligned ? 8 * random_int(1, most / 4) : any_size(most),
                     .fp32_results = one_in(3),
                     .fp32_gradients = one_in(3),
                     .layout = any_layout(aligned) };
    if (aligned) /* mask and bias too, where their rows are packed */
        s.Sk = (s.Sk + 15) / 16 * 16;
    s.Dv = one_in(2) ? s.D : s.Dv;
    s.Hq = s.Hk * random_int(1, 3);
    s.form = one_in(2) ? DENSE : (case_form)random_int(PADDED, kernel->backward ? RAGGED : PAGED);
    s.page = random_int(1, 40);
    if (s.form != DENSE) {
        s.rows_of = s.form == RAGGED || one_in(2) ? any_lengths(rows, s.B, s.Sq) : NULL;
        s.keys_of = s.form == RAGGED || one_in(2) ? any_lengths(keys, s.B, s.Sk) : NULL;
    }
    test_case c = case_new(kernel, s);
    any_band(&c.a);
    any_extras(&c);
    return c;
}

static int64_t number_of(const char *variable, int64_t otherwise)
{
    const char *text = getenv(variable);
    return text && *text ? strtoll(text, NULL, 0) : otherwise;
}

static int64_t problems(void) { return number_of("HEED_TEST_CASES", 1000); }

/* Whether the row itself takes the problem. */
static int is_taken(const test_case *c)
{
    heed_exec x;
    return case_exec(c, c->kernel.backward ? HEED_BACKWARD : HEED_FORWARD, &x) != HEED_OK || x.kernel;
}

/* A problem for this row, in the end, where it is choosy. Those that it does not take run on the row that does. */
static test_case fitting_problem(const heed_kernel_info *kernel)
{
    test_case c = any_problem(kernel);
    for (int tries = one_in(4) ? 0 : 30; tries > 0 && !is_taken(&c); tries--) {
        case_free(&c);
        c = any_problem(kernel);
    }
    return c;
}

TEST(random_problems_agree_with_the_reference)
{
    const int64_t seconds = number_of("HEED_TEST_SECONDS", 0), total = seconds ? INT64_MAX : problems();
    const time_t start = time(NULL);
    int64_t n = 0;
    for (; n < total && !(seconds && time(NULL) - start >= seconds); n++) {
        seed_random(test_seed() + (uint64_t)n);
        heed_kernel_info kernel = any_kernel();
        if (!kernel.name)
            return;
        test_case c = fitting_problem(&kernel);
        if (!kernel.backward && one_in(4))
            c.a.lse.data = NULL;
        case_check(&c);
        case_free(&c);
    }
    if (seconds)
        printf("%lld problems in %lld seconds\n", (long long)n, (long long)seconds);
    for_each_kernel(EITHER_PASS, kernel)
        if (n >= 1000 && !runs_of(kernel.name))
            fail_msg("%s took none of %lld problems", kernel.name, (long long)n);
}

/* naive.c in fp64 is a second way to compute the same, written from heed.h on its own. */
TEST(the_reference_agrees_with_a_second_opinion)
{
    const heed_kernel_info fp64 = {
        .name = "backward_reference_f64", .backend = HEED_REFERENCE, .backward = 1, .dtype = HEED_F64
    };
    for (int64_t n = 0; n < problems(); n++) {
        seed_random(test_seed() + (uint64_t)n);
        test_case c = any_problem(&fp64);
        results reference = case_reference(&c), magnitude, naive = case_naive(&c, &magnitude);
        for (int which = 0; which < OUTPUTS; which++)
            for (int64_t at = 0; reference.at[which] && at < elements(output_of(&c, which)); at++) {
                double x = reference.at[which][at], y = naive.at[which][at];
                if (x != y && !(fabs(x - y) <= 1e-18 * magnitude.at[which][at] + 1e-11 * fabs(y) + DBL_MIN))
                    fail_msg("output %d, element %lld is %.15g, by the second opinion %.15g; %s", which, (long long)at,
                             x, y, case_text(&c));
            }
        case_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_problems_agree_with_the_reference),
        cmocka_unit_test(the_reference_agrees_with_a_second_opinion),
    };
    return RUN_TESTS(tests);
}
