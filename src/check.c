/* Every rule of heed.h about arguments, once, each with its own message. What passes becomes a heed_problem, in which
 * nothing is left to default, so that no kernel has to know a rule. The rules about a tensor by itself are in view.c,
 * those about sequences of different length in sequences.c.
 *
 * Messages name the argument, say what it was, and what was expected: "k: head_dim is 64, q has 128".
 */
#include "internal.h"

#include <inttypes.h>
#include <math.h>

#define BAD(...) return heed_fail(HEED_BAD_ARGUMENT, __VA_ARGS__)

/* Rows (or keys) times heads times sequences stay below this, so that kernels may multiply by bytes of a row. */
#define MOST_ROWS ((int64_t)1 << 48)
/* Positions stay within this, so that kernels may subtract them. */
#define FARTHEST ((int64_t)1 << 61)

enum { F32 = 1 << HEED_F32, FLOATS = F32 | 1 << HEED_F16 | 1 << HEED_BF16, F64 = 1 << HEED_F64 };

/* ---- Shapes ----------------------------------------------------------------------------------------------------- */

static const char *const row_dims[4] = { "batch", "heads", "rows", "head_dim" };
static const char *const key_dims[4] = { "batch", "heads", "keys", "head_dim" };
static const char *const page_dims[4] = { "pages", "heads", "page size", "head_dim" };
static const char *const score_dims[4] = { "batch", "heads", "rows", "keys" };

/* A size, and in the words of a message whose it is: { 128, "q has" }. No words: any size will do. */
typedef struct size {
    int64_t is;
    const char *whose;
} size;

#define ANY                                                                                                            \
    {                                                                                                                  \
        0, NULL                                                                                                        \
    }

static heed_status check_shape(const char *name, const heed_tensor *t, const char *const dims[4], const size want[4])
{
    for (int d = 0; d < 4; d++)
        if (want[d].whose && t->shape[d] != want[d].is)
            BAD("%s: %s is %" PRId64 ", %s %" PRId64, name, dims[d], t->shape[d], want[d].whose, want[d].is);
    return HEED_OK;
}

/* Planning takes a tensor as there if its shape says so. */
static int present(const heed_tensor *t, int planning)
{
    if (t->data)
        return 1;
    return planning && t->shape[0] > 0 && t->shape[1] > 0 && t->shape[2] > 0 && t->shape[3] > 0;
}

static void stand_in(heed_tensor *t, int planning)
{
    if (!t->data && present(t, planning))
        t->data = heed_stand_in;
}

/* A tensor that must be there unless it has no element. */
static heed_status take(const char *name, heed_tensor *t, unsigned dtypes, const char *const dims[4],
                        const size want[4], int planning)
{
    heed_status s;
    stand_in(t, planning);
    if ((s = heed_view(name, t, dtypes)))
        return s;
    return check_shape(name, t, dims, want);
}

static heed_status take_optional(const char *name, heed_tensor *t, unsigned dtypes, const char *const dims[4],
                                 const size want[4], int planning)
{
    if (!present(t, planning)) {
        *t = (heed_tensor){ 0 };
        return HEED_OK;
    }
    return take(name, t, dtypes, dims, want, planning);
}

/* Optional, each size that of scores or 1, in which case its stride becomes 0. */
static heed_status take_broadcast(const char *name, heed_tensor *t, unsigned dtypes, const int64_t scores[4],
                                  int planning)
{
    static const size any[4] = { ANY, ANY, ANY, ANY };
    heed_status s = take_optional(name, t, dtypes, score_dims, any, planning);
    for (int d = 0; !s && t->data && d < 4; d++) {
        if (t->shape[d] != 1 && scores[d] == 1)
            BAD("%s: %s is %" PRId64 ", expected 1", name, score_dims[d], t->shape[d]);
        if (t->shape[d] != 1 && t->shape[d] != scores[d])
            BAD("%s: %s is %" PRId64 ", expected %" PRId64 " or 1", name, score_dims[d], t->shape[d], scores[d]);
        if (t->shape[d] == 1)
            t->stride[d] = 0;
    }
    return s;
}

/* ---- q, k, v, o, lse -------------------------------------------------------------------------------------------- */

