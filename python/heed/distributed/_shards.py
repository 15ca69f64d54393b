"""Who has which tokens. A sequence of T tokens over P ranks, here T = 16 and P = 2:

    contiguous   0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1     any lengths; under a causal mask the last rank has the most work
    zigzag       0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0     2P chunks, rank r has chunks r and 2P-1-r: causal work is even
    striped      0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1     every P-th token: even too, for windows as well

A shard is a list of pieces: tokens at positions first, first + step, ... of one sequence, which lie in rows at, at + 1,
... of the shard. All that the methods do is written over pairs of pieces, one of queries and one of keys, and heed's
kernels take exactly such a pair (heed.h, HEED_ALIGN_POSITION). Packed batches are one stream of tokens with more than
one sequence in it; their pieces end where their sequences do.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

SHARDS = ("contiguous", "zigzag", "striped")


class Piece(NamedTuple):
    sequence: int
    first: int
    step: int
    tokens: int
    at: int

    @property
    def last(self) -> int:
        return self.first + (self.tokens - 1) * self.step

    @property
    def rows(self) -> slice:
        return slice(self.at, self.at + self.tokens)


Pieces = tuple[Piece, ...]


class Band(NamedTuple):
    """Keys from left before to right after a query's position; None: no limit. causal is right = 0."""

    left: int | None
    right: int | None


def band(causal: bool, window: Sequence[int | None] | None) -> Band:
    left, right = (None if side is None or side < 0 else int(side) for side in (window or (None, None)))
    if causal:
        right = 0 if right is None else min(right, 0)
    return Band(left, right)


# ---- Layouts ---------------------------------------------------------------------------------------------------------


