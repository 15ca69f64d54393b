"""python -m heed.bench: heed beside every attention that PyTorch offers on this machine, in one table.

Conventions. A forward costs 4 B H Sq Sk D flops, half of it when causal, a backward 2.5 times that. Peers are what
torch.nn.functional.scaled_dot_product_attention can be held to (math, flash, efficient, cudnn), and flex_attention where
it compiles. Before anything is timed, each of them is compared with the plain computation in fp64. Times are medians;
on a GPU they are the GPU's alone, and what the CPU needs to issue a call is the column "call us", taken with tiny tensors
(TINY below; on the CPU likewise). "MiB" is the most memory a call held beyond its inputs. "ratio" is the best peer's time over heed's.
"""
import argparse
import csv
import math
import os
import re
import sys
import time
from collections import namedtuple
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import heed
from heed._measure import call_us, calls_us, milliseconds, milliseconds_in_turns, peak_bytes

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SDPA = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION}
PEERS = (*SDPA, "flex")
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 6e-2}  # of the largest element: peers may use tf32-like shortcuts
DEFAULTS = {  # sequence lengths, tokens in all, width H * D, dtypes
    "cuda": ([512, 1024, 2048, 4096, 8192, 16384], 16384, 2048, ["bf16", "fp16", "fp32"]),
    "cpu": ([128, 256, 512, 1024, 2048], 2048, 256, ["fp32", "bf16"]),
}

Problem = namedtuple("Problem", "dtype batch heads heads_k rows keys head_dim causal")
Result = namedtuple("Result", Problem._fields + ("direction", "implementation", "ms", "tflops", "peak_mib", "call_us"))
TINY = {"batch": 1, "heads": 2, "heads_k": 2, "rows": 16, "keys": 16, "head_dim": 32, "causal": False}  # for the cost of a call


# ---- The implementations ---------------------------------------------------------------------------------------------

def implementation(name, problem):
    """A function of q, k and v."""
    grouped = problem.heads != problem.heads_k
    if name == "heed":
        return lambda q, k, v: heed.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=grouped)
    if name == "flex":
        return flex(problem, grouped)
    backend = SDPA[name]

    def sdpa(q, k, v):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=grouped)

    return sdpa


def flex(problem, grouped):
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    if not compiled_flex:
        if hasattr(functorch_config, "donated_buffer"):
            functorch_config.donated_buffer = False  # else there is but one backward to a forward
        compiled_flex.append(torch.compile(flex_attention))
    seen = []

    def call(q, k, v):
        if problem.causal and not seen:
            seen.append(create_block_mask(lambda b, h, i, j: i >= j, None, None, problem.rows, problem.keys, device=q.device))
        return compiled_flex[0](q, k, v, block_mask=seen[0] if seen else None, enable_gqa=grouped)

    return call


compiled_flex = []  # one for all problems: what torch compiles stays with the function