static heed_status check_total(const char *name, const heed_problem *p, int64_t length, const char *of)
{
    int64_t heads, total;
    if (__builtin_mul_overflow(p->B, p->Hq, &heads) || __builtin_mul_overflow(heads, HEED_MAX(length, 1), &total) ||
        total > MOST_ROWS)
        BAD("%s: %" PRId64 " sequences x %" PRId64 " query heads x %" PRId64 " %s are over 2^48", name, p->B, p->Hq,
            length, of);
    return HEED_OK;
}

static heed_status check_head_dim(const char *name, int64_t head_dim)
{
    if (head_dim < 1 || head_dim > HEED_MAX_HEAD_DIM)
        BAD("%s: head_dim is %" PRId64 ", expected 1 to %d", name, head_dim, HEED_MAX_HEAD_DIM);
    return HEED_OK;
}

static heed_status check_inputs(heed_problem *p, heed_backend backend, int planning)
{
    heed_attention *a = &p->a;
    const char *const *dims = a->block_table ? page_dims : key_dims;
    heed_status s;
    if (a->q.dtype == HEED_F64 && backend != HEED_REFERENCE)
        BAD("q: dtype is fp64, which HEED_REFERENCE alone takes");
    if ((s = take("q", &a->q, FLOATS | F64, row_dims, (size[4]){ ANY, ANY, ANY, ANY }, planning)) ||
        (s = check_head_dim("q", a->q.shape[3])))
        return s;
    if (a->q.shape[1] < 1)
        BAD("q: heads is %" PRId64 ", expected 1 or more", a->q.shape[1]);
    unsigned same = 1u << a->q.dtype;
    if ((s = take("k", &a->k, same, dims, (size[4]){ ANY, ANY, ANY, { a->q.shape[3], "q has" } }, planning)) ||
        (s = heed_size_sequences(p)))
        return s;
    const int64_t *k = a->k.shape;
    if (k[1] < 1 || a->q.shape[1] % k[1])
        BAD("k: heads is %" PRId64 ", expected a divisor of q's %" PRId64, k[1], a->q.shape[1]);
    if ((s = take("v", &a->v, same, dims, (size[4]){ { k[0], "k has" }, { k[1], "k has" }, { k[2], "k has" }, ANY },
                  planning)) ||
        (s = check_head_dim("v", a->v.shape[3])))
        return s;
    p->Hq = a->q.shape[1], p->Hk = k[1], p->G = p->Hq / p->Hk;
    p->D = a->q.shape[3], p->Dv = a->v.shape[3];
    s = check_total("q", p, p->Sq, "rows");
    return s ? s : check_total("k", p, p->Sk, "keys");
}

static void shape_of_o(const heed_problem *p, size shape[4])
{
    const int64_t *q = p->a.q.shape;
    for (int d = 0; d < 3; d++)
        shape[d] = (size){ q[d], "q has" };
    shape[3] = (size){ p->Dv, "v has" };
}

/* Of lse, d_lse and delta. */
static unsigned row_dtypes(const heed_tensor *of) { return of->dtype == HEED_F64 ? F32 | F64 : F32; }

static void shape_of_lse(const heed_problem *p, size shape[4])
{
    shape_of_o(p, shape);
    shape[3] = (size){ 1, "expected" };
}

/* o and lse: results of the forward, inputs of the backward, which needs both unless it has delta. */
static heed_status check_results(heed_problem *p, int planning)
{
    heed_attention *a = &p->a;
    size rows[4], row[4];
    heed_status s;
    shape_of_o(p, rows);
    shape_of_lse(p, row);
    int backward = p->pass == HEED_BACKWARD, empty = heed_elements(&a->q) == 0;
    if (backward && !empty && !present(&a->lse, planning))
        BAD("lse: is missing, backward needs forward's");
    if (backward && !empty && !present(&a->o, planning) && !present(&p->g.delta, planning))
        BAD("o: is missing, backward needs forward's, or delta");
    unsigned dtypes = F32 | 1u << a->q.dtype;
    s = backward ? take_optional("o", &a->o, dtypes, row_dims, rows, planning)
                 : take("o", &a->o, dtypes, row_dims, rows, planning);
    if (s)
        return s;
    return take_optional("lse", &a->lse, row_dtypes(&a->q), row_dims, row, planning);
}

