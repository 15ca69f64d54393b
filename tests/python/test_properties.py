"""What must hold whatever the numbers are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import check_close, problems

import heed

_FEW = settings(max_examples=settings.default.max_examples // 2)


def _rows(p, t):
    """[B, H, S, ...] of a result in p's layout."""
    return t.transpose(1, 2) if p.options["layout"] == "bshd" else t


@given(data=st.data())
@_FEW
def test_zero_queries_take_the_mean_of_the_values(data, device):
    p = data.draw(problems(device, plain=True))
    o = heed.attention(torch.zeros_like(p.q), p.k, p.v, **p.options)
    v = _rows(p, p.v).repeat_interleave(_rows(p, p.q).shape[1] // _rows(p, p.k).shape[1], dim=1)
    mean = v.double().mean(2, keepdim=True).expand(_rows(p, o).shape)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[o.dtype]
    assert torch.allclose(_rows(p, o).double(), mean, atol=tolerance * 3)
    assert not heed.attention(p.q, p.k, torch.zeros_like(p.v), **p.options).any()


@given(data=st.data())
@_FEW
def test_values_that_are_the_identity_show_weights_that_sum_to_one(data, device):
    p = data.draw(problems(device, plain=True))
    q, k = _rows(p, p.q).float(), _rows(p, p.k).float()
    B, G, T = k.shape[:3]
    eye = torch.eye(T, device=device).expand(B, G, T, T)
    weights = heed.attention(q, k, eye)
    assert (weights >= 0).all() and torch.allclose(weights.sum(-1), torch.ones_like(weights[..., 0]), atol=1e-5)
    k = k.repeat_interleave(q.shape[1] // G, dim=1)
    plain = torch.softmax((q.double() @ k.double().transpose(-2, -1)) * q.shape[-1] ** -0.5, -1)
    assert torch.allclose(weights.double(), plain, atol=1e-5)


@given(data=st.data())
@_FEW
def test_the_same_call_gives_the_same_bits(data, device):
    p = data.draw(problems(device))
    p.options.pop("deterministic", None)
    inputs = p.require_grad()
    runs = []
    for _ in range(2):
        o, lse = heed.attention(p.q, p.k, p.v, return_lse=True, **p.options)
        runs.append((o, lse, *torch.autograd.grad(o, inputs, torch.ones_like(o))))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


@given(data=st.data(), threads=st.integers(1, 5))
@_FEW
def test_the_number_of_threads_does_not_matter(data, device, threads):
    p = data.draw(problems(device))
    p.options.pop("deterministic", None)
    inputs, runs = p.require_grad(), []
    try:
        for count in (threads, 1):
            heed.set_threads(count)
            o = heed.attention(p.q, p.k, p.v, **p.options)
            runs.append((o, *torch.autograd.grad(o, inputs, torch.ones_like(o))))
    finally:
        heed.set_threads(0)
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


@given(data=st.data(), size=st.sampled_from([1e-30, 1.0, 1e4, 3e37]))
@_FEW
def test_no_input_of_any_size_gives_nan_or_inf(data, device, size):
    """Scores up to the largest float: what is beyond, the sums of q k^T cannot hold."""
    p = data.draw(problems(device))
    q = p.q.double() * size
    if q.numel() and p.k.numel():
        scale = max(1.0, abs(p.options.get("scale") or 0.0))
        most = q.abs().sum(-1).max() * p.k.double().abs().max() * scale
        q = q * (3e38 / most).clamp(max=1.0)
    largest = torch.finfo(p.q.dtype).max
    p.q = q.clamp(-largest, largest).to(p.q.dtype)
    inputs = p.require_grad()
    o = heed.attention(p.q, p.k, p.v, **p.options)
    assert o.isfinite().all()
    # dk is a sum of q's rows, at most as large as those times what they are weighted with: not beyond what can be written.
    weight = 1e-3 / max(1.0, p.q.double().abs().max().item() if p.q.numel() else 0.0)
    grads = torch.autograd.grad(o, inputs, torch.randn_like(o) * weight)
    assert all(grad.isfinite().all() for grad in grads)


@given(data=st.data())
@_FEW
def test_a_sequence_and_a_key_head_depend_on_nothing_else(data, device):
    p = data.draw(problems(device, plain=True))
    q, k, v = (_rows(p, t).requires_grad_() for t in (p.q, p.k, p.v))
    whole = heed.attention(q, k, v)
    do = torch.randn_like(whole)
    grads = torch.autograd.grad(whole, (q, k, v), do)
    b, g = data.draw(st.integers(0, q.shape[0] - 1)), data.draw(st.integers(0, k.shape[1] - 1))
    ratio = q.shape[1] // k.shape[1]
    heads, group = slice(g * ratio, (g + 1) * ratio), slice(g, g + 1)
    parts = [t.detach()[b : b + 1, which].requires_grad_() for t, which in ((q, heads), (k, group), (v, group))]
    alone = heed.attention(*parts)
    assert torch.equal(alone[0], whole[b, heads])
    of_parts = torch.autograd.grad(alone, parts, do[b : b + 1, heads])
    for grad, of_all, which in zip(of_parts, grads, (heads, group, group), strict=True):
        assert torch.equal(grad[0], of_all[b, which])


@given(data=st.data())
@_FEW
def test_padding_may_hold_anything(data, device):
    p = data.draw(problems(device, plain=True))
    q, k, v = (_rows(p, t).clone() for t in (p.q, p.k, p.v))
    B, S, T = q.shape[0], q.shape[2], k.shape[2]
    lengths_q = torch.tensor([data.draw(st.integers(0, S)) for _ in range(B)], device=device)
    lengths_k = torch.tensor([data.draw(st.integers(0, T)) for _ in range(B)], device=device)
    how = {"lengths_q": lengths_q, "lengths_k": lengths_k, "causal": data.draw(st.booleans())}
    before = heed.attention(q, k, v, **how)
    for b in range(B):
        q[b, :, lengths_q[b] :] = torch.nan
        k[b, :, lengths_k[b] :] = torch.inf
        v[b, :, lengths_k[b] :] = torch.nan
    inputs = [t.requires_grad_() for t in (q, k, v)]
    after = heed.attention(q, k, v, **how)
    assert torch.equal(before, after)
    for t, lengths in zip(torch.autograd.grad(after.sum(), inputs), (lengths_q, lengths_k, lengths_k), strict=True):
        assert t.isfinite().all()
        for b in range(B):
            assert not t[b, :, lengths[b] :].any()


@given(data=st.data())
@_FEW
def test_gradients_reach_what_was_seen_and_nothing_else(data, device):
    p = data.draw(problems(device, plain=True))
    q, k, v = (_rows(p, t).float().clone() for t in (p.q, p.k, p.v))
    T = k.shape[2]
    stride = data.draw(st.integers(1, 4))
    hidden = torch.rand(T, device=device) < 0.3
    unseen = hidden | (torch.arange(T, device=device) % stride != 0)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    o = heed.attention(*inputs, mask=~hidden[None, :], stride=stride)
    _, dk, dv = torch.autograd.grad(o, inputs, torch.randn_like(o))
    assert not dk[:, :, unseen].any() and not dv[:, :, unseen].any()
    if not unseen.all():
        assert dv[:, :, ~unseen].any()
    chosen = data.draw(st.sampled_from(["q", "k", "v"]))
    only = {name: t.detach().requires_grad_(name == chosen) for name, t in zip("qkv", inputs, strict=True)}
    (grad,) = torch.autograd.grad(heed.attention(**only, stride=stride).sum(), only[chosen])
    assert grad.shape == only[chosen].shape and only["q"].grad is None


@given(data=st.data())
@_FEW
def test_strided_attention_is_attention_over_every_nth_key(data, device):
    p = data.draw(problems(device, plain=True))
    q, k, v = (_rows(p, t) for t in (p.q, p.k, p.v))
    n = data.draw(st.integers(1, 8))
    strided = heed.attention(q, k, v, stride=n)
    sliced = heed.attention(q, k[:, :, ::n], v[:, :, ::n])
    check_close("strided", strided, sliced, q.dtype)
    if device == "cpu":  # one kernel takes both; on a GPU slices may be for another one
        assert torch.equal(strided, sliced)
    assert torch.equal(strided, heed.CustomStridedAttention(n)(q, k, v))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_result_lies_in_memory_as_the_queries_do(layout, device):
    q = torch.randn(2, 3, 5, 8, device=device)
    assert heed.attention(q, q, q, layout=layout).is_contiguous()
    turned = torch.randn(2, 5, 3, 8, device=device).transpose(1, 2)
    assert heed.attention(turned, turned, turned, layout=layout).transpose(1, 2).is_contiguous()


def test_inputs_are_read_where_they_lie(device):
    """A packed qkv projection, by its strides: no copy is made."""
    if device != "cuda":
        qkv = torch.randn(2, 900, 3, 4, 32)
        q, k, v = qkv.unbind(2)
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            heed.attention(q, k, v, layout="bshd")
        assert not any("copy" in event.key or "contiguous" in event.key for event in record.key_averages())
    else:
        # fp32 on tensor cores keeps its halves of q, k and v in a workspace; two bytes need none.
        qkv = torch.randn(2, 900, 3, 4, 32, device=device, dtype=torch.float16)
        q, k, v = qkv.unbind(2)
        heed.attention(q, k, v, layout="bshd")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        o = heed.attention(q, k, v, layout="bshd")
        assert torch.cuda.max_memory_allocated() - before < 2 * o.numel() * o.element_size()


@given(data=st.data(), backward=st.booleans(), chip=st.sampled_from([None, "h200", "a100", "avx512", "avx2"]))
@_FEW
def test_the_kernel_of_every_problem_is_explained(data, device, backward, chip):
    p = data.draw(problems(device))
    if p.q.dtype == torch.float64 or (chip is not None and (chip[0] == "a" and chip[1] == "v") == (device == "cuda")):
        chip = None
    text = heed.explain(p.q, p.k, p.v, backward=backward, chip=chip, **p.options)
    taken = [line.split(":")[0].strip() for line in text.splitlines() if ": taken" in line]
    known = {row["name"] for row in heed.kernels() if row["backward"] == backward}
    assert len(taken) == 1 and taken[0] in known


def test_a_single_number_as_a_tensor(device):
    one = torch.ones((), device=device).expand(2, 2, 3, 4)
    assert torch.allclose(heed.attention(one, one, one), torch.ones(2, 2, 3, 4, device=device))
    o = heed.attention(
        one.contiguous().requires_grad_(), one, one, bias=torch.zeros((), device=device).expand(2, 2, 3, 3)
    )
    o.sum().backward()
