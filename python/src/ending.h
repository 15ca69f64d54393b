/* The end of the program: PyTorch's threads for backwards on GPUs are waited for. */
#ifndef HEED_ENDING_H
#define HEED_ENDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* PyTorch's class of tensors, and the Python function to be told of a GPU's first backward of them: first_backward(gpu). NULL
 * while PyTorch is not in use. */
extern PyObject *ending_tensor, *ending_first_backward;

/* Each backward on a GPU says so. */
void ending_note_backward(PyObject *like, int gpu);

/* call_within(seconds, function): function() on a thread of its own, whose errors are nobody's, waited for so long at most. */
PyObject *ending_call_within(PyObject *module, PyObject *p);

#endif
