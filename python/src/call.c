#include "call.h"
#include "ending.h"
#include "memory.h"

#include <stdio.h>
#include <string.h>

PyObject *call_names[ARGUMENTS], *call_defaults[ARGUMENTS];

/* An argument's name in Python, where the library has another; else NULL. */
static const char *python_name(const char *word, size_t length)
{
    static const char *const names[][2] = {
        { "alibi", "alibi_slopes" },
        { "dropout", "dropout_p" },
        { "dropout_seed_at", "dropout_seed" },
        { "offsets_q", "cu_seqlens_q" },
        { "offsets_k", "cu_seqlens_k" },
        { "max_rows", "max_seqlen_q" },
        { "max_keys", "max_seqlen_k" },
        { "d_o", "do" },
        { "d_lse", "dlse" },
    };
    for (size_t n = 0; n < sizeof names / sizeof *names; n++)
        if (strlen(names[n][0]) == length && !memcmp(names[n][0], word, length))
            return names[n][1];
    return NULL;
}

/* The library's last message, with the names that Python has. */
static void tell(char *text, size_t size)
{
    const char *from = heed_last_error();
    for (size_t used = 0; *from && used < size;) {
        size_t length = strspn(from, "abcdefghijklmnopqrstuvwxyz_");
        const char *name = python_name(from, length);
        length = length ? length : 1;
        used += (size_t)snprintf(text + used, size - used, "%.*s", name ? (int)strlen(name) : (int)length,
                                 name ? name : from);
        from += length;
    }
}

int call_fail(heed_status status)
{
    char text[512] = "";
    PyObject *type = status == HEED_BAD_ARGUMENT  ? PyExc_ValueError
                     : status == HEED_UNSUPPORTED ? PyExc_NotImplementedError
                                                  : PyExc_RuntimeError;
    tell(text, sizeof text);
    PyErr_SetString(type, text);
    return -1;
}

int call_count(const char *name, Py_ssize_t given, Py_ssize_t expected)
{
    if (given == expected)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s: takes %zd arguments, got %zd", name, expected, given);
    return -1;
}

/* ---- Tensors ---------------------------------------------------------------------------------------------------- */

static int heed_dtype_of(const view *v, const char *name, heed_dtype *dtype)
{
    int code = v->dtype.code, bits = v->dtype.bits;
    if (code == DL_FLOAT && bits == 32)
        *dtype = HEED_F32;
    else if (code == DL_FLOAT && bits == 16)
        *dtype = HEED_F16;
    else if (code == DL_BFLOAT && bits == 16)
        *dtype = HEED_BF16;
    else if (code == DL_FLOAT && bits == 64)
        *dtype = HEED_F64;
    else if (code == DL_BOOL)
        *dtype = HEED_BOOL;
    else {
        PyErr_Format(PyExc_TypeError, "%s: dtype is %s, expected float32, float16, bfloat16 or float64", name,
                     view_dtype_name(v));
        return -1;
    }
    return 0;
}

/* Fills the four dimensions of t from those of v that axis names; -1: a dimension that v does not have. */
static int arrange(const view *v, const char *name, const int axis[4], heed_tensor *t)
{
    if (heed_dtype_of(v, name, &t->dtype))
        return -1;
    t->data = v->data;
    for (int d = 0; d < 4; d++) {
        t->shape[d] = axis[d] < 0 ? 1 : v->shape[axis[d]];
        t->stride[d] = axis[d] < 0 ? 0 : v->stride[axis[d]];
    }
    return 0;
}

static view *open_view(call *c, PyObject *object, const char *name, int writable)
{
    view *v = &c->others[c->open];
    if (view_open(v, object, name, writable))
        return NULL;
    c->open++;
    if (view_same_device(v, &c->q))
        return v;
    char device[32];
    strncpy(device, view_device_name(v), sizeof device - 1), device[sizeof device - 1] = 0;
    PyErr_Format(PyExc_ValueError, "%s: is on %s, q is on %s", name, device, view_device_name(&c->q));
    return NULL;
}

const call_layout call_layouts[] = {
    [BHSD] = { 4, { 0, 1, 2, 3 }, "batch, heads, sequence, head_dim" },
    [BSHD] = { 4, { 0, 2, 1, 3 }, "batch, sequence, heads, head_dim" },
    [THD] = { 3, { -1, 1, 0, 2 }, "tokens, heads, head_dim" },
};

