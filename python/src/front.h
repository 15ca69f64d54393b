/* heed.attention as users call it: arguments by name, most of them left out. */
#ifndef HEED_FRONT_H
#define HEED_FRONT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* front(function, module, doc): that function. What torch_quick() leaves alone goes to `function`, a Python function of the
 * same arguments. */
PyObject *front_make(PyObject *module, PyObject *p);

#endif
