/* What is right: results against the fp64 reference, to within what rounding explains or what the plain computation
 * achieves. harness.h says what is what. */
#include "harness.h"

static const char *const output_name[OUTPUTS] = { "o", "lse", "d_q", "d_k", "d_v", "d_bias", "d_sink" };

heed_tensor *output_of(test_case *c, int which)
{
    heed_tensor *all[OUTPUTS] = { &c->a.o, &c->a.lse, &c->g.d_q, &c->g.d_k, &c->g.d_v, &c->g.d_bias, &c->g.d_sink };
    return all[which];
}

results case_results(test_case *c)
{
    results r;
    for (int which = 0; which < OUTPUTS; which++)
        r.at[which] = unpack(c, output_of(c, which));
    return r;
}

static void to_f64(test_case *c, heed_tensor *t)
{
    t->data = unpack(c, t);
    t->dtype = HEED_F64;
    memset(t->stride, 0, sizeof t->stride);
}

/* heed_check() wants d_sink in fp32; the reference itself writes what it is given. */
static void check_and_run(heed_attention *a, heed_gradient *g, test_case *c)
{
    heed_exec x = { .backend = HEED_REFERENCE };
    heed_plan plan = { .threads = 1 };
    heed_problem p;
    heed_status status = heed_check(a, g, &x, 0, &p);
    if (!status)
        status = heed_check_lengths(&p);
    if (status)
        fail_msg("the reference: %s; %s", heed_last_error(), case_text(c));
    p.g.d_sink.dtype = HEED_F64;
    size_t bytes = g ? heed_backward_workspace_reference(&p, &plan) : heed_forward_workspace_reference(&p, &plan);
    x.workspace = malloc(bytes + 1);
    g ? heed_backward_reference(&p, &plan, &x) : heed_forward_reference(&p, &plan, &x);
    free(x.workspace);
}

results case_reference(test_case *c)
{
    heed_attention a = c->a;
    heed_gradient g = c->g;
    results r = { .at = { NULL } };
    heed_tensor *inputs[] = { &a.q, &a.k, &a.v, &a.bias, &g.d_o };
    heed_tensor *outputs[OUTPUTS] = { &a.o, &a.lse, &g.d_q, &g.d_k, &g.d_v, &g.d_bias, &g.d_sink };
    if (!a.lse.data) /* backward reads it, so there has to be one */
        a.lse = case_tensor(c, HEED_F32, (int64_t[]){ a.q.shape[0], a.q.shape[1], a.q.shape[2], 1 }, NULL);
    for (int n = 0; n < COUNT(inputs); n++)
        to_f64(c, inputs[n]);
    for (int which = 0; which < OUTPUTS; which++) {
        to_f64(c, outputs[which]);
        r.at[which] = outputs[which]->data;
    }
    g.d_sink.dtype = HEED_F32;
    g.delta.data = NULL;
    g.accumulate = 0;
    check_and_run(&a, NULL, c);
    if (c->kernel.backward)
        check_and_run(&a, &g, c);
    return r;
}

void expect_same_bits(const test_case *c, const char *what, const heed_tensor *x, const heed_tensor *y)
{
    size_t size = heed_dtype_size(x->dtype);
    assert_int_equal(elements(x), elements(y));
    for (int64_t n = 0; n < elements(x); n++) {
        int64_t x_at = nth(x, n), y_at = nth(y, n);
        if (memcmp((char *)x->data + x_at * (int64_t)size, (char *)y->data + y_at * (int64_t)size, size))
            fail_msg("%s: element %lld is %.9g here and %.9g there; %s", what, (long long)n,
                     heed_load(x->data, x->dtype, x_at), heed_load(y->data, y->dtype, y_at), case_text(c));
    }
}

/* Half the distance from 1 to the next number. */
static double unit_roundoff(heed_dtype dtype)
{
    return dtype == HEED_BF16 ? 0x1p-8 : dtype == HEED_F16 ? 0x1p-11 : dtype == HEED_F32 ? 0x1p-24 : 0x1p-53;
}

static int outputs_of(heed_pass pass, int *first)
{
    *first = pass == HEED_FORWARD ? OUT_O : OUT_DQ;
    return pass == HEED_FORWARD ? OUT_LSE : OUT_DSINK;
}

/* Where the result is not finite, which of inf and NaN it is depends on the order of the sum; lse has one order. */
static int agrees(int which, double x, double expected, double tolerance)
{
    if (!isfinite(expected) && which != OUT_LSE)
        return !isfinite(x);
    if (isnan(expected))
        return isnan(x);
    return x == expected || fabs(x - expected) <= tolerance;
}

/* ---- Answers ------------------------------------------------------------------------------------------------------ */

/* The reference takes most of a test's time, and every row of a type is asked the same. */
static struct answer {
    uint64_t problem;
    results expected, magnitude; /* of outputs that the problem has */
} answers[256];
static int answer_count;

void forget_answers(void)
{
    while (answer_count > 0) {
        struct answer *gone = &answers[--answer_count];
        for (int which = 0; which < OUTPUTS; which++)
            free(gone->expected.at[which]), free(gone->magnitude.at[which]);
    }
}

