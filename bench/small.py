"""Problems of microseconds and strided ones on one GPU, heed beside PyTorch, in one process.

    python3 bench/small.py replay  [--lib PATH] [--dtype f32,f16]   forward and both: replays of a CUDA graph
    python3 bench/small.py modes   [--lib PATH] [--only WORDS]      the same under masks, for head sizes 8 to 256, ...
    python3 bench/small.py grid    [--lib PATH] [--only WORDS]      the same from few heads to a full GPU, 64 to 256 keys
    python3 bench/small.py grid --keys 256,512,1024 --heads 1x8,2x16 --size 64,128    or any others
    python3 bench/small.py grid --with bias,mask --dtype f32 --keys 512,1024          with these, in place of full and causal
    python3 bench/small.py decode  [--lib PATH] [--kernel NAMES]    few rows against many keys; others of heed's kernels beside
    python3 bench/small.py user    [--dtype f32,f16]                eager calls of the Python package, by the host's clock
    python3 bench/small.py strided                                  keys off a stride, through the Python package
    python3 bench/small.py errors  [--lib PATH] [--dtype f32,f16]   of all of these against fp64

A ratio is PyTorch's time over heed's. PyTorch is the fastest backend of scaled_dot_product_attention that takes the problem;
`plain` is matmul, softmax, matmul, and `naive` the same over all keys with those off the stride masked. In `replay`, `modes`,
`grid` and `decode` a time is that of one call among twenty in a graph, or fewer long ones. In `user` it is that of one call
among many in a row, without waiting for any but the last: what a loop costs. In `user` and `strided` those who are timed take
turns. Errors are relative to
the RMS of the exact result; PyTorch's are those of the backend that it takes by itself.
"""
import argparse
import ctypes as C
import math
import os
import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from cuda_bench import DTYPES, Heed, median_ms
from fp32 import errors_of, exact

BACKENDS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION}
SHAPES = ((2, 8, 64, 64), (4, 12, 128, 64), (2, 16, 256, 64), (2, 8, 77, 64), (1, 1, 128, 32))
STRIDED = (("f32", (4, 8, 512, 64), 2), ("bf16", (4, 16, 4096, 128), 4), ("bf16", (1, 16, 16384, 128), 8))


def normal(dtype, *shape):
    return torch.randn(shape, device="cuda").to(DTYPES[dtype][1])


# ---- Replays of a graph ----------------------------------------------------------------------------------------------

def graph_of(call, repeats):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(), call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                call()
    return graph


def graph_us(call, repeats=20):
    """Microseconds of one call inside a graph of many."""
    graph = graph_of(call, repeats)
    return 1e3 * min(median_ms(graph.replay, 20) for _ in range(2)) / repeats


def best_of_torch(q, k, v, g, backward, repeats=20, **options):
    best = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                leaves = [t.detach().clone().requires_grad_(backward) for t in (q, k, v)]

                def both():
                    o = scaled_dot_product_attention(*leaves, **options)
                    return torch.autograd.grad(o, leaves, g) if backward else o
                with torch.set_grad_enabled(backward):
                    best[name] = graph_us(both, repeats)
        except RuntimeError:
            continue
    return min(best.items(), key=lambda item: item[1])


class OnStream(Heed):
    """On whichever stream is the current one, so that graphs can capture it."""

    def forward(self):
        self.x[0].stream = torch.cuda.current_stream().cuda_stream
        super().forward()

    def both(self):
        self.forward()
        self.x[1].stream = torch.cuda.current_stream().cuda_stream
        self.backward()

    def families(self):
        """Of the rows that it gets, forward and backward."""
        text, found = C.create_string_buffer(20000), []
        for x, g in zip(self.x, (None, C.byref(self.g))):
            self.check(self.lib.heed_explain(C.byref(self.a), g, C.byref(x), None, text, len(text)))
            taken = [line for line in text.value.decode().split("\n") if ": taken" in line]
            found.append(taken[0].split("_cuda_")[1].split(":")[0].rsplit("_", 1)[0])
        return "/".join(found)


