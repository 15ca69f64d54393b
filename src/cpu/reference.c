/* The definition of correct: the formulas of heed.h as plain loops in double. Every other kernel is measured against
 * this one, so nothing here is clever. Which keys a row may see comes from heed_span_of() and heed_band(); score() adds
 * the mask and yields S for one pair, and forward and backward are written in terms of it.
 *
 * Workspace, in doubles:   forward    S of one row [Sk]
 *                          backward   dK [Sk][D], dV [Sk][Dv] of one key head; dsink [Hq]; dbias, of the size of d_bias
 */
#include "internal.h"
#include "numbers.h"

/* One row of one head, and what is asked about it. */
typedef struct row {
    const heed_problem *p;
    const heed_span *s;
    int64_t h, hk, i; /* query head, its key head, row of the sequence */
} row;

typedef struct pair {
    double S;
    double cap_slope; /* dS / d(scale * q.k): 1 where there is no softcap */
} pair;

static int64_t at(const heed_tensor *t, int64_t b, int64_t h, int64_t i, int64_t c)
{
    return b * t->stride[0] + h * t->stride[1] + i * t->stride[2] + c * t->stride[3];
}

static int64_t query_at(const heed_tensor *t, const row *x)
{
    return at(t, x->s->q_batch, x->h, x->s->q_row + x->i, 0);
}

static double load(const heed_tensor *t, int64_t index) { return heed_load(t->data, t->dtype, index); }

static double dot(const heed_tensor *x, int64_t x_at, const heed_tensor *y, int64_t y_at, int64_t count)
{
    double sum = 0;
    for (int64_t c = 0; c < count; c++)
        sum += load(x, x_at + c * x->stride[3]) * load(y, y_at + c * y->stride[3]);
    return sum;
}

static void add(double *sum, double weight, const heed_tensor *x, int64_t x_at, int64_t count)
{
    for (int64_t c = 0; c < count; c++)
        sum[c] += weight * load(x, x_at + c * x->stride[3]);
}

/* Writes a row of t, where there is a t; values == NULL: zeros. */
static void put(const heed_tensor *t, int64_t t_at, const double *values, int64_t count, int accumulate)
{
    for (int64_t c = 0; c < count && t->data; c++) {
        int64_t index = t_at + c * t->stride[3];
        heed_store(t->data, t->dtype, index, (values ? values[c] : 0) + (accumulate ? load(t, index) : 0));
    }
}

static int64_t position(const row *x) { return x->s->p0 + x->i * x->s->p_step; }

/* S of row x and key n, which the band lets x see; 0 where the mask, or a bias or score of -inf, hides the key. */
static int score(const row *x, int64_t n, pair *pair)
{
    const heed_attention *a = &x->p->a;
    const heed_span *s = x->s;
    int64_t column = s->col + n * s->col_step, r = s->r0 + n * s->r_step;
    if (a->mask.data && load(&a->mask, at(&a->mask, s->b, x->h, x->i, column)) == 0)
        return 0;
    double bias = a->bias.data ? load(&a->bias, at(&a->bias, s->b, x->h, x->i, column)) : 0;
    if (bias == -INFINITY)
        return 0;

    double S = x->p->scale * dot(&a->q, query_at(&a->q, x), &a->k, heed_key_offset(x->p, s, &a->k, x->hk, n), x->p->D);
    pair->cap_slope = 1;
    if (a->softcap > 0) {
        double t = tanh(S / a->softcap);
        S = a->softcap * t;
        pair->cap_slope = 1 - t * t;
    }
    S += bias;
    if (a->alibi.data)
        S -= load(&a->alibi, at(&a->alibi, s->b, x->h, 0, 0)) * fabs((double)(position(x) - r));
    pair->S = S;
    return S != -INFINITY;
}

/* What dropout multiplies P with: 0 or 1/(1-p). */
static double kept(const row *x, int64_t n)
{
    const heed_attention *a = &x->p->a;
    uint64_t seed = a->dropout_seed + (a->dropout_seed_at ? *a->dropout_seed_at : 0);
    if (!heed_keep(seed, x->p->drop_below, x->s->b, x->h, position(x), x->s->r0 + n * x->s->r_step))
        return 0;
    return 65536.0 / (65536.0 - x->p->drop_below);
}

/* ---- Forward ---------------------------------------------------------------------------------------------------- */

