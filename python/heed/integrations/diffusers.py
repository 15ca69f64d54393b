"""Hugging Face diffusers: two ways in, for two of its kinds of model. The third kind calls PyTorch (heed.integrations.sdpa).

    from heed.integrations.diffusers import HeedAttnProcessor, register

    unet.set_attn_processor(HeedAttnProcessor())          # models made of diffusers' Attention: U-Nets, VAEs

    register()
    transformer.set_attention_backend("heed")             # models that dispatch: Flux, Wan, Qwen-Image, ...
    with diffusers.attention_backend("heed"): ...         # or for a block of code
"""
import torch

import heed

NAME = "heed"


class HeedAttnProcessor:
    """Takes the place of diffusers' AttnProcessor2_0 and AttnProcessor: self- and cross-attention, with or without a mask."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None):
        if not hasattr(attn, "spatial_norm") or attn.added_kv_proj_dim is not None or getattr(attn, "is_causal", False):
            raise ValueError(f"attn: is a {type(attn).__name__} with more to it than what AttnProcessor2_0 computes, such as "
                             "added projections; leave it its own processor (heed.integrations.diffusers has other ways in)")
        residual, image = hidden_states, hidden_states.shape if hidden_states.ndim == 4 else None
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        if image:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)  # [B, C, H, W] to [B, HW, C]
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross:
            context = attn.norm_encoder_hidden_states(context)
        o = self.attend(attn, hidden_states, context, attention_mask)
        for layer in attn.to_out:  # the projection, then its dropout
            o = layer(o)
        if image:
            o = o.transpose(1, 2).reshape(image)
        return (o + residual if attn.residual_connection else o) / attn.rescale_output_factor

    def attend(self, attn, hidden_states, context, mask):
        heads = lambda x: x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
        q, k, v = heads(attn.to_q(hidden_states)), heads(attn.to_k(context)), heads(attn.to_v(context))
        if attn.norm_q is not None:
            q = attn.norm_q(q)
        if attn.norm_k is not None:
            k = attn.norm_k(k)
        if mask is not None:
            mask = attn.prepare_attention_mask(mask, k.shape[2], q.shape[0])
            mask = mask.view(q.shape[0], attn.heads, -1, mask.shape[-1])
        o = heed.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=attn.scale)
        return o.transpose(1, 2).flatten(2).to(q.dtype)


def attention_backend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
                      return_lse=False, _parallel_config=None):
    """diffusers' dispatched attention: [B, S, H, D] in and out; with return_lse also the lse as [B, S, H]."""
    if _parallel_config is not None:
        raise ValueError('heed: context parallelism in diffusers needs another backend, such as "native"')
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if attn_mask is not None and attn_mask.ndim == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None, :]  # which keys count, for each of the batch
    if not return_lse:
        return heed.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
                                                 scale=scale, enable_gqa=enable_gqa).transpose(1, 2)
    kind = "mask" if attn_mask is None or attn_mask.dtype == torch.bool else "bias"
    o, lse = heed.attention(q, k, v, causal="top_left" if is_causal else False, scale=scale, dropout_p=dropout_p,
                            return_lse=True, **{kind: attn_mask})
    return o.transpose(1, 2), lse.transpose(1, 2)


def register(name=NAME):
    """Adds `name` to diffusers' attention backends. They are an enumeration, which Python closes when it is defined: the
    new member is put into its tables by hand. Safe to call again."""
    from diffusers.models import attention_dispatch

    names = attention_dispatch.AttentionBackendName
    if name not in names._value2member_map_:
        member = str.__new__(names, name)
        member._name_, member._value_ = name.upper(), name
        member._sort_order_ = len(names)
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = names._value2member_map_[name] = member
    attention_dispatch._AttentionBackendRegistry.register(names(name))(attention_backend)
