"""fp32 on one GPU, heed beside PyTorch's scaled_dot_product_attention, in one process.

    python3 bench/fp32.py errors [--lib PATH] [--kernel FAMILY] [--draws 4] [--tf32]   against fp64, by kind of data
    python3 bench/fp32.py errors --shape 2,8,300,64,causal 1,2,512,256 --kind "logits to 500" "q 1e-40" --draws 24
    python3 bench/fp32.py errors --goals [--draws 1]              of the shapes of `speed`, as they are and not as ratios
    python3 bench/fp32.py speed  [--lib PATH] [--kernel FAMILY]   between CUDA events, in turns and each by itself
    python3 bench/fp32.py speed --shape 2,8,512,256 2,8,2048,192,causal

Errors are relative to the RMS of the exact result, and a ratio below 1 means that heed's is the smaller one. PyTorch is
its efficient backend, the only fused one it has for fp32.
"""
import argparse
import ctypes as C
import math
import os
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from cuda_bench import Heed


# ---- Errors ----------------------------------------------------------------------------------------------------------

def spread(t, decades, dims):
    """Each element, row or column times 10 to a power that is uniform in -decades .. decades."""
    shape = [n if d in dims else 1 for d, n in enumerate(t.shape)]
    return t * 10 ** (decades * (2 * torch.rand(shape, device=t.device, dtype=torch.float64) - 1)).float()


def opposed(q, k):
    by = 10 ** torch.linspace(-4, 4, q.shape[3], device=q.device)
    return q * by, k / by


KINDS = {
    "normal": lambda q, k, v, g: (q, k, v, g),
    "v of mean 1": lambda q, k, v, g: (q, k, v + 1, g),
    "logits to 100": lambda q, k, v, g: (20 * q, k, v, g),
    "q 1e-30, k 1e30": lambda q, k, v, g: (1e-30 * q, 1e30 * k, v, g),
    "v 1e30": lambda q, k, v, g: (q, k, 1e30 * v, g * 1e-30),
    "v 1e-30": lambda q, k, v, g: (q, k, 1e-30 * v, g),
    "v 1e-40": lambda q, k, v, g: (q, k, 1e-20 * (1e-20 * v), g),
    "d_o 1e-40": lambda q, k, v, g: (q, k, v, 1e-20 * (1e-20 * g)),
    "q 1e-40": lambda q, k, v, g: (1e-20 * (1e-20 * q), k, v, g),
    "d_o 1e-8": lambda q, k, v, g: (q, k, v, 1e-8 * g),
    "d_o 1e8": lambda q, k, v, g: (q, k, v, 1e8 * g),
    "rows 1e-4..1e4": lambda q, k, v, g: (q, k, spread(v, 4, (0, 1, 2)), spread(g, 4, (0, 1, 2))),
    "elements 1e-4..1e4": lambda q, k, v, g: (q, k, spread(v, 4, (0, 1, 2, 3)), spread(g, 4, (0, 1, 2, 3))),
    "q, k elements": lambda q, k, v, g: (spread(q, 1, (0, 1, 2, 3)), spread(k, 1, (0, 1, 2, 3)), v, g),
    "columns opposed": lambda q, k, v, g: (*opposed(q, k), v, g),
}

RARE = {"logits to 500": lambda q, k, v, g: (100 * q, k, v, g)}  # by name alone


# Shape, causal, key stride: of each kernel those that tell most. LONG is where HEED_TF32 makes a difference.
SHORT = [((2, 8, 64, 64), False, 1), ((4, 4, 128, 32), True, 1), ((2, 8, 128, 64), False, 1), ((2, 8, 256, 64), True, 1),
         ((2, 8, 256, 64), False, 2), ((2, 4, 128, 128), False, 1), ((2, 4, 256, 128), False, 1),
         ((2, 4, 128, 192), False, 1), ((2, 4, 256, 256), True, 1), ((2, 4, 300, 256), True, 1)]
LONG = [((2, 4, 512, 64), False, 1), ((2, 4, 512, 64), True, 1), ((2, 4, 1024, 64), False, 2),
        ((1, 2, 2048, 128), False, 1)]
SPEED = [(8, 8, 1024, 64), (4, 16, 4096, 128), (1, 16, 16384, 128)]
TF32 = 1


def cell_of(text):
    """2,8,300,64 or 2,8,300,64,causal"""
    numbers, causal = text.removesuffix(",causal").split(","), text.endswith(",causal")
    return tuple(map(int, numbers)), causal, 1


