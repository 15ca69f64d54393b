#include "view.h"
#include "libtorch.h"

#include <stdio.h>
#include <string.h>

PyTypeObject *view_exchange_type, *view_exchange_subtype;
const dl_exchange *view_exchange;
PyObject *view_capsule_function;

int64_t view_elements(const view *v)
{
    int64_t n = 1;
    for (int d = 0; d < v->ndim; d++)
        n *= v->shape[d];
    return n;
}

int view_same_device(const view *v, const view *w)
{
    return v->device.type == w->device.type && (v->device.type == DL_CPU || v->device.id == w->device.id);
}

const char *view_dtype_name(const view *v)
{
    static _Thread_local char text[32];
    static const char *const kinds[] = { "int", "uint", "float", "opaque", "bfloat", "complex", "bool" };
    if (v->dtype.code == DL_BOOL)
        return "bool";
    snprintf(text, sizeof text, "%s%d", v->dtype.code < 7 ? kinds[v->dtype.code] : "a type of code ",
             v->dtype.code < 7 ? v->dtype.bits : v->dtype.code);
    return text;
}

const char *view_device_name(const view *v)
{
    static _Thread_local char text[32];
    if (v->device.type == DL_CPU)
        return "the CPU";
    snprintf(text, sizeof text, v->device.type == DL_CUDA ? "cuda:%d" : "device %d", (int)v->device.id);
    return text;
}

static int fail_rank(const char *name, int ndim)
{
    PyErr_Format(PyExc_ValueError, "%s: has %d dimensions, expected at most %d", name, ndim, MAX_DIMS);
    return -1;
}

static int from_dlpack(view *v, const dl_tensor *t, const char *name)
{
    if (t->ndim > MAX_DIMS)
        return fail_rank(name, t->ndim);
    v->data = (char *)t->data + t->byte_offset;
    v->device = t->device;
    if (v->device.type == DL_CUDA_HOST)
        v->device = (dl_device){ DL_CPU, 0 };
    if (v->device.type == DL_CUDA_MANAGED)
        v->device.type = DL_CUDA;
    v->dtype = t->dtype;
    v->ndim = t->ndim;
    int64_t packed = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        v->shape[d] = t->shape[d];
        v->stride[d] = t->strides ? t->strides[d] : packed;
        packed *= t->shape[d];
    }
    return 0;
}

/* One element of a buffer in the terms of the struct module: 'f', 'e', 'd', '?', 'i', 'l', 'q'. */
static int dtype_of_format(const char *format, Py_ssize_t size, dl_dtype *dtype)
{
    const uint16_t endian = 1;
    char native = *(const char *)&endian ? '<' : '>';
    if (format && (*format == '@' || *format == '=' || *format == native))
        format++;
    if (!format || !*format || format[1])
        return -1;
    *dtype = (dl_dtype){ .bits = (uint8_t)(8 * size), .lanes = 1 };
    if (strchr("efd", *format))
        dtype->code = DL_FLOAT;
    else if (*format == '?')
        dtype->code = DL_BOOL;
    else if (strchr("bhilqn", *format))
        dtype->code = DL_INT;
    else if (strchr("BHILQN", *format))
        dtype->code = DL_UINT;
    else
        return -1;
    return 0;
}

static void fail_closed(PyObject *object, const char *name, int writable)
{
    const char *how = writable ? "written" : "read";
    PyErr_Clear();
    PyObject *dtype = PyObject_GetAttrString(object, "dtype");
    PyErr_Clear();
    if (dtype)
        PyErr_Format(PyExc_ValueError, "%s: is a %R of %S that does not let its memory be %s", name, Py_TYPE(object),
                     dtype, how);
    else
        PyErr_Format(PyExc_ValueError, "%s: is a %R that does not let its memory be %s", name, Py_TYPE(object), how);
    Py_XDECREF(dtype);
}

/* NumPy's array of bfloat16, which has no letter in the struct module, as one of whole numbers; else NULL. */
static PyObject *bits_of_bfloat(PyObject *object)
{
    PyObject *dtype = PyObject_GetAttrString(object, "dtype"), *word = dtype ? PyObject_Str(dtype) : NULL, *bits = NULL;
    if (word && !PyUnicode_CompareWithASCIIString(word, "bfloat16"))
        bits = PyObject_CallMethod(object, "view", "s", "uint16");
    PyErr_Clear();
    Py_XDECREF(dtype);
    Py_XDECREF(word);
    return bits;
}

