"""fp32 on one GPU, heed beside PyTorch's scaled_dot_product_attention, in one process.

    python3 bench/fp32.py errors [--lib PATH] [--kernel FAMILY] [--draws 4]   against fp64, by kind of data
    python3 bench/fp32.py speed  [--lib PATH] [--kernel FAMILY]   medians between CUDA events
    python3 bench/fp32.py small  [--lib PATH] [--dtype f32,f16]   problems of microseconds: replays of a CUDA graph

Errors are relative to the RMS of the exact result, and a ratio below 1 means that heed's is the smaller one. PyTorch is
its efficient backend, the only fused one it has for fp32; in `speed` and `small` the fastest that takes the problem.
"""
import argparse
import ctypes as C
import math
import os
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from cuda_bench import DTYPES, Heed, median_ms

BACKENDS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION}


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
    "v 1e-40": lambda q, k, v, g: (q, k, 1e-20 * (1e-20 * v), g),
    "d_o 1e-8": lambda q, k, v, g: (q, k, v, 1e-8 * g),
    "d_o 1e8": lambda q, k, v, g: (q, k, v, 1e8 * g),
    "rows 1e-4..1e4": lambda q, k, v, g: (q, k, spread(v, 4, (0, 1, 2)), spread(g, 4, (0, 1, 2))),
    "elements 1e-4..1e4": lambda q, k, v, g: (q, k, spread(v, 4, (0, 1, 2, 3)), spread(g, 4, (0, 1, 2, 3))),
    "q, k elements": lambda q, k, v, g: (spread(q, 1, (0, 1, 2, 3)), spread(k, 1, (0, 1, 2, 3)), v, g),
    "columns opposed": lambda q, k, v, g: (*opposed(q, k), v, g),
}


def exact(q, k, v, g, causal):
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    s = leaves[0] @ leaves[1].transpose(-2, -1) / q.shape[3] ** 0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], device=q.device).triu(1).bool(), float("-inf"))
    o = torch.softmax(s, -1) @ leaves[2]
    return [o.detach(), *torch.autograd.grad(o, leaves, g.double())]


def fused(q, k, v, g, causal):
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
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


def draw(lib, kernel, shape, causal, make, seed, backward):
    """[(largest, RMS)] of heed and of PyTorch."""
    torch.manual_seed(seed)
    q, k, v, g = make(*(torch.randn(shape, device="cuda") for _ in range(4)))
    heed = Heed(lib, q, k, v, g, kernel, causal=int(causal))
    heed.forward()
    if backward:
        heed.backward()
    expected = exact(q, k, v, g, causal)
    ours, theirs = errors_of([heed.o, *heed.grads], expected), errors_of(fused(q, k, v, g, causal), expected)
    return (ours, theirs) if backward else (ours[:1], theirs[:1])


def report_errors(lib, kernel, shapes, backward, draws):
    """The largest of some thousand errors is a matter of luck: of several draws the geometric mean of the ratios."""
    print(f"error over that of PyTorch, RMS (largest), {draws} draws")
    print(f"{'shape':<18}{'data':<20}{'o: heed RMS':<13}" + "".join(f"{n:<15}" for n in ("o", "dQ", "dK", "dV")))
    worst, most, single = 0, 0, 0
    for shape, causal in shapes:
        for kind, make in KINDS.items():
            all_of_it = [draw(lib, kernel, shape, causal, make, seed, backward) for seed in range(1, draws + 1)]
            cells = []
            for n in range(len(all_of_it[0][0])):
                rms = [sum(way[side][n][1] ** 2 for way in all_of_it) ** 0.5 for side in (0, 1)]
                ratios = [ours[n][0] / theirs[n][0] for ours, theirs in all_of_it]
                mean = math.prod(ratios) ** (1 / draws)
                worst, most, single = max(worst, rms[0] / rms[1]), max(most, mean), max(single, *ratios)
                cells.append(f"{rms[0] / rms[1]:.2f} ({mean:.2f})")
            name = ",".join(map(str, shape)) + (" causal" if causal else "")
            ours = (sum(way[0][0][1] ** 2 for way in all_of_it) / draws) ** 0.5
            print(f"{name:<18}{kind:<20}{ours:<13.2e}" + "".join(f"{c:<15}" for c in cells), flush=True)
    print(f"worst: RMS {worst:.2f}, largest {most:.2f}, of one draw {single:.2f}")


