"""How keys and values reach the queries that see them, and gradients their keys, among ranks that share rows.

In step d of the ring, rank r works on the keys of rank r - d. They come from rank r - 1, which had them in the step
before, or from their owner where r - 1 does not need them; what a rank does not see is neither sent to it nor computed.
Gradients of keys go the same way, in float32: each rank adds its own part to what comes in, and sends it on to the next
rank, or home where that one has nothing to add. All-gather takes keys from their owners, and sends gradients to them.
All sums have a fixed order: results have the same bits each time.

Heads are taken in groups, one after the other: the messages at the begin and the end of each are then under the work on
another, and memory is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from heed.distributed._link import Link, Message, Pending, timed
from heed.distributed._routes import Plan
from heed.distributed._shards import Pieces, in_order, meetings, size
from heed.distributed._ulysses import Move, Side, heads_for_rows, places_of, put, rows_for_heads
from heed.distributed._work import Backward, Forward, Rooms, Scores, Tensors

# K and V that are worked on together. On a CPU all that is made for them is then in memory that malloc keeps: above
# 32 MB it asks the system anew each time, and of new memory every page costs a call.
BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}

Work = Iterator[None]  # stops when its first messages are under way, and again when it has only messages to wait for


# ---- What is to be done ----------------------------------------------------------------------------------------------


class ForwardTask(NamedTuple):
    """Some heads of q, k and v, and where their o and lse go."""

    rooms: Rooms
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: Scores
    out: Tensors

    @property
    def keys(self) -> Tensors:
        return self.k.contiguous(), self.v.contiguous()


class BackwardTask(NamedTuple):
    """Some heads of what the forward saved, of the gradients of o and lse, and where those of q, k and v go."""

    rooms: Rooms
    saved: Tensors
    do: torch.Tensor
    dlse: torch.Tensor | None
    scores: Scores
    out: Tensors

    @property
    def keys(self) -> Tensors:
        return self.saved[1].contiguous(), self.saved[2].contiguous()

    def start(self, plan: Plan) -> Backward:
        pieces = plan.q_ring[0][plan.place]
        return Backward(self.rooms, self.saved, self.do, self.dlse, pieces, self.out[0], self.scores)

    def home(self) -> Tensors:
        """For the gradients of this rank's keys."""
        return tuple(self.rooms.sums(t).zero_() for t in self.out[1:])

    def finish(self, backward: Backward, home: Tensors) -> None:
        backward.finish()
        for out, sums in zip(self.out[1:], home, strict=True):
            self.rooms.finish(out, sums)


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


