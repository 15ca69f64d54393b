/* The quick way for PyTorch tensors: whether a call is an ordinary one, and its autograd function. */
#ifndef HEED_TORCH_H
#define HEED_TORCH_H

#include "call.h"

/* The Python function for calls that this file leaves alone: otherwise(return_lse, *arguments). */
extern PyObject *torch_otherwise;

/* use_torch(...): the parts of PyTorch that this file calls, in the order of python/heed/_torch.py. */
PyObject *torch_use(PyObject *module, PyObject *args);
int torch_prepare(void);

/* attention(return_lse, *arguments): PyTorch tensors in an ordinary context are computed here and now, with or without
 * autograd; everything else, and every argument that is not understood here, goes to the Python function torch_otherwise. */
PyObject *torch_attention(PyObject *module, PyObject *const *p, Py_ssize_t n);

/* The same, but NULL without an exception where it is left alone. */
PyObject *torch_quick(PyObject *return_lse, PyObject *const *args);

/* apply(return_lse, *arguments): the same for tensors, with autograd, whatever the context is. */
PyObject *torch_apply(PyObject *module, PyObject *const *p, Py_ssize_t n);

/* Those of an autograd.Function: forward(ctx, q, k, v), with bias and sink behind them where one of them is not None, which
 * apply() above has called; and a base of its contexts, whose method apply(do) or apply(do, dlse) is the backward. */
PyObject *torch_function_forward(PyObject *module, PyObject *const *p, Py_ssize_t n);
extern PyObject *torch_backward_type;

/* quick_class(metaclass): a metaclass of the same kind; keep_at_hand(name, value): an attribute of its one class that is asked
 * for in each call. */
PyObject *torch_quick_class(PyObject *module, PyObject *metaclass);
PyObject *torch_keep_at_hand(PyObject *module, PyObject *p);

/* (o, lse, arguments) of the call that ctx remembers. */
PyObject *torch_function_state(PyObject *module, PyObject *ctx);

/* What a backward gets beside the arguments. */
typedef struct torch_given {
    PyObject *d_o, *d_lse;                    /* d_lse may be None */
    PyObject *o, *lse;                        /* or */
    const heed_tensor *hidden_o, *hidden_lse; /* the same in memory that Python does not see */
} torch_given;

/* The gradients that are wanted into made, as new references; None in the place of the others. in_one: they may share
 * memory. */
int torch_gradients(const torch_given *given, const int *wants, int in_one, PyObject *const *args, PyObject **made);

#endif
