/* A problem in memory: sizes, rules and parts -> tensors full of random numbers, ready for heed_forward() and
 * heed_backward(). What no result may depend on holds NaN, and outputs start as NaN, so that a kernel which reads or
 * forgets something shows it. */
#include "cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE = 16 };
#define MOST_ELEMENTS ((int64_t)1 << 56) /* no memory holds more, and as bytes they can be counted */

uint64_t random_next(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

double random_unit(uint64_t *state) { return (double)(random_next(state) >> 11) * 0x1p-53; }

int64_t random_below(uint64_t *state, int64_t n) { return (int64_t)(random_unit(state) * (double)n); }

/* Bell-shaped, variance 1: the sum of three uniform numbers, each of variance 1/3. */
static double random_normal(uint64_t *state)
{
    return 2 * (random_unit(state) + random_unit(state) + random_unit(state)) - 3;
}

/* ---- Memory ----------------------------------------------------------------------------------------------------- */

static void *keep(workload *w, size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 127) / 64 * 64); /* never 0 bytes */
    if (memory)
        w->memory[w->memories++] = memory;
    return memory;
}

static void fill_nan(void *data, heed_dtype dtype, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        element_store(data, dtype, i, NAN);
}

/* A tensor of NaN. A view has the order bshd, three elements between its rows, and starts off any 16-byte boundary. */
static int make(workload *w, heed_tensor *t, heed_dtype dtype, sizes n, int view)
{
    int64_t B = n.B, H = n.Hq, S = n.Sq, D = n.D, row, count;
    if (__builtin_add_overflow(D, 3 * view, &row) || __builtin_mul_overflow(B, H, &count) ||
        __builtin_mul_overflow(count, S, &count) || __builtin_mul_overflow(count, row, &count) || count > MOST_ELEMENTS)
        return 0;
    *t = (heed_tensor){ .dtype = dtype, .shape = { B, H, S, D }, .stride = { H * S * D, S * D, D, 1 } };
    if (view)
        memcpy(t->stride, (int64_t[4]){ S * H * row, row, H * row, 1 }, sizeof t->stride);
    char *memory = keep(w, (size_t)(count + view) * element_size(dtype));
    if (!memory)
        return 0;
    fill_nan(memory, dtype, count + view);
    t->data = memory + (size_t)view * element_size(dtype);
    return 1;
}

static int64_t index_of(const heed_tensor *t, int64_t b, int64_t h, int64_t i, int64_t c)
{
    return b * t->stride[0] + h * t->stride[1] + i * t->stride[2] + c * t->stride[3];
}

/* Every element of t. */
#define FOR_EACH(t, b, h, i, c)                                                                                        \
    for (int64_t b = 0; b < (t)->shape[0]; b++)                                                                        \
        for (int64_t h = 0; h < (t)->shape[1]; h++)                                                                    \
            for (int64_t i = 0; i < (t)->shape[2]; i++)                                                                \
                for (int64_t c = 0; c < (t)->shape[3]; c++)

static void fill_normal(const heed_tensor *t, uint64_t *state)
{
    FOR_EACH(t, b, h, i, c)
    element_store(t->data, t->dtype, index_of(t, b, h, i, c), random_normal(state));
}

static void spoil_row(const heed_tensor *t, int64_t b, int64_t i)
{
    for (int64_t h = 0; t->data && h < t->shape[1]; h++)
        for (int64_t c = 0; c < t->shape[3]; c++)
            element_store(t->data, t->dtype, index_of(t, b, h, i, c), NAN);
}

static void spoil(const heed_tensor *t)
{
    for (int64_t b = 0; t->data && b < t->shape[0]; b++)
        for (int64_t i = 0; i < t->shape[2]; i++)
            spoil_row(t, b, i);
}

/* ---- Lengths, offsets and pages --------------------------------------------------------------------------------- */

/* One length for each sequence, at least one of them full and perhaps one empty. */
static int32_t *make_lengths(workload *w, int64_t B, int64_t full, uint64_t *state)
{
    int32_t *lengths = keep(w, (size_t)B * sizeof *lengths);
    for (int64_t b = 0; lengths && b < B; b++)
        lengths[b] = (int32_t)(b == B / 2 ? full : random_below(state, full + 1));
    return lengths;
}

