"""The front door: names, defaults and documentation. What happens behind it:

_C              PyTorch tensors in an ordinary context: everything in C, autograd included
_torch.py       PyTorch otherwise: torch.compile, autocast, vmap, subclasses, unusual types
_arrays.py      NumPy and other arrays
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from heed import _C, _arrays, _compile
from heed._arguments import Arguments, flag

Window = tuple["int | None", "int | None"]
Call = TypeVar("Call", bound=Callable[..., Any])


def _compiling() -> bool:
    """Whether torch.compile is looking, which cannot see into the extension. Other tracers bring tensors of their own. Once
    PyTorch is in use, _torch.py puts PyTorch's own function here, which is quicker."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _attention(return_lse: bool, *arguments: Any) -> Any:
    """What the extension does not do by itself."""
    if _is_torch(arguments[0]):
        from heed import _torch

        return _torch.attention(return_lse, Arguments(*arguments))
    return _arrays.attention(return_lse, Arguments(*arguments))


def _prepare(arguments: Arguments) -> Arguments:
    if _is_torch(arguments.q):
        from heed import _torch

        return _torch._prepare(arguments)
    return _arrays._prepare(arguments)


def _is_seen(prepared: Arguments) -> bool:
    """Whether a tracer or the like watches the call."""
    if not _is_torch(prepared.q):
        return False
    from heed import _torch

    return _torch._is_seen(prepared)


def _refuse(prepared: Arguments) -> None:
    """An error where _attend(..., prepared) would be one, before anything is computed. A tracer finds out later."""
    if not _is_seen(prepared):
        _C.explain(None, False, *prepared)


def _attend(return_lse: bool, prepared: Arguments) -> Any:
    """_attention() of what _prepare() gave."""
    if _is_torch(prepared.q):
        from heed import _torch

        return _torch.attend(return_lse, prepared)
    return _C.forward(None, return_lse, *prepared)


def _empty(like: Any, shape: Any, strides: Any, dtype: str) -> Any:
    if _is_torch(like):
        from heed import _torch

        return _torch.empty(like, shape, strides, dtype)
    return _arrays.empty(like, shape, strides, dtype)


def _stream(like: Any) -> int:
    if _is_torch(like):
        import torch

        return torch.cuda.current_stream(like.device).cuda_stream
    return _arrays.stream(like)


_C.use(_attention, _empty, _stream, Arguments._fields, (None, None, None, *Arguments._field_defaults.values()))


def _quick(function: Call) -> Call:
    """The same function in C, without Python's time for all the arguments; torch.compile still looks into this one."""
    plain = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    doc = f"{function.__name__}{inspect.Signature(plain)}\n--\n\n{inspect.cleandoc(function.__doc__ or '')}"
    quick = _C.front(function, "heed", doc)
    _compile.when_used(quick, function)
    return quick  # type: ignore[return-value]


