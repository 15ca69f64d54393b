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

void expect_close(test_case *c, heed_pass pass)
{
    int first, last = outputs_of(pass, &first), owned = c->buffer_count;
    results got = case_results(c), expected = case_reference(c), magnitude;
    case_naive(c, &magnitude);
    for (int which = first; which <= last; which++) {
        const heed_tensor *t = output_of(c, which);
        double u = unit_roundoff(which == OUT_LSE ? HEED_F32 : c->kernel.dtype), u_out = unit_roundoff(t->dtype);
        double tiny = t->dtype == HEED_F16 ? 0x1p-24 : 0x1p-100; /* room for kernels that flush subnormals to zero */
        for (int64_t n = 0; n < elements(t) && t->data; n++) {
            double tolerance = 4 * u * magnitude.at[which][n] + 2 * u_out * fabs(expected.at[which][n]) + tiny;
            if (!agrees(which, got.at[which][n], expected.at[which][n], tolerance))
                fail_msg("%s: element %lld is %.9g, should be %.9g, give or take %.3g; %s", output_name[which],
                         (long long)n, got.at[which][n], expected.at[which][n], tolerance, case_text(c));
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