static int32_t *make_offsets(workload *w, int64_t B, const int32_t *lengths)
{
    int32_t *offsets = keep(w, (size_t)(B + 1) * sizeof *offsets);
    if (!offsets || !lengths)
        return NULL;
    offsets[0] = 0;
    for (int64_t b = 0; b < B; b++)
        offsets[b + 1] = offsets[b] + lengths[b];
    return offsets;
}

/* Every sequence has pages of its own, dealt out in a shuffled order. */
static int32_t *make_table(workload *w, int64_t pages, uint64_t *state)
{
    int32_t *table = keep(w, (size_t)pages * sizeof *table);
    for (int64_t i = 0; table && i < pages; i++) {
        int64_t j = random_below(state, i + 1);
        table[i] = table[j];
        table[j] = (int32_t)i;
    }
    return table;
}

/* Where the sequences lie: fills in lengths, offsets and tables, and makes the sizes of q and k those in memory. */
static int make_sequences(workload *w, const workload_spec *s, sizes *q, sizes *k, uint64_t *state)
{
    heed_attention *a = &w->a;
    int64_t B = s->n.B;
    if (s->with & WITH_RAGGED) {
        a->sequences = B;
        a->max_rows = s->n.Sq;
        a->max_keys = s->n.Sk;
        a->offsets_q = make_offsets(w, B, make_lengths(w, B, s->n.Sq, state));
        a->offsets_k = make_offsets(w, B, make_lengths(w, B, s->n.Sk, state));
        if (!a->offsets_q || !a->offsets_k)
            return 0;
        q->B = k->B = 1;
        q->Sq = a->offsets_q[B];
        k->Sq = a->offsets_k[B];
    } else if (s->with & (WITH_PADDING | WITH_PAGES)) {
        a->lengths_q = s->with & WITH_PADDING ? make_lengths(w, B, s->n.Sq, state) : NULL;
        a->lengths_k = make_lengths(w, B, s->n.Sk, state);
        if (!a->lengths_k || ((s->with & WITH_PADDING) && !a->lengths_q))
            return 0;
    }
    if (s->with & WITH_PAGES) {
        int64_t columns = (s->n.Sk + PAGE - 1) / PAGE;
        a->block_table_stride = a->block_table_columns = columns;
        if (!(a->block_table = make_table(w, B * columns, state)))
            return 0;
        k->B = B * columns;
        k->Sq = PAGE;
    }
    return 1;
}

/* NaN into the rows and keys that no result may depend on. */
static void spoil_hidden(workload *w, const workload_spec *s)
{
    const heed_attention *a = &w->a;
    int64_t stride = s->r.stride ? s->r.stride : 1;
    for (int64_t b = 0; b < s->n.B; b++) {
        for (int64_t i = a->lengths_q ? a->lengths_q[b] : s->n.Sq; i < s->n.Sq; i++) {
            spoil_row(&a->q, b, i);
            spoil_row(&w->g.d_o, b, i);
            spoil_row(&w->g.d_lse, b, i);
        }
        int64_t keys = a->offsets_k ? a->offsets_k[b + 1] - a->offsets_k[b] : s->n.Sk;
        if (a->block_table)
            keys = a->block_table_columns * PAGE;
        for (int64_t j = 0; j < keys; j++) {
            if (j % stride == 0 && (!a->lengths_k || j < a->lengths_k[b]))
                continue;
            int64_t batch = a->offsets_k ? 0 : b, row = a->offsets_k ? a->offsets_k[b] + j : j;
            if (a->block_table) {
                batch = a->block_table[b * a->block_table_stride + j / PAGE];
                row = j % PAGE;
            }
            spoil_row(&a->k, batch, row);
            spoil_row(&a->v, batch, row);
        }
    }
}

/* ---- The whole problem ------------------------------------------------------------------------------------------ */

