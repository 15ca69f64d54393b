"""PyTorch's own torch.nn.functional.scaled_dot_product_attention, computed by heed.

    import torch, heed.integrations.sdpa
    heed.integrations.sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("heed")
    ...
    torch.nn.attention.restore_flash_attention_impl()

PyTorch decides first which of its backends takes a call; what it would give to its flash attention then comes here: on
CUDA fp16 and bf16 without a mask, on the CPU also fp32, fp64 and masks without a gradient. varlen_attn and nested tensors
stay PyTorch's. Needs torch 2.11 or later.
"""
import torch
import torch.nn.attention

import heed

NAME = "heed"


def register(name=NAME):
    """Tells torch.nn.attention about heed; activate_flash_attention_impl(name) then switches it on."""
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        raise RuntimeError(f"torch {torch.__version__} has no registry of flash attentions; 2.11 and later have one")
    torch.nn.attention.register_flash_attention_impl(name, register_fn=Activation)


class Activation:
    """While it lives, PyTorch's flash attention operators are heed's. remove() gives PyTorch its own back."""

    def __init__(self):
        self.libraries = []
        for device, operators in OPERATORS.items():
            if device == "CUDA" and not torch.cuda.is_available():
                continue
            library = torch.library.Library("aten", "IMPL", device)
            self.libraries.append(library)
            for name, function in operators.items():
                library.impl(name, function, device, allow_override=True)

    def remove(self):
        for library in self.libraries:
            library._destroy()
        self.libraries = []


def forward(query, key, value, **options):
    with torch.no_grad():  # the operators are below autograd, which calls their backward by itself
        o, lse = heed.attention(query, key, value, return_lse=True, **options)
    if o.stride() != query.stride():
        want = torch.empty_like(query, device="meta").stride()
        if o.shape == query.shape and any(n > 1 and a != b for n, a, b in zip(o.shape, o.stride(), want)):
            o = torch.empty_strided(o.shape, want, dtype=o.dtype, device=o.device).copy_(o)
    return o, lse


def backward(grad_out, query, key, value, out, logsumexp, **options):
    with torch.no_grad():
        return tuple(heed.attention_backward(grad_out, query, key, value, out, logsumexp, **options)[:3])


def rows_first(t):
    """[B, H, S] or [B, H, S, D] with the memory of [B, S, H, ...]."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


# ---- The operators, with the arguments of their schemas ---------------------------------------------------------------
#
# What they return has the strides of what PyTorch's own return: programs that torch.compile made count on them.

def options_cpu(dropout_p, is_causal, attn_mask, scale):
    if dropout_p:
        raise ValueError(f"dropout_p is {dropout_p}: PyTorch's operator for the CPU has no place for a seed; call "
                         "heed.scaled_dot_product_attention for dropout")
    options = dict(causal="top_left" if is_causal else False, scale=scale)
    if attn_mask is not None:
        options["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask[(None,) * (4 - attn_mask.ndim)]
    return options


def forward_cpu(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    o, lse = forward(query, key, value, **options_cpu(dropout_p, is_causal, attn_mask, scale))
    return o, rows_first(lse)


def backward_cpu(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    options = options_cpu(dropout_p, is_causal, attn_mask, scale)
    return tuple(rows_first(t) for t in backward(grad_out, query, key, value, out, logsumexp, **options))


def options_cuda(dropout_p, is_causal, scale, rng_state):
    """rng_state is what the forward hands to the backward: two words, of which the first is heed's seed."""
    return dict(causal="top_left" if is_causal else False, scale=scale, dropout_p=dropout_p,
                dropout_seed=rng_state.view(torch.int64)[:1] if dropout_p else None)


def forward_cuda(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    draw = torch.randint if dropout_p else lambda _, *shape, **kind: torch.zeros(*shape, **kind)
    rng_state = draw(2**62, (2,), dtype=torch.int64, device=query.device).view(torch.uint64)
    o, lse = forward(query, key, value, **options_cuda(dropout_p, is_causal, scale, rng_state))
    unused, debug_mask = torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)
    return o, lse, None, None, query.shape[2], key.shape[2], rng_state, unused, debug_mask


def backward_cuda(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                  philox_seed, philox_offset, *, scale=None):
    return backward(grad_out, query, key, value, out, logsumexp, **options_cuda(dropout_p, is_causal, scale, philox_seed))


OPERATORS = {
    "CPU": {"_scaled_dot_product_flash_attention_for_cpu": forward_cpu,
            "_scaled_dot_product_flash_attention_for_cpu_backward": backward_cpu},
    "CUDA": {"_scaled_dot_product_flash_attention": forward_cuda,
             "_scaled_dot_product_flash_attention_backward": backward_cuda},
}
