"""Modules: multi-head attention with its projections, and strided attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from heed import _api, _torch
from heed._arguments import whole


class CustomStridedAttention(nn.Module):
    """Attention in which every query sees keys 0, stride, 2 * stride, ...

    forward(q, k, v) on (batch, heads, seq, head_dim).
    """

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = whole("stride", stride)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _api.attention(q, k, v, stride=self.stride)

    def extra_repr(self) -> str:
        return f"stride={self.stride}"


def _check_positions(positions: Any, x: torch.Tensor) -> None:
    """That there is one for each row of x, [B, S, ...]."""
    _torch.check("positions", positions)
    if positions.dtype == torch.bool:
        raise TypeError("positions: dtype is torch.bool, expected one of numbers")
    if positions.device != x.device:
        raise ValueError(f"positions: is on {positions.device}, x is on {x.device}")
    B, S = x.shape[:2]
    if positions.shape not in ((S,), (1, S), (B, S)):
        raise ValueError(f"positions: has shape {list(positions.shape)}, expected [{S}] or [{B}, {S}]")


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """Rotary position embedding of x, [B, S, H, D] with D even: columns c and c + D/2 turn by position * base^(-2c/D).

    positions: [S] or [B, S].
    """
    _torch.check("x", x)
    if x.dim() != 4 or x.shape[-1] % 2:
        raise ValueError(f"x: has shape {list(x.shape)}, expected [B, S, H, D] with D even")
    if not x.is_floating_point():
        raise TypeError(f"x: dtype is {x.dtype}, expected one of real numbers")
    _check_positions(positions, x)
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32)
    angle = positions[..., None, None].float() * base ** (-steps / half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _check(name: str, x: Any, layer: nn.Linear) -> None:
    """That x can go through the layer."""
    _torch.check(name, x)
    if x.dim() != 3 or x.shape[-1] != layer.in_features:
        raise ValueError(f"{name}: has shape {list(x.shape)}, expected [batch, sequence, {layer.in_features}]")
    if type(layer) is not nn.Linear:
        return  # what was put in its place, by quantization say, knows itself which types it takes, and where
    if x.device != layer.weight.device:
        raise ValueError(f"{name}: is on {x.device}, the module is on {layer.weight.device}")
    if x.dtype != layer.weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"{name}: dtype is {x.dtype}, the module has {layer.weight.dtype}")


class Attention(nn.Module):
    """Multi-head attention: projections to queries, keys and values, attention over each head, projection back.

        layer = heed.nn.Attention(512, 8, num_kv_heads=2, causal=True, rotary=True)
        y = layer(x)               # [batch, sequence, 512]
        y = layer(x, context)      # cross-attention: keys and values come from context

    embed_dim: the last dimension of x and of the result; context_dim: that of context, embed_dim where None.
    num_heads, num_kv_heads: query heads, and key heads (a divisor; num_heads where None). head_dim: embed_dim / num_heads.
    bias: whether the projections have one. rotary: turn queries and keys by their positions; a number is the base.
    causal, window, stride, softcap: as in heed.attention. dropout: of the attention weights, in training.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = True,
        rotary: bool | float = False,
        causal: bool | str = False,
        window: tuple[int | None, int | None] | None = None,
        stride: int = 1,
        softcap: float = 0.0,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = whole("embed_dim", embed_dim)
        self.num_heads = whole("num_heads", num_heads)
        self.num_kv_heads = whole("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads)
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: is {self.num_kv_heads}, expected a divisor of num_heads, {num_heads}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"num_heads: is {num_heads}, expected a divisor of embed_dim, {embed_dim}, or a head_dim")
        self.head_dim = embed_dim // num_heads if head_dim is None else whole("head_dim", head_dim)
        if rotary and self.head_dim % 2:
            raise ValueError(f"rotary: head_dim is {self.head_dim}, expected an even one")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout: is {dropout}, expected 0 or more and less than 1")
        self.rotary = 10000.0 if rotary is True else float(rotary)
        self.causal, self.window, self.softcap = causal, window, softcap
        self.stride, self.dropout = whole("stride", stride), dropout

        context_dim = embed_dim if context_dim is None else whole("context_dim", context_dim)
        made = {"bias": bias, "device": device, "dtype": dtype}
        self.q = nn.Linear(embed_dim, self.num_heads * self.head_dim, **made)
        self.kv = nn.Linear(context_dim, 2 * self.num_kv_heads * self.head_dim, **made)
        self.out = nn.Linear(self.num_heads * self.head_dim, embed_dim, **made)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        *,
        mask: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [B, S, embed_dim]; context: [B, T, context_dim], x where None. The result is [B, S, embed_dim].

        mask, bias: as in heed.attention, broadcastable to [B, heads, S, T]. lengths: [B], how many keys of each sequence
        count. positions: [S] or [B, S], for rotary without a context; 0, 1, 2, ... where None.
        """
        source = x if context is None else context
        _check("x", x, self.q)
        _check("x" if context is None else "context", source, self.kv)
        if positions is not None:
            if not self.rotary or context is not None:
                why = "without rotary" if not self.rotary else "with a context"
                raise ValueError(f"positions: is given {why}, expected None")
            _check_positions(positions, x)
        q = self.q(x).unflatten(-1, (self.num_heads, self.head_dim))
        k, v = self.kv(source).unflatten(-1, (2, self.num_kv_heads, self.head_dim)).unbind(-3)
        if self.rotary:
            rows = torch.arange(x.shape[-2], device=x.device) if positions is None else positions
            keys = torch.arange(source.shape[-2], device=x.device) if positions is None else positions
            q, k = rotate(q, rows, self.rotary), rotate(k, keys, self.rotary)
        o = _api.attention(
            q,
            k,
            v,
            layout="bshd",
            causal=self.causal,
            window=self.window,
            stride=self.stride,
            softcap=self.softcap,
            mask=mask,
            bias=bias,
            lengths_k=lengths,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(o.flatten(-2))

    def extra_repr(self) -> str:
        said = [f"{self.embed_dim}, {self.num_heads}", f"head_dim={self.head_dim}"]
        if self.num_kv_heads != self.num_heads:
            said.append(f"num_kv_heads={self.num_kv_heads}")
        for name, default in (("causal", False), ("window", None), ("stride", 1), ("rotary", 0.0), ("dropout", 0.0)):
            if getattr(self, name) != default:
                said.append(f"{name}={getattr(self, name)}")
        return ", ".join(said)