static int open_buffer(view *v, PyObject *object, const char *name, int writable)
{
    Py_buffer *b = &v->held.buffer;
    if (PyObject_GetBuffer(object, b, PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0))) {
        if (!PyErr_ExceptionMatches(PyExc_BufferError) && !PyErr_ExceptionMatches(PyExc_ValueError)) /* NumPy's */
            return -1;
        PyErr_Clear();
        PyObject *bits = bits_of_bfloat(object);
        int failed = bits ? open_buffer(v, bits, name, writable) : (fail_closed(object, name, writable), -1);
        Py_XDECREF(bits); /* the buffer has it */
        v->dtype = (dl_dtype){ DL_BFLOAT, 16, 1 };
        return failed;
    }
    int bad = dtype_of_format(b->format, b->itemsize, &v->dtype);
    if (bad)
        PyErr_Format(PyExc_TypeError, "%s: elements of format '%s' are none that heed knows", name, b->format);
    else if (b->ndim > MAX_DIMS)
        bad = fail_rank(name, b->ndim);
    for (int d = 0; d < b->ndim && !bad; d++) {
        v->shape[d] = b->shape[d];
        v->stride[d] = b->strides[d] / b->itemsize;
        if (b->strides[d] % b->itemsize && b->shape[d] > 1) {
            PyErr_Format(PyExc_ValueError, "%s: stride %d is %zd bytes, expected a multiple of the element size %zd",
                         name, d, b->strides[d], b->itemsize);
            bad = -1;
        }
    }
    if (bad) {
        PyBuffer_Release(b);
        return -1;
    }
    v->kind = BUFFER;
    v->data = b->buf;
    v->device = (dl_device){ DL_CPU, 0 };
    v->ndim = b->ndim;
    return 0;
}

/* A capsule of __dlpack__(), whose owner we become by renaming it. */
static int open_capsule(view *v, PyObject *capsule, const char *name, int writable)
{
    int bad;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        v->kind = MANAGED_VERSIONED;
        v->held.versioned = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (v->held.versioned->version.major != 1) {
            PyErr_Format(PyExc_TypeError, "%s: speaks DLPack %d, expected 1", name,
                         (int)v->held.versioned->version.major);
            return -1;
        }
        PyCapsule_SetName(capsule, "used_dltensor_versioned");
        bad = from_dlpack(v, &v->held.versioned->tensor, name);
        if (!bad && writable && v->held.versioned->flags & DL_READ_ONLY) {
            PyErr_Format(PyExc_ValueError, "%s: is read-only", name);
            bad = -1;
        }
    } else {
        v->kind = MANAGED;
        v->held.managed = PyCapsule_GetPointer(capsule, "dltensor");
        if (!v->held.managed)
            return -1;
        PyCapsule_SetName(capsule, "used_dltensor");
        bad = from_dlpack(v, &v->held.managed->tensor, name);
    }
    if (bad)
        view_close(v);
    return bad;
}

/* A tensor of PyTorch, asked through its stable C interface: what the exchange's borrow() answers, in a third of
 * the time. 0: that cannot be said of this one. */
static int from_torch(view *v, PyObject *object)
{
    void *tensor = libtorch_tensor(object);
    int32_t layout, dtype, type, id;
    int64_t ndim, *shape, *stride;
    if (!libtorch.tensor_at || libtorch.layout_of(tensor, &layout) || layout != libtorch.strided ||
        libtorch.device_type_of(tensor, &type) || (type != libtorch.cpu && type != libtorch.cuda) ||
        libtorch.dtype_of(tensor, &dtype) || libtorch.device_of(tensor, &id) || libtorch.ndim_of(tensor, &ndim) ||
        ndim > MAX_DIMS || libtorch.shape_of(tensor, &shape) || libtorch.stride_of(tensor, &stride) ||
        libtorch.data_of(tensor, &v->data))
        return 0;
    if (dtype == libtorch.f32)
        v->dtype = (dl_dtype){ DL_FLOAT, 32, 1 };
    else if (dtype == libtorch.bf16)
        v->dtype = (dl_dtype){ DL_BFLOAT, 16, 1 };
    else if (dtype == libtorch.f16)
        v->dtype = (dl_dtype){ DL_FLOAT, 16, 1 };
    else
        return 0;
    v->device = type == libtorch.cuda ? (dl_device){ DL_CUDA, id } : (dl_device){ DL_CPU, 0 };
    v->ndim = (int)ndim;
    for (int d = 0; d < v->ndim; d++)
        v->shape[d] = shape[d], v->stride[d] = stride[d];
    return 1;
}

