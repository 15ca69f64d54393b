"""Numbers for the model of _plan.py, and the model beside this machine. Times are the shortest of several: whatever
else the machine does only ever adds to them."""

from __future__ import annotations

import copy
import datetime
import itertools
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import heed
from heed.distributed._attention import attention
from heed.distributed._plan import Fabric, Machine, Task, cost, table
from heed.distributed._routes import METHODS
from heed.distributed._shards import Band

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_MESSAGE = 1 << 22  # floats


def seconds(work: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """The shortest of some calls, after two to warm up: others on the machine only ever make it longer."""
    times = []
    for n in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        if n > 1:
            times.append(time.perf_counter() - begin)
    return min(times)


def kernels_of(device: str, dtype: str, head_dim: int, tokens: int, heads: int) -> list[float]:
    """TFLOP/s of forward and backward of one rank: without a mask, one thread on a CPU."""
    q, k, v = (
        torch.randn(1, heads, tokens, head_dim, dtype=_DTYPES[dtype], device=device, requires_grad=True)
        for _ in range(3)
    )
    flops = 4 * heads * tokens * tokens * head_dim
    with torch.no_grad():
        forward = seconds(lambda: heed.attention(q, k, v), device)
    o = heed.attention(q, k, v)
    do = torch.randn_like(o)
    backward = seconds(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), device)
    return [round(flops / forward / 1e12, 4), round(2.5 * flops / backward / 1e12, 4)]


def measure_device(device: str, quick: bool) -> dict[str, Any]:
    tokens, heads = ((2048, 2) if quick else (4096, 4)) if device == "cpu" else (16384, 16)
    dtypes = ["fp32", "bf16"] if device == "cpu" else ["bf16", "fp16", "fp32"]
    rates = {d: {str(n): kernels_of(device, d, n, tokens, heads) for n in (64, 128)} for d in dtypes}
    a = torch.randn(1 << (24 if device == "cpu" else 28), device=device)
    b = torch.empty_like(a)
    copy = 8 * a.numel() / seconds(lambda: b.copy_(a), device)
    small = [torch.randn(1, 1, 16, 64, device=device) for _ in range(3)]
    call = seconds(lambda: [heed.attention(*small) for _ in range(20)], device) / 20
    return {"tflops": rates, "copy_gb_per_s": round(copy / 1e9, 1), "call_us": round(call * 1e6, 1)}


def one_thread(core: int) -> None:
    """On a core of its own, as far as there are enough."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core % len(os.sched_getaffinity(0))]})
    torch.set_num_threads(1)
    heed.set_threads(1)


def join(rank: int, ranks: int, port: int) -> None:
    one_thread(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
    )


def spawn(work: Callable[..., None], ranks: int, *arguments: Any) -> Any:
    """What rank 0 of that many processes puts into its queue."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    answers = mp.get_context("spawn").SimpleQueue()
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        work, (ranks, port, answers, *arguments), ranks, start_method="spawn"
    )
    return answers.get()


def _cpu(rank: int, ranks: int, port: int, answers: Any, quick: bool) -> None:
    one_thread(0)
    answers.put(measure_device("cpu", quick))


def _swap(count: int, peer: int) -> Callable[[], None]:
    """Two ranks send to each other, as they do in a ring."""
    out, into = torch.zeros(count), torch.zeros(count)

    def once() -> None:
        ops = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return once


def _messages(rank: int, ranks: int, port: int, answers: Any) -> None:
    join(rank, ranks, port)
    small, large = (seconds(_swap(count, 1 - rank), "cpu", 20) for count in (1, _MESSAGE))
    if rank == 0:
        answers.put({"gb_per_s": round(4 * _MESSAGE / (large - small) / 1e9, 2), "latency_us": round(small * 1e6, 1)})


def measure(path: str | None, quick: bool) -> dict[str, Any]:
    """The table with this machine's numbers in it."""
    result = copy.deepcopy(table(path))
    result["devices"]["cpu"] = spawn(_cpu, 1, quick)
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().lower().replace("nvidia", "").split()[0]
        result["devices"][name] = measure_device("cuda", quick)
    result["fabrics"]["loopback"] = spawn(_messages, 2)
    return result


# ---- The model beside this machine -----------------------------------------------------------------------------------