static void forward_row(const row *x, double *S)
{
    const heed_attention *a = &x->p->a;
    double o[HEED_MAX_HEAD_DIM] = { 0 }, lse = -INFINITY;
    double sink = a->sink.data ? load(&a->sink, at(&a->sink, 0, x->h, 0, 0)) : -INFINITY;
    double m = sink;
    int64_t first, last, seen = 0;
    heed_band(x->p, x->s, x->i, &first, &last);
    for (int64_t n = first; n < last; n++) {
        pair pair;
        S[n] = score(x, n, &pair) ? pair.S : -INFINITY;
        seen += S[n] != -INFINITY;
        m = S[n] > m ? S[n] : m;
    }
    if (seen) {
        double l = a->sink.data ? exp(sink - m) : 0;
        for (int64_t n = first; n < last; n++)
            l += S[n] == -INFINITY ? 0 : exp(S[n] - m);
        for (int64_t n = first; n < last; n++) {
            double keep = S[n] == -INFINITY ? 0 : kept(x, n);
            if (keep != 0)
                add(o, keep * exp(S[n] - m) / l, &a->v, heed_key_offset(x->p, x->s, &a->v, x->hk, n), x->p->Dv);
        }
        lse = m + log(l);
    }
    put(&a->o, query_at(&a->o, x), o, x->p->Dv, 0);
    put(&a->lse, query_at(&a->lse, x), &lse, 1, 0);
}

size_t heed_forward_workspace_reference(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return (size_t)p->Sk * sizeof(double);
}

heed_status heed_forward_reference(const heed_problem *p, const heed_plan *plan, const heed_exec *exec)
{
    (void)plan;
    const double hidden = -INFINITY;
    for (int64_t b = 0; b < p->B; b++) {
        heed_span s;
        heed_span_of(p, b, &s);
        for (int64_t h = 0; h < p->Hq; h++) {
            row x = { p, &s, h, h / p->G, 0 };
            for (; x.i < s.rows; x.i++)
                forward_row(&x, exec->workspace);
            for (; x.i < s.padded_rows; x.i++) {
                put(&p->a.o, query_at(&p->a.o, &x), NULL, p->Dv, 0);
                put(&p->a.lse, query_at(&p->a.lse, &x), &hidden, 1, 0);
            }
        }
    }
    return HEED_OK;
}

/* ---- Backward --------------------------------------------------------------------------------------------------- */

typedef struct sums {
    double *dK, *dV, *dsink, *dbias;
} sums;

static double delta_of(const row *x)
{
    const heed_attention *a = &x->p->a;
    const heed_gradient *g = &x->p->g;
    if (g->delta.data)
        return load(&g->delta, query_at(&g->delta, x));
    double dlse = g->d_lse.data ? load(&g->d_lse, query_at(&g->d_lse, x)) : 0;
    return dot(&g->d_o, query_at(&g->d_o, x), &a->o, query_at(&a->o, x), x->p->Dv) - dlse;
}

/* exp(S - lse). S never exceeds the true lse, but it may exceed the rounded one, by much where both are huge. */
static double probability(double S, double lse) { return S > lse ? 1 : exp(S - lse); }

/* Where the gradient of bias[b][h][i][column] is summed, in an array as large as d_bias. */
static int64_t bias_at(const heed_tensor *t, int64_t b, int64_t h, int64_t i, int64_t column)
{
    b = t->shape[0] == 1 ? 0 : b;
    h = t->shape[1] == 1 ? 0 : h;
    i = t->shape[2] == 1 ? 0 : i;
    column = t->shape[3] == 1 ? 0 : column;
    return ((b * t->shape[1] + h) * t->shape[2] + i) * t->shape[3] + column;
}

