"""Short names for common cases: one sequence attending to itself, a whole batch, a batch with a mask, strided keys."""

from __future__ import annotations

from typing import Any

from heed import _C, _api
from heed._arguments import Arguments, type_name, whole


def _one_sequence(name: str, x: Any, d: int) -> Any:
    """[n, d] as [1, 1, n, d]."""
    whole("d", d)
    if _api._is_torch(x):
        from heed import _torch

        _torch.check(name, x)
    shape = getattr(x, "shape", None)
    if shape is None:
        raise TypeError(f"{name}: is a {type_name(x)}, expected a tensor or an array of shape [n, {d}]")
    if len(shape) != 2 or shape[1] != d:
        raise ValueError(f"{name}: has shape {list(shape)}, expected [n, {d}] (d is {d})")
    if str(x.dtype).removeprefix("torch.") != "float32":
        raise TypeError(f"{name}: dtype is {x.dtype}, expected float32")
    return x[None, None]


def self_attention(x: Any, output: Any, d: int = 64) -> None:
    """Writes softmax(x x^T / sqrt(d)) x into output. x, output: [n, d], float32, on the same device. No gradient."""
    q = _one_sequence("x", x, d)
    o = _one_sequence("output", output, d)
    if len(x) != len(output):
        raise ValueError(f"output: has {len(output)} rows, x has {len(x)}")
    if _api._is_torch(output) != _api._is_torch(x):
        raise TypeError(f"output: is a {type_name(output)}, expected what x is, a {type_name(x)}")
    if _api._is_torch(x):
        import torch

        if torch.is_grad_enabled() and (output.requires_grad or x.requires_grad):
            which = "output" if output.requires_grad else "x"
            raise ValueError(
                f"{which}: requires a gradient, which writing into output would lose; use heed.attention, or torch.no_grad()"
            )
    _C.forward(o, False, *Arguments(q, q, q, scale=d**-0.5))


def self_attention_backward(grad_output: Any, x: Any, d: int = 64) -> tuple[Any, Any, Any]:
    """(dQ, dK, dV), each [n, d]: the gradients of self_attention with respect to the three places where x enters."""
    q = _one_sequence("x", x, d)
    do = _one_sequence("grad_output", grad_output, d)
    if _api._is_torch(x):
        q, do = q.detach(), do.detach()
    o, lse = _api.attention(q, q, q, return_lse=True)
    dq, dk, dv = _api.attention_backward(do, q, q, q, o, lse)
    return dq[0, 0], dk[0, 0], dv[0, 0]


def fused_attention(Q: Any, K: Any, V: Any) -> Any:
    """softmax(Q K^T / sqrt(head_dim)) V for (batch, heads, seq, head_dim), as a new tensor."""
    return _api.attention(Q, K, V)


def fused_attention_with_mask(Q: Any, K: Any, V: Any, mask: Any = None) -> Any:
    """The same with a mask that broadcasts to (batch, heads, seq, keys): bool (True: attend), numbers that are added to the
    scores, or None."""
    if mask is None:
        return _api.attention(Q, K, V)
    if not hasattr(mask, "dtype"):
        raise TypeError(f"mask: is a {type_name(mask)}, expected None or a tensor: bool, or numbers to be added")
    if str(mask.dtype).removeprefix("torch.") == "bool":
        return _api.attention(Q, K, V, mask=mask)
    return _api.attention(Q, K, V, bias=mask)


def naive_strided_attention(q: Any, k: Any, v: Any, stride: int) -> Any:
    """Strided attention by its definition, in plain PyTorch: full scores, keys off the stride masked out. q, k and v are
    (batch, heads, seq, head_dim)."""
    import torch

    from heed import _torch

    for name, t in (("q", q), ("k", k), ("v", v)):
        _torch.check(name, t)
        if t.dtype not in _torch._FLOATS:
            raise TypeError(f"{name}: dtype is {t.dtype}, expected float32, float16, bfloat16 or float64")
    fit = q.dim() == k.dim() == v.dim() == 4 and q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2]
    if not fit or len({(t.dtype, t.device, t.shape[:-2]) for t in (q, k, v)}) > 1:
        kinds = ", ".join(f"{t.dtype} {list(t.shape)} on {t.device}" for t in (q, k, v))
        raise ValueError(f"q, k, v: are {kinds}; expected one dtype, one device and (batch, heads, seq, head_dim)")
    whole("stride", stride)
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    off = torch.arange(k.shape[-2], device=k.device) % stride != 0
    return torch.softmax(scores.masked_fill(off, float("-inf")), dim=-1) @ v
