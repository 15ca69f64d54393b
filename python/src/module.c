/* heed._C: the library for Python. Its functions take the arguments of `enum argument` in that order; the package's
 * Python files give them names, defaults and meaning, and say which way a call goes. */
#include "call.h"
#include "ending.h"
#include "front.h"
#include "memory.h"
#include "parts.h"
#include "torch.h"

/* forward(out, want_lse, *arguments) -> o, or (o, lse). No autograd. out: None, or where o is to be written. */
static PyObject *forward(PyObject *module, PyObject *const *p, Py_ssize_t n)
{
    (void)module;
    PyObject *o = NULL, *lse = NULL, *result = NULL;
    call c;
    if (call_count("forward", n, 2 + ARGUMENTS))
        return NULL;
    int want_lse = PyObject_IsTrue(p[1]);
    if (want_lse < 0)
        return NULL;
    if (!call_open(&c, p + 2)) {
        if (p[0] == Py_None)
            o = call_new_o(&c);
        else if (!call_view(&c, p[0], "output", 1, &c.a.o))
            Py_INCREF(o = p[0]);
        if (o && (!want_lse || (lse = call_new_lse(&c))) && !call_forward(&c))
            result = want_lse ? PyTuple_Pack(2, o, lse) : (Py_INCREF(o), o);
    }
    call_close(&c);
    Py_XDECREF(o);
    Py_XDECREF(lse);
    return result;
}

/* backward(do, dlse, o, lse, wants, *arguments) -> (dq, dk, dv, dbias, dsink), None where wants, five of them, is
 * false. dlse may be None. */
static PyObject *backward(PyObject *module, PyObject *const *p, Py_ssize_t n)
{
    (void)module;
    if (call_count("backward", n, 5 + ARGUMENTS))
        return NULL;
    int wants[GRADIENTS];
    for (int i = 0; i < GRADIENTS; i++) {
        PyObject *want = PySequence_GetItem(p[4], i);
        wants[i] = want ? PyObject_IsTrue(want) : -1;
        Py_XDECREF(want);
        if (wants[i] < 0)
            return NULL;
    }
    PyObject *made[GRADIENTS], *result;
    const torch_given given = { .d_o = p[0], .d_lse = p[1], .o = p[2], .lse = p[3] };
    if (torch_gradients(&given, wants, 0, p + 5, made))
        return NULL;
    result = PyTuple_Pack(GRADIENTS, made[0], made[1], made[2], made[3], made[4]);
    for (int i = 0; i < GRADIENTS; i++)
        Py_DECREF(made[i]);
    return result;
}

static PyObject *set_threads(PyObject *module, PyObject *number)
{
    (void)module;
    long threads = PyLong_AsLong(number);
    if (threads == -1 && PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError, "threads: is %R, expected a whole number", number);
        return NULL;
    }
    enum { MOST = 1 << 20 };
    if (threads < 0 || threads > MOST) {
        PyErr_Format(PyExc_ValueError, "threads: is %ld, expected 0 to %d", threads, MOST);
        return NULL;
    }
    heed_set_threads((int)threads);
    Py_RETURN_NONE;
}

/* explain(chip, backward, *arguments) -> str */
static PyObject *explain(PyObject *module, PyObject *const *p, Py_ssize_t n)
{
    (void)module;
    if (call_count("explain", n, 2 + ARGUMENTS))
        return NULL;
    call c;
    PyObject *result = NULL;
    char text[8192];
    const char *chip = NULL;
    if (p[0] != Py_None && !PyUnicode_Check(p[0]))
        return PyErr_Format(PyExc_TypeError, "chip: is %R, expected None or a name", p[0]);
    if (p[0] != Py_None && !(chip = PyUnicode_AsUTF8AndSize(p[0], NULL)))
        return NULL;
    int with_gradient = PyObject_IsTrue(p[1]);
    if (with_gradient < 0)
        return NULL;
    if (!call_open(&c, p + 2)) {
        c.a.o = c.a.q, c.a.o.data = NULL, c.a.o.shape[3] = c.a.v.shape[3];
        for (int d = 0; d < 4; d++)
            c.a.o.stride[d] = 0;
        heed_gradient g = { .d_o = c.a.o, .d_q = c.a.q, .d_k = c.a.k, .d_v = c.a.v };
        heed_tensor *made[] = { &g.d_q, &g.d_k, &g.d_v };
        for (int i = 0; i < 3; i++)
            for (int d = 0; d < 4; d++)
                made[i]->data = NULL, made[i]->stride[d] = 0;
        c.a.lse = (heed_tensor){ .shape = { c.a.q.shape[0], c.a.q.shape[1], c.a.q.shape[2], 1 } };
        heed_status status = heed_explain(&c.a, with_gradient ? &g : NULL, &c.x, chip, text, sizeof text);
        result = status ? (call_fail(status), NULL) : PyUnicode_FromString(text);
    }
    call_close(&c);
    return result;
}

