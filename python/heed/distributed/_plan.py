"""What each method costs: a model of time, bytes and memory for one rank, the busiest. docs/distributed.md derives
it."""

from __future__ import annotations

import functools
import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from heed.distributed._methods import BLOCK_BYTES
from heed.distributed._routes import METHODS, ulysses_ranks
from heed.distributed._shards import Band, by_sequence, needs, on_stride, pieces_of, size, visible_keys

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
TABLE = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class Fabric:
    """Between two ranks of different nodes; inside a node it is `inside`, which is a fabric as well."""

    bytes_per_second: float  # what a rank can send, and receive at the same time, in practice
    latency: float  # seconds for a message
    inside: str | None = "nvlink"
    overlaps: bool = True  # False: the processor that computes is the one that copies


# Nine tenths of what is printed on the box: 450, 50 and 12.5 GB/s each way for each GPU.
FABRICS = {
    "nvlink": Fabric(405e9, 5e-6, inside=None),
    "infiniband": Fabric(45e9, 10e-6),
    "ethernet": Fabric(11e9, 30e-6),
    # Gloo between processes of one machine; see measured.json
    "loopback": Fabric(1e9, 500e-6, inside=None, overlaps=False),
}


@dataclass(frozen=True)
class Task:
    """Attention of one layer over all ranks."""

    ranks: int
    tokens: int
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    dtype: str = "bf16"
    batch: int = 1
    shards: str = "zigzag"
    band: Band = Band(None, 0)  # noqa: RUF009
    stride: int = 1
    lengths: tuple[int, ...] | None = None  # of contiguous shards
    starts: tuple[int, ...] | None = None  # of packed sequences


@dataclass(frozen=True)
class Machine:
    """flops: forward and backward, of one rank; copy: bytes per second of memory, read and written."""

    forward_flops: float
    backward_flops: float
    copy: float
    fabric: Fabric
    inside: Fabric | None
    node: int = 8
    call: float = 10e-6  # seconds to start a kernel
    block: int = BLOCK_BYTES["cuda"]  # of K and V that are worked on together
    splits: bool = True  # kernels keep the two halves of each float32 in their workspace


@dataclass(frozen=True)
class Cost:
    """Of one rank, the busiest. Times in seconds, sizes in bytes; forward and backward."""

    method: str
    ulysses: int  # ranks that share heads out; 1: none
    flops: tuple[float, float]
    seconds: tuple[float, float]
    compute: tuple[float, float]  # seconds of work alone
    sent: tuple[float, float]
    memory: tuple[float, float]  # beyond the shards of q, k, v, o and their gradients
    blocks: int  # how many other ranks' keys are seen

    @property
    def bandwidth(self) -> float:
        """Bytes per second that would hide all messages of the forward under its work."""
        return self.sent[0] / self.compute[0] if self.compute[0] else math.inf


# ---- The model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one shard: of queries, of keys and values, of float32 gradients of those."""

    q: float
    o: float
    kv: float
    dkv: float
    rows: int


def _sizes(task: Task, rows: int, keys: int) -> _Sizes:
    e, b = BYTES[task.dtype], task.batch
    wide = b * keys * task.key_heads * (task.head_dim + task.value_dim)
    q, o = (b * rows * task.heads * n * e for n in (task.head_dim, task.value_dim))
    return _Sizes(q, o, wide * e, wide * 4, rows)


