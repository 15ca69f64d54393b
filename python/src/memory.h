/* Where results and workspace come from: the library of the tensors that were given. */
#ifndef HEED_MEMORY_H
#define HEED_MEMORY_H

#include "view.h"

/* A Python function empty(like, shape, strides, dtype) and one stream(like), which know every library. */
extern PyObject *memory_empty_function, *memory_stream_function;
/* torch.empty_strided, what torch.compile's code has for it on the current CUDA device, or None, and a dict from names to
 * dtypes: quicker than them; NULL before torch is here. */
extern PyObject *memory_torch_empty_strided, *memory_torch_empty_cuda, *memory_torch_dtypes;

/* A tensor that is to be made. Strides in elements. */
typedef struct form {
    int ndim;
    dl_dtype dtype;
    int64_t shape[MAX_DIMS], stride[MAX_DIMS];
} form;

/* v's shape and dtype, and its memory order without gaps. */
form memory_form_like(const view *v);

/* A tensor on v's device, by the library of like, whose view is v. *data: where its memory is, if that is known already and
 * its strides are those asked for; else NULL. */
PyObject *memory_new(PyObject *like, const view *v, const form *f, void **data);
/* Several in one piece of memory, as to allocate takes its time. Only where they are small: it is not free before all of
 * them are gone. -1: they were not made, and no exception is set. */
int memory_new_in_one(PyObject *like, const view *v, const form *f, int count, void **data, PyObject **made);

/* Memory that Python does not see: to make a tensor takes longer than to attend to a few rows. On a GPU it lies behind a
 * tensor that is seen. Only where it is small, above all where PyTorch does not say that a backward is the last: then it stays
 * until the graph is gone. */
typedef struct memory_hidden {
    form form;
    void *data;  /* NULL: there is none */
    void *owner; /* on a GPU: an at::Tensor * of both */
    void *
        copy; /* on a CPU, beside a tensor so small that it is quicker to copy than to save: room for that; else NULL */
    form copied; /* the tensor's */
} memory_hidden;
/* Like memory_new(), with hidden memory of the form h->form beside it. NULL without an exception: it cannot be. */
PyObject *memory_new_with_hidden(PyObject *like, const view *v, const form *f, void **data, memory_hidden *h);
/* A tensor of that memory, or of a copy of it; and one of the copy that it has. */
PyObject *memory_show(PyObject *like, const memory_hidden *h);
PyObject *memory_show_copy(PyObject *like, const memory_hidden *h);
void memory_fill_copy(const memory_hidden *h, const void *data);
void memory_drop(memory_hidden *h);

/* Device memory, aligned, that is given back when the work has been queued. data: NULL where there is none; after
 * memory_take() an exception may be set then. */
typedef struct memory_bytes {
    void *data;
    void *tensor;     /* an at::Tensor *, or */
    PyObject *object; /* a tensor of Python */
} memory_bytes;
void memory_take(PyObject *like, const view *v, size_t bytes, memory_bytes *b);
void memory_give_back(memory_bytes *b);
int memory_stream(PyObject *like, int device, void **stream);

/* Host memory, aligned to 64 bytes: a standing buffer of this thread, enough for small problems (NULL: out of memory), and
 * as much as asked for. */
enum { MEMORY_SCRATCH = 256 << 10 };
void *memory_scratch(void);
void *memory_borrow(size_t bytes);
void memory_return(void *data);
int memory_prepare(void);

#endif