/* A tensor of PyTorch, of a subclass too: __dlpack__ refuses those that require a gradient, which is autograd's business and
 * not that of who reads their memory. */
static int is_tensor(PyObject *object) { return view_exchange_type && PyObject_TypeCheck(object, view_exchange_type); }

static int open_any(view *v, PyObject *object, const char *name, int writable)
{
    v->copy = NULL;
    v->kind = BORROWED;
    const int tensor = is_tensor(object);
    if (view_exchange && tensor) {
        dl_tensor t;
        if (from_torch(v, object))
            return 0;
        return view_exchange->borrow(object, &t) ? -1 : from_dlpack(v, &t, name);
    }
    /* CuPy's arrays are buffers as well, for memory that the CPU sees too. */
    if (PyObject_CheckBuffer(object) && !PyObject_HasAttrString(object, "__cuda_array_interface__"))
        return open_buffer(v, object, name, writable);
    if (!PyObject_HasAttrString(object, "__dlpack__")) {
        PyErr_Format(PyExc_TypeError, "%s: is %R, expected a tensor or an array", name, Py_TYPE(object));
        return -1;
    }
    PyObject *capsule = tensor ? PyObject_CallFunctionObjArgs(view_capsule_function, object, NULL)
                               : PyObject_CallMethod(object, "__dlpack__", NULL);
    if (!capsule) {
        if (PyErr_ExceptionMatches(PyExc_BufferError) || (tensor && PyErr_ExceptionMatches(PyExc_RuntimeError)))
            fail_closed(object, name, writable);
        return -1;
    }
    int bad = open_capsule(v, capsule, name, writable);
    Py_DECREF(capsule);
    return bad;
}

/* heed reads four strides of 0 as "packed": a single number expanded to a whole tensor has to be said otherwise. */
static int all_strides_zero(const view *v)
{
    for (int d = v->ndim - 1; d >= 0; d--)
        if (v->shape[d] > 1 ? v->stride[d] != 0 : v->shape[d] == 0)
            return 0;
    return v->ndim > 0 && view_elements(v) > 1;
}

/* PyTorch's lazy negation: such a view, of the imaginary part of something, has the wrong sign in memory. */
static int is_negated(PyObject *object)
{
    if (!is_tensor(object))
        return 0;
    if (libtorch.tensor_at && libtorch.is_neg)
        return libtorch.is_neg(libtorch_tensor(object));
    PyObject *answer = PyObject_CallMethod(object, "is_neg", NULL);
    Py_XDECREF(answer);
    return answer == Py_True;
}

int view_open(view *v, PyObject *object, const char *name, int writable)
{
    if (open_any(v, object, name, writable))
        return -1;
    if (v->device.type != DL_CPU && v->device.type != DL_CUDA) {
        PyErr_Format(PyExc_ValueError, "%s: is on a device of DLPack type %d, expected the CPU or CUDA", name,
                     (int)v->device.type);
        view_close(v);
        return -1;
    }
    int negated = is_negated(object);
    if (negated && writable) {
        PyErr_Format(PyExc_ValueError, "%s: is a negated view, expected a tensor that holds its own numbers", name);
        view_close(v);
        return -1;
    }
    if (!negated && (!all_strides_zero(v) || writable))
        return 0;
    view_close(v);
    const char *how = negated ? "resolve_neg" : is_tensor(object) ? "contiguous" : "copy";
    PyObject *copy = PyObject_CallMethod(object, how, NULL);
    if (!copy || open_any(v, copy, name, 0)) {
        Py_XDECREF(copy);
        return -1;
    }
    v->copy = copy;
    return 0;
}

void view_close(view *v)
{
    if (v->kind == BUFFER)
        PyBuffer_Release(&v->held.buffer);
    else if (v->kind == MANAGED && v->held.managed->deleter)
        v->held.managed->deleter(v->held.managed);
    else if (v->kind == MANAGED_VERSIONED && v->held.versioned->deleter)
        v->held.versioned->deleter(v->held.versioned);
    v->kind = BORROWED;
    Py_CLEAR(v->copy);
}
