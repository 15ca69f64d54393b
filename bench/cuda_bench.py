"""heed's CUDA kernels beside PyTorch's on one GPU, in one process.

    python3 bench/cuda_bench.py [--lib PATH] [--dtype f32,f16,bf16] [--head-dim 64,128] [--rows 512,2048,16384]
                                [--kernel FAMILY] [--tokens 16384] [--width 2048]
    python3 bench/cuda_bench.py --features [--lib PATH] [--dtype bf16] [--head-dim 64,128] [--kernel mma]

One line for each problem: B x S = --tokens, H x D = --width. FLOP: 4 B H S^2 D forward, half of it causal, 2.5 times
that backward. Times are medians of five rounds in which heed and its rivals take turns, each replayed from a CUDA graph;
results are compared with PyTorch's. Rivals: flash (FlashAttention-2, deterministic in the backward), efficient, cudnn.

With --features: one line for each feature, 2 x 16 heads of 4096 rows, forward and backward in turns with those of the plain
problem, from graphs, and the ratio of the medians at the same number of visible pairs. Where rows see fewer than all keys
(causal, window, stride), that is plain attention of as many rows over as many keys as a row sees in the mean; in brackets then
also the ratio to the share of visible pairs of the full problem's time, which has fewer and longer rows.
"""
import argparse
import ctypes as C
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"f32": (0, torch.float32), "f16": (1, torch.float16), "bf16": (2, torch.bfloat16)}


class Tensor(C.Structure):
    _fields_ = [("data", C.c_void_p), ("dtype", C.c_int), ("shape", C.c_int64 * 4), ("stride", C.c_int64 * 4)]


class Attention(C.Structure):
    _fields_ = [(n, Tensor) for n in "q k v o lse".split()] + [
        ("scale", C.c_float), ("zero_scale", C.c_int), ("softcap", C.c_float), ("causal", C.c_int),
        ("windowed", C.c_int), ("window_left", C.c_int64), ("window_right", C.c_int64), ("align", C.c_int),
        ("query_position", C.c_int64), ("key_position", C.c_int64), ("query_step", C.c_int64), ("key_step", C.c_int64),
        ("key_stride", C.c_int64), ("mask", Tensor), ("bias", Tensor), ("alibi", Tensor), ("sink", Tensor),
        ("dropout", C.c_float), ("dropout_seed", C.c_uint64), ("dropout_seed_at", C.c_void_p),
        ("lengths_q", C.c_void_p), ("lengths_k", C.c_void_p), ("offsets_q", C.c_void_p), ("offsets_k", C.c_void_p),
        ("sequences", C.c_int64), ("max_rows", C.c_int64), ("max_keys", C.c_int64), ("block_table", C.c_void_p),
        ("block_table_stride", C.c_int64), ("block_table_columns", C.c_int64)]


class Gradient(C.Structure):
    _fields_ = [(n, Tensor) for n in "d_o d_lse delta d_q d_k d_v d_bias d_sink".split()] + [("accumulate", C.c_int)]


class Exec(C.Structure):
    _fields_ = [("backend", C.c_int), ("device", C.c_int), ("stream", C.c_void_p), ("workspace", C.c_void_p),
                ("workspace_bytes", C.c_size_t), ("threads", C.c_int), ("nondeterministic", C.c_int),
                ("precision", C.c_int), ("kernel", C.c_char_p)]


def view(t):
    if t is None:
        return Tensor()
    kind = 4 if t.dtype == torch.bool else next(k for k, d in DTYPES.values() if d == t.dtype)
    return Tensor(t.data_ptr(), kind, (C.c_int64 * 4)(*t.shape), (C.c_int64 * 4)(*t.stride()))


class Heed:
    """One problem, forward and backward, ready to be called again and again."""

    def __init__(self, lib, q, k, v, do, family=None, dtype="f32", any_order=False, d_bias=None, **options):
        self.lib, b, h, s, d = lib, *q.shape
        self.o, self.lse = torch.empty_like(do), torch.empty(b, h, s, 1, device=q.device)
        self.grads = [torch.empty_like(t) for t in (q, k, v)]
        self.a = Attention(q=view(q), k=view(k), v=view(v), o=view(self.o), lse=view(self.lse))
        self.keep = [q, k, v, do]
        for name, value in options.items():
            if isinstance(value, torch.Tensor):
                self.keep.append(value)
                value = view(value)
            setattr(self.a, name, value)
        self.g = Gradient(d_o=view(do), d_q=view(self.grads[0]), d_k=view(self.grads[1]), d_v=view(self.grads[2]),
                          d_bias=view(d_bias))
        self.x = [Exec(backend=1, stream=torch.cuda.current_stream().cuda_stream, nondeterministic=int(any_order),
                       kernel=f"{way}_cuda_{family}_{dtype}".encode() if family else None)
                  for way in ("forward", "backward")]
        for x, g in zip(self.x, (None, C.byref(self.g))):
            size = C.c_size_t()
            self.check(lib.heed_workspace_size(C.byref(self.a), g, C.byref(x), C.byref(size)))
            space = torch.empty(size.value + 16, dtype=torch.uint8, device=q.device)
            self.keep.append(space)
            x.workspace, x.workspace_bytes = (space.data_ptr() + 15) // 16 * 16, size.value

    def check(self, status):
        if status:
            sys.exit("heed: " + self.lib.heed_last_error().decode())

    def forward(self):
        self.check(self.lib.heed_forward(C.byref(self.a), C.byref(self.x[0])))

    def backward(self):
        self.check(self.lib.heed_backward(C.byref(self.a), C.byref(self.g), C.byref(self.x[1])))


