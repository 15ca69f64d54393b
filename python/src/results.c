/* The tensors that a call makes: o and lse, and gradients. */
#include "call.h"
#include "memory.h"

#include <string.h>

/* What a view of a new tensor would say. */
static heed_tensor tensor_of(void *data, heed_dtype dtype, const form *f, const int axis[4])
{
    heed_tensor t = { .data = data, .dtype = dtype };
    for (int d = 0; d < 4; d++) {
        t.shape[d] = axis[d] < 0 ? 1 : f->shape[axis[d]];
        t.stride[d] = axis[d] < 0 ? 0 : f->stride[axis[d]];
    }
    return t;
}

/* ---- o and lse -------------------------------------------------------------------------------------------------- */

/* Packed, in the order of q's memory: whichever of heads and rows is the inner one there is so in o. */
static form form_of_o(const call *c)
{
    const int *axis = call_layouts[c->layout].axis;
    form f = { .ndim = c->q.ndim, .dtype = c->q.dtype };
    memcpy(f.shape, c->q.shape, sizeof f.shape);
    int64_t columns = f.shape[f.ndim - 1] = c->a.v.shape[3];
    int head = axis[1], row = axis[2];
    int inner = head > row ? head : row, outer = head + row - inner;
    if (f.shape[inner] > 1 && f.shape[outer] > 1 && c->q.stride[inner] > c->q.stride[outer]) {
        int swap = inner;
        inner = outer, outer = swap;
    }
    f.stride[f.ndim - 1] = 1;
    f.stride[inner] = columns > 1 ? columns : 1;
    f.stride[outer] = f.stride[inner] * (f.shape[inner] > 1 ? f.shape[inner] : 1);
    if (f.ndim == 4)
        f.stride[0] = f.stride[outer] * (f.shape[outer] > 1 ? f.shape[outer] : 1);
    return f;
}

static heed_dtype type_of_lse(const call *c) { return c->a.q.dtype == HEED_F64 ? HEED_F64 : HEED_F32; }

static form form_of_lse(const call *c)
{
    int first = c->layout == THD ? 1 : 0;
    form f = { .ndim = 3 - first, .dtype = { DL_FLOAT, type_of_lse(c) == HEED_F64 ? 64 : 32, 1 } };
    int64_t next = 1;
    for (int d = f.ndim - 1; d >= 0; d--) {
        f.shape[d] = c->a.q.shape[d + first], f.stride[d] = next;
        next *= f.shape[d] > 1 ? f.shape[d] : 1;
    }
    return f;
}

/* data: where o lies, or NULL where that has to be asked. */
static int put_o(call *c, PyObject *o, const form *f, void *data)
{
    if (!data)
        return call_view(c, o, "o", 1, &c->a.o);
    c->a.o = tensor_of(data, c->a.q.dtype, f, call_layouts[c->layout].axis);
    return 0;
}

PyObject *call_new_o(call *c)
{
    const form f = form_of_o(c);
    void *data;
    PyObject *o = memory_new(c->like, &c->q, &f, &data);
    if (o && put_o(c, o, &f, data))
        Py_CLEAR(o);
    return o;
}

PyObject *call_new_lse(call *c)
{
    const form f = form_of_lse(c);
    void *data;
    PyObject *lse = memory_new(c->like, &c->q, &f, &data);
    if (lse && data)
        c->a.lse = tensor_of(data, type_of_lse(c), &f, call_row_axes[c->layout == THD]);
    else if (lse && call_view_rows(c, lse, "lse", &c->a.lse))
        Py_CLEAR(lse);
    return lse;
}

PyObject *call_new_o_with_hidden_lse(call *c, memory_hidden *lse)
{
    const form f = form_of_o(c);
    void *data;
    lse->form = form_of_lse(c);
    PyObject *o = memory_new_with_hidden(c->like, &c->q, &f, &data, lse);
    if (o && put_o(c, o, &f, data)) {
        Py_CLEAR(o);
        memory_drop(lse);
    }
    if (o)
        c->a.lse = tensor_of(lse->data, type_of_lse(c), &lse->form, call_row_axes[c->layout == THD]);
    return o;
}

/* ---- Gradients -------------------------------------------------------------------------------------------------- */

/* The gradient of q, k or v: its tensor in g, and the view of what it is like. */
static const view *place_of_gradient(call *c, int n, heed_tensor **t)
{
    *t = n == GRAD_Q ? &c->g.d_q : n == GRAD_K ? &c->g.d_k : &c->g.d_v;
    return n == GRAD_Q ? &c->q : &c->others[n - GRAD_K];
}

static PyObject *new_gradient(call *c, int n, PyObject *object)
{
    heed_tensor *t;
    void *data;
    const view *v = place_of_gradient(c, n, &t);
    const form f = memory_form_like(v);
    PyObject *made = memory_new(object, v, &f, &data);
    if (made && data)
        *t = tensor_of(data, c->a.q.dtype, &f, call_layouts[c->layout].axis);
    else if (made && call_view(c, made, "gradient", 1, t))
        Py_CLEAR(made);
    return made;
}

/* Those of bias and sink. */
static PyObject *new_other_gradient(call *c, int n, PyObject *object)
{
    view v;
    void *data;
    if (view_open(&v, object, "gradient", 0))
        return NULL;
    const form f = memory_form_like(&v);
    PyObject *made = memory_new(object, &v, &f, &data);
    view_close(&v);
    int bad = !made || (n == GRAD_BIAS ? call_view_bias(c, made, "dbias", &c->g.d_bias)
                                       : call_view_heads(c, made, "dsink", &c->g.d_sink));
    if (bad)
        Py_CLEAR(made);
    return made;
}

/* All three of q, k and v in one piece of memory, where that can be. */
static void new_gradients_in_one(call *c, PyObject **gradients)
{
    enum { COUNT = GRAD_V + 1 };
    heed_tensor *t[COUNT];
    form f[COUNT];
    void *data[COUNT];
    for (int n = 0; n < COUNT; n++)
        f[n] = memory_form_like(place_of_gradient(c, n, &t[n]));
    if (memory_new_in_one(c->like, &c->q, f, COUNT, data, gradients))
        return;
    for (int n = 0; n < COUNT; n++)
        *t[n] = tensor_of(data[n], c->a.q.dtype, &f[n], call_layouts[c->layout].axis);
}

int call_new_gradients(call *c, PyObject *const *args, const int *wants, int in_one, PyObject **gradients)
{
    static const argument of[GRADIENTS] = { ARG_Q, ARG_K, ARG_V, ARG_BIAS, ARG_SINK };
    for (int n = 0; n < GRADIENTS; n++)
        gradients[n] = NULL;
    if (in_one && wants[GRAD_Q] && wants[GRAD_K] && wants[GRAD_V])
        new_gradients_in_one(c, gradients);
    for (int n = 0; n < GRADIENTS; n++) {
        PyObject *object = args[of[n]];
        if (gradients[n] || !wants[n] || object == Py_None)
            continue;
        gradients[n] = n <= GRAD_V ? new_gradient(c, n, object) : new_other_gradient(c, n, object);
        if (!gradients[n])
            return -1;
    }
    return 0;
}
