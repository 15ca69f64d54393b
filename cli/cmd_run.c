/* heed run: attention over .npy files. The files' arrays are views of [batch, head, row, column] with strides of their
 * own, so layouts and Fortran order cost nothing; only a change of dtype copies. Results are written when all of them
 * exist. */
#include "cli.h"
#include "npy.h"

#include <stdlib.h>
#include <string.h>

enum { Q, K, V, MASK, BIAS, ALIBI, SINK, D_O, D_LSE, INPUTS };
enum { O, LSE, D_Q, D_K, D_V, D_BIAS, D_SINK, OUTPUTS };

typedef struct answers {
    const char *in[INPUTS], *out[OUTPUTS];
    int bshd, dtype;
    rules r;
    how h;
} answers;

typedef struct job {
    const answers *given;
    npy_array in[INPUTS], out[OUTPUTS];
    heed_dtype dtype;
    heed_attention a;
    heed_gradient g;
} job;

/* ---- Between files and tensors ---------------------------------------------------------------------------------- */

/* For each dimension of [batch, head, row, column] of q, k, v and o, the file's; below 0: it has none. */
static void axes_of(int rank, int bshd, int axis[4])
{
    static const int known[2][3][4] = {
        { { -1, -1, 0, 1 }, { -1, 0, 1, 2 }, { 0, 1, 2, 3 } },
        { { -1, -1, 0, 1 }, { -1, 1, 0, 2 }, { 0, 2, 1, 3 } },
    };
    memcpy(axis, known[bshd][rank - 2], 4 * sizeof *axis);
}

static heed_tensor view(const npy_array *a, const int axis[4])
{
    heed_tensor t = { .data = a->data, .dtype = a->dtype };
    int64_t below = 1; /* where the file has no such dimension: a step over everything, never taken */
    for (int d = 3; d >= 0; d--) {
        t.shape[d] = axis[d] < 0 ? 1 : a->shape[axis[d]];
        t.stride[d] = axis[d] < 0 ? below : a->stride[axis[d]];
        if (t.stride[d] * t.shape[d] > below)
            below = t.stride[d] * t.shape[d];
    }
    return t;
}

static heed_tensor rows_view(const job *j, const npy_array *a)
{
    int axis[4];
    axes_of(a->rank, j->given->bshd, axis);
    return view(a, axis);
}

/* NumPy's rule: dimensions are compared from the last one backwards. */
static heed_tensor broadcast_view(const npy_array *a)
{
    int axis[4];
    for (int d = 0; d < 4; d++)
        axis[d] = d + a->rank - 4;
    return view(a, axis);
}

/* (heads), or (batch, heads) -> [B or 1, H, 1, 1]. */
static heed_tensor heads_view(const npy_array *a)
{
    int axis[4] = { a->rank == 2 ? 0 : -1, a->rank - 1, -1, -1 };
    return view(a, axis);
}

/* [B, H, S, 1] from an array of (S), (H, S) or (B, H, S). */
static heed_tensor lse_view(const npy_array *a)
{
    int axis[4] = { a->rank - 3, a->rank - 2, a->rank - 1, -1 };
    return view(a, axis);
}

/* ---- Inputs ----------------------------------------------------------------------------------------------------- */

static int convert(npy_array *a, heed_dtype dtype)
{
    if (a->dtype == dtype)
        return 1;
    size_t bytes = (size_t)a->count * element_size(dtype);
    void *data = malloc(bytes ? bytes : 1);
    if (!data)
        return 0;
    for (int64_t i = 0; i < a->count; i++)
        element_store(data, dtype, i, element_load(a->data, a->dtype, i));
    free(a->data);
    a->data = data;
    a->dtype = dtype;
    return 1;
}

static int load(job *j, int which, int least_rank, int most_rank)
{
    const char *path = j->given->in[which];
    char why[NPY_WHY];
    if (!path)
        return 0;
    npy_array *a = &j->in[which];
    if (!npy_load(path, a, why))
        return complain(EXIT_USAGE, "%s: %s", path, why);
    if (a->rank < least_rank || a->rank > most_rank)
        return complain(EXIT_USAGE, "%s: has %d dimensions; expected %d to %d", path, a->rank, least_rank, most_rank);
    if ((a->dtype == HEED_BOOL) != (which == MASK))
        return complain(EXIT_USAGE, "%s: dtype is %s; expected %s", path, dtype_name(a->dtype),
                        which == MASK ? "bool" : "fp16, fp32 or fp64");
    return 0;
}