@_quick
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str = "bhsd",
    causal: bool | str = False,
    window: Window | None = None,
    stride: int = 1,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sink: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    lengths_q: Any = None,
    lengths_k: Any = None,
    return_lse: bool = False,
    deterministic: bool = True,
    precision: str = "exact",
) -> Any:
    """softmax(scale * q k^T + bias) v, for each batch and head, over the keys that a row may see.

    Shapes, with B batch, H query heads, G key heads (H a multiple of G), S rows, T keys:

        layout      q             k             v              result
        "bhsd"      [B, H, S, D]  [B, G, T, D]  [B, G, T, Dv]  [B, H, S, Dv]
        "bshd"      [B, S, H, D]  [B, T, G, D]  [B, T, G, Dv]  [B, S, H, Dv]

    PyTorch tensors on the CPU or a CUDA device, or NumPy arrays; float32, float16, bfloat16 (float64 on the CPU, slow). Any
    strides, without copies. The result is new, of q's dtype and library, and differentiable in q, k, v, bias and sink.

    causal: row i sees keys j <= i + T - S (the last row sees the last key); "top_left": j <= i.
    window: (left, right): row i sees keys from left before to right after its place; None or -1 on a side: no limit.
    stride: strided attention: only keys 0, stride, 2 * stride, ... are seen, at 1/stride of the cost.
    mask: bool, broadcastable to [B, H, S, T], True: attend. A row that sees no key gives 0.
    bias: float32 or q's dtype, broadcastable to [B, H, S, T], added to the scores; -inf hides a key.
    scale: 1/sqrt(D) where None.
    softcap: c > 0 replaces a score x by c * tanh(x / c).
    alibi_slopes: [H] or [B, H]: -slope * distance is added to the scores. No gradient.
    sink: [H]: one more logit in the denominator of each row.
    dropout_p: the share of weights set to zero. dropout_seed: a whole number (or an int64 tensor of one element) that
        decides which; None draws one from the library's random number generator.
    lengths_q, lengths_k: [B] whole numbers: how many rows and keys of each sequence count; the rest is padding.
    return_lse: also return the logarithm of each row's sum, [B, H, S], float32, differentiable.
    deterministic: False allows sums in any order where that is faster.
    precision: of float32: "exact"; "tf32" allows products of tf32's accuracy where that is faster; "plain" wants fp32
        instructions alone, where "exact" may give tensor cores the numbers in parts.
    """
    return _attention(
        flag("return_lse", return_lse), q, k, v, layout, causal, window, stride, mask, bias, scale, softcap, alibi_slopes, sink,
        dropout_p, dropout_seed, lengths_q, lengths_k, deterministic, precision, None, None, None, None, None,
    )  # fmt: skip


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool | str = False,
    window: Window | None = None,
    stride: int = 1,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sink: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    lengths_k: Any = None,
    return_lse: bool = False,
    deterministic: bool = True,
    precision: str = "exact",
) -> Any:
    """attention() over sequences that lie end to end, without padding.

    q: [rows in all, H, D], k: [keys in all, G, D], v: [keys in all, G, Dv]; the result is [rows in all, H, Dv].
    cu_seqlens_q, cu_seqlens_k: [B + 1] whole numbers: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1. Rows
        of no sequence are padding: 0 in the result and in gradients.
    max_seqlen_q, max_seqlen_k: no sequence is longer.
    mask, bias: broadcastable to [B, H, max_seqlen_q, max_seqlen_k]; row and column 0 are a sequence's first.
    return_lse: [H, rows in all].

    The other arguments are those of attention(). There is no layout (it is the one above) and no lengths_q, which
    cu_seqlens_q says; lengths_k may be less than cu_seqlens_k says.
    """
    call = _attention if _compiling() else _C.attention
    return call(
        flag("return_lse", return_lse), q, k, v, "thd", causal, window, stride, mask, bias, scale, softcap, alibi_slopes, sink,
        dropout_p, dropout_seed, None, lengths_k, deterministic, precision, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, None,
    )  # fmt: skip


def attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    dlse: Any = None,
    layout: str = "bhsd",
    causal: bool | str = False,
    window: Window | None = None,
    stride: int = 1,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sink: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    lengths_q: Any = None,
    lengths_k: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = True,
    precision: str = "exact",
) -> tuple[Any, ...]:
    """The gradients of attention(..., return_lse=True), without autograd: (dq, dk, dv), then dbias where there is a bias
    and dsink where there is a sink.

    do, o: [B, H, S, Dv], like the result of the forward call; lse: [B, H, S], what it returned; dlse: the gradient of lse, if
    any. dq, dk, dv, dbias and dsink have the shapes of q, k, v, bias and sink. Everything else as in the forward call; with
    dropout, dropout_seed is needed. layout "thd" is that of attention_varlen().
    """
    arguments = Arguments(
        q, k, v, layout, causal, window, stride, mask, bias, scale, softcap, alibi_slopes, sink, dropout_p,
        dropout_seed, lengths_q, lengths_k, deterministic, precision, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k,
    )  # fmt: skip
    if _is_torch(q):
        from heed import _torch

        gradients = _torch.attention_backward(do, dlse, o, lse, arguments)
    else:
        gradients = _arrays.attention_backward(do, dlse, o, lse, arguments)
    return (*gradients[:3], *([] if bias is None else gradients[3:4]), *([] if sink is None else gradients[4:5]))


def explain(q: Any, k: Any, v: Any, *, backward: bool = False, chip: str | None = None, **options: Any) -> str:
    """Which kernel attention(q, k, v, **options) gets, and why the ones before it in the table were passed over.

    chip: None for the device of q, or the name of one that need not be here: "a100", "h200", "avx2" ...
    """
    options.pop("return_lse", None)
    backward = flag("backward", backward)
    if options.get("dropout_seed") is None:
        options["dropout_seed"] = 0  # none is drawn for a call that is not made
    return _C.explain(chip, backward, *_prepare(Arguments(q, k, v, **options)))


def kernels() -> list[dict[str, Any]]:
    """The table of kernels in order of preference: name, backend, backward, runs_here."""
    return [dict(zip(("name", "backend", "backward", "runs_here"), row, strict=True)) for row in _C.kernels()]


def set_threads(threads: int) -> None:
    """How many threads the CPU kernels use; 0: as many as OpenMP would. A process made by fork() begins with 1."""
    _C.set_threads(threads)


# OpenMP's threads stay behind in a fork, where it would wait for them without end. One thread does without OpenMP.
os.register_at_fork(after_in_child=lambda: _C.set_threads(1))
