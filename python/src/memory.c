#include "memory.h"
#include "libtorch.h"

#include <pthread.h>
#include <stdlib.h>

PyObject *memory_empty_function, *memory_stream_function;
PyObject *memory_torch_empty_like, *memory_torch_empty_strided, *memory_torch_dtypes;

/* ---- PyTorch's C functions ---------------------------------------------------------------------------------------- */

static PyObject *by_libtorch(const view *v, int ndim, const int64_t *shape, const int64_t *stride, dl_dtype dtype,
                             void **data)
{
    int32_t type = dtype.code == DL_UINT     ? libtorch.u8
                   : dtype.code == DL_BFLOAT ? libtorch.bf16
                   : dtype.bits == 32        ? libtorch.f32
                   : dtype.bits == 16        ? libtorch.f16
                                             : libtorch.f64;
    int cuda = v->device.type == DL_CUDA;
    void *tensor, *object = NULL;
    if (libtorch.empty_strided(ndim, shape, stride, type, cuda ? libtorch.cuda : libtorch.cpu, cuda ? v->device.id : 0,
                               &tensor))
        return NULL;
    if (libtorch.data_of(tensor, data))
        object = NULL;
    else if (!libtorch.to_python)
        object = libtorch.wrap(tensor);
    else if (libtorch.to_python(tensor, NULL, &object))
        object = NULL;
    libtorch.delete_tensor(tensor);
    return object;
}

/* ---- Any library ------------------------------------------------------------------------------------------------ */

static int of_exchange(PyObject *like)
{
    return view_exchange && (Py_TYPE(like) == view_exchange_type || Py_TYPE(like) == view_exchange_subtype);
}

static PyObject *tuple_of(int n, const int64_t *numbers)
{
    PyObject *tuple = PyTuple_New(n);
    for (int d = 0; tuple && d < n; d++) {
        PyObject *number = PyLong_FromLongLong(numbers[d]);
        if (!number || PyTuple_SetItem(tuple, d, number))
            Py_CLEAR(tuple);
    }
    return tuple;
}

/* Whether the elements fill a stretch of memory, in whatever order of the dimensions: then empty_like keeps the strides. */
static int is_dense(const view *v)
{
    int64_t next = 1;
    for (int left = (1 << v->ndim) - 1; left;) {
        int inner = -1;
        for (int d = 0; d < v->ndim; d++) {
            if (left >> d & 1 && v->shape[d] == 1)
                left &= ~(1 << d); /* its stride means nothing */
            else if (left >> d & 1 && v->stride[d] == next)
                inner = d;
        }
        if (left && (inner < 0 || v->shape[inner] == 0))
            return 0;
        if (left)
            left &= ~(1 << inner), next *= v->shape[inner];
    }
    return 1;
}

static int same_shape(const view *v, int ndim, const int64_t *shape, const int64_t *stride, dl_dtype dtype)
{
    if (ndim != v->ndim || dtype.code != v->dtype.code || dtype.bits != v->dtype.bits)
        return 0;
    for (int d = 0; d < ndim; d++)
        if (shape[d] != v->shape[d] || stride[d] != v->stride[d])
            return 0;
    return 1;
}

/* PyTorch before 2.14: its Python functions, called from here. */
static PyObject *by_torch(PyObject *like, PyObject *sizes, PyObject *steps, const char *name)
{
    PyObject *device = PyObject_GetAttrString(like, "device"), *how = NULL, *where = NULL, *result = NULL;
    PyObject *dtype = PyDict_GetItemString(memory_torch_dtypes, name);
    if (device && dtype && (how = Py_BuildValue("{sOsO}", "dtype", dtype, "device", device)) &&
        (where = PyTuple_Pack(2, sizes, steps)))
        result = PyObject_Call(memory_torch_empty_strided, where, how);
    Py_XDECREF(device);
    Py_XDECREF(how);
    Py_XDECREF(where);
    return result;
}

PyObject *memory_new(PyObject *like, const view *v, int ndim, const int64_t *shape, const int64_t *stride,
                     dl_dtype dtype, void **data)
{
    int torch = of_exchange(like);
    *data = NULL;
    if (libtorch.makes_tensors && torch) {
        PyObject *tensor = by_libtorch(v, ndim, shape, stride, dtype, data);
        if (tensor)
            return tensor; /* out of memory and the like are told by the way below */
        PyErr_Clear();
        *data = NULL;
    }
    if (torch && is_dense(v) && same_shape(v, ndim, shape, stride, dtype))
        return PyObject_CallFunctionObjArgs(memory_torch_empty_like, like, NULL);
    static const char *const names[] = { [2] = "float16", [4] = "float32", [8] = "float64" };
    const char *name = dtype.code == DL_UINT ? "uint8" : dtype.code == DL_BFLOAT ? "bfloat16" : names[dtype.bits / 8];
    PyObject *sizes = tuple_of(ndim, shape), *steps = tuple_of(ndim, stride), *result = NULL;
    if (sizes && steps && torch)
        result = by_torch(like, sizes, steps, name);
    else if (sizes && steps)
        result = PyObject_CallFunction(memory_empty_function, "OOOs", like, sizes, steps, name);
    Py_XDECREF(sizes);
    Py_XDECREF(steps);
    return result;
}

PyObject *memory_like(PyObject *like, const view *v, void **data)
{
    *data = NULL;
    if (!of_exchange(like))
        return PyObject_CallFunction(memory_empty_function, "OOOO", like, Py_None, Py_None, Py_None);
    if (is_dense(v))
        return memory_new(like, v, v->ndim, v->shape, v->stride, v->dtype, data);
    return PyObject_CallFunctionObjArgs(memory_torch_empty_like, like, NULL);
}

PyObject *memory_bytes(PyObject *like, const view *v, size_t bytes, void **data)
{
    int64_t shape = (int64_t)bytes, stride = 1;
    PyObject *tensor = memory_new(like, v, 1, &shape, &stride, (dl_dtype){ DL_UINT, 8, 1 }, data);
    view w;
    if (tensor && *data)
        return tensor;
    if (!tensor || view_open(&w, tensor, "workspace", 1)) {
        Py_XDECREF(tensor);
        return NULL;
    }
    *data = w.data;
    view_close(&w);
    return tensor;
}

int memory_stream(PyObject *like, int device, void **stream)
{
    if (of_exchange(like))
        return view_exchange->current_stream(DL_CUDA, device, stream) ? -1 : 0;
    PyObject *number = PyObject_CallFunctionObjArgs(memory_stream_function, like, NULL);
    if (!number)
        return -1;
    *stream = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- The host's memory ------------------------------------------------------------------------------------------ */

static pthread_key_t scratch;

int memory_prepare(void) { return pthread_key_create(&scratch, free); }

void *memory_scratch(void)
{
    void *data = pthread_getspecific(scratch);
    if (!data && (data = memory_borrow(MEMORY_SCRATCH)))
        pthread_setspecific(scratch, data);
    return data;
}

void *memory_borrow(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }
void memory_return(void *data) { free(data); }