def replay(lib, dtypes):
    print("microseconds in a graph             forward: heed  PyTorch  ratio    both: heed  PyTorch  ratio")
    for name in dtypes:
        for shape in SHAPES:
            q, k, v, g = (normal(name, *shape) for _ in range(4))
            heed = OnStream(lib, q, k, v, g, None, name)
            ours, ours2 = graph_us(heed.forward), graph_us(heed.both)
            which, theirs = best_of_torch(q, k, v, g, False)
            which2, theirs2 = best_of_torch(q, k, v, g, True)
            print(f"{name:<5}{','.join(map(str, shape)):<14}{which + ' ' + which2:<22}{ours:7.2f}{theirs:9.2f}"
                  f"{theirs / ours:7.2f}{ours2:14.2f}{theirs2:9.2f}{theirs2 / ours2:7.2f}", flush=True)


def problems(name):
    """(description, shape of q, keys, key heads, what heed is told, what PyTorch is told, key stride)."""
    b, h, s, d = 4, 12, 128, 64
    mask = torch.rand(b, 1, s, s, device="cuda") > 0.1
    mask[..., 0] = True
    bias = normal(name, 1, h, s, s)
    slopes = torch.rand(1, h, 1, 1, device="cuda")
    at = torch.arange(s, device="cuda")
    band = (at[:, None] - at).abs() <= 16
    window = dict(windowed=1, window_left=16, window_right=16)
    distance = (slopes * -(at[:, None] - at).abs()).to(DTYPES[name][1])
    square = lambda s, d=d: ((b, h, s, d), s, h)
    yield "full", *square(s), {}, {}, 1
    yield "causal", *square(s), dict(causal=1), dict(is_causal=True), 1
    yield "window", *square(s), window, dict(attn_mask=band), 1
    yield "mask", *square(s), dict(mask=mask), dict(attn_mask=mask), 1
    yield "bias", *square(s), dict(bias=bias), dict(attn_mask=bias), 1
    yield "ALiBi", *square(s), dict(alibi=slopes), dict(attn_mask=distance), 1
    yield "mask, 64 keys", *square(64), dict(mask=mask[..., :64, :64]), dict(attn_mask=mask[..., :64, :64]), 1
    yield "every 2nd key", *square(2 * s), dict(key_stride=2), {}, 2
    yield "every 4th key", *square(2 * s), dict(key_stride=4), {}, 4
    yield "12 heads over 4", (b, h, s, d), s, 4, {}, dict(enable_gqa=True), 1
    for rows in (77, 256, 1024, 4096):
        yield f"{rows} rows, 77 keys", (2, 8, rows, 64), 77, 8, {}, {}, 1
    yield "1 row, 200 keys", (b, h, 1, d), 200, h, {}, {}, 1
    for size in (8, 16, 32, 40, 80, 96, 128, 160, 192, 256):
        yield f"d{size}, 64 keys", *square(64, size), {}, {}, 1
        yield f"d{size}", *square(s, size), {}, {}, 1
    for size in (64, 128, 256):
        yield f"d{size} causal, 256 keys", *square(256, size), dict(causal=1), dict(is_causal=True), 1


def modes(lib, dtypes, only):
    print("microseconds in a graph, B, H = 4, 12, S = 128, d64 where nothing else is said; of heed: rows of the table")
    for name in dtypes:
        for text, shape, keys, heads, mine, theirs, stride in problems(name):
            if not any(word in text for word in only.split(",")):
                continue
            b, _, _, d = shape
            q, k, v, g = normal(name, *shape), *(normal(name, b, heads, keys, d) for _ in range(2)), normal(name, *shape)
            heed = OnStream(lib, q, k, v, g, None, name, **mine)
            ours, ours2 = graph_us(heed.forward, 10), graph_us(heed.both, 10)
            sliced = (q, k[:, :, ::stride].contiguous(), v[:, :, ::stride].contiguous(), g)
            which, peer = best_of_torch(*sliced, False, 10, **theirs)
            which2, peer2 = best_of_torch(*sliced, True, 10, **theirs)
            print(f"{name:<5}{text:<24}{heed.families():<26}{ours:7.2f} {which[:5]:<6}{peer / ours:5.2f}{ours2:9.2f} "
                  f"{which2[:5]:<6}{peer2 / ours2:5.2f}", flush=True)


