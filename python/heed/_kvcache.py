"""Attention over a cache of keys and values that grows with every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from heed import _api, _arrays
from heed._arguments import Arguments, flag, type_name

_WHOLE_NUMBERS = {"cache_seqlens": ("batch",), "block_table": ("batch", "pages")}


def _capacity(cache: Any, block_table: Any) -> int:
    """How many keys of one sequence the cache can hold."""
    return cache.shape[1] if block_table is None else cache.shape[1] * block_table.shape[1]


def _check_tensor(name: str, t: Any, q: Any) -> None:
    from heed import _torch

    _torch.check(name, t)
    if t.device != q.device:
        raise ValueError(f"{name}: is on {t.device}, q is on {q.device}")
    _refuse_gradient(name, t)


def _refuse_gradient(name: str, t: Any) -> None:
    import torch

    if torch.is_grad_enabled() and getattr(t, "requires_grad", False):
        raise ValueError(f"{name}: requires a gradient, which attention_with_kvcache has not; use torch.no_grad()")


def _check(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cache_seqlens: Any, block_table: Any) -> None:
    optional = {"k": k, "v": v, "cache_seqlens": cache_seqlens, "block_table": block_table}
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    given.update({n: t for n, t in optional.items() if t is not None})
    for name, t in given.items():
        if _api._is_torch(q):
            _check_tensor(name, t, q)
        else:
            _arrays.check(name, t, q)
        if name in _WHOLE_NUMBERS and not _is_integer(t):
            raise TypeError(f"{name}: dtype is {t.dtype}, expected int32 or int64")
        dimensions = _WHOLE_NUMBERS.get(name, ("batch", "sequence", "heads", "head_dim"))
        if len(t.shape) != len(dimensions):
            raise ValueError(
                f"{name}: has {len(t.shape)} dimensions, expected {len(dimensions)}: {', '.join(dimensions)}"
            )
        if name in _WHOLE_NUMBERS and t.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: has {t.shape[0]} rows, q has {q.shape[0]} sequences")
    if (k is None) != (v is None):
        raise ValueError("k, v: one is None; expected both or neither")
    if block_table is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens: is None, expected the lengths of the sequences that block_table lists")
    if k is None:
        return
    if not _api._is_torch(k_cache) and not _arrays.is_like_numpy(k_cache):
        raise TypeError(f"k_cache: is a {type_name(k_cache)}, which heed cannot write k into; expected k and v to be None")
    if cache_seqlens is None:
        raise ValueError("cache_seqlens: is None, expected how many keys each sequence has before k and v are added")
    if k_cache.shape[:2] != v_cache.shape[:2]:
        raise ValueError(f"v_cache: has shape {list(v_cache.shape)}, k_cache has {list(k_cache.shape)}")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new.shape[0] != q.shape[0] or new.shape[1] != k.shape[1] or new.shape[2:] != cache.shape[2:]:
            expected = [q.shape[0], k.shape[1], *cache.shape[2:]]
            raise ValueError(f"{name}: has shape {list(new.shape)}, expected {expected}")
        if new.dtype != cache.dtype:
            raise TypeError(f"{name}: dtype is {new.dtype}, the cache has {cache.dtype}")
        if not getattr(getattr(cache, "flags", None), "writeable", True):  # NumPy's
            raise ValueError(f"{name}_cache: is read-only, expected one that {name} can be written into")
    if k.shape[1] > _capacity(k_cache, block_table):
        raise ValueError(f"k: has {k.shape[1]} rows, the cache holds {_capacity(k_cache, block_table)} of a sequence")


def _places(xp: Any, lengths: Any, count: int, cache: Any, block_table: Any) -> tuple[Any, Any, Any]:
    """For each new row: its page (or batch) and row in the cache, and whether that is inside."""
    rows = lengths.reshape(-1, 1) + xp.arange(count, **_on(cache))
    inside = (rows >= 0) & (rows < _capacity(cache, block_table))
    sequence = xp.arange(len(lengths), **_on(cache)).reshape(-1, 1)
    if block_table is None:
        return (xp.zeros_like(rows) + sequence).reshape(-1), rows.reshape(-1), inside.reshape(-1)
    size = cache.shape[1]
    pages = block_table[sequence, xp.where(inside, rows, 0) // size]
    inside = inside & (pages >= 0) & (pages < cache.shape[0])
    return pages.reshape(-1), (rows % size).reshape(-1), inside.reshape(-1)


def _is_integer(t: Any) -> bool:
    return str(t.dtype) in ("torch.int32", "torch.int64") if _api._is_torch(t) else _arrays.numbers(t).dtype.kind in "iu"


def _on(cache: Any) -> dict[str, Any]:
    return {"device": cache.device} if _api._is_torch(cache) else {}


def _append(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    lengths: Any,
    block_table: Any,
    check: Callable[[], Any],
    seen: bool = False,
) -> None:
    """Writes k and v behind the keys that are there. On a GPU nothing waits, so a row that does not fit is dropped; on the
    CPU it is an error. check: what else may be one, asked before anything is written. seen: by a tracer, which may have no
    numbers to ask."""
    count = k.shape[1]
    if _api._is_torch(k_cache):
        import torch as xp

        on_host = k_cache.device.type == "cpu" and not seen
        lengths = lengths.long()
        block_table = None if block_table is None else block_table.long()
    else:
        xp = _arrays._namespace(k_cache)
        on_host = _arrays.on_host(k_cache)
    pages, rows, inside = _places(xp, lengths, count, k_cache, block_table)
    if on_host and not bool(inside.all()):
        longest = int(lengths.max()) + count
        raise ValueError(
            f"cache_seqlens: {longest} keys in one sequence, or a page that is not there; the cache has "
            f"{_capacity(k_cache, block_table)} places for each"
            + ("" if block_table is None else f" in {k_cache.shape[0]} pages")
        )
    check()
    if on_host:
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache[pages, rows] = new.reshape(-1, *new.shape[2:])
        return
    if not len(inside):
        return
    # A row that is not inside repeats the first one that is, so that it changes nothing; where none is, row 0 of the cache
    # is written with what it holds.
    first = xp.where(inside, 1, 0).argmax(0).reshape(1)  # one number in a dimension: to index with it does not wait
    some = inside[first]
    for cache, new in ((k_cache, k), (v_cache, v)):
        new = new.reshape(-1, *new.shape[2:])
        page, row = (xp.where(inside, at, xp.where(some, at[first], 0)) for at in (pages, rows))
        same = xp.where(some, new[first], cache[0, 0])
        cache[page, row] = xp.where(inside[:, None, None], new, same)


def attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    cache_seqlens: Any = None,
    block_table: Any = None,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    stride: int = 1,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sink: Any = None,
    lengths_q: Any = None,
    return_lse: bool = False,
    deterministic: bool = True,
    precision: str = "exact",
) -> Any:
    """attention() of new queries over a cache of keys and values, for generation. No gradient.

    q: [B, S, H, D]; the result is [B, S, H, Dv].
    k_cache, v_cache: [B, capacity, G, D] and [B, capacity, G, Dv]; or pages, [pages, page size, G, D] and [..., Dv], with
        block_table: [B, pages of a sequence]: which pages hold it.
    k, v: [B, N, G, D] and [B, N, G, Dv]: written into the cache, in place, behind the keys that are there; then attended to.
    cache_seqlens: [B] whole numbers: how many keys of each sequence are in the cache before that. None: it is full.

    The other arguments are those of attention(); causal aligns the last query with the last key. There is no layout (it is
    "bshd"), no lengths_k (that is cache_seqlens) and no dropout, as nothing is trained here. Lengths and pages beyond the cache
    are an error on the CPU; on a GPU nothing outside of it is read or written, and nothing waits.
    """
    _check(q, k_cache, v_cache, k, v, cache_seqlens, block_table)
    if _api._is_torch(q):
        _refuse_gradient("bias", bias)
        _refuse_gradient("sink", sink)
    return_lse = flag("return_lse", return_lse)
    if k is not None and not _api._is_torch(q):
        cache_seqlens = cache_seqlens.astype("int64")  # to which k's rows can be added: 250 + 10 is 4 in uint8
    lengths = cache_seqlens if k is None else cache_seqlens + k.shape[1]
    arguments = Arguments(
        q, k_cache, v_cache, "bshd", causal, window, stride, mask, bias, scale, softcap, alibi_slopes, sink,
        lengths_q=lengths_q, lengths_k=lengths, deterministic=deterministic, precision=precision, block_table=block_table,
    )  # fmt: skip
    if k is None:
        return _api._attention(return_lse, *arguments)
    prepared = _api._prepare(arguments)
    check, seen = lambda: _api._refuse(prepared), _api._is_seen(prepared)
    _append(k_cache, v_cache, k, v, cache_seqlens, block_table, check, seen)
    if prepared.k is not k_cache or prepared.v is not v_cache:  # copies, for autocast, of the cache as it was before
        prepared = _api._prepare(arguments)
    return _api._attend(return_lse, prepared)
