"""torch.ops.heed.attention and attention_backward: the kernels as PyTorch operators, with shapes for tracing, a gradient
and a rule for vmap. Both return every result; a gradient that is not wanted is an empty tensor."""

from __future__ import annotations

from typing import Any

import torch

from heed import _C
from heed._arguments import Arguments, flag, number, replace

_PROBLEM = (
    "Tensor q, Tensor k, Tensor v, str layout, str causal, SymInt[]? window, SymInt stride, Tensor? mask, Tensor? bias, "
    "float? scale, float softcap, Tensor? alibi_slopes, Tensor? sink, float dropout_p, Tensor? dropout_seed, "
    "Tensor? lengths_q, Tensor? lengths_k, bool deterministic, str precision, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, Tensor? block_table"
)
_library = torch.library.Library("heed", "DEF")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(f"attention({_PROBLEM}) -> (Tensor o, Tensor lse)", tags=_tags)
_library.define(
    f"attention_backward(Tensor do, Tensor? dlse, Tensor o, Tensor lse, bool[] wants, {_PROBLEM}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
    tags=_tags,
)


# ---- To and from the operators' types ----------------------------------------------------------------------------------


def to_op(a: Arguments) -> tuple[Any, ...]:
    seed = a.dropout_seed
    if isinstance(seed, int):
        signed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
        seed = torch.full((1,), signed, dtype=torch.int64, device=a.q.device)
    if not isinstance(a.causal, (bool, str)):
        raise TypeError(f"causal: is {a.causal!r}, expected True, False, 'bottom_right' or 'top_left'")
    if not (a.window is None or isinstance(a.window, tuple)):
        raise TypeError(f"window: is {a.window!r}, expected None or a tuple (left, right)")
    causal = a.causal if isinstance(a.causal, str) else "bottom_right" if a.causal else ""
    window = None if a.window is None else [-1 if side is None else side for side in a.window]
    scale = None if a.scale is None else number("scale", a.scale)
    changes = {
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": number("softcap", a.softcap),
        "dropout_p": number("dropout_p", a.dropout_p),
        "dropout_seed": seed,
        "deterministic": flag("deterministic", a.deterministic),
    }
    return tuple(replace(a, changes))


def _from_op(arguments: tuple[Any, ...]) -> Arguments:
    a = Arguments(*arguments)
    return a._replace(causal=a.causal or False, window=None if a.window is None else tuple(a.window))


def attention(a: Arguments) -> Any:
    if torch._C._are_functorch_transforms_active():
        return Attention.apply(*to_op(a))
    return torch.ops.heed.attention(*to_op(a))


def attention_backward(do: Any, dlse: Any, o: Any, lse: Any, wants: tuple[bool, ...], a: Arguments) -> Any:
    results = torch.ops.heed.attention_backward(do, dlse, o, lse, list(wants), *to_op(a))
    return tuple(result if want else None for result, want in zip(results, wants, strict=True))


# ---- Kernels and shapes ------------------------------------------------------------------------------------------------


def _forward(*arguments: Any) -> Any:
    return _C.forward(None, True, *_from_op(arguments))


def _backward(do: Any, dlse: Any, o: Any, lse: Any, wants: Any, *arguments: Any) -> Any:
    results = _C.backward(do, dlse, o, lse, wants, *_from_op(arguments))
    return tuple(do.new_empty(0) if result is None else result for result in results)


for device in ("CPU", "CUDA"):
    _library.impl("attention", _forward, device)
    _library.impl("attention_backward", _backward, device)


def _holds(condition: Any, otherwise: bool) -> bool:
    """A condition on sizes; `otherwise` where a tracer knows them only when the numbers are there, as after x[mask]."""
    try:
        return bool(condition)
    except torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode:
        return otherwise


def _packed_like(q: torch.Tensor, layout: str, columns: Any) -> torch.Tensor:
    """The memory order of o, as call_new_o() in call.c has it."""
    shape = [*q.shape[:-1], columns]
    outer = 0 if layout == "thd" else 1
    inner = outer + 1
    long = _holds(q.shape[inner] > 1, True) and _holds(q.shape[outer] > 1, True)  # the strides of others do not matter
    if long and _holds(q.stride(inner) > q.stride(outer), False):
        shape[inner], shape[outer] = shape[outer], shape[inner]
        return q.new_empty(shape).transpose(inner, outer)
    return q.new_empty(shape)


@torch.library.register_fake("heed::attention", lib=_library)
def _forward_fake(*arguments: Any) -> Any:
    a = Arguments(*arguments)
    rows = [a.q.shape[d] for d in {"bhsd": (0, 1, 2), "bshd": (0, 2, 1), "thd": (1, 0)}[a.layout]]
    lse = a.q.new_empty(rows, dtype=torch.float64 if a.q.dtype == torch.float64 else torch.float32)
    return _packed_like(a.q, a.layout, a.v.shape[-1]), lse


@torch.library.register_fake("heed::attention_backward", lib=_library)
def _backward_fake(do: Any, dlse: Any, o: Any, lse: Any, wants: Any, *arguments: Any) -> Any:
    a = Arguments(*arguments)
    inputs = (a.q, a.k, a.v, a.bias, a.sink)
    return tuple(
        do.new_empty(0) if t is None or not want else torch.empty_like(t) for t, want in zip(inputs, wants, strict=True)
    )


# ---- Gradient ----------------------------------------------------------------------------------------------------------