def capture(call):
    """The call as a graph. torch.cuda.graph() would collect garbage before each, which takes longer than many a call."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        graph.capture_begin()
        call()
        graph.capture_end()
    return graph


def replay_ms(graph, budget_ms):
    """Milliseconds of one replay, over as many as the budget has room for, after some to warm up."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(), graph.replay(), end.record()
    torch.cuda.synchronize()
    repeats = max(2, int(budget_ms / max(begin.elapsed_time(end), 1e-3)))
    for _ in range(repeats // 4):
        graph.replay()
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def median_ms(call, budget_ms=60):
    call()
    torch.cuda.synchronize()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(), call(), b.record()
    torch.cuda.synchronize()
    repeats = max(3, min(30, int(budget_ms / max(a.elapsed_time(b), 1e-3))))
    times = []
    for _ in range(repeats):
        a.record(), call(), b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times)


def rival(backend, q, k, v, do, causal):
    """(graphs of forward and backward, o, gradients), or None where PyTorch has no such kernel."""
    try:
        with sdpa_kernel(backend):
            leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            run = lambda: torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
            o = run()
            back = lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)
            grads = back()
            with torch.no_grad():
                forward = capture_here(run)
            return [forward, capture_here(back)], o.detach(), grads
    except RuntimeError:
        return None


def error(x, y):
    return ((x.float() - y.float()).norm() / y.float().norm().clamp_min(1e-20)).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--lib", default="build/libheed.so")
    p.add_argument("--dtype", default="f32,bf16")
    p.add_argument("--head-dim", default="64,128")
    p.add_argument("--rows", default="512,1024,4096,16384")
    p.add_argument("--tokens", type=int, default=16384)
    p.add_argument("--width", type=int, default=2048)
    p.add_argument("--kernel", default=None)
    p.add_argument("--rivals", default="flash,efficient,cudnn")
    p.add_argument("--features", action="store_true")
    args = p.parse_args()
    lib = C.CDLL(args.lib)
    lib.heed_last_error.restype = C.c_char_p
    torch.cuda.set_stream(torch.cuda.Stream())  # what Heed captures as well
    if args.features:
        return features(lib, args)
    torch.use_deterministic_algorithms(True)  # with warn_only PyTorch's backward would stay nondeterministic
    torch.utils.deterministic.fill_uninitialized_memory = False
    rivals = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
              "cudnn": SDPBackend.CUDNN_ATTENTION}
    rivals = {n: rivals[n] for n in args.rivals.split(",")}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; TFLOP/s forward/backward; err: against PyTorch")
    print(f"{'type':5}{'B':>4}{'H':>4}{'S':>7}{'D':>5}{'causal':>7} {'heed':>13} " +
          "".join(f"{n:>22}" for n in rivals) + "   err o, dq, dk, dv")
    for dtype in args.dtype.split(","):
        for d in map(int, args.head_dim.split(",")):
            for s in map(int, args.rows.split(",")):
                for causal in (False, True):
                    line(lib, args, rivals, dtype, d, s, causal)


