"""PyTorch beyond the quick way in the extension: the operators torch.ops.heed.*, which torch.compile, torch.export, vmap
and dispatch modes can see, the autograd function, and calls that have to be put in order first."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

import torch

if not hasattr(torch.library, "register_autograd"):  # before anything is registered with such a torch
    raise ImportError(f"heed: torch is {torch.__version__}, expected 2.4 or later; NumPy arrays need none")

from heed import _C, _api, _ops
from heed._arguments import INTEGERS, PER_HEAD, TENSORS, Arguments, drops, replace, seed_of, type_name

_DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64", "uint8")}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")


def empty(like: torch.Tensor, shape: Any, strides: Any, dtype: str) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=_DTYPES[dtype], device=like.device)


def _capsule(t: torch.Tensor) -> Any:
    """A tensor's memory where there are no C functions for it, before 2.10. It is what __dlpack__ gives, which refuses tensors
    that require a gradient, autograd's business and not that of who reads them, and those of a GPU that is not the current."""
    return torch.utils.dlpack.to_dlpack(t.detach())


# ---- Putting a call in order -------------------------------------------------------------------------------------------


def causal_bias(t: Any) -> str:
    """Of a CausalBias of torch.nn.attention.bias, which says what it is and holds no numbers; "" of all others."""
    bias = None if type(t) is torch.Tensor else sys.modules.get("torch.nn.attention.bias")
    if bias is None or not isinstance(t, bias.CausalBias):
        return ""
    return "top_left" if t.variant == bias.CausalVariant.UPPER_LEFT else "bottom_right"


def check(name: str, t: Any) -> None:
    """An error unless t is a tensor that has its numbers in memory, in a dtype that is a number's."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: is a {type_name(t)}, expected a torch.Tensor")
    if causal_bias(t):  # PyTorch 2.5 lets nothing else be asked of one
        raise TypeError(f"{name}: is a {type_name(t)}, which holds no numbers; expected a tensor that does (see causal)")
    if t.is_nested:
        raise TypeError(f"{name}: is a nested tensor; expected a dense one (see attention_varlen for sequences)")
    if t.layout != torch.strided:
        raise TypeError(f"{name}: has layout {t.layout}, expected a dense tensor")
    if t.is_complex() or t.is_quantized:
        raise TypeError(f"{name}: dtype is {t.dtype}, expected a real one")
    if t.is_meta and type(t) in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(f"{name}: is a meta tensor, which has no data; expected one on the CPU or a CUDA device")


def _prepare(a: Arguments) -> Arguments:
    """Types and devices checked; autocast applied; small tensors in the types that the kernels read; dropout seeded."""
    changes: dict[str, Any] = {}
    if a.dropout_seed is not None:
        a = replace(a, {"dropout_seed": seed_of(a.dropout_seed)})
    for name in TENSORS:
        t = getattr(a, name)
        if t is None or (name == "dropout_seed" and isinstance(t, int)):
            continue
        check(name, t)
        if t.device != a.q.device:
            raise ValueError(f"{name}: is on {t.device}, q is on {a.q.device}")
        if name in INTEGERS:
            if t.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name}: dtype is {t.dtype}, expected torch.int32 or torch.int64")
            if t.device.type == "cpu" and t.dtype == torch.int64:
                t = t.clamp(-1, (1 << 31) - 1)  # what int32 cannot say is refused, not taken for another number
            changes[name] = t.to(torch.int32).contiguous()
        elif name == "dropout_seed":
            changes[name] = t.reshape(-1)
    for name in PER_HEAD:
        t = getattr(a, name)
        if t is not None and t.dtype in _FLOATS:
            changes[name] = t.float()
    for name in ("alibi_slopes", "scale", "softcap", "dropout_p"):
        t = getattr(a, name)
        if isinstance(t, torch.Tensor) and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: requires a gradient, which heed does not compute; detach it")
    kind = a.q.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        for name in ("q", "k", "v"):
            t = changes.get(name, getattr(a, name))
            if t.dtype in (torch.float32, torch.float16, torch.bfloat16):
                changes[name] = t.to(dtype)
        if a.bias is not None and a.bias.dtype in (torch.float16, torch.bfloat16):
            changes["bias"] = changes.get("bias", a.bias).to(dtype)
    if a.dropout_seed is None and drops(a):
        changes["dropout_seed"] = torch.randint(1 << 62, (1,), device=a.q.device)
    return replace(a, changes)


def _check_tangents(a: Arguments) -> None:
    if torch.autograd.forward_ad._current_level >= 0:
        for name in _DIFFERENTIABLE:
            t = getattr(a, name)
            if t is not None and torch.autograd.forward_ad.unpack_dual(t).tangent is not None:
                raise NotImplementedError(f"{name}: has a tangent; forward-mode derivatives are not implemented")


def _is_seen(a: Arguments) -> bool:
    """Whether something watches or changes operators, so that the call has to be one."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch._C._are_functorch_transforms_active() or torch._C._is_tracing():
        return True
    return any(
        isinstance(t, torch.Tensor) and type(t) not in (torch.Tensor, torch.nn.Parameter)
        for t in (getattr(a, name) for name in TENSORS)
    )