def _both_passes(task: Task, tokens: int, call: Callable[..., Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A forward and a backward of call(q, k, v), ready to be timed."""
    q, k, v = (
        torch.randn(task.batch, h, tokens, task.head_dim, dtype=_DTYPES[task.dtype], requires_grad=True)
        for h in (task.heads, task.key_heads, task.key_heads)
    )
    o = call(q, k, v)
    do = torch.randn_like(o)

    def forward() -> None:
        with torch.no_grad():
            call(q, k, v)

    return forward, lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def _timed(rank: int, ranks: int, port: int, answers: Any, task: Task, methods: list[str], rounds: int) -> None:
    """Everything in turn, so that a slow moment of the machine meets all alike; of each the shortest time."""
    join(rank, ranks, port)
    causal = task.band.right == 0
    work: dict[str, Callable[[], Any]] = {}

    def pair(name: str, passes: tuple[Callable[[], Any], Callable[[], Any]]) -> None:
        work[f"{name} forward"], work[f"{name} backward"] = passes

    if rank == 0:  # the others wait meanwhile
        pair("alone", _both_passes(task, task.tokens, lambda q, k, v: heed.attention(q, k, v, causal=causal)))
        pair("kernel", _both_passes(task, task.tokens // 4, heed.attention))
        a, b = torch.randn(1 << 22), torch.empty(1 << 22)
        work["copy"] = lambda: b.copy_(a)
    together: dict[str, Callable[[], Any]] = {}
    for method in methods:
        call = lambda q, k, v, m=method: attention(q, k, v, method=m, shards=task.shards, causal=causal)
        forward, backward = _both_passes(task, task.tokens // ranks, call)
        together[f"{method} forward"], together[f"{method} backward"] = forward, backward
    if rank < 2:
        together["message"], together["latency"] = _swap(_MESSAGE, 1 - rank), _swap(1, 1 - rank)
    best: dict[str, float] = {}
    for _, (shared, jobs) in itertools.product(range(rounds), ((False, work), (True, together))):
        dist.barrier()
        for name, job in jobs.items():
            if shared and name not in ("message", "latency"):
                dist.barrier()
            begin = time.perf_counter()
            job()
            best[name] = min(best.get(name, 1e9), time.perf_counter() - begin)
    if rank == 0:
        answers.put(best)


def _machine(task: Task, best: dict[str, float], share: float) -> Machine:
    """From the times of one rank. Where there are fewer cores than ranks, each gets a share; messages are copied by the
    same cores."""
    flops = 4 * task.batch * task.heads * (task.tokens // 4) ** 2 * task.head_dim
    bandwidth = 4 * _MESSAGE / (best["message"] - best["latency"])
    return Machine(
        share * flops / best["kernel forward"], share * 2.5 * flops / best["kernel backward"],
        share * 8 * (1 << 22) / best["copy"], Fabric(share * bandwidth, best["latency"] / share, None, False), None,
    )  # fmt: skip


def compare(
    counts: list[int], sizes: tuple[int, int, int, int, int], dtype: str, batch: int, rounds: int, bands: list[Band]
) -> None:
    """A row for each mask, each number of local ranks and each method."""
    cores = len(os.sched_getaffinity(0))
    print(
        f"{sizes[0]} tokens, {sizes[1]} heads of {sizes[3]}, {dtype}, zigzag shards, one thread for each rank; "
        f"{cores} cores"
    )
    print(f"  {'':<30}{'forward, ms':>19}{'':>13}{'backward, ms':>19}")
    columns = f"{'model':>9}{'measured':>10}{'speedup':>9}"
    print(f"  {'mask, ranks, method':<26}{columns}{'':>4}{columns}")
    for limits, ranks in itertools.product(bands, counts):
        task = Task(ranks, *sizes, dtype, batch, "zigzag", limits)
        methods = [m for m in METHODS if m != "ulysses" or ranks <= task.key_heads]
        best = spawn(_timed, ranks, task, methods, rounds)
        machine = _machine(task, best, min(1.0, cores / ranks))
        kind = "causal" if limits.right == 0 else "full"
        one = [best["alone forward"], best["alone backward"]]
        print(f"  {f'{kind}, 1':<26}{'':>9}{one[0] * 1e3:>10.0f}{'':>9}{'':>13}{one[1] * 1e3:>10.0f}")
        for method in methods:
            said = cost(replace(task, ranks=ranks), method, machine).seconds
            got = [best[f"{method} forward"], best[f"{method} backward"]]
            cells = [f"{s * 1e3:>9.0f}{t * 1e3:>10.0f}{o / t:>8.2f}x" for s, t, o in zip(said, got, one, strict=True)]
            print(f"  {f'{kind}, {ranks}, {method}':<26}{cells[0]}{'':>4}{cells[1]}", flush=True)
