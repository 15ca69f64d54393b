#include "memory.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

PyObject *memory_empty_function, *memory_stream_function;
PyObject *memory_torch_empty_like, *memory_torch_empty_strided, *memory_torch_dtypes;

/* ---- PyTorch's stable C interface ------------------------------------------------------------------------------- */

/* Part of libtorch's stable ABI. Found at run time, as heed is built without PyTorch. All return 0 for success. */
static struct {
    int32_t (*empty_strided)(int64_t ndim, const int64_t *shape, const int64_t *stride, int32_t dtype,
                             int32_t device_type, int32_t device, void **tensor);
    int32_t (*to_python)(void *tensor, void *type, void **object);
    int32_t (*delete_tensor)(void *tensor);
    int32_t f32, f64, f16, bf16, u8, cpu, cuda;
    int found;
} shim;

static int32_t constant(void *library, const char *name)
{
    int32_t (*function)(void);
    *(void **)&function = dlsym(library, name);
    return function ? function() : -1;
}

void memory_use_torch_shim(const char *library)
{
    void *torch = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
    if (!torch)
        return;
    *(void **)&shim.empty_strided = dlsym(torch, "aoti_torch_empty_strided");
    *(void **)&shim.to_python = dlsym(torch, "torch_tensor_to_pyobject");
    *(void **)&shim.delete_tensor = dlsym(torch, "aoti_torch_delete_tensor_object");
    shim.f32 = constant(torch, "aoti_torch_dtype_float32");
    shim.f64 = constant(torch, "aoti_torch_dtype_float64");
    shim.f16 = constant(torch, "aoti_torch_dtype_float16");
    shim.bf16 = constant(torch, "aoti_torch_dtype_bfloat16");
    shim.u8 = constant(torch, "aoti_torch_dtype_uint8");
    shim.cpu = constant(torch, "aoti_torch_device_type_cpu");
    shim.cuda = constant(torch, "aoti_torch_device_type_cuda");
    shim.found = shim.empty_strided && shim.to_python && shim.delete_tensor && shim.cpu >= 0 && shim.cuda >= 0 &&
                 shim.f32 >= 0 && shim.f64 >= 0 && shim.f16 >= 0 && shim.bf16 >= 0 && shim.u8 >= 0;
}

static PyObject *by_shim(const view *v, int ndim, const int64_t *shape, const int64_t *stride, dl_dtype dtype)
{
    int32_t type = dtype.code == DL_UINT     ? shim.u8
                   : dtype.code == DL_BFLOAT ? shim.bf16
                   : dtype.bits == 32        ? shim.f32
                   : dtype.bits == 16        ? shim.f16
                                             : shim.f64;
    int cuda = v->device.type == DL_CUDA;
    void *tensor, *object;
    if (shim.empty_strided(ndim, shape, stride, type, cuda ? shim.cuda : shim.cpu, cuda ? v->device.id : 0, &tensor))
        return NULL;
    int32_t bad = shim.to_python(tensor, NULL, &object);
    shim.delete_tensor(tensor);
    return bad ? NULL : object;
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

/* Packed in the usual order, as empty_like would make it too. */
static int is_packed(const view *v)
{
    int64_t next = 1;
    for (int d = v->ndim - 1; d >= 0; next *= v->shape[d--])
        if (v->stride[d] != next || v->shape[d] == 0)
            return 0;
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
                     dl_dtype dtype)
{
    int torch = of_exchange(like);
    if (shim.found && torch) {
        PyObject *tensor = by_shim(v, ndim, shape, stride, dtype);
        if (tensor)
            return tensor; /* out of memory and the like are told by the way below */
        PyErr_Clear();
    }
    if (torch && is_packed(v) && same_shape(v, ndim, shape, stride, dtype))
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

PyObject *memory_like(PyObject *like, PyObject *object)
{
    if (memory_torch_empty_like && of_exchange(like)) {
        view v;
        PyObject *tensor = NULL;
        if (shim.found && !view_open(&v, object, "tensor", 0)) {
            if (is_packed(&v))
                tensor = by_shim(&v, v.ndim, v.shape, v.stride, v.dtype);
            view_close(&v);
        }
        PyErr_Clear();
        return tensor ? tensor : PyObject_CallFunctionObjArgs(memory_torch_empty_like, object, NULL);
    }
    return PyObject_CallFunction(memory_empty_function, "OOOO", object, Py_None, Py_None, Py_None);
}

PyObject *memory_bytes(PyObject *like, const view *v, size_t bytes, void **data)
{
    int64_t shape = (int64_t)bytes, stride = 1;
    PyObject *tensor = memory_new(like, v, 1, &shape, &stride, (dl_dtype){ DL_UINT, 8, 1 });
    view w;
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
