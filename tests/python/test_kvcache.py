"""Generation over a cache: contiguous and paged, torch and NumPy, against attention over the keys put together by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Numbers, accuracy, check_close, options

import heed


@st.composite
def caches(draw, device):
    B, G, ratio, D = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 20))
    S, N = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    n = Numbers(draw, device)
    torch.manual_seed(draw(st.integers(0, 1000)))
    size, columns = draw(st.sampled_from([(1, 8), (3, 4), (16, 2)]))
    lengths = [draw(st.integers(0, size * columns - N)) for _ in range(B)]
    pages = B * columns + 2
    table = torch.randperm(pages, device=device)[: B * columns].reshape(B, columns).to(torch.int32)
    k_pages, v_pages = (n.tensor((pages, size, G, width), dtype, writable=True) for width in (D, D + 1))
    new = (n.tensor((B, N, G, D), dtype), n.tensor((B, N, G, D + 1), dtype)) if N else (None, None)
    kind = draw(st.sampled_from([torch.int32, torch.int64]))
    q = n.tensor((B, S, G * ratio, D), dtype)
    return q, k_pages, v_pages, *new, torch.tensor(lengths, device=device, dtype=kind), table


def expected(q, k, v, new_k, new_v, lengths, **options):
    """k, v: [B, capacity, G, D]: one sequence after the other, with its new keys behind the old ones."""
    rows = []
    for b, length in enumerate(lengths.tolist()):
        keys, values = k[b : b + 1, :length], v[b : b + 1, :length]
        if new_k is not None:
            keys, values = torch.cat((keys, new_k[b : b + 1]), 1), torch.cat((values, new_v[b : b + 1]), 1)
        rows.append(heed.attention(q[b : b + 1], keys, values, layout="bshd", **options))
    return torch.cat(rows)


@given(data=st.data(), paged=st.booleans(), causal=st.booleans())
@settings(max_examples=settings.default.max_examples // 2)
def test_new_keys_are_appended_and_attended_to(data, device, paged, causal):
    q, k_pages, v_pages, new_k, new_v, lengths, table = data.draw(caches(device))
    flat_k, flat_v = (t[table.long()].flatten(1, 2) for t in (k_pages, v_pages))
    want = expected(q, flat_k, flat_v, new_k, new_v, lengths, causal=causal)
    n = Numbers(data.draw, device)
    cache = [k_pages, v_pages]
    if not paged:
        cache = [n.tensor(tuple(t.shape), t.dtype, writable=True).copy_(t) for t in (flat_k, flat_v)]
    as_arrays = [t.clone() for t in cache] if device == "cpu" and q.dtype != torch.bfloat16 else []
    o, lse = heed.attention_with_kvcache(
        q, *cache, new_k, new_v, lengths, table if paged else None, causal=causal, return_lse=True
    )
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[q.dtype]
    assert torch.allclose(o.float(), want.float(), atol=tolerance)
    after_k, after_v = (t[table.long()].flatten(1, 2) for t in cache) if paged else cache
    for b, length in enumerate(lengths.tolist()):
        assert torch.equal(after_k[b, :length], flat_k[b, :length])
        if new_k is not None:
            stop = length + new_k.shape[1]
            assert torch.equal(after_k[b, length:stop], new_k[b]) and torch.equal(after_v[b, length:stop], new_v[b])
            assert torch.equal(after_k[b, stop:], flat_k[b, stop:])
    if as_arrays:
        given = (q, *as_arrays, new_k, new_v, lengths, table if paged else None)
        from_numpy = heed.attention_with_kvcache(*(None if t is None else t.numpy() for t in given), causal=causal)
        assert torch.allclose(torch.from_numpy(from_numpy).float(), want.float(), atol=tolerance)
        assert all(map(torch.equal, as_arrays, cache))


@given(data=st.data(), paged=st.booleans())
@settings(max_examples=settings.default.max_examples // 2)
def test_every_option_is_that_of_attention(data, device, paged):
    q, k_pages, v_pages, new_k, new_v, lengths, table = data.draw(caches(device))
    B, S, H, _ = q.shape
    how = data.draw(options(Numbers(data.draw, device), B, H, S, k_pages.shape[1] * table.shape[1], q.dtype))
    how.pop("lengths_k", None)
    cache = (k_pages, v_pages) if paged else [t[table.long()].flatten(1, 2) for t in (k_pages, v_pages)]
    o, lse = heed.attention_with_kvcache(
        q, *cache, new_k, new_v, lengths, table if paged else None, return_lse=True, **how
    )
    keys, values = [t[table.long()].flatten(1, 2) for t in cache] if paged else cache
    now = lengths if new_k is None else lengths + new_k.shape[1]
    want, want_lse = heed.attention(q, keys, values, layout="bshd", lengths_k=now, return_lse=True, **how)
    check_close("o", o, want, accuracy(q.dtype, how))
    check_close("lse", lse, want_lse, accuracy(lse.dtype, how))


def test_the_options_of_attention_apply(device):
    q, k, v = (torch.randn(2, n, 2, 8, device=device) for n in (1, 12, 12))
    lengths = torch.tensor([12, 12], device=device)
    how = {
        "window": (5, 0), "stride": 2, "scale": 0.4, "softcap": 2.0, "sink": torch.randn(2, device=device),
        "alibi_slopes": torch.rand(2, device=device), "bias": torch.randn(1, 12, device=device),
        "mask": torch.rand(1, 12, device=device) > 0.2, "lengths_q": torch.tensor([1, 0], device=device),
        "precision": "plain",
    }  # fmt: skip
    o = heed.attention_with_kvcache(q, k, v, cache_seqlens=lengths, deterministic=False, **how)
    want = heed.attention(q, k, v, layout="bshd", **how)
    assert torch.allclose(o, want, atol=1e-6)
    assert torch.equal(heed.attention_with_kvcache(q, k, v), heed.attention(q, k, v, layout="bshd"))


@pytest.mark.parametrize("paged", [False, True])
def test_autocast_reads_what_was_just_appended(device, paged):
    q, new_k, new_v = (3 * torch.randn(2, 1, 2, 8, device=device) for _ in range(3))
    caches = [torch.randn(4, 8, 2, 8, device=device) if paged else torch.randn(2, 16, 2, 8, device=device) for _ in "kv"]
    where = torch.tensor([3, 11], device=device), torch.tensor([[2, 0], [3, 1]], device=device) if paged else None
    want = heed.attention_with_kvcache(q, *(t.clone() for t in caches), new_k, new_v, *where)
    with torch.autocast(device, torch.bfloat16):
        o = heed.attention_with_kvcache(q, *caches, new_k, new_v, *where)
    assert o.dtype == torch.bfloat16
    check_close("o", o, want, torch.bfloat16)


def test_a_cache_says_what_is_wrong(device):
    q, cache, new = (torch.randn(2, n, 2, 8, device=device) for n in (1, 4, 1))
    lengths = torch.tensor([1, 2], device=device)
    call = heed.attention_with_kvcache
    for kind, text, arguments in [
        (ValueError, "k, v: one is None", (q, cache, cache, new, None, lengths)),
        (ValueError, "cache_seqlens: is None", (q, cache, cache, new, new)),
        (ValueError, "k: has shape", (q, cache, cache, new[:1], new, lengths)),
        (TypeError, "k: dtype is torch.float16", (q, cache, cache, new.half(), new, lengths)),
        (ValueError, "q: has 3 dimensions", (q[0], cache, cache)),
        (TypeError, "k_cache: is a int", (q, 1, cache)),
        (ValueError, "k: has 5 rows", (q, cache, cache, *(torch.randn(2, 5, 2, 8, device=device),) * 2, lengths)),
        (ValueError, "q: requires a gradient", (q.clone().requires_grad_(), cache, cache)),
    ]:
        with pytest.raises(kind, match=text):
            call(*arguments)
    before = cache.clone()
    for name, shape in ("bias", (1, 4)), ("sink", (2,)):
        wants = {name: torch.zeros(shape, device=device, requires_grad=True)}
        with pytest.raises(ValueError, match=f"{name}: requires a gradient, which attention_with_kvcache has not"):
            call(q, cache, cache.clone(), new, new, lengths, **wants)
        assert torch.equal(before, cache)
        with torch.no_grad():
            assert not call(q, cache, cache, **wants).requires_grad
    for text, wrong in [
        ("mask: rows is 3", {"mask": torch.ones(3, 4, dtype=torch.bool, device=device)}),
        ("bias: dtype is int64", {"bias": torch.ones(1, 4, dtype=torch.int64, device=device)}),
        ("alibi_slopes: heads is 3", {"alibi_slopes": torch.ones(3, device=device)}),
        ("mask: is a list", {"mask": [True]}),
        ("stride: is 0", {"stride": 0}),
        ("window: is 3", {"window": 3}),
        ("return_lse: is a", {"return_lse": torch.ones(3)}),
    ]:
        with pytest.raises((TypeError, ValueError), match=text):
            call(q, cache, cache, new, new, lengths, **wrong)
        assert torch.equal(before, cache)
    if device == "cpu":
        with pytest.raises(ValueError, match="cache_seqlens: 5 keys"):
            call(q, cache, cache.clone(), new, new, torch.tensor([1, 4]))
        with pytest.raises(ValueError, match="3 pages"):
            pages = torch.randn(3, 2, 2, 8)
            call(q, pages, pages.clone(), new, new, lengths, torch.tensor([[0, 7], [1, 9]]))
        assert torch.equal(before, cache)


def test_on_a_gpu_what_does_not_fit_is_dropped(device):
    if device != "cuda":
        pytest.skip("needs --gpu")
    q, new = (torch.randn(2, n, 2, 8, device=device) for n in (1, 2))
    cache = torch.randn(2, 4, 2, 8, device=device)
    before = cache.clone()
    heed.attention_with_kvcache(q, cache, cache.clone(), new, new, torch.tensor([1, 3], device=device))
    assert torch.equal(cache[0, 1:3], new[0]) and torch.equal(cache[1, 3], new[1, 0])
    assert torch.equal(cache[:, 0], before[:, 0]) and torch.equal(cache[1, :3], before[1, :3])
    pages = torch.randn(3, 2, 2, 8, device=device)
    kept = pages.clone()
    table = torch.tensor([[5, -1], [7, 9]], device=device)
    heed.attention_with_kvcache(q, pages, pages.clone(), new, new, torch.tensor([0, 2], device=device), table)
    torch.cuda.synchronize()
    assert torch.equal(pages, kept)
