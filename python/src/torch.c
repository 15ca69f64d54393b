#include "torch.h"
#include "ending.h"
#include "libtorch.h"
#include "memory.h"

#include <string.h>

PyObject *torch_otherwise;
static PyObject *apply, *backward_otherwise, *is_grad_enabled, *functorch_active, *dispatch_modes, *autocast,
    *forward_ad, *is_tracing;
static PyObject *s_current_level;

/* An attribute of every object of a type, and how it is asked and set: quicker than to look for it in the type each time. */
typedef struct attribute {
    PyObject *descriptor;
    descrgetfunc get;
    descrsetfunc set;
} attribute;
static attribute requires_grad_of;                                                     /* a tensor's */
static attribute to_save, saved_tensors, needs_input_grad, materialize_grads, options; /* a context's */

static int find_attribute(PyObject *type, const char *name, attribute *a)
{
    if (!(a->descriptor = PyObject_GetAttrString(type, name)))
        return -1;
    *(void **)&a->get = PyType_GetSlot(Py_TYPE(a->descriptor), Py_tp_descr_get);
    *(void **)&a->set = PyType_GetSlot(Py_TYPE(a->descriptor), Py_tp_descr_set);
    if (a->get && a->set)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s: expected a descriptor", name);
    return -1;
}

static PyObject *get(const attribute *a, PyObject *object)
{
    return a->get(a->descriptor, object, (PyObject *)Py_TYPE(object));
}

static int set(const attribute *a, PyObject *object, PyObject *value) { return a->set(a->descriptor, object, value); }

static const argument differentiable[GRADIENTS] = { ARG_Q, ARG_K, ARG_V, ARG_BIAS, ARG_SINK };
/* Those that are a tensor where they are given. */
static const argument tensors[] = { ARG_Q,
                                    ARG_K,
                                    ARG_V,
                                    ARG_BIAS,
                                    ARG_SINK,
                                    ARG_MASK,
                                    ARG_ALIBI_SLOPES,
                                    ARG_LENGTHS_Q,
                                    ARG_LENGTHS_K,
                                    ARG_CU_SEQLENS_Q,
                                    ARG_CU_SEQLENS_K,
                                    ARG_DROPOUT_SEED };
enum { TENSORS = sizeof tensors / sizeof *tensors };

/* What goes from the autograd function's forward to its backward: the arguments that are not their defaults, but of the tensors
 * only which they are, where autograd keeps them; and lse and o, where they are in hidden memory. */
typedef struct pack {
    PyObject_HEAD int tensors, others;
    int holds; /* the tensors too, as autograd has nothing to keep */
    int gone;  /* what was held and hidden: the backward that was the last has been */
    uint8_t tensor[ARGUMENTS], other[ARGUMENTS];
    PyObject *value[ARGUMENTS]; /* of the others, and from the end on of the tensors that are held */
    struct {
        const void *impl;
        int64_t version;
    } was[TENSORS]; /* those that are held */
    heed_tensor o, lse;
    memory_hidden hidden;
} pack;
static PyTypeObject *pack_type;
PyObject *torch_backward_type;

static PyObject **held(pack *p, int n) { return &p->value[ARGUMENTS - 1 - n]; }

static void let_go(pack *p)
{
    const int count = p->holds ? p->tensors : 0;
    p->gone = p->holds || p->hidden.data;
    memory_drop(&p->hidden);
    for (int n = 0; n < count; n++)
        Py_CLEAR(*held(p, n));
}

/* A tensor may be all that holds the graph behind it, with the pack of another call in it, and so on: of contexts and tensors
 * Python itself sees to it that a long graph takes no more stack than there is. */
static void pack_free(PyObject *self)
{
    pack *p = (pack *)self;
    for (int n = 0; n < p->others; n++)
        Py_DECREF(p->value[n]);
    let_go(p);
    PyObject_Free(self);
    Py_DECREF(pack_type);
}

static pack *new_pack(void)
{
    pack *p = PyObject_New(pack, pack_type);
    if (p) {
        p->tensors = p->others = p->holds = p->gone = 0;
        p->hidden.data = p->hidden.owner = p->hidden.copy = NULL;
    }
    return p;
}

