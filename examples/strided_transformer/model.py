"""A small Transformer whose attention is a parameter.

Strided attention lets every query see only the keys 0, s, 2s, ...: the sequence is looked at on a coarser grid, and the
work falls to 1/s. An attention is anything that maps q, k and v of [batch, heads, tokens, head_dim] to such a tensor.
"""
import heed
import torch
from torch import nn


class NaiveStridedAttention(nn.Module):
    """All scores, then those off the stride masked out: what one writes first."""

    def __init__(self, stride):
        super().__init__()
        self.stride = stride

    def forward(self, q, k, v):
        return heed.naive_strided_attention(q, k, v, self.stride)


class Block(nn.Module):
    def __init__(self, width, heads, attention):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # views: heed reads them where they lie
        o = self.attention(q, k, v)
        x = x + self.out(o.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, layers, width, heads, attention, vocabulary=256, max_tokens=4096):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(max_tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads, attention) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens):
        """[batch, tokens] to logits [batch, tokens, vocabulary]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
