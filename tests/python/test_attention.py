"""heed.attention against the definition in float64, over problems that mix every argument."""

from __future__ import annotations

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Numbers, accuracy, check_close, dropout, dtypes, options, problems

import heed

_EXAMPLES = settings.default.max_examples


@given(data=st.data())
@settings(max_examples=3 * _EXAMPLES)
def test_forward_and_gradients_are_those_of_the_definition(data, device):
    p = data.draw(problems(device))
    inputs = p.require_grad()
    o, lse = heed.attention(p.q, p.k, p.v, return_lse=True, **p.options)
    options = {name: value for name, value in p.options.items() if name not in ("deterministic", "precision")}
    expected, expected_lse = reference.attention(p.q, p.k, p.v, **options)
    dtype = p.q.dtype
    assert o.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    check_close("o", o, expected, p.accuracy)
    check_close("lse", lse, expected_lse, accuracy(lse.dtype, p.options))

    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    seen = expected_lse > -torch.inf
    grads = torch.autograd.grad((o, lse), inputs, (do, dlse), allow_unused=True)
    loss = (expected * do.double()).sum() + (expected_lse[seen] * dlse.double()[seen]).sum()
    wanted = torch.autograd.grad(loss, inputs, allow_unused=True)
    for name, grad, want, t in zip(p.differentiable, grads, wanted, inputs, strict=True):
        want = torch.zeros_like(t) if want is None else want
        if name == "bias":
            want = want.nan_to_num(0.0)
        assert grad.dtype == t.dtype and grad.shape == t.shape
        check_close(f"d{name}", grad, want, p.accuracy)


