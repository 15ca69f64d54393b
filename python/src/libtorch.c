#include "libtorch.h"

#include <dlfcn.h>
#include <string.h>

struct libtorch libtorch;

static int32_t constant(void *library, const char *name)
{
    int32_t (*function)(void);
    *(void **)&function = dlsym(library, name);
    return function ? function() : -1;
}

/* A tensor is a pointer to what it is; the object that Python makes for it holds the same pointer. */
static size_t find_tensor(void)
{
    const int64_t shape[] = { 3, 2 }, stride[] = { 2, 1 };
    int64_t *got = NULL;
    void *tensor;
    size_t at = 0;
    if (!libtorch.makes_tensors || !libtorch.wrap || !libtorch.layout_of || !libtorch.ndim_of || !libtorch.shape_of ||
        !libtorch.stride_of || !libtorch.dtype_of || !libtorch.device_type_of || !libtorch.device_of ||
        libtorch.empty_strided(2, shape, stride, libtorch.f32, libtorch.cpu, 0, &tensor))
        return 0;
    PyObject *object = libtorch.wrap(tensor);
    PyObject *size = object ? PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__basicsize__") : NULL;
    for (size_t n = sizeof *object; size && !at && n < PyLong_AsSize_t(size); n += sizeof(void *))
        if (*(void **)((char *)object + n) == *(void **)tensor)
            at = n;
    if (at && (libtorch.shape_of((char *)object + at, &got) || memcmp(got, shape, sizeof shape)))
        at = 0;
    Py_XDECREF(size);
    Py_XDECREF(object);
    libtorch.delete_tensor(tensor);
    PyErr_Clear();
    return at;
}

void libtorch_find(void)
{
    void *library = dlopen("libtorch_python.so", RTLD_NOLOAD | RTLD_LAZY); /* and those that it is linked with */
    if (!library)
        return;
    const struct {
        void *to;
        const char *name;
    } functions[] = {
        { &libtorch.empty_strided, "aoti_torch_empty_strided" },
        { &libtorch.part_of, "aoti_torch__alloc_from_pool" },
        { &libtorch.data_of, "aoti_torch_get_data_ptr" },
        { &libtorch.layout_of, "aoti_torch_get_layout" },
        { &libtorch.ndim_of, "aoti_torch_get_dim" },
        { &libtorch.shape_of, "aoti_torch_get_sizes" },
        { &libtorch.stride_of, "aoti_torch_get_strides" },
        { &libtorch.dtype_of, "aoti_torch_get_dtype" },
        { &libtorch.device_type_of, "aoti_torch_get_device_type" },
        { &libtorch.device_of, "aoti_torch_get_device_index" },
        { &libtorch.delete_tensor, "aoti_torch_delete_tensor_object" },
        { &libtorch.to_python, "torch_tensor_to_pyobject" },
        { &libtorch.grad_enabled, "aoti_torch_grad_mode_is_enabled" },
        { &libtorch.wrap, "_Z16THPVariable_WrapRKN2at10TensorBaseE" },
        { &libtorch.wrap_last, "_Z16THPVariable_WrapON2at10TensorBaseE" },
        { &libtorch.autocast_enabled, "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE" },
        { &libtorch.dispatch_modes, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv" },
        { &libtorch.functorch_layers, "_ZN2at9functorch20getDynamicLayerStackEv" },
        { &libtorch.forward_levels, "_ZN5torch8autograd14ForwardADLevel13has_any_levelEv" },
        { &libtorch.tracing, "_ZN5torch3jit6tracer15getTracingStateEv" },
        { &libtorch.saved_hooks, "_ZN2at23SavedTensorDefaultHooks13get_tls_stateEv" },
        { &libtorch.requires_grad, "_ZNK3c1010TensorImpl13requires_gradEv" },
        { &libtorch.is_neg, "_ZN2at6native6is_negERKNS_6TensorE" },
        { &libtorch.is_inference, "_ZN2at6native12is_inferenceERKNS_6TensorE" },
        { &libtorch.version_of, "_ZNK2at10TensorBase8_versionEv" },
        { &libtorch.keeps_graph, "_ZN5torch8autograd33get_current_graph_task_keep_graphEv" },
    };
    for (size_t n = 0; n < sizeof functions / sizeof *functions; n++)
        *(void **)functions[n].to = dlsym(library, functions[n].name);
    libtorch.f32 = constant(library, "aoti_torch_dtype_float32");
    libtorch.f64 = constant(library, "aoti_torch_dtype_float64");
    libtorch.f16 = constant(library, "aoti_torch_dtype_float16");
    libtorch.bf16 = constant(library, "aoti_torch_dtype_bfloat16");
    libtorch.u8 = constant(library, "aoti_torch_dtype_uint8");
    libtorch.strided = constant(library, "aoti_torch_layout_strided");
    libtorch.cpu = constant(library, "aoti_torch_device_type_cpu");
    libtorch.cuda = constant(library, "aoti_torch_device_type_cuda");
    libtorch.makes_tensors = libtorch.empty_strided && libtorch.data_of && libtorch.delete_tensor &&
                             (libtorch.to_python || libtorch.wrap) && libtorch.f32 >= 0 && libtorch.f64 >= 0 &&
                             libtorch.f16 >= 0 && libtorch.bf16 >= 0 && libtorch.u8 >= 0 && libtorch.cpu >= 0 &&
                             libtorch.cuda >= 0;
    libtorch.tensor_at = find_tensor();
    if (!libtorch.wrap_last)
        *(void **)&libtorch.wrap_last = *(void **)&libtorch.wrap;
}