def kind_of(kind, name, batch, heads, s):
    """What heed and PyTorch are told of a full or causal problem, or one with a bias or a mask."""
    if kind == "bias":
        bias = normal(name, 1, heads, s, s)
        return dict(bias=bias), dict(attn_mask=bias.expand(batch, -1, -1, -1))
    if kind == "mask":
        mask = torch.rand(1, 1, s, s, device="cuda") > 0.3
        return dict(mask=mask), dict(attn_mask=mask)
    return dict(causal=int(kind == "causal")), dict(is_causal=kind == "causal")


def grid(lib, dtypes, only, keys, batches, sizes, kinds):
    """How many times as fast as PyTorch, forward and both: rows are heads and their size, columns keys."""
    print("times as fast as PyTorch, forward and both (us); as many rows as keys" + "".join(f"{s:>30}" for s in keys))
    for name in dtypes:
        for batch, heads in batches:
            for d in sizes:
                for kind in kinds:
                    line = f"{name:<5}{batch} x {heads}, d{d} {kind:<8}"
                    if not any(word in line for word in only.split(",")):
                        continue
                    for s in keys:
                        q, k, v, g = (normal(name, batch, heads, s, d) for _ in range(4))
                        told, torch_told = kind_of(kind, name, batch, heads, s)
                        heed = OnStream(lib, q, k, v, g, None, name, **told)
                        repeats = 3 if batch * heads > 200 else 10
                        ours = [graph_us(call, repeats) for call in (heed.forward, heed.both)]
                        theirs = [best_of_torch(q, k, v, g, way, repeats, **torch_told)[1] for way in (False, True)]
                        line += f"{theirs[0] / ours[0]:7.2f}{theirs[1] / ours[1]:6.2f} ({ours[0]:6.1f}, {ours[1]:6.1f})"
                    print(line, flush=True)


# ---- Few rows against many keys --------------------------------------------------------------------------------------

DECODE = ((2, 8, 8, 1, 512, 64), (2, 8, 8, 1, 4096, 64), (2, 8, 8, 1, 4096, 128), (2, 8, 8, 1, 4096, 256),
          (1, 8, 8, 1, 32768, 128), (1, 32, 8, 1, 4096, 128), (16, 32, 8, 1, 4096, 128), (1, 32, 4, 1, 16384, 128),
          (16, 32, 32, 1, 2048, 128), (64, 32, 8, 1, 512, 128), (2, 8, 8, 4, 4096, 128), (2, 8, 8, 8, 4096, 64),
          (16, 32, 8, 8, 2048, 128), (2, 8, 8, 16, 4096, 128))


def decode(lib, dtypes, families):
    """Microseconds, and GB/s of K and V: heed, the kernels named in families, and PyTorch, of which enable_gqa is asked where
    heads share keys."""
    print("B, Hq, Hk, rows, keys, D: us of heed, GB/s of k and v; PyTorch's best, ratio; us of other kernels")
    for name in dtypes:
        for b, hq, hk, rows, keys, d in DECODE:
            q, k, v = normal(name, b, hq, rows, d), *(normal(name, b, hk, keys, d) for _ in range(2))
            heed = OnStream(lib, q, k, v, q, None, name)
            ours = graph_us(heed.forward, 10)
            which, theirs = best_of_torch(q, k, v, q, False, 10, **(dict(enable_gqa=True) if hq != hk else {}))
            if hq == hk:
                which, theirs = min((which, theirs), ("plain", graph_us(lambda: plain(q, k, v), 10)), key=lambda x: x[1])
            others = []
            for family in families:
                size = C.c_size_t()
                heed.x[0].kernel = f"forward_cuda_{family}_{name}".encode()
                heed.check(lib.heed_workspace_size(C.byref(heed.a), None, C.byref(heed.x[0]), C.byref(size)))
                space = torch.empty(size.value, dtype=torch.uint8, device="cuda")
                heed.x[0].workspace, heed.x[0].workspace_bytes = space.data_ptr(), size.value
                others.append(f"{family} {graph_us(heed.forward, 10):.1f}")
            bytes_ = 2 * k.numel() * k.element_size()
            print(f"{name:<5}{f'{b}, {hq}, {hk}, {rows}, {keys}, {d}':<28}{ours:8.1f}"
                  f"{bytes_ / ours / 1e3:8.0f}   {which:<10}{theirs:8.1f}{theirs / ours:7.2f}   {', '.join(others)}", flush=True)


