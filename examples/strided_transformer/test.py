"""Strided attention in a Transformer: heed.CustomStridedAttention against the naive PyTorch version.

    python test.py --mode=correctness      outputs and gradients, attention alone and whole models
    python test.py --mode=benchmark        a table of times, attention alone and whole models; --quick: fewer of them
"""
import argparse
import sys

import heed
import torch
from heed.bench import milliseconds_in_turns
from model import NaiveStridedAttention, Transformer

#         name      layers width heads batch tokens stride
MODELS = [("tiny", 2, 128, 4, 4, 256, 2),
          ("small", 4, 256, 4, 4, 512, 2),
          ("medium", 4, 512, 8, 4, 512, 4),
          ("large", 6, 512, 8, 1, 2048, 4),
          ("long", 2, 512, 8, 1, 4096, 8)]
EXPECTED = 2.0  # how many times faster attention alone has to be, at least


def models(size, device):
    """The same weights twice: with naive attention and with heed's."""
    _, layers, width, heads, batch, tokens, stride = size
    pair = [Transformer(layers, width, heads, attention(stride), max_tokens=tokens).to(device)
            for attention in (NaiveStridedAttention, heed.CustomStridedAttention)]
    pair[1].load_state_dict(pair[0].state_dict())
    return pair, torch.randint(256, (batch, tokens), device=device)


def difference(got, want):
    return ((got - want).abs().max() / want.abs().max().clamp_min(0.1)).item()  # dq is exactly 0 with one key to see


def attention_agrees(batch, heads, tokens, head_dim, stride, device):
    """The largest difference of o, dq, dk and dv."""
    results = []
    torch.manual_seed(stride)
    q, k, v = (torch.randn(batch, heads, tokens, head_dim, device=device, requires_grad=True) for _ in range(3))
    d_o = torch.randn_like(q)
    for attention in NaiveStridedAttention(stride), heed.CustomStridedAttention(stride):
        o = attention(q, k, v)
        results.append((o, *torch.autograd.grad(o, (q, k, v), d_o)))
    off = torch.arange(tokens, device=device) % stride != 0
    leaked = max(gradient[:, :, off].abs().sum().item() for gradient in results[1][2:])  # of keys that nobody sees
    return max(map(difference, results[1], results[0])) + leaked


def model_agrees(size, device):
    """The largest difference of the logits and of any parameter's gradient."""
    torch.manual_seed(0)
    pair, tokens = models(size, device)
    logits = [model(tokens) for model in pair]
    gradients = [torch.autograd.grad(out.float().logsumexp(-1).mean(), model.parameters())
                 for out, model in zip(logits, pair)]
    scale = max(g.abs().max().item() for g in gradients[0])
    return max(difference(logits[1], logits[0]),
               max((a - b).abs().max().item() / scale for a, b in zip(*gradients)))


def correctness(device, quick):
    failures = 0
    shapes = [(2, 4, 64, 32, 1), (2, 4, 64, 32, 2), (1, 8, 100, 64, 3), (2, 2, 77, 64, 8), (1, 1, 5, 16, 7), (1, 2, 3, 8, 9)]
    for shape in shapes:
        error = attention_agrees(*shape, device)
        failures += not error < 1e-5
        print(f"{'ok  ' if error < 1e-5 else 'FAIL'}  attention {'x'.join(map(str, shape[:4])):12} stride {shape[4]}  {error:.1e}")
    for size in MODELS[: 1 if quick else 2]:
        error = model_agrees(size, device)
        failures += not error < 1e-4
        print(f"{'ok  ' if error < 1e-4 else 'FAIL'}  model {size[0]:16} stride {size[6]}  {error:.1e}")
    print(f"{device}: {failures} failures")
    return failures


def attention_times(size, device, backward):
    """Milliseconds of naive and heed, attention alone, on q, k and v as they lie in the model, backwards on this thread."""
    _, _, width, heads, batch, tokens, stride = size
    qkv = torch.randn(batch, tokens, 3, heads, width // heads, device=device).permute(2, 0, 3, 1, 4)
    q, k, v = (t.requires_grad_(backward) for t in qkv)
    d_o = torch.randn(batch, heads, tokens, width // heads, device=device)

    def call_of(attention):
        return lambda: torch.autograd.grad(attention(q, k, v), (q, k, v), d_o) if backward else attention(q, k, v)

    calls = [call_of(attention) for attention in (NaiveStridedAttention(stride), heed.CustomStridedAttention(stride))]
    with torch.autograd.set_multithreading_enabled(False):  # to wake PyTorch's thread for a GPU takes longer than these
        return milliseconds_in_turns(calls, torch.device(device), budget_ms=200, queued=False)


def model_times(size, device):
    """Milliseconds of a training step's forward and backward, naive and heed."""
    pair, tokens = models(size, device)

    def step(model):
        loss = model(tokens).float().logsumexp(-1).mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    calls = [lambda model=model: step(model) for model in pair]
    return milliseconds_in_turns(calls, torch.device(device), budget_ms=200, queued=False)


def benchmark(device, quick):
    print(f"{device}, fp32, ms: naive PyTorch, heed, how many times faster")
    print(f"{'model':8} {'B,H,S,D':>14} {'stride':>6} {'attention forward':>26} {'forward + backward':>26} {'whole model':>26}")
    slow = 0
    for size in MODELS[: 2 if quick else None]:
        name, _, width, heads, batch, tokens, stride = size
        cells = [attention_times(size, device, False), attention_times(size, device, True), model_times(size, device)]
        slow += sum(naive / ours < EXPECTED for naive, ours in cells[:2])
        text = "".join(f"{naive:10.3f} {ours:8.3f} {naive / ours:5.1f}x " for naive, ours in cells)
        print(f"{name:8} {f'{batch},{heads},{tokens},{width // heads}':>14} {stride:6} {text}", flush=True)
    print(f"attention alone: {slow} cells below {EXPECTED:.0f}x")
    return slow


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("correctness", "benchmark"), default="correctness")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true")
    o = parser.parse_args()
    return {"correctness": correctness, "benchmark": benchmark}[o.mode](o.device, o.quick) > 0


if __name__ == "__main__":
    sys.exit(main())
