/* The plain computation: S = Q K^T, softmax, O = P V and their gradients as a framework does them, one matrix at a
 * time, each rounded to the dtype, sums in fp32. It is written from heed.h alone and shares no code with src/ but the
 * dropout bits, so it is also a second opinion on which key a row sees. In fp64 nothing is rounded.
 *
 * Beside each value goes a magnitude: the same sums over absolute values, which is what the rounding errors of any way
 * to compute it are proportional to.
 */
#include "harness.h"

typedef struct plain {
    test_case *c;
    heed_dtype dtype;
    int64_t Hq, Hk, D, Dv;
    double *q, *k, *v, *dO, *dlse; /* unpacked inputs */
    double scale, cap;
    uint32_t drop_below;
    results value, magnitude;
} plain;

/* One sequence and head. The matrices are [Lq][Lk], zero where hidden. */
typedef struct head {
    int64_t b, h, hk, Lq, Lk;
    unsigned char *seen;
    double *P, *dropped, *slope; /* dropped: P after dropout; slope: of softcap */
    double *exact;               /* P without rounding: a bias of 800 rounded to bf16 makes P wrong by a factor of 7 */
    double *S_size;              /* [Lq]: how large a sum the scores of the row come from, see sensitivity() */
} head;

static double rounded(const plain *n, double x)
{
    _Alignas(8) unsigned char element[8];
    if (n->dtype == HEED_F64)
        return x;
    heed_store(element, HEED_F32, 0, x);
    x = heed_load(element, HEED_F32, 0);
    heed_store(element, n->dtype, 0, x);
    return heed_load(element, n->dtype, 0);
}

static double sum(const plain *n, double total, double term)
{
    return n->dtype == HEED_F64 ? total + term : (double)(float)(total + term);
}

/* ---- Where things are ------------------------------------------------------------------------------------------- */

static int64_t q_row(const plain *n, const head *x, int64_t i)
{
    const heed_attention *a = &n->c->a;
    int64_t b = a->offsets_q ? 0 : x->b, row = a->offsets_q ? a->offsets_q[x->b] + i : i;
    return (b * n->Hq + x->h) * a->q.shape[2] + row;
}

static int64_t k_row(const plain *n, const head *x, int64_t j)
{
    const heed_attention *a = &n->c->a;
    int64_t b = x->b, row = j, page = a->k.shape[2];
    if (a->block_table)
        b = a->block_table[x->b * a->block_table_stride + j / page], row = j % page;
    else if (a->offsets_k)
        b = 0, row = a->offsets_k[x->b] + j;
    return (b * n->Hk + x->hk) * a->k.shape[2] + row;
}

static int64_t length(const int32_t *lengths, const int32_t *offsets, int64_t b, int64_t whole)
{
    return lengths ? lengths[b] : offsets ? offsets[b + 1] - offsets[b] : whole;
}

/* ---- heed.h, word by word --------------------------------------------------------------------------------------- */

static int64_t p_of(const plain *n, const head *x, int64_t i)
{
    const heed_attention *a = &n->c->a;
    if (a->align == HEED_ALIGN_POSITION)
        return a->query_position + i * (a->query_step ? a->query_step : 1);
    return a->align == HEED_ALIGN_TOP_LEFT ? i : i + x->Lk - x->Lq;
}

static int64_t r_of(const plain *n, int64_t j)
{
    const heed_attention *a = &n->c->a;
    return a->align == HEED_ALIGN_POSITION ? a->key_position + j * (a->key_step ? a->key_step : 1) : j;
}

static int visible(const plain *n, const head *x, int64_t i, int64_t j)
{
    const heed_attention *a = &n->c->a;
    int64_t p = p_of(n, x, i), r = r_of(n, j);
    if (a->causal && r > p)
        return 0;
    if (a->windowed && a->window_left != -1 && r < p - a->window_left)
        return 0;
    if (a->windowed && a->window_right != -1 && r > p + a->window_right)
        return 0;
    if (a->key_stride > 1 && r % a->key_stride != 0)
        return 0;
    if (a->mask.data && get(&a->mask, x->b, x->h, i, j) == 0)
        return 0;
    return !a->bias.data || get(&a->bias, x->b, x->h, i, j) != -INFINITY;
}

