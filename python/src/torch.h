/* The quick way for PyTorch tensors: whether a call is an ordinary one, and its autograd function. */
#ifndef HEED_TORCH_H
#define HEED_TORCH_H

#include "call.h"

/* What has a gradient, in the order in which gradients are returned. */
enum { GRAD_Q, GRAD_K, GRAD_V, GRAD_BIAS, GRAD_SINK, GRADIENTS };

/* The Python function for calls that this file leaves alone: otherwise(return_lse, *arguments). */
extern PyObject *torch_otherwise;
/* The arguments' names, interned, and what they are where they are not given. */
extern PyObject *torch_names[ARGUMENTS], *torch_defaults[ARGUMENTS];

/* use_torch(...): the parts of PyTorch that this file calls, in the order of python/heed/_torch.py. */
PyObject *torch_use(PyObject *module, PyObject *args);
int torch_prepare(void);

/* attention(return_lse, *arguments): PyTorch tensors in an ordinary context are computed here and now, with or without
 * autograd; everything else, and every argument that is not understood here, goes to the Python function torch_otherwise. */
PyObject *torch_attention(PyObject *module, PyObject *const *p, Py_ssize_t n);

/* attention_with(function, q, k, v, options): the same with a dict of those that are not their defaults. What is left alone
 * here goes to function(q, k, v, **options). */
PyObject *torch_attention_with(PyObject *module, PyObject *const *p, Py_ssize_t n);

/* apply(return_lse, *arguments): the same for tensors, with autograd, whatever the context is. */
PyObject *torch_apply(PyObject *module, PyObject *const *p, Py_ssize_t n);

/* Those of an autograd.Function: forward(ctx, q, k, v, pack of all arguments), with bias and sink behind them where one of
 * them is not None; backward(ctx, do) or backward(ctx, do, dlse). */
PyObject *torch_function_forward(PyObject *module, PyObject *const *p, Py_ssize_t n);
PyObject *torch_function_backward(PyObject *module, PyObject *const *p, Py_ssize_t n);

/* (o, lse, arguments) of the call that ctx remembers. */
PyObject *torch_function_state(PyObject *module, PyObject *ctx);

/* The gradients that are wanted into made, as new references; None in the place of the others. */
int torch_gradients(PyObject *d_o, PyObject *d_lse, PyObject *o, PyObject *lse, const int *wants, PyObject *const *args,
                    PyObject **made);

#endif