def _sample(ranks: int) -> list[int]:
    return sorted({0, ranks // 4, ranks // 2, ranks - 1} if ranks > 16 else range(ranks))


@functools.lru_cache(maxsize=256)
def _work(task: Task) -> tuple[float, int, int, int]:
    """Of the busiest rank: pairs of a query and a key that see each other, other ranks' shards that it sees; and the
    largest shard of queries and of keys. Of many ranks a few are looked at."""
    q = pieces_of(task.shards, task.tokens, task.ranks, task.lengths, task.starts)
    k = [on_stride(pieces, task.stride)[0] for pieces in q]
    starts = task.starts or (0, task.tokens)
    lengths = [b - a for a, b in itertools.pairwise(starts)]
    some = _sample(task.ranks)
    pairs = max(visible_keys(q[r], lengths, task.band, task.stride, 0) for r in some)
    by = [by_sequence(pieces) for pieces in k]
    blocks = max(sum(needs(q[r], by[s], task.band, 0) for s in range(task.ranks) if s != r) for r in some)
    return pairs, blocks, max(map(size, q)), max(map(size, k))


def _transfer(machine: Machine, amount: float, across: bool) -> float:
    fabric = machine.fabric if across or machine.inside is None else machine.inside
    return fabric.latency + amount / fabric.bytes_per_second


def cost(task: Task, method: str, machine: Machine) -> Cost:
    pairs, blocks, rows, keys = _work(task)
    size = _sizes(task, rows, keys)
    team = ulysses_ranks(method, task.ranks, task.key_heads)
    ring = task.ranks // team
    if team > 1:
        blocks = min(blocks, ring - 1) if ring > 1 else 0
    heads = math.ceil(task.key_heads / team) * team / task.key_heads  # heads that cannot be shared out evenly
    wide = task.batch * task.heads * pairs * heads
    work = [2 * (task.head_dim + task.value_dim) * wide, 2 * (3 * task.head_dim + 2 * task.value_dim) * wide]
    compute = [work[0] / machine.forward_flops, work[1] / machine.backward_flops]
    partial = size.rows * task.batch * task.heads * task.value_dim * 4
    gathers = method == "all_gather"
    merges = 0 if gathers else blocks
    compute[0] += merges * 3 * partial / machine.copy + (merges + 1) * machine.call
    compute[1] += blocks * 3 * size.dkv / machine.copy + (blocks + 1) * machine.call  # adding up

    swap = (team - 1) / team
    exchanged = [swap * (size.q + size.kv + size.o), swap * (size.o + size.q + size.kv)]
    travelled = [blocks * size.kv, blocks * (size.kv + size.dkv)]
    across = task.ranks > machine.node and machine.inside is not None
    team_across = team > machine.node and machine.inside is not None
    a2a = [2 * _transfer(machine, x / 2, team_across) + 2 * x / machine.copy if team > 1 else 0.0 for x in exchanged]
    overlaps = (machine.fabric if across or machine.inside is None else machine.inside).overlaps
    together = max(1, int(machine.block * task.key_heads // max(1.0, team * size.kv)))
    groups = math.ceil(math.ceil(task.key_heads / team) / together)
    bare = 1 / groups if overlaps else 1.0  # of messages at the begin or end: all but one group's are under work
    if gathers:
        gather = bare * _transfer(machine, travelled[0], across) if blocks else 0.0
        moved = [
            max(compute[0] + gather, gather / bare) + 2 * travelled[0] / machine.copy,
            gather + _travel(machine, compute[1], blocks, blocks * size.dkv, across, overlaps),
        ]
    else:
        moved = [_travel(machine, c, blocks, t, across, overlaps) for c, t in zip(compute, travelled, strict=True)]
        moved[1] += bare * _transfer(machine, size.dkv, across) if blocks else 0.0  # the last gradients go home
    splits = machine.splits and task.dtype == "fp32"
    memory = _memory(task, method, size, partial, blocks, team, groups, splits)
    return Cost(
        method, team, (work[0], work[1]), (moved[0] + a2a[0], moved[1] + a2a[1]), (compute[0], compute[1]),
        (travelled[0] + exchanged[0], travelled[1] + exchanged[1]), memory, blocks,
    )  # fmt: skip


def _travel(machine: Machine, compute: float, blocks: int, amount: float, across: bool, overlaps: bool) -> float:
    """Work in steps, and the messages of each under another one."""
    if not blocks:
        return compute
    step, message = compute / (blocks + 1), _transfer(machine, amount / blocks, across)
    return step + blocks * (max(step, message) if overlaps else step + message)


def _memory(
    task: Task, method: str, size: _Sizes, partial: float, blocks: int, team: int, groups: int, splits: bool
) -> tuple[float, float]:  # fmt: skip
    """Of K and V one block is worked on while the next one comes; of their gradients, one, while one comes and one
    goes. That is so for one group of heads, and where there are several, one begins before another ends."""
    share = 2 / groups if groups > 1 else 1.0
    flying, gradients = min(blocks, 2) * size.kv, min(blocks + 1, 3) * size.dkv if blocks else 0.0
    dq = partial * task.head_dim / task.value_dim
    other = task.dtype != "fp32"
    merging = partial * (2 if other else 1) if blocks else 0.0
    keys = size.kv
    if method == "all_gather":
        merging = keys = (blocks + 1) * size.kv  # no merging: all keys
    forward = flying + merging
    backward = flying + gradients + dq + (dq + size.dkv if other else 0.0)  # a kernel has a dq of its own
    halves = [(size.q + keys) / groups, (size.q + size.o + size.kv) / groups] if splits else [0.0, 0.0]
    if team == 1:
        return share * forward + halves[0], share * backward + halves[1]
    swapped = size.q + size.kv + size.o  # kept for the backward
    moving = (team - 1) / team * swapped
    return (
        swapped + share * (moving + forward) + halves[0],
        swapped + share * (swapped + moving + backward) + halves[1],
    )


# ---- Numbers that were measured --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def table(path: str | None = None) -> dict[str, Any]:
    try:
        known = json.loads(Path(path or TABLE).read_text())
        return {"devices": known["devices"], "fabrics": known.get("fabrics", {})}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"table: {path} is no file of measured numbers ({error})") from error


def machine_of(device: str, dtype: str, head_dim: int, fabric: str, node: int = 8, path: str | None = None) -> Machine:
    """A device of the table, and a fabric of FABRICS or of the table."""
    known = table(path)
    if device not in known["devices"]:
        raise ValueError(f"device: is {device!r}, expected one of {', '.join(known['devices'])}")
    numbers = known["devices"][device]
    rates = numbers["tflops"].get(dtype) or next(iter(numbers["tflops"].values()))
    near = min(rates, key=lambda d: abs(int(d) - head_dim))
    return Machine(
        rates[near][0] * 1e12, rates[near][1] * 1e12, numbers["copy_gb_per_s"] * 1e9, *fabric_of(fabric, path), node,
        numbers["call_us"] * 1e-6, BLOCK_BYTES["cpu" if device == "cpu" else "cuda"], device != "cpu",
    )  # fmt: skip


def fabric_of(name: str, path: str | None = None) -> tuple[Fabric, Fabric | None]:
    fabrics = {**FABRICS}
    for key, numbers in table(path)["fabrics"].items():
        fabrics[key] = replace(
            fabrics[key], bytes_per_second=numbers["gb_per_s"] * 1e9, latency=numbers["latency_us"] * 1e-6
        )
    if name not in fabrics:
        raise ValueError(f"fabric: is {name!r}, expected one of {', '.join(fabrics)}")
    inside = fabrics[name].inside
    return fabrics[name], fabrics[inside] if inside else None


def costs(task: Task, machine: Machine) -> list[Cost]:
    """All methods that can do it, the quickest first: forward and backward together."""
    found = []
    for method in METHODS:
        if method == "ulysses" and task.ranks > task.key_heads:
            continue
        if method == "ulysses_ring" and ulysses_ranks(method, task.ranks, task.key_heads) in (1, task.ranks):
            continue  # that is the ring, or Ulysses
        found.append(cost(task, method, machine))
    return sorted(found, key=lambda c: sum(c.seconds))


@functools.lru_cache(maxsize=256)
def _choose(task: Task, device: str, fabric: str) -> str:
    """The quickest; all_gather only where its keys, all of them at once, need no more memory than the ring."""
    machine = machine_of(device, task.dtype, task.head_dim, fabric)
    most = max(cost(task, "ring", machine).memory)
    found = costs(task, machine)
    return next(c.method for c in found if c.method != "all_gather" or max(c.memory) <= most)


def choose(
    q: torch.Tensor, v: torch.Tensor, key_heads: int, shards: str, rows: tuple[int, ...], keys: tuple[int, ...],
    starts: tuple[int, ...] | None, band: Band, stride: int, fabric: str,
) -> str:  # fmt: skip
    """From what all ranks know alike, so that all of them choose the same."""
    if rows != keys:  # the model is one of self-attention
        return "ring"
    cuda = q.device.type == "cuda"
    if fabric == "auto":
        fabric = ("nvlink" if len(rows) <= 8 else "infiniband") if cuda else "loopback"
    task = Task(
        len(rows), sum(rows), q.shape[1], key_heads, q.shape[3], v.shape[3], _NAMES[q.dtype], q.shape[0], shards, band,
        stride, rows if shards == "contiguous" else None, starts,
    )  # fmt: skip
    return _choose(task, "h200" if cuda else "cpu", fabric)