static int load_all(job *j)
{
    static const struct {
        int which, least, most;
    } wanted[] = {
        { Q, 2, 4 },    { K, 2, 4 },     { V, 2, 4 },    { D_O, 2, 4 },   { MASK, 0, 4 },
        { BIAS, 0, 4 }, { ALIBI, 1, 2 }, { SINK, 1, 1 }, { D_LSE, 1, 3 },
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        int code = load(j, wanted[i].which, wanted[i].least, wanted[i].most);
        if (code)
            return code;
    }
    const int same[] = { K, V, D_O };
    for (int i = 0; i < 3; i++) {
        const npy_array *a = &j->in[same[i]], *q = &j->in[Q];
        const char *path = j->given->in[same[i]];
        if (a->data && a->rank != q->rank)
            return complain(EXIT_USAGE, "%s: has %d dimensions, %s has %d", path, a->rank, j->given->in[Q], q->rank);
        if (a->data && a->dtype != q->dtype && j->given->dtype < 0)
            return complain(EXIT_USAGE, "%s: dtype is %s, %s has %s; --dtype converts both", path, dtype_name(a->dtype),
                            j->given->in[Q], dtype_name(q->dtype));
    }
    if (j->in[D_LSE].data && j->in[D_LSE].rank != j->in[Q].rank - 1)
        return complain(EXIT_USAGE, "%s: has %d dimensions; expected %d, one less than %s", j->given->in[D_LSE],
                        j->in[D_LSE].rank, j->in[Q].rank - 1, j->given->in[Q]);
    return 0;
}

static int convert_all(job *j)
{
    j->dtype = j->given->dtype < 0 ? j->in[Q].dtype : (heed_dtype)j->given->dtype;
    const int rows[] = { Q, K, V, D_O }, singles[] = { ALIBI, SINK, D_LSE };
    int good = 1;
    for (int i = 0; i < 4; i++)
        good = good && (!j->in[rows[i]].data || convert(&j->in[rows[i]], j->dtype));
    for (int i = 0; i < 3; i++)
        good = good && (!j->in[singles[i]].data || convert(&j->in[singles[i]], HEED_F32));
    /* A bias may stay fp32, or what q is; anything else becomes fp32. */
    if (good && j->in[BIAS].data && j->in[BIAS].dtype != j->dtype)
        good = convert(&j->in[BIAS], HEED_F32);
    return good ? 0 : complain(EXIT_FAILED, "no memory to convert to %s", dtype_name(j->dtype));
}

/* What heed says of q, k and v, before memory for results is asked for: with an empty k, v can claim any width. */
static int check_sizes(job *j)
{
    heed_exec x = how_exec(&j->given->h, 0, j->dtype);
    heed_attention a = { .q = rows_view(j, &j->in[Q]), .k = rows_view(j, &j->in[K]), .v = rows_view(j, &j->in[V]) };
    a.o = (heed_tensor){ .dtype = j->dtype, .shape = { a.q.shape[0], a.q.shape[1], a.q.shape[2], a.v.shape[3] } };
    char text[1];
    heed_status status = heed_explain(&a, NULL, &x, NULL, text, sizeof text);
    return status ? complain_status(status) : 0;
}

/* ---- Outputs ---------------------------------------------------------------------------------------------------- */

static int allocate(npy_array *a, heed_dtype dtype, int rank, const int64_t *shape)
{
    *a = (npy_array){ .dtype = dtype, .rank = rank, .count = 1 };
    int64_t step = 1;
    for (int i = rank - 1; i >= 0; i--) {
        a->shape[i] = shape[i];
        a->stride[i] = step;
        if (__builtin_mul_overflow(step, shape[i] ? shape[i] : 1, &step))
            return 0;
        a->count *= shape[i] ? 1 : 0;
    }
    a->count *= step;
    a->data = calloc((size_t)a->count + 1, element_size(dtype));
    return a->data != NULL;
}

static int allocate_like(npy_array *a, const npy_array *like, heed_dtype dtype)
{
    return allocate(a, dtype, like->rank, like->shape);
}

/* o and lse always, since the backward reads them; a gradient where a file is named for it. */
static int allocate_outputs(job *j)
{
    const npy_array *q = &j->in[Q];
    int64_t shape[4];
    memcpy(shape, q->shape, sizeof shape);
    shape[q->rank - 1] = j->in[V].shape[q->rank - 1];
    int good = allocate(&j->out[O], j->dtype, q->rank, shape);

    heed_tensor rows = rows_view(j, q); /* lse is (batch, heads, rows) in either layout */
    good = good && allocate(&j->out[LSE], HEED_F32, q->rank - 1, rows.shape + 4 - q->rank);

    static const struct {
        int out, in;
    } gradients[] = {
        { D_Q, Q }, { D_K, K }, { D_V, V }, { D_BIAS, BIAS }, { D_SINK, SINK },
    };
    for (size_t i = 0; i < sizeof gradients / sizeof *gradients; i++) {
        const npy_array *like = &j->in[gradients[i].in];
        if (j->given->out[gradients[i].out])
            good = good && allocate_like(&j->out[gradients[i].out], like, like->dtype);
    }
    return good ? 0 : complain(EXIT_FAILED, "no memory for the results");
}

