#include "memory.h"
#include "libtorch.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

PyObject *memory_empty_function, *memory_stream_function;
PyObject *memory_torch_empty_strided, *memory_torch_empty_cuda, *memory_torch_dtypes;

/* ---- PyTorch's C functions ---------------------------------------------------------------------------------------- */

static int32_t type_of(dl_dtype dtype)
{
    return dtype.code == DL_UINT     ? libtorch.u8
           : dtype.code == DL_BFLOAT ? libtorch.bf16
           : dtype.bits == 32        ? libtorch.f32
           : dtype.bits == 16        ? libtorch.f16
                                     : libtorch.f64;
}

/* A tensor on v's device, of which libtorch.delete_tensor() is to be told; NULL: it could not be made. */
static void *new_tensor(const view *v, const form *f, void **data)
{
    int cuda = v->device.type == DL_CUDA;
    void *tensor;
    if (libtorch.empty_strided(f->ndim, f->shape, f->stride, type_of(f->dtype), cuda ? libtorch.cuda : libtorch.cpu,
                               cuda ? v->device.id : 0, &tensor))
        return NULL;
    if (!libtorch.data_of(tensor, data))
        return tensor;
    libtorch.delete_tensor(tensor);
    return NULL;
}

/* Python's object for a tensor, which is deleted. */
static PyObject *to_object(void *tensor)
{
    void *object = NULL;
    if (libtorch.wrap_last)
        object = libtorch.wrap_last(tensor);
    else if (libtorch.to_python(tensor, NULL, &object))
        object = NULL;
    libtorch.delete_tensor(tensor);
    return object;
}

static PyObject *by_libtorch(const view *v, const form *f, void **data)
{
    void *tensor = new_tensor(v, f, data);
    return tensor ? to_object(tensor) : NULL;
}

/* ---- Any library ------------------------------------------------------------------------------------------------ */

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

/* Dimensions from the inner to the outer one, as they lie in memory. Of one that repeats the stride says nothing. */
static void order_of(const view *v, int *inner)
{
    for (int n = 0; n < v->ndim; n++) {
        int at = n, d = v->ndim - 1 - n;
        for (; at > 0 && v->stride[d] && llabs(v->stride[d]) < llabs(v->stride[inner[at - 1]]); at--)
            inner[at] = inner[at - 1];
        inner[at] = d;
    }
}

form memory_form_like(const view *v)
{
    form f = { .ndim = v->ndim, .dtype = v->dtype };
    int inner[MAX_DIMS];
    int64_t next = 1;
    order_of(v, inner);
    for (int n = 0; n < v->ndim; n++) {
        int d = inner[n];
        f.shape[d] = v->shape[d], f.stride[d] = next;
        next *= v->shape[d] > 1 ? v->shape[d] : 1;
    }
    return f;
}

static int64_t bytes_of(const form *f)
{
    int64_t bytes = f->dtype.bits / 8;
    for (int d = 0; d < f->ndim; d++)
        bytes *= f->shape[d];
    return bytes;
}

static const char *dtype_name(dl_dtype t)
{
    static const char *const names[] = { [2] = "float16", [4] = "float32", [8] = "float64" };
    return t.code == DL_UINT ? "uint8" : t.code == DL_BFLOAT ? "bfloat16" : names[t.bits / 8];
}

static int same_form(const form *f, const form *g)
{
    const size_t bytes = (size_t)f->ndim * sizeof *f->shape;
    return f->ndim == g->ndim && f->dtype.code == g->dtype.code && f->dtype.bits == g->dtype.bits &&
           !memcmp(f->shape, g->shape, bytes) && !memcmp(f->stride, g->stride, bytes);
}