def plain(q, k, v, causal):
    """The definition, in the precision of its inputs; causal as in PyTorch: row i sees the keys 0 .. i."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return torch.softmax(scores, -1) @ v


def tensors(problem, device, requires_grad):
    torch.manual_seed(0)
    p, kind = problem, dict(device=device, dtype=DTYPES[problem.dtype])
    q, d_o = (torch.randn(p.batch, p.heads, p.rows, p.head_dim, **kind) for _ in range(2))
    k, v = (torch.randn(p.batch, p.heads_k, p.keys, p.head_dim, **kind) for _ in range(2))
    return [t.requires_grad_(requires_grad) for t in (q, k, v)], d_o


# ---- Measuring -------------------------------------------------------------------------------------------------------

def call_of(way, problem, direction, device):
    """What is timed: the forward without a graph, or the gradients of an existing one."""
    inputs, d_o = tensors(problem, device, direction == "backward")
    if direction == "forward":
        def forward():
            with torch.no_grad():
                return way(*inputs)
        return forward
    o = way(*inputs)
    return lambda: torch.autograd.grad(o, inputs, d_o, retain_graph=True)


def wrong_by(name, problem, device):
    """The largest distance of a smaller problem of the same kind, o and gradients, from fp64."""
    small = problem._replace(batch=1, heads=2 * problem.heads // problem.heads_k, heads_k=2, rows=min(problem.rows, 300),
                             keys=min(problem.keys, 300 if problem.rows == problem.keys else 500))
    inputs, d_o = tensors(small, device, name != "flex" or device.type == "cuda")
    exact = [t.detach().double().requires_grad_() for t in inputs]
    got, want = [implementation(name, small)(*inputs)], [plain(*exact, small.causal)]
    if inputs[0].requires_grad:
        got += torch.autograd.grad(got[0], inputs, d_o)
        want += torch.autograd.grad(want[0], exact, d_o.double())
    return max(((g.double() - w).abs().max() / w.abs().max()).item() for g, w in zip(got, want))


class Bench:
    def __init__(self, device, names, budget_ms):
        self.device, self.names, self.budget_ms = device, names, budget_ms
        self.results, self.refused, self.calls, self.errors = [], {}, {}, {}

    def measure(self, problem, direction, name):
        """Adds a Result, or a reason why there is none."""
        try:
            self.results.append(self.result(problem, direction, name))
        except Exception as error:  # what PyTorch raises for "no such kernel" has no type of its own
            if name == "heed":
                raise
            text = str(error).strip().splitlines() or [type(error).__name__]
            self.refused.setdefault((name, text[0][:100]), problem)

    def result(self, problem, direction, name):
        if name == "math" and problem.batch * problem.heads * problem.rows * problem.keys > 2**30:
            raise MemoryError("left out where the scores have more than 2^30 elements")
        kind = (name, problem.dtype, problem.head_dim, problem.causal)
        if kind not in self.errors:
            self.errors[kind] = wrong_by(name, problem, self.device)
        if not self.errors[kind] <= TOLERANCE[problem.dtype]:
            raise ArithmeticError(f"{self.errors[kind]:.1e} from the result in fp64: not timed")
        call = call_of(implementation(name, problem), problem, direction, self.device)
        ms = milliseconds(call, self.device, self.budget_ms)
        flops = 4 * problem.batch * problem.heads * problem.rows * problem.keys * problem.head_dim
        flops *= (2.5 if direction == "backward" else 1) * (0.5 if problem.causal else 1)
        peak = peak_bytes(call, self.device)
        return Result(*problem, direction, name, ms, flops / ms / 1e9, peak and peak / 2**20,
                      self.call_us(problem, direction, name))

    def call_us(self, problem, direction, name):
        """For a call on tiny tensors, once for each implementation: "backward" is forward and backward together."""
        if (name, direction) not in self.calls:
            tiny = problem._replace(**TINY)
            way = implementation(name, tiny)
            call = call_of(way, tiny, "forward", self.device)
            if direction == "backward":
                inputs, d_o = tensors(tiny, self.device, True)
                call = lambda: torch.autograd.grad(way(*inputs), inputs, d_o)
            call()
            self.calls[name, direction] = call_us(call, self.device)
        return self.calls[name, direction]

    def run(self, problems, directions, show):
        progress = Progress(len(problems) * len(directions) * len(self.names))
        for problem in problems:
            for direction in directions:
                first = len(self.results)
                for name in self.names:
                    progress.step(f"{describe(problem)} {direction} {name}")
                    self.measure(problem, direction, name)
                    if self.device.type == "cuda":
                        torch.cuda.empty_cache()
                progress.clear()
                show(problem, direction, {r.implementation: r for r in self.results[first:]})
        progress.clear()


def overhead(device, bursts=200):
    """What a call costs before it returns, beside PyTorch's, which is free to choose its own way."""
    problem = Problem(dtype="bf16" if device.type == "cuda" else "fp32", **TINY)
    ways = {"heed": heed.attention, "PyTorch": torch.nn.functional.scaled_dot_product_attention}
    plain, _ = tensors(problem, device, False)
    leaves, d_o = tensors(problem, device, True)
    kinds = {"without gradient": lambda way: partial(way, *plain), "with gradient": lambda way: partial(way, *leaves),
             "forward and backward": lambda way: lambda: torch.autograd.grad(way(*leaves), leaves, d_o)}
    print(f"{'us until the call returns: least, median':42}" + "".join(f"{name:>16}" for name in ways) + f"{'ratios':>12}")
    for kind, call in kinds.items():
        results = calls_us({name: call(way) for name, way in ways.items()}, device, bursts)
        cells = "".join(f" {least:7.2f} {median:7.2f}" for least, median in results.values())
        ratios = "".join(f"{ours / peer:6.2f}" for ours, peer in zip(*results.values()))
        print(f"{describe(problem):21}{kind:21}{cells}{ratios}", flush=True)