# ---- Speed -----------------------------------------------------------------------------------------------------------

def graph_us(call, repeats=20):
    """Microseconds of one call inside a graph of many."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(), call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                call()
    return 1e3 * min(median_ms(graph.replay, 20) for _ in range(2)) / repeats


def best_of_torch(q, k, v, g, causal, time, backward):
    best = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                leaves = [t.detach().clone().requires_grad_(backward) for t in (q, k, v)]

                def both():
                    o = scaled_dot_product_attention(*leaves, is_causal=causal)
                    return torch.autograd.grad(o, leaves, g) if backward else o
                best[name] = time(both)
        except RuntimeError:
            continue
    return min(best.items(), key=lambda item: item[1])


def report_speed(lib, kernel, backward):
    print("fp32 TFLOP/s              forward: heed  PyTorch  ratio     backward: heed  PyTorch  ratio")
    for shape in ((8, 8, 1024, 64), (4, 16, 4096, 128), (1, 16, 16384, 128)):
        for causal in (False, True):
            q, k, v, g = (torch.randn(shape, device="cuda") for _ in range(4))
            heed = Heed(lib, q, k, v, g, kernel, causal=int(causal))
            flop = 4 * shape[0] * shape[1] * shape[2] ** 2 * shape[3] / (2 if causal else 1) / 1e9
            ours = median_ms(heed.forward)
            leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                run = lambda: scaled_dot_product_attention(*leaves, is_causal=causal)
                with torch.no_grad():
                    theirs = median_ms(run)
            line = f"{','.join(map(str, shape)) + (' causal' if causal else ''):<26}"
            line += f"{flop / ours:13.1f}{flop / theirs:9.1f}{theirs / ours:7.2f}"
            if backward:
                o = run()
                theirs = median_ms(lambda: torch.autograd.grad(o, leaves, g, retain_graph=True))
                ours = median_ms(heed.backward)
                line += f"{2.5 * flop / ours:19.1f}{2.5 * flop / theirs:9.1f}{theirs / ours:7.2f}"
            print(line)


def report_small(lib, kernel, dtypes):
    print("microseconds in a graph             forward: heed  PyTorch  ratio    both: heed  PyTorch  ratio")
    for name in dtypes:
        for shape in ((2, 8, 64, 64), (4, 12, 128, 64), (2, 16, 256, 64), (2, 8, 77, 64), (1, 1, 128, 32)):
            q, k, v, g = (torch.randn(shape, device="cuda").to(DTYPES[name][1]) for _ in range(4))
            heed = Heed(lib, q, k, v, g, kernel, name)

            def forward():
                heed.x[0].stream = torch.cuda.current_stream().cuda_stream
                heed.forward()

            def both():
                forward()
                heed.x[1].stream = torch.cuda.current_stream().cuda_stream
                heed.backward()
            ours, ours2 = graph_us(forward), graph_us(both)
            with torch.no_grad():
                which, theirs = best_of_torch(q, k, v, g, False, graph_us, False)
            which2, theirs2 = best_of_torch(q, k, v, g, False, graph_us, True)
            print(f"{name:<5}{','.join(map(str, shape)):<14}{which + ' ' + which2:<22}{ours:7.2f}{theirs:9.2f}"
                  f"{theirs / ours:7.2f}{ours2:14.2f}{theirs2:9.2f}{theirs2 / ours2:7.2f}")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("what", choices=("errors", "speed", "small"))
    p.add_argument("--lib", default="build/libheed.so")
    p.add_argument("--kernel", default=None)
    p.add_argument("--dtype", default="f32,f16,bf16")
    p.add_argument("--draws", type=int, default=4)
    p.add_argument("--forward", action="store_true", help="leave the backward out")
    args = p.parse_args()
    lib = C.CDLL(args.lib)
    lib.heed_last_error.restype = C.c_char_p
    if args.what == "errors":
        report_errors(lib, args.kernel, [((2, 8, 128, 64), False), ((2, 8, 256, 64), True), ((2, 4, 512, 64), False),
                                         ((2, 4, 512, 64), True), ((1, 2, 2048, 128), False)],
                      not args.forward, args.draws)
    elif args.what == "speed":
        report_speed(lib, args.kernel, not args.forward)
    else:
        report_small(lib, args.kernel, args.dtype.split(","))


if __name__ == "__main__":
    main()
