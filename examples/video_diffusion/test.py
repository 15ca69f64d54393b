"""Fused attention for video diffusion: properties that must hold, and time and memory against plain PyTorch.

    python test.py                        the properties
    python test.py --mode=performance     matmul-softmax-matmul against heed on the four shapes of the model
"""
import argparse
import sys

import heed
import torch
from block import SpatioTemporalBlock, plain_attention
from heed.bench import milliseconds_in_turns, peak_bytes

SHAPES = [(2, 8, 64, 64), (4, 12, 128, 64), (2, 16, 256, 64), (2, 8, 77, 64)]  # batch, heads, seq, head_dim
EXPECTED = 2.0  # how many times faster, at least, on a GPU


def inputs(device, shape=(2, 3, 40, 16), count=3, **more):
    return [torch.randn(shape, device=device, **more) for _ in range(count)]


def difference(got, want):
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


# ---- Properties: each returns the largest violation ------------------------------------------------------------------

def equals_the_definition(device):
    worst = 0.0
    for shape in SHAPES:
        Q, K, V = inputs(device, shape)
        worst = max(worst, difference(heed.fused_attention(Q, K, V), plain_attention(Q.double(), K.double(), V.double())))
    return worst


def zero_queries_give_the_mean_of_V(device):
    Q, K, V = inputs(device)
    return difference(heed.fused_attention(torch.zeros_like(Q), K, V), V.mean(2, keepdim=True).expand_as(Q))


def outputs_lie_within_the_range_of_V(device):
    Q, K, V = inputs(device)
    o = heed.fused_attention(30 * Q, K, V)
    return max(0.0, (o - V.amax(2, keepdim=True)).max().item(), (V.amin(2, keepdim=True) - o).max().item())


def order_of_the_keys_does_not_matter(device):
    Q, K, V = inputs(device)
    order = torch.randperm(K.shape[2], device=device)
    return difference(heed.fused_attention(Q, K[:, :, order], V[:, :, order]), heed.fused_attention(Q, K, V))


def batch_and_heads_are_independent(device):
    Q, K, V = inputs(device)
    whole, alone = heed.fused_attention(Q, K, V), [t[1:2, 2:3] for t in (Q, K, V)]
    return 0.0 if torch.equal(heed.fused_attention(*alone), whole[1:2, 2:3]) else 1.0


def a_mask_hides_what_a_slice_removes(device):
    Q, K, V = inputs(device)
    mask = torch.arange(K.shape[2], device=device).expand(1, 1, Q.shape[2], -1) < 25
    want = heed.fused_attention(Q, K[:, :, :25], V[:, :, :25])
    additive = torch.zeros(mask.shape, device=device).masked_fill(~mask, float("-inf"))
    return max(difference(heed.fused_attention_with_mask(Q, K, V, m), want) for m in (mask, additive))


def no_mask_is_no_mask(device):
    Q, K, V = inputs(device)
    return 0.0 if torch.equal(heed.fused_attention_with_mask(Q, K, V, None), heed.fused_attention(Q, K, V)) else 1.0


def fully_masked_rows_are_zero(device):
    Q, K, V = inputs(device)
    mask = torch.ones(1, 1, Q.shape[2], K.shape[2], dtype=torch.bool, device=device)
    mask[..., 5, :] = False
    o = heed.fused_attention_with_mask(Q, K, V, mask)
    return o[:, :, 5].abs().max().item() if o.isfinite().all() else float("inf")


def large_inputs_stay_finite(device):
    Q, K, V = inputs(device)
    return 0.0 if heed.fused_attention(1e4 * Q, 1e4 * K, V).isfinite().all() else 1.0


def two_runs_give_the_same_bits(device):
    Q, K, V = inputs(device)
    return 0.0 if torch.equal(heed.fused_attention(Q, K, V), heed.fused_attention(Q, K, V)) else 1.0


