/* One call of the library: from Python's arguments to heed_attention, heed_gradient and heed_exec, with every view that
 * has to stay open while it runs. */
#ifndef HEED_CALL_H
#define HEED_CALL_H

#include "memory.h"

/* The arguments that say what is to be computed, in the order in which every function of the module takes them. */
typedef enum argument {
    ARG_Q,
    ARG_K,
    ARG_V,
    ARG_LAYOUT,
    ARG_CAUSAL,
    ARG_WINDOW,
    ARG_STRIDE,
    ARG_MASK,
    ARG_BIAS,
    ARG_SCALE,
    ARG_SOFTCAP,
    ARG_ALIBI_SLOPES,
    ARG_SINK,
    ARG_DROPOUT_P,
    ARG_DROPOUT_SEED,
    ARG_LENGTHS_Q,
    ARG_LENGTHS_K,
    ARG_DETERMINISTIC,
    ARG_PRECISION,
    ARG_CU_SEQLENS_Q, /* packed sequences */
    ARG_CU_SEQLENS_K,
    ARG_MAX_SEQLEN_Q,
    ARG_MAX_SEQLEN_K,
    ARG_BLOCK_TABLE, /* paged cache */
    ARGUMENTS
} argument;

/* What has a gradient, in the order in which gradients are returned. */
enum { GRAD_Q, GRAD_K, GRAD_V, GRAD_BIAS, GRAD_SINK, GRADIENTS };

/* Their names, interned, and what they are where they are not given. */
extern PyObject *call_names[ARGUMENTS], *call_defaults[ARGUMENTS];

/* How q, k, v and o lie: which of their dimensions are batch, head, row and column. */
typedef enum layout { BHSD, BSHD, THD } layout;
typedef struct call_layout {
    int ndim, axis[4]; /* -1: there is no such dimension */
    const char *meaning;
} call_layout;
extern const call_layout call_layouts[];
extern const int call_row_axes[2][4]; /* the same of lse: [B, H, S] and [H, T] */

typedef struct call {
    heed_attention a;
    heed_gradient g;
    heed_exec x;
    layout layout;
    PyObject *like;         /* q: results are made by its library; borrowed */
    view q;                 /* kept for shapes, strides and device */
    view others[24];        /* k and v first */
    int open;               /* how many of others are in use */
    memory_bytes workspace; /* of the device */
} call;

/* Reads args, ARGUMENTS of them. -1: an exception is set. In either case call_close() follows. */
int call_open(call *c, PyObject *const *args);
void call_close(call *c);

/* A tensor that is read (or, writable, filled in place) besides those of the arguments, laid out as q is. */
int call_view(call *c, PyObject *object, const char *name, int writable, heed_tensor *t);
/* The same for lse and its gradient: [B, H, S], or [H, T] where packed. */
int call_view_rows(call *c, PyObject *object, const char *name, heed_tensor *t);
/* For what broadcasts to [B, H, S, T], and for a number of each head. */
int call_view_bias(call *c, PyObject *object, const char *name, heed_tensor *t);
int call_view_heads(call *c, PyObject *object, const char *name, heed_tensor *t);

/* New tensors of q's library on q's device, put into a and g: o, like q with v's columns; lse. NULL: an exception is set. */
PyObject *call_new_o(call *c);
PyObject *call_new_lse(call *c);
/* o, and lse in memory that Python does not see. NULL without an exception: that cannot be here. */
PyObject *call_new_o_with_hidden_lse(call *c, memory_hidden *lse);
/* The gradients that are wanted of arguments that are there; the others become NULL. in_one: they may share memory. -1: an
 * exception is set, and those that are not NULL have been made. */
int call_new_gradients(call *c, PyObject *const *args, const int *wants, int in_one, PyObject **gradients);

/* Run it: checks, workspace, kernel; the GIL is released while the library works. -1: an exception is set. */
int call_forward(call *c);
int call_backward(call *c);

/* -1 and an exception where a function of the module was given another number of arguments than it takes. */
int call_count(const char *name, Py_ssize_t given, Py_ssize_t expected);

/* The exception for what the library's last call of this thread found wrong. */
int call_fail(heed_status status);

#endif
