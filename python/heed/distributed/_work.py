"""What one rank computes: its queries against keys that arrive block by block, each block a set of pieces. Every pair
of pieces that see each other is one call of a kernel (heed.h, "Parts of a sequence"); results are folded together by
their lse, gradients are added up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from heed import _C
from heed import _torch as _torch  # noqa: PLC0414  # the extension learns of PyTorch, whichever came first
from heed._arguments import Arguments
from heed.distributed._shards import Band, Meeting, Pieces, meetings

Tensors = tuple[torch.Tensor, ...]


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # what is kept serves training too
def on_device(order: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copied once: a copy from the host waits for the device."""
    return order.to(device)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _offsets(starts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(starts, dtype=torch.int32, device=device)


class Rooms:
    """Memory of one call that is used again and again. What is new has to be asked of the system, which takes longer
    than to fill it."""

    def __init__(self) -> None:
        self.free: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        kept = self.free.get((tuple(shape), dtype))
        return kept.pop() if kept else torch.empty(shape, dtype=dtype, device=device)

    def rows(
        self, like: torch.Tensor, heads: int, rows: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:  # fmt: skip
        """[B, heads, rows, ...], the rest as in another."""
        return self.take((like.shape[0], heads, rows, *like.shape[3:]), dtype or like.dtype, like.device)

    def give(self, *tensors: torch.Tensor) -> None:
        for t in tensors:
            self.free.setdefault((tuple(t.shape), t.dtype), []).append(t)

    def sums(self, out: torch.Tensor) -> torch.Tensor:
        """Where a result is summed up: in place, if it is float32."""
        return out if out.dtype == torch.float32 else self.take(out.shape, torch.float32, out.device)

    def finish(self, out: torch.Tensor, sums: torch.Tensor) -> None:
        if sums is not out:
            out.copy_(sums)
            self.give(sums)


@dataclass(frozen=True)
class Scores:
    """What the kernels have to know besides positions."""

    band: Band
    offset: int
    scale: float | None
    softcap: float
    alibi_slopes: torch.Tensor | None = None

    def for_heads(self, heads: slice) -> Scores:
        if self.alibi_slopes is None:
            return self
        return Scores(self.band, self.offset, self.scale, self.softcap, self.alibi_slopes[..., heads].contiguous())

    def call(self, m: Meeting, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
        """(positions, *arguments) for the extension."""
        left, right = self.band
        causal = not m.full and left is None and right == 0
        window = None if m.full or causal or (left is None and right is None) else (left, right)
        a = Arguments(
            q, k, v, layout="thd" if m.starts else "bhsd", causal=causal, window=window, scale=self.scale,
            softcap=self.softcap, alibi_slopes=self.alibi_slopes,
        )  # fmt: skip
        if m.starts:
            cu_q, cu_k = (_offsets(s, q.device) for s in m.starts)
            longest = [max(b - a for a, b in itertools.pairwise(s)) for s in m.starts]
            a = a._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest[0], max_seqlen_k=longest[1])
        return ((m.q.first + self.offset, m.q.step, m.k.first, m.k.step), *a)


def _rows(t: torch.Tensor, m: Meeting, rows: slice) -> torch.Tensor:
    """Those rows of [B, H, S, D] or [B, H, S], laid out as the kernel of this meeting has them."""
    t = t[:, :, rows]
    if not m.starts:
        return t
    return t[0].transpose(0, 1) if t.dim() == 4 else t[0]


class Forward:
    """o and lse of some queries over the keys added so far, into memory that the caller has for them."""

    def __init__(self, rooms: Rooms, q: torch.Tensor, pieces: Pieces, out: Tensors, scores: Scores, once: bool) -> None:
        """once: no query will meet keys twice, so that partial results, in float32, are final ones."""
        self.rooms, self.q, self.pieces, self.scores = rooms, q, pieces, scores
        self.out, self.lse = out
        self.o = self.out if once else rooms.sums(self.out)
        self.untouched = {p.at: p for p in pieces}

    def add(self, block: Tensors, pieces: Pieces) -> None:
        """block: K and V."""
        k, v = block
        for m in meetings(self.pieces, pieces, self.scores.band, self.scores.offset):
            self._add(m, _rows(k, m, m.k.rows), _rows(v, m, m.k.rows))

    def _add(self, m: Meeting, k: torch.Tensor, v: torch.Tensor) -> None:
        o, lse = self.o[:, :, m.q.rows], self.lse[:, :, m.q.rows]
        here = [p for p in self.pieces if m.q.at <= p.at < m.q.at + m.q.tokens]
        positions, *arguments = self.scores.call(m, _rows(self.q, m, m.q.rows), k, v)
        if all(p.at in self.untouched for p in here):
            _C.part_forward(_rows(self.o, m, m.q.rows), _rows(self.lse, m, m.q.rows), positions, *arguments)
        else:
            for p in here:
                self._clear(p.at)
            o2, lse2 = (self.rooms.take(t.shape, t.dtype, t.device) for t in (o, lse))
            whole = slice(None)
            _C.part_forward(_rows(o2, m, whole), _rows(lse2, m, whole), positions, *arguments)
            _C.merge(o, lse, o2, lse2)
            self.rooms.give(o2, lse2)
        for p in here:
            self.untouched.pop(p.at, None)

    def _clear(self, at: int) -> None:
        p = self.untouched.pop(at, None)
        if p is not None:
            self.o[:, :, p.rows].zero_()
            self.lse[:, :, p.rows].fill_(-torch.inf)

    def finish(self) -> None:
        for at in list(self.untouched):
            self._clear(at)
        self.rooms.finish(self.out, self.o)


class Backward:
    """dq of some queries; gradients of keys are added to what the caller gives. All in float32."""

    def __init__(
        self, rooms: Rooms, saved: Tensors, do: torch.Tensor, dlse: torch.Tensor | None, pieces: Pieces,
        out: torch.Tensor, scores: Scores,
    ) -> None:  # fmt: skip
        self.rooms = rooms
        self.q, _, _, o, self.lse = saved
        self.do, self.pieces, self.out, self.scores = do, pieces, out, scores
        self.dq = rooms.sums(out).zero_()
        self.delta = rooms.take(self.lse.shape, torch.float32, self.lse.device)
        if o.numel():
            _C.delta(o, do, dlse, self.delta)

    def add(self, block: Tensors, sums: Tensors, pieces: Pieces) -> None:
        """block: K and V; sums: their gradients."""
        for m in meetings(self.pieces, pieces, self.scores.band, self.scores.offset):
            q, do, lse, delta, dq = (_rows(t, m, m.q.rows) for t in (self.q, self.do, self.lse, self.delta, self.dq))
            k_, v_, dk_, dv_ = (_rows(t, m, m.k.rows) for t in (*block, *sums))
            positions, *arguments = self.scores.call(m, q, k_, v_)
            _C.part_backward(do, lse, delta, dq, dk_, dv_, True, positions, *arguments)

    def finish(self) -> None:
        self.rooms.finish(self.out, self.dq)
        self.rooms.give(self.delta)