# ---- As a user times it ----------------------------------------------------------------------------------------------

def plain(q, k, v):
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5, -1), v)


def loop_us(calls, count, rounds=7):
    """Microseconds of each call in a loop of so many, median of the rounds."""
    taken = [[] for _ in calls]
    for turn in range(rounds + 1):
        for call, times in zip(calls, taken):
            call(), torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(count):
                call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begun) / count * 1e6)
    return [statistics.median(times[1:]) for times in taken]


def user(dtypes):
    import heed

    ways = (plain, scaled_dot_product_attention, heed.attention)
    print("microseconds of an eager call: plain, SDPA, heed; plain / heed      forward + backward: the same")
    for name in dtypes:
        for shape in SHAPES:
            q, k, v, g = (normal(name, *shape) for _ in range(4))
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]

            def both(way):
                def call():
                    for t in leaves:
                        t.grad = None
                    way(*leaves).backward(g)
                return call
            with torch.no_grad():
                one = loop_us([lambda way=way: way(q, k, v) for way in ways], 50)
            two = loop_us([both(way) for way in ways], 30)
            print(f"{name:<5}{','.join(map(str, shape)):<14}" + "      ".join(
                f"{x[0]:8.1f}{x[1]:8.1f}{x[2]:8.1f}{x[0] / x[2]:7.2f}" for x in (one, two)), flush=True)


# ---- Strided ---------------------------------------------------------------------------------------------------------

def strided():
    import heed

    print("microseconds: heed; sliced SDPA, its keys copied or not; naive, and their ratios to heed")
    for name, shape, stride in STRIDED:
        q, k, v, g = (normal(name, *shape) for _ in range(4))
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        ways = {"heed": lambda *x: heed.attention(*x, stride=stride),
                "views": lambda q, k, v: scaled_dot_product_attention(q, k[:, :, ::stride], v[:, :, ::stride]),
                "copies": lambda q, k, v: scaled_dot_product_attention(q, k[:, :, ::stride].contiguous(),
                                                                       v[:, :, ::stride].contiguous()),
                "naive": lambda *x: heed.naive_strided_attention(*x, stride)}
        for text, inputs in (("forward", (q, k, v)), ("both", leaves)):
            backward = inputs is leaves
            graphs = {}
            for way, function in ways.items():
                with torch.set_grad_enabled(backward):
                    run = lambda: torch.autograd.grad(function(*inputs), inputs, g) if backward else function(*inputs)
                    graphs[way] = graph_of(run, 1)
            turns = [{way: 1e3 * median_ms(graph.replay, 20) for way, graph in graphs.items()} for _ in range(3)]
            times = {way: statistics.median(turn[way] for turn in turns) for way in ways}
            del graphs
            torch.cuda.empty_cache()
            sliced = min(times["views"], times["copies"])
            print(f"{name:<5}{','.join(map(str, shape)):<16} 1 of {stride}  {text:<8}" + "".join(
                f"{t:10.1f}" for t in times.values()) + f"   sliced {sliced / times['heed']:.2f}"
                f"   naive {times['naive'] / times['heed']:.1f}", flush=True)


# ---- Errors ----------------------------------------------------------------------------------------------------------