static int arrange_as_q(const call *c, const view *v, const char *name, heed_tensor *t)
{
    if (v->ndim != call_layouts[c->layout].ndim) {
        PyErr_Format(PyExc_ValueError, "%s: has %d dimensions, expected %d: %s", name, v->ndim,
                     call_layouts[c->layout].ndim, call_layouts[c->layout].meaning);
        return -1;
    }
    return arrange(v, name, call_layouts[c->layout].axis, t);
}

int call_view(call *c, PyObject *object, const char *name, int writable, heed_tensor *t)
{
    view *v = open_view(c, object, name, writable);
    return v ? arrange_as_q(c, v, name, t) : -1;
}

const int call_row_axes[2][4] = { { 0, 1, 2, -1 }, { -1, 0, 1, -1 } }; /* of [B, H, S] and [H, T] */

int call_view_rows(call *c, PyObject *object, const char *name, heed_tensor *t)
{
    view *v = open_view(c, object, name, 0);
    if (!v)
        return -1;
    int expected = c->layout == THD ? 2 : 3;
    if (v->ndim != expected) {
        PyErr_Format(PyExc_ValueError, "%s: has %d dimensions, expected %d: %s", name, v->ndim, expected,
                     c->layout == THD ? "heads, tokens" : "batch, heads, sequence");
        return -1;
    }
    return arrange(v, name, call_row_axes[c->layout == THD], t);
}

/* Right-aligned: [S, T], [H, S, T] ... */
static int arrange_scores(const view *v, const char *name, heed_tensor *t)
{
    int axis[4];
    for (int d = 0; d < 4; d++)
        axis[d] = d + v->ndim - 4 < 0 ? -1 : d + v->ndim - 4;
    return arrange(v, name, axis, t);
}

int call_view_bias(call *c, PyObject *object, const char *name, heed_tensor *t)
{
    view *v = open_view(c, object, name, 0);
    return v ? arrange_scores(v, name, t) : -1;
}

static int view_mask(call *c, PyObject *object)
{
    view *v = open_view(c, object, "mask", 0);
    if (v && v->dtype.code == DL_BOOL)
        return arrange_scores(v, "mask", &c->a.mask);
    if (v)
        PyErr_Format(PyExc_TypeError, "mask: dtype is %s, expected bool (numbers to be added are a bias)",
                     view_dtype_name(v));
    return -1;
}

int call_view_heads(call *c, PyObject *object, const char *name, heed_tensor *t)
{
    static const int heads[4] = { -1, 0, -1, -1 }, batch_and_heads[4] = { 0, 1, -1, -1 };
    view *v = open_view(c, object, name, 0);
    if (!v)
        return -1;
    int batched = t == &c->a.alibi && v->ndim == 2;
    if (v->ndim != 1 && !batched) {
        PyErr_Format(PyExc_ValueError, "%s: has %d dimensions, expected %s", name, v->ndim,
                     t == &c->a.alibi ? "heads, or batch and heads" : "one: heads");
        return -1;
    }
    if (arrange(v, name, batched ? batch_and_heads : heads, t))
        return -1;
    if (t->dtype != HEED_F32) { /* which Python's way makes of other floats */
        PyErr_Format(PyExc_TypeError, "%s: dtype is %s, expected float32", name, view_dtype_name(v));
        return -1;
    }
    return 0;
}

/* Whole numbers of one dimension, next to each other. */
static int view_integers(call *c, PyObject *object, const char *name, int bits, int64_t count, const void **data)
{
    view *v = open_view(c, object, name, 0);
    if (!v)
        return -1;
    if (v->dtype.code != DL_INT || v->dtype.bits != bits) {
        PyErr_Format(PyExc_TypeError, "%s: dtype is %s, expected int%d", name, view_dtype_name(v), bits);
        return -1;
    }
    if (v->ndim != 1 || v->shape[0] != count || (count > 1 && v->stride[0] != 1)) {
        PyErr_Format(PyExc_ValueError,
                     "%s: expected %lld numbers in one packed dimension, got %d dimensions, first %lld", name,
                     (long long)count, v->ndim, v->ndim ? (long long)v->shape[0] : 0);
        return -1;
    }
    *data = v->data;
    return 0;
}

/* ---- Numbers and words ------------------------------------------------------------------------------------------ */

static int read_double(PyObject *object, const char *name, double *value)
{
    *value = PyFloat_AsDouble(object);
    if (*value != -1 || !PyErr_Occurred())
        return 0;
    PyErr_Format(PyExc_TypeError, "%s: is %R, expected a number", name, object);
    return -1;
}