def features(lib, args):
    b, h, s, window = 2, 16, 4096, 1024
    fp32 = lambda *shape: torch.randn(*shape, device="cuda")
    hides = lambda *shape: torch.rand(*shape, device="cuda") > 0.3
    document = torch.arange(s, device="cuda") // 1024
    seen = {"causal": (s + 1) / 2, "window": sum(min(i + 1, window) for i in range(s)) / s, "stride": s / 4}  # keys of a row
    print(f"{torch.cuda.get_device_name()}; {b},{h},{s}: ms forward, backward, over plain at as many visible pairs")
    for dtype in args.dtype.split(","):
        kind = DTYPES[dtype][1]
        problems = {
            "plain": lambda: {}, "causal": lambda: {"causal": 1},
            "window": lambda: {"windowed": 1, "window_left": window - 1},
            "stride": lambda: {"key_stride": 4},
            "mask": lambda: {"mask": hides(1, h, s, s)}, "mask of keys": lambda: {"mask": hides(b, 1, 1, s)},
            "mask of ones": lambda: {"mask": torch.ones(1, h, s, s, device="cuda", dtype=torch.bool)},
            "mask of documents": lambda: {"mask": (document[:, None] == document).view(1, 1, s, s)},
            "bias": lambda: {"bias": fp32(1, h, s, s).to(kind)},
            "bias of all heads": lambda: {"bias": fp32(1, 1, s, s).to(kind)},
            "bias of fp32": lambda: {"bias": fp32(1, h, s, s)},
            **{f"{name}, its gradient": lambda shape=shape: {"bias": fp32(*shape).to(kind), "d_bias": fp32(*shape).to(kind)}
               for name, shape in {"bias": (1, h, s, s), "bias of each": (b, h, s, s), "bias of all": (1, 1, s, s),
                                   "bias of keys": (b, 1, 1, s)}.items()},
            "bias and mask": lambda: {"bias": fp32(1, h, s, s).to(kind), "mask": hides(1, h, s, s)},
            "ALiBi": lambda: {"alibi": fp32(1, h, 1, 1).abs()}, "softcap": lambda: {"softcap": 30.0},
            "dropout": lambda: {"dropout": 0.1, "dropout_seed": 7}}
        for d in map(int, args.head_dim.split(",")):
            torch.manual_seed(0)
            q, k, v, do = (fp32(b, h, s, d).to(kind) for _ in range(4))
            graphs = lambda x: [capture_here(x.forward), capture_here(x.backward)]
            bases = {n: Heed(lib, q, *(t[:, :, :n].contiguous() for t in (k, v)), do, args.kernel, dtype)
                     for n in {s, *map(int, seen.values())}}
            base_graphs = {n: graphs(x) for n, x in bases.items()}
            for name, options in problems.items():
                x, mean = Heed(lib, q, k, v, do, args.kernel, dtype, **options()), seen.get(name, s)
                ways = list(zip(graphs(x), base_graphs[int(mean)], base_graphs[s]))
                times = [[[replay_ms(g, 6) for g in way] for _ in range(5)] for way in ways]
                medians = [[statistics.median(t) for t in zip(*way)] for way in times]
                over = [m[0] / m[1] * int(mean) / mean for m in medians]
                share = [m[0] / m[2] * s / mean for m in medians]
                print(f"{dtype:5}{d:4} {name:27}{medians[0][0]:8.3f}{medians[1][0]:8.3f}   {over[0]:.2f} {over[1]:.2f}" +
                      (f"   ({share[0]:.2f} {share[1]:.2f})" if mean < s else ""), flush=True)
                del x, ways
                torch.cuda.empty_cache()


def capture_here(call):
    """The call as a graph, on the stream that is current."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    call()
    graph.capture_end()
    return graph


def line(lib, args, rivals, dtype, d, s, causal):
    torch.manual_seed(0)
    b, h = max(1, args.tokens // s), args.width // d
    q, k, v, do = (torch.randn(b, h, s, d, device="cuda", dtype=DTYPES[dtype][1]) for _ in range(4))
    x = Heed(lib, q, k, v, do, args.kernel, dtype, causal=int(causal))
    flop = 4 * b * h * s * s * d * (0.5 if causal else 1)
    graphs = [[capture_here(x.forward), capture_here(x.backward)]]
    text, errors, theirs = "", None, {}
    for name, backend in rivals.items():
        r = theirs[name] = rival(backend, q, k, v, do, causal)
        if r:
            graphs.append(r[0])
            errors = errors or [error(a, c) for a, c in zip([x.o] + x.grads, [r[1]] + list(r[2]))]
    times = [[[replay_ms(g, 6) for g in way] for _ in range(5)] for way in zip(*graphs)]
    rates = [(flop / f / 1e9, 2.5 * flop / back / 1e9)
             for f, back in zip(*([statistics.median(t) for t in zip(*way)] for way in times))]
    mine, others = rates[0], iter(rates[1:])
    for r in theirs.values():
        rate = next(others) if r else None
        text += (f"{rate[0]:7.1f}/{rate[1]:5.1f} {mine[0] / rate[0]:4.2f} {mine[1] / rate[1]:4.2f}" if r else "-").rjust(22)
    print(f"{dtype:5}{b:4}{h:4}{s:7}{d:5}{causal!s:>7} {mine[0]:6.1f}/{mine[1]:6.1f} {text}   " +
          " ".join(f"{e:.1e}" for e in errors or []), flush=True)


if __name__ == "__main__":
    main()