static void connect(job *j)
{
    heed_attention *a = &j->a;
    heed_gradient *g = &j->g;
    const struct {
        heed_tensor *t;
        const npy_array *array;
        heed_tensor (*view)(const npy_array *);
    } others[] = {
        { &a->mask, &j->in[MASK], broadcast_view },
        { &a->bias, &j->in[BIAS], broadcast_view },
        { &a->alibi, &j->in[ALIBI], heads_view },
        { &a->sink, &j->in[SINK], heads_view },
        { &a->lse, &j->out[LSE], lse_view },
        { &g->d_lse, &j->in[D_LSE], lse_view },
        { &g->d_bias, &j->out[D_BIAS], broadcast_view },
        { &g->d_sink, &j->out[D_SINK], heads_view },
    };
    const struct {
        heed_tensor *t;
        const npy_array *array;
    } rows[] = {
        { &a->q, &j->in[Q] },     { &a->k, &j->in[K] },      { &a->v, &j->in[V] },      { &a->o, &j->out[O] },
        { &g->d_o, &j->in[D_O] }, { &g->d_q, &j->out[D_Q] }, { &g->d_k, &j->out[D_K] }, { &g->d_v, &j->out[D_V] },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].array->data)
            *rows[i].t = rows_view(j, rows[i].array);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (others[i].array->data)
            *others[i].t = others[i].view(others[i].array);
    rules_apply(&j->given->r, a);
}

/* Not before all of them are on disk under another name does the first one take its place. */
static int write_all(const job *j)
{
    npy_output files[OUTPUTS] = { 0 };
    char why[NPY_WHY];
    int code = 0;
    for (int i = 0; i < OUTPUTS && !code; i++)
        if (j->given->out[i] && !npy_stage(&files[i], j->given->out[i], &j->out[i], why))
            code = complain(EXIT_FAILED, "%s: %s", j->given->out[i], why);
    for (int i = 0; i < OUTPUTS && !code; i++)
        if (!npy_commit(&files[i], why))
            code = complain(EXIT_FAILED, "%s: %s", j->given->out[i], why);
    for (int i = 0; i < OUTPUTS; i++)
        npy_discard(&files[i]);
    return code;
}

/* ---- The command ------------------------------------------------------------------------------------------------ */

/* One pass; g == NULL: the forward. */
static int compute_pass(const job *j, const heed_gradient *g)
{
    heed_exec x = how_exec(&j->given->h, g != NULL, j->dtype);
    heed_status status = x.backend == HEED_CUDA ? gpu_run(&j->a, g, &x)
                                                : heed_workspace_size(&j->a, g, &x, &x.workspace_bytes);
    if (status || x.backend == HEED_CUDA)
        return status ? complain_status(status) : 0;
    x.workspace_bytes = (x.workspace_bytes + 127) / 64 * 64; /* never 0 */
    if (!(x.workspace = aligned_alloc(64, x.workspace_bytes)))
        return complain(EXIT_FAILED, "no memory for a workspace of %zu bytes", x.workspace_bytes);
    status = g ? heed_backward(&j->a, g, &x) : heed_forward(&j->a, &x);
    free(x.workspace);
    return status ? complain_status(status) : 0;
}

static int compute(const job *j)
{
    int code = compute_pass(j, NULL);
    return code || !j->in[D_O].data ? code : compute_pass(j, &j->g);
}

static int check_usage(const answers *given)
{
    if (!given->in[Q] || !given->in[K] || !given->in[V])
        return complain(EXIT_USAGE, "-q, -k and -v are needed; see heed run --help");
    int results = 0, gradients = 0;
    for (int i = 0; i < OUTPUTS; i++) {
        results += given->out[i] != NULL;
        gradients += i >= D_Q && given->out[i];
    }
    if (!results)
        return complain(EXIT_USAGE, "no result is asked for: -o, --lse or a gradient; see heed run --help");
    if (gradients && !given->in[D_O])
        return complain(EXIT_USAGE, "a gradient needs --do, the gradient of o");
    if (!gradients && (given->in[D_O] || given->in[D_LSE]))
        return complain(EXIT_USAGE, "%s is given, but no gradient is asked for", given->in[D_O] ? "--do" : "--dlse");
    if (given->out[D_BIAS] && !given->in[BIAS])
        return complain(EXIT_USAGE, "--dbias needs --bias");
    if (given->out[D_SINK] && !given->in[SINK])
        return complain(EXIT_USAGE, "--dsink needs --sink");
    for (int i = 0; i < OUTPUTS; i++)
        for (int k = 0; k < i; k++)
            if (given->out[i] && given->out[k] && npy_same_file(given->out[i], given->out[k]))
                return complain(EXIT_USAGE, "%s: is named for two results, expected a file for each", given->out[i]);
    return 0;
}

