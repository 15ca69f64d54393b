"""heed.distributed.attention: the arguments, the agreement of all ranks, autograd; and laying tensors out."""

from __future__ import annotations

import hashlib
import itertools
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from heed import _C, _torch
from heed._arguments import Arguments, number, type_name
from heed.distributed import _methods, _plan, _routes, _work
from heed.distributed._link import Link, group_of
from heed.distributed._shards import band, check_shards, pieces_of, size

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_calls: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any = None,
    shards: str = "contiguous",
    method: str = "auto",
    layout: str = "bhsd",
    causal: bool | str = False,
    window: Sequence[int | None] | None = None,
    stride: int = 1,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    return_lse: bool = False,
    fabric: str = "auto",
) -> Any:
    """heed.attention() over sequences of which every rank of a group has a shard of its own. All ranks call it with the
    same options; o is this rank's rows. Differentiable: backward() is a call of all ranks, too.

    q, k, v: as in heed.attention, this rank's rows and keys; shards of any length, also none. float32, float16,
        bfloat16.
    group: a process group, or a DeviceMesh of one dimension; None: all ranks.
    shards: "contiguous", "zigzag" or "striped": how shard() laid the sequence out.
    method: "ring", "all_gather", "ulysses", "ulysses_ring", or "auto": what heed.distributed.plan thinks quickest.
    causal, window, stride, scale, softcap, alibi_slopes, return_lse: as in heed.attention; positions are those of the
        whole sequence. alibi_slopes are the same on all ranks.
    cu_seqlens: [n + 1] whole numbers, the same on all ranks: a packed batch of n sequences, which begin there in the
        stream of all tokens; the batch dimension is 1, and q and k have the same rows.
    fabric: for method="auto": a name of heed.distributed.plan.FABRICS.

    A mismatch between ranks is a DisagreementError on all of them; a rank that does not answer a CommunicationError,
    within the group's time-out. torch.compile does not look inside: it ends a graph before the call and begins one
    behind it.
    """
    link = Link(group, next((t.device for t in (q, k, v) if isinstance(t, torch.Tensor)), torch.device("cpu")))
    count = next(_calls.setdefault(link.group, itertools.count(1)))
    call = f"attention, call {count} of this group"
    with link.told_if_wrong(call):
        window = tuple(window) if isinstance(window, list) else window
        a = _checked(Arguments(q, k, v, layout, causal, window, stride, None, None, scale, softcap, alibi_slopes))
        q, k, v, slopes = a.q, a.k, a.v, a.alibi_slopes
        causal = "top_left" if causal == "top_left" else bool(causal)
        if layout == "bshd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        stride, softcap = operator.index(stride), number("softcap", softcap)
        scale = None if scale is None else number("scale", scale)
        starts = None if cu_seqlens is None else _starts(cu_seqlens, q, k)
        check_shards(shards)
        if method not in ("auto", *_routes.METHODS):
            raise ValueError(
                f"method: is {method!r}, expected 'auto' or one of {', '.join(map(repr, _routes.METHODS))}"
            )
        if fabric != "auto":
            _plan.fabric_of(fabric)
        description = {
            "q": [q.shape[0], q.shape[1], q.shape[3]], "k": list(k.shape[:2]), "v": [v.shape[1], v.shape[3]],
            "dtype": str(q.dtype), "shards": shards, "method": method, "causal": causal,
            "window": None if window is None else [n if n is None else int(n) for n in window], "stride": stride,
            "scale": scale, "softcap": softcap,
            "alibi_slopes": _fingerprint(slopes), "cu_seqlens": _fingerprint(starts), "fabric": fabric,
            "gradients": torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)),
            "rows": q.shape[2], "keys": k.shape[2],
        }  # fmt: skip
    told = link.agree(call, description)
    rows, keys = (tuple(one[name] for one in told) for name in ("rows", "keys"))
    _check_shards(shards, rows, keys, starts)
    limits = band(bool(causal), window)
    if method == "auto":
        method = _plan.choose(q, v, k.shape[1], shards, rows, keys, starts, limits, stride, fabric)
    offset = 0 if starts or causal == "top_left" else sum(keys) - sum(rows)
    plan, on_stride = _routes.plan_of(
        method, link.me, shards, rows, keys, starts, limits, offset, stride, q.shape[1], k.shape[1]
    )  # fmt: skip
    scores = _work.Scores(limits, offset, scale, softcap, slopes)
    if on_stride is not None:
        k, v = (t.index_select(2, _work.on_device(on_stride, t.device)) for t in (k, v))
    o, lse = _Attention.apply(q, k, v, link, plan, scores, count)
    o = o.transpose(1, 2) if layout == "bshd" else o
    return (o, lse) if return_lse else o


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, link: Link, plan: Any, scores: Any, count: int) -> Any:
        q, k, v = (_arrived(t.detach()) for t in (q, k, v))
        (o, lse), saved = _methods.forward(link, plan, q, k, v, scores)
        ctx.save_for_backward(*saved)
        ctx.rest = (link, plan, scores, count)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        link, plan, scores, count = ctx.rest
        saved = ctx.saved_tensors
        told = link.agree(f"backward of call {count} of this group", {"do": do is not None, "dlse": dlse is not None})
        assert told
        if do is None:
            o = saved[3]
            do = o.new_zeros(o.shape[0], *_own_rows(plan, o))
        dlse = None if dlse is None else _arrived(dlse)
        gradients = _methods.backward(link, plan, saved, _arrived(do), dlse, scores)
        return *gradients, None, None, None, None