def exact(q, k, v, g, causal):
    """So many heads at a time as have scores of 2 GB."""
    found, shapes = [], [t.shape for t in (g, q, k, v)]
    at_once = max(1, (1 << 28) // (q.shape[2] * k.shape[2]))
    for some in zip(*(t.flatten(0, 1).split(at_once) for t in (q, k, v, g))):
        leaves = [t.double().requires_grad_() for t in some[:3]]
        s = leaves[0] @ leaves[1].transpose(-2, -1) / q.shape[3] ** 0.5
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], device=q.device).triu(1).bool(), float("-inf"))
        o = torch.softmax(s, -1) @ leaves[2]
        found.append([o.detach(), *torch.autograd.grad(o, leaves, some[3].double())])
    return [torch.cat(parts).view(shape) for parts, shape in zip(zip(*found), shapes)]


def fused(q, k, v, g, causal, backend):
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(backend):
        o = scaled_dot_product_attention(*leaves, is_causal=causal)
    return [o.detach(), *torch.autograd.grad(o, leaves, g)]


def errors_of(results, expected):
    """[(largest, RMS)] of each result."""
    found = []
    for x, y in zip(results, expected):
        size = y.square().mean().sqrt().clamp_min(1e-300)
        e = (x.double() - y) / size
        found.append((e.abs().max().item(), e.square().mean().sqrt().item()))
    return found


def draw(lib, args, shape, causal, stride, make, seed):
    """[(largest, RMS)] of heed and of PyTorch."""
    torch.manual_seed(seed)
    q, k, v, g = make(*(torch.randn(shape, device="cuda") for _ in range(4)))
    heed = Heed(lib, q, k, v, g, args.kernel, causal=int(causal), key_stride=stride)
    for x in heed.x:
        x.precision = TF32 if args.tf32 else 0
    heed.forward()
    if not args.forward:
        heed.backward()
    seen = q, k[:, :, ::stride], v[:, :, ::stride], g
    dq, dk, dv = heed.grads
    expected = exact(*seen, causal)
    ours = errors_of([heed.o, dq, dk[:, :, ::stride], dv[:, :, ::stride]], expected)
    theirs = errors_of(fused(*seen, causal, SDPBackend.MATH if args.tf32 else SDPBackend.EFFICIENT_ATTENTION), expected)
    return (ours[:1], theirs[:1]) if args.forward else (ours, theirs)


def report_errors(lib, args):
    """The largest of some thousand errors is a matter of luck: of several draws the geometric mean of the ratios."""
    draws = args.draws
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    print(f"error over that of PyTorch, RMS (largest), {draws} draws; first RMS of o, heed and PyTorch\n")
    print("| shape | data | o: heed, PyTorch | o | dQ | dK | dV |\n|---|---|---|---|---|---|---|")
    worst, most, single = 0, 0, 0
    kinds = {kind: (KINDS | RARE)[kind] for kind in args.kind or KINDS}
    for shape, *how in args.shape or (LONG if args.tf32 or args.long else SHORT + LONG):
        for kind, make in kinds.items():
            all_of_it = [draw(lib, args, shape, *how, make, seed) for seed in range(1, draws + 1)]
            cells = []
            for n in range(len(all_of_it[0][0])):
                rms = [sum(way[side][n][1] ** 2 for way in all_of_it) ** 0.5 for side in (0, 1)]
                ratios = [ours[n][0] / theirs[n][0] for ours, theirs in all_of_it]
                mean = math.prod(ratios) ** (1 / draws)
                worst, most, single = max(worst, rms[0] / rms[1]), max(most, mean), max(single, *ratios)
                cells.append(f"{rms[0] / rms[1]:.2f} ({mean:.2f})")
            name = ",".join(map(str, shape)) + (" causal" if how[0] else f" 1 of {how[1]}" if how[1] > 1 else "")
            of_o = ((sum(way[side][0][1] ** 2 for way in all_of_it) / draws) ** 0.5 for side in (0, 1))
            print(f"| {name} | {kind} | {', '.join(f'{x:.1e}' for x in of_o)} | " + " | ".join(cells) + " |", flush=True)
    print(f"\nworst: RMS {worst:.2f}, largest {most:.2f}, of one draw {single:.2f}")


