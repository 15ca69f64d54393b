"""torch.nn.functional.scaled_dot_product_attention, by heed."""

from __future__ import annotations

import torch

from heed import _api, _torch
from heed._arguments import flag


def _one_batch(t: torch.Tensor) -> torch.Tensor:
    """[..., H, S, D] with its leading dimensions as one."""
    return t.flatten(0, -4) if t.dim() > 3 else t[None]


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
    rank = max(t.dim() for t in (query, key, value))
    one_head = rank == 2 or (rank == 3 and not enable_gqa)  # [S, D], or [N, S, D]: N is a batch then, and may be 0
    if one_head:
        query, key, value = (t.unsqueeze(-3) for t in (query, key, value))
        attn_mask = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask.unsqueeze(-3)
    kept = 3 if enable_gqa else 2  # the dimensions that are not broadcast
    parts = [t if t.dim() > 2 else t[None] for t in (query, key, value)]
    try:
        lead = torch.broadcast_shapes(*(t.shape[:-kept] for t in parts))
    except RuntimeError:
        leads = ", ".join(str(list(t.shape[:-kept])) for t in parts)
        expected = "some that broadcast" + ("" if enable_gqa else "; enable_gqa allows key a divisor of query's heads")
        raise ValueError(f"query, key, value: leading dimensions are {leads}; expected {expected}") from None
    parts = [t.expand(*lead, *t.shape[-kept:]) for t in parts]
    batch = parts[0].shape[:-3]
    if attn_mask is not None and attn_mask.dim() > 3:
        while attn_mask.dim() > len(batch) + 3 and attn_mask.shape[0] == 1:
            attn_mask = attn_mask[0]
        try:
            attn_mask = _one_batch(attn_mask.expand(*batch, *attn_mask.shape[-3:]))
        except RuntimeError:
            leads, expected = list(attn_mask.shape[:-3]), f"{list(batch)} or ones"
            raise ValueError(f"attn_mask: leading dimensions are {leads}, expected {expected}") from None
    mask, bias = (attn_mask, None) if mask is not None else (None, attn_mask)
    o = _api.attention(*map(_one_batch, parts), causal=causal, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    o = o.reshape(*batch, *o.shape[1:])
    return o.squeeze(-3) if one_head else o