def _ends(tokens: int, parts: int) -> list[int]:
    """Where each of the parts ends; the first ones have a token more where they cannot all be equal."""
    return [(tokens // parts) * (n + 1) + min(n + 1, tokens % parts) for n in range(parts)]


def _runs(shards: str, tokens: int, ranks: int, lengths: Sequence[int] | None) -> list[list[tuple[int, int, int]]]:
    """For each rank, (first, step, count) over the whole stream."""
    if shards == "striped":
        return [[(r, ranks, max(0, -(-(tokens - r) // ranks)))] for r in range(ranks)]
    if shards == "zigzag":
        ends = [0, *_ends(tokens, 2 * ranks)]
        chunk = [(ends[n], 1, ends[n + 1] - ends[n]) for n in range(2 * ranks)]
        middle = (ends[ranks - 1], 1, ends[ranks + 1] - ends[ranks - 1])  # the last rank's two chunks are neighbours
        return [*([chunk[r], chunk[2 * ranks - 1 - r]] for r in range(ranks - 1)), [middle]]
    ends = [0]
    for n in lengths if lengths is not None else [b - a for a, b in _pairs([0, *_ends(tokens, ranks)])]:
        ends.append(ends[-1] + n)
    return [[(a, 1, b - a)] for a, b in _pairs(ends)]


def _pairs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(numbers))


def _cut(runs: list[tuple[int, int, int]], starts: Sequence[int]) -> Pieces:
    """Runs of the stream as pieces of its sequences, which begin at starts, the last of them being the stream's end."""
    pieces, at = [], 0
    for first, step, count in runs:
        for sequence, (begin, end) in enumerate(_pairs(starts)):
            if begin >= first + count * step or end <= first:
                continue
            skip = max(0, -(-(begin - first) // step))
            stop = min(count, -(-(end - first) // step))
            if stop > skip:
                pieces.append(Piece(sequence, first + skip * step - begin, step, stop - skip, at + skip))
        at += count
    return tuple(pieces)


@lru_cache(maxsize=256)
def pieces_of(
    shards: str, tokens: int, ranks: int, lengths: tuple[int, ...] | None = None, starts: tuple[int, ...] | None = None
) -> tuple[Pieces, ...]:
    """The shard of each rank. lengths: of contiguous shards, where they are not as even as can be. starts: where the
    sequences of a packed stream begin, and its end."""
    check_shards(shards)
    return tuple(_cut(runs, starts or (0, tokens)) for runs in _runs(shards, tokens, ranks, lengths))


def check_shards(shards: str) -> None:
    if shards not in SHARDS:
        raise ValueError(f"shards: is {shards!r}, expected one of {', '.join(map(repr, SHARDS))}")


def size(pieces: Pieces) -> int:
    return sum(piece.tokens for piece in pieces)


def on_stride(pieces: Pieces, stride: int) -> tuple[Pieces, torch.Tensor | None]:
    """Strided attention sees positions 0, stride, 2 * stride ... only: those of the shard, and the rows where they
    lie."""
    if stride == 1:
        return pieces, None
    kept, rows, at = [], [], 0
    for p in pieces:
        period = stride // math.gcd(p.step, stride)
        skip = next((i for i in range(min(period, p.tokens)) if (p.first + i * p.step) % stride == 0), None)
        if skip is not None:
            count = -(-(p.tokens - skip) // period)
            kept.append(Piece(p.sequence, p.first + skip * p.step, p.step * period, count, at))
            rows.append(torch.arange(p.at + skip, p.at + p.tokens, period))
            at += count
    return tuple(kept), torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # the order serves training too
def in_order(shards: tuple[Pieces, ...]) -> tuple[Pieces, torch.Tensor | None]:
    """The rows of several shards, one after the other, in the order of their positions: in few, long pieces. Also which
    row each of them was, or None where nothing moved."""
    moved, at = [], 0
    for pieces in shards:
        moved += [p._replace(at=p.at + at) for p in pieces]
        at += size(pieces)
    if len(moved) <= 1:
        return tuple(moved), None
    sequence = torch.cat([torch.full((p.tokens,), p.sequence) for p in moved])
    position = torch.cat([torch.arange(p.tokens) * p.step + p.first for p in moved])
    width = int(position.max()) + 1
    order = torch.argsort(sequence * width + position, stable=True)
    sequence, position = sequence[order], position[order]
    found = _progressions(sequence, position, limit=len(moved))
    if found is None:
        return tuple(moved), None
    return found, None if torch.equal(order, torch.arange(len(order))) else order


def _progressions(sequence: torch.Tensor, position: torch.Tensor, limit: int) -> Pieces | None:
    """Sorted positions as pieces; None where there would be more of them than limit."""
    found: list[Piece] = []
    at = 0
    for number, count in zip(
        *(t.tolist() for t in torch.unique_consecutive(sequence, return_counts=True)), strict=True
    ):
        steps = position[at : at + count].diff()
        changes = ((steps[1:] != steps[:-1]).nonzero().flatten() + 1).tolist()  # steps[i] is not steps[i - 1]
        if len(changes) > 2 * limit:
            return None
        begin = 0
        while begin < count:
            later = bisect_right(changes, begin)
            end = changes[later] if later < len(changes) else count - 1
            step = int(steps[begin]) if begin < count - 1 else 1
            found.append(Piece(number, int(position[at + begin]), step, end - begin + 1, at + begin))
            begin = end + 1
        at += count
    return tuple(found) if len(found) <= limit else None


# ---- What sees what --------------------------------------------------------------------------------------------------


def sees(q: Piece, k: Piece, band: Band, offset: int) -> bool:
    """Whether some key of k may be visible to a query of q. offset: what is added to the positions of queries."""
    if q.sequence != k.sequence or not q.tokens or not k.tokens:
        return False
    low = k.first if band.left is None else max(k.first, q.first + offset - band.left)
    high = k.last if band.right is None else min(k.last, q.last + offset + band.right)
    return k.first + -(-(low - k.first) // k.step) * k.step <= high


def by_sequence(pieces: Pieces) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.sequence, []).append(piece)
    return found


def needs(q: Pieces, k: dict[int, list[Piece]], band: Band, offset: int) -> bool:
    return any(sees(a, b, band, offset) for a in q for b in k.get(a.sequence, ()))


class Meeting(NamedTuple):
    """One call of a kernel: queries, keys, and whether all see all, so that no band is needed. More than one sequence:
    where their queries and keys begin, counted from the first; the positions are then those of the first."""

    q: Piece
    k: Piece
    full: bool
    starts: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@lru_cache(maxsize=4096)
def meetings(q: Pieces, k: Pieces, band: Band, offset: int) -> tuple[Meeting, ...]:
    keys = by_sequence(k)
    found = [(a, b) for a in q for b in keys.get(a.sequence, ()) if sees(a, b, band, offset)]
    together: list[list[tuple[Piece, Piece]]] = []
    for pair in found:
        if together and _continues(together[-1][-1], pair):
            together[-1].append(pair)
        else:
            together.append([pair])
    return tuple(_joined(pairs, band, offset) for pairs in together)


def _continues(before: tuple[Piece, Piece], pair: tuple[Piece, Piece]) -> bool:
    """Whether the next sequence lies just behind, so that one ragged call can take both. Bands, and ALiBi, are about
    distances: what matters is that queries and keys are as far apart in both."""
    (q, k), (a, b) = before, pair
    return (
        (a.at, b.at) == (q.at + q.tokens, k.at + k.tokens)
        and (a.step, b.step, a.first - b.first) == (q.step, k.step, q.first - k.first)
        and a.sequence != q.sequence
    )


def _joined(pairs: list[tuple[Piece, Piece]], band: Band, offset: int) -> Meeting:
    q, k = pairs[0]
    if len(pairs) > 1:
        starts = (_starts([a for a, _ in pairs]), _starts([b for _, b in pairs]))
        return Meeting(q._replace(tokens=starts[0][-1]), k._replace(tokens=starts[1][-1]), False, starts)
    below = band.left is None or k.first >= q.last + offset - band.left
    above = band.right is None or k.last <= q.first + offset + band.right
    return Meeting(q, k, below and above)


def _starts(pieces: list[Piece]) -> tuple[int, ...]:
    return (*(p.at - pieces[0].at for p in pieces), pieces[-1].at + pieces[-1].tokens - pieces[0].at)


def visible_keys(pieces: Pieces, lengths: Sequence[int], band: Band, stride: int, offset: int) -> float:
    """How many pairs of a query of these pieces and a key of the whole sequences see each other: the work. Sampled
    where pieces are long, as the count for each query is piecewise linear."""
    total, most = 0.0, max(16, 2048 // max(1, len(pieces)))
    for p in pieces:
        keys = lengths[p.sequence]
        sample = min(p.tokens, most)
        for n in range(sample):
            at = p.first + ((2 * n + 1) * p.tokens // (2 * sample)) * p.step + offset
            low = 0 if band.left is None else max(0, at - band.left)
            high = keys - 1 if band.right is None else min(keys - 1, at + band.right)
            total += max(0, high // stride - (low - 1) // stride) * p.tokens / sample
    return total
