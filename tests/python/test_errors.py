"""Wrong arguments: the right exception, with a message that names the argument, and nothing done."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import torch

import heed

Q = torch.randn(2, 4, 5, 8)


def message(kind, text, *arguments, function=heed.attention, **options):
    with pytest.raises(kind, match=text):
        function(*arguments, **options)


@pytest.mark.parametrize(
    ("kind", "text", "changes"),
    [
        (TypeError, "q: is a .*list", {"q": [1.0]}),
        (TypeError, "k: is a .*ndarray", {"k": Q.numpy()}),
        (TypeError, "mask: is a .*ndarray", {"mask": np.ones((5, 5), bool)}),
        (TypeError, "v: is a .*str", {"v": "v"}),
        (TypeError, "q: is a .*NoneType", {"q": None}),
        (ValueError, "q: has 3 dimensions, expected 4", {"q": Q[0]}),
        (ValueError, "k: has 2 dimensions", {"k": Q[0, 0]}),
        (ValueError, "5 dimensions", {"q": Q[None]}),
        (TypeError, "q: dtype is int64", {"q": Q.long(), "k": Q.long(), "v": Q.long()}),
        (TypeError, "q: dtype is .*complex", {"q": Q.to(torch.complex64)}),
        (TypeError, "k: dtype is .*complex", {"k": Q.to(torch.complex64).conj()}),
        (ValueError, "k: dtype is fp16", {"k": Q.half()}),
        (ValueError, "head_dim is 7", {"k": Q[..., :7]}),
        (ValueError, "v", {"v": Q[:, :, :4]}),
        (ValueError, "batch", {"k": Q[:1], "v": Q[:1]}),
        (ValueError, "head", {"k": Q[:, :3], "v": Q[:, :3]}),
        (TypeError, "q: has layout torch.sparse_coo", {"q": Q.to_sparse()}),
        (TypeError, "v: has layout torch.sparse_csr", {"v": Q[0, 0].to_sparse_csr()}),
        (TypeError, "q: is a nested tensor", {"q": torch.nested.nested_tensor([Q[0], Q[1]])}),
        (TypeError, "q: is a nested tensor", {"q": torch.nested.nested_tensor([Q[0], Q[1]], layout=torch.jagged)}),
        (TypeError, "q: is a meta tensor", {"q": Q.to("meta"), "k": Q.to("meta"), "v": Q.to("meta")}),
        (TypeError, "bias: is a meta tensor", {"bias": Q.to("meta")}),
        (ValueError, "layout: is 'sbhd'", {"layout": "sbhd"}),
        (ValueError, "layout: is 3", {"layout": 3}),
        (ValueError, "precision: is 'fast', expected 'exact', 'tf32' or 'plain'", {"precision": "fast"}),
        (ValueError, "precision: is None", {"precision": None}),
        (TypeError, "causal: is 3", {"causal": 3}),
        (ValueError, "causal: is 'upper'", {"causal": "upper"}),
        (TypeError, "window: is 3", {"window": 3}),
        (TypeError, "window: is 'a'", {"window": ("a", 1)}),
        (ValueError, "window: is -2", {"window": (-2, 1)}),
        (ValueError, "stride: is 0, expected 1 or more", {"stride": 0}),
        (ValueError, "stride: is -3, expected 1 or more", {"stride": -3}),
        (TypeError, "stride: is 1.5", {"stride": 1.5}),
        (TypeError, "mask: dtype is float32, expected bool", {"mask": Q.new_ones(5, 5)}),
        (TypeError, "mask: dtype is uint8, expected bool", {"mask": torch.ones(5, 5, dtype=torch.uint8)}),
        (ValueError, "mask", {"mask": torch.ones(5, 6, dtype=torch.bool)}),
        (ValueError, "bias", {"bias": torch.ones(3, 5, 5)}),
        (TypeError, "bias: dtype is int64", {"bias": torch.ones(5, 5, dtype=torch.int64)}),
        (ValueError, "bias: dtype is fp16", {"bias": torch.ones(5, 5, dtype=torch.float16)}),
        (ValueError, "scale", {"scale": float("nan")}),
        (TypeError, "scale: is 'big'", {"scale": "big"}),
        (ValueError, "scale: requires a gradient", {"scale": torch.ones((), requires_grad=True)}),
        (ValueError, "softcap", {"softcap": -1.0}),
        (ValueError, "softcap: requires a gradient", {"softcap": torch.ones((), requires_grad=True)}),
        (ValueError, "alibi_slopes: heads is 3", {"alibi_slopes": torch.ones(3)}),
        (ValueError, "alibi_slopes: requires a gradient", {"alibi_slopes": torch.ones(4, requires_grad=True)}),
        (ValueError, "sink", {"sink": torch.ones(3)}),
        (ValueError, "sink: has 2 dimensions", {"sink": torch.ones(2, 4)}),
        (ValueError, "dropout_p: is 1.5, expected 0", {"dropout_p": 1.5, "dropout_seed": 1}),
        (ValueError, "dropout_p: is -0.5, expected 0", {"dropout_p": -0.5, "dropout_seed": 1}),
        (TypeError, "dropout_p: is 'half'", {"dropout_p": "half"}),
        (TypeError, "lengths_k: dtype is torch.float32", {"lengths_k": torch.ones(2)}),
        (ValueError, "lengths_q: expected 2 numbers", {"lengths_q": torch.ones(3, dtype=torch.int32)}),
        (ValueError, "lengths_k", {"lengths_k": torch.tensor([1, 9])}),
        (ValueError, "lengths_k", {"lengths_k": torch.tensor([1, -1])}),
        (ValueError, "lengths_k", {"lengths_k": torch.tensor([1, (1 << 32) + 1])}),
    ],
)  # fmt: skip
def test_attention_says_what_is_wrong(kind, text, changes, device):
    if device == "cuda" and text == "lengths_k":
        pytest.skip("lengths on a GPU are not waited for")
    ours = {"q": Q, "k": Q, "v": Q} | changes
    given = {name: t.to(device) if isinstance(t, torch.Tensor) and not t.is_meta else t for name, t in ours.items()}
    message(kind, text, **given)
    if ours["v"] is Q:
        message(kind, text, **given | {"v": given["v"].clone().requires_grad_()})


@pytest.mark.parametrize(
    ("kind", "text", "changes"),
    [
        (TypeError, "scale: is 'big', expected a number", {"scale": "big"}),
        (TypeError, "scale: is '1', expected a number", {"scale": "1"}),
        (TypeError, "softcap: is None, expected a number", {"softcap": None}),
        (TypeError, "dropout_p: is '0.5', expected a number", {"dropout_p": "0.5"}),
        (TypeError, "window: is 3, expected None or a tuple", {"window": 3}),
        (TypeError, "window: is .3, 0., expected None or a tuple", {"window": [3, 0]}),
        (TypeError, "causal: is 3, expected True", {"causal": 3}),
        (TypeError, "deterministic: is a torch.Tensor", {"deterministic": torch.ones(2)}),
    ],
)
def test_an_operator_says_the_same(kind, text, changes, device):
    x = Q.to(device)
    with pytest.raises(kind, match=text):
        torch.func.vmap(lambda q: heed.attention(q, x, x, **changes))(x[None])


class Undecided:
    def __bool__(self):
        raise RuntimeError("neither true nor false")


@pytest.mark.parametrize("value", [Undecided(), torch.ones(3)])
def test_flags_are_true_or_false(value):
    x, cu = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    rows = torch.randn(2, 3, 2, 8)
    for name in "return_lse", "deterministic":
        text = f"{name}: is .*expected True or False"
        message(TypeError, text, Q, Q, Q, **{name: value})
        message(TypeError, text, x, x, x, cu, cu, 4, 4, function=heed.attention_varlen, **{name: value})
        message(TypeError, text, rows, rows, rows, function=heed.attention_with_kvcache, **{name: value})
    for name in "is_causal", "enable_gqa":
        message(TypeError, f"{name}: is a", Q, Q, Q, function=heed.scaled_dot_product_attention, **{name: value})
    message(TypeError, "backward: is a", Q, Q, Q, function=heed.explain, backward=value)
    message(TypeError, "dropout_p: is", Q, Q, Q, dropout_p=value)
    message(TypeError, "d: is", torch.ones(2, 64), torch.ones(2, 64), function=heed.self_attention, d=value)


def test_shapes_that_do_not_fit_the_short_names():
    message(ValueError, "expected some that broadcast", Q[:, None], Q[:1, None].expand(3, -1, -1, -1, -1), Q[:, None],
            function=heed.scaled_dot_product_attention)  # fmt: skip
    message(ValueError, "key: has 0 dimensions", Q, torch.tensor(1.0), Q, function=heed.scaled_dot_product_attention)
    naive = heed.naive_strided_attention
    for k, v in (Q, Q[:, :, 1:]), (Q[..., 1:], Q), (torch.tensor(1.0), Q):
        message(ValueError, "q, k, v: are", Q, k, v, 2, function=naive)
    for shorter in Q[0], Q[0, 0], Q[None]:
        message(ValueError, r"expected .*\(batch, heads, seq, head_dim\)", shorter, shorter, shorter, 2, function=naive)
    for dtype in torch.int64, torch.bool, torch.float8_e4m3fn:
        wrong = Q.to(dtype)
        message(TypeError, f"q: dtype is {dtype}, expected float32", wrong, wrong, wrong, 2, function=naive)


def test_devices_must_agree(device):
    if device != "cuda":
        pytest.skip("needs --gpu")
    there = Q.to(device)
    message(ValueError, "k: is on cpu, q is on cuda", there, Q, there)
    message(ValueError, "bias: is on cpu, q is on cuda", there, there, there, bias=torch.zeros(5, 5))
    message(ValueError, "k: is on cuda:0, q is on cpu", Q, there, there)
    message(TypeError, "q: dtype is float64", there.double(), there.double(), there.double())


def test_packed_sequences_say_what_is_wrong():
    x, cu = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    varlen = heed.attention_varlen
    message(ValueError, "q: has 4 dimensions, expected 3", Q, Q, Q, cu, cu, 4, 4, function=varlen)
    message(ValueError, "cu_seqlens_k: expected 3", x, x, x, cu, cu[:2].clone(), 4, 4, function=varlen)
    message(TypeError, "cu_seqlens_q: dtype", x, x, x, cu.float(), cu, 4, 4, function=varlen)
    message(TypeError, "max_seqlen_q: is None", x, x, x, cu, cu, None, 4, function=varlen)
    message(ValueError, "max_seqlen_k: is -1", x, x, x, cu, cu, 4, -1, function=varlen)
    message(ValueError, "max_seqlen_k: is 0, expected the length", x, x, x, cu, cu, 4, 0, function=varlen)
    message(ValueError, "cu_seqlens_q", x, x, x, None, cu, 4, 4, function=varlen)
    message(ValueError, "cu_seqlens_q: sequence 1 has length 4, max_seqlen_q is 2", x, x, x, cu, cu, 2, 2, function=varlen)
    message(ValueError, r"cu_seqlens_q\[2\]: is 9, there are 6", x, x, x, torch.tensor([0, 2, 9]), cu, 4, 4, function=varlen)
    message(ValueError, r"cu_seqlens_q\[2\]: is 2, less than the 4", x, x, x, torch.tensor([0, 4, 2]), cu, 4, 4, function=varlen)


def test_backward_says_what_is_wrong():
    o, lse = heed.attention(Q, Q, Q, return_lse=True)
    backward = heed.attention_backward
    message(ValueError, "do: batch is 1", o[:1], Q, Q, Q, o, lse, function=backward)
    message(ValueError, "lse: has 4 dimensions", o, Q, Q, Q, o, lse[..., None], function=backward)
    message(TypeError, "o: is a", o, Q, Q, Q, None, lse, function=backward)
    message(TypeError, "do: is a", o.numpy(), Q, Q, Q, o, lse, function=backward)
    message(ValueError, "dropout_seed: is None", o, Q, Q, Q, o, lse, function=backward, dropout_p=0.5)


def test_self_attention_says_what_is_wrong():
    x, out = torch.randn(5, 64), torch.empty(5, 64)
    self_attention = heed.self_attention
    message(ValueError, "output: requires a gradient", x, out.clone().requires_grad_(), function=self_attention)
    message(ValueError, "x: requires a gradient", x.clone().requires_grad_(), out, function=self_attention)
    message(ValueError, r"x: has shape \[5, 64\], expected \[n, 32\]", x, out, 32, function=self_attention)
    message(ValueError, "output: has 4 rows, x has 5", x, out[:4], function=self_attention)
    message(TypeError, "x: dtype is torch.float64", x.double(), out, function=self_attention)
    message(TypeError, "x: is a list", [1], out, function=self_attention)
    message(TypeError, "output: is a numpy.ndarray", x, out.numpy(), function=self_attention)
    message(TypeError, "output: is a meta tensor", x, out.to("meta"), function=self_attention)
    message(ValueError, "overlap", x, x, function=self_attention)
    message(ValueError, "output: is a negated view", x, torch._neg_view(out), function=self_attention)
    message(TypeError, "x: has layout", x.to_sparse(), out, function=self_attention)
    frozen = np.zeros((5, 64), np.float32)
    frozen.flags.writeable = False
    message(ValueError, "output: is a .* that does not let its memory be written", x.numpy(), frozen, function=self_attention)
    with torch.no_grad():
        heed.self_attention(x.clone().requires_grad_(), out)
    message(ValueError, "grad_output: has shape", x[:, :3], x, function=heed.self_attention_backward)


def _not_dense_tensors():
    return {
        "list": [1.0],
        "str": "x",
        "int": 3,
        "array": Q.numpy(),
        "sparse": Q.to_sparse(),
        "csr": Q[0, 0].to_sparse_csr(),
        "nested": torch.nested.nested_tensor([Q[0], Q[1]]),
        "jagged": torch.nested.nested_tensor([Q[0], Q[1]], layout=torch.jagged),
        "meta": Q.to("meta"),
        "complex": Q.to(torch.complex64),
        "conjugate": Q.to(torch.complex64).conj(),
        "fp8": Q.to(torch.float8_e4m3fn),
        "quantized": torch.quantize_per_tensor(Q, 0.1, 0, torch.qint8),
    }


def _calls(device):
    """A call that works for each function, by its tensors."""
    q = Q.to(device)
    rows, x, packed = q.transpose(1, 2), torch.randn(5, 64, device=device), torch.randn(6, 2, 8, device=device)
    o, lse = heed.attention(q, q, q, return_lse=True)
    two, cu = torch.tensor([1, 2], device=device), torch.tensor([0, 2, 6], device=device)
    cache, pages = (torch.zeros(n, 16, 4, 8, device=device) for n in (2, 8))
    seen, table = torch.ones(5, 5, dtype=torch.bool, device=device), torch.tensor([[0, 1], [2, 3]], device=device)
    extras = {"mask": seen, "bias": x[:, :5], "alibi_slopes": x[0, :4], "sink": x[0, :4]}
    of_two = {name: t[..., :2] if t.dim() == 1 else t[:4, :4] for name, t in extras.items()}  # heads, and 4 rows and keys
    of_keys = extras | {name: extras[name][:1, :1] for name in ("mask", "bias")}
    with_lengths = {"lengths_q": two, "lengths_k": two, "dropout_seed": two[:1]}
    new = {"k": rows, "v": rows, "cache_seqlens": two}
    return {
        functools.partial(heed.attention, dropout_p=0.5): {"q": q, "k": q, "v": q, **with_lengths, **extras},
        functools.partial(heed.attention_varlen, max_seqlen_q=4, max_seqlen_k=4, dropout_p=0.5): {
            "q": packed, "k": packed, "v": packed, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "lengths_k": two,
            "dropout_seed": two[:1], **of_two,
        },
        heed.attention_with_kvcache: {
            "q": rows, "k_cache": cache, "v_cache": cache.clone(), "lengths_q": two, **new, **of_keys,
        },
        functools.partial(heed.attention_with_kvcache, causal=True): {
            "q": rows, "k_cache": pages, "v_cache": pages.clone(), "block_table": table, **new,
        },
        functools.partial(heed.attention_backward, dropout_p=0.5): {
            "do": q, "q": q, "k": q, "v": q, "o": o, "lse": lse, "dlse": lse, **with_lengths, **extras,
        },
        functools.partial(heed.explain, dropout_p=0.5): {"q": q, "k": q, "v": q, **with_lengths, **extras},
        heed.fused_attention: {"Q": q, "K": q, "V": q},
        heed.scaled_dot_product_attention: {"query": q, "key": q, "value": q, "attn_mask": seen},
        heed.fused_attention_with_mask: {"Q": q, "K": q, "V": q, "mask": seen},
        heed.self_attention: {"x": x, "output": x.clone()},
        heed.self_attention_backward: {"grad_output": x, "x": x},
        functools.partial(heed.naive_strided_attention, stride=2): {"q": q, "k": q, "v": q},
        heed.CustomStridedAttention(2): {"q": q, "k": q, "v": q},
        heed.nn.Attention(8, 2, device=device): {"x": q[:, 0], "context": q[:, 1]},
        heed.nn.Attention(8, 4, rotary=True, device=device): {
            "x": q[:, 0], "positions": torch.arange(5, device=device), "lengths": two, "mask": seen, "bias": x[:, :5],
        },
        heed.nn.rotate: {"x": rows, "positions": torch.arange(5, device=device)},
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:.*prototype stage")
def test_no_function_takes_anything_but_dense_tensors(device):
    bad = _not_dense_tensors()
    if device == "cuda":
        bad |= {kind: t.to(device) for kind, t in bad.items() if isinstance(t, torch.Tensor) and kind != "meta"}
    for function, tensors in _calls(device).items():
        function(**tensors)
        for name in tensors:
            for kind, value in bad.items():
                if (name, kind) == ("dropout_seed", "int"):
                    continue
                try:
                    function(**tensors | {name: value})
                except (TypeError, ValueError) as error:
                    assert re.search(r"expected|: (is|has) |: dtype is|: batch is", str(error)), (name, kind, error)
                else:
                    pytest.fail(f"{function}: {name} may be {kind}")
            if device == "cuda":
                elsewhere = {name: tensors[name].cpu()}
                message(ValueError, "is on|are", function=function, **tensors | elsewhere)


def test_masks_of_a_wrong_type():
    message(TypeError, "mask: is a list", Q, Q, Q, [1], function=heed.fused_attention_with_mask)
    ints = torch.ones(5, 5, dtype=torch.int32)
    message(TypeError, "bias: dtype is int32", Q, Q, Q, ints, function=heed.fused_attention_with_mask)
    message(TypeError, "attn_mask: is a list", Q, Q, Q, [1], function=heed.scaled_dot_product_attention)


def test_modules_say_what_is_wrong():
    message(ValueError, "stride: is -1", -1, function=heed.CustomStridedAttention)
    message(TypeError, "stride: is 1.5", 1.5, function=heed.CustomStridedAttention)
    message(ValueError, "num_kv_heads: is 3", 64, 8, num_kv_heads=3, function=heed.nn.Attention)
    message(ValueError, "num_heads: is 7", 64, 7, function=heed.nn.Attention)
    message(ValueError, "rotary: head_dim is 3", 9, 3, rotary=True, function=heed.nn.Attention)
    message(ValueError, "dropout: is 1", 64, 8, dropout=1, function=heed.nn.Attention)
    message(ValueError, "stride: is 0", Q, Q, Q, 0, function=heed.naive_strided_attention)


@pytest.mark.parametrize(
    ("kind", "text", "positions"),
    [
        (TypeError, "positions: is a list, expected a torch.Tensor", [0, 1, 2, 3, 4]),
        (TypeError, "positions: is a numpy.ndarray", np.arange(5)),
        (TypeError, "positions: is a int", 3),
        (TypeError, "positions: dtype is torch.bool", torch.ones(5, dtype=torch.bool)),
        (TypeError, "positions: dtype is torch.complex64", torch.ones(5, dtype=torch.complex64)),
        (TypeError, "positions: is a meta tensor", torch.arange(5, device="meta")),
        (TypeError, "positions: has layout torch.sparse_coo", torch.arange(5).to_sparse()),
        (ValueError, r"positions: has shape \[4\], expected \[5\] or \[2, 5\]", torch.arange(4)),
        (ValueError, r"positions: has shape \[\], expected", torch.tensor(1)),
        (ValueError, r"positions: has shape \[5, 1\], expected", torch.arange(5)[:, None]),
        (ValueError, r"positions: has shape \[3, 5\], expected", torch.arange(15).reshape(3, 5)),
    ],
)  # fmt: skip
def test_positions_say_what_is_wrong(kind, text, positions, device):
    if isinstance(positions, torch.Tensor) and not positions.is_meta:
        positions = positions.to(device)
    layer = heed.nn.Attention(8, 2, rotary=True, device=device)
    message(kind, text, Q[:, 0].to(device), function=layer, positions=positions)
    message(kind, text, Q.transpose(1, 2).to(device), positions, function=heed.nn.rotate)


def test_positions_are_for_rotary_embeddings_alone(device):
    x, there = Q[:, 0].to(device), torch.arange(5, device=device)
    message(ValueError, "positions: is given without rotary", x, function=heed.nn.Attention(8, 2, device=device), positions=there)
    message(ValueError, r"x: has shape \[2, 5, 8\]", x, there, function=heed.nn.rotate)
    message(ValueError, "x: has shape .* with D even", Q[..., :7], there, function=heed.nn.rotate)
    message(TypeError, "x: is a list", [1], there, function=heed.nn.rotate)
    message(TypeError, "x: dtype is torch.int64", Q.long(), there, function=heed.nn.rotate)
    if device == "cuda":
        layer = heed.nn.Attention(8, 2, rotary=True, device=device)
        message(ValueError, "positions: is on cpu, x is on cuda", x, function=layer, positions=there.cpu())


def test_other_functions_say_what_is_wrong():
    message(ValueError, "threads: is -1", -1, function=heed.set_threads)
    message(ValueError, "threads: is 2000000, expected 0 to 1048576", 2_000_000, function=heed.set_threads)
    message(TypeError, "threads: is 'two'", "two", function=heed.set_threads)
    message(TypeError, "chip: is 3", Q, Q, Q, chip=3, function=heed.explain)
    message(ValueError, "chip|sm_9000", Q, Q, Q, chip="sm_9000", function=heed.explain)
    message(TypeError, "unexpected keyword", Q, Q, Q, colour="red", function=heed.explain)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        heed.nothing


def test_a_failed_call_leaves_the_output_alone():
    out = torch.full((5, 64), 7.0)
    with pytest.raises(ValueError):
        heed.self_attention(torch.randn(5, 64), out[:4])
    assert (out == 7).all()
