/* Tensors of any library, seen as memory: PyTorch's through its own C functions or DLPack's, others through the buffer
 * protocol or __dlpack__. */
#ifndef HEED_VIEW_H
#define HEED_VIEW_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "dlpack.h"
#include "heed.h"

enum { MAX_DIMS = 4 };

typedef struct view {
    void *data;
    dl_device device;
    dl_dtype dtype;
    int ndim;
    int64_t shape[MAX_DIMS], stride[MAX_DIMS]; /* in elements */
    enum { BORROWED, BUFFER, MANAGED, MANAGED_VERSIONED } kind;
    union {
        Py_buffer buffer;
        dl_managed *managed;
        dl_managed_versioned *versioned;
    } held;
    PyObject *copy; /* where the view is of a packed copy: that copy */
} view;

/* Looks at object, which stays the caller's and must outlive the view. -1: an exception is set and there is no view. */
int view_open(view *v, PyObject *object, const char *name, int writable);
void view_close(view *v);

/* PyTorch's types of ordinary tensors; NULL before torch is here. Tensors are read through their type's own C functions, or,
 * where there are none, before 2.10, through a Python function that gives a capsule of one. */
extern PyTypeObject *view_exchange_type, *view_exchange_subtype;
extern const dl_exchange *view_exchange;
extern PyObject *view_capsule_function;

/* An ordinary tensor: a subclass may have to see what is done with its own. */
static inline int view_of_exchange(PyObject *object)
{
    return Py_TYPE(object) == view_exchange_type || Py_TYPE(object) == view_exchange_subtype;
}

int64_t view_elements(const view *v);
int view_same_device(const view *v, const view *w);

/* "float32", "cuda:0": for messages. The text lives until the next call of this thread. */
const char *view_dtype_name(const view *v);
const char *view_device_name(const view *v);

#endif