def _arrived(t: torch.Tensor) -> torch.Tensor:
    """What a collective of PyTorch's is still bringing, an AsyncCollectiveTensor, has no memory of its own."""
    return t.trigger_wait() if hasattr(t, "trigger_wait") else t


def _own_rows(plan: Any, o: torch.Tensor) -> tuple[int, int, int]:
    return plan.heads[-1].stop * plan.group_size, size(plan.q[plan.me]), o.shape[3]


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _checked(a: Arguments) -> Arguments:
    """What heed.attention would make of this rank's part, by itself; an error where that would be one."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("the transforms of torch.func are not implemented over ranks")
    a = _torch._prepare(a)
    for name, t in (("q", a.q), ("k", a.k), ("v", a.v)):
        if is_traceable_wrapper_subclass(t) and not hasattr(t, "trigger_wait"):
            raise TypeError(f"{name}: is a {type_name(t)}, expected a plain tensor: this rank's shard")
    if a.q.dtype not in _DTYPES:
        raise TypeError(f"q: dtype is {a.q.dtype}, expected float32, float16 or bfloat16")
    _C.explain(None, False, *a)
    return a


def _starts(cu_seqlens: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[int, ...]:
    numbers = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens
    try:
        starts = tuple(map(operator.index, numbers))
    except TypeError:
        raise TypeError(f"cu_seqlens: is {cu_seqlens!r}, expected whole numbers") from None
    if starts[:1] != (0,) or any(b < a for a, b in itertools.pairwise(starts)):
        raise ValueError("cu_seqlens: expected numbers that begin with 0 and do not fall")
    if q.shape[0] != 1 or q.shape[2] != k.shape[2]:
        raise ValueError("cu_seqlens: expected a batch of 1 and as many keys as rows on each rank")
    return starts


def _check_shards(shards: str, rows: tuple[int, ...], keys: tuple[int, ...], starts: tuple[int, ...] | None) -> None:
    """After all ranks have said how much they have: an error is raised on all or none."""
    if starts is not None and starts[-1] != sum(rows):
        raise ValueError(f"cu_seqlens: ends with {starts[-1]}, the shards of q have {sum(rows)} rows in all")
    if shards == "contiguous":
        return
    for name, have in (("q", rows), ("k", keys)):
        want = tuple(size(p) for p in pieces_of(shards, sum(have), len(have)))
        if have != want:
            raise ValueError(
                f"{name}: shards have {list(have)} tokens, expected {list(want)}: {shards} shards of {sum(have)} tokens"
            )


def _fingerprint(value: Any) -> str | None:
    if value is None:
        return None
    numbers = value.detach().flatten().tolist() if isinstance(value, torch.Tensor) else list(value)
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]


# ---- Laying tensors out ----------------------------------------------------------------------------------------------


def positions(tokens: int, *, group: Any = None, shards: str = "contiguous", rank: int | None = None) -> torch.Tensor:
    """Which of the tokens a rank has, in the order of its shard: for position embeddings. rank: None for this one."""
    group = group_of(group)
    pieces = pieces_of(shards, tokens, dist.get_world_size(group))[dist.get_rank(group) if rank is None else rank]
    parts = [torch.arange(p.tokens) * p.step + p.first for p in pieces]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def shard(t: torch.Tensor, dim: int, *, group: Any = None, shards: str = "contiguous") -> torch.Tensor:
    """This rank's part of t, which has the whole sequence in dimension dim. Differentiable."""
    return t.index_select(dim, positions(t.shape[dim], group=group, shards=shards).to(t.device))


def unshard(t: torch.Tensor, dim: int, *, group: Any = None, shards: str = "contiguous") -> torch.Tensor:
    """The whole tensor on every rank, from shards that may be of different lengths. Without a gradient."""
    link = Link(group, t.device)
    with link.told_if_wrong("unshard"):
        check_shards(shards)
        have = t.size(dim)
    shape = [n for d, n in enumerate(t.shape) if d != dim % t.dim()]
    told = link.agree("unshard", {"rest": shape, "dtype": str(t.dtype), "shards": shards, "rows": have})
    rows = tuple(one["rows"] for one in told)
    _check_shards(shards, rows, rows, None)
    moved = _arrived(t.detach()).movedim(dim, 0).contiguous()
    parts = [moved if r == link.me else moved.new_empty(n, *moved.shape[1:]) for r, n in enumerate(rows)]
    others = [r for r in range(link.ranks) if r != link.me]
    link.post("unshard", [(r, [moved]) for r in others], [(r, [parts[r]]) for r in others]).wait()
    whole = torch.cat(parts)
    if shards != "contiguous":
        order = [positions(sum(rows), group=group, shards=shards, rank=r) for r in range(link.ranks)]
        whole = torch.empty_like(whole).index_copy_(0, torch.cat(order).to(t.device), whole)
    return whole.movedim(0, dim)