def report_goals(lib, args):
    """RMS over all draws, and the largest of each, in the mean."""
    print(f"RMS (largest), relative to the RMS of the exact result, {args.draws} draws\n")
    print("| shape | | o | dQ | dK | dV |\n|---|---|---|---|---|---|")
    for shape in SPEED:
        for causal in (False, True):
            all_of_it = [draw(lib, args, shape, causal, 1, KINDS["normal"], seed) for seed in range(1, args.draws + 1)]
            for side, who in enumerate(("heed", "PyTorch")):
                cells = []
                for n in range(4):
                    rms = (sum(way[side][n][1] ** 2 for way in all_of_it) / args.draws) ** 0.5
                    cells.append(f"{rms:.1e} ({sum(way[side][n][0] for way in all_of_it) / args.draws:.1e})")
                name = ",".join(map(str, shape)) + (" causal" if causal else "")
                print(f"| {name} | {who} | " + " | ".join(cells) + " |", flush=True)


# ---- Speed -----------------------------------------------------------------------------------------------------------

def in_turns(calls, budget_ms=150):
    """Medians of single calls of all, one of each after the other: milliseconds between events. The GPU is kept busy until a
    call is queued, so that its time on the CPU does not count."""
    times = [[] for _ in calls]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spent = 0
    while len(times[0]) < 6 or (spent < budget_ms and len(times[0]) < 41):
        for call, found in zip(calls, times):
            torch.cuda._sleep(400_000)
            begin.record(), call(), end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end))
            spent += found[-1]
    return [statistics.median(found[1:]) for found in times]


def by_itself(call, one_ms, budget_ms=60):
    """The same call over and over, which keeps the card hot: milliseconds of one."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    repeats = max(2, int(budget_ms / one_ms))
    for _ in range(repeats):
        call()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def report_speed(lib, kernel, backward, shapes):
    ways = ("forward", "backward") if backward else ("forward",)
    print("fp32 TFLOP/s and ratio, heed and PyTorch in turns; in brackets each by itself, over and over")
    print(f"{'':26}" + "".join(f"{way + ': heed':>18}{'PyTorch':>16}{'ratio':>15}" for way in ways))
    for shape, causal, *_ in shapes or [(shape, causal) for shape in SPEED for causal in (False, True)]:
        q, k, v, g = (torch.randn(shape, device="cuda") for _ in range(4))
        heed = Heed(lib, q, k, v, g, kernel, causal=int(causal))
        flop = 4 * shape[0] * shape[1] * shape[2] ** 2 * shape[3] / (2 if causal else 1) / 1e9
        line = f"{','.join(map(str, shape)) + (' causal' if causal else ''):<26}"
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            o = scaled_dot_product_attention(*leaves, is_causal=causal)

            def forward():
                with torch.no_grad():
                    scaled_dot_product_attention(*leaves, is_causal=causal)

            def back():
                torch.autograd.grad(o, leaves, g, retain_graph=True)

            for way, ours, theirs in (("forward", heed.forward, forward), ("backward", heed.backward, back)):
                if way not in ways:
                    continue
                ours(), theirs()
                turns = in_turns((ours, theirs))
                alone = [by_itself(call, ms) for call, ms in zip((ours, theirs), turns)]
                work = flop * (2.5 if way == "backward" else 1)
                rates = [f"{work / x:.1f} ({work / y:.1f})" for x, y in zip(turns, alone)]
                line += f"{rates[0]:>18}{rates[1]:>16}{f'{turns[1] / turns[0]:.2f} ({alone[1] / alone[0]:.2f})':>15}"
        print(line, flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("what", choices=("errors", "speed"))
    p.add_argument("--lib", default="build/libheed.so")
    p.add_argument("--kernel", default=None)
    p.add_argument("--draws", type=int, default=4)
    p.add_argument("--shape", type=cell_of, nargs="+", help="these alone, such as 2,8,300,64,causal")
    p.add_argument("--kind", choices=[*KINDS, *RARE], nargs="+", metavar="KIND", help="errors with these kinds of data alone")
    p.add_argument("--tf32", action="store_true", help="errors under HEED_TF32, beside PyTorch's matmul with tf32 allowed")
    p.add_argument("--long", action="store_true", help="errors of long sequences alone")
    p.add_argument("--forward", action="store_true", help="leave the backward out")
    p.add_argument("--goals", action="store_true", help="errors of the shapes of `speed`")
    args = p.parse_args()
    lib = C.CDLL(args.lib)
    lib.heed_last_error.restype = C.c_char_p
    if args.what == "errors":
        (report_goals if args.goals else report_errors)(lib, args)
    else:
        report_speed(lib, args.kernel, not args.forward, args.shape)


if __name__ == "__main__":
    main()
