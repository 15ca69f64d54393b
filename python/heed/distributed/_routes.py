"""Who has what, and who sends what to whom. P ranks are U x R, rank r * U + u:

    ulysses part    the U ranks of a team exchange heads for rows (all-to-all): each then has the team's rows for 1/U
                    of the heads, and gives results back the same way (_ulysses.py)
    ring part       the R ranks with the same u compute attention over rows that they share; K and V travel
                    (_methods.py)

    ring            U = 1: K and V go round, one step at a time, each step's messages under the step before it
    all_gather      U = 1: all of K and V that a rank sees is brought together, then one computation
    ulysses         R = 1
    ulysses_ring    both, for more ranks than heads
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from heed.distributed._shards import Band, Pieces, by_sequence, in_order, needs, on_stride, pieces_of

METHODS = ("ring", "all_gather", "ulysses", "ulysses_ring")


def ulysses_ranks(method: str, ranks: int, key_heads: int) -> int:
    """U: how many ranks share heads out. As many as divide the ranks and, best, the heads evenly."""
    if method == "ulysses":
        if ranks > key_heads:
            raise ValueError(
                f"method: ulysses gives each rank at least one key head, but there are {ranks} ranks and {key_heads} "
                f"key heads; use 'ulysses_ring'"
            )
        return ranks
    if method != "ulysses_ring":
        return 1
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0 and n <= key_heads]
    return max(divisors, key=lambda n: (key_heads % n == 0, n))


# ---- The plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Who has what, and who sends what to whom: the same on all ranks but for `me`."""

    method: str
    ranks: int
    me: int
    ulysses: int
    q: tuple[Pieces, ...]  # of each rank
    k: tuple[Pieces, ...]  # of each rank, those on the stride
    heads: tuple[slice, ...]  # of each rank of a team: its key heads
    group_size: int  # query heads for each key head
    band: Band
    offset: int

    @property
    def ring(self) -> int:
        return self.ranks // self.ulysses

    @property
    def team(self) -> list[int]:
        first = self.me - self.me % self.ulysses
        return list(range(first, first + self.ulysses))

    def peer(self, place: int) -> int:
        """The rank at that place of this rank's ring."""
        return place % self.ring * self.ulysses + self.me % self.ulysses

    @property
    def place(self) -> int:
        return self.me // self.ulysses

    def query_heads(self, heads: slice) -> slice:
        return slice(heads.start * self.group_size, heads.stop * self.group_size)

    def _together(self, shards: tuple[Pieces, ...]) -> tuple[tuple[Pieces, ...], torch.Tensor | None]:
        """The shard of each place of the ring, all rows of a team; for this rank's own, how they were put in order."""
        u = self.ulysses
        merged = [in_order(shards[n : n + u]) if u > 1 else (shards[n], None) for n in range(0, self.ranks, u)]
        return tuple(pieces for pieces, _ in merged), merged[self.place][1]

    @cached_property
    def q_ring(self) -> tuple[tuple[Pieces, ...], torch.Tensor | None]:
        return self._together(self.q)

    @cached_property
    def k_ring(self) -> tuple[tuple[Pieces, ...], torch.Tensor | None]:
        return self._together(self.k)

    @cached_property
    def wanted(self) -> tuple[tuple[bool, ...], ...]:
        """wanted[r][s]: place r sees some key of place s."""
        q, k = self.q_ring[0], [by_sequence(pieces) for pieces in self.k_ring[0]]
        return tuple(tuple(needs(a, b, self.band, self.offset) for b in k) for a in q)

    def wants(self, place: int, distance: int) -> bool:
        """Whether a place works on the keys of the one that far behind it."""
        return self.wanted[place % self.ring][(place - distance) % self.ring]


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # its indices serve training too
def plan_of(
    method: str, me: int, shards: str, rows: tuple[int, ...], keys: tuple[int, ...], starts: tuple[int, ...] | None,
    band: Band, offset: int, stride: int, query_heads: int, key_heads: int,
) -> tuple[Plan, torch.Tensor | None]:  # fmt: skip
    """The plan, and which keys of this rank are on the stride (None: all)."""
    ranks = len(rows)
    q, k = (pieces_of(shards, sum(n), ranks, n if shards == "contiguous" else None, starts) for n in (rows, keys))
    strided = [on_stride(pieces, stride) for pieces in k]
    team = ulysses_ranks(method, ranks, key_heads)
    ends = [key_heads * n // team for n in range(team + 1)]
    heads = tuple(slice(a, b) for a, b in itertools.pairwise(ends))
    plan = Plan(
        method, ranks, me, team, q, tuple(pieces for pieces, _ in strided), heads, query_heads // key_heads, band,
        offset,
    )  # fmt: skip
    return plan, strided[me][1]
