"""Attention by its definition, in float64 and plain PyTorch, for every argument; autograd gives the gradients."""

from __future__ import annotations

import torch


def to_bhsd(t: torch.Tensor, layout: str) -> torch.Tensor:
    return t.transpose(1, 2) if layout == "bshd" else t


def attention(
    q,
    k,
    v,
    *,
    layout="bhsd",
    causal=False,
    window=None,
    stride=1,
    mask=None,
    bias=None,
    scale=None,
    softcap=0.0,
    alibi_slopes=None,
    sink=None,
    lengths_q=None,
    lengths_k=None,
    keep=None,
):
    """o and lse. keep: what dropout multiplies the weights with."""
    q, k, v = (to_bhsd(t, layout).double() for t in (q, k, v))
    (B, H, S, D), (G, T) = q.shape, k.shape[1:3]
    k, v = (t.repeat_interleave(H // G, dim=1) for t in (k, v))
    device = q.device
    Lq = torch.full((B,), S, device=device) if lengths_q is None else lengths_q.long()
    Lk = torch.full((B,), T, device=device) if lengths_k is None else lengths_k.long()
    i, j = torch.arange(S, device=device), torch.arange(T, device=device)
    place = i + (0 if causal == "top_left" else (Lk - Lq)[:, None])  # [B, S] or [S]
    distance = (j - place.expand(B, S)[:, :, None])[:, None]  # [B, 1, S, T], key minus row

    scores = q @ k.transpose(-2, -1) * (D**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = (i < Lq[:, None])[:, None, :, None] & (j < Lk[:, None])[:, None, None] & (j % stride == 0)
    if bias is not None:
        visible = visible & (bias.double() > -torch.inf)
        scores = scores + bias.double()
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double().expand(B, H)[:, :, None, None] * distance.abs()
    if causal:
        visible = visible & (distance <= 0)
    if window is not None:
        left, right = (-1 if side is None else side for side in window)
        visible = visible & ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))
    if mask is not None:
        visible = visible & mask
    visible = visible.expand(B, H, S, T)

    scores = torch.where(visible, scores, 0.0)
    seen = visible.any(-1)
    nothing = scores.new_full((B, H, S, 1), -torch.inf)  # so that a maximum over no keys is one
    peak = torch.cat((torch.where(visible, scores, -torch.inf), nothing), -1).amax(-1).detach()
    if sink is not None:
        peak = torch.maximum(peak, sink.double()[:, None])
    peak = torch.where(seen, peak, 0.0)
    weights = torch.where(visible, torch.exp(scores - peak[..., None]), 0.0)
    total = weights.sum(-1)
    if sink is not None:
        total = total + torch.where(seen, torch.exp(sink.double()[:, None] - peak), 0.0)
    total = torch.where(seen, total, 1.0)
    probability = weights / total[..., None]
    if keep is not None:
        probability = probability * keep
    lse = torch.where(seen, peak + total.log(), -torch.inf)
    return to_bhsd(probability @ v, layout), lse
