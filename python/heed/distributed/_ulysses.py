"""Ulysses: the ranks of a team exchange heads for rows, and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from heed.distributed._link import Link, Message
from heed.distributed._routes import Plan
from heed.distributed._shards import size
from heed.distributed._work import Rooms, on_device


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def places_of(order: torch.Tensor | None, rows: tuple[int, ...]) -> tuple[slice | torch.Tensor, ...]:
    """Where the rows of each of several shards are when all of them have been put in order."""
    ends = [0, *itertools.accumulate(rows)]
    if order is None:
        return tuple(slice(a, b) for a, b in itertools.pairwise(ends))
    return torch.argsort(order).split(list(rows))  # type: ignore[no-untyped-call,no-any-return]


def put(to: torch.Tensor, place: slice | torch.Tensor, rows: torch.Tensor) -> None:
    if isinstance(place, slice):
        to[:, :, place] = rows
    else:
        to.index_copy_(2, on_device(place, to.device), rows)


def take(t: torch.Tensor, place: slice | torch.Tensor) -> torch.Tensor:
    return t[:, :, place] if isinstance(place, slice) else t.index_select(2, on_device(place, t.device))


class Side:
    """Queries or keys of a team: how many rows each of its ranks has, and where they are among all of them."""

    def __init__(self, plan: Plan, queries: bool) -> None:
        shards = plan.q if queries else plan.k
        self.rows = tuple(size(shards[r]) for r in plan.team)
        self.places = places_of((plan.q_ring if queries else plan.k_ring)[1], self.rows)


class Move(NamedTuple):
    """What is to be exchanged: between [B, all heads, own rows, ...] and [B, own heads, the team's rows, ...]."""

    rows: torch.Tensor
    heads: torch.Tensor
    side: Side
    of: tuple[slice, ...]  # which heads each rank of the team gets


def heads_for_rows(link: Link, plan: Plan, rooms: Rooms, moves: list[Move]) -> Iterator[None]:
    """Stops when its messages are under way."""
    me = plan.me % plan.ulysses
    others = [(n, peer) for n, peer in enumerate(plan.team) if n != me]
    sends: list[Message] = [(peer, [m.rows[:, m.of[n]].contiguous() for m in moves]) for n, peer in others]
    arriving = {n: [rooms.rows(m.heads, m.heads.shape[1], m.side.rows[n]) for m in moves] for n, _ in others}
    pending = link.post("heads for rows", sends, [(peer, arriving[n]) for n, peer in others])
    for m in moves:
        put(m.heads, m.side.places[me], m.rows[:, m.of[me]])
    yield
    pending.wait()
    for n, parts in arriving.items():
        for m, t in zip(moves, parts, strict=True):
            put(m.heads, m.side.places[n], t)
            rooms.give(t)


def rows_for_heads(link: Link, plan: Plan, rooms: Rooms, moves: list[Move]) -> Iterator[None]:
    """The way back."""
    me = plan.me % plan.ulysses
    others = [(n, peer) for n, peer in enumerate(plan.team) if n != me]
    sends: list[Message] = [(peer, [take(m.heads, m.side.places[n]).contiguous() for m in moves]) for n, peer in others]
    places = {n: [m.rows[:, m.of[n]] for m in moves] for n, _ in others}
    arriving = {
        n: [t if t.is_contiguous() else rooms.rows(t, *t.shape[1:3]) for t in parts] for n, parts in places.items()
    }
    pending = link.post("rows for heads", sends, [(peer, arriving[n]) for n, peer in others])
    for m in moves:
        m.rows[:, m.of[me]] = take(m.heads, m.side.places[me])
    yield
    pending.wait()
    for n, parts in places.items():
        for to, t in zip(parts, arriving[n], strict=True):
            if to is not t:
                to.copy_(t)
                rooms.give(t)
