"""The modules, the drop-in for PyTorch's function, and the short names."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest
import reference
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Numbers, broadcast, check_close, dtypes, options
from torch.nn.attention import SDPBackend, sdpa_kernel

import heed


@pytest.mark.skipif(torch.__version__ < (2, 5), reason="this PyTorch's function has no enable_gqa")
@given(data=st.data())
@settings(max_examples=settings.default.max_examples)
def test_scaled_dot_product_attention_is_that_of_torch(data, device):
    heads, S, T, D = (data.draw(st.integers(1, 6)) for _ in range(4))
    lead = data.draw(st.sampled_from([(), (1,), (2,), (2, 3)]))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    gqa = data.draw(st.booleans()) and len(lead) == 1
    H = heads * 2 if gqa else heads
    shape = (*lead, H, S, D) if lead or data.draw(st.booleans()) else (S, D)
    keys = (*lead, heads, T, D) if len(shape) > 2 else (T, D)
    dtype = data.draw(dtypes(device))
    q, k, v = (torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in (shape, keys, keys))
    how = {"enable_gqa": gqa, "scale": data.draw(st.sampled_from([None, 0.5]))}
    kind = data.draw(st.sampled_from(["none", "causal", "bool", "float"]))
    if kind == "causal":
        how["is_causal"] = True
    elif kind != "none":
        mask = torch.randn(*data.draw(st.sampled_from([(S, T), (1, T), (S, 1)])), device=device, dtype=dtype)
        how["attn_mask"] = mask > -0.5 if kind == "bool" else mask
    if data.draw(st.booleans()):  # values that are the identity show the weights: some are dropped, the others twice as large
        eye = torch.eye(T, device=device, dtype=dtype).expand(*keys[:-1], T)
        weights = heed.scaled_dot_product_attention(q, k, eye, **how)
        dropped = heed.scaled_dot_product_attention(q, k, eye, dropout_p=0.5, **how)
        check_close("dropped", dropped, torch.where(dropped > 0, 2 * weights, 0.0), dtype)
    o = heed.scaled_dot_product_attention(q, k, v, **how)
    if kind == "float":
        how["attn_mask"] = mask.double()
    with sdpa_kernel(SDPBackend.MATH):  # its fused ones do not take every mask
        want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **how)
    assert o.dtype == dtype
    check_close("o", o, want, dtype)
    do = torch.randn_like(o)
    grads, wanted = torch.autograd.grad(o, (q, k, v), do), torch.autograd.grad(want, (q, k, v), do.double())
    for a, b in zip(grads, wanted, strict=True):
        check_close("gradient", a, b, dtype)


@pytest.mark.parametrize(("S", "T"), [(5, 7), (6, 6)])
def test_a_causal_bias_of_torch_is_causal(S, T, device):
    bias = pytest.importorskip("torch.nn.attention.bias")
    q, k = torch.randn(2, 4, S, 8, device=device), torch.randn(2, 1, T, 8, device=device)
    upper, lower = bias.causal_upper_left(S, T), bias.causal_lower_right(S, T)
    o = heed.scaled_dot_product_attention(q, k, k, upper)
    assert torch.equal(o, heed.scaled_dot_product_attention(q, k, k, is_causal=True))
    assert torch.equal(heed.scaled_dot_product_attention(q, k, k, lower), heed.attention(q, k, k, causal=True))
    with pytest.raises(ValueError, match="attn_mask: expected None"):
        heed.scaled_dot_product_attention(q, k, k, upper, is_causal=True)
    with pytest.raises(TypeError, match="bias: is a .*CausalBias, which holds no numbers"):
        heed.attention(q, k, k, bias=upper)


def test_scaled_dot_product_attention_broadcasts_and_refuses(device):
    q, k = torch.randn(2, 3, 4, 5, 8, device=device), torch.randn(1, 1, 4, 7, 8, device=device)
    assert torch.allclose(
        heed.scaled_dot_product_attention(q, k, k), F.scaled_dot_product_attention(q, k, k), atol=1e-5
    )
    mask = torch.rand(2, 1, 4, 5, 7, device=device) > 0.3
    want = F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    assert torch.allclose(heed.scaled_dot_product_attention(q, k, k, attn_mask=mask), want, atol=1e-5)
    q4, k4 = q[0], k[0].expand(3, -1, -1, -1)
    for key, value in (k4, k4[:, :1]), (k4[:, :1], k4):
        want = F.scaled_dot_product_attention(q4, key.expand_as(k4), value.expand_as(k4))
        assert torch.allclose(heed.scaled_dot_product_attention(q4, key, value), want, atol=1e-5)
    with pytest.raises(ValueError, match="attn_mask: expected None"):
        heed.scaled_dot_product_attention(q, k, k, attn_mask=mask, is_causal=True)
    with pytest.raises(ValueError, match=r"are \[3, 4\], \[1, 2\], \[1, 2\]; .* that broadcast; enable_gqa allows"):
        heed.scaled_dot_product_attention(q[0], k[0, :, :2], k[0, :, :2])
    for size in (3, 5, 7), (2, 3, 4, 5, 7):
        with pytest.raises(ValueError, match="attn_mask: leading dimensions are .*, expected .* or ones"):
            heed.scaled_dot_product_attention(q[0, 0, 0], k[0, 0, 0], k[0, 0, 0], torch.ones(size, device=device))
    torch.manual_seed(0)
    dropped = heed.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert not torch.equal(dropped, heed.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize(
    "sizes",  # of query, key and value, and of a mask
    [
        ((1, 5), (4, 7)),  # queries that all of a batch share, or all heads
        ((2, 1, 5), (2, 4, 7)),
        ((5,), (2, 4, 7)),
        ((2, 3, 1, 5), (3, 4, 7)),
        ((0, 5), (0, 7)),  # a batch of none
        ((4, 0), (4, 7), (1, 7)),
        ((4, 5), (4, 7), (1, 4, 5, 7)),  # a mask with more ones before it than the scores have
        ((4, 5), (4, 7), (1, 1, 5, 7)),
        ((2, 4, 5), (2, 4, 7), (1, 2, 1, 5, 7)),
    ],
)
def test_scaled_dot_product_attention_of_any_leading_dimensions(sizes, device):
    torch.manual_seed(0)
    sizes, masks = [(*size, 8) for size in sizes[:2]], sizes[2:]
    q, k, v = (torch.randn(size, device=device, requires_grad=True) for size in (sizes[0], sizes[1], sizes[1]))
    mask = torch.randn(masks[0], device=device) if masks else None
    o = heed.scaled_dot_product_attention(q, k, v, mask)
    scores = q @ k.mT * 8**-0.5
    want = (scores if mask is None else scores + mask.reshape(mask.shape[-scores.dim() :])).softmax(-1) @ v
    torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-5)
    grads, wanted = (torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (o, want))
    torch.testing.assert_close(grads, wanted, rtol=1e-5, atol=1e-5)


def turned(t, positions, base):
    """Rotary embedding by complex numbers. t: [B, S, H, D]."""
    half = t.shape[-1] // 2
    angle = positions[..., None, None] * base ** (-torch.arange(half, device=t.device) / half)
    turn = torch.complex(t[..., :half], t[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turn.real, turn.imag), -1)


@given(data=st.data())
@settings(max_examples=settings.default.max_examples // 2)
def test_attention_module_is_its_formula(data, device):
    n = Numbers(data.draw, device)
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    B, S, G, ratio = (data.draw(st.integers(1, most)) for most in (2, 9, 2, 2))
    H, given_heads = G * ratio, data.draw(st.booleans())
    D = 2 * data.draw(st.integers(1, 5))
    E = H * D if not given_heads else data.draw(st.integers(1, 20))
    context_dim = data.draw(st.one_of(st.none(), st.integers(1, 12)))
    T = S if context_dim is None else data.draw(st.integers(1, 9))
    rotary = data.draw(st.sampled_from([False, True, 500.0]))
    drawn = data.draw(options(n, B, H, S, T, torch.float32))
    shared = {name: drawn[name] for name in ("causal", "window", "stride", "softcap") if name in drawn}
    extra = {name: drawn[name] for name in ("mask", "bias") if name in drawn}
    lengths = drawn.get("lengths_k")
    layer = heed.nn.Attention(
        E, H, num_kv_heads=None if G == H else G, head_dim=D if given_heads else None, context_dim=context_dim,
        bias=data.draw(st.booleans()), rotary=rotary, device=device, dtype=torch.float32,
        dropout=data.draw(st.sampled_from([0.0, 0.5])), **shared,
    ).train(data.draw(st.booleans()))  # fmt: skip
    x = n.normal(B, S, E).to(device).requires_grad_()
    context = None if context_dim is None else n.normal(B, T, context_dim).to(device)
    positions = None
    if rotary and context is None and data.draw(st.booleans()):
        shape = (B, S) if data.draw(st.booleans()) else (S,)
        positions = torch.randint(50, shape, device=device)

    source = x if context is None else context
    q = layer.q(x).reshape(B, S, H, D)
    k, v = (t.reshape(B, T, G, D) for t in layer.kv(source).split(G * D, -1))
    if rotary:
        base = 10000.0 if rotary is True else rotary
        rows, keys = (torch.arange(m, device=device) if positions is None else positions for m in (S, T))
        q, k = turned(q, rows, base), turned(k, keys, base)
    if layer.training and layer.dropout:  # what is dropped is heed.attention's business
        torch.manual_seed(7)
        o = heed.attention(q, k, v, layout="bshd", lengths_k=lengths, dropout_p=0.5, **shared, **extra)
    else:
        o, _ = reference.attention(q, k, v, layout="bshd", lengths_k=lengths, **shared, **extra)
    want = layer.out(o.float().flatten(-2))
    torch.manual_seed(7)
    y = layer(x, context, lengths=lengths, positions=positions, **extra)
    assert torch.allclose(y, want, atol=1e-4)
    inputs = [x, *layer.parameters()]
    grads = torch.autograd.grad(y.square().sum(), inputs)
    for a, b in zip(grads, torch.autograd.grad(want.square().sum(), inputs), strict=True):
        assert torch.allclose(a, b, atol=1e-3, rtol=1e-3)


@given(data=st.data())
@settings(max_examples=settings.default.max_examples // 4)
def test_attention_module_in_every_type(data, device):
    dtype, causal, S = data.draw(dtypes(device)), data.draw(st.booleans()), data.draw(st.integers(1, 20))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    layer = heed.nn.Attention(24, 4, num_kv_heads=2, rotary=True, causal=causal, device=device, dtype=dtype)
    double = copy.deepcopy(layer).double().cpu()  # on the CPU the reference computes it
    x = torch.randn(2, S, 24, device=device, dtype=dtype)
    y, want = layer(x), double(x.cpu().double())
    assert y.dtype == dtype
    check_close("y", y.cpu(), want, dtype)
    grads, wanted = (torch.autograd.grad(t.sum(), list(m.parameters())) for t, m in ((y, layer), (want, double)))
    for a, b in zip(grads, wanted, strict=True):
        assert a.dtype == dtype
        check_close("gradient", a.cpu(), b, dtype)


def test_attention_module_has_these_parameters():
    names = [name for name, _ in heed.nn.Attention(24, 4).named_parameters()]
    assert names == ["q.weight", "q.bias", "kv.weight", "kv.bias", "out.weight", "out.bias"]


def test_attention_module_with_other_layers_in_place(device):
    class Quantized(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.in_features, self.bias = layer.in_features, layer.bias
            self.step = layer.weight.detach().abs().max() / 127
            self.rounded = (layer.weight.detach() / self.step).round().to(torch.int8)

        def weight(self):  # PyTorch's is a method too
            return self.rounded * self.step

        def forward(self, x):
            return F.linear(x, self.weight(), self.bias)

    layer = heed.nn.Attention(16, 2, causal=True, device=device)
    x = torch.randn(2, 5, 16, device=device)
    want = layer(x)
    layer.q, layer.kv, layer.out = map(Quantized, (layer.q, layer.kv, layer.out))
    assert torch.allclose(layer(x), want, atol=0.05)
    with pytest.raises(ValueError, match="x: has shape"):
        layer(x[..., :3])


def test_attention_module_options(device):
    torch.manual_seed(0)
    layer = heed.nn.Attention(16, 2, context_dim=10, head_dim=12, bias=False, dropout=0.5, device=device)
    x, context = torch.randn(3, 4, 16, device=device), torch.randn(3, 6, 10, device=device)
    assert not torch.equal(layer(x, context), layer(x, context))
    layer.eval()
    y = layer(x, context)
    assert y.shape == x.shape and torch.equal(y, layer(x, context))
    lengths = torch.tensor([6, 2, 5], device=device)
    mask = torch.arange(6, device=device) < lengths[:, None]
    assert torch.allclose(layer(x, context, lengths=lengths), layer(x, context, mask=mask[:, None, None]), atol=1e-6)
    bias = torch.where(mask, 0.0, -torch.inf)[:, None, None]
    assert torch.allclose(layer(x, context, bias=bias), layer(x, context, lengths=lengths), atol=1e-6)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again(x, context), y)
    assert "16, 2, head_dim=12, dropout=0.5" in repr(layer)
    banded = heed.nn.Attention(16, 2, window=(2, 1), softcap=5.0, rotary=True, device=device)
    shifted = banded(x, positions=torch.arange(4, device=device) + 100)
    assert torch.allclose(shifted, banded(x), atol=1e-4)
    with pytest.raises(ValueError, match="positions: is given with a context"):
        banded(x, x, positions=torch.arange(4, device=device))


@given(data=st.data())
@settings(max_examples=settings.default.max_examples // 4)
def test_strided_attention_is_the_naive_one(data, device):
    B, H, S, D = (data.draw(st.integers(1, n)) for n in (2, 3, 40, 32))
    stride = data.draw(st.integers(1, 8))
    dtype = data.draw(dtypes(device))
    q, k, v = (torch.randn(B, H, S, D, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    o = heed.CustomStridedAttention(stride)(q, k, v)
    naive = heed.naive_strided_attention(q, k, v, stride)
    assert naive.dtype == o.dtype == dtype
    check_close("naive", naive, o, dtype)
    want = heed.naive_strided_attention(q.double(), k.double(), v.double(), stride)
    check_close("o", o, want, dtype)
    do = torch.randn_like(o)
    grads, wanted = torch.autograd.grad(o, (q, k, v), do), torch.autograd.grad(want, (q, k, v), do.double())
    for a, b in zip(grads, wanted, strict=True):
        check_close("gradient", a, b, dtype)
    assert repr(heed.CustomStridedAttention(stride)) == f"CustomStridedAttention(stride={stride})"


@given(n=st.integers(1, 50), d=st.sampled_from([1, 16, 64]))
@settings(max_examples=settings.default.max_examples // 4)
def test_self_attention_and_its_gradients(n, d, device):
    x = torch.randn(n, d, device=device)
    output = torch.empty_like(x)
    assert heed.self_attention(x, output, d=d) is None
    parts = [x.clone().requires_grad_() for _ in range(3)]
    want = torch.softmax(parts[0] @ parts[1].T / d**0.5, -1) @ parts[2]
    assert torch.allclose(output, want, atol=1e-5)
    do = torch.randn_like(x)
    for a, b in zip(heed.self_attention_backward(do, x, d=d), torch.autograd.grad(want, parts, do), strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    if device == "cpu":
        array = torch.empty_like(x).numpy()
        heed.self_attention(x.numpy(), array, d)
        assert torch.equal(torch.from_numpy(array), output)


@given(data=st.data())
@settings(max_examples=settings.default.max_examples // 4)
def test_fused_attention_with_and_without_mask(data, device):
    n = Numbers(data.draw, device)
    B, H, S, T, D = (data.draw(st.integers(1, most)) for most in (2, 3, 20, 20, 24))
    dtype, shape = data.draw(dtypes(device)), data.draw(broadcast((B, H, S, T)))
    q, k, v = inputs = [n.tensor((B, H, rows, D), dtype).requires_grad_() for rows in (S, T, T)]
    assert torch.equal(heed.fused_attention(q, k, v), heed.fused_attention_with_mask(q, k, v, None))
    seen, added = n.tensor(shape, torch.bool, lambda x: x > -0.3), n.tensor(shape, dtype)
    for mask, how in (None, {}), (seen, {"mask": seen}), (added, {"bias": added}):
        o = heed.fused_attention(q, k, v) if mask is None else heed.fused_attention_with_mask(q, k, v, mask)
        want, _ = reference.attention(q, k, v, **how)
        assert o.dtype == dtype
        check_close("o", o, want, dtype)
        do = torch.randn_like(o)
        wanted = torch.autograd.grad(want, inputs, do.double())
        for a, b in zip(torch.autograd.grad(o, inputs, do), wanted, strict=True):
            check_close("gradient", a, b, dtype)


def test_every_public_name_says_what_it_is_and_in_which_shapes():
    for name in heed.__all__:
        doc = inspect.getdoc(getattr(heed, name)) or ""
        assert len(doc) > 40, name
        if name not in ("explain", "kernels", "nn", "set_threads"):
            assert re.search(r"\[.*\w.*\]|\(batch, ", doc), f"{name} shows no shape"


def test_names_that_need_torch_are_found():
    assert heed.Attention is heed.nn.Attention and heed.CustomStridedAttention is heed.nn.CustomStridedAttention
    assert set(heed.__all__) <= set(dir(heed)) | {"nn"}
    assert all(getattr(heed, name) is not None for name in heed.__all__)