/* Odd and even seeds broadcast differently. Some rows of a mask hide every key; a bias has a few -inf. */
static int make_scores(workload *w, const workload_spec *s, uint64_t *state)
{
    heed_attention *a = &w->a;
    int odd = (int)(s->seed & 1);
    int64_t B = s->n.B, H = s->n.Hq, Sq = s->n.Sq, Sk = a->block_table ? a->block_table_columns * PAGE : s->n.Sk;
    if (s->with & WITH_MASK) {
        if (!make(w, &a->mask, HEED_BOOL, (sizes){ .B = odd ? 1 : B, .Hq = odd ? H : 1, .Sq = Sq, .D = Sk }, 0))
            return 0;
        FOR_EACH(&a->mask, b, h, i, j)
        element_store(a->mask.data, HEED_BOOL, index_of(&a->mask, b, h, i, j), i % 17 != 3 && random_unit(state) < 0.8);
    }
    if (s->with & WITH_BIAS) {
        sizes n = { .B = odd ? B : 1, .Hq = odd ? 1 : H, .Sq = odd ? 1 : Sq, .D = Sk };
        if (!make(w, &a->bias, HEED_F32, n, 0) || !make(w, &w->g.d_bias, HEED_F32, n, 0))
            return 0;
        FOR_EACH(&a->bias, b, h, i, j)
        element_store(a->bias.data, HEED_F32, index_of(&a->bias, b, h, i, j),
                      random_unit(state) < 0.02 ? -INFINITY : random_normal(state));
    }
    sizes heads = { .B = 1, .Hq = H, .Sq = 1, .D = 1 };
    if (s->with & WITH_ALIBI) {
        if (!make(w, &a->alibi, HEED_F32, heads, 0))
            return 0;
        for (int64_t h = 0; h < H; h++)
            element_store(a->alibi.data, HEED_F32, h, exp2(-8 * (double)(h + 1) / (double)H));
    }
    if (s->with & WITH_SINK) {
        if (!make(w, &a->sink, HEED_F32, heads, 0) || !make(w, &w->g.d_sink, HEED_F32, heads, 0))
            return 0;
        fill_normal(&a->sink, state);
    }
    return 1;
}

int workload_new(workload *w, const workload_spec *s)
{
    *w = (workload){ 0 };
    heed_attention *a = &w->a;
    heed_gradient *g = &w->g;
    heed_dtype dtype = s->dtype;
    uint64_t state = s->seed;
    int view = (s->with & WITH_VIEWS) != 0;
    /* make() reads B, Hq, Sq and D: a key tensor is a query tensor with other numbers in them. */
    sizes q = s->n, k = s->n;
    k.Hq = s->n.Hk;
    k.Sq = s->n.Sk;
    int good = make_sequences(w, s, &q, &k, &state);
    sizes o = q, v = k, one = q;
    o.D = v.D = s->n.Dv;
    one.D = 1;
    good = good && make(w, &a->q, dtype, q, view) && make(w, &a->k, dtype, k, view) && make(w, &a->v, dtype, v, view) &&
           make(w, &a->o, dtype, o, view) && make(w, &a->lse, HEED_F32, one, view) && make_scores(w, s, &state);
    if (!(s->with & WITH_PAGES))
        good = good && make(w, &g->d_o, dtype, o, view) && make(w, &g->d_q, dtype, q, view) &&
               make(w, &g->d_k, dtype, k, view) && make(w, &g->d_v, dtype, v, view);
    if (s->with & WITH_D_LSE)
        good = good && make(w, &g->d_lse, HEED_F32, one, view);
    if (!good) {
        workload_free(w);
        return 0;
    }
    const heed_tensor *inputs[] = { &a->q, &a->k, &a->v, &g->d_o, &g->d_lse };
    for (int i = 0; i < 5; i++)
        if (inputs[i]->data)
            fill_normal(inputs[i], &state);
    rules_apply(&s->r, a);
    spoil_hidden(w, s);
    return 1;
}

/* ---- Its twin in fp64 ------------------------------------------------------------------------------------------- */

static int copy(workload *to, heed_tensor *t, const heed_tensor *from, heed_dtype dtype)
{
    if (!from->data)
        return 1;
    const int64_t *n = from->shape;
    if (!make(to, t, dtype, (sizes){ .B = n[0], .Hq = n[1], .Sq = n[2], .D = n[3] }, 0))
        return 0;
    FOR_EACH(from, b, h, i, c)
    element_store(t->data, dtype, index_of(t, b, h, i, c), tensor_at(from, b, h, i, c));
    return 1;
}