static double keep(const plain *n, const head *x, int64_t i, int64_t j)
{
    const heed_attention *a = &n->c->a;
    uint64_t seed = a->dropout_seed + (a->dropout_seed_at ? *a->dropout_seed_at : 0);
    if (!n->drop_below)
        return 1;
    int kept = heed_keep(seed, n->drop_below, x->b, x->h, p_of(n, x, i), r_of(n, j));
    return kept ? 1 / (1 - n->drop_below / 65536.0) : 0;
}

/* exact: the same without rounding. */
static double score(const plain *n, head *x, int64_t i, int64_t j, double *exact)
{
    const heed_attention *a = &n->c->a;
    const double *q = n->q + q_row(n, x, i) * n->D, *k = n->k + k_row(n, x, j) * n->D;
    double S = 0, size = 0, E = 0;
    for (int64_t d = 0; d < n->D; d++) {
        S = sum(n, S, q[d] * k[d]), E += q[d] * k[d];
        size += 2 * fabs(n->scale * q[d] * k[d]); /* the largest of all rows' errors counts: once is short of it */
    }
    S = rounded(n, rounded(n, S) * n->scale), E *= n->scale;
    x->slope[i * x->Lk + j] = 1;
    if (n->cap > 0) {
        double t = rounded(n, tanh(rounded(n, S / n->cap)));
        S = rounded(n, t * n->cap), E = n->cap * tanh(E / n->cap);
        x->slope[i * x->Lk + j] = 1 - t * t;
    }
    if (a->bias.data) {
        double bias = get(&a->bias, x->b, x->h, i, j);
        S = rounded(n, S + bias), E += bias;
        size += fabs(bias);
    }
    if (a->alibi.data) {
        double alibi = get(&a->alibi, x->b, x->h, 0, 0) * fabs((double)(p_of(n, x, i) - r_of(n, j)));
        S = rounded(n, S - alibi), E -= alibi;
        size += fabs(alibi);
    }
    x->S_size[i] = HEED_MAX(x->S_size[i], size);
    *exact = E;
    return S;
}

/* ---- The matrices ----------------------------------------------------------------------------------------------- */

/* How many roundings to the dtype an error of the scores, which are in fp32, amounts to in P. */
static double sensitivity(const plain *n, const head *x, int64_t i)
{
    double u = n->dtype == HEED_BF16  ? 0x1p-8
               : n->dtype == HEED_F16 ? 0x1p-11
               : n->dtype == HEED_F32 ? 0x1p-24
                                      : 0x1p-53;
    return 1 + (8 + x->S_size[i]) * (0x1p-24 / u);
}

/* P below the smallest normal number of fp16 has an error of its own. */
static double P_size(const plain *n, const head *x, int64_t i, int64_t j)
{
    int64_t at = i * x->Lk + j;
    return x->seen[at] ? (x->exact[at] + (n->dtype == HEED_F16 ? 0x1p-14 : 0)) * sensitivity(n, x, i) : 0;
}

static void softmax_row(const plain *n, head *x, int64_t i)
{
    const heed_attention *a = &n->c->a;
    double *P = x->P + i * x->Lk, sink = a->sink.data ? get(&a->sink, 0, x->h, 0, 0) : -INFINITY, m = sink, l = 0;
    double *exact = x->exact + i * x->Lk, exact_m = sink, exact_l = 0;
    int any = 0;
    for (int64_t j = 0; j < x->Lk; j++)
        if ((x->seen[i * x->Lk + j] = (unsigned char)visible(n, x, i, j))) {
            P[j] = score(n, x, i, j, &exact[j]);
            m = P[j] > m ? P[j] : m;
            exact_m = exact[j] > exact_m ? exact[j] : exact_m;
            any = 1;
        }
    if (!any)
        return;
    if (a->sink.data) {
        l = exp(sink - m), exact_l = exp(sink - exact_m);
        x->S_size[i] = HEED_MAX(x->S_size[i], fabs(sink));
    }
    for (int64_t j = 0; j < x->Lk; j++)
        if (x->seen[i * x->Lk + j]) {
            l = sum(n, l, exp(P[j] - m));
            exact_l += exact[j] = exp(exact[j] - exact_m);
        }
    for (int64_t j = 0; j < x->Lk; j++)
        if (x->seen[i * x->Lk + j]) {
            exact[j] /= exact_l;
            P[j] = rounded(n, exp(P[j] - m) / l);
            x->dropped[i * x->Lk + j] = rounded(n, P[j] * keep(n, x, i, j));
        }
    n->value.at[OUT_LSE][q_row(n, x, i)] = m + log(l);
    n->magnitude.at[OUT_LSE][q_row(n, x, i)] = 8 + x->S_size[i] + fabs(m + log(l));
}

