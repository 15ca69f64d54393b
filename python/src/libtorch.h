/* Functions of PyTorch's own libraries, found at run time, as heed is built without PyTorch. Each may be NULL: then this
 * PyTorch has no such function, and the same is done through Python. */
#ifndef HEED_LIBTORCH_H
#define HEED_LIBTORCH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

/* A std::vector and a std::deque, as far as they matter here. */
struct libtorch_vector {
    const void *begin, *end;
};
struct libtorch_deque {
    const void *map;
    size_t map_size;
    const void *begin[4], *end[4];
};

extern struct libtorch {
    /* The stable C interface. A tensor is an at::Tensor *; 0 means success. */
    int32_t (*empty_strided)(int64_t ndim, const int64_t *shape, const int64_t *stride, int32_t dtype,
                             int32_t device_type, int32_t device, void **tensor);
    int32_t (*part_of)(void *tensor, int64_t offset, int32_t dtype, int64_t ndim, const int64_t *shape,
                       const int64_t *stride, void **part); /* the same memory from that byte on, unseen by autograd */
    int32_t (*data_of)(void *tensor, void **data);
    int32_t (*layout_of)(void *tensor, int32_t *layout);
    int32_t (*ndim_of)(void *tensor, int64_t *ndim);
    int32_t (*shape_of)(void *tensor, int64_t **shape);
    int32_t (*stride_of)(void *tensor, int64_t **stride);
    int32_t (*dtype_of)(void *tensor, int32_t *dtype);
    int32_t (*device_type_of)(void *tensor, int32_t *type);
    int32_t (*device_of)(void *tensor, int32_t *device);
    int32_t (*delete_tensor)(void *tensor);
    int32_t (*to_python)(void *tensor, void *type, void **object); /* 2.14 and later */
    bool (*grad_enabled)(void);
    int32_t f32, f64, f16, bf16, u8, cpu, cuda, strided; /* its numbers for dtypes, devices and layouts */
    /* C++, by names that hold the types of the arguments. */
    PyObject *(*wrap)(const void *tensor); /* THPVariable_Wrap(const at::TensorBase &) */
    PyObject *(*wrap_last)(void *tensor); /* the same of (at::TensorBase &&): the reference goes to Python, uncounted */
    bool (*autocast_enabled)(int8_t device_type);            /* at::autocast::is_autocast_enabled(c10::DeviceType) */
    int64_t (*dispatch_modes)(void);                         /* c10::impl::TorchDispatchModeTLS::stack_len() */
    const struct libtorch_vector *(*functorch_layers)(void); /* at::functorch::getDynamicLayerStack() */
    const struct libtorch_deque *(*saved_hooks)(void); /* at::SavedTensorDefaultHooks::get_tls_state(): its first */
    bool (*forward_levels)(void);                      /* torch::autograd::ForwardADLevel::has_any_level() */
    void *const *(*tracing)(void); /* torch::jit::tracer::getTracingState(): a std::shared_ptr, its object first */
    bool (*requires_grad)(const void *impl);   /* c10::TensorImpl::requires_grad() const */
    bool (*is_neg)(const void *tensor);        /* at::native::is_neg(const at::Tensor &) */
    bool (*is_inference)(const void *tensor);  /* at::native::is_inference(const at::Tensor &) */
    int64_t (*version_of)(const void *tensor); /* at::TensorBase::_version() const; not of inference mode's */
    bool (*keeps_graph)(void); /* torch::autograd::get_current_graph_task_keep_graph(): there may be another backward */
    bool makes_tensors;        /* all that it takes is there */
    size_t tensor_at; /* where the at::Tensor is in Python's object for a tensor, in bytes; 0: that is not known, or a
                         function is missing that asks a tensor about itself */
} libtorch;

/* The at::Tensor of a Python tensor, which stays its owner; only where tensor_at is not 0. */
static inline void *libtorch_tensor(PyObject *object) { return (char *)object + libtorch.tensor_at; }

void libtorch_find(void);

#endif