static int read_integer(PyObject *object, const char *name, int64_t least, int64_t *value)
{
    *value = PyLong_AsLongLong(object);
    if (*value == -1 && PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError, "%s: is %R, expected a whole number", name, object);
        return -1;
    }
    if (*value < least) {
        PyErr_Format(PyExc_ValueError, "%s: is %lld, expected %lld or more", name, (long long)*value, (long long)least);
        return -1;
    }
    return 0;
}

/* The index of the word that object is, or -1 and an exception. */
static int read_word(PyObject *object, const char *name, const char *const *words, const char *expected)
{
    for (int n = 0; words[n] && PyUnicode_Check(object); n++)
        if (!PyUnicode_CompareWithASCIIString(object, words[n]))
            return n;
    PyErr_Format(PyExc_ValueError, "%s: is %R, expected %s", name, object, expected);
    return -1;
}

/* Most arguments are left out, in most calls: then there is nothing to read. */
static int is_default(PyObject *const *args, argument n) { return args[n] == call_defaults[n]; }

static int read_layout(call *c, PyObject *const *args)
{
    static const char *const words[] = { "bhsd", "bshd", "thd", NULL };
    int n = is_default(args, ARG_LAYOUT) ? BHSD : read_word(args[ARG_LAYOUT], "layout", words, "'bhsd' or 'bshd'");
    c->layout = (layout)n;
    return n < 0 ? -1 : 0;
}

static int read_causal(call *c, PyObject *object)
{
    static const char *const words[] = { "bottom_right", "top_left", NULL };
    if (object == Py_False)
        return 0;
    int n = 0;
    if (object != Py_True) {
        if (!PyUnicode_Check(object)) {
            PyErr_Format(PyExc_TypeError, "causal: is %R, expected True, False, 'bottom_right' or 'top_left'", object);
            return -1;
        }
        if ((n = read_word(object, "causal", words, "'bottom_right' or 'top_left'")) < 0)
            return -1;
    }
    c->a.causal = 1;
    c->a.align = n ? HEED_ALIGN_TOP_LEFT : HEED_ALIGN_BOTTOM_RIGHT;
    return 0;
}

/* (left, right): None or -1 on a side means no limit there. */
static int read_window(call *c, PyObject *object)
{
    if (object == Py_None)
        return 0;
    int64_t *sides[] = { &c->a.window_left, &c->a.window_right };
    if (!PyTuple_Check(object) || PyTuple_Size(object) != 2) {
        PyErr_Format(PyExc_TypeError, "window: is %R, expected None or a tuple (left, right)", object);
        return -1;
    }
    c->a.windowed = 1;
    for (int n = 0; n < 2; n++) {
        PyObject *side = PyTuple_GetItem(object, n);
        *sides[n] = -1;
        if (side != Py_None && read_integer(side, "window", -1, sides[n]))
            return -1;
    }
    return 0;
}

static int read_scale(call *c, PyObject *object)
{
    double scale;
    if (object == Py_None)
        return 0;
    if (read_double(object, "scale", &scale))
        return -1;
    c->a.scale = (float)scale;
    c->a.zero_scale = c->a.scale == 0;
    return 0;
}

static int read_dropout(call *c, PyObject *p_object, PyObject *seed)
{
    double p;
    if (read_double(p_object, "dropout_p", &p))
        return -1;
    if (p == 0)
        return 0;
    c->a.dropout = (float)p;
    if (seed == Py_None) {
        PyErr_SetString(PyExc_ValueError, "dropout_seed: is None, expected the seed that goes with dropout_p");
        return -1;
    }
    if (PyLong_Check(seed)) {
        c->a.dropout_seed = PyLong_AsUnsignedLongLongMask(seed);
        return PyErr_Occurred() ? -1 : 0;
    }
    return view_integers(c, seed, "dropout_seed", 64, 1, (const void **)&c->a.dropout_seed_at);
}

/* ---- The call --------------------------------------------------------------------------------------------------- */

