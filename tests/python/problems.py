"""Problems drawn by Hypothesis, with every argument of heed.attention: shapes, types, memory orders, masks and the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

# Relative to the size of the result: several times the rounding of the type.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@dataclass
class Problem:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def differentiable(self) -> dict[str, torch.Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v}
        return named | {name: self.options[name] for name in ("bias", "sink") if name in self.options}

    def require_grad(self) -> list[torch.Tensor]:
        return [t.requires_grad_() for t in self.differentiable.values()]

    @property
    def accuracy(self) -> torch.dtype:
        return accuracy(self.q.dtype, self.options)


def accuracy(dtype: torch.dtype, options: dict[str, Any]) -> torch.dtype:
    """The type whose rounding a result may have: tf32 has as many digits as float16."""
    return torch.float16 if dtype == torch.float32 and options.get("precision") == "tf32" else dtype


class Numbers:
    """Tensors from one drawn seed, in a drawn memory order."""

    def __init__(self, draw: Any, device: str) -> None:
        self.draw, self.device = draw, device
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, change: Any = None, writable: bool = False
    ) -> torch.Tensor:
        """change: what makes something else of the numbers, such as a mask; writable: each element has its own memory."""
        orders = ["packed", "packed", "transposed", "permuted", "padded", "stepped", "offset"]
        order = self.draw(st.sampled_from(orders if writable else [*orders, "expanded"]))
        if order == "transposed" and len(shape) == 4:
            base = self.normal(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
        elif order == "permuted":
            dims = self.draw(st.permutations(range(len(shape))))
            base = self.normal(*(shape[d] for d in dims)).permute([dims.index(d) for d in range(len(shape))])
        elif order == "padded":
            base = self.normal(*shape[:-1], shape[-1] + 3)[..., : shape[-1]]
        elif order == "stepped":
            base = self.normal(*shape[:-1], 2 * shape[-1])[..., ::2]
        elif order == "expanded" and shape[0] > 0:
            base = self.normal(1, *shape[1:]).expand(shape)
        elif order == "offset":
            size = torch.Size(shape).numel()
            base = self.normal(size + 1)[1:].reshape(shape)
        else:
            base = self.normal(*shape)
        return _moved(base, dtype, self.device, change)


def _moved(t: torch.Tensor, dtype: torch.dtype, device: str, change: Any) -> torch.Tensor:
    """Another type and device, with the same strides: .to() would pack it."""
    storage = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    storage = (storage if change is None else change(storage)).to(device=device, dtype=dtype)
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


def dtypes(device: str) -> st.SearchStrategy[torch.dtype]:
    kinds = [torch.float32, torch.float32, torch.float16, torch.bfloat16]
    return st.sampled_from(kinds if device == "cuda" else [*kinds, torch.float64])


@st.composite
def broadcast(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    kept = tuple(n if draw(st.booleans()) else 1 for n in shape)
    return kept[draw(st.integers(0, len(shape) - 1)) :]


def maybe(draw: Any, odds: int = 3) -> bool:
    return draw(st.integers(1, odds)) == odds


@st.composite
def options(draw: Any, n: Numbers, B: int, H: int, S: int, T: int, dtype: torch.dtype) -> dict[str, Any]:
    o: dict[str, Any] = {}
    if draw(st.booleans()):
        o["causal"] = draw(st.sampled_from([True, "bottom_right", "top_left"]))
    if maybe(draw):
        side = st.one_of(st.none(), st.integers(-1, 12))
        o["window"] = draw(st.tuples(side, side))
    if maybe(draw):
        o["stride"] = draw(st.integers(1, 6))
    if maybe(draw):
        least = draw(st.sampled_from([-0.5, 0.5]))
        o["mask"] = n.tensor(draw(broadcast((B, H, S, T))), torch.bool, lambda x: x > least)
    if maybe(draw):
        most = draw(st.sampled_from([1.0, torch.inf]))
        kind = dtype if draw(st.booleans()) or dtype == torch.float64 else torch.float32
        o["bias"] = n.tensor(draw(broadcast((B, H, S, T))), kind, lambda x: x.masked_fill(x > most, -torch.inf))
    if maybe(draw):
        o["scale"] = draw(st.sampled_from([0.0, -0.3125, 0.1875, 1.0]))
    if maybe(draw):
        o["softcap"] = draw(st.sampled_from([0.5, 20.0]))
    if maybe(draw):
        shape = (B, H) if draw(st.booleans()) else (H,)
        o["alibi_slopes"] = n.tensor(shape, torch.float32, torch.Tensor.abs)
    if maybe(draw):
        o["sink"] = n.tensor((H,), torch.float32)
    for name, most in (("lengths_q", S), ("lengths_k", T)):
        if maybe(draw):
            kind = draw(st.sampled_from([torch.int32, torch.int64]))
            o[name] = torch.tensor([draw(st.integers(0, most)) for _ in range(B)], dtype=kind, device=n.device)
    if draw(st.booleans()):
        o["deterministic"] = draw(st.booleans())
    if maybe(draw):
        o["precision"] = draw(st.sampled_from(["exact", "plain", "tf32"]))
    return o


@st.composite
def dropout(draw: Any, device: str) -> dict[str, Any]:
    """With a seed, as a number or in a tensor; or none."""
    if draw(st.booleans()):
        return {}
    seed = draw(st.integers(0, 2**63 - 1))
    rate = draw(st.sampled_from([0.125, 0.5]))
    return {"dropout_p": rate, "dropout_seed": torch.tensor([seed], device=device) if draw(st.booleans()) else seed}


@st.composite
def problems(draw: Any, device: str, plain: bool = False) -> Problem:
    """Small ones of every kind; plain: without options, and not empty."""
    least = 1 if plain else 0
    n = Numbers(draw, device)
    B, G, ratio = draw(st.integers(least, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    size = st.one_of(st.integers(least, 9), st.integers(least, 70))
    S, T = draw(size), draw(size)
    D = draw(st.one_of(st.integers(1, 40), st.sampled_from([8, 16, 32, 64])))
    Dv = draw(st.one_of(st.just(D), st.integers(1, 40)))
    layout = draw(st.sampled_from(["bhsd", "bshd"]))
    dtype = draw(dtypes(device))

    def tensor(heads: int, rows: int, columns: int) -> torch.Tensor:
        return n.tensor((B, rows, heads, columns) if layout == "bshd" else (B, heads, rows, columns), dtype)

    q, k, v = tensor(G * ratio, S, D), tensor(G, T, D), tensor(G, T, Dv)
    chosen = {} if plain else draw(options(n, B, G * ratio, S, T, dtype))
    return Problem(q, k, v, chosen | {"layout": layout})


def check_close(name: str, actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = actual.double(), expected.double()
    endless = expected.isinf()
    assert torch.equal(actual.isinf(), endless), f"{name}: infinities are elsewhere"
    assert torch.equal(actual[endless], expected[endless])
    error = (actual - expected)[~endless].abs()
    size = max(1.0, expected[~endless].abs().max().item() if error.numel() else 1.0)
    assert not error.isnan().any(), f"{name}: NaN"
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= TOLERANCE[dtype] * size, f"{name}: error {worst:.3g} of {size:.3g}"
