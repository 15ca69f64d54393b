"""The compile-time variants of the Hopper kernels (tune_sm90.cu, tune_sm90_backward.cu), checked against fp64 and timed
beside cuDNN.

    python3 bench/tune_sm90.py --lib build-tune/libtune_sm90.so [--backward] [--check] [--head-dim 64,128]
                               [--rows 512,2048,8192] [--ms 1.5] [--rounds 9]

A table for each head size: TFLOP/s with B x S = 16k tokens and H x D = 2048, counting 4 B H S^2 D FLOP, half of it
causal, 2.5 times that backward. The first variant of a head size is one that the library takes: results of the others
are compared with its, and at the end of a line is the geometric mean of their speeds over its. The backward's one
kernel for all gradients is timed with its sums in the order of the keys and in any order. Times are medians of --rounds
replayed graphs in random order, --ms milliseconds each; - where a variant does not take the problem.
"""
import argparse
import ctypes as C
import math
import random
import statistics

import torch
from backward_sm90 import backward_of
from cuda_bench import DTYPES, Attention, Exec, Gradient, replay_ms, view
from forward_sm90 import graph_of, sdpa, with_backend

TYPES = {number: dtype for number, dtype in DTYPES.values()}


class Variant:
    """A variant of the forward."""
    flop, close = 4, 4e-3

    def __init__(self, lib, n):
        self.lib, self.n, self.name = lib, n, lib.tune_name(n).decode()
        self.head_dim, self.dtype = lib.tune_head_dim(n), TYPES[lib.tune_dtype(n)]

    def __call__(self, q, k, v, o, lse=None, **options):
        a = Attention(q=view(q), k=view(k), v=view(v), o=view(o), lse=view(lse), **options)
        x = Exec(backend=1, stream=torch.cuda.current_stream().cuda_stream)
        if self.lib.tune_forward(self.n, C.byref(a), C.byref(x)):
            raise RuntimeError(f"{self.name}: {self.lib.tune_error().decode()}")

    def prepare(self, q, k, v, do, **options):
        """A call, and what it writes."""
        o = torch.full_like(q, math.nan)
        return lambda: self(q, k, v, o, **options), [o]

    @staticmethod
    def rival(q, k, v, do, causal):
        return lambda: sdpa(q, k, v, is_causal=causal)


class Backward:
    """A variant of the backward: of the kernel for keys or the one for queries beside the library's other, or of one
    for all."""
    flop, close, dtype = 10, 1e-2, torch.bfloat16

    def __init__(self, lib, n, forwards, any_order=False):
        self.lib, self.n, self.any_order = lib, n, any_order
        self.name = lib.tune_backward_name(n).decode() + (", any order" if any_order else "")
        self.head_dim = lib.tune_backward_head_dim(n)
        self.forward = next(v for v in forwards if v.head_dim == self.head_dim and v.dtype == self.dtype)

    def prepare(self, q, k, v, do, **options):
        """A call, and what it writes."""
        o, lse = torch.empty_like(q), torch.empty(*q.shape[:3], 1, device="cuda")
        self.forward(q, k, v, o, lse, **options)
        grads = [torch.full_like(t, math.nan) for t in (q, k, v)]
        a = Attention(q=view(q), k=view(k), v=view(v), o=view(o), lse=view(lse), **options)
        g = Gradient(d_o=view(do), **{f"d_{n}": view(t) for n, t in zip("qkv", grads)})
        x, size, keep = Exec(backend=1, nondeterministic=int(self.any_order)), C.c_size_t(), [o, lse]

        def call():
            x.stream = torch.cuda.current_stream().cuda_stream
            if self.lib.tune_backward(self.n, C.byref(a), C.byref(g), C.byref(x), C.byref(size)):
                raise RuntimeError(f"{self.name}: {self.lib.tune_error().decode()}")
            return keep

        call()
        keep.append(torch.empty(size.value + 16, dtype=torch.uint8, device="cuda"))
        x.workspace, x.workspace_bytes = (keep[-1].data_ptr() + 15) // 16 * 16, size.value
        torch.cuda.synchronize()
        return call, grads

    @staticmethod
    def rival(q, k, v, do, causal):
        return backward_of(lambda *x: sdpa(*x, is_causal=causal), (q, k, v), do)

    def check(self):
        """The worst relative error of a gradient."""
        worst = 0.0
        for b, h, rows, keys, options in SHAPES:
            for key_heads in {1, h}:
                q, k, v, do = (torch.randn(b, n, s, self.head_dim, device="cuda").to(self.dtype)
                               for n, s in ((h, rows), (key_heads, keys), (key_heads, keys), (h, rows)))
                call, grads = self.prepare(q, k, v, do, **options)
                call()
                inputs = [t.double().requires_grad_() for t in (q, k, v)]
                o, _ = reference(*inputs, **options)
                scale = max(o.norm().item(), 1.0) / 100  # gradients may be all but 0
                for y, right in zip(grads, torch.autograd.grad(o, inputs, do.double())):
                    worst = max(worst, (y - right).norm().item() / max(right.norm().item(), scale))
        return worst


