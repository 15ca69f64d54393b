#include "front.h"
#include "torch.h"

#include <string.h>

static PyObject *front; /* what it is in Python */
static PyObject *return_lse_name;

/* Puts named arguments where they belong. Names come from the caller's code and are the same objects as ours, so that one
 * that is not is best looked at by Python. */
static int place_named(PyObject *const *values, PyObject *names, Py_ssize_t given, PyObject **return_lse,
                       PyObject **args)
{
    for (Py_ssize_t i = 0, count = PyTuple_Size(names); i < count; i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        int n = (int)given;
        while (n <= ARG_PRECISION && name != call_names[n])
            n++;
        if (n <= ARG_PRECISION)
            args[n] = values[i];
        else if (name == return_lse_name)
            *return_lse = values[i];
        else
            return -1;
    }
    return 0;
}

static PyObject *call_front(PyObject *const *p, Py_ssize_t given, PyObject *names)
{
    PyObject *args = PyTuple_New(given), *named = PyDict_New(), *result = NULL;
    int bad = !args || !named;
    for (Py_ssize_t i = 0; !bad && i < given; i++) {
        Py_INCREF(p[i]);
        bad = PyTuple_SetItem(args, i, p[i]);
    }
    for (Py_ssize_t i = 0; !bad && names && i < PyTuple_Size(names); i++)
        bad = PyDict_SetItem(named, PyTuple_GetItem(names, i), p[given + i]);
    if (!bad)
        result = PyObject_Call(front, args, named);
    Py_XDECREF(args);
    Py_XDECREF(named);
    return result;
}

static PyObject *attention(PyObject *module, PyObject *const *p, Py_ssize_t n, PyObject *names)
{
    (void)module;
    PyObject *args[ARGUMENTS], *return_lse = Py_False, *result;
    if (n <= ARG_V + 1) {
        memcpy(args, call_defaults, sizeof args);
        for (Py_ssize_t i = 0; i < n; i++)
            args[i] = p[i];
        if ((!names || !place_named(p + n, names, n, &return_lse, args)) &&
            (return_lse == Py_False || return_lse == Py_True) &&
            ((result = torch_quick(return_lse, args)) || PyErr_Occurred()))
            return result;
    }
    return call_front(p, n, names);
}

PyObject *front_make(PyObject *module, PyObject *p)
{
    static PyMethodDef method = { "attention", (PyCFunction)(void (*)(void))attention, METH_FASTCALL | METH_KEYWORDS,
                                  NULL };
    (void)module;
    PyObject *name, *doc;
    if (!PyArg_ParseTuple(p, "OUO", &front, &name, &doc) || !(method.ml_doc = PyUnicode_AsUTF8AndSize(doc, NULL)) ||
        !(return_lse_name = PyUnicode_InternFromString("return_lse")))
        return NULL;
    Py_INCREF(p); /* and with it all of them, for good */
    return PyCFunction_NewEx(&method, NULL, name);
}