static uint64_t mixed(uint64_t sum, const void *bytes, size_t count) /* FNV-1a */
{
    for (size_t n = 0; bytes && n < count; n++)
        sum = (sum ^ ((const unsigned char *)bytes)[n]) * 0x100000001B3u;
    return sum;
}

/* All that an answer depends on: the values of the inputs, however they lie, and every field that is not a tensor. */
static uint64_t number_of_problem(test_case *c)
{
    heed_attention a = c->a;
    heed_tensor *const tensors[] = { &a.q, &a.k, &a.v, &a.o, &a.lse, &a.mask, &a.bias, &a.alibi, &a.sink };
    const heed_tensor *const inputs[] = { &c->a.q,     &c->a.k,    &c->a.v,   &c->a.mask, &c->a.bias,
                                          &c->a.alibi, &c->a.sink, &c->g.d_o, &c->g.d_lse };
    const int owned = c->buffer_count;
    const size_t sequences = (size_t)case_sequences(c), int32 = sizeof(int32_t);
    uint64_t sum = mixed(0xCBF29CE484222325u, &c->kernel.backward, sizeof c->kernel.backward);
    for (int n = 0; n < COUNT(inputs); n++) {
        sum = mixed(sum, &inputs[n]->dtype, sizeof inputs[n]->dtype);
        sum = mixed(sum, inputs[n]->shape, sizeof inputs[n]->shape);
        sum = mixed(sum, unpack(c, inputs[n]), (size_t)elements(inputs[n]) * sizeof(double));
    }
    for (int which = 0; which < OUTPUTS; which++)
        sum = mixed(sum, output_of(c, which)->shape, output_of(c, which)->data ? sizeof(int64_t[4]) : 0);
    free_since(c, owned);
    sum = mixed(sum, a.lengths_q, sequences * int32);
    sum = mixed(sum, a.lengths_k, sequences * int32);
    sum = mixed(sum, a.offsets_q, (sequences + 1) * int32);
    sum = mixed(sum, a.offsets_k, (sequences + 1) * int32);
    sum = mixed(sum, a.block_table,
                ((sequences - 1) * (size_t)a.block_table_stride + (size_t)a.block_table_columns) * int32);
    sum = mixed(sum, a.dropout_seed_at, sizeof *a.dropout_seed_at);
    for (int n = 0; n < COUNT(tensors); n++)
        memset(tensors[n], 0, sizeof *tensors[n]);
    a.lengths_q = a.lengths_k = a.offsets_q = a.offsets_k = a.block_table = NULL;
    a.dropout_seed_at = NULL;
    return mixed(sum, &a, sizeof a);
}

static results copy_of(test_case *c, results r)
{
    for (int which = 0; which < OUTPUTS; which++) {
        size_t bytes = (size_t)elements(output_of(c, which)) * sizeof(double);
        const double *values = output_of(c, which)->data ? r.at[which] : NULL;
        r.at[which] = values ? memcpy(malloc(bytes + 1), values, bytes) : NULL;
    }
    return r;
}

static const struct answer *answer_to(test_case *c)
{
    const uint64_t problem = number_of_problem(c);
    for (int n = 0; n < answer_count; n++)
        if (answers[n].problem == problem)
            return &answers[n];
    if (answer_count == COUNT(answers))
        forget_answers();
    const int owned = c->buffer_count;
    results expected = case_reference(c), magnitude;
    case_naive(c, &magnitude);
    answers[answer_count] = (struct answer){ problem, copy_of(c, expected), copy_of(c, magnitude) };
    free_since(c, owned);
    return &answers[answer_count++];
}

void expect_close(test_case *c, heed_pass pass)
{
    int first, last = outputs_of(pass, &first), owned = c->buffer_count;
    const results got = case_results(c);
    const struct answer *right = answer_to(c);
    for (int which = first; which <= last; which++) {
        const heed_tensor *t = output_of(c, which);
        const double *expected = right->expected.at[which], *magnitude = right->magnitude.at[which];
        double u = unit_roundoff(which == OUT_LSE ? HEED_F32 : c->kernel.dtype), u_out = unit_roundoff(t->dtype);
        double tiny = t->dtype == HEED_F16 ? 0x1p-24 : 0x1p-100; /* room for kernels that flush subnormals to zero */
        for (int64_t n = 0; n < elements(t) && t->data; n++) {
            double tolerance = 4 * u * magnitude[n] + 2 * u_out * fabs(expected[n]) + tiny;
            if (!agrees(which, got.at[which][n], expected[n], tolerance))
                fail_msg("%s: element %lld is %.9g, should be %.9g, give or take %.3g; %s", output_name[which],
                         (long long)n, got.at[which][n], expected[n], tolerance, case_text(c));
        }
    }
    free_since(c, owned);
}

void case_check(test_case *c)
{
    case_forward(c);
    if (c->kernel.backward)
        case_backward(c);
    expect_close(c, c->kernel.backward ? HEED_BACKWARD : HEED_FORWARD);
}