@given(data=st.data())
@settings(max_examples=_EXAMPLES // 2)
def test_a_call_without_gradient_gives_the_same_bits(data, device):
    p = data.draw(problems(device))
    with torch.no_grad():
        o = heed.attention(p.q, p.k, p.v, **p.options)
    p.require_grad()
    assert torch.equal(o, heed.attention(p.q, p.k, p.v, **p.options))


@given(data=st.data())
@settings(max_examples=_EXAMPLES // 2)
def test_attention_backward_is_what_autograd_gives(data, device):
    p = data.draw(problems(device))
    p.options |= data.draw(dropout(device))
    o, lse = heed.attention(p.q, p.k, p.v, return_lse=True, **p.options)
    do = torch.randn_like(o)
    dlse = torch.randn_like(lse) if data.draw(st.booleans()) else None
    direct = heed.attention_backward(do, p.q, p.k, p.v, o, lse, dlse=dlse, **p.options)
    inputs = p.require_grad()
    o, lse = heed.attention(p.q, p.k, p.v, return_lse=True, **p.options)
    outputs, grads = ((o, lse), (do, dlse)) if dlse is not None else ((o,), (do,))
    for a, b in zip(direct, torch.autograd.grad(outputs, inputs, grads), strict=True):
        assert torch.equal(a, b)


@given(data=st.data())
@settings(max_examples=_EXAMPLES // 2)
def test_dropout_drops_by_seed_and_its_gradient_follows(data, device):
    p = data.draw(problems(device, plain=True))
    p.q, p.k, p.v = (reference.to_bhsd(t, p.options["layout"]).float().contiguous() for t in (p.q, p.k, p.v))
    B, H, S = p.q.shape[:3]
    G, T = p.k.shape[1:3]
    how = {"dropout_p": data.draw(st.sampled_from([0.125, 0.5])), "dropout_seed": data.draw(st.integers(0, 2**64 - 1))}
    p.options = {}
    inputs = p.require_grad()
    eye = torch.eye(T, device=device).expand(B, G, T, T)
    with torch.no_grad():
        shown = heed.attention(p.q, p.k, eye, **how)
        full = heed.attention(p.q, p.k, eye)
    keep = (shown > 0).double() / (1 - how["dropout_p"])
    assert torch.allclose(shown.double(), full.double() * keep, atol=1e-5)
    o = heed.attention(p.q, p.k, p.v, **how)
    expected, _ = reference.attention(p.q, p.k, p.v, keep=keep)
    check_close("o", o, expected, torch.float32)
    do = torch.randn_like(o)
    wanted = torch.autograd.grad(expected, inputs, do.double())
    for name, grad, want in zip("qkv", torch.autograd.grad(o, inputs, do), wanted, strict=True):
        check_close(f"d{name}", grad, want, torch.float32)
    assert B * H * S * T < 400 or abs((shown == 0).double().mean().item() - how["dropout_p"]) < 0.2


def test_dropout_follows_the_generator_of_torch(device):
    q = torch.randn(1, 2, 20, 16, device=device)
    torch.manual_seed(1)
    a, b = (heed.attention(q, q, q, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    c = heed.attention(q, q, q, dropout_p=0.5)
    seed = torch.tensor([7], device=device)
    assert torch.equal(a, c) and not torch.equal(a, b)
    with_number = heed.attention(q, q, q, dropout_p=0.5, dropout_seed=7)
    assert torch.equal(with_number, heed.attention(q, q, q, dropout_p=0.5, dropout_seed=seed))


@given(data=st.data())
@settings(max_examples=_EXAMPLES)
def test_packed_sequences_are_as_if_each_were_alone(data, device):
    heads, ratio = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    D = data.draw(st.integers(1, 40))
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=4))
    offsets_q, offsets_k = ([sum(n[side] for n in lengths[:b]) for b in range(len(lengths) + 1)] for side in (0, 1))
    H = heads * ratio
    q = torch.randn(offsets_q[-1], H, D, device=device, requires_grad=True)
    k, v = (torch.randn(offsets_k[-1], heads, D, device=device, requires_grad=True) for _ in range(2))
    options = {}
    if data.draw(st.booleans()):
        options["causal"] = True
    if data.draw(st.booleans()):
        options |= {"stride": data.draw(st.integers(1, 3)), "sink": torch.randn(H, device=device, requires_grad=True)}
    kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
    cu = (torch.tensor(offsets, dtype=kind, device=device) for offsets in (offsets_q, offsets_k))
    most = [max(n[side] for n in lengths) for side in (0, 1)]
    o, lse = heed.attention_varlen(q, k, v, *cu, *most, return_lse=True, **options)
    assert o.shape == q.shape and lse.shape == (H, len(q))

    parts = []
    for b in range(len(lengths)):
        rows, keys = slice(*offsets_q[b : b + 2]), slice(*offsets_k[b : b + 2])
        part = heed.attention(q[None, rows], k[None, keys], v[None, keys], layout="bshd", return_lse=True, **options)
        assert torch.equal(part[1][0], lse[:, rows])
        parts.append(part[0][0])
    together = torch.cat(parts)
    assert torch.equal(together, o)
    do = torch.randn_like(o)
    inputs = [q, k, v]
    for a, b in zip(torch.autograd.grad(o, inputs, do), torch.autograd.grad(together, inputs, do), strict=True):
        check_close("gradient", a, b, torch.float32)


@given(data=st.data())
@settings(max_examples=_EXAMPLES)
def test_packed_sequences_take_every_argument(data, device):
    """The same as a padded batch of them, dropout and gradients included."""
    heads, ratio = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    D, Dv = (data.draw(st.integers(1, 40)) for _ in range(2))
    sizes = data.draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=3))
    B, H, (S, T) = len(sizes), heads * ratio, map(max, zip(*sizes, strict=True))
    n, dtype = Numbers(data.draw, device), data.draw(dtypes(device))
    q, k, v = (
        n.tensor((sum(size[side] for size in sizes), width, columns), dtype).requires_grad_()
        for side, width, columns in ((0, H, D), (1, heads, D), (1, heads, Dv))
    )
    how = data.draw(options(n, B, H, S, T, dtype))
    how.pop("lengths_q", None)
    rows, keys = ([size[side] for size in sizes] for side in (0, 1))
    if "lengths_k" in how:
        keys = [data.draw(st.integers(0, most)) for most in keys]
        how["lengths_k"] = torch.tensor(keys, device=device)
    how |= data.draw(dropout(device))
    inputs = [q, k, v, *(how[name].requires_grad_() for name in ("bias", "sink") if name in how)]
    kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
    cu_q, cu_k = (
        torch.tensor([0, *(size[side] for size in sizes)], device=device).cumsum(0).to(kind) for side in (0, 1)
    )
    o, lse = heed.attention_varlen(q, k, v, cu_q, cu_k, S, T, return_lse=True, **how)

    def padded(t, side, most):
        parts = t.split([size[side] for size in sizes])
        return torch.stack([torch.nn.functional.pad(part, (0, 0, 0, 0, 0, most - len(part))) for part in parts])

    lengths = {"lengths_q": torch.tensor(rows, device=device), "lengths_k": torch.tensor(keys, device=device)}
    given = (padded(q, 0, S), padded(k, 1, T), padded(v, 1, T))
    all_o, all_lse = heed.attention(*given, layout="bshd", return_lse=True, **(how | lengths))
    want = torch.cat([all_o[b, :count] for b, count in enumerate(rows)])
    want_lse = torch.cat([all_lse[b, :, :count] for b, count in enumerate(rows)], dim=1)
    near = accuracy(dtype, how)
    check_close("o", o, want, near)
    check_close("lse", lse, want_lse, accuracy(lse.dtype, how))
    do, dlse = torch.randn_like(o), torch.where(lse.isinf(), 0.0, torch.randn_like(lse))
    grads = torch.autograd.grad((o, lse), inputs, (do, dlse))
    for grad, wanted in zip(grads, torch.autograd.grad((want, want_lse), inputs, (do, dlse)), strict=True):
        check_close("gradient", grad, wanted, near)
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": S, "max_seqlen_k": T}
    direct = heed.attention_backward(do, q, k, v, o, lse, dlse=dlse, layout="thd", **packed, **how)
    for grad, other in zip(grads, direct, strict=True):
        assert torch.equal(grad, other)


def test_packed_sequences_take_biases_masks_and_backward(device):
    q, k, v = (torch.randn(9, 2, 8, device=device, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    bias = torch.randn(2, 5, 5, device=device, requires_grad=True)
    mask = torch.rand(2, 1, 5, 5, device=device) > 0.3
    slopes = torch.tensor([0.1, 0.2], device=device)
    how = {"bias": bias, "mask": mask, "softcap": 3.0, "scale": 0.5, "window": (2, 1), "alibi_slopes": slopes}
    o, lse = heed.attention_varlen(q, k, v, cu, cu, 5, 5, return_lse=True, deterministic=False, precision="plain", **how)
    do = torch.randn_like(o)
    grads = torch.autograd.grad(o, (q, k, v, bias), do)
    for b, rows in enumerate((slice(0, 4), slice(4, 9))):
        n = rows.stop - rows.start
        one = how | {"bias": bias[:, :n, :n], "mask": mask[b, :, :n, :n]}
        part, _ = reference.attention(q[None, rows], k[None, rows], v[None, rows], layout="bshd", **one)
        check_close("o", o[None, rows], part, torch.float32)
        for full, grad in zip(grads[:3], torch.autograd.grad(part, (q, k, v), do[None, rows].double()), strict=True):
            check_close("gradient", full[rows], grad[rows], torch.float32)
    direct = heed.attention_backward(
        do, q, k, v, o, lse, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=5, max_seqlen_k=5, **how
    )
    for a, b in zip(direct, grads, strict=True):
        check_close("gradient", a, b, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [10, 400])
def test_packed_rows_of_no_sequence_give_zero(device, dtype, rows):
    if device != "cpu" and dtype == torch.float64:
        pytest.skip("a GPU has no fp64")

    def spoil():  # what lies in new memory is what was last in it
        kinds = (dtype, torch.float32) * 9
        assert [torch.full((n, 4, 16), torch.nan, dtype=kind, device=device) for n in (rows, 3 * rows) for kind in kinds]

    q, k, v = (torch.randn(rows, heads, 16, dtype=dtype, device=device, requires_grad=True) for heads in (4, 2, 2))
    cu_q, cu_k = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([2, 5, 7], [0, 6, 9]))
    arguments = cu_q, cu_k, 3, 6
    want = heed.attention_varlen(q[2:7], k[:9], v[:9], cu_q - 2, *arguments[1:], return_lse=True)
    for inputs in (q, k, v), [t.detach() for t in (q, k, v)]:
        spoil()
        o, lse = heed.attention_varlen(*inputs, *arguments, return_lse=True)
        assert torch.equal(o[2:7], want[0]) and torch.equal(lse[:, 2:7], want[1])
        assert not o[:2].any() and not o[7:].any()
        assert (lse[:, :2] == -torch.inf).all() and (lse[:, 7:] == -torch.inf).all()
    spoil()
    o = heed.attention_varlen(q, k, v, *arguments)
    assert torch.equal(o[2:7], want[0]) and not o[:2].any() and not o[7:].any()
    spoil()
    grads = torch.autograd.grad(o.square().sum(), (q, k, v))
    for grad, wanted in zip(grads, torch.autograd.grad(want[0].square().sum(), (q, k, v)), strict=True):
        assert torch.equal(grad, wanted)


def test_lengths_shorten_packed_keys(device):
    q, k = torch.randn(3, 1, 8, device=device), torch.randn(10, 1, 8, device=device)
    cu_q, cu_k = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 1, 3], [0, 4, 10]))
    short = torch.tensor([2, 5], device=device)
    o = heed.attention_varlen(q, k, k, cu_q, cu_k, 2, 6, lengths_k=short)
    assert torch.equal(o[1:], heed.attention(q[None, 1:], k[None, 4:9], k[None, 4:9], layout="bshd")[0])
    assert torch.equal(o[:1], heed.attention(q[None, :1], k[None, :2], k[None, :2], layout="bshd")[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_longer_sequences(device, dtype):
    q, k, v = (torch.randn(1, 3, 700, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    o = heed.attention(q, k, v, causal=True, window=(300, None))
    expected, _ = reference.attention(q, k, v, causal=True, window=(300, None))
    check_close("o", o, expected, dtype)
    do = torch.randn_like(o)
    wanted = torch.autograd.grad(expected, (q, k, v), do.double())
    for grad, want in zip(torch.autograd.grad(o, (q, k, v), do), wanted, strict=True):
        check_close("gradient", grad, want, dtype)


@pytest.mark.parametrize(("precision", "allowed"), [("exact", 1e-6), ("plain", 1e-6), ("tf32", 1e-3)])
def test_precision_is_what_was_asked_for(precision, allowed, device):
    q, k, v = (torch.randn(1, 2, 600, 64, device=device, requires_grad=True) for _ in range(3))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    o = heed.attention(q, k, v, causal=True, precision=precision)
    want, _ = reference.attention(*exact, causal=True)
    do = torch.randn_like(o)
    results = (o, *torch.autograd.grad(o, (q, k, v), do))
    for result, wanted in zip(results, (want, *torch.autograd.grad(want, exact, do.double())), strict=True):
        assert (result.double() - wanted).norm() <= allowed * wanted.norm()