def _block_room(rooms: Rooms, plan: Plan, d: int, like: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """Memory for what is like K and V of the place that far behind."""
    rows = size(plan.k_ring[0][(plan.place - d) % plan.ring])
    return tuple(rooms.rows(t, t.shape[1], rows, dtype) for t in like)


def ring_forward(link: Link, plan: Plan, task: ForwardTask) -> Work:
    own, rooms = task.keys, task.rooms
    places = [s for s in range(plan.ring) if plan.wanted[plan.place][s]]
    pieces = plan.q_ring[0][plan.place]
    once = len(places) <= 1 and _meet_once(plan, pieces, places)
    forward = Forward(rooms, task.q, pieces, task.out, task.scores, once)
    held = own
    for d in range(plan.ring):
        next_block = _block_room(rooms, plan, d + 1, own) if d + 1 < plan.ring and plan.wants(plan.place, d + 1) else ()
        pending = link.post(f"keys of step {d + 1}", *_blocks_on_their_way(plan, d, own, held, next_block))
        if d == 0:
            yield
        if plan.wants(plan.place, d):
            with timed("compute", f"step {d}", task.q.device):
                forward.add(held, plan.k_ring[0][(plan.place - d) % plan.ring])
        pending.wait()
        rooms.give(*(held if d else ()))
        held = next_block
    forward.finish()


def _meet_once(plan: Plan, pieces: Pieces, places: list[int]) -> bool:
    met = [m.q.at for s in places for m in meetings(pieces, plan.k_ring[0][s], plan.band, plan.offset)]
    return len(met) == len(set(met))


def ring_backward(link: Link, plan: Plan, task: BackwardTask) -> Work:
    r, last = plan.place, plan.ring
    own, rooms, backward = task.keys, task.rooms, task.start(plan)
    held, home = own, task.home()
    mine: Tensors = ()  # the gradients of the block of the step before, with what other ranks added
    for d in range(last + 1):
        next_block = _block_room(rooms, plan, d + 1, own) if d + 1 < last and plan.wants(r, d + 1) else ()
        sends, receives = _blocks_on_their_way(plan, d, own, held, next_block) if d < last else ([], [])
        if mine:
            sends.append((plan.peer(r + 1 if d < last and plan.wants(r + 1, d) else r - d + 1), mine))
        works = d < last and plan.wants(r, d)
        arriving: Tensors = ()
        if works and d > 1 and plan.wants(r - 1, d - 1):
            arriving = _block_room(rooms, plan, d, own, torch.float32)
            receives.append((plan.peer(r - 1), arriving))
        ends = d > 1 and plan.wants(r + d - 1, d - 1) and not (d < last and plan.wants(r + d, d))
        returning = _block_room(rooms, plan, 0, own, torch.float32) if ends else ()
        if returning:
            receives.append((plan.peer(r + d - 1), returning))
        pending = link.post(f"keys of step {d + 1}, gradients of step {d - 1}", sends, receives)
        if d in (0, last):
            yield
        sums = home if d == 0 else _zeros(rooms, held) if works else ()
        if works:
            with timed("compute", f"step {d}", backward.q.device):
                backward.add(held, sums, plan.k_ring[0][(r - d) % last])
        pending.wait()
        _add(sums, arriving)
        _add(home, returning)
        rooms.give(*mine, *arriving, *returning, *(held if d else ()))
        mine, held = (sums if d > 0 else ()), next_block
    task.finish(backward, home)


def _zeros(rooms: Rooms, like: Tensors) -> Tensors:
    return tuple(rooms.take(t.shape, torch.float32, t.device).zero_() for t in like)


def _add(to: Tensors, what: Tensors) -> None:
    if what:
        for a, b in zip(to, what, strict=True):
            a += b


# ---- All-gather ------------------------------------------------------------------------------------------------------


def _blocks_from_their_owners(
    link: Link, plan: Plan, rooms: Rooms, own: Tensors
) -> Iterator[tuple[int, Tensors]]:  # fmt: skip
    """K and V of each place, by how far behind it is; nothing where this one does not see it. The next block is under
    way while one is worked on, the first one when this returns; this place's own is the last. A block is good until the
    next one is asked for."""
    r = plan.place

    def ask(d: int) -> list[tuple[Tensors, Pending]]:
        if d == plan.ring:
            return []
        block = _block_room(rooms, plan, d, own) if plan.wants(r, d) else ()
        sends: list[Message] = [(plan.peer(r + d), own)] if plan.wants(r + d, d) else []
        return [(block, link.post(f"keys of the rank {d} behind", sends, [(plan.peer(r - d), block)]))]

    def each(ahead: list[tuple[Tensors, Pending]]) -> Iterator[tuple[int, Tensors]]:
        for d in range(1, plan.ring):
            block, pending = ahead.pop()
            ahead = ask(d + 1)
            pending.wait()
            yield d, block
            rooms.give(*block)
        yield 0, own if plan.wants(r, 0) else ()

    return each(ask(1))


def gather_forward(link: Link, plan: Plan, task: ForwardTask) -> Work:
    """All keys in the order of their positions, so that each piece of queries is one call without a merge."""
    r, own, rooms = plan.place, task.keys, task.rooms
    blocks = _blocks_from_their_owners(link, plan, rooms, own)
    yield
    shards = {d: plan.k_ring[0][(r - d) % plan.ring] for d in range(plan.ring) if plan.wants(r, d)}
    key_pieces, order = in_order(tuple(shards.values()))
    rows = tuple(map(size, shards.values()))
    places = dict(zip(shards, places_of(order, rows), strict=True))
    all_keys = tuple(rooms.rows(t, t.shape[1], sum(rows)) for t in own)
    for d, block in blocks:
        for to, t in zip(all_keys, block, strict=False):  # a place that is not seen has no block
            put(to, places[d], t)
    pieces = plan.q_ring[0][r]
    met = [m.q.at for m in meetings(pieces, key_pieces, plan.band, plan.offset)]
    forward = Forward(rooms, task.q, pieces, task.out, task.scores, once=len(met) == len(set(met)))
    with timed("compute", "all keys", task.q.device):
        forward.add(all_keys, key_pieces)
    forward.finish()
    rooms.give(*all_keys)


def gather_backward(link: Link, plan: Plan, task: BackwardTask) -> Work:
    """Gradients only add up: blocks are taken one by one where they lie, and the gradients of each go home under the
    work on the next."""
    r, own, rooms = plan.place, task.keys, task.rooms
    blocks = _blocks_from_their_owners(link, plan, rooms, own)
    yield
    backward, home = task.start(plan), task.home()
    going: Pending | None = None
    arriving: Tensors = ()
    leaving: Tensors = ()
    for d, block in blocks:
        sums = _zeros(rooms, block) if d else home
        if block:
            with timed("compute", f"keys of the rank {d} behind", backward.q.device):
                backward.add(block, sums, plan.k_ring[0][(r - d) % plan.ring])
        if d == 0:
            yield
        if going:
            going.wait()
            _add(home, arriving)
            rooms.give(*leaving, *arriving)
        if d:
            leaving, arriving = sums, ()
            if plan.wants(r + d, d):
                arriving = _block_room(rooms, plan, 0, own, torch.float32)
            going = link.post(
                f"gradients for the rank {d} behind", [(plan.peer(r - d), sums)], [(plan.peer(r + d), arriving)]
            )
    task.finish(backward, home)


# ---- Groups of heads -------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Heads that are worked on together: query heads and key heads of each rank of a team; and which of this rank's own
    they are, counted from its first."""

    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    own_queries: slice
    own_keys: slice


def _groups(plan: Plan, k: torch.Tensor, v: torch.Tensor) -> list[Group]:
    """As many heads as make blocks of a good size."""
    bytes_of_head = k.shape[0] * max(map(size, plan.k_ring[0])) * (k.shape[3] + v.shape[3]) * k.element_size()
    together = max(1, BLOCK_BYTES[k.device.type] // max(1, bytes_of_head))
    first = plan.heads[plan.me % plan.ulysses].start
    groups = []
    for n in range(0, max(h.stop - h.start for h in plan.heads), together):
        keys = tuple(slice(min(h.start + n, h.stop), min(h.start + n + together, h.stop)) for h in plan.heads)
        mine = keys[plan.me % plan.ulysses]
        own = slice(mine.start - first, mine.stop - first)
        groups.append(Group(tuple(map(plan.query_heads, keys)), keys, plan.query_heads(own), own))
    return groups


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


def _within_team(link: Link, plan: Plan, rooms: Rooms, coming: list[Move], work: Work, going: list[Move]) -> Work:
    """Rows become heads, which are worked on, and heads become rows."""
    yield from heads_for_rows(link, plan, rooms, coming)
    if coming[0].heads.shape[1]:  # where heads cannot be shared out evenly, some rank may have none in the last group
        for _ in work:
            pass
    yield from rows_for_heads(link, plan, rooms, going)


def _given_back(rooms: Rooms, spent: Tensors, work: Work) -> Work:
    yield from work
    rooms.give(*spent)


# ---- Both parts ------------------------------------------------------------------------------------------------------


def _own_heads(plan: Plan, scores: Scores) -> Scores:
    return scores.for_heads(plan.query_heads(plan.heads[plan.me % plan.ulysses]))


def forward(
    link: Link, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
) -> tuple[Tensors, Tensors]:
    """(o, lse), and what backward() is to be given."""
    own, rooms = _own_heads(plan, scores), Rooms()
    compute = gather_forward if plan.method == "all_gather" else ring_forward
    queries, keys, team = Side(plan, True), Side(plan, False), plan.ulysses > 1
    if not team:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    saved: Tensors = (q, k, v, o, lse)
    if team:
        mine = plan.heads[plan.me % plan.ulysses]
        g = mine.stop - mine.start
        h = g * plan.group_size
        saved = tuple(
            rooms.rows(t, n, sum(side.rows))
            for t, n, side in zip(saved, (h, g, g, h, h), (queries, keys, keys, queries, queries), strict=True)
        )

    def work(g: Group) -> Work:
        a, b = g.own_queries, g.own_keys
        q_, k_, v_, o_, lse_ = (t[:, s] for t, s in zip(saved, (a, b, b, a, a), strict=True))
        done = compute(link, plan, ForwardTask(rooms, q_, k_, v_, own.for_heads(a), (o_, lse_)))
        if not team:
            return done
        coming = [Move(q, q_, queries, g.queries), Move(k, k_, keys, g.keys), Move(v, v_, keys, g.keys)]
        going = [Move(o, o_, queries, g.queries), Move(lse, lse_, queries, g.queries)]
        return _within_team(link, plan, rooms, coming, done, going)

    _in_turn(work(g) for g in _groups(plan, saved[1], saved[2]))
    return (o, lse), saved


def backward(
    link: Link, plan: Plan, saved: Tensors, do: torch.Tensor, dlse: torch.Tensor | None, scores: Scores
) -> Tensors:
    """(dq, dk, dv) in the dtypes of q, k and v."""
    own, rooms, do = _own_heads(plan, scores), Rooms(), do.contiguous()
    compute = gather_backward if plan.method == "all_gather" else ring_backward
    queries, keys, team = Side(plan, True), Side(plan, False), plan.ulysses > 1
    me = plan.me % plan.ulysses
    all_heads = plan.query_heads(plan.heads[-1]).stop, plan.heads[-1].stop, plan.heads[-1].stop
    shards = (queries, keys, keys)
    gradients = tuple(
        rooms.rows(t, heads, side.rows[me]) for t, heads, side in zip(saved[:3], all_heads, shards, strict=True)
    )

    def work(g: Group) -> Work:
        a, b = g.own_queries, g.own_keys
        q, k, v, o, lse = (t[:, s] for t, s in zip(saved, (a, b, b, a, a), strict=True))
        given = [do] if dlse is None else [do, dlse]
        if not team:
            out = tuple(t[:, s] for t, s in zip(gradients, (a, b, b), strict=True))
            here = [t[:, a] for t in given]
        else:
            out = tuple(rooms.take(t.shape, t.dtype, t.device) for t in (q, k, v))
            here = [rooms.rows(t, a.stop - a.start, sum(queries.rows)) for t in given]
        task = BackwardTask(rooms, (q, k, v, o, lse), here[0], (*here, None)[1], own.for_heads(a), out)
        if not team:
            return compute(link, plan, task)
        coming = [Move(t, to, queries, g.queries) for t, to in zip(given, here, strict=True)]
        heads = (g.queries, g.keys, g.keys)
        going = [Move(*m) for m in zip(gradients, out, shards, heads, strict=True)]
        done = _within_team(link, plan, rooms, coming, compute(link, plan, task), going)
        return _given_back(rooms, (*here, *out), done)

    _in_turn(work(g) for g in _groups(plan, saved[1], saved[2]))
    return gradients