static int read_options(call *c, PyObject *const *args)
{
    static const char *const precisions[] = { "exact", "tf32", "plain", NULL }; /* as in heed_precision */
    double softcap = 0;
    int deterministic = 1, precision = HEED_EXACT;
    c->a.key_stride = 1;
    if (read_causal(c, args[ARG_CAUSAL]) || read_window(c, args[ARG_WINDOW]) || read_scale(c, args[ARG_SCALE]) ||
        (!is_default(args, ARG_STRIDE) && read_integer(args[ARG_STRIDE], "stride", 1, &c->a.key_stride)) ||
        (!is_default(args, ARG_SOFTCAP) && read_double(args[ARG_SOFTCAP], "softcap", &softcap)) ||
        (!is_default(args, ARG_DROPOUT_P) && read_dropout(c, args[ARG_DROPOUT_P], args[ARG_DROPOUT_SEED])))
        return -1;
    if (!is_default(args, ARG_DETERMINISTIC) && (deterministic = PyObject_IsTrue(args[ARG_DETERMINISTIC])) < 0)
        PyErr_Format(PyExc_TypeError, "deterministic: is %R, expected True or False", args[ARG_DETERMINISTIC]);
    if (!is_default(args, ARG_PRECISION))
        precision = read_word(args[ARG_PRECISION], "precision", precisions, "'exact', 'tf32' or 'plain'");
    c->a.softcap = (float)softcap;
    c->x.nondeterministic = !deterministic, c->x.precision = (heed_precision)precision;
    return deterministic < 0 || precision < 0 ? -1 : 0;
}

static int read_extras(call *c, PyObject *const *args)
{
    if (args[ARG_MASK] != Py_None && view_mask(c, args[ARG_MASK]))
        return -1;
    if (args[ARG_BIAS] != Py_None && call_view_bias(c, args[ARG_BIAS], "bias", &c->a.bias))
        return -1;
    if (args[ARG_ALIBI_SLOPES] != Py_None && call_view_heads(c, args[ARG_ALIBI_SLOPES], "alibi_slopes", &c->a.alibi))
        return -1;
    if (args[ARG_SINK] != Py_None && call_view_heads(c, args[ARG_SINK], "sink", &c->a.sink))
        return -1;
    return 0;
}

static int read_lengths(call *c, PyObject *const *args)
{
    const struct {
        argument arg;
        const char *name;
        const int32_t **to;
    } all[] = {
        { ARG_LENGTHS_Q, "lengths_q", &c->a.lengths_q },
        { ARG_LENGTHS_K, "lengths_k", &c->a.lengths_k },
        { ARG_CU_SEQLENS_Q, "cu_seqlens_q", &c->a.offsets_q },
        { ARG_CU_SEQLENS_K, "cu_seqlens_k", &c->a.offsets_k },
    };
    int64_t batch = c->a.q.shape[0];
    if (c->layout == THD) {
        view *v = args[ARG_CU_SEQLENS_Q] == Py_None ? NULL : open_view(c, args[ARG_CU_SEQLENS_Q], all[2].name, 0);
        if (!v || v->ndim != 1 || v->shape[0] < 1) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "cu_seqlens_q: expected one dimension of batch + 1 offsets");
            return -1;
        }
        batch = v->shape[0] - 1;
        c->a.sequences = batch;
        if (read_integer(args[ARG_MAX_SEQLEN_Q], "max_seqlen_q", 0, &c->a.max_rows) ||
            read_integer(args[ARG_MAX_SEQLEN_K], "max_seqlen_k", 0, &c->a.max_keys))
            return -1;
    }
    for (int n = 0; n < 4; n++)
        if (args[all[n].arg] != Py_None &&
            view_integers(c, args[all[n].arg], all[n].name, 32, batch + (n >= 2), (const void **)all[n].to))
            return -1;
    return 0;
}

static int read_block_table(call *c, PyObject *object)
{
    if (object == Py_None)
        return 0;
    view *v = open_view(c, object, "block_table", 0);
    if (!v)
        return -1;
    if (v->dtype.code != DL_INT || v->dtype.bits != 32 || v->ndim != 2 || (v->shape[1] > 1 && v->stride[1] != 1)) {
        PyErr_Format(PyExc_TypeError,
                     "block_table: is %s with %d dimensions, expected int32, batch x pages, packed rows",
                     view_dtype_name(v), v->ndim);
        return -1;
    }
    if (v->shape[0] != c->a.q.shape[0]) {
        PyErr_Format(PyExc_ValueError, "block_table: has %lld rows, q has %lld sequences", (long long)v->shape[0],
                     (long long)c->a.q.shape[0]);
        return -1;
    }
    c->a.block_table = v->data;
    c->a.block_table_stride = v->shape[0] > 1 ? v->stride[0] : v->shape[1];
    c->a.block_table_columns = v->shape[1];
    return 0;
}