static void values_row(const plain *n, const head *x, int64_t i)
{
    double *o = n->value.at[OUT_O] + q_row(n, x, i) * n->Dv, *size = n->magnitude.at[OUT_O] + q_row(n, x, i) * n->Dv;
    for (int64_t j = 0; j < x->Lk; j++) {
        const double *v = n->v + k_row(n, x, j) * n->Dv, P = P_size(n, x, i, j) * keep(n, x, i, j);
        for (int64_t c = 0; c < n->Dv && x->seen[i * x->Lk + j]; c++) {
            o[c] = sum(n, o[c], x->dropped[i * x->Lk + j] * v[c]);
            size[c] += P * fabs(v[c]);
        }
    }
    for (int64_t c = 0; c < n->Dv; c++)
        o[c] = rounded(n, o[c]);
}

/* dS of one row, and the size of the sums behind it. */
static void gradient_row(const plain *n, const head *x, int64_t i, double *dS, double *dS_size)
{
    const double *dO = n->dO + q_row(n, x, i) * n->Dv, *o_size = n->magnitude.at[OUT_O] + q_row(n, x, i) * n->Dv;
    double dlse = n->dlse ? n->dlse[q_row(n, x, i)] : 0, mean = 0, delta_size = fabs(dlse);
    for (int64_t c = 0; c < n->Dv; c++)
        delta_size += fabs(dO[c]) * o_size[c];
    for (int64_t j = 0; j < x->Lk; j++) {
        int64_t at = i * x->Lk + j;
        const double *v = n->v + k_row(n, x, j) * n->Dv, kept = keep(n, x, i, j);
        dS[j] = dS_size[j] = 0;
        for (int64_t c = 0; c < n->Dv && x->seen[at]; c++) {
            dS[j] = sum(n, dS[j], dO[c] * v[c]);
            dS_size[j] += fabs(dO[c] * v[c]) * kept;
        }
        if (x->seen[at]) {
            dS[j] = rounded(n, rounded(n, dS[j]) * kept);
            dS_size[j] = (dS_size[j] + delta_size) * P_size(n, x, i, j) + (n->dtype == HEED_F16 ? 0x1p-14 : 0);
            mean = sum(n, mean, x->P[at] * dS[j]);
        }
    }
    for (int64_t j = 0; j < x->Lk; j++)
        dS[j] = rounded(n, x->P[i * x->Lk + j] * (dS[j] - mean + dlse));
    if (n->value.at[OUT_DSINK] && isfinite(n->value.at[OUT_LSE][q_row(n, x, i)])) {
        double P = exp(get(&n->c->a.sink, 0, x->h, 0, 0) - n->value.at[OUT_LSE][q_row(n, x, i)]);
        n->value.at[OUT_DSINK][x->h] -= P * (mean - dlse);
        n->magnitude.at[OUT_DSINK][x->h] += P * delta_size * sensitivity(n, x, i);
    }
}

/* What row i adds to the gradients; dK and dV of this head, dQ, dbias. */
static void spread_row(const plain *n, const head *x, int64_t i, const double *dS, const double *dS_size)
{
    int64_t q = q_row(n, x, i);
    for (int64_t j = 0; j < x->Lk; j++) {
        int64_t at = i * x->Lk + j, k = k_row(n, x, j);
        if (!x->seen[at])
            continue;
        double dX = rounded(n, dS[j] * x->slope[at]), dX_size = fabs(n->scale) * dS_size[j];
        double dropped_size = P_size(n, x, i, j) * keep(n, x, i, j);
        for (int64_t d = 0; d < n->D && n->value.at[OUT_DQ]; d++) {
            n->value.at[OUT_DQ][q * n->D + d] = sum(n, n->value.at[OUT_DQ][q * n->D + d], dX * n->k[k * n->D + d]);
            n->magnitude.at[OUT_DQ][q * n->D + d] += dX_size * fabs(n->k[k * n->D + d]);
        }
        for (int64_t d = 0; d < n->D && n->value.at[OUT_DK]; d++) {
            n->value.at[OUT_DK][k * n->D + d] = sum(n, n->value.at[OUT_DK][k * n->D + d], dX * n->q[q * n->D + d]);
            n->magnitude.at[OUT_DK][k * n->D + d] += dX_size * fabs(n->q[q * n->D + d]);
        }
        for (int64_t c = 0; c < n->Dv && n->value.at[OUT_DV]; c++) {
            double dO = n->dO[q * n->Dv + c], *dV = &n->value.at[OUT_DV][k * n->Dv + c];
            *dV = sum(n, *dV, x->dropped[at] * dO);
            n->magnitude.at[OUT_DV][k * n->Dv + c] += dropped_size * fabs(dO);
        }
        if (n->value.at[OUT_DBIAS]) {
            heed_tensor packed = n->c->g.d_bias;
            memset(packed.stride, 0, sizeof packed.stride);
            n->value.at[OUT_DBIAS][element(&packed, x->b, x->h, i, j)] += dS[j];
            n->magnitude.at[OUT_DBIAS][element(&packed, x->b, x->h, i, j)] += dS_size[j];
        }
    }
}

