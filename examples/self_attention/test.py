"""Self-attention of one matrix, forward and backward, compared with PyTorch.

    python test.py [--device cpu|cuda]

x is [n, d]; q, k and v are all x, and the result goes into a tensor that the caller brings.
"""
import argparse
import sys

import heed as gpu_kernels
import torch

TOLERANCE = 1e-5  # of the largest element; fp32 against fp64


def expected(x):
    """softmax(x x^T / sqrt(d)) x in fp64."""
    x = x.double()
    return torch.softmax(x @ x.T / x.shape[1] ** 0.5, dim=-1) @ x


def difference(got, want):
    return ((got.double() - want).abs().max() / want.abs().max()).item()


def close(got, want):
    error = difference(got, want)
    return error < TOLERANCE, f"differs by {error:.1e}"


def forward(x):
    output = torch.full_like(x, float("nan"))
    gpu_kernels.self_attention(x, output, d=x.shape[1])
    return output


def accuracy(device):
    """The result is that of PyTorch in fp64."""
    return close(forward(x := torch.randn(128, 64, device=device)), expected(x))


def shapes(device):
    """Any number of rows and columns will do, one of each included."""
    worst = 0.0
    for n, d in (1, 64), (7, 64), (64, 64), (77, 32), (129, 128), (300, 80), (5, 1):
        x = torch.randn(n, d, device=device)
        output = forward(x)
        if output.shape != x.shape:
            return False, f"{tuple(x.shape)} gives {tuple(output.shape)}"
        worst = max(worst, difference(output, expected(x)))
    return worst < TOLERANCE, f"worst of 7 shapes differs by {worst:.1e}"


def pattern(device):
    """With the identity for v the output is P itself: not negative, and every row sums to one."""
    x = torch.randn(1, 1, 100, 64, device=device)
    P = gpu_kernels.attention(x, x, torch.eye(100, device=device)[None, None])[0, 0]
    rows = (P.sum(-1) - 1).abs().max().item()
    right, text = close(P, torch.softmax(x[0, 0].double() @ x[0, 0].double().T / 8, dim=-1))
    return right and rows < 1e-5 and bool((P >= 0).all()), f"rows sum to 1 within {rows:.1e}, P {text}"


def scale(device):
    """Scores are divided by sqrt(d): longer rows of the same numbers give the same weights as shorter, larger ones."""
    x = torch.randn(50, 16, device=device)
    wide = torch.cat([x] * 4, dim=1)  # scores 4 times as large, over sqrt(4 * 16): twice as large in the end
    return close(forward(wide)[:, :16], torch.softmax(2 * x.double() @ x.double().T / 4, dim=-1) @ x.double())


def gradients(device):
    """dQ, dK and dV are autograd's; for self-attention their sum is the gradient of x."""
    x, grad_output = torch.randn(96, 64, device=device), torch.randn(96, 64, device=device)
    got = gpu_kernels.self_attention_backward(grad_output, x, d=64)
    q, k, v = leaves = [x.double().requires_grad_() for _ in range(3)]
    want = torch.autograd.grad(torch.softmax(q @ k.T / 8, dim=-1) @ v, leaves, grad_output.double())
    worst = max(map(difference, got, want))
    whole = difference(sum(got), torch.autograd.grad(expected(y := x.clone().requires_grad_()), y, grad_output.double())[0])
    return max(worst, whole) < TOLERANCE, f"dQ, dK, dV differ by {worst:.1e}, dx by {whole:.1e}"


def determinism(device):
    """The same input gives the same bits."""
    x = torch.randn(200, 64, device=device)
    return torch.equal(forward(x), forward(x)), "two runs compared"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    torch.manual_seed(0)
    failures = 0
    for check in accuracy, shapes, pattern, scale, gradients, determinism:
        right, text = check(device)
        failures += not right
        print(f"{'ok  ' if right else 'FAIL'}  {check.__name__:12} {text}")
    print(f"{device}: {failures} failures")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
