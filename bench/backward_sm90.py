"""The Hopper backward beside PyTorch's backends on one GPU, in one process.

    python3 bench/backward_sm90.py [--lib build/libheed.so] [--head-dim 64,128] [--rows 512,16384] [--others [WORDS]]

The table: bf16, B x S = 16k tokens, H x D = 2048, TFLOP/s counting 10 B H S^2 D FLOP, half of it causal, all kernels of a
backward; in brackets the ratio to cuDNN, with deterministic=True and False. --others: problems of other kinds, in
microseconds, beside the best backend that PyTorch has for the same one. Times as in forward_sm90.py.
"""
import torch
from cuda_bench import Heed
from forward_sm90 import BACKENDS, in_turns, main, ragged_batch, sdpa, tensors, with_backend

ORDERS = {"heed": False, "any order": True}


def heed_calls(lib, q, k, v, do, **options):
    """The backward in the order of the keys, and in any."""
    def one(any_order):
        x = Heed(lib, q, k, v, do, any_order=any_order, **options)
        x.forward()

        def call():
            x.x[1].stream = torch.cuda.current_stream().cuda_stream
            x.backward()
            return x

        return call

    return {name: one(any_order) for name, any_order in ORDERS.items()}


def backward_of(forward, leaves, do):
    """Only the backward, once it has been called: autograd runs it on the stream of its forward."""
    leaves, o = [t.detach().requires_grad_() for t in leaves], []

    def call():
        if not o:
            with torch.enable_grad():
                o.append(forward(*leaves))
        return torch.autograd.grad(o[0], leaves, do, retain_graph=True)

    return call


def rivals(q, k, v, do, names=BACKENDS, stride=1, **options):
    def forward(q, k, v):
        return sdpa(q, *((k[:, :, ::stride], v[:, :, ::stride]) if stride > 1 else (k, v)), **options)

    return {n: with_backend(n, backward_of(forward, (q, k, v), do)) for n in names}


def plain(lib, b, h, length, size, causal):
    q, k, v, do = (tensors(b, h, length, size) for _ in range(4))
    return heed_calls(lib, q, k, v, do, causal=causal) | rivals(q, k, v, do, ["cudnn"], is_causal=bool(causal))


def ragged(lib, length, causal):
    """Packed sequences of 1 to so many tokens."""
    offsets, at, (q, k, v, do) = ragged_batch(length, causal, 4)

    def variable(*x):
        from torch.nn.attention.varlen import varlen_attn
        return varlen_attn(*x, offsets, offsets, length, length, **(dict(window_size=(-1, 0)) if causal else {}))

    packed = [t.transpose(0, 1)[None] for t in (q, k, v, do)]
    return heed_calls(lib, *packed, **at) | {"varlen": backward_of(variable, (q, k, v), do)}


def window(lib, size, left):
    """Causal, and so many keys before."""
    q, k, v, do = (tensors(4, 2048 // size, 4096, size) for _ in range(4))
    rows = [t.transpose(1, 2).contiguous() for t in (q, k, v, do)]
    band = dict(window_size_left=left, window_size_right=0)
    o, lse, *state = torch.ops.aten._flash_attention_forward(*rows[:3], None, None, 4096, 4096, 0.0, True, False, **band)
    flash = lambda: torch.ops.aten._flash_attention_backward(rows[3], *rows[:3], o, lse, None, None, 4096, 4096, 0.0, True,
                                                             state[0], state[1], **band)
    mine = dict(causal=1, windowed=1, window_left=left, window_right=-1)
    return heed_calls(lib, q, k, v, do, **mine) | {"flash": flash}


def others(lib):
    """Names of problems of other kinds, and the calls."""
    def beside(q, k, v, do, mine, stride=1, **options):
        return heed_calls(lib, q, k, v, do, **mine) | rivals(q, k, v, do, stride=stride, **options)

    def square(length, size, heads=None, dtype=torch.bfloat16):
        h = 2048 // size
        return [tensors(16384 // length, n, length, size, dtype=dtype) for n in (h, heads or h, heads or h, h)]

    for size in (64, 128):
        yield f"window of 1024, causal, d{size} S 4096", lambda: window(lib, size, 1023)
        yield f"every 4th key, d{size} S 4096", lambda: beside(*square(4096, size), dict(key_stride=4), stride=4)
    for causal in (False, True):
        mine, theirs = dict(causal=int(causal)), dict(is_causal=causal)
        for size in (96, 192):
            for length in (512, 4096):
                yield f"d{size} S {length} causal {causal:d}", lambda: beside(*square(length, size), mine, **theirs)
        for size, length in ((64, 512), (128, 512), (128, 4096), (256, 2048)):
            yield (f"fp16 d{size} S {length} causal {causal:d}",
                   lambda: beside(*square(length, size, dtype=torch.float16), mine, **theirs))
        for size, length in ((64, 4096), (128, 1024), (128, 4096)):
            yield (f"{2048 // size} heads over {256 // size}, d{size} S {length} causal {causal:d}",
                   lambda: beside(*square(length, size, 256 // size), mine, enable_gqa=True, **theirs))
        for length in (512, 2048, 8192):
            yield f"ragged, 1 to {length} tokens, d128 causal {causal:d}", lambda: ragged(lib, length, causal)


if __name__ == "__main__":
    main(__doc__, list(ORDERS), 10, plain, others)
