"""python -m heed.distributed.plan: what attention over many ranks would cost, by each method, on each fabric.

    --gpus 1024 --tokens 10M                the table, for one layer
    --measure                               times this machine's kernels, memory and messages between processes, and
                                            prints the table of measured numbers with them; --write FILE puts it there
    --compare 2,4                           runs every method with 2 and 4 local processes, beside what the model says;
                                            some minutes for each number with 32 heads, half a minute with --heads 4

The numbers that the model needs come from measured.json beside this file, or from --table FILE.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from heed.distributed import _measure
from heed.distributed._plan import BYTES, FABRICS, Cost, Task, costs, machine_of
from heed.distributed._shards import SHARDS, band


def number(text: str) -> int:
    """10M, 128k, 512"""
    found = re.fullmatch(r"([0-9]+|[0-9]*\.[0-9]+)([kmg]?)", text.lower())
    value = float(found[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[found[2]] if found else 0.0
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on, such as 512, 128k or 10M")
    return int(value)


def several(text: str) -> list[int]:
    """2,4"""
    ranks = [number(part) for part in text.split(",")]
    if 1 in ranks:
        raise argparse.ArgumentTypeError(f"'{text}': one process is always there, expected numbers from 2 on")
    return ranks


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
        a.gpus, a.tokens, a.heads, a.key_heads, a.head_dim, a.head_dim, a.dtype, a.batch, a.shards, limits,
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m heed.distributed.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", "--ranks", type=number, default=8, help="how many ranks (8)")
    parser.add_argument("--tokens", type=number, default=None, help="of the whole sequence: 10M, 128k ... (1M)")
    parser.add_argument("--heads", type=number, default=32)
    parser.add_argument("--key-heads", type=number, help="as many as --heads where not given")
    parser.add_argument("--head-dim", type=number, default=128)
    parser.add_argument("--batch", type=number, default=1)
    parser.add_argument("--dtype", choices=list(BYTES), default="bf16")
    parser.add_argument("--shards", choices=SHARDS, default="zigzag")
    parser.add_argument("--full", action="store_true", help="not causal; with --compare: only that")
    parser.add_argument("--window", type=number, help="keys that a query sees before itself")
    parser.add_argument("--stride", type=number, default=1, help="strided attention: every how manieth key is seen")
    parser.add_argument("--device", default="h200", help="a device of the table (h200)")
    parser.add_argument("--fabric", choices=list(FABRICS), help="one of them only")
    parser.add_argument("--node", type=number, default=8, help="ranks in a node, which NVLink connects (8)")
    parser.add_argument("--table", help="measured numbers, in place of those that come with heed")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--compare", type=several, metavar="RANKS", help="numbers of local processes: 2,4")
    parser.add_argument("--quick", action="store_true", help="with --measure: smaller problems")
    parser.add_argument("--rounds", type=number, default=2, help="with --compare: how often everything is timed (2)")
    parser.add_argument("--write", metavar="FILE", help="with --measure: where the measured numbers go")
    a = parser.parse_args(arguments)
    a.key_heads = a.key_heads or a.heads
    try:
        if a.heads % a.key_heads:
            raise ValueError(f"--key-heads: is {a.key_heads}, expected a divisor of --heads, which is {a.heads}")
        if a.measure:
            if a.write and not Path(a.write).absolute().parent.is_dir():  # before it takes minutes
                raise ValueError(f"--write: there is no folder {Path(a.write).parent}")
            text = json.dumps(_measure.measure(a.table, a.quick), indent=2)
            Path(a.write).write_text(text + "\n") if a.write else print(text)
        elif a.compare:
            sizes = (a.tokens or 8192, a.heads, a.key_heads, a.head_dim, a.head_dim)
            bands = [band(False, None)] if a.full else [band(True, None), band(False, None)]
            _measure.compare(a.compare, sizes, a.dtype, a.batch, a.rounds, bands)
        else:
            a.tokens = a.tokens or 1_000_000
            show(a)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
