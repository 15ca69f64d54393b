"""heed: attention, forward and backward, on CPUs and NVIDIA GPUs.

    o = heed.attention(q, k, v, causal=True)    # PyTorch tensors or NumPy arrays, [batch, heads, sequence, head_dim]

PyTorch is optional: `heed.nn`, `heed.scaled_dot_product_attention` and the names that need it load it when they are used.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from heed import _C
from heed._api import attention, attention_backward, attention_varlen, explain, kernels, set_threads
from heed._classic import (
    fused_attention,
    fused_attention_with_mask,
    naive_strided_attention,
    self_attention,
    self_attention_backward,
)
from heed._kvcache import attention_with_kvcache

if TYPE_CHECKING:
    from heed import distributed as distributed
    from heed import integrations as integrations
    from heed import nn as nn
    from heed._sdpa import scaled_dot_product_attention as scaled_dot_product_attention
    from heed.nn import Attention as Attention
    from heed.nn import CustomStridedAttention as CustomStridedAttention

if sys.modules.get("torch") is not None:
    with contextlib.suppress(ImportError):  # of a torch that is too old: whoever gives heed its tensors is told
        from heed import _torch as _torch

__version__: str = _C.version()

__all__ = [
    "Attention",
    "CustomStridedAttention",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_with_kvcache",
    "explain",
    "fused_attention",
    "fused_attention_with_mask",
    "kernels",
    "naive_strided_attention",
    "nn",
    "scaled_dot_product_attention",
    "self_attention",
    "self_attention_backward",
    "set_threads",
]

# What needs PyTorch, and where it is.
_LATER = {
    "Attention": "heed.nn",
    "CustomStridedAttention": "heed.nn",
    "scaled_dot_product_attention": "heed._sdpa",
}


def __getattr__(name: str) -> object:
    import importlib

    if name in ("nn", "integrations", "bench", "distributed"):
        return importlib.import_module(f"heed.{name}")
    if name in _LATER:
        value = getattr(importlib.import_module(_LATER[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'heed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATER, "distributed", "nn", "integrations"])