static heed_status check_extras(heed_problem *p, int planning)
{
    heed_attention *a = &p->a;
    const int64_t scores[4] = { p->B, p->Hq, p->Sq, p->Sk };
    const size per_head[4] = { { 1, "expected" }, { p->Hq, "q has" }, { 1, "expected" }, { 1, "expected" } };
    heed_status s;
    if ((s = take_broadcast("mask", &a->mask, 1 << HEED_BOOL, scores, planning)) ||
        (s = take_broadcast("bias", &a->bias, F32 | 1u << a->q.dtype, scores, planning)) ||
        (s = take_broadcast("alibi", &a->alibi, F32, (int64_t[4]){ p->B, p->Hq, 1, 1 }, planning)))
        return s;
    if (a->alibi.data && a->alibi.shape[1] != p->Hq)
        BAD("alibi: heads is %" PRId64 ", q has %" PRId64, a->alibi.shape[1], p->Hq);
    return take_optional("sink", &a->sink, F32, score_dims, per_head, planning);
}

/* ---- Numbers ---------------------------------------------------------------------------------------------------- */

/* Kernels multiply by 1/softcap, which has to be a number. Scores of less than this are 0 to a softmax. */
#define LEAST_SOFTCAP 0x1p-100f

static heed_status check_scale(heed_problem *p)
{
    heed_attention *a = &p->a;
    if (!isfinite(a->scale))
        BAD("scale: is %g, expected a finite number", a->scale);
    if (a->zero_scale && a->scale != 0)
        BAD("zero_scale: is set, but scale is %g", a->scale);
    if (!isfinite(a->softcap) || a->softcap < 0)
        BAD("softcap: is %g, expected 0 or a positive number", a->softcap);
    if (a->softcap > 0)
        a->softcap = HEED_MAX(a->softcap, LEAST_SOFTCAP);
    p->scale = a->scale != 0 || a->zero_scale ? a->scale : 1 / sqrt((double)p->D);
    a->scale = (float)p->scale;
    return HEED_OK;
}

static heed_status check_band(heed_problem *p)
{
    heed_attention *a = &p->a;
    if (!a->windowed && (a->window_left || a->window_right))
        BAD("window_left, window_right: are %" PRId64 " and %" PRId64 ", but windowed is 0", a->window_left,
            a->window_right);
    if (a->window_left < -1)
        BAD("window_left: is %" PRId64 ", expected -1 (no limit) or more", a->window_left);
    if (a->window_right < -1)
        BAD("window_right: is %" PRId64 ", expected -1 (no limit) or more", a->window_right);
    p->left = a->windowed && a->window_left >= 0 ? a->window_left : HEED_UNBOUNDED;
    p->right = a->windowed && a->window_right >= 0 ? a->window_right : HEED_UNBOUNDED;
    if (a->causal)
        p->right = 0;
    a->window_left = p->left, a->window_right = p->right;
    return HEED_OK;
}

static heed_status check_line(const char *what, int64_t position, int64_t *step, int64_t count)
{
    int64_t last;
    if (*step < 0)
        BAD("%s_step: is %" PRId64 ", expected 1 or more (0 means 1)", what, *step);
    if (*step == 0)
        *step = 1;
    if (__builtin_mul_overflow(HEED_MAX(count - 1, 0), *step, &last) || __builtin_add_overflow(last, position, &last) ||
        position < -FARTHEST || last > FARTHEST)
        BAD("%s_position: %" PRId64 " and %" PRId64 " steps of %" PRId64 " leave the range of -2^61 to 2^61", what,
            position, HEED_MAX(count - 1, 0), *step);
    return HEED_OK;
}

static heed_status check_positions(heed_problem *p)
{
    heed_attention *a = &p->a;
    heed_status s;
    if ((unsigned)a->align > HEED_ALIGN_POSITION)
        BAD("align: is %d, which is no heed_align", (int)a->align);
    if (a->align != HEED_ALIGN_POSITION && (a->query_position || a->key_position || a->query_step || a->key_step))
        BAD("query_position, key_position, query_step, key_step: are set, but align is not HEED_ALIGN_POSITION");
    if (a->key_stride < 0)
        BAD("key_stride: is %" PRId64 ", expected 1 or more (0 means 1)", a->key_stride);
    if (a->key_stride == 0)
        a->key_stride = 1;
    if ((s = check_line("query", a->query_position, &a->query_step, p->Sq)))
        return s;
    return check_line("key", a->key_position, &a->key_step, p->Sk);
}

static heed_status check_dropout(heed_problem *p)
{
    heed_attention *a = &p->a;
    if (!(a->dropout >= 0 && a->dropout < 1))
        BAD("dropout: is %g, expected 0 or more and less than 1", a->dropout);
    p->drop_below = (uint32_t)HEED_MIN(lrintf(a->dropout * 65536.0f), 65535);
    a->dropout = (float)p->drop_below / 65536.0f;
    return heed_check_integers("dropout_seed_at", a->dropout_seed_at, 8);
}