class Progress:
    """One line on a terminal's standard error; nothing elsewhere."""

    def __init__(self, total):
        self.total, self.done, self.start, self.on = total, 0, time.time(), sys.stderr.isatty()

    def step(self, text):
        if self.on:
            width, share = 24, self.done / self.total
            left = (time.time() - self.start) * (1 / share - 1) if share else 0
            bar = "#" * round(width * share)
            print(f"\r\x1b[K[{bar:.<{width}}] {self.done}/{self.total} {left:4.0f} s left  {text}", end="", flush=True,
                  file=sys.stderr)
        self.done += 1

    def clear(self):
        if self.on:
            print("\r\x1b[K", end="", flush=True, file=sys.stderr)


# ---- Output ----------------------------------------------------------------------------------------------------------

def describe(p):
    pair = lambda a, b: str(a) if a == b else f"{a}:{b}"
    return f"{p.dtype} {p.batch},{pair(p.heads, p.heads_k)},{pair(p.rows, p.keys)},{p.head_dim}{' causal' * p.causal}"


class Table:
    def __init__(self, names, device):
        self.names = names
        self.per_tflops, unit = (1, "TFLOP/s") if device.type == "cuda" else (1000, "GFLOP/s")
        print(f"{unit + '; dtype B,H,S,D':32} {'pass':8}" + "".join(f"{n:>10}" for n in names) +
              f"{'ratio':>7} {'MiB heed':>9} {'peer':>7} {'call us heed':>12} {'peer':>6}")

    def line(self, problem, direction, results):
        cells = "".join(f"{results[n].tflops * self.per_tflops:10.1f}" if n in results else f"{'-':>10}"
                        for n in self.names)
        ours, peers = results["heed"], [r for n, r in results.items() if n != "heed"]
        best = min(peers, key=lambda r: r.ms) if peers else None
        mib = lambda r: "" if r is None else f"{r.peak_mib:.1f}" if r.peak_mib is not None else "?"
        ratio, call = (f"{best.ms / ours.ms:.2f}", f"{best.call_us:.1f}") if best else ("", "")
        print(f"{describe(problem):32} {direction:8}{cells}{ratio:>7} {mib(ours):>9} {mib(best):>7} "
              f"{ours.call_us:12.1f} {call:>6}", flush=True)


def save(results, path):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Result._fields)
        writer.writerows([f"{x:.6g}" if isinstance(x, float) else x for x in r] for r in results)


def load(path):
    def value(field, text):
        if field in ("dtype", "direction", "implementation"):
            return text
        if field == "causal":
            return text == "True"
        return float(text) if "." in text or "e" in text else int(text) if text else None

    with open(path, newline="") as file:
        return [Result(**{field: value(field, row[field]) for field in Result._fields}) for row in csv.DictReader(file)]


