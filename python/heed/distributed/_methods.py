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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from heed.distributed._link import Link, Message, Pending, timed
from heed.distributed._shards import Band, Pieces, in_order, meetings, needs, on_stride, pieces_of, size
from heed.distributed._work import Backward, Forward, Scores, Tensors, finish_sums, on_device, sums_for

METHODS = ("ring", "all_gather", "ulysses", "ulysses_ring")
# K and V that are worked on together. On a CPU all that is made for them is then in memory that malloc keeps: above
# 32 MB it asks the system anew each time, and of new memory every page costs a call.
BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}


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


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _places(order: torch.Tensor | None, rows: tuple[int, ...]) -> tuple[slice | torch.Tensor, ...]:
    """Where the rows of each of several shards are when all of them have been put in order."""
    ends = [0, *itertools.accumulate(rows)]
    if order is None:
        return tuple(slice(a, b) for a, b in itertools.pairwise(ends))
    return torch.argsort(order).split(list(rows))  # type: ignore[no-untyped-call,no-any-return]


def _put(to: torch.Tensor, place: slice | torch.Tensor, rows: torch.Tensor) -> None:
    if isinstance(place, slice):
        to[:, :, place] = rows
    else:
        to.index_copy_(2, on_device(place, to.device), rows)


def _take(t: torch.Tensor, place: slice | torch.Tensor) -> torch.Tensor:
    return t[:, :, place] if isinstance(place, slice) else t.index_select(2, on_device(place, t.device))


class Side:
    """Queries or keys of a team: how many rows each of its ranks has, which heads each gets, and where the rows of each
    are among all of them."""

    def __init__(self, plan: Plan, queries: bool) -> None:
        shards = plan.q if queries else plan.k
        self.rows = tuple(size(shards[r]) for r in plan.team)
        self.places = _places((plan.q_ring if queries else plan.k_ring)[1], self.rows)
        self.heads = [plan.query_heads(h) if queries else h for h in plan.heads]


def heads_for_rows(link: Link, plan: Plan, tensors: list[tuple[torch.Tensor, Side]]) -> list[torch.Tensor]:
    """[B, all heads, own rows, ...] to [B, own heads, the team's rows, ...]."""
    me = plan.me % plan.ulysses
    others = [(n, peer) for n, peer in enumerate(plan.team) if n != me]
    sends: list[Message] = [(peer, [t[:, side.heads[n]].contiguous() for t, side in tensors]) for n, peer in others]
    own = [t[:, side.heads[me]] for t, side in tensors]
    arriving = {
        n: [_room(t, t.shape[1], side.rows[n]) for t, (_, side) in zip(own, tensors, strict=True)] for n, _ in others
    }
    pending = link.post("heads for rows", sends, [(peer, arriving[n]) for n, peer in others])
    result = [_room(t, t.shape[1], sum(side.rows)) for t, (_, side) in zip(own, tensors, strict=True)]
    for to, t, (_, side) in zip(result, own, tensors, strict=True):
        _put(to, side.places[me], t)
    pending.wait()
    for n, parts in arriving.items():
        for to, t, (_, side) in zip(result, parts, tensors, strict=True):
            _put(to, side.places[n], t)
    return result


def rows_for_heads(link: Link, plan: Plan, tensors: list[tuple[torch.Tensor, Side]]) -> list[torch.Tensor]:
    """The way back."""
    me = plan.me % plan.ulysses
    others = [(n, peer) for n, peer in enumerate(plan.team) if n != me]
    sends: list[Message] = [
        (peer, [_take(t, side.places[n]).contiguous() for t, side in tensors]) for n, peer in others
    ]
    result = [_room(t, side.heads[-1].stop, side.rows[me]) for t, side in tensors]
    places = {n: [to[:, side.heads[n]] for to, (_, side) in zip(result, tensors, strict=True)] for n, _ in others}
    arriving = {n: [t if t.is_contiguous() else _room(t, *t.shape[1:3]) for t in parts] for n, parts in places.items()}
    pending = link.post("rows for heads", sends, [(peer, arriving[n]) for n, peer in others])
    for to, (t, side) in zip(result, tensors, strict=True):
        to[:, side.heads[me]] = _take(t, side.places[me])
    pending.wait()
    for n, parts in places.items():
        for to, t in zip(parts, arriving[n], strict=True):
            if to is not t:
                to.copy_(t)
    return result