def the_block_agrees_with_its_plain_twin(device):
    """The output and the gradient of every parameter, with prompts of different length."""
    video, text, mask = scene(device)
    twins = [SpatioTemporalBlock(32, 4, 48, attend=plain_attention).to(device), SpatioTemporalBlock(32, 4, 48).to(device)]
    twins[1].load_state_dict(twins[0].state_dict())
    outputs = [block(video, text, mask) for block in twins]
    gradients = [torch.autograd.grad(o.square().mean(), block.parameters()) for o, block in zip(outputs, twins)]
    return max(difference(outputs[1], outputs[0]), *map(difference, gradients[1], gradients[0]))


def padding_of_the_prompt_gets_no_gradient(device):
    video, text, mask = scene(device)
    text.requires_grad_()
    block = SpatioTemporalBlock(32, 4, 48).to(device)
    (gradient,) = torch.autograd.grad(block(video, text, mask).square().mean(), text)
    return gradient[~mask].abs().max().item() if gradient[mask].abs().sum() > 0 else float("inf")


def scene(device):
    lengths = torch.tensor([77, 9], device=device)
    mask = torch.arange(77, device=device) < lengths[:, None]
    return torch.randn(2, 5, 32, 6, 6, device=device), torch.randn(2, 77, 48, device=device), mask


PROPERTIES = [equals_the_definition, zero_queries_give_the_mean_of_V, outputs_lie_within_the_range_of_V,
              order_of_the_keys_does_not_matter, batch_and_heads_are_independent, a_mask_hides_what_a_slice_removes,
              no_mask_is_no_mask, fully_masked_rows_are_zero, large_inputs_stay_finite, two_runs_give_the_same_bits,
              the_block_agrees_with_its_plain_twin, padding_of_the_prompt_gets_no_gradient]


def properties(device):
    failures = 0
    for check in PROPERTIES:
        torch.manual_seed(0)
        violation = check(device)
        failures += not violation < 1e-5
        print(f"{'ok  ' if violation < 1e-5 else 'FAIL'}  {check.__name__.replace('_', ' '):42} {violation:.1e}")
    print(f"{device}: {failures} failures")
    return failures


# ---- Performance -----------------------------------------------------------------------------------------------------

def calls(attend, shape, dtype, device):
    """The forward alone, and forward and backward together."""
    Q, K, V, dO = inputs(device, shape, 4, dtype=dtype)
    leaves = [t.clone().requires_grad_() for t in (Q, K, V)]
    return lambda: attend(Q, K, V), lambda: torch.autograd.grad(attend(*leaves), leaves, dO)


def performance(device):
    """On a GPU two times count: of calls one after the other as a program makes them, and of the GPU alone."""
    where = torch.device(device)
    dtypes = [torch.float32, torch.float16] if where.type == "cuda" else [torch.float32]
    clocks = [("us per call", False), ("GPU us", True)] if where.type == "cuda" else [("us per call", True)]
    print(f"{device}: plain PyTorch, heed, how many times faster; memory beyond the inputs in MiB")
    print(f"{'B,H,S,D':>12} {'dtype':8} {'pass':18}" + "".join(f"{name:>28}" for name, _ in clocks) + f"{'MiB':>24}")
    slow = 0
    for dtype in dtypes:
        for shape in SHAPES:
            pairs = zip(*(calls(attend, shape, dtype, device) for attend in (plain_attention, heed.fused_attention)))
            for name, pair in zip(("forward", "forward + backward"), pairs):
                text, ratios = "", []
                for _, queued in clocks:
                    plain, ours = (1e3 * ms for ms in milliseconds_in_turns(pair, where, queued=queued))
                    ratios.append(plain / ours)
                    text += f"{plain:12.1f} {ours:8.1f} {plain / ours:5.1f}x"
                slow += ratios[0] < EXPECTED
                memory = [(peak_bytes(call, where) or 0) / 2**20 for call in pair]
                print(f"{','.join(map(str, shape)):>12} {str(dtype)[6:]:8} {name:18}{text}"
                      f"{memory[0]:12.2f} {memory[1]:8.2f}", flush=True)
    print(f"{slow} cells below {EXPECTED:.0f}x per call")
    return slow if where.type == "cuda" else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("properties", "performance"), default="properties")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    o = parser.parse_args()
    return {"properties": properties, "performance": performance}[o.mode](o.device) > 0


if __name__ == "__main__":
    sys.exit(main())