def draw(lib, name, shape, stride, seed):
    """[(largest, RMS)] of o, dQ, dK, dV, heed's and PyTorch's."""
    torch.manual_seed(seed)
    q, k, v, g = (normal(name, *shape) for _ in range(4))
    heed = OnStream(lib, q, k, v, g, None, name, key_stride=stride)
    heed.both()
    dq, dk, dv = heed.grads
    ours = heed.o, dq, dk[:, :, ::stride], dv[:, :, ::stride]
    seen = q, k[:, :, ::stride], v[:, :, ::stride], g
    leaves = [t.detach().clone().requires_grad_() for t in seen[:3]]
    o = scaled_dot_product_attention(*leaves)
    theirs = o.detach(), *torch.autograd.grad(o, leaves, g)
    heads = [exact(*(t[:, h:h + 1] for t in seen), False) for h in range(shape[1])]
    expected = [torch.cat(of, 1) for of in zip(*heads)]
    return errors_of(ours, expected), errors_of(theirs, expected)


def errors(lib, dtypes, draws=3):
    print(f"error over that of PyTorch, RMS (largest), {draws} draws; first RMS of o, heed and PyTorch\n")
    print("| | o: heed, PyTorch | o | dQ | dK | dV |\n|---|---|---|---|---|---|")
    for name, shape, stride in [(name, shape, 1) for name in dtypes for shape in SHAPES] + [
            problem for problem in STRIDED if problem[0] in dtypes]:
        found = [draw(lib, name, shape, stride, seed) for seed in range(1, draws + 1)]
        rms = [[math.hypot(*(way[side][n][1] for way in found)) / draws ** 0.5 for n in range(4)] for side in (0, 1)]
        most = [math.prod(ours[n][0] / theirs[n][0] for ours, theirs in found) ** (1 / draws) for n in range(4)]
        text = f"{name} {','.join(map(str, shape))}" + (f" 1 of {stride}" if stride > 1 else "")
        print(f"| {text} | {rms[0][0]:.1e}, {rms[1][0]:.1e} | " + " | ".join(
            f"{ours / theirs:.2f} ({ratio:.2f})" for ours, theirs, ratio in zip(*rms, most)) + " |", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("replay", "modes", "grid", "decode", "user", "strided", "errors"))
    p.add_argument("--lib", default="build/libheed.so")
    p.add_argument("--dtype", default="f32,f16,bf16")
    p.add_argument("--only", default="", metavar="WORDS", help="modes, grid: those whose names have one of these")
    p.add_argument("--kernel", type=lambda text: text.split(","), default=(), metavar="FAMILIES",
                   help="decode: these of heed's kernels as well, such as sm90,mma")
    numbers = lambda text, between=",": tuple(map(int, text.split(between)))
    p.add_argument("--keys", type=numbers, default=(64, 128, 192, 256), help="grid: these numbers of keys")
    p.add_argument("--size", type=numbers, default=(32, 64, 96, 128, 192, 256), help="grid: these head sizes")
    p.add_argument("--heads", type=lambda text: [numbers(x, "x") for x in text.split(",")], metavar="BxH,...",
                   default=((2, 8), (8, 16), (64, 16)), help="grid: so many sequences of so many heads")
    p.add_argument("--with", dest="kinds", type=lambda text: text.split(","), default=("", "causal"), metavar="KINDS",
                   help="grid: of causal, bias and mask")
    args = p.parse_args()
    dtypes = args.dtype.split(",")
    if args.what in ("user", "strided"):
        return user(dtypes) if args.what == "user" else strided()
    lib = C.CDLL(args.lib)
    lib.heed_last_error.restype = C.c_char_p
    if args.what == "modes":
        modes(lib, dtypes, args.only)
    elif args.what == "decode":
        decode(lib, dtypes, args.kernel)
    elif args.what == "grid":
        grid(lib, dtypes, args.only, args.keys, args.heads, args.size, args.kinds)
    else:
        dict(replay=replay, errors=errors)[args.what](lib, dtypes)


if __name__ == "__main__":
    main()