static const char *read_layout(void *to, const char *text)
{
    if (strcmp(text, "bhsd") && strcmp(text, "bshd"))
        return "bhsd or bshd";
    *(int *)to = !strcmp(text, "bshd");
    return NULL;
}

#define FILE_ROW(name, letter, field, help)                                                                            \
    {                                                                                                                  \
        name, letter, "FILE", read_text, offsetof(answers, field), help                                                \
    }
static const option_row input_rows[] = {
    FILE_ROW("query", 'q', in[Q], "q: (rows, D), (heads, rows, D) or (batch, heads, rows, D)"),
    FILE_ROW("key", 'k', in[K], "k: the same, with keys for rows; q's heads are a multiple"),
    FILE_ROW("value", 'v', in[V], "v: like k, its last size may differ"),
    FILE_ROW("mask", 0, in[MASK], "bool, true: attend; broadcast to (batch, heads, rows, keys)"),
    FILE_ROW("bias", 0, in[BIAS], "added to the scores; broadcast likewise"),
    FILE_ROW("alibi", 0, in[ALIBI], "slopes: (heads) or (batch, heads)"),
    FILE_ROW("sink", 0, in[SINK], "one more logit for each head: (heads)"),
    FILE_ROW("do", 0, in[D_O], "gradient of o, for the backward"),
    FILE_ROW("dlse", 0, in[D_LSE], "gradient of lse, where it has one"),
    { "layout", 0, "ORDER", read_layout, offsetof(answers, bshd), "bhsd (default), or bshd: (batch, rows, heads, D)" },
    { "dtype", 0, "TYPE", read_dtype, offsetof(answers, dtype),
      "fp32, fp16, bf16 or fp64: convert q, k and v to it and\ncompute in it; default: as they are" },
    { NULL, 0, NULL, NULL, 0, NULL },
};
static const option_row output_rows[] = {
    FILE_ROW("output", 'o', out[O], "o, in the dimensions and order of q"),
    FILE_ROW("lse", 0, out[LSE], "log of the sum of exponentials: (batch, heads, rows), fp32"),
    FILE_ROW("dq", 0, out[D_Q], "gradient of q"),
    FILE_ROW("dk", 0, out[D_K], "gradient of k"),
    FILE_ROW("dv", 0, out[D_V], "gradient of v"),
    FILE_ROW("dbias", 0, out[D_BIAS], "gradient of the bias, in its shape"),
    FILE_ROW("dsink", 0, out[D_SINK], "gradient of the sink"),
    { NULL, 0, NULL, NULL, 0, NULL },
};

int command_run(int argc, char **argv)
{
    static const manual m = {
        .command = "run",
        .usage = "-q FILE -k FILE -v FILE -o FILE [options]",
        .text = "Computes attention over arrays in NumPy's .npy format, and with --do its gradients. Files may be\n"
                "fp16, fp32 or fp64, of either byte order, in C or Fortran order, format version 1.0 to 3.0. fp64 is\n"
                "computed by the reference; bf16 results are written as fp32. All results are written, or none.\n",
        .examples = "  heed run -q q.npy -k k.npy -v v.npy -o o.npy --causal\n"
                    "  heed run -q q.npy -k k.npy -v v.npy --do do.npy --dq dq.npy --dk dk.npy --dv dv.npy\n"
                    "  heed run -q q.npy -k k.npy -v v.npy -o o.npy --layout bshd --window 256,0 --dtype bf16\n"
                    "  heed run -q q.npy -k k.npy -v v.npy -o exact.npy --backend reference\n",
    };
    answers given = { .dtype = -1, .h = how_default() };
    const option_group groups[] = {
        { "Inputs", input_rows, &given },
        { "Results", output_rows, &given },
        { "Problem", rule_rows, &given.r },
        { "Execution", how_rows, &given.h },
        { 0 },
    };
    int code = options_parse(&m, groups, argc, argv);
    if (code >= 0)
        return code;
    if ((code = check_usage(&given)))
        return code;

    job j = { .given = &given };
    if (!(code = load_all(&j)) && !(code = convert_all(&j))) {
        if (!(code = check_sizes(&j)) && !(code = allocate_outputs(&j))) {
            connect(&j);
            if (!(code = compute(&j)))
                code = write_all(&j);
        }
    }
    for (int i = 0; i < INPUTS; i++)
        npy_free(&j.in[i]);
    for (int i = 0; i < OUTPUTS; i++)
        npy_free(&j.out[i]);
    return code;
}
