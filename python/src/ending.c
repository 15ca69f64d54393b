#include "ending.h"

#include <stdlib.h>

PyObject *ending_tensor, *ending_first_backward;

void ending_note_backward(PyObject *like, int gpu)
{
    enum { GPUS = 128 }; /* PyTorch's own limit */
    static unsigned char noted[GPUS];
    if (gpu < 0 || gpu >= GPUS || noted[gpu] || !ending_tensor)
        return;
    noted[gpu] = PyObject_IsInstance(like, ending_tensor) == 1;
    PyObject *result = noted[gpu] ? PyObject_CallFunction(ending_first_backward, "i", gpu) : NULL;
    Py_XDECREF(result);
    PyErr_Clear();
}

typedef struct errand {
    PyObject *function;
    PyThread_type_lock done; /* locked until it is */
} errand;

static void run_errand(void *p)
{
    errand *e = p;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *result = PyObject_CallNoArgs(e->function);
    Py_XDECREF(result);
    PyErr_Clear();
    PyGILState_Release(state);
    PyThread_release_lock(e->done);
}

/* Python makes no threads for a program that ends, from 3.12 on, but does not mind those that C makes. What the two threads
 * share is not freed: it is for one call in a program's life, and may be waited for no longer when it is done. */
PyObject *ending_call_within(PyObject *module, PyObject *p)
{
    (void)module;
    double seconds;
    PyLockStatus status = PY_LOCK_FAILURE;
    errand *e = malloc(sizeof *e);
    if (!e)
        return PyErr_NoMemory();
    if (!PyArg_ParseTuple(p, "dO", &seconds, &e->function) || !(e->done = PyThread_allocate_lock())) {
        free(e);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    Py_INCREF(e->function);
    PyThread_acquire_lock(e->done, WAIT_LOCK);
    const unsigned long failed = (unsigned long)-1;
    if (PyThread_start_new_thread(run_errand, e) != failed) {
        Py_BEGIN_ALLOW_THREADS status = PyThread_acquire_lock_timed(e->done, (PY_TIMEOUT_T)(seconds * 1e6), 0);
        Py_END_ALLOW_THREADS
    }
    return PyBool_FromLong(status == PY_LOCK_ACQUIRED);
}