_FIELDS = Arguments._fields
_GRADIENT_OF = ("q", "k", "v", "bias", "sink")


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.options = [None if isinstance(value, torch.Tensor) else value for value in inputs]
    ctx.save_for_backward(*output, *(value if isinstance(value, torch.Tensor) else None for value in inputs))
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, do: Any, dlse: Any, op: Any = torch.ops.heed.attention_backward) -> Any:
    o, lse, *tensors = ctx.saved_tensors
    arguments = [option if t is None else t for t, option in zip(tensors, ctx.options, strict=True)]
    if do is None and dlse is None:
        return (None,) * len(arguments)
    wants = [ctx.needs_input_grad[_FIELDS.index(name)] for name in _GRADIENT_OF]
    do = torch.zeros_like(o) if do is None else do
    results = op(do, dlse, o, lse, wants, *arguments)
    gradients: list[Any] = [None] * len(arguments)
    for name, want, result in zip(_GRADIENT_OF, wants, results, strict=True):
        gradients[_FIELDS.index(name)] = result if want else None
    return tuple(gradients)


def _no_second_gradient(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError("heed.attention: second derivatives are not implemented")


torch.library.register_autograd("heed::attention", _gradient, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("heed::attention_backward", _no_second_gradient, lib=_library)


class AttentionBackward(torch.autograd.Function):
    """The backward as a step that autograd records, in order to refuse its derivative."""

    generate_vmap_rule = True
    backward = staticmethod(_no_second_gradient)

    @staticmethod
    def forward(*values: Any) -> Any:
        return torch.ops.heed.attention_backward(*values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


class Attention(torch.autograd.Function):
    """The operator for torch.func: its transforms take such a class, but no operator with a registered gradient."""

    generate_vmap_rule = True
    setup_context = staticmethod(_setup_context)

    @staticmethod
    def forward(*values: Any) -> Any:
        return torch.ops.heed.attention(*values)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        return _gradient(ctx, do, dlse, AttentionBackward.apply)


# ---- vmap --------------------------------------------------------------------------------------------------------------
#
# Where it can, the mapped dimension joins the batch and one call does all; else there is a call for each index.

_ROWWISE = ("mask", "bias")  # right-aligned to four dimensions: they get a batch dimension first


def _at(value: Any, dim: Any, index: int) -> Any:
    return value if dim is None or not isinstance(value, torch.Tensor) else value.select(dim, index)


def _one_by_one(op: Any, size: int, dims: Any, values: Any) -> Any:
    calls = [op(*(_at(value, dim, n) for value, dim in zip(values, dims, strict=True))) for n in range(size)]
    return tuple(torch.stack(results) for results in zip(*calls, strict=True))


def _join(t: Any, dim: Any, size: int, batch: int | None = None) -> Any:
    """[..., size at dim, ...] as [size * batch, ...]."""
    if t is None:
        return None
    t = t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
    if batch is not None:  # a score tensor
        t = t.reshape(size, *(1,) * (5 - t.dim()), *t.shape[1:])
        t = t.expand(size, batch, *t.shape[2:])
    return t.flatten(0, 1)


def _joined(a: Arguments, dims: Arguments, size: int) -> tuple[Any, ...]:
    batch = a.q.shape[0 if dims.q is None or dims.q > 0 else 1]
    changes = {name: _join(getattr(a, name), getattr(dims, name), size) for name in ("q", "k", "v")}
    changes |= {name: _join(getattr(a, name), getattr(dims, name), size, batch) for name in _ROWWISE}
    changes |= {name: _join(getattr(a, name), getattr(dims, name), size) for name in ("lengths_q", "lengths_k")}
    if a.alibi_slopes is not None and (dims.alibi_slopes is not None or a.alibi_slopes.dim() == 2):
        slopes, dim = a.alibi_slopes, dims.alibi_slopes
        slopes = slopes.expand(size, *slopes.shape) if dim is None else slopes.movedim(dim, 0)
        slopes = slopes[:, None].expand(size, batch, -1) if slopes.dim() == 2 else slopes
        changes["alibi_slopes"] = slopes.flatten(0, 1)
    return tuple(a._replace(**changes))


def _can_join(a: Arguments, dims: Arguments) -> bool:
    return a.layout != "thd" and a.block_table is None and not a.dropout_p and dims.sink is None


def _forward_vmap(info: Any, in_dims: Any, *values: Any) -> Any:
    a, dims, size = Arguments(*values), Arguments(*in_dims), info.batch_size
    if not _can_join(a, dims):
        return _one_by_one(torch.ops.heed.attention, size, in_dims, values), (0, 0)
    results = torch.ops.heed.attention(*_joined(a, dims, size))
    return tuple(t.unflatten(0, (size, -1)) for t in results), (0, 0)


def _backward_vmap(info: Any, in_dims: Any, *values: Any) -> Any:
    a, dims, size = Arguments(*values[5:]), Arguments(*in_dims[5:]), info.batch_size
    wants = values[4]
    if not _can_join(a, dims) or wants[3] or wants[4]:
        return _one_by_one(torch.ops.heed.attention_backward, size, in_dims, values), (0,) * 5
    outer = [_join(value, dim, size) for value, dim in zip(values[:4], in_dims[:4], strict=True)]
    results = torch.ops.heed.attention_backward(*outer, wants, *_joined(a, dims, size))
    parts = [t.unflatten(0, (size, -1)) if want else t for t, want in zip(results, wants, strict=True)]
    return tuple(parts), tuple(0 if want else None for want in wants)


if hasattr(torch.library, "register_vmap"):  # 2.4 has none, and calls the operator for each index
    torch.library.register_vmap("heed::attention", _forward_vmap, lib=_library)
    torch.library.register_vmap("heed::attention_backward", _backward_vmap, lib=_library)
