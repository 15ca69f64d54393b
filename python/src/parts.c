#include "parts.h"
#include "memory.h"

#include <string.h>

static int read_positions(call *c, PyObject *tuple)
{
    int64_t *const to[] = { &c->a.query_position, &c->a.query_step, &c->a.key_position, &c->a.key_step };
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 4) {
        PyErr_Format(PyExc_TypeError, "positions: is %R, expected (query position, step, key position, step)", tuple);
        return -1;
    }
    for (int i = 0; i < 4; i++) {
        *to[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (*to[i] == -1 && PyErr_Occurred())
            return -1;
    }
    c->a.align = HEED_ALIGN_POSITION;
    return 0;
}

PyObject *parts_forward(PyObject *module, PyObject *const *p, Py_ssize_t n)
{
    (void)module;
    if (call_count("part_forward", n, 3 + ARGUMENTS))
        return NULL;
    call c;
    int bad = call_open(&c, p + 3) || read_positions(&c, p[2]) || call_view(&c, p[0], "o", 1, &c.a.o) ||
              call_view_rows(&c, p[1], "lse", &c.a.lse) || call_forward(&c);
    call_close(&c);
    return bad ? NULL : Py_NewRef(Py_None);
}

PyObject *parts_backward(PyObject *module, PyObject *const *p, Py_ssize_t n)
{
    (void)module;
    if (call_count("part_backward", n, 8 + ARGUMENTS))
        return NULL;
    call c;
    memset(&c.g, 0, sizeof c.g);
    int bad = call_open(&c, p + 8) || read_positions(&c, p[7]) || call_view(&c, p[0], "do", 0, &c.g.d_o) ||
              call_view_rows(&c, p[1], "lse", &c.a.lse) || call_view_rows(&c, p[2], "delta", &c.g.delta) ||
              call_view(&c, p[3], "dq", 1, &c.g.d_q) || call_view(&c, p[4], "dk", 1, &c.g.d_k) ||
              call_view(&c, p[5], "dv", 1, &c.g.d_v);
    if (!bad && (c.g.accumulate = PyObject_IsTrue(p[6])) < 0)
        bad = -1;
    c.a.o = c.g.d_o; /* heed.h: with delta given, o is not read; it still says what do's type and shape have to be */
    bad = bad || call_backward(&c);
    call_close(&c);
    return bad ? NULL : Py_NewRef(Py_None);
}

/* For what has rows but no keys: o stands for q. */
static int open_rows(call *c, PyObject *o, heed_tensor *to)
{
    memset(c, 0, sizeof *c);
    c->layout = BHSD;
    if (view_open(&c->q, o, "o", 1))
        return -1;
    c->like = o;
    if (call_view(c, o, "o", 1, to))
        return -1;
    int cuda = c->q.device.type == DL_CUDA;
    c->x.backend = cuda ? HEED_CUDA : to->dtype == HEED_F64 ? HEED_REFERENCE : HEED_CPU;
    c->x.device = cuda ? c->q.device.id : 0;
    return cuda ? memory_stream(c->like, c->x.device, &c->x.stream) : 0;
}

static PyObject *close_rows(call *c, int bad)
{
    call_close(c);
    return bad ? NULL : Py_NewRef(Py_None);
}

PyObject *parts_merge(PyObject *module, PyObject *const *p, Py_ssize_t n)
{
    (void)module;
    if (call_count("merge", n, 4))
        return NULL;
    call c;
    heed_tensor o, lse, o2, lse2;
    int bad = open_rows(&c, p[0], &o) || call_view_rows(&c, p[1], "lse", &lse) || call_view(&c, p[2], "o2", 0, &o2) ||
              call_view_rows(&c, p[3], "lse2", &lse2);
    if (!bad) {
        heed_status status;
        Py_BEGIN_ALLOW_THREADS status = heed_merge(&o, &lse, &o2, &lse2, &c.x);
        Py_END_ALLOW_THREADS bad = status ? call_fail(status) : 0;
    }
    return close_rows(&c, bad);
}

PyObject *parts_delta(PyObject *module, PyObject *const *p, Py_ssize_t n)
{
    (void)module;
    if (call_count("delta", n, 4))
        return NULL;
    call c;
    heed_tensor o, d_o, d_lse, delta;
    int with_lse = p[2] != Py_None;
    int bad = open_rows(&c, p[0], &o) || call_view(&c, p[1], "do", 0, &d_o) ||
              (with_lse && call_view_rows(&c, p[2], "dlse", &d_lse)) || call_view_rows(&c, p[3], "delta", &delta);
    if (!bad) {
        heed_status status;
        Py_BEGIN_ALLOW_THREADS status = heed_delta(&o, &d_o, with_lse ? &d_lse : NULL, &delta, &c.x);
        Py_END_ALLOW_THREADS bad = status ? call_fail(status) : 0;
    }
    return close_rows(&c, bad);
}