static void backward_row(const row *x, const sums *sums)
{
    const heed_problem *p = x->p;
    const heed_attention *a = &p->a;
    const heed_gradient *g = &p->g;
    double dQ[HEED_MAX_HEAD_DIM] = { 0 }, lse = load(&a->lse, query_at(&a->lse, x));
    int64_t first = 0, last = 0, q = query_at(&a->q, x), d_o = query_at(&g->d_o, x);
    double delta = 0;
    if (lse != -INFINITY) { /* a row that sees no key has no gradient */
        heed_band(p, x->s, x->i, &first, &last);
        delta = delta_of(x);
        if (g->d_sink.data)
            sums->dsink[x->h] -= probability(load(&a->sink, at(&a->sink, 0, x->h, 0, 0)), lse) * delta;
    }
    for (int64_t n = first; n < last; n++) {
        pair pair;
        if (!score(x, n, &pair))
            continue;
        double P = probability(pair.S, lse), keep = kept(x, n), dP = 0;
        if (keep != 0) {
            dP = keep * dot(&g->d_o, d_o, &a->v, heed_key_offset(p, x->s, &a->v, x->hk, n), p->Dv);
            add(sums->dV + n * p->Dv, keep * P, &g->d_o, d_o, p->Dv);
        }
        double dS = P * (dP - delta);
        if (g->d_bias.data)
            sums->dbias[bias_at(&g->d_bias, x->s->b, x->h, x->i, x->s->col + n * x->s->col_step)] += dS;
        double dX = p->scale * pair.cap_slope * dS;
        add(dQ, dX, &a->k, heed_key_offset(p, x->s, &a->k, x->hk, n), p->D);
        add(sums->dK + n * p->D, dX, &a->q, q, p->D);
    }
    put(&g->d_q, query_at(&g->d_q, x), dQ, p->D, g->accumulate);
}

/* Keys of the sequence that no row may see, being padding or off the stride, get zeros. */
static void put_keys(const row *x, const sums *sums)
{
    const heed_gradient *g = &x->p->g;
    const heed_span *s = x->s;
    for (int64_t j = 0; j < s->padded_keys; j++) {
        int64_t n = (j - s->col) / s->col_step, D = x->p->D, Dv = x->p->Dv;
        int counts = j >= s->col && (j - s->col) % s->col_step == 0 && n < s->keys;
        put(&g->d_k, at(&g->d_k, s->k_batch, x->hk, s->k_row + j, 0), counts ? sums->dK + n * D : NULL, D,
            g->accumulate);
        put(&g->d_v, at(&g->d_v, s->k_batch, x->hk, s->k_row + j, 0), counts ? sums->dV + n * Dv : NULL, Dv,
            g->accumulate);
    }
}

static int64_t bias_elements(const heed_tensor *t)
{
    return t->data ? t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3] : 0;
}

size_t heed_backward_workspace_reference(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    return (size_t)(p->Sk * (p->D + p->Dv) + p->Hq + bias_elements(&p->g.d_bias)) * sizeof(double);
}

heed_status heed_backward_reference(const heed_problem *p, const heed_plan *plan, const heed_exec *exec)
{
    (void)plan;
    const heed_gradient *g = &p->g;
    sums sums = { .dK = exec->workspace };
    sums.dV = sums.dK + p->Sk * p->D;
    sums.dsink = sums.dV + p->Sk * p->Dv;
    sums.dbias = sums.dsink + p->Hq;
    memset(sums.dsink, 0, (size_t)(p->Hq + bias_elements(&g->d_bias)) * sizeof(double));

    for (int64_t b = 0; b < p->B; b++) {
        heed_span s;
        heed_span_of(p, b, &s);
        for (int64_t hk = 0; hk < p->Hk; hk++) {
            row x = { p, &s, hk * p->G, hk, 0 };
            memset(sums.dK, 0, (size_t)(p->Sk * (p->D + p->Dv)) * sizeof(double));
            for (; x.h < (hk + 1) * p->G; x.h++) {
                for (x.i = 0; x.i < s.rows; x.i++)
                    backward_row(&x, &sums);
                for (; x.i < s.padded_rows; x.i++)
                    put(&g->d_q, query_at(&g->d_q, &x), NULL, p->D, g->accumulate);
            }
            put_keys(&x, &sums);
        }
    }
    for (int64_t h = 0; h < p->Hq; h++)
        put(&g->d_sink, at(&g->d_sink, 0, h, 0, 0), sums.dsink + h, 1, 0);
    const int64_t *shape = g->d_bias.shape;
    for (int64_t row_at = 0; g->d_bias.data && row_at < shape[0] * shape[1] * shape[2]; row_at++)
        put(&g->d_bias,
            at(&g->d_bias, row_at / shape[2] / shape[1], row_at / shape[2] % shape[1], row_at % shape[2], 0),
            sums.dbias + row_at * shape[3], shape[3], 0);
    return HEED_OK;
}
