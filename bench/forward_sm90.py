"""The Hopper forward beside PyTorch's backends on one GPU, in one process.

    python3 bench/forward_sm90.py [--lib build/libheed.so] [--head-dim 64,128] [--rows 512,16384] [--others [WORDS]]

The table: bf16, B x S = 16k tokens, H x D = 2048, TFLOP/s counting 4 B H S^2 D FLOP, half of it causal, and in
brackets the ratio to cuDNN. --others: problems of other kinds, in microseconds, beside the best backend that PyTorch
has for the same one; with WORDS, separated by commas, only those whose names have one of these. Times are medians of
replayed graphs, --ms milliseconds each, that take turns: the clock falls as the card warms. At the end of a line:
clock and power meanwhile.
"""
import argparse
import ctypes as C
import functools
import math
import statistics
import threading
import time

import torch
from cuda_bench import Attention, Exec, capture, replay_ms, view
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Meter:
    """Clock and power of GPU 0 every few milliseconds, read by a thread while it is on."""

    class Field(C.Structure):
        _fields_ = [("id", C.c_uint), ("scope", C.c_uint), ("at", C.c_longlong), ("latency", C.c_longlong),
                    ("kind", C.c_int), ("status", C.c_int), ("value", C.c_uint64)]

    def __init__(self):
        self.samples, self.on = [], False
        try:
            self.nvml = C.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        self.device = C.c_void_p()
        if not self.nvml.nvmlInit_v2() and not self.nvml.nvmlDeviceGetHandleByIndex_v2(0, C.byref(self.device)):
            threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        clock, power = C.c_uint(), self.Field(id=186)  # of the moment; the usual one is a second's mean
        while True:
            if self.on and not self.nvml.nvmlDeviceGetClockInfo(self.device, 1, C.byref(clock)) and \
                    not self.nvml.nvmlDeviceGetFieldValues(self.device, 1, C.byref(power)):
                self.samples.append((clock.value / 1e3, (power.value & 0xffffffff) / 1e3))
            time.sleep(0.004)

    def line(self):
        """What was read since the last line."""
        seen, self.samples = self.samples, []
        if not seen:
            return ""
        clocks, watts = zip(*seen)
        return f"   {min(clocks):.2f} to {max(clocks):.2f} GHz, {min(watts):.0f} to {max(watts):.0f} W"


def heed_call(lib, q, k, v, o, keep=(), **options):
    a = Attention(q=view(q), k=view(k), v=view(v), o=view(o), **options)
    x, size = Exec(backend=1), C.c_size_t()
    assert not lib.heed_workspace_size(C.byref(a), None, C.byref(x), C.byref(size)), lib.heed_last_error()
    space = torch.empty(size.value + 16, dtype=torch.uint8, device="cuda")
    x.workspace, x.workspace_bytes = (space.data_ptr() + 15) // 16 * 16, size.value

    def call():
        x.stream = torch.cuda.current_stream().cuda_stream
        assert not lib.heed_forward(C.byref(a), C.byref(x)), lib.heed_last_error()
        return o, keep, space

    return call


def with_backend(name, call):
    def run():
        with sdpa_kernel(BACKENDS[name]):
            return call()

    return run


def graph_of(call):
    """The call as a graph, or None where the backend does not take the problem."""
    try:
        with torch.no_grad():
            return capture(call)
    except (RuntimeError, TypeError, AttributeError, ImportError) as error:
        print("  not there:", str(error).split("\n")[0][:90])
        torch.cuda.synchronize()
        return None


def in_turns(calls, ms, rounds, meter=None):
    graphs = {name: graph for name, graph in ((n, graph_of(c)) for n, c in calls.items()) if graph}
    times = {name: [] for name in graphs}
    if meter:
        meter.on = True
    for turn in range(rounds):
        for name in list(graphs)[turn % len(graphs):] + list(graphs)[:turn % len(graphs)]:
            times[name].append(replay_ms(graphs[name], ms))
    if meter:
        meter.on = False
    return {name: statistics.median(t) for name, t in times.items()}