int workload_twin(workload *twin, const workload *w)
{
    *twin = (workload){ .a = w->a, .g = w->g, .x = { .backend = HEED_REFERENCE } };
    heed_attention *a = &twin->a;
    heed_gradient *g = &twin->g;
    heed_tensor *inputs[] = { &a->q, &a->k, &a->v, &a->bias, &g->d_o, &g->d_lse };
    heed_tensor *outputs[] = { &a->o, &a->lse, &g->d_q, &g->d_k, &g->d_v, &g->d_bias, &g->d_sink };
    int good = 1;
    for (int i = 0; i < 6; i++) {
        heed_tensor from = *inputs[i];
        good = good && copy(twin, inputs[i], &from, inputs[i] == &g->d_lse ? HEED_F32 : HEED_F64);
    }
    for (int i = 0; i < 7; i++) {
        heed_tensor from = *outputs[i];
        int single = outputs[i] == &a->lse || outputs[i] == &g->d_sink;
        good = good && copy(twin, outputs[i], &from, single ? HEED_F32 : HEED_F64);
    }
    if (!good)
        workload_free(twin);
    return good;
}

void tensor_nudge(const heed_tensor *t, double part, uint64_t *state)
{
    if (t->data)
        FOR_EACH(t, b, h, i, c)
    element_store(t->data, t->dtype, index_of(t, b, h, i, c),
                  tensor_at(t, b, h, i, c) * (1 + (random_next(state) & 1 ? part : -part)));
}

/* ---- Running it ------------------------------------------------------------------------------------------------- */

static heed_status make_room(workload *w, const heed_gradient *g)
{
    size_t bytes;
    heed_status status = heed_workspace_size(&w->a, g, &w->x, &bytes);
    if (status || bytes <= w->room)
        return status;
    free(w->x.workspace);
    w->room = (bytes + 63) / 64 * 64;
    w->x.workspace = aligned_alloc(64, w->room);
    if (!w->x.workspace)
        w->room = 0; /* heed says what is missing */
    w->x.workspace_bytes = w->room;
    return HEED_OK;
}

void workload_use(workload *w, const heed_exec *x)
{
    void *workspace = w->x.workspace;
    w->x = *x;
    w->x.workspace = workspace;
    w->x.workspace_bytes = w->room;
}

heed_status workload_forward(workload *w)
{
    if (w->x.backend == HEED_CUDA)
        return gpu_run(&w->a, NULL, &w->x);
    heed_status status = make_room(w, NULL);
    return status ? status : heed_forward(&w->a, &w->x);
}

heed_status workload_backward(workload *w)
{
    if (w->x.backend == HEED_CUDA)
        return gpu_run(&w->a, &w->g, &w->x);
    heed_status status = make_room(w, &w->g);
    return status ? status : heed_backward(&w->a, &w->g, &w->x);
}

void workload_spoil(workload *w, int backward)
{
    const heed_tensor *forward[] = { &w->a.o, &w->a.lse };
    const heed_tensor *gradients[] = { &w->g.d_q, &w->g.d_k, &w->g.d_v, &w->g.d_bias, &w->g.d_sink };
    for (int i = 0; i < (backward ? 5 : 2); i++)
        spoil(backward ? gradients[i] : forward[i]);
}

void workload_free(workload *w)
{
    for (int i = 0; i < w->memories; i++)
        free(w->memory[i]);
    free(w->x.workspace);
    *w = (workload){ 0 };
}

difference tensor_difference(const heed_tensor *got, const heed_tensor *want)
{
    difference d = { 0 };
    double error_squares = 0, want_squares = 0, count = 0;
    FOR_EACH(want, b, h, i, c)
    {
        double x = tensor_at(got, b, h, i, c), y = tensor_at(want, b, h, i, c);
        double error = x == y ? 0 : fabs(x - y), size = isfinite(y) ? fabs(y) : 0;
        if (isnan(error))
            error = INFINITY;
        d.max = fmax(d.max, error);
        d.want_max = fmax(d.want_max, size);
        error_squares += error * error;
        want_squares += size * size;
        count++;
    }
    d.rms = count > 0 ? sqrt(error_squares / count) : 0;
    d.want_rms = count > 0 ? sqrt(want_squares / count) : 0;
    return d;
}