def attention(return_lse: bool, a: Arguments) -> Any:
    return attend(return_lse, _prepare(a))


def attend(return_lse: bool, a: Arguments) -> Any:
    if not torch.compiler.is_compiling():
        _check_tangents(a)
    if _is_seen(a):
        o, lse = _ops.attention(a)
        return (o, lse) if return_lse else o
    differentiable = [getattr(a, name) for name in _DIFFERENTIABLE]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable):
        return _C.apply(return_lse, *a)
    return _C.forward(None, return_lse, *a)


def attention_backward(do: Any, dlse: Any, o: Any, lse: Any, a: Arguments) -> tuple[Any, ...]:
    if a.dropout_seed is None and drops(a):
        raise ValueError("dropout_seed: is None, expected the seed of the forward call")
    for name, t in (("do", do), ("o", o), ("lse", lse), *([] if dlse is None else [("dlse", dlse)])):
        check(name, t)
    wants = (True, True, True, a.bias is not None, a.sink is not None)
    with torch.no_grad():
        a = _prepare(a)
        if _is_seen(a):
            return _ops.attention_backward(do, dlse, o, lse, wants, a)
        return _C.backward(do, dlse, o, lse, wants, *a)


# ---- Autograd ----------------------------------------------------------------------------------------------------------


_QuickClass: Any = _C.quick_class(type(torch.autograd.Function))


class _Attention(torch.autograd.Function, metaclass=_QuickClass):
    """Inputs: q, k, v, and, where one of them is not None, bias and sink. _C.apply calls it."""

    forward = staticmethod(_C.function_forward)
    clear_saved_tensors_on_access = boxed_grads_call = False


class _AttentionBackward(_C.Backward, _Attention._backward_cls):  # type: ignore[misc, name-defined]
    """The node of a graph: the engine's call goes straight to the extension."""

    __slots__ = ("options",)  # what the call remembers beside its tensors
    apply = _C.Backward.apply


_Attention._backward_cls = _AttentionBackward
for _name in ("setup_context", "_backward_cls", "clear_saved_tensors_on_access", "boxed_grads_call", "forward"):
    _C.keep_at_hand(_name, getattr(_Attention, _name))  # PyTorch asks for them in each call


def _backward_otherwise(ctx: Any, do: Any, dlse: Any) -> Any:
    """The backward where only lse was used, where a graph of it is asked for, or of tensors without memory of their own."""
    wants = [*ctx.needs_input_grad, False, False][:5]
    o, lse, arguments = _C.function_state(ctx)
    if do is None:
        do = torch.zeros_like(o)
    op = _ops.AttentionBackward.apply if torch.is_grad_enabled() else torch.ops.heed.attention_backward
    results = op(do, dlse, o, lse, wants, *_ops.to_op(Arguments(*arguments)))
    gradients = [result if want else None for result, want in zip(results, wants, strict=True)]
    return tuple(gradients[: len(ctx.needs_input_grad)])


# ---- The end of the program --------------------------------------------------------------------------------------------
#
# PyTorch has a thread for the backwards on each GPU. After a backward the thread may be the last to hold gradients, for
# which it needs Python's lock once more; if Python is ending by then, the process is aborted. The thread lets go of a
# backward before it begins with the next: so there is one more at the end, of nothing, in which no Python object is left.

_gpus: list[int] = []  # where backwards have run


def _first_backward(gpu: int) -> None:
    if not _gpus:
        atexit.register(_wait_for_backwards, os.getpid())
    _gpus.append(gpu)


def _wait_for_backwards(process: int) -> None:
    if os.getpid() == process:  # a fork has no such threads
        _C.call_within(5.0, _one_more_backward)  # a thread that does not come back must not keep the process


def _one_more_backward() -> None:
    run = torch.autograd.Variable._execution_engine.run_backward  # tensor.backward() puts Python's context into the graph
    for gpu in _gpus:
        x, dy = (torch.empty(0, device=f"cuda:{gpu}", requires_grad=grad) for grad in (True, False))
        run((x.neg(),), (dy,), False, False, (), allow_unreachable=True, accumulate_grad=True)


_C.use_torch(
    torch.Tensor,
    torch.nn.Parameter,
    (getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), _capsule),
    (torch.empty_strided, getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None), _DTYPES),
    (torch.is_grad_enabled, torch._C._len_torch_dispatch_stack, torch._C._is_any_autocast_enabled, torch._C._is_tracing),
    vars(torch.autograd.forward_ad),
    torch._C._are_functorch_transforms_active,
    super(torch.autograd.Function, _Attention).apply,  # without the Python around it: the extension asks for functorch
    _AttentionBackward,
    _backward_otherwise,
    _first_backward,
)
_api._compiling = torch.compiler.is_dynamo_compiling
