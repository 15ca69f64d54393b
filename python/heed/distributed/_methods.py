"""How keys and values reach the queries that see them. P ranks are U x R, rank r * U + u:

    ulysses part    the U ranks of a team exchange heads for rows (all-to-all): each then has the team's rows for 1/U
                    of the heads, and gives results back the same way
    ring part       the R ranks with the same u compute attention over rows that they share; K and V travel

    ring            U = 1: K and V go round, one step at a time, each step's messages under the step before it
    all_gather      U = 1: all of K and V that a rank sees is brought together, then one computation
    ulysses         R = 1
    ulysses_ring    both, for more ranks than heads

In step d of the ring, rank r works on the keys of rank r - d. They come from rank r - 1, which had them in the step
before, or from their owner where r - 1 does not need them; what a rank does not see is neither sent to it nor computed.
Gradients of keys go the same way, in float32: each rank adds its own part to what comes in, and sends it on to the next
rank, or home where that one has nothing to add. All sums have a fixed order: results have the same bits each time.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from heed.distributed._link import Link, Message, Pending, timed
from heed.distributed._shards import Band, Pieces, in_order, meetings, needs, on_stride, pieces_of, size
from heed.distributed._work import Backward, Forward, Scores, Tensors, on_device

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
        q, k = self.q_ring[0], self.k_ring[0]
        return tuple(tuple(needs(a, b, self.band, self.offset) for b in k) for a in q)

    def wants(self, place: int, distance: int) -> bool:
        """Whether a place works on the keys of the one that far behind it."""
        return self.wanted[place % self.ring][(place - distance) % self.ring]


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # its indices serve training too
def plan_of(
    method: str, me: int, shards: str, rows: tuple[int, ...], keys: tuple[int, ...], starts: tuple[int, ...] | None,
    band: Band, stride: int, query_heads: int, key_heads: int,
) -> tuple[Plan, torch.Tensor | None]:  # fmt: skip
    """The plan, and which keys of this rank are on the stride (None: all)."""
    ranks = len(rows)
    q, k = (pieces_of(shards, sum(n), ranks, n if shards == "contiguous" else None, starts) for n in (rows, keys))
    strided = [on_stride(pieces, stride) for pieces in k]
    team = ulysses_ranks(method, ranks, key_heads)
    ends = [key_heads * n // team for n in range(team + 1)]
    heads = tuple(slice(a, b) for a, b in itertools.pairwise(ends))
    offset = 0 if starts else sum(keys) - sum(rows)
    plan = Plan(
        method, ranks, me, team, q, tuple(pieces for pieces, _ in strided), heads, query_heads // key_heads, band,
        offset,
    )  # fmt: skip
    return plan, strided[me][1]


# ---- Ulysses: heads for rows -----------------------------------------------------------------------------------------


def _reordered(t: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return t if order is None else t.index_select(2, on_device(order, t.device))


def _unordered(t: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return t if order is None else torch.empty_like(t).index_copy_(2, on_device(order, t.device), t)


class Side:
    """Queries or keys of a team: how many rows each of its ranks has, which heads each gets, and the order of all
    rows."""

    def __init__(self, plan: Plan, queries: bool) -> None:
        shards = plan.q if queries else plan.k
        self.order = (plan.q_ring if queries else plan.k_ring)[1]
        self.rows = [size(shards[r]) for r in plan.team]
        self.heads = [plan.query_heads(h) if queries else h for h in plan.heads]


def heads_for_rows(link: Link, plan: Plan, tensors: list[tuple[torch.Tensor, Side]]) -> list[torch.Tensor]:
    """[B, all heads, own rows, ...] to [B, own heads, the team's rows, ...]."""
    me = plan.me % plan.ulysses
    sends: list[Message] = [
        (peer, [t[:, side.heads[n]].contiguous() for t, side in tensors]) for n, peer in enumerate(plan.team) if n != me
    ]
    parts = [
        [
            t[:, side.heads[me]] if n == me else _room(t, side.heads[me].stop - side.heads[me].start, side.rows[n])
            for n in range(plan.ulysses)
        ]
        for t, side in tensors
    ]
    receives: list[Message] = [(peer, [p[n] for p in parts]) for n, peer in enumerate(plan.team) if n != me]
    link.post("heads for rows", sends, receives).wait()
    return [_reordered(torch.cat(p, dim=2), side.order) for p, (_, side) in zip(parts, tensors, strict=True)]


def rows_for_heads(link: Link, plan: Plan, tensors: list[tuple[torch.Tensor, Side]]) -> list[torch.Tensor]:
    """The way back."""
    me = plan.me % plan.ulysses
    split = [_unordered(t, side.order).split(side.rows, dim=2) for t, side in tensors]  # type: ignore[no-untyped-call]
    sends: list[Message] = [(peer, [s[n].contiguous() for s in split]) for n, peer in enumerate(plan.team) if n != me]
    parts = [
        [s[me] if n == me else _room(t, h.stop - h.start, side.rows[me]) for n, h in enumerate(side.heads)]
        for s, (t, side) in zip(split, tensors, strict=True)
    ]
    receives: list[Message] = [(peer, [p[n] for p in parts]) for n, peer in enumerate(plan.team) if n != me]
    link.post("rows for heads", sends, receives).wait()
    return [torch.cat(p, dim=1) for p in parts]


def _room(t: torch.Tensor, heads: int, rows: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(t.shape[0], heads, rows, *t.shape[3:], dtype=dtype or t.dtype, device=t.device)


# ---- Ring ------------------------------------------------------------------------------------------------------------


def _blocks_on_their_way(
    plan: Plan, d: int, own: Tensors, held: Tensors, room: Tensors
) -> tuple[list[Message], list[Message]]:
    """Step d's messages of K and V for step d + 1: held is the block of step d."""
    r = plan.place
    sends: list[Message] = []
    receives: list[Message] = []
    if d + 1 == plan.ring:
        return [], []
    if plan.wants(r + 1, d + 1) and (d == 0 or plan.wants(r, d)):
        sends.append((plan.peer(r + 1), held))
    if d > 0 and plan.wants(r + d + 1, d + 1) and not plan.wants(r + d, d):  # the one before has no use for it
        sends.append((plan.peer(r + d + 1), own))
    if plan.wants(r, d + 1):
        from_neighbour = d == 0 or plan.wants(r - 1, d)
        receives.append((plan.peer(r - 1 if from_neighbour else r - d - 1), room))
    return sends, receives


def _block_room(plan: Plan, d: int, like: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """Memory for what is like K and V of the place that far behind."""
    rows = size(plan.k_ring[0][(plan.place - d) % plan.ring])
    return tuple(_room(t, t.shape[1], rows, dtype) for t in like)


def ring_forward(link: Link, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> Tensors:
    places = [s for s in range(plan.ring) if plan.wanted[plan.place][s]]
    pieces = plan.q_ring[0][plan.place]
    forward = Forward(q, pieces, v.shape[3], scores, once=len(places) <= 1 and _meet_once(plan, pieces, places))
    own: Tensors = (k, v)
    held = own
    for d in range(plan.ring):
        room = _block_room(plan, d + 1, own) if d + 1 < plan.ring and plan.wants(plan.place, d + 1) else ()
        pending = link.post(f"keys of step {d + 1}", *_blocks_on_their_way(plan, d, own, held, room))
        if plan.wants(plan.place, d):
            with timed("compute", f"step {d}", q.device):
                forward.add(held, plan.k_ring[0][(plan.place - d) % plan.ring])
        pending.wait()
        held = room
    return forward.result()


def _meet_once(plan: Plan, pieces: Pieces, places: list[int]) -> bool:
    met = [m.q.at for s in places for m in meetings(pieces, plan.k_ring[0][s], plan.band, plan.offset)]
    return len(met) == len(set(met))


def ring_backward(link: Link, plan: Plan, saved: Tensors, backward: Backward) -> Tensors:
    r, last = plan.place, plan.ring
    own: Tensors = saved[1:3]
    held = own
    home = _zeros(own)
    mine: Tensors = ()  # the gradients of the block of the step before, with what other ranks added
    for d in range(last + 1):
        room = _block_room(plan, d + 1, own) if d + 1 < last and plan.wants(r, d + 1) else ()
        sends, receives = _blocks_on_their_way(plan, d, own, held, room) if d < last else ([], [])
        if mine:
            sends.append((plan.peer(r + 1 if d < last and plan.wants(r + 1, d) else r - d + 1), mine))
        works = d < last and plan.wants(r, d)
        arriving = _block_room(plan, d, own, torch.float32) if works and d > 1 and plan.wants(r - 1, d - 1) else ()
        if arriving:
            receives.append((plan.peer(r - 1), arriving))
        ends = d > 1 and plan.wants(r + d - 1, d - 1) and not (d < last and plan.wants(r + d, d))
        returning = tuple(torch.empty_like(t) for t in home) if ends else ()
        if returning:
            receives.append((plan.peer(r + d - 1), returning))
        pending = link.post(f"keys of step {d + 1}, gradients of step {d - 1}", sends, receives)
        sums = home if d == 0 else _zeros(held) if works else ()
        if works:
            with timed("compute", f"step {d}", backward.q.device):
                backward.add(held, sums, plan.k_ring[0][(r - d) % last])
        pending.wait()
        _add(sums, arriving)
        _add(home, returning)
        mine, held = (sums if d > 0 else ()), room
    return backward.dq, *home


def _zeros(like: Tensors) -> Tensors:
    return tuple(torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in like)


def _add(to: Tensors, what: Tensors) -> None:
    if what:
        for a, b in zip(to, what, strict=True):
            a += b


# ---- All-gather ------------------------------------------------------------------------------------------------------


def _keys_from_their_owners(link: Link, plan: Plan, own: Tensors) -> tuple[dict[int, Tensors], dict[int, Pending]]:
    """K and V of all places that this one sees, by how far behind they are, its own among them; and their messages, all
    of them posted."""
    r = plan.place
    blocks = {d: _block_room(plan, d, own) if d else own for d in range(plan.ring) if plan.wants(r, d)}
    coming = {}
    for d in range(1, plan.ring):
        sends: list[Message] = [(plan.peer(r + d), own)] if plan.wants(r + d, d) else []
        receives: list[Message] = [(plan.peer(r - d), blocks[d])] if d in blocks else []
        coming[d] = link.post(f"keys of the rank {d} behind", sends, receives)
    return blocks, coming


def gather_forward(
    link: Link, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
) -> Tensors:
    """All keys in the order of their positions, so that each piece of queries is one call without a merge."""
    own: Tensors = (k, v)
    blocks, coming = _keys_from_their_owners(link, plan, own)
    for pending in coming.values():
        pending.wait()
    key_pieces, order = in_order(tuple(plan.k_ring[0][(plan.place - d) % plan.ring] for d in blocks))
    all_keys = tuple(
        _reordered(torch.cat([block[n] for block in blocks.values()], dim=2), order) if blocks else own[n][:, :, :0]
        for n in (0, 1)
    )
    pieces = plan.q_ring[0][plan.place]
    met = [m.q.at for m in meetings(pieces, key_pieces, plan.band, plan.offset)]
    forward = Forward(q, pieces, v.shape[3], scores, once=len(met) == len(set(met)))
    with timed("compute", "all keys", q.device):
        forward.add(all_keys, key_pieces)
    return forward.result()


def gather_backward(link: Link, plan: Plan, saved: Tensors, backward: Backward) -> Tensors:
    """Gradients only add up: blocks are taken one by one where they lie, and the gradients of each go home under the
    work on the next, this rank's own being the last."""
    r, own = plan.place, saved[1:3]
    blocks, coming = _keys_from_their_owners(link, plan, own)
    home = _zeros(own)
    going: Pending | None = None
    arriving: Tensors = ()
    for d in (*range(1, plan.ring), 0):
        block = blocks.pop(d, ())
        sums = home if d == 0 else _zeros(block)
        if d in coming:
            coming.pop(d).wait()
        if block:
            with timed("compute", f"keys of the rank {d} behind", backward.q.device):
                backward.add(block, sums, plan.k_ring[0][(r - d) % plan.ring])
        if going:
            going.wait()
            _add(home, arriving)
        if d:
            arriving = tuple(torch.empty_like(t) for t in home) if plan.wants(r + d, d) else ()
            going = link.post(
                f"gradients for the rank {d} behind", [(plan.peer(r - d), sums)], [(plan.peer(r + d), arriving)]
            )
    return backward.dq, *home


# ---- Both parts ------------------------------------------------------------------------------------------------------


def _own_heads(plan: Plan, scores: Scores) -> Scores:
    return scores.for_heads(plan.query_heads(plan.heads[plan.me % plan.ulysses]))


def forward(
    link: Link, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
) -> tuple[Tensors, Tensors]:
    """(o, lse), and what backward() is to be given."""
    queries, keys = Side(plan, True), Side(plan, False)
    if plan.ulysses > 1:
        q, k, v = heads_for_rows(link, plan, [(q, queries), (k, keys), (v, keys)])
    else:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    compute = gather_forward if plan.method == "all_gather" else ring_forward
    o, lse = compute(link, plan, q, k, v, _own_heads(plan, scores))
    saved = (q, k, v, o, lse)
    if plan.ulysses > 1:
        o, lse = rows_for_heads(link, plan, [(o, queries), (lse, queries)])
    return (o, lse), saved


def backward(
    link: Link, plan: Plan, saved: Tensors, do: torch.Tensor, dlse: torch.Tensor | None, scores: Scores
) -> Tensors:
    """(dq, dk, dv) in the dtypes of q, k and v."""
    queries, keys = Side(plan, True), Side(plan, False)
    if plan.ulysses > 1:
        moved = heads_for_rows(link, plan, [(t, queries) for t in (do, dlse) if t is not None])
        do, dlse = moved[0], moved[1] if dlse is not None else None
    own = _own_heads(plan, scores)
    work = Backward(saved, do, dlse, plan.q_ring[0][plan.place], own)
    compute = gather_backward if plan.method == "all_gather" else ring_backward
    gradients = tuple(g.to(t.dtype) for g, t in zip(compute(link, plan, saved, work), saved[:3], strict=True))
    if plan.ulysses > 1:
        sides = (queries, keys, keys)
        gradients = tuple(rows_for_heads(link, plan, list(zip(gradients, sides, strict=True))))
    return gradients