/* (shape, strides, dtype), a borrowed reference: a program has few forms, and asks for them again and again. */
static PyObject *arguments_of(const form *f)
{
    enum { KEPT = 8 };
    static struct {
        form form;
        PyObject *arguments;
    } kept[KEPT];
    static int next;
    for (int n = 0; n < KEPT && kept[n].arguments; n++)
        if (same_form(&kept[n].form, f))
            return kept[n].arguments;
    PyObject *sizes = tuple_of(f->ndim, f->shape), *steps = tuple_of(f->ndim, f->stride), *arguments = NULL;
    PyObject *dtype = PyDict_GetItemString(memory_torch_dtypes, dtype_name(f->dtype));
    if (sizes && steps && dtype && (arguments = PyTuple_Pack(3, sizes, steps, dtype))) {
        Py_XDECREF(kept[next].arguments);
        kept[next].form = *f, kept[next].arguments = arguments;
        next = (next + 1) % KEPT;
    }
    Py_XDECREF(sizes);
    Py_XDECREF(steps);
    return arguments;
}

/* By the function that torch.compile's code makes tensors with, past PyTorch's dispatcher: on the current device. NULL: that is
 * another, or it cannot be made; no exception is set. */
static PyObject *on_current_device(const view *v, const form *f, void **data)
{
    PyObject *arguments = arguments_of(f), *made = NULL;
    int32_t id = -1;
    if (arguments && (made = PyObject_Call(memory_torch_empty_cuda, arguments, NULL)) &&
        (Py_TYPE(made) != view_exchange_type || libtorch.device_of(libtorch_tensor(made), &id) || id != v->device.id ||
         libtorch.data_of(libtorch_tensor(made), data)))
        Py_CLEAR(made);
    if (!made)
        PyErr_Clear();
    return made;
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

PyObject *memory_new(PyObject *like, const view *v, const form *f, void **data)
{
    int torch = view_of_exchange(like);
    *data = NULL;
    if (libtorch.makes_tensors && torch) {
        const int quick = v->device.type == DL_CUDA && libtorch.tensor_at && memory_torch_empty_cuda != Py_None;
        PyObject *tensor = quick ? on_current_device(v, f, data) : NULL;
        tensor = tensor ? tensor : by_libtorch(v, f, data);
        if (tensor)
            return tensor; /* out of memory and the like are told by the way below */
        PyErr_Clear();
        *data = NULL;
    }
    const char *name = dtype_name(f->dtype);
    PyObject *sizes = tuple_of(f->ndim, f->shape), *steps = tuple_of(f->ndim, f->stride), *result = NULL;
    if (sizes && steps && torch)
        result = by_torch(like, sizes, steps, name);
    else if (sizes && steps)
        result = PyObject_CallFunction(memory_empty_function, "OOOs", like, sizes, steps, name);
    Py_XDECREF(sizes);
    Py_XDECREF(steps);
    return result;
}

enum { SMALL = 1 << 20 };                                    /* bytes: of hidden memory and what is seen of it */
enum { TOGETHER = 64 << 10, TOGETHER_ON_DEVICE = 16 << 20 }; /* of several tensors: a GPU's memory takes long to get */
enum { COPIED = 8 << 10 };                                   /* of one that is copied, not saved */
enum { ALIGNED = 64, ALIGNED_ON_DEVICE = 256 };              /* what starts at such a multiple suits every kernel */

static int64_t aligned_bytes_of(const view *v, const form *f)
{
    const int64_t unit = v->device.type == DL_CUDA ? ALIGNED_ON_DEVICE : ALIGNED;
    return (bytes_of(f) + unit - 1) / unit * unit;
}

/* One piece of memory, as an at::Tensor of bytes. */
static void *new_piece(const view *v, int64_t bytes, void **base)
{
    const form all = { .ndim = 1, .dtype = { DL_UINT, 8, 1 }, .shape = { bytes }, .stride = { 1 } };
    return libtorch.makes_tensors && bytes ? new_tensor(v, &all, base) : NULL;
}

/* What begins at that byte of it, for Python. */
static PyObject *part_of_piece(void *piece, int64_t offset, const form *f)
{
    void *part;
    if (libtorch.part_of(piece, offset, type_of(f->dtype), f->ndim, f->shape, f->stride, &part))
        return NULL;
    return to_object(part);
}

int memory_new_in_one(PyObject *like, const view *v, const form *f, int count, void **data, PyObject **made)
{
    int64_t bytes = 0, offset = 0;
    const int64_t most = v->device.type == DL_CUDA ? TOGETHER_ON_DEVICE : TOGETHER;
    for (int n = 0; n < count; n++)
        bytes += aligned_bytes_of(v, &f[n]);
    const int fits = view_of_exchange(like) && libtorch.part_of && bytes <= most;
    void *base, *memory = fits ? new_piece(v, bytes, &base) : NULL;
    int done = 0;
    for (; memory && done < count && (made[done] = part_of_piece(memory, offset, &f[done])); done++) {
        data[done] = (char *)base + offset;
        offset += aligned_bytes_of(v, &f[done]);
    }
    if (memory)
        libtorch.delete_tensor(memory);
    if (done == count)
        return 0;
    while (done--)
        Py_CLEAR(made[done]);
    PyErr_Clear();
    return -1;
}

PyObject *memory_new_with_hidden(PyObject *like, const view *v, const form *f, void **data, memory_hidden *h)
{
    const int64_t before = aligned_bytes_of(v, f), bytes = bytes_of(&h->form);
    PyObject *made = NULL;
    const int dropped_early = v->device.type == DL_CUDA && libtorch.keeps_graph;
    h->data = h->owner = h->copy = NULL;
    if (!view_of_exchange(like) || before + bytes > (dropped_early ? TOGETHER_ON_DEVICE : SMALL))
        return NULL;
    if (v->device.type != DL_CUDA) {
        const int64_t copied = before <= COPIED ? before : 0;
        if (!(h->data = malloc((size_t)(bytes + copied))))
            return NULL;
        if (copied)
            h->copied = *f, h->copy = h->data, h->data = (char *)h->copy + copied;
        if (!(made = memory_new(like, v, f, data)))
            memory_drop(h);
        return made;
    }
    if (!libtorch.part_of || !(h->owner = new_piece(v, before + bytes, data)))
        return NULL;
    h->data = (char *)*data + before;
    if (!(made = part_of_piece(h->owner, 0, f)))
        memory_drop(h), PyErr_Clear();
    return made;
}

/* A tensor of that form, with the numbers that lie at from. */
static PyObject *new_copy(PyObject *like, const form *f, const void *from)
{
    view v;
    void *data;
    if (view_open(&v, like, "q", 0))
        return NULL;
    PyObject *copy = memory_new(like, &v, f, &data);
    view_close(&v);
    if (!copy || (!data && (view_open(&v, copy, "copy", 1) || (data = v.data, view_close(&v), 0)))) {
        Py_XDECREF(copy);
        return NULL;
    }
    memcpy(data, from, (size_t)bytes_of(f));
    return copy;
}

PyObject *memory_show(PyObject *like, const memory_hidden *h)
{
    void *data;
    if (!h->owner)
        return new_copy(like, &h->form, h->data);
    return libtorch.data_of(h->owner, &data) ? NULL : part_of_piece(h->owner, (char *)h->data - (char *)data, &h->form);
}

PyObject *memory_show_copy(PyObject *like, const memory_hidden *h) { return new_copy(like, &h->copied, h->copy); }

void memory_fill_copy(const memory_hidden *h, const void *data) { memcpy(h->copy, data, (size_t)bytes_of(&h->copied)); }

void memory_drop(memory_hidden *h)
{
    if (h->owner)
        libtorch.delete_tensor(h->owner);
    else
        free(h->copy ? h->copy : h->data);
    h->data = h->owner = h->copy = NULL;
}

void memory_take(PyObject *like, const view *v, size_t bytes, memory_bytes *b)
{
    const form f = { .ndim = 1, .dtype = { DL_UINT, 8, 1 }, .shape = { (int64_t)bytes }, .stride = { 1 } };
    view w;
    *b = (memory_bytes){ 0 };
    if (view_of_exchange(like) && (b->tensor = new_piece(v, (int64_t)bytes, &b->data)))
        return;
    if (!(b->object = memory_new(like, v, &f, &b->data)) || b->data)
        return;
    if (view_open(&w, b->object, "workspace", 1))
        return;
    b->data = w.data;
    view_close(&w);
}

void memory_give_back(memory_bytes *b)
{
    if (b->tensor)
        libtorch.delete_tensor(b->tensor);
    Py_XDECREF(b->object);
    *b = (memory_bytes){ 0 };
}

int memory_stream(PyObject *like, int device, void **stream)
{
    if (view_exchange && view_of_exchange(like))
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
