"""What is to be computed: the arguments of every call, in the order of the extension (`enum argument` in call.h)."""

from __future__ import annotations

import operator
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


_FIELDS = Arguments._fields


def replace(a: Arguments, changes: dict[str, Any]) -> Arguments:
    """a._replace(**changes), which torch.compile of 2.6 does not look into."""
    return Arguments(*map(changes.get, _FIELDS, a))


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


def whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: is {value!r}, expected a whole number")
    if not 1 <= value < 1 << 63:
        raise ValueError(f"{name}: is {value}, expected 1 or more, in 64 bits")
    return value


def seed_of(value: Any) -> Any:
    """A whole number of NumPy's as one of Python's. Tensors and arrays, which may be on a GPU, stay what they are."""
    if isinstance(value, int) or not hasattr(value, "__index__") or hasattr(value, "__dlpack__"):
        return value
    return operator.index(value)


def flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    try:
        return bool(value)
    except Exception:  # a tensor of many elements says RuntimeError
        raise TypeError(f"{name}: is a {type_name(value)}, expected True or False") from None


def number(name: str, value: Any) -> float:
    if isinstance(value, float):
        return value
    try:
        if not isinstance(value, str):
            return float(value)
    except Exception:  # whatever it is that its __float__() says
        pass
    raise TypeError(f"{name}: is {value!r}, expected a number")


def drops(a: Arguments) -> bool:
    """Whether the call has dropout."""
    return number("dropout_p", a.dropout_p) != 0