def _room(t: torch.Tensor, heads: int, rows: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(t.shape[0], heads, rows, *t.shape[3:], dtype=dtype or t.dtype, device=t.device)


# ---- What is to be done ----------------------------------------------------------------------------------------------

# A work stops twice: when its first messages are under way, and when it has only messages to wait for.
Work = Iterator[None]


class ForwardTask(NamedTuple):
    """Some heads of q, k and v, and where their o and lse go."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: Scores
    out: Tensors


class BackwardTask(NamedTuple):
    """Some heads of what the forward saved, of the gradients of o and lse, and where those of q, k and v go."""

    saved: Tensors
    do: torch.Tensor
    dlse: torch.Tensor | None
    scores: Scores
    out: Tensors

    @property
    def keys(self) -> Tensors:
        return self.saved[1:3]

    def start(self, plan: Plan) -> Backward:
        return Backward(self.saved, self.do, self.dlse, plan.q_ring[0][plan.place], self.out[0], self.scores)

    def finish(self, backward: Backward, home: Tensors) -> None:
        backward.finish()
        for out, sums in zip(self.out[1:], home, strict=True):
            finish_sums(out, sums)


# ---- Ring ------------------------------------------------------------------------------------------------------------


def _blocks_on_their_way(
    plan: Plan, d: int, own: Tensors, held: Tensors, next_block: Tensors
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
        receives.append((plan.peer(r - 1 if from_neighbour else r - d - 1), next_block))
    return sends, receives


def _block_room(plan: Plan, d: int, like: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """Memory for what is like K and V of the place that far behind."""
    rows = size(plan.k_ring[0][(plan.place - d) % plan.ring])
    return tuple(_room(t, t.shape[1], rows, dtype) for t in like)


def ring_forward(link: Link, plan: Plan, task: ForwardTask) -> Work:
    own: Tensors = (task.k, task.v)
    places = [s for s in range(plan.ring) if plan.wanted[plan.place][s]]
    pieces = plan.q_ring[0][plan.place]
    forward = Forward(task.q, pieces, task.out, task.scores, len(places) <= 1 and _meet_once(plan, pieces, places))
    held = own
    for d in range(plan.ring):
        next_block = _block_room(plan, d + 1, own) if d + 1 < plan.ring and plan.wants(plan.place, d + 1) else ()
        pending = link.post(f"keys of step {d + 1}", *_blocks_on_their_way(plan, d, own, held, next_block))
        if d == 0:
            yield
        if plan.wants(plan.place, d):
            with timed("compute", f"step {d}", task.q.device):
                forward.add(held, plan.k_ring[0][(plan.place - d) % plan.ring])
        pending.wait()
        held = next_block
    forward.finish()


def _meet_once(plan: Plan, pieces: Pieces, places: list[int]) -> bool:
    met = [m.q.at for s in places for m in meetings(pieces, plan.k_ring[0][s], plan.band, plan.offset)]
    return len(met) == len(set(met))


def ring_backward(link: Link, plan: Plan, task: BackwardTask) -> Work:
    r, last = plan.place, plan.ring
    own, backward = task.keys, task.start(plan)
    held = own
    home = tuple(sums_for(t).zero_() for t in task.out[1:])
    mine: Tensors = ()  # the gradients of the block of the step before, with what other ranks added
    for d in range(last + 1):
        next_block = _block_room(plan, d + 1, own) if d + 1 < last and plan.wants(r, d + 1) else ()
        sends, receives = _blocks_on_their_way(plan, d, own, held, next_block) if d < last else ([], [])
        if mine:
            sends.append((plan.peer(r + 1 if d < last and plan.wants(r + 1, d) else r - d + 1), mine))
        works = d < last and plan.wants(r, d)
        arriving = _block_room(plan, d, own, torch.float32) if works and d > 1 and plan.wants(r - 1, d - 1) else ()
        if arriving:
            receives.append((plan.peer(r - 1), arriving))
        ends = d > 1 and plan.wants(r + d - 1, d - 1) and not (d < last and plan.wants(r + d, d))
        returning = _block_room(plan, 0, own, torch.float32) if ends else ()
        if returning:
            receives.append((plan.peer(r + d - 1), returning))
        pending = link.post(f"keys of step {d + 1}, gradients of step {d - 1}", sends, receives)
        if d in (0, last):
            yield
        sums = home if d == 0 else _zeros(held) if works else ()
        if works:
            with timed("compute", f"step {d}", backward.q.device):
                backward.add(held, sums, plan.k_ring[0][(r - d) % last])
        pending.wait()
        _add(sums, arriving)
        _add(home, returning)
        mine, held = (sums if d > 0 else ()), next_block
    task.finish(backward, home)


def _zeros(like: Tensors) -> Tensors:
    return tuple(torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in like)


def _add(to: Tensors, what: Tensors) -> None:
    if what:
        for a, b in zip(to, what, strict=True):
            a += b


# ---- All-gather ------------------------------------------------------------------------------------------------------


def _blocks_from_their_owners(link: Link, plan: Plan, own: Tensors) -> Iterator[tuple[int, Tensors]]:
    """K and V of each place, by how far behind it is; nothing where this one does not see it. The next block is under
    way while one is worked on, the first one when this returns; this place's own is the last."""
    r = plan.place

    def ask(d: int) -> list[tuple[Tensors, Pending]]:
        if d == plan.ring:
            return []
        block = _block_room(plan, d, own) if plan.wants(r, d) else ()
        sends: list[Message] = [(plan.peer(r + d), own)] if plan.wants(r + d, d) else []
        return [(block, link.post(f"keys of the rank {d} behind", sends, [(plan.peer(r - d), block)]))]

    def each(ahead: list[tuple[Tensors, Pending]]) -> Iterator[tuple[int, Tensors]]:
        for d in range(1, plan.ring):
            block, pending = ahead.pop()
            ahead = ask(d + 1)
            pending.wait()
            yield d, block
            del block
        yield 0, own if plan.wants(r, 0) else ()

    return each(ask(1))


def gather_forward(link: Link, plan: Plan, task: ForwardTask) -> Work:
    """All keys in the order of their positions, so that each piece of queries is one call without a merge."""
    r, own = plan.place, (task.k, task.v)
    blocks = _blocks_from_their_owners(link, plan, own)
    yield
    shards = {d: plan.k_ring[0][(r - d) % plan.ring] for d in range(plan.ring) if plan.wants(r, d)}
    key_pieces, order = in_order(tuple(shards.values()))
    rows = tuple(map(size, shards.values()))
    places = dict(zip(shards, _places(order, rows), strict=True))
    all_keys = tuple(_room(t, t.shape[1], sum(rows)) for t in own)
    for d, block in blocks:
        for to, t in zip(all_keys, block, strict=False):  # a place that is not seen has no block
            _put(to, places[d], t)
        del block
    pieces = plan.q_ring[0][r]
    met = [m.q.at for m in meetings(pieces, key_pieces, plan.band, plan.offset)]
    forward = Forward(task.q, pieces, task.out, task.scores, once=len(met) == len(set(met)))
    with timed("compute", "all keys", task.q.device):
        forward.add(all_keys, key_pieces)
    forward.finish()


def gather_backward(link: Link, plan: Plan, task: BackwardTask) -> Work:
    """Gradients only add up: blocks are taken one by one where they lie, and the gradients of each go home under the
    work on the next."""
    r, own = plan.place, task.keys
    blocks = _blocks_from_their_owners(link, plan, own)
    yield
    backward = task.start(plan)
    home = tuple(sums_for(t).zero_() for t in task.out[1:])
    going: Pending | None = None
    arriving: Tensors = ()
    for d, block in blocks:
        sums = _zeros(block) if d else home
        if block:
            with timed("compute", f"keys of the rank {d} behind", backward.q.device):
                backward.add(block, sums, plan.k_ring[0][(r - d) % plan.ring])
        del block
        if d == 0:
            yield
        if going:
            going.wait()
            _add(home, arriving)
        if d:
            arriving = _block_room(plan, 0, own, torch.float32) if plan.wants(r + d, d) else ()
            going = link.post(
                f"gradients for the rank {d} behind", [(plan.peer(r - d), sums)], [(plan.peer(r + d), arriving)]
            )
    task.finish(backward, home)


# ---- Groups of heads -------------------------------------------------------------------------------------------------


def _groups(plan: Plan, k: torch.Tensor, v: torch.Tensor) -> list[tuple[slice, slice]]:
    """Query heads and key heads that are worked on together: as many as make blocks of a good size."""
    bytes_of_head = k.shape[0] * max(map(size, plan.k_ring[0])) * (k.shape[3] + v.shape[3]) * k.element_size()
    together = max(1, BLOCK_BYTES[k.device.type] // max(1, bytes_of_head))
    keys = [slice(n, min(n + together, k.shape[1])) for n in range(0, k.shape[1], together)]
    return [(plan.query_heads(h), h) for h in keys]


def _in_turn(works: Iterator[Work]) -> None:
    """One work after the other: the first messages of the next are sent before the work on this one, its last are
    waited for after it."""

    def started() -> Work | None:
        work = next(works, None)
        if work is not None:
            next(work)
        return work

    before: Work | None = None
    current = started()
    while current is not None:
        following = started()
        next(current, None)
        for _ in before or ():
            pass
        before, current = current, following
    for _ in before or ():
        pass


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
    own = _own_heads(plan, scores)
    o = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    compute = gather_forward if plan.method == "all_gather" else ring_forward
    _in_turn(
        compute(link, plan, ForwardTask(q[:, a], k[:, b].contiguous(), v[:, b].contiguous(), own.for_heads(a),
                                        (o[:, a], lse[:, a])))
        for a, b in _groups(plan, k, v)
    )  # fmt: skip
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
    own, do = _own_heads(plan, scores), do.contiguous()
    q, k, v, o, lse = saved
    dq, dk, dv = gradients = tuple(torch.empty_like(t) for t in (q, k, v))
    compute = gather_backward if plan.method == "all_gather" else ring_backward
    _in_turn(
        compute(link, plan, BackwardTask(
            (q[:, a], k[:, b].contiguous(), v[:, b].contiguous(), o[:, a], lse[:, a]), do[:, a],
            None if dlse is None else dlse[:, a], own.for_heads(a), (dq[:, a], dk[:, b], dv[:, b]),
        ))
        for a, b in _groups(plan, k, v)
    )  # fmt: skip
    if plan.ulysses > 1:
        sides = (queries, keys, keys)
        gradients = tuple(rows_for_heads(link, plan, list(zip(gradients, sides, strict=True))))
    return gradients