def tensors(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


class Bench:
    """Prints what calls take. forms: names of heed's own among them; flop: of a problem, in B H S^2 D."""

    def __init__(self, forms, flop, ms, rounds):
        self.forms, self.flop, self.ms, self.rounds, self.meter = forms, flop, ms, rounds, Meter()

    def table(self, sizes, lengths, calls):
        """TFLOP/s, in brackets over cuDNN's, of calls(batch, heads, length, size, causal)."""
        print(f"{'':14s}" + "".join(f"{n:>{12 * len(self.forms)}d}" for n in lengths))
        for size in sizes:
            for causal in (0, 1):
                text = f"d{size} {'causal' if causal else 'full':9s}"
                for length in lengths:
                    shape = max(1, 16384 // length), 2048 // size, length, size
                    t = in_turns(calls(*shape, causal), self.ms, self.rounds, self.meter)
                    flop = 1e-9 * self.flop * math.prod(shape) * length / (1 + causal)
                    text += "".join(f"{flop / t[n]:6.0f} ({t['cudnn'] / t[n]:.2f})" for n in self.forms)
                print(text + self.meter.line(), flush=True)

    def report(self, name, calls):
        """Microseconds, and the best of the others over each of heed's."""
        t = in_turns(calls, self.ms, self.rounds, self.meter)
        rivals = {n: x for n, x in t.items() if n not in self.forms}
        text = f"{name:44s}" + "".join(f"{t[n] * 1e3:9.1f}" for n in self.forms) + " us"
        if rivals:
            name, best = min(rivals.items(), key=lambda x: x[1])
            text += f"   {name} {best * 1e3:9.1f} us   " + " ".join(f"{best / t[n]:.2f}" for n in self.forms)
        print(text + self.meter.line(), flush=True)


def plain(lib, b, h, length, size, causal):
    q, k, v = (tensors(b, h, length, size) for _ in range(3))
    return {"heed": heed_call(lib, q, k, v, torch.empty_like(q), causal=causal),
            "cudnn": with_backend("cudnn", lambda: sdpa(q, k, v, is_causal=bool(causal)))}


def ragged_batch(length, causal, count):
    """Packed sequences of 1 to so many tokens: where they begin, heed's options for them, and tensors."""
    lengths = torch.randint(1, length + 1, (16384 // length * 2,), generator=torch.Generator().manual_seed(1))
    offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int().cuda()
    at = dict(offsets_q=offsets.data_ptr(), offsets_k=offsets.data_ptr(), sequences=len(lengths), max_rows=length,
              max_keys=length, causal=int(causal))
    return offsets, at, [tensors(int(offsets[-1]), 16, 128) for _ in range(count)]


def ragged(lib, length, causal):
    offsets, at, (q, k, v) = ragged_batch(length, causal, 3)
    packed = [t.transpose(0, 1)[None] for t in (q, k, v, torch.empty_like(q))]

    def variable():
        from torch.nn.attention.varlen import varlen_attn
        window = dict(window_size=(-1, 0)) if causal else {}
        return varlen_attn(q, k, v, offsets, offsets, length, length, **window)

    nested = [torch.nested.nested_tensor_from_jagged(t, offsets, max_seqlen=length).transpose(1, 2) for t in (q, k, v)]
    return {"heed": heed_call(lib, *packed, keep=offsets, **at), "varlen": variable,
            "nested": lambda: sdpa(*nested, is_causal=causal)}


def others(lib):
    """Names of problems of other kinds, and the calls."""
    def beside(q, k, v, mine, theirs):
        return {"heed": heed_call(lib, q, k, v, q.new_empty(*q.shape[:-1], v.shape[-1]), **mine)} | theirs

    def backends(q, k, v, **options):
        return {n: with_backend(n, lambda: sdpa(q, k, v, **options)) for n in BACKENDS}

    def fp16(size, length):
        q, k, v = (tensors(16384 // length, 2048 // size, length, size, dtype=torch.float16) for _ in range(3))
        return beside(q, k, v, {}, backends(q, k, v))

    def grouped(causal):
        q, k, v = tensors(4, 16, 4096, 128), tensors(4, 2, 4096, 128), tensors(4, 2, 4096, 128)
        return beside(q, k, v, dict(causal=int(causal)), backends(q, k, v, is_causal=causal, enable_gqa=True))

    def long(size):
        return [tensors(4, 2048 // size, 4096, size) for _ in range(3)]

    def window(size):
        q, k, v = long(size)
        rows = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
        flash = lambda: torch.ops.aten._flash_attention_forward(*rows, None, None, 4096, 4096, 0.0, True, False,
                                                                window_size_left=1023, window_size_right=0)
        return beside(q, k, v, dict(causal=1, windowed=1, window_left=1023, window_right=-1), {"flash": flash})

    def strided(size):
        q, k, v = long(size)
        return beside(q, k, v, dict(key_stride=4), backends(q, k[:, :, ::4], v[:, :, ::4]))

    def capped(size):
        q, k, v = long(size)
        return beside(q, k, v, dict(softcap=30.0), {"none": heed_call(lib, q, k, v, torch.empty_like(q))})

    def rows_by_keys(rows, keys):
        q, k, v = tensors(1, 16, rows, 128), tensors(1, 16, keys, 128), tensors(1, 16, keys, 128)
        return beside(q, k, v, {}, backends(q, k, v))

    for size, length in ((64, 2048), (128, 512), (128, 2048), (256, 512), (256, 2048)):
        yield f"fp16 d{size} S {length}", lambda: fp16(size, length)
    for causal in (False, True):
        yield f"16 heads over 2, d128 S 4096 causal {causal:d}", lambda: grouped(causal)
        yield f"ragged, 1 to 2048 tokens, d128 causal {causal:d}", lambda: ragged(lib, 2048, causal)
    for size in (64, 128):
        yield f"window of 1024, causal, d{size} S 4096", lambda: window(size)
        yield f"every 4th key, d{size} S 4096", lambda: strided(size)
        yield f"softcap, d{size} S 4096, over none", lambda: capped(size)
    for rows, keys in ((1, 32768), (64, 32768), (512, 32768)):
        yield f"{rows} rows, {keys} keys, 16 heads, d128", lambda: rows_by_keys(rows, keys)


def main(doc, forms, flop, plain, others):
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lib", default="build/libheed.so")
    p.add_argument("--head-dim", default="64,96,128,192,256")
    p.add_argument("--rows", default="512,1024,2048,4096,8192,16384")
    p.add_argument("--ms", type=float, default=20, help="milliseconds for each time")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--others", nargs="?", const="", metavar="WORDS", help="problems of other kinds in place of the table")
    args = p.parse_args()
    lib = C.CDLL(args.lib)
    lib.heed_last_error.restype = C.c_char_p
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "cuDNN", torch.backends.cudnn.version())
    bench = Bench(forms, flop, args.ms, args.rounds)
    if args.others is None:
        sizes, lengths = ([int(n) for n in x.split(",")] for x in (args.head_dim, args.rows))
        bench.table(sizes, lengths, functools.partial(plain, lib))
        return
    for name, calls in others(lib):
        if any(word in name for word in args.others.split(",")):
            bench.report(name, calls())


if __name__ == "__main__":
    main(__doc__, ["heed"], 4, plain, others)