/* ---- Gradients -------------------------------------------------------------------------------------------------- */

static heed_status check_gradient_inputs(heed_problem *p, int planning)
{
    heed_gradient *g = &p->g;
    size rows[4], row[4];
    heed_status s;
    shape_of_o(p, rows);
    shape_of_lse(p, row);
    unsigned dtypes = p->a.o.data ? 1u << p->a.o.dtype : F32 | 1u << p->a.q.dtype;
    if ((s = take("d_o", &g->d_o, dtypes, row_dims, rows, planning)) ||
        (s = take_optional("d_lse", &g->d_lse, row_dtypes(&p->a.q), row_dims, row, planning)) ||
        (s = take_optional("delta", &g->delta, row_dtypes(&p->a.q), row_dims, row, planning)))
        return s;
    if (g->delta.data) /* then these are not read, and no kernel needs to look twice */
        p->a.o = g->d_lse = (heed_tensor){ 0 };
    return HEED_OK;
}

static heed_status take_like(const char *name, heed_tensor *t, const heed_tensor *model, const char *whose,
                             const char *const dims[4], int planning)
{
    size shape[4];
    for (int d = 0; d < 4; d++)
        shape[d] = (size){ model->shape[d], whose };
    return take_optional(name, t, F32 | 1u << model->dtype, dims, shape, planning);
}

static heed_status check_accumulate(const char *name, const heed_tensor *t)
{
    if (t->data && t->dtype != HEED_F32)
        BAD("%s: dtype is %s, expected fp32 with accumulate", name, heed_dtype_name(t->dtype));
    return HEED_OK;
}

static heed_status check_gradient(heed_problem *p, int planning)
{
    const heed_attention *a = &p->a;
    heed_gradient *g = &p->g;
    heed_status s;
    if (a->block_table)
        BAD("block_table: is given, but backward takes no paged cache");
    if ((s = check_gradient_inputs(p, planning)) ||
        (s = take_like("d_q", &g->d_q, &a->q, "q has", row_dims, planning)) ||
        (s = take_like("d_k", &g->d_k, &a->k, "k has", key_dims, planning)) ||
        (s = take_like("d_v", &g->d_v, &a->v, "v has", key_dims, planning)))
        return s;
    if (present(&g->d_bias, planning) && !a->bias.data)
        BAD("d_bias: is given, but there is no bias");
    if (present(&g->d_sink, planning) && !a->sink.data)
        BAD("d_sink: is given, but there is no sink");
    if ((s = take_like("d_bias", &g->d_bias, &a->bias, "bias has", score_dims, planning)) ||
        (s = take_like("d_sink", &g->d_sink, &a->sink, "sink has", score_dims, planning)))
        return s;
    for (int d = 0; d < 4; d++)
        if (g->d_bias.shape[d] == 1)
            g->d_bias.stride[d] = 0;
    g->accumulate = g->accumulate != 0;
    if (g->accumulate && ((s = check_accumulate("d_q", &g->d_q)) || (s = check_accumulate("d_k", &g->d_k)) ||
                          (s = check_accumulate("d_v", &g->d_v))))
        return s;
    return HEED_OK;
}

/* ---- Memory ----------------------------------------------------------------------------------------------------- */

typedef struct named {
    const char *name;
    const heed_tensor *t;
} named;

/* Of a backward: 17 tensors, 6 arrays of integers, the workspace. */
enum { MOST_MEMORY = 24 };

/* The first `outputs` of the tensors are written: none of them may share an element with any other, or with itself.
 * Most pairs lie apart, which the first and last address tell; only the rest are looked at closely. */
static heed_status check_memory(const named *tensors, int outputs, int total)
{
    uintptr_t begin[MOST_MEMORY], end[MOST_MEMORY];
    for (int i = 0; i < total; i++) {
        const heed_tensor *t = tensors[i].t;
        begin[i] = UINTPTR_MAX, end[i] = 0; /* absent: apart from all */
        if (t->data && t->data != heed_stand_in && heed_elements(t) > 0)
            heed_addresses(t, &begin[i], &end[i]);
    }
    for (int i = 0; i < outputs; i++) {
        const heed_tensor *t = tensors[i].t;
        if (!t->data)
            continue;
        if (heed_overlaps_itself(t))
            BAD("%s: strides %" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 " make its elements overlap each other",
                tensors[i].name, t->stride[0], t->stride[1], t->stride[2], t->stride[3]);
        for (int j = i + 1; j < total; j++)
            if (begin[i] < end[j] && begin[j] < end[i] && heed_overlap(t, tensors[j].t))
                BAD("%s: overlaps %s, expected memory of its own", tensors[i].name, tensors[j].name);
    }
    return HEED_OK;
}