static void plain_head(const plain *n, head *x)
{
    size_t pairs = (size_t)(x->Lq * x->Lk) + 1;
    x->seen = calloc(pairs, 1);
    x->P = calloc(pairs, sizeof(double));
    x->exact = calloc(pairs, sizeof(double));
    x->dropped = calloc(pairs, sizeof(double));
    x->slope = calloc(pairs, sizeof(double));
    x->S_size = calloc((size_t)x->Lq + 1, sizeof(double));
    double *dS = calloc((size_t)x->Lk + 1, sizeof(double)), *dS_size = calloc((size_t)x->Lk + 1, sizeof(double));
    for (int64_t i = 0; i < x->Lq; i++) {
        softmax_row(n, x, i);
        values_row(n, x, i);
        if (n->dO) {
            gradient_row(n, x, i, dS, dS_size);
            spread_row(n, x, i, dS, dS_size);
        }
    }
    free(x->seen), free(x->P), free(x->exact), free(x->dropped), free(x->slope), free(x->S_size);
    free(dS), free(dS_size);
}

static double *zeros(test_case *c, const heed_tensor *t)
{
    if (!t->data)
        return NULL;
    double *values = case_memory(c, (size_t)elements(t) * sizeof *values, 0);
    for (int64_t at = 0; at < elements(t); at++)
        values[at] = 0;
    return values;
}

results case_naive(test_case *c, results *magnitude)
{
    const heed_attention *a = &c->a;
    plain n = { .c = c,
                .dtype = c->kernel.dtype,
                .Hq = a->q.shape[1],
                .Hk = a->k.shape[1],
                .D = a->q.shape[3],
                .Dv = a->v.shape[3],
                .cap = a->softcap,
                .drop_below = (uint32_t)lrint(a->dropout * 65536.0) };
    n.scale = a->zero_scale ? 0 : a->scale != 0 ? a->scale : 1 / sqrt((double)n.D);
    n.q = unpack(c, &a->q), n.k = unpack(c, &a->k), n.v = unpack(c, &a->v);
    n.dO = c->kernel.backward ? unpack(c, &c->g.d_o) : NULL;
    n.dlse = unpack(c, &c->g.d_lse);
    for (int which = 0; which < OUTPUTS; which++) {
        n.value.at[which] = zeros(c, output_of(c, which));
        n.magnitude.at[which] = zeros(c, output_of(c, which));
    }
    heed_tensor lse = a->o;
    lse.shape[3] = 1;
    if (!n.value.at[OUT_LSE])
        n.value.at[OUT_LSE] = zeros(c, &lse), n.magnitude.at[OUT_LSE] = zeros(c, &lse);
    for (int64_t row = 0; row < elements(&lse); row++)
        n.value.at[OUT_LSE][row] = -INFINITY;

    for (int64_t b = 0; b < case_sequences(c); b++)
        for (int64_t h = 0; h < n.Hq; h++) {
            head x = { .b = b, .h = h, .hk = h / (n.Hq / n.Hk) };
            x.Lq = length(a->lengths_q, a->offsets_q, b, case_rows(c));
            x.Lk = length(a->lengths_k, a->offsets_k, b, case_keys(c));
            plain_head(&n, &x);
        }
    for (int which = OUT_DQ; which <= OUT_DV; which++)
        for (int64_t at = 0; at < elements(output_of(c, which)) && n.value.at[which]; at++) {
            double x = rounded(&n, n.value.at[which][at]);
            n.value.at[which][at] = which == OUT_DV ? x : rounded(&n, x * n.scale);
        }
    *magnitude = n.magnitude;
    return n.value;
}
