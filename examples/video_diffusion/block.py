"""The attention of a video diffusion U-Net at one resolution.

A video of F frames is a tensor [batch, frames, channels, height, width]. Three attentions look at it in turn:

    spatial     within a frame: sequences of height * width, one for each frame
    temporal    along a pixel:  sequences of F frames, one for each pixel
    text        every pixel asks the 77 tokens of the prompt, of which the padding is masked out
"""
import heed
import torch
from torch import nn


def plain_attention(Q, K, V, mask=None):
    """matmul, softmax, matmul: the baseline."""
    scores = Q @ K.transpose(-2, -1) * Q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, dim=-1) @ V


def fused(Q, K, V, mask=None):
    return heed.fused_attention(Q, K, V) if mask is None else heed.fused_attention_with_mask(Q, K, V, mask)


class Attention(nn.Module):
    def __init__(self, width, heads, context_width=None, attend=fused):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(context_width or width, 2 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x, context=None, mask=None):
        """x [n, tokens, width], context [n, keys, context_width] or None for x itself, mask [n, 1, 1, keys]."""
        y = self.norm(x)
        split = lambda t, parts: t.unflatten(-1, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4)
        (Q,), (K, V) = split(self.q(y), 1), split(self.kv(y if context is None else context), 2)
        return x + self.out(self.attend(Q, K, V, mask).transpose(1, 2).flatten(2))


class SpatioTemporalBlock(nn.Module):
    def __init__(self, channels, heads, text_width=768, attend=fused):
        super().__init__()
        self.spatial = Attention(channels, heads, attend=attend)
        self.temporal = Attention(channels, heads, attend=attend)
        self.text = Attention(channels, heads, text_width, attend=attend)

    def forward(self, video, text, text_mask=None):
        """video [B, F, C, H, W], text [B, 77, text_width], text_mask bool [B, 77] or None; returns such a video."""
        B, F, C, H, W = video.shape
        x = video.flatten(3).transpose(2, 3)  # [B, F, HW, C]
        x = self.spatial(x.reshape(B * F, H * W, C)).view(B, F, H * W, C)
        x = self.temporal(x.transpose(1, 2).reshape(B * H * W, F, C)).view(B, H * W, F, C)
        mask = None if text_mask is None else text_mask[:, None, None, :]
        x = self.text(x.reshape(B, H * W * F, C), text, mask).view(B, H * W, F, C)
        return x.permute(0, 2, 3, 1).reshape(B, F, C, H, W)