/* No memory is longer than this many elements of any type: what claims to be ends here, so that nothing overflows. */
#define MOST_ELEMENTS ((int64_t)1 << 55)

/* Memory that no tensor describes, as the view of one. */
static heed_tensor view_of(const void *data, heed_dtype dtype, int64_t rows, int64_t columns, int64_t step)
{
    return (heed_tensor){ .data = (void *)(uintptr_t)data,
                          .dtype = dtype,
                          .shape = { 1, 1, HEED_MIN(rows, MOST_ELEMENTS / HEED_MAX(step, 1)), columns },
                          .stride = { 0, 0, step, 1 } };
}

/* Appends the integers that the call will read. Planning has none: what stands for them has another size. */
static int add_integers(const heed_problem *p, named *list, int total, heed_tensor views[6])
{
    const heed_attention *a = &p->a;
    const struct {
        const char *name;
        const int32_t *data;
        int64_t count;
    } arrays[] = { { "lengths_q", a->lengths_q, p->B },
                   { "lengths_k", a->lengths_k, p->B },
                   { "offsets_q", a->offsets_q, p->B + 1 },
                   { "offsets_k", a->offsets_k, p->B + 1 } };
    int made = 0;
    for (int n = 0; n < 4; n++)
        if (arrays[n].data) {
            views[made] = view_of(arrays[n].data, HEED_F32, 1, arrays[n].count, 0); /* 4 bytes each */
            list[total++] = (named){ arrays[n].name, &views[made++] };
        }
    if (a->block_table) {
        views[made] = view_of(a->block_table, HEED_F32, p->B, a->block_table_columns, a->block_table_stride);
        list[total++] = (named){ "block_table", &views[made++] };
    }
    if (a->dropout_seed_at && p->drop_below) {
        views[made] = view_of(a->dropout_seed_at, HEED_F64, 1, 1, 0);
        list[total++] = (named){ "dropout_seed_at", &views[made++] };
    }
    return total;
}

static heed_status check_overlap(const heed_problem *p, const heed_exec *x, int planning)
{
    const heed_attention *a = &p->a;
    const heed_gradient *g = &p->g;
    const int64_t bytes = (int64_t)HEED_MIN(x->workspace_bytes, (size_t)MOST_ELEMENTS);
    const heed_tensor workspace = view_of(planning ? NULL : x->workspace, HEED_BOOL, 1, bytes, 0);
    heed_tensor integers[6];
    named list[MOST_MEMORY] = { { "workspace", &workspace }, /* in a forward there are no gradients */
                                { "d_q", &g->d_q },
                                { "d_k", &g->d_k },
                                { "d_v", &g->d_v },
                                { "d_bias", &g->d_bias },
                                { "d_sink", &g->d_sink },
                                { "o", &a->o }, /* what the backward reads and the forward writes */
                                { "lse", &a->lse },
                                { "d_o", &g->d_o },
                                { "d_lse", &g->d_lse },
                                { "delta", &g->delta },
                                { "q", &a->q },
                                { "k", &a->k },
                                { "v", &a->v },
                                { "mask", &a->mask },
                                { "bias", &a->bias },
                                { "alibi", &a->alibi },
                                { "sink", &a->sink } };
    const int written = p->pass == HEED_FORWARD ? 8 : 6;
    int total = 18;
    if (!planning)
        total = add_integers(p, list, total, integers);
    return check_memory(list, written, total);
}

static int rows_aligned(const heed_tensor *t)
{
    int64_t size = (int64_t)heed_dtype_size(t->dtype);
    if (!t->data || heed_elements(t) == 0)
        return 1;
    return (uintptr_t)t->data % 16 == 0 && t->stride[0] * size % 16 == 0 && t->stride[1] * size % 16 == 0 &&
           t->stride[2] * size % 16 == 0 && t->stride[3] == 1;
}

