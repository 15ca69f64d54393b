#include "torch.h"

#include <string.h>

/* A class of classes whose attributes are found in a short list first. PyTorch asks the autograd function for five of them in
 * each call, which Python looks for in every base, and in those of the class's class before. Some versions have the names as
 * text, of which Python makes an object each time, unless the class of classes takes text as well. */
enum { AT_HAND = 8 };
static struct {
    PyObject *name, *value;
    const char *text;
} at_hand[AT_HAND];
static PyObject *(*get_attribute)(PyObject *type, PyObject *name);

static PyObject *get_at_hand(PyObject *type, PyObject *name)
{
    for (int n = 0; n < AT_HAND && at_hand[n].name; n++)
        if (at_hand[n].name == name)
            return Py_NewRef(at_hand[n].value);
    return get_attribute(type, name);
}

static PyObject *get_at_hand_by_text(PyObject *type, char *text)
{
    for (int n = 0; n < AT_HAND && at_hand[n].name; n++)
        if (*at_hand[n].text == *text && !strcmp(at_hand[n].text, text)) /* their first letters differ */
            return Py_NewRef(at_hand[n].value);
    PyObject *name = PyUnicode_FromString(text), *value = name ? get_attribute(type, name) : NULL;
    Py_XDECREF(name);
    return value;
}

PyObject *torch_quick_class(PyObject *module, PyObject *metaclass)
{
    (void)module;
    PyType_Slot slots[] = { { Py_tp_getattro, get_at_hand }, { Py_tp_getattr, get_at_hand_by_text }, { 0, NULL } };
    PyType_Spec spec = { "heed._C.QuickClass", 0, 0, Py_TPFLAGS_DEFAULT, slots };
    *(void **)&get_attribute = PyType_GetSlot(&PyType_Type, Py_tp_getattro);
    return PyType_FromSpecWithBases(&spec, metaclass);
}

PyObject *torch_keep_at_hand(PyObject *module, PyObject *p)
{
    (void)module;
    PyObject *name, *value;
    int n = 0;
    if (!PyArg_ParseTuple(p, "UO", &name, &value))
        return NULL;
    while (n < AT_HAND && at_hand[n].name)
        n++;
    if (n == AT_HAND) {
        PyErr_SetString(PyExc_ValueError, "keep_at_hand: there is no room for another");
        return NULL;
    }
    if (!(at_hand[n].text = PyUnicode_AsUTF8AndSize(name, NULL)))
        return NULL;
    Py_INCREF(p); /* and with it both of them, for good */
    at_hand[n].name = name, at_hand[n].value = value;
    Py_RETURN_NONE;
}