static PyObject *function_backward(PyObject *ctx, PyObject *const *p, Py_ssize_t n);

int torch_prepare(void)
{
    if (!(s_current_level = PyUnicode_InternFromString("_current_level")))
        return -1;
    PyType_Slot slots[] = { { Py_tp_dealloc, pack_free }, { 0, NULL } };
    PyType_Spec spec = { "heed._C.Arguments", sizeof(pack), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                         slots };
    static PyMethodDef methods[] = { { "apply", (PyCFunction)(void (*)(void))function_backward, METH_FASTCALL, NULL },
                                     { NULL, NULL, 0, NULL } };
    PyType_Slot backward_slots[] = { { Py_tp_methods, methods }, { 0, NULL } };
    PyType_Spec backward_spec = { "heed._C.Backward", 0, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, backward_slots };
    pack_type = (PyTypeObject *)PyType_FromSpec(&spec);
    torch_backward_type = PyType_FromSpec(&backward_spec);
    return pack_type && torch_backward_type ? 0 : -1;
}

PyObject *torch_use(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tensor, *parameter, *exchange, *context;
    if (!PyArg_ParseTuple(args, "OO(OO)(OOO)(OOOO)OOOOOO", &tensor, &parameter, &exchange, &view_capsule_function,
                          &memory_torch_empty_strided, &memory_torch_empty_cuda, &memory_torch_dtypes, &is_grad_enabled,
                          &dispatch_modes, &autocast, &is_tracing, &forward_ad, &functorch_active, &apply, &context,
                          &backward_otherwise, &ending_first_backward))
        return NULL;
    Py_INCREF(args); /* and with it all of them, for good */
    ending_tensor = tensor;
    if (find_attribute(tensor, "requires_grad", &requires_grad_of) || find_attribute(context, "to_save", &to_save) ||
        find_attribute(context, "saved_tensors", &saved_tensors) ||
        find_attribute(context, "needs_input_grad", &needs_input_grad) ||
        find_attribute(context, "materialize_grads", &materialize_grads) ||
        find_attribute(context, "options", &options))
        return NULL;
    const dl_exchange *table = exchange == Py_None ? NULL : PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
    while (table && table->version.major != 1)
        table = table->previous;
    view_exchange_type = (PyTypeObject *)tensor;
    view_exchange_subtype = (PyTypeObject *)parameter;
    /* Before 2.10 there is none, and libtorch's names have not been tried: all is asked and made through Python. */
    if (table && table->borrow) {
        view_exchange = table;
        libtorch_find();
    }
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* ---- Is it an ordinary call? ------------------------------------------------------------------------------------ */

static int is_true(PyObject *function)
{
    PyObject *answer = PyObject_CallNoArgs(function);
    int yes = answer ? PyObject_IsTrue(answer) : 1;
    Py_XDECREF(answer);
    return yes;
}

static int requires_grad(PyObject *object)
{
    if (object == Py_None)
        return 0;
    if (libtorch.tensor_at && libtorch.requires_grad)
        return libtorch.requires_grad(*(void **)libtorch_tensor(object));
    PyObject *answer = get(&requires_grad_of, object);
    Py_XDECREF(answer);
    return answer != Py_False;
}

static int grad_enabled(void) { return libtorch.grad_enabled ? libtorch.grad_enabled() : is_true(is_grad_enabled); }

/* A mode that would have to see the operation, or autocast. */
static int has_modes(void)
{
    enum { CPU = 0, CUDA = 1 }; /* c10::DeviceType */
    if (libtorch.dispatch_modes ? libtorch.dispatch_modes() > 0 : is_true(dispatch_modes))
        return 1;
    return libtorch.autocast_enabled ? libtorch.autocast_enabled(CPU) || libtorch.autocast_enabled(CUDA)
                                     : is_true(autocast);
}

/* torch.jit.trace, which takes what it has not seen being computed for constants. */
static int has_tracer(void) { return libtorch.tracing ? *libtorch.tracing() != NULL : is_true(is_tracing); }

/* vmap, grad and the other transforms of torch.func. */
static int has_transforms(void)
{
    if (!libtorch.functorch_layers)
        return is_true(functorch_active);
    const struct libtorch_vector *layers = libtorch.functorch_layers();
    return layers->begin != layers->end;
}

/* Inside torch.autograd.forward_ad.dual_level() tensors may carry a tangent. */
static int has_tangents(void)
{
    if (libtorch.forward_levels)
        return libtorch.forward_levels();
    PyObject *level = PyDict_GetItemWithError(forward_ad, s_current_level);
    return !level || PyLong_AsLong(level) >= 0;
}

/* Somebody wants to see what is saved for a backward, to move it elsewhere or to compute it anew. */
static int has_saved_hooks(void)
{
    const struct libtorch_deque *hooks = libtorch.saved_hooks ? libtorch.saved_hooks() : NULL;
    return !hooks || hooks->begin[0] != hooks->end[0];
}

/* Python's own, or none. A tensor is one too, but may want a gradient. */
static int is_number(PyObject *object) { return object == Py_None || PyFloat_Check(object) || PyLong_Check(object); }

/* Tensors, not of a subclass, and no autocast, tracing, transform or mode that would have to see the operation. */
static int is_ordinary(PyObject *const *args)
{
    if (!view_of_exchange(args[ARG_Q]) || !view_of_exchange(args[ARG_K]) || !view_of_exchange(args[ARG_V]))
        return 0;
    for (int n = GRAD_BIAS; n < TENSORS; n++)
        if (args[tensors[n]] != Py_None && !view_of_exchange(args[tensors[n]]) && tensors[n] != ARG_DROPOUT_SEED)
            return 0;
    if (args[ARG_ALIBI_SLOPES] != Py_None && requires_grad(args[ARG_ALIBI_SLOPES]))
        return 0;
    if (!is_number(args[ARG_SCALE]) || !is_number(args[ARG_SOFTCAP]) || !is_number(args[ARG_DROPOUT_P]))
        return 0;
    return !has_modes() && !has_tracer() && !has_tangents() && !has_transforms();
}

static int needs_autograd(PyObject *const *args)
{
    if (!grad_enabled())
        return 0;
    for (int n = 0; n < GRADIENTS; n++)
        if (requires_grad(args[differentiable[n]]))
            return 1;
    return 0;
}

/* Fake tensors, and others without memory behind them, have no data. */
static int is_real(const call *c)
{
    const heed_tensor *inputs[] = { &c->a.q, &c->a.k, &c->a.v };
    for (int n = 0; n < 3; n++) {
        const int64_t *shape = inputs[n]->shape;
        if (!inputs[n]->data && shape[0] && shape[1] && shape[2] && shape[3])
            return 0;
    }
    return 1;
}

/* ---- Forward ---------------------------------------------------------------------------------------------------- */

/* Set where the last call of compute() or torch_gradients() on this thread failed before it had done anything. */
static _Thread_local int not_understood;

/* o, and lse where wanted, as new references. keep: where lse may go instead, if it can be hidden. */
static int compute(PyObject *const *args, int want_lse, pack *keep, PyObject **o, PyObject **lse)
{
    call c;
    int bad = call_open(&c, args);
    *o = *lse = NULL;
    if (!bad && !is_real(&c)) {
        PyErr_SetString(PyExc_TypeError, "q, k and v: expected tensors with memory of their own");
        bad = -1;
    }
    not_understood = bad;
    if (!bad && keep && (*o = call_new_o_with_hidden_lse(&c, &keep->hidden)))
        keep->lse = c.a.lse;
    else if (!bad)
        bad = PyErr_Occurred() || !(*o = call_new_o(&c)) || (want_lse && !(*lse = call_new_lse(&c)));
    bad = bad || call_forward(&c);
    if (!bad && keep && keep->hidden.copy) {
        memory_fill_copy(&keep->hidden, c.a.o.data);
        keep->o = c.a.o, keep->o.data = keep->hidden.copy;
    }
    call_close(&c);
    if (bad) {
        Py_CLEAR(*o);
        Py_CLEAR(*lse);
    }
    return bad;
}

/* The call that the autograd function's forward, which autograd calls on this thread, is to compute. Its inputs are only
 * what has a gradient, and bias and sink only where there is one of them: every input costs time. */
typedef struct request {
    PyObject *const *args;
    int return_lse;
} request;
static _Thread_local const request *requested;

static PyObject *with_autograd(PyObject *return_lse, PyObject *const *args)
{
    const request this = { args, return_lse == Py_True };
    const int inputs = args[ARG_BIAS] == Py_None && args[ARG_SINK] == Py_None ? GRAD_V + 1 : GRADIENTS;
    PyObject *tuple = PyTuple_New(inputs), *result;
    if (!tuple)
        return NULL;
    for (int n = 0; n < inputs; n++)
        PyTuple_SetItem(tuple, n, Py_NewRef(args[differentiable[n]]));
    requested = &this;
    result = PyObject_Call(apply, tuple, NULL); /* which takes a tuple: it need not be made of arguments first */
    Py_DECREF(tuple);
    requested = NULL;
    return result;
}

PyObject *torch_apply(PyObject *module, PyObject *const *p, Py_ssize_t n)
{
    (void)module;
    return call_count("apply", n, 1 + ARGUMENTS) ? NULL : with_autograd(p[0], p + 1);
}

static PyObject *without_autograd(PyObject *return_lse, PyObject *const *args)
{
    PyObject *o, *lse, *result;
    if (compute(args, return_lse == Py_True, NULL, &o, &lse))
        return NULL;
    if (!lse)
        return o;
    result = PyTuple_Pack(2, o, lse);
    Py_DECREF(o);
    Py_DECREF(lse);
    return result;
}

PyObject *torch_quick(PyObject *return_lse, PyObject *const *args)
{
    PyObject *result = NULL;
    if (!is_ordinary(args))
        return NULL;
    not_understood = 0;
    result = needs_autograd(args) ? with_autograd(return_lse, args) : without_autograd(return_lse, args);
    if (!result && not_understood)
        PyErr_Clear();
    return result;
}

PyObject *torch_attention(PyObject *module, PyObject *const *p, Py_ssize_t n)
{
    (void)module;
    if (call_count("attention", n, 1 + ARGUMENTS))
        return NULL;
    PyObject *result = torch_quick(p[0], p + 1);
    if (result || PyErr_Occurred())
        return result;
    PyObject *all = PyTuple_New(n);
    for (Py_ssize_t i = 0; all && i < n; i++) {
        Py_INCREF(p[i]);
        PyTuple_SetItem(all, i, p[i]);
    }
    if (all)
        result = PyObject_CallObject(torch_otherwise, all);
    Py_XDECREF(all);
    return result;
}

/* ---- The autograd function -------------------------------------------------------------------------------------- */

/* Whether a tensor can be held without autograd, which would watch for changes in place; it refuses those of inference mode. */
static int can_hold(PyObject *tensor)
{
    return libtorch.tensor_at && libtorch.version_of && libtorch.is_inference && libtorch.keeps_graph &&
           !libtorch.is_inference(libtorch_tensor(tensor));
}

static void hold(pack *p, int n, PyObject *tensor)
{
    *held(p, n) = Py_NewRef(tensor);
    p->was[n].impl = *(void **)libtorch_tensor(tensor);
    p->was[n].version = libtorch.version_of(libtorch_tensor(tensor));
}

/* Tensors go through save_for_backward, which watches for changes in place and lets hooks move them; the other arguments
 * stay in ctx.options. Where there are no hooks and o is but a copy, so do the tensors: to save three of them takes longer
 * than to attend to a few rows. */
static int remember(PyObject *ctx, const request *r, pack *others, PyObject *o, PyObject *lse)
{
    PyObject *kept[2 + ARGUMENTS] = { o, lse }, *tuple = NULL;
    int holds = others->hidden.copy != NULL, count = holds ? 0 : lse ? 2 : 1;
    for (int n = 0; n < ARGUMENTS; n++) {
        PyObject *value = r->args[n];
        if (value == call_defaults[n])
            continue;
        if (view_of_exchange(value)) {
            holds = holds && count < TENSORS && can_hold(value);
            kept[count++] = value;
            others->tensor[others->tensors++] = (uint8_t)n;
        } else {
            Py_INCREF(value);
            others->value[others->others] = value;
            others->other[others->others++] = (uint8_t)n;
        }
    }
    others->holds = holds;
    for (int n = 0; holds && n < count; n++)
        hold(others, n, kept[n]);
    if (!holds && (tuple = PyTuple_New(count)))
        for (int n = 0; n < count; n++)
            PyTuple_SetItem(tuple, n, Py_NewRef(kept[n]));
    int bad = (!holds && (!tuple || set(&to_save, ctx, tuple))) || set(&options, ctx, (PyObject *)others) ||
              (r->return_lse && set(&materialize_grads, ctx, Py_False));
    Py_XDECREF(tuple);
    return bad;
}

PyObject *torch_function_forward(PyObject *module, PyObject *const *p, Py_ssize_t n)
{
    (void)module;
    PyObject *o, *lse, *result = NULL;
    const request *r = requested;
    requested = NULL;
    if (!r || n < 1) {
        PyErr_SetString(PyExc_TypeError, "function_forward: expected to be called by apply()");
        return NULL;
    }
    pack *others = new_pack();
    if (!others || compute(r->args, 1, r->return_lse || has_saved_hooks() ? NULL : others, &o, &lse)) {
        Py_XDECREF((PyObject *)others);
        return NULL;
    }
    if (!remember(p[0], r, others, o, lse))
        result = r->return_lse ? PyTuple_Pack(2, o, lse) : (Py_INCREF(o), o);
    Py_DECREF(others);
    Py_DECREF(o);
    Py_XDECREF(lse);
    return result;
}

int torch_gradients(const torch_given *given, const int *wants, int in_one, PyObject *const *args, PyObject **made)
{
    call c;
    memset(&c.g, 0, sizeof c.g);
    int bad = call_open(&c, args) || (given->o && call_view(&c, given->o, "o", 0, &c.a.o)) ||
              (given->lse && call_view_rows(&c, given->lse, "lse", &c.a.lse)) ||
              call_view(&c, given->d_o, "do", 0, &c.g.d_o) ||
              (given->d_lse != Py_None && call_view_rows(&c, given->d_lse, "dlse", &c.g.d_lse));
    not_understood = bad;
    if (given->hidden_o)
        c.a.o = *given->hidden_o;
    if (given->hidden_lse)
        c.a.lse = *given->hidden_lse;
    for (int n = 0; bad && n < GRADIENTS; n++)
        made[n] = NULL;
    bad = bad || call_new_gradients(&c, args, wants, in_one, made) || call_backward(&c);
    call_close(&c);
    for (int n = 0; n < GRADIENTS; n++) {
        if (bad)
            Py_CLEAR(made[n]);
        else if (!made[n])
            Py_INCREF(made[n] = Py_None);
    }
    return bad ? -1 : 0;
}

/* Whether the tensors that are held are still what they were; else there is an exception. */
static int is_unchanged(pack *p)
{
    if (p->gone) {
        PyErr_SetString(PyExc_RuntimeError,
                        "Trying to backward through the graph a second time, after what it had saved was freed; "
                        "retain_graph=True keeps it");
        return 0;
    }
    for (int n = 0; p->holds && n < p->tensors; n++) {
        const void *tensor = libtorch_tensor(*held(p, n));
        const int64_t version = libtorch.version_of(tensor);
        if (*(void *const *)tensor == p->was[n].impl && version == p->was[n].version)
            continue;
        PyErr_Format(PyExc_RuntimeError,
                     "one of the variables needed for gradient computation has been modified by an inplace operation: "
                     "%U is at version %lld; expected version %lld instead",
                     call_names[p->tensor[n]], (long long)version, (long long)p->was[n].version);
        return 0;
    }
    return 1;
}

/* What remember() kept, put together again. The references in args are borrowed from the other two, which are new. */
static int recall(PyObject *ctx, PyObject **kept, pack **others, PyObject **args)
{
    *kept = get(&saved_tensors, ctx); /* an error where the backward before was the last */
    PyObject *rest = *kept ? get(&options, ctx) : NULL;
    if (!rest || Py_TYPE(rest) != pack_type || !is_unchanged((pack *)rest)) {
        Py_CLEAR(*kept);
        Py_XDECREF(rest);
        return -1;
    }
    pack *p = *others = (pack *)rest;
    const int first = p->hidden.copy ? 0 : p->hidden.data ? 1 : 2; /* behind o and lse */
    memcpy(args, call_defaults, ARGUMENTS * sizeof *args);
    for (int n = 0; n < p->tensors; n++)
        args[p->tensor[n]] = p->holds ? *held(p, n) : PyTuple_GetItem(*kept, first + n);
    for (int n = 0; n < p->others; n++)
        args[p->other[n]] = p->value[n];
    return 0;
}

PyObject *torch_function_state(PyObject *module, PyObject *ctx)
{
    (void)module;
    pack *others;
    PyObject *kept, *args[ARGUMENTS], *o, *lse, *result = NULL;
    if (recall(ctx, &kept, &others, args))
        return NULL;
    PyObject *arguments = PyTuple_New(ARGUMENTS);
    for (int n = 0; arguments && n < ARGUMENTS; n++) {
        Py_INCREF(args[n]);
        PyTuple_SetItem(arguments, n, args[n]);
    }
    if (others->hidden.copy)
        o = memory_show_copy(args[ARG_Q], &others->hidden);
    else
        Py_INCREF(o = PyTuple_GetItem(kept, 0));
    if (others->hidden.data)
        lse = memory_show(args[ARG_Q], &others->hidden);
    else
        Py_INCREF(lse = PyTuple_GetItem(kept, 1));
    if (arguments && o && lse)
        result = PyTuple_Pack(3, o, lse, arguments);
    Py_DECREF(kept);
    Py_DECREF(others);
    Py_XDECREF(o);
    Py_XDECREF(lse);
    Py_XDECREF(arguments);
    return result;
}

/* Whether the backward that runs now frees the graph. */
static int is_last(void) { return libtorch.keeps_graph && !libtorch.keeps_graph(); }

static PyObject *call_otherwise(PyObject *ctx, PyObject *d_o, PyObject *d_lse)
{
    PyObject *result = PyObject_CallFunctionObjArgs(backward_otherwise, ctx, d_o, d_lse, NULL);
    PyObject *rest = result && is_last() ? get(&options, ctx) : NULL;
    if (rest && Py_TYPE(rest) == pack_type)
        let_go((pack *)rest);
    Py_XDECREF(rest);
    return result;
}

/* apply(do) or apply(do, dlse), the method of an autograd function's context. */
static PyObject *function_backward(PyObject *ctx, PyObject *const *p, Py_ssize_t n)
{
    if (n < 1 || n > 2) {
        PyErr_Format(PyExc_TypeError, "apply: takes do and perhaps dlse, got %zd arguments", n);
        return NULL;
    }
    PyObject *d_o = p[0], *d_lse = n > 1 ? p[1] : Py_None;
    if (d_o == Py_None || grad_enabled()) /* only lse was used; or a graph of the backward is wanted */
        return call_otherwise(ctx, d_o, d_lse);

    pack *others;
    PyObject *kept, *args[ARGUMENTS], *made[GRADIENTS], *result = NULL;
    if (recall(ctx, &kept, &others, args))
        return NULL;
    torch_given given = { .d_o = d_o, .d_lse = d_lse };
    if (others->hidden.copy)
        given.hidden_o = &others->o;
    else
        given.o = PyTuple_GetItem(kept, 0);
    if (others->hidden.data)
        given.hidden_lse = &others->lse;
    else
        given.lse = PyTuple_GetItem(kept, 1);
    PyObject *needs = get(&needs_input_grad, ctx);
    if (needs) {
        int inputs = (int)PyTuple_Size(needs), wants[GRADIENTS];
        for (int i = 0; i < GRADIENTS; i++)
            wants[i] = i < inputs && PyTuple_GetItem(needs, i) == Py_True;
        if (!torch_gradients(&given, wants, 1, args, made)) {
            result = PyTuple_Pack(inputs, made[0], made[1], made[2], made[3], made[4]);
            for (int i = 0; i < GRADIENTS; i++)
                Py_DECREF(made[i]);
            if (is_last())
                let_go(others);
        } else if (not_understood) { /* many at once, perhaps: torch.autograd.grad(is_grads_batched=True) */
            PyErr_Clear();
            result = call_otherwise(ctx, d_o, d_lse);
        }
    }
    Py_DECREF(kept);
    Py_DECREF(others);
    Py_XDECREF(needs);
    return result;
}