def plot(results, path, title):
    """The rate against the sequence length: a panel for each direction and kind of problem."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys((r.dtype, r.head_dim, r.causal) for r in results))
    directions = list(dict.fromkeys(r.direction for r in results))
    names = list(dict.fromkeys(r.implementation for r in results))
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    factor, unit = (1, "TFLOP/s") if max(r.tflops for r in results) > 5 else (1000, "GFLOP/s")
    figure, panels = pyplot.subplots(len(directions), len(kinds), squeeze=False, sharex="col",
                                     figsize=(3.4 * len(kinds) + 0.6, 2.7 * len(directions) + 0.9))
    for row, direction in zip(panels, directions):
        for panel, kind in zip(row, kinds):
            for name in names:
                points = sorted((r.rows, r.tflops * factor) for r in results if r.implementation == name
                                and r.direction == direction and (r.dtype, r.head_dim, r.causal) == kind)
                if points:
                    panel.plot(*zip(*points), marker="o", markersize=3, label=name, color=colours[name],
                               linewidth=2.4 if name == "heed" else 1.2, zorder=3 if name == "heed" else 2)
            panel.set_xscale("log", base=2)
            lengths = sorted({r.rows for r in results if (r.dtype, r.head_dim, r.causal) == kind})
            panel.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
            panel.set_title(f"{direction}, {kind[0]}, D = {kind[1]}{', causal' * kind[2]}", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("sequence length")
    for row in panels:
        row[0].set_ylabel(unit)
    handles = {l: h for panel in panels.flat for h, l in zip(*panel.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=len(names), frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "heed"}):  # text as text; the same file each time
        figure.savefig(path, dpi=150, metadata={"Date": None} if str(path).endswith(".svg") else None)


# ---- The command -----------------------------------------------------------------------------------------------------

def shape(text):
    """B,H,S,D with H or H:Hk and S or Sq:Sk."""
    one, two = "([1-9][0-9]*)", "([1-9][0-9]*)(?::([1-9][0-9]*))?"
    found = re.fullmatch(f"{one},{two},{two},{one}", text)
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is not B,H,S,D, such as 2,16,1024,64 or 1,32:8,1:4096,128")
    batch, heads, heads_k, rows, keys, head_dim = (int(n) if n else 0 for n in found.groups())
    if heads % (heads_k or heads):
        raise argparse.ArgumentTypeError(f"'{text}' has {heads_k} key heads, which do not divide {heads}")
    return batch, heads, heads_k or heads, rows, keys or rows, head_dim


def count(text):
    if not re.fullmatch("0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on")
    return int(text)


def budget(text):
    try:
        if 0 < float(text) < math.inf:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is not a number of milliseconds")


def device_of(text):
    """A device that is there."""
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter is what a PyTorch without CUDA says
        raise argparse.ArgumentTypeError(str(error).splitlines()[0])
    if device.type not in DEFAULTS:
        raise argparse.ArgumentTypeError(f"'{text}' is not one of {', '.join(DEFAULTS)}")
    return device


def parse(arguments):
    listed = lambda text: text.split(",")
    numbers = lambda text: [count(part) for part in text.split(",")]
    p = argparse.ArgumentParser(prog="python -m heed.bench", formatter_class=argparse.RawDescriptionHelpFormatter,
                                description="heed beside every attention that PyTorch offers on this machine.",
                                epilog="\n".join(__doc__.splitlines()[2:]))
    p.add_argument("--mine", type=shape, action="append", metavar="B,H,S,D",
                   help="your own shape, instead of the sweep; H may be H:Hk and S may be Sq:Sk; repeatable")
    p.add_argument("--overhead", action="store_true", help="only what a call costs before it returns, on tiny tensors")
    p.add_argument("--device", type=device_of, default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", type=listed, metavar="LIST", help=f"of {','.join(DTYPES)}")
    p.add_argument("--head-dim", type=numbers, default=[64, 128], metavar="LIST", help="(64,128)")
    p.add_argument("--seq", type=numbers, metavar="LIST", help="sequence lengths of the sweep")
    p.add_argument("--tokens", type=count, metavar="N", help="B * S of the sweep")
    p.add_argument("--width", type=count, metavar="N", help="H * D of the sweep")
    p.add_argument("--causal", choices=("no", "yes", "both"), default="both")
    p.add_argument("--pass", dest="directions", type=listed, default=["forward", "backward"], metavar="LIST",
                   help="of forward,backward")
    p.add_argument("--peers", type=listed, default=list(PEERS), metavar="LIST", help=f"of {','.join(PEERS)}")
    p.add_argument("--budget", type=budget, default=100.0, metavar="MS", help="time for each measurement (100 ms)")
    p.add_argument("--csv", metavar="FILE", help="write every measurement to this file")
    p.add_argument("--plot", metavar="FILE", help="draw TFLOP/s against the sequence length: .png, .svg, .pdf")
    p.add_argument("--from-csv", metavar="FILE", help="measure nothing: take the results of an earlier --csv")
    p.add_argument("--title", help="of the plot")
    o = p.parse_args(arguments)
    for name, given, known in (("--dtype", o.dtype or [], DTYPES), ("--peers", o.peers, ("", *PEERS)),
                               ("--pass", o.directions, ("forward", "backward"))):
        for word in given:
            if word not in known:
                p.error(f"{name}: '{word}' is not one of {', '.join(filter(None, known))}")
    for name, path in ("--csv", o.csv), ("--plot", o.plot):  # before minutes of measuring, not after
        if path and not os.path.isdir(os.path.dirname(path) or "."):
            p.error(f"{name}: there is no folder {os.path.dirname(path)}")
    if o.plot:
        try:
            import matplotlib.figure
        except ImportError as error:
            p.error(f"--plot: needs matplotlib ({error})")
        kinds, kind = matplotlib.figure.Figure().canvas.get_supported_filetypes(), os.path.splitext(o.plot)[1][1:]
        if kind not in kinds:
            p.error(f"--plot: '{o.plot}' ends in none of {', '.join('.' + k for k in kinds)}")
    if o.from_csv and not o.plot:
        p.error("--from-csv: needs --plot")
    if o.from_csv:
        try:
            o.results = load(o.from_csv)
        except (OSError, KeyError, ValueError) as error:
            p.error(f"--from-csv: '{o.from_csv}' is no file of --csv ({error})")
        if not o.results:
            p.error(f"--from-csv: '{o.from_csv}' has no results")
    o.problems = problems_of(o)
    if not o.problems:
        p.error("--causal: PyTorch's is another one unless there are as many rows as keys; nothing is left to measure")
    return o


def problems_of(o):
    lengths, tokens, width, dtypes = DEFAULTS[o.device.type]
    tokens, width = o.tokens or tokens, o.width or width
    causal = {"no": [False], "yes": [True], "both": [False, True]}[o.causal]
    shapes = o.mine or [(max(1, tokens // s), *2 * (max(1, width // d),), s, s, d)
                        for d in o.head_dim for s in o.seq or lengths]
    found = [Problem(dtype, *s, c) for dtype in o.dtype or dtypes for c in causal for s in shapes]
    return [p for p in found if not p.causal or p.rows == p.keys]  # PyTorch's causal is another one otherwise


def main(arguments=None):
    o = parse(arguments)
    if o.from_csv:
        results, title = o.results, o.title or o.from_csv
    else:
        device = o.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        title = o.title or f"heed {heed.__version__} and PyTorch {torch.__version__} on {name}"
        print(title)
        if o.overhead:
            return overhead(device)
        bench = Bench(device, ["heed", *filter(None, o.peers)], o.budget)
        table = Table(bench.names, device)

        def show(*line):
            table.line(*line)
            if o.csv:
                save(bench.results, o.csv)  # as far as it is: a run that is stopped leaves what it has

        bench.run(o.problems, o.directions, show)
        for (peer, reason), problem in bench.refused.items():
            print(f"{peer}: {reason} (first at {describe(problem)})")
        results = bench.results
    if o.plot:
        plot(results, o.plot, title)


if __name__ == "__main__":
    main()