static int all_aligned(const heed_problem *p)
{
    const heed_tensor *tensors[] = { &p->a.q, &p->a.k, &p->a.v, &p->a.o, &p->g.d_o, &p->g.d_q, &p->g.d_k, &p->g.d_v };
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        if (!rows_aligned(tensors[i]))
            return 0;
    return 1;
}

/* ---- Whole calls ------------------------------------------------------------------------------------------------ */

heed_status heed_check_exec(const heed_exec *x)
{
    if (!x)
        BAD("exec: is NULL");
    if ((unsigned)x->backend > HEED_REFERENCE)
        BAD("backend: is %d, which is no heed_backend", (int)x->backend);
    if ((unsigned)x->precision > HEED_PLAIN)
        BAD("precision: is %d, which is no heed_precision", (int)x->precision);
    if (x->device < 0)
        BAD("device: is %d, expected 0 or more", x->device);
    if (x->threads < 0)
        BAD("threads: is %d, expected 0 or more", x->threads);
    return HEED_OK;
}

heed_status heed_check(const heed_attention *a, const heed_gradient *g, const heed_exec *x, int planning,
                       heed_problem *p)
{
    heed_status s;
    if (!a)
        BAD("attention: is NULL");
    if ((s = heed_check_exec(x)))
        return s;
    *p = (heed_problem){ .pass = g ? HEED_BACKWARD : HEED_FORWARD, .a = *a, .precision = x->precision };
    p->nondeterministic = x->nondeterministic != 0;
    if (g)
        p->g = *g;
    if ((s = heed_check_forms(&p->a, planning)) || (s = check_inputs(p, x->backend, planning)) ||
        (s = check_results(p, planning)) || (s = check_scale(p)) || (s = check_band(p)) || (s = check_positions(p)) ||
        (s = check_dropout(p)) || (s = check_extras(p, planning)) || (g && (s = check_gradient(p, planning))) ||
        (s = check_overlap(p, x, planning)))
        return s;
    p->aligned = all_aligned(p);
    heed_span_full(p, &p->full);
    return HEED_OK;
}

/* The four tensors of a small call. The first is o; the others have its shape, or one column where is_row says so. */
static heed_status check_four(const char *const names[4], const heed_tensor *const given[4], const int is_row[4],
                              int optional, heed_tensor normal[4])
{
    heed_status s;
    for (int i = 0; i < 4; i++) {
        normal[i] = (heed_tensor){ 0 };
        if (i == optional && (!given[i] || !given[i]->data))
            continue;
        if (!given[i])
            BAD("%s: is NULL", names[i]);
        normal[i] = *given[i];
        if ((s = heed_view(names[i], &normal[i], is_row[i] ? row_dtypes(&normal[0]) : (unsigned)(FLOATS | F64))))
            return s;
        const int64_t *o = normal[0].shape;
        const size want[4] = { { o[0], "o has" },
                               { o[1], "o has" },
                               { o[2], "o has" },
                               { is_row[i] ? 1 : o[3], is_row[i] ? "expected" : "o has" } };
        if ((s = check_shape(names[i], &normal[i], row_dims, want)))
            return s;
    }
    return HEED_OK;
}

heed_status heed_check_merge(const heed_tensor *o, const heed_tensor *lse, const heed_tensor *o2,
                             const heed_tensor *lse2, heed_tensor normal[4])
{
    static const char *const names[4] = { "o", "lse", "o2", "lse2" };
    static const int is_row[4] = { 0, 1, 0, 1 };
    heed_status s = check_four(names, (const heed_tensor *const[4]){ o, lse, o2, lse2 }, is_row, -1, normal);
    if (s)
        return s;
    const named all[] = { { "o", normal }, { "lse", normal + 1 }, { "o2", normal + 2 }, { "lse2", normal + 3 } };
    return check_memory(all, 2, 4);
}

heed_status heed_check_delta(const heed_tensor *o, const heed_tensor *d_o, const heed_tensor *d_lse,
                             const heed_tensor *delta, heed_tensor normal[4])
{
    static const char *const names[4] = { "o", "d_o", "d_lse", "delta" };
    static const int is_row[4] = { 0, 0, 1, 1 };
    heed_status s = check_four(names, (const heed_tensor *const[4]){ o, d_o, d_lse, delta }, is_row, 2, normal);
    if (s)
        return s;
    const named all[] = { { "delta", normal + 3 }, { "o", normal }, { "d_o", normal + 1 }, { "d_lse", normal + 2 } };
    return check_memory(all, 1, 4);
}