def reference(q, k, v, causal=0, key_stride=1, windowed=0, window_left=-1, window_right=-1):
    """o and lse in fp64."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q @ k.mT / math.sqrt(q.shape[-1])
    rows, keys = s.shape[-2:]
    i, j = torch.arange(rows, device="cuda")[:, None] + keys - rows, torch.arange(keys, device="cuda")[None]
    seen = (j % key_stride == 0) & (i >= j if causal else i == i)
    if windowed:
        seen &= (j >= i - window_left) & (j <= i + window_right)
    s = s.masked_fill(~seen, -math.inf)
    return torch.softmax(s, -1).nan_to_num(0) @ v, torch.logsumexp(s, -1)


SHAPES = [(1, 1, 1, 1, {}), (1, 2, 63, 65, {}), (2, 2, 129, 1000, {}), (1, 2, 1000, 127, {}), (3, 4, 2048, 2048, {}),
          (2, 2, 1000, 1000, dict(causal=1)), (1, 2, 100, 500, dict(causal=1)), (1, 2, 500, 100, dict(causal=1)),
          (3, 40, 700, 700, dict(causal=1)), (1, 2, 600, 600, dict(causal=1, key_stride=4)),
          (1, 2, 700, 700, dict(windowed=1, window_left=100, window_right=50))]


def check(variant):
    """The worst relative error over shapes, and over logits that leave the range of a first maximum."""
    worst = 0.0
    for b, h, rows, keys, options in SHAPES:
        for key_heads in {1, h}:
            q, k, v = (torch.randn(b, n, s, variant.head_dim, device="cuda").to(variant.dtype)
                       for n, s in ((h, rows), (key_heads, keys), (key_heads, keys)))
            o, lse = torch.full_like(q, math.nan), torch.full((b, h, rows, 1), math.nan, device="cuda")
            try:
                variant(q, k, v, o, lse, **options)
            except RuntimeError as error:
                if "pairs take" in str(error):
                    continue
                raise
            right, right_lse = reference(q, k, v, **options)
            worst = max(worst, (o - right).norm().item() / (right.norm().item() + 1e-30))
            seen = right_lse.isfinite()
            assert (lse[..., 0][~seen] == -math.inf).all() and (lse[..., 0] - right_lse)[seen].abs().max() < 2e-3
    for kind in ("ramp", "large"):
        q, k, v = (torch.randn(2, 2, 1536, variant.head_dim, device="cuda") for _ in range(3))
        if kind == "ramp":
            q[..., 0], k[..., 0] = 40, torch.linspace(40, -40, 1536, device="cuda") * variant.head_dim**0.5
        else:
            q, k = q * 100, k * 100
        q, k, v = (t.to(variant.dtype) for t in (q, k, v))
        o = torch.full_like(q, math.nan)
        variant(q, k, v, o)
        right, _ = reference(q, k, v)
        worst = max(worst, (o - right).norm().item() / right.norm().item())
    return worst


def speeds(variants, head_dim, causal, length, budget, rounds):
    """TFLOP/s of cuDNN and of each variant; nan where it does not take the problem."""
    shape, first = (max(1, 16384 // length), 2048 // head_dim, length, head_dim), variants[0]
    q, k, v, do = (torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(4))
    calls = [x.prepare(q, k, v, do, causal=causal) for x in variants]
    torch.cuda.synchronize()
    calls = [(with_backend("cudnn", first.rival(q, k, v, do, bool(causal))), [])] + calls
    graphs = [graph_of(call) for call, _ in calls]
    torch.cuda.synchronize()
    for variant, graph, (_, results) in zip(variants, graphs[1:], calls[1:]):
        for x, y in zip(results, calls[1][1]):
            error = (x - y).float().norm() / y.float().norm()
            assert not graph or error < first.close, f"{variant.name}: S {length} causal {causal} differs by {error:.1e}"
    times = [[] for _ in graphs]
    for _ in range(rounds):
        for n in random.sample(range(len(graphs)), len(graphs)):
            times[n].append(replay_ms(graphs[n], budget) if graphs[n] else math.nan)
    flop = 1e-9 * first.flop * math.prod(shape) * length / (1 + causal)
    return [flop / statistics.median(t) for t in times]


def table(variants, head_dim, lengths, budget, rounds):
    cells = [speeds(variants, head_dim, causal, n, budget, rounds) for causal in (0, 1) for n in lengths]
    width = max(28, *(len(v.name) + 2 for v in variants))
    print(f"{f'd{head_dim}, full and causal':{width}s}" + "".join(f"{n:>6d}" for n in lengths * 2))
    for n, name in enumerate(["cudnn"] + [v.name for v in variants]):
        row = [cell[n] for cell in cells]
        over = [math.log(x / cell[1]) for x, cell in zip(row, cells) if x == x]
        text = "".join(f"{x:6.0f}" if x == x else "     -" for x in row)
        print(f"{name:{width}s}{text}   {math.exp(sum(over) / max(len(over), 1)):.3f}", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lib", required=True, help="libtune_sm90.so")
    p.add_argument("--backward", action="store_true", help="the backward's variants, not the forward's")
    p.add_argument("--check", action="store_true", help="compare with fp64 first")
    p.add_argument("--head-dim", default="64,96,128,192,256")
    p.add_argument("--rows", default="512,2048,8192")
    p.add_argument("--ms", type=float, default=1.5, help="milliseconds for each time")
    p.add_argument("--rounds", type=int, default=9, help="times for each variant and problem")
    args = p.parse_args()
    lib = C.CDLL(args.lib)
    lib.tune_name.restype = lib.tune_error.restype = lib.tune_backward_name.restype = C.c_char_p
    sizes = [int(n) for n in args.head_dim.split(",")]
    variants = [Variant(lib, n) for n in range(lib.tune_count())]
    if args.backward:
        forwards, variants = variants, []
        for n in range(lib.tune_backward_count()):
            for any_order in range(1 + lib.tune_backward_has_sums(n)):
                variants.append(Backward(lib, n, forwards, bool(any_order)))
    variants = [v for v in variants if v.head_dim in sizes]
    for variant in variants if args.check else []:
        error = variant.check() if args.backward else check(variant)
        print(f"{variant.name:44s} worst relative error {error:.1e}", flush=True)
    for size in sorted({v.head_dim for v in variants}):
        some = [v for v in variants if v.head_dim == size]
        table(some, size, [int(n) for n in args.rows.split(",")], args.ms, args.rounds)


if __name__ == "__main__":
    main()
