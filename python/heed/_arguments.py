"""What is to be computed: the arguments of every call, in the order of the extension (`enum argument` in call.h)."""

from __future__ import annotations

from typing import Any, NamedTuple


class Arguments(NamedTuple):
    q: Any
    k: Any
    v: Any
    layout: str = "bhsd"
    causal: bool | str = False
    window: Any = None
    stride: int = 1
    mask: Any = None
    bias: Any = None
    scale: float | None = None
    softcap: float = 0.0
    alibi_slopes: Any = None
    sink: Any = None
    dropout_p: float = 0.0
    dropout_seed: Any = None
    lengths_q: Any = None
    lengths_k: Any = None
    deterministic: bool = True
    precision: str = "exact"
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    block_table: Any = None


# Those that are tensors where they are given; dropout_seed may also be a number.
TENSORS = (
    "q",
    "k",
    "v",
    "mask",
    "bias",
    "alibi_slopes",
    "sink",
    "dropout_seed",
    "lengths_q",
    "lengths_k",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "block_table",
)
INTEGERS = ("lengths_q", "lengths_k", "cu_seqlens_q", "cu_seqlens_k", "block_table")
PER_HEAD = ("alibi_slopes", "sink")


def type_name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
