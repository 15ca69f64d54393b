"""Hugging Face transformers: attn_implementation="heed".

    import heed.integrations.transformers
    heed.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="heed")

For sequences that are spread over ranks (heed.distributed):

    heed.integrations.transformers.register_distributed(group=group)
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="heed_distributed")
"""
import sys

import torch

import heed

NAME = "heed"

# What models say outside of masks where the attention is neither "eager" nor "sdpa": keys that an indexer chose
# (DeepSeek V3.2, MiniMax M3), a sink for each row (Inkling 2). Without it the result would be another one.
NOT_TAKEN = ("indices", "block_indices", "sinks")


def register(name=NAME):
    """Makes `name` known to transformers, both as an attention and as a kind of mask. Without the second, transformers
    would hand the attention no mask at all, and padding would be attended to."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)


def register_distributed(name="heed_distributed", group=None, shards="zigzag", method="auto"):
    """Makes `name` known as attention over the ranks of a group: every rank gives the model its own tokens, as
    heed.distributed.shard cut them, and their position_ids. What is seen follows from the positions: there is no mask, and
    so no padding and no cache. Sliding windows are those of the model's configuration."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from heed import distributed

    def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, softcap=None,
               sliding_window=None, s_aux=None, **_):
        if dropout or s_aux is not None or attention_mask is not None:
            raise ValueError("heed over several ranks has no dropout, sinks, masks or padding")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        o = distributed.attention(query, key, value, group=group, shards=shards, method=method, causal=bool(causal),
                                  window=None if sliding_window is None else (sliding_window - 1, None), scale=scaling,
                                  softcap=softcap or 0.0)
        return o.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda *_, **__: None)


@torch.compiler.assume_constant_result
def is_vouched_for(kind):
    """Whether transformers says that models of this configuration get along with attention that is not their own. An error
    where they do not ask for it at all: they would add True and False to their scores."""
    module = sys.modules.get(kind.__module__.replace(".configuration_", ".modeling_"))
    if not kind.__module__.startswith("transformers.models.") or module is None:
        return True
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS") and any("Attention" in value.__name__ for value in own):
        raise ValueError(f'{kind.__name__}: these models compute attention by themselves; use attn_implementation="eager"')
    return any(getattr(value, flag, False) for value in own for flag in ("_supports_sdpa", "_supports_attention_backend"))


def make_mask(**given):
    """transformers' mask interface: what sdpa_mask makes. A mask that shows nothing outside of a causal band says so in
    heed_window: attention then costs what the band does, and not what all the mask would."""
    from transformers.masking_utils import sdpa_mask

    # allow_is_causal_skip: nothing was added to the causal mask but a local size and padding.
    is_band = given.get("allow_is_causal_skip", False)
    vouched = is_vouched_for(type(given.get("config")))
    if not vouched:  # its layers may not know whether they are causal (Pegasus-X, Splinter): None would leave it to them
        given["allow_is_causal_skip"] = False
    mask = sdpa_mask(**given)
    if mask is None and not vouched:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=given.get("device"))
    if mask is None or torch.compiler.is_compiling() or not is_band or "q_length" not in given:
        return mask
    # The band counts from the last row at the last key, so that is where they must be.
    if given["q_offset"] + given["q_length"] == given["kv_offset"] + given["kv_length"]:
        size = given.get("local_size")
        mask.heed_window = (None if size is None else size - 1, 0)
    return mask


def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, softcap=None,
                      s_aux=None, position_bias=None, position_ids=None, cu_seq_lens_q=None, cu_seq_lens_k=None,
                      max_length_q=None, max_length_k=None, cache=None, output_attentions=False, **more):
    """transformers' attention interface: [B, H, S, D] in, ([B, S, H, D], None) out.

    attention_mask is what make_mask made: bool, true where attended, sliding windows and packed sequences included; a
    float one is added to the scores. None means causal or full, as the module says. Grouped heads, softcap, sinks
    (s_aux) and a position bias go to the kernel as they are; nothing is repeated or copied. cu_seq_lens_q and the like
    (DataCollatorWithFlattening) say where packed sequences begin, which the mask only knows where transformers took it
    from the positions."""
    if output_attentions:
        raise ValueError('heed never holds the attention weights; use attn_implementation="eager" for output_attentions')
    if cache is not None:
        raise ValueError('heed has no continuous batching in transformers yet; use attn_implementation="sdpa" for it')
    for name in NOT_TAKEN:
        if more.get(name) is not None:
            raise ValueError(f'{name}: heed does not take what {type(module).__name__} says with it; use '
                             'attn_implementation="eager" or "sdpa"')
    if query.shape[0] != key.shape[0]:  # queries that are learned may be given once for all
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (t.expand(batch, -1, -1, -1) for t in (query, key, value))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and attention_mask is None
    options = dict(scale=scaling, softcap=softcap or 0.0, sink=None if s_aux is None else s_aux.float(), dropout_p=dropout)
    if attention_mask is None and cu_seq_lens_q is not None:
        batch, _, rows, _ = query.shape
        tokens = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        o = heed.attention_varlen(*tokens, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, causal=causal,
                                  bias=position_bias, **options)
        return o.unflatten(0, (batch, rows)), None
    # Positions of the call; where a layer computes fewer rows than that (Gemma 4), they are the last ones.
    rows = query.shape[2] if position_ids is None else max(query.shape[2], position_ids.shape[-1])
    causal = causal and rows > 1
    if causal and key.shape[2] > rows:  # the first call on a static cache: keys beyond the rows are not there yet
        key, value = key[:, :, :rows], value[:, :, :rows]
        position_bias = None if position_bias is None else position_bias[..., :rows]
    mask, bias = attention_mask, position_bias
    if mask is not None and mask.dtype != torch.bool:
        mask, bias = None, mask if bias is None else mask + bias
    if mask is not None and cu_seq_lens_q is not None:
        row_of, key_of = (torch.bucketize(torch.arange(t.shape[0] * t.shape[2], device=t.device), begins, right=True)
                          .view(t.shape[0], 1, -1) for t, begins in ((query, cu_seq_lens_q), (key, cu_seq_lens_k)))
        mask = mask & (row_of[..., None] == key_of[:, :, None])
    window = getattr(attention_mask, "heed_window", None)
    o = heed.attention(query, key, value, causal=causal, window=window, mask=mask, bias=bias, **options)
    return o.transpose(1, 2).contiguous(), None
