/* Parts of a sequence, as heed.h has them: what heed.distributed is made of. No autograd, nothing is allocated but
 * workspace; results go into the tensors that the caller gives. */
#ifndef HEED_PARTS_H
#define HEED_PARTS_H

#include "call.h"

/* part_forward(o, lse, positions, *arguments): positions is (query_position, query_step, key_position, key_step).
 * o has q's dtype or float32. */
PyObject *parts_forward(PyObject *module, PyObject *const *p, Py_ssize_t n);

/* part_backward(do, lse, delta, dq, dk, dv, accumulate, positions, *arguments): adds to dq, dk and dv (float32) where
 * accumulate is true, else overwrites them. */
PyObject *parts_backward(PyObject *module, PyObject *const *p, Py_ssize_t n);

/* merge(o, lse, o2, lse2): [B, H, S, D] and [B, H, S]; the result over both sets of keys into o and lse. */
PyObject *parts_merge(PyObject *module, PyObject *const *p, Py_ssize_t n);

/* delta(o, do, dlse, delta): [B, H, S, D] and [B, H, S]; dlse may be None. */
PyObject *parts_delta(PyObject *module, PyObject *const *p, Py_ssize_t n);

#endif