int call_open(call *c, PyObject *const *args)
{
    memset(&c->a, 0, sizeof c->a);
    memset(&c->x, 0, sizeof c->x);
    c->open = 0, c->workspace = (memory_bytes){ 0 }, c->like = NULL;
    if (read_layout(c, args) || view_open(&c->q, args[ARG_Q], "q", 0))
        return -1;
    c->like = args[ARG_Q];
    if (arrange_as_q(c, &c->q, "q", &c->a.q) || call_view(c, args[ARG_K], "k", 0, &c->a.k) ||
        call_view(c, args[ARG_V], "v", 0, &c->a.v) || read_options(c, args) || read_extras(c, args) ||
        read_lengths(c, args) || read_block_table(c, args[ARG_BLOCK_TABLE]))
        return -1;
    int cuda = c->q.device.type == DL_CUDA;
    if (cuda && c->a.q.dtype == HEED_F64) {
        PyErr_SetString(PyExc_TypeError, "q: dtype is float64, expected float32, float16 or bfloat16 on a GPU");
        return -1;
    }
    c->x.backend = cuda ? HEED_CUDA : c->a.q.dtype == HEED_F64 ? HEED_REFERENCE : HEED_CPU;
    c->x.device = cuda ? c->q.device.id : 0;
    return cuda ? memory_stream(c->like, c->x.device, &c->x.stream) : 0;
}

void call_close(call *c)
{
    while (c->open)
        view_close(&c->others[--c->open]);
    if (c->like)
        view_close(&c->q);
    memory_give_back(&c->workspace);
}

/* ---- Running ---------------------------------------------------------------------------------------------------- */

/* Whether the work takes less time than letting other threads run and coming back. */
static int is_brief(const call *c)
{
    enum { BRIEF = 1 << 16 }; /* multiplications: a few microseconds */
    const int64_t *q = c->a.q.shape, *k = c->a.k.shape;
    return c->x.backend == HEED_CPU && q[0] * q[1] * q[2] * k[0] <= BRIEF && k[2] * q[3] <= BRIEF &&
           q[0] * q[1] * q[2] * k[0] * (k[2] * q[3]) <= BRIEF;
}

static heed_status compute(const call *c, const heed_gradient *g)
{
    return g ? heed_backward(&c->a, g, &c->x) : heed_forward(&c->a, &c->x);
}

static heed_status compute_without_gil(const call *c, const heed_gradient *g)
{
    heed_status status;
    Py_BEGIN_ALLOW_THREADS status = compute(c, g);
    Py_END_ALLOW_THREADS return status;
}

/* To ask how much workspace is needed costs as much as to find out that there is enough: so that comes first, but on a GPU
 * where the last call wanted one. */
static int run(call *c, const heed_gradient *g)
{
    static _Thread_local int wanted[2]; /* by the last forward and backward on a GPU */
    const int on_host = c->x.backend != HEED_CUDA, pass = g != NULL;
    heed_status status;
    if (on_host || !wanted[pass]) {
        c->x.workspace = on_host ? memory_scratch() : NULL;
        c->x.workspace_bytes = c->x.workspace ? MEMORY_SCRATCH : 0;
        status = is_brief(c) ? compute(c, g) : compute_without_gil(c, g);
        if (status != HEED_NO_WORKSPACE)
            return status ? call_fail(status) : 0;
    }

    if ((status = heed_workspace_size(&c->a, g, &c->x, &c->x.workspace_bytes)))
        return call_fail(status);
    if (on_host)
        c->x.workspace = memory_borrow(c->x.workspace_bytes);
    else if ((wanted[pass] = c->x.workspace_bytes > 0)) {
        memory_take(c->like, &c->q, c->x.workspace_bytes, &c->workspace);
        c->x.workspace = c->workspace.data;
    }
    if (!c->x.workspace && c->x.workspace_bytes)
        return PyErr_Occurred() ? -1 : (PyErr_NoMemory(), -1);
    status = compute_without_gil(c, g);
    if (on_host)
        memory_return(c->x.workspace);
    return status ? call_fail(status) : 0;
}

int call_forward(call *c) { return run(c, NULL); }
int call_backward(call *c)
{
    if (c->x.backend == HEED_CUDA)
        ending_note_backward(c->like, c->x.device);
    return run(c, &c->g);
}
