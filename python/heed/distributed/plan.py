"""python -m heed.distributed.plan: what attention over many ranks would cost, by each method, on each fabric.

    --gpus 1024 --tokens 10M                the table, for one layer
    --measure                               times this machine's kernels, memory and messages between processes, and
    prints
                                            the table of measured numbers with them; --write FILE puts it there
    --compare 2,4                           runs every method with 2 and 4 local processes, beside what the model says

The numbers that the model needs come from measured.json beside this file, or from --table FILE.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import heed
from heed.distributed._attention import attention
from heed.distributed._methods import METHODS
from heed.distributed._plan import FABRICS, TABLE, Cost, Machine, Task, cost, costs, machine_of
from heed.distributed._shards import SHARDS, band

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def number(text: str) -> int:
    """10M, 128k, 512"""
    scale = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1:].lower())
    return int(float(text[:-1]) * scale) if scale else int(text)


def amount(value: float, unit: str) -> str:
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3), ("u", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"0 {unit}"


# ---- The table of costs ----------------------------------------------------------------------------------------------


def print_costs(task: Task, fabric: str, found: list[Cost]) -> None:
    print(f"\n{fabric}")
    print(
        f"  {'method':<20}{'forward':>10}{'backward':>10}{'of it work':>11}{'sent':>20}{'to hide it':>12}{'memory':>20}"
    )
    for c in found:
        name = f"{c.method} {c.ulysses} x {task.ranks // c.ulysses}" if c.method == "ulysses_ring" else c.method
        sent, memory = (" + ".join(amount(x, "B") for x in pair) for pair in (c.sent, c.memory))
        share = sum(c.compute) / sum(c.seconds)
        print(
            f"  {name:<20}{amount(c.seconds[0], 's'):>10}{amount(c.seconds[1], 's'):>10}{share:>10.0%} {sent:>20}"
            f"{amount(c.bandwidth, 'B/s'):>12}{memory:>20}"
        )


def show(a: argparse.Namespace) -> None:
    limits = band(not a.full, (a.window, None) if a.window else None)
    task = Task(
        a.gpus, a.tokens, a.heads, a.key_heads or a.heads, a.head_dim, a.head_dim, a.dtype, a.batch, a.shards, limits,
        a.stride,
    )  # fmt: skip
    kind = ("full" if a.full else "causal") + (f", window {a.window}" if a.window else "")
    print(
        f"{a.tokens:,} tokens, {kind}, over {a.gpus} x {a.device}, {a.shards} shards: {task.heads} heads of "
        f"{a.head_dim}, {task.key_heads} of keys, {a.dtype}, batch {a.batch}. One layer; the busiest rank."
    )
    print(
        "Pairs are forward + backward. Memory is what a rank needs beyond its shards of q, k, v, o and their gradients."
    )
    for name in [a.fabric] if a.fabric else ["nvlink", "infiniband", "ethernet"]:
        print_costs(task, name, costs(task, machine_of(a.device, a.dtype, a.head_dim, name, a.node, a.table)))


# ---- Measuring -------------------------------------------------------------------------------------------------------


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
    dtypes = ["fp32", "bf16"] if device == "cpu" else ["bf16", "fp16"]
    rates = {d: {str(n): kernels_of(device, d, n, tokens, heads) for n in (64, 128)} for d in dtypes}
    a = torch.randn(1 << (24 if device == "cpu" else 28), device=device)
    b = torch.empty_like(a)
    copy = 8 * a.numel() / seconds(lambda: b.copy_(a), device)
    small = [torch.randn(1, 1, 16, 64, device=device) for _ in range(3)]
    call = seconds(lambda: [heed.attention(*small) for _ in range(20)], device) / 20
    return {"tflops": rates, "copy_gb_per_s": round(copy / 1e9, 1), "call_us": round(call * 1e6, 1)}


def join(rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    heed.set_threads(1)
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
    mp.start_processes(work, (ranks, port, answers, *arguments), ranks, start_method="spawn")
    return answers.get()


def _messages(rank: int, ranks: int, port: int, answers: Any) -> None:
    """Both ranks send to each other, as they do in a ring."""
    join(rank, ranks, port)

    def swap(count: int) -> Callable[[], None]:
        out, into = torch.zeros(count), torch.zeros(count)

        def once() -> None:
            ops = [dist.P2POp(dist.isend, out, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        return once

    small, large = seconds(swap(1), "cpu", 50), seconds(swap(1 << 22), "cpu", 9)
    if rank == 0:
        answers.put({"gb_per_s": round(4 * (1 << 22) / (large - small) / 1e9, 2), "latency_us": round(small * 1e6, 1)})


def measure(a: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    heed.set_threads(1)
    result = json.loads(Path(a.table or TABLE).read_text())
    result["devices"]["cpu"] = measure_device("cpu", a.quick)
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().lower().replace("nvidia", "").split()[0]
        result["devices"][name] = measure_device("cuda", a.quick)
    result["fabrics"]["loopback"] = spawn(_messages, 2)
    return result


# ---- The model against this machine ----------------------------------------------------------------------------------


def _timed(rank: int, ranks: int, port: int, answers: Any, task: Task, methods: list[str]) -> None:
    join(rank, ranks, port)
    rows = task.tokens // ranks
    dtype = _DTYPES[task.dtype]
    q, k, v = (
        torch.randn(task.batch, h, rows, task.head_dim, dtype=dtype, requires_grad=True)
        for h in (task.heads, task.key_heads, task.key_heads)
    )
    causal = task.band.right == 0
    found = {}
    for method in methods:
        call = lambda m=method: attention(q, k, v, method=m, shards=task.shards, causal=causal)
        with torch.no_grad():
            forward = seconds(call, "cpu")
        o = call()
        do = torch.randn_like(o)
        found[method] = (
            forward,
            seconds(lambda o=o, do=do: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), "cpu"),
        )
    if rank == 0:
        answers.put(found)


def one_rank(task: Task) -> tuple[float, float]:
    """The same on one rank with one thread: forward and backward."""
    q, k, v = (
        torch.randn(task.batch, h, task.tokens, task.head_dim, dtype=_DTYPES[task.dtype], requires_grad=True)
        for h in (task.heads, task.key_heads, task.key_heads)
    )
    causal = task.band.right == 0
    with torch.no_grad():
        forward = seconds(lambda: heed.attention(q, k, v, causal=causal), "cpu")
    o = heed.attention(q, k, v, causal=causal)
    do = torch.randn_like(o)
    return forward, seconds(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), "cpu")


def compare(a: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    heed.set_threads(1)
    measured = {"devices": {"cpu": measure_device("cpu", True)}, "fabrics": {"loopback": spawn(_messages, 2)}}
    path = Path(a.write or f"/tmp/heed_plan_{os.getpid()}.json")
    path.write_text(json.dumps(measured))
    cores = os.cpu_count() or 1
    print(
        f"{a.tokens} tokens, {a.heads} heads of {a.head_dim}, {a.dtype}, zigzag shards, one thread for each rank, "
        f"{cores} cores"
    )
    print(f"  {'':<22}{'forward, ms':>24}{'':>8}{'backward, ms':>24}")
    print(
        f"  {'ranks, method':<22}{'model':>8}{'measured':>10}{'speedup':>9}{'model':>13}{'measured':>10}{'speedup':>9}"
    )
    for limits in (band(True, None), band(False, None)):
        base = Task(
            1, a.tokens, a.heads, a.key_heads or a.heads, a.head_dim, a.head_dim, a.dtype, a.batch, "zigzag", limits
        )  # fmt: skip
        alone = one_rank(base)
        print(
            f"  {'causal' if limits.right == 0 else 'full'}, one rank: {alone[0] * 1e3:.0f} + {alone[1] * 1e3:.0f} ms"
        )
        for ranks in map(int, a.compare.split(",")):
            task = Task(**{**base.__dict__, "ranks": ranks})
            machine = _share(
                machine_of("cpu", a.dtype, a.head_dim, "loopback", path=str(path)), min(1.0, cores / ranks)
            )
            methods = [m for m in METHODS if m != "ulysses" or ranks <= task.key_heads]
            got = spawn(_timed, ranks, task, methods)
            for method in methods:
                said, is_ = cost(task, method, machine).seconds, got[method]
                cells = "".join(
                    f"{s * 1e3:>{8 if n == 0 else 13}.0f}{t * 1e3:>10.0f}{one / t:>8.2f}x"
                    for n, (s, t, one) in enumerate(zip(said, is_, alone, strict=True))
                )
                print(f"  {f'{ranks}, {method}':<22}{cells}", flush=True)
    if not a.write:
        path.unlink()


def _share(m: Machine, share: float) -> Machine:
    """Of a machine with fewer cores than ranks, each rank gets a part; messages are copied by the same cores."""
    slower = type(m.fabric)(m.fabric.bytes_per_second * share, m.fabric.latency / share, None, False)
    return Machine(
        m.forward_flops * share, m.backward_flops * share, m.copy * share, slower, None, m.node, m.call / share
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m heed.distributed.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", "--ranks", type=number, default=8, help="how many ranks (8)")
    parser.add_argument("--tokens", type=number, default=None, help="of the whole sequence: 10M, 128k ... (1M)")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=0, help="as many as --heads where not given")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=list(_DTYPES), default="bf16")
    parser.add_argument("--shards", choices=SHARDS, default="zigzag")
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--window", type=number, default=0, help="keys that a query sees before itself")
    parser.add_argument("--stride", type=int, default=1, help="strided attention: every how manieth key is seen")
    parser.add_argument("--device", default="h200", help="a device of the table (h200)")
    parser.add_argument("--fabric", choices=list(FABRICS), help="one of them only")
    parser.add_argument("--node", type=int, default=8, help="ranks in a node, which NVLink connects (8)")
    parser.add_argument("--table", help="measured numbers, in place of those that come with heed")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--compare", metavar="RANKS", help="numbers of local processes: 2,4")
    parser.add_argument("--quick", action="store_true", help="with --measure: smaller problems")
    parser.add_argument("--write", metavar="FILE", help="with --measure and --compare: where the measured numbers go")
    a = parser.parse_args(arguments)
    try:
        if a.measure:
            text = json.dumps(measure(a), indent=2)
            Path(a.write).write_text(text + "\n") if a.write else print(text)
        elif a.compare:
            a.tokens = a.tokens or 8192
            compare(a)
        else:
            a.tokens = a.tokens or 1_000_000
            show(a)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