static PyObject *version(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    return PyUnicode_FromString(heed_version_string());
}

/* kernels() -> [(name, "cpu" | "cuda" | "reference", backward, runs_here)] in order of preference */
static PyObject *kernels(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    static const char *const backends[] = { "cpu", "cuda", "reference" };
    PyObject *list = PyList_New(0);
    heed_kernel_info info;
    for (int n = 0; list && !heed_kernel_at(n, &info); n++) {
        PyObject *row = Py_BuildValue("ssOO", info.name, backends[info.backend], info.backward ? Py_True : Py_False,
                                      info.runs_here ? Py_True : Py_False);
        if (!row || PyList_Append(list, row))
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

/* use(otherwise, empty, stream, names, defaults): what torch.h, memory.h and call.h speak of */
static PyObject *use(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *names, *defaults;
    if (!PyArg_ParseTuple(args, "OOOO!O!", &torch_otherwise, &memory_empty_function, &memory_stream_function,
                          &PyTuple_Type, &names, &PyTuple_Type, &defaults))
        return NULL;
    if (PyTuple_Size(names) != ARGUMENTS || PyTuple_Size(defaults) != ARGUMENTS) {
        PyErr_Format(PyExc_ValueError, "use: expected %d names and defaults", ARGUMENTS);
        return NULL;
    }
    for (int n = 0; n < ARGUMENTS; n++)
        call_names[n] = PyTuple_GetItem(names, n), call_defaults[n] = PyTuple_GetItem(defaults, n);
    Py_INCREF(args); /* and with it all of them, for good */
    Py_RETURN_NONE;
}

#define FAST(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL
static PyMethodDef methods[] = {
    { "forward", FAST(forward), NULL },
    { "backward", FAST(backward), NULL },
    { "explain", FAST(explain), NULL },
    { "part_forward", FAST(parts_forward), NULL },
    { "part_backward", FAST(parts_backward), NULL },
    { "merge", FAST(parts_merge), NULL },
    { "delta", FAST(parts_delta), NULL },
    { "attention", FAST(torch_attention), NULL },
    { "front", front_make, METH_VARARGS, NULL },
    { "apply", FAST(torch_apply), NULL },
    { "function_forward", FAST(torch_function_forward), NULL },
    { "quick_class", torch_quick_class, METH_O, NULL },
    { "keep_at_hand", torch_keep_at_hand, METH_VARARGS, NULL },
    { "function_state", torch_function_state, METH_O, NULL },
    { "call_within", ending_call_within, METH_VARARGS, NULL },
    { "use", use, METH_VARARGS, NULL },
    { "use_torch", torch_use, METH_VARARGS, NULL },
    { "set_threads", set_threads, METH_O, NULL },
    { "version", version, METH_NOARGS, NULL },
    { "kernels", kernels, METH_NOARGS, NULL },
    { NULL, NULL, 0, NULL },
};

PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void)
{
    static struct PyModuleDef definition = { PyModuleDef_HEAD_INIT, .m_name = "heed._C", .m_size = -1,
                                             .m_methods = methods };
    PyObject *module = torch_prepare() || memory_prepare() ? NULL : PyModule_Create(&definition);
    if (module && PyModule_AddObjectRef(module, "Backward", torch_backward_type))
        Py_CLEAR(module);
    return module;
}
