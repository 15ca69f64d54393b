"""torch.nn.functional.scaled_dot_product_attention, by heed."""

from __future__ import annotations

import torch

from heed import _api, _torch
from heed._arguments import flag


def _with_batch(t: torch.Tensor, batch: torch.Size) -> torch.Tensor:
    """[..., H, S, D] with its leading dimensions broadcast to `batch`, as one dimension."""
    t = t if t.dim() > 2 else t[None]
    t = t.expand(*batch, *t.shape[-3:])
    return t.reshape(-1, *t.shape[-3:]) if len(batch) != 1 else t


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """A drop-in for torch.nn.functional.scaled_dot_product_attention: the same arguments, shapes and meaning.

    query: [..., H, S, D], key: [..., G, T, D], value: [..., G, T, Dv]; the result is [..., H, S, Dv]. G is H, or, with
    enable_gqa, a divisor of it. attn_mask broadcasts to [..., H, S, T]: bool (True: attend) or numbers that are added to the
    scores; or it is a causal_upper_left or causal_lower_right of torch.nn.attention.bias. is_causal aligns to the top left
    corner: row i sees keys 0 to i.
    """
    is_causal, enable_gqa = flag("is_causal", is_causal), flag("enable_gqa", enable_gqa)
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask: expected None where is_causal is set")
    causal = "top_left" if is_causal else _torch.causal_bias(attn_mask) or False
    attn_mask = None if causal else attn_mask
    given = (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask))
    for name, t in given if attn_mask is not None else given[:3]:
        if not isinstance(t, torch.Tensor) or t.is_nested:  # has no shape; the rest is asked where it matters
            _torch.check(name, t)
    mask = attn_mask if attn_mask is not None and attn_mask.dtype == torch.bool else None
    bias = attn_mask if mask is None else None
    same = query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]
    if same and (attn_mask is None or attn_mask.dim() <= 4) and (enable_gqa or query.shape[1] == key.shape[1] == value.shape[1]):
        return _api.attention(query, key, value, causal=causal, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)

    for name, t in given[:3]:
        _torch.check(name, t)
        if t.dim() < 2:
            raise ValueError(f"{name}: has {t.dim()} dimensions, expected at least 2: [..., sequence, head_dim]")
    shapes = [t.shape[:-3] for t in (query, key, value)]
    if attn_mask is not None:
        shapes.append(attn_mask.shape[:-3])
    try:
        batch = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        batches = ", ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"query, key, value, attn_mask: leading dimensions are {batches}; expected some that broadcast") from None
    q, k, v = (_with_batch(t, batch) for t in (query, key, value))
    heads = q.shape[1]
    if not enable_gqa and (k.shape[1] != heads or v.shape[1] != heads):
        if any(n not in (1, heads) for n in (k.shape[1], v.shape[1])):
            raise ValueError(f"key: has {k.shape[1]} heads, query has {heads}; enable_gqa allows a divisor of that")
        k, v = k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
    if attn_mask is not None and attn_mask.dim() > 3:
        attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:]).reshape(-1, *attn_mask.shape[-3:])
    mask, bias = (attn_mask, None) if mask is not None else (None, attn_mask)
    o = _api.attention(q, k, v, causal=causal, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    o = o.reshape(*batch, *o.shape[1:])
    return o.squeeze(-3) if max(t.dim() for t in (query, key, value)) == 2 else o
