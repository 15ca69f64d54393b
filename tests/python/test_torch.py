"""heed as a part of PyTorch: compiling, exporting, transforms, autocast, checkpoints, hooks, streams and graphs."""

from __future__ import annotations

import gc
import os
import pathlib
import resource
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import reference
import torch
import torch._dynamo.testing
from problems import check_close
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import heed
from heed import _ops, _torch
from heed._arguments import Arguments


DIRECT = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) is not None
direct = pytest.mark.skipif(not DIRECT, reason="before PyTorch 2.10 heed keeps nothing itself: autograd does")
traced = pytest.mark.skipif(
    not hasattr(torch.compiler, "substitute_in_graph"), reason="this PyTorch ends a graph before a function of C"
)


def make(device, *shapes, grad=True, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(s, device=device, dtype=dtype, requires_grad=grad) for s in shapes]


def qkv(device, S=9, T=11, grad=True, dtype=torch.float32):
    return make(device, (2, 4, S, 8), (2, 2, T, 8), (2, 2, T, 8), grad=grad, dtype=dtype)


def varlen(q, k, v, **options):
    """heed.attention_varlen of two sequences of 4 and 5 rows, 5 and 6 keys."""
    cu = [torch.tensor(n, dtype=torch.int32, device=q.device) for n in ([0, 4, 9], [0, 5, 11])]
    return heed.attention_varlen(q, k, v, *cu, 5, 6, **options)


def packed_qkv(device, grad=True, dtype=torch.float32):
    return make(device, (9, 4, 8), (11, 2, 8), (11, 2, 8), grad=grad, dtype=dtype)


both = pytest.mark.parametrize(("call", "inputs_of"), [(heed.attention, qkv), (varlen, packed_qkv)], ids=["padded", "packed"])


def same(a, b, tolerance=0.0):
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert torch.allclose(x, y, rtol=tolerance, atol=tolerance), (x - y).abs().max()


def gradients(f, inputs):
    return torch.autograd.grad(f(*inputs).square().sum(), inputs)


# ---- torch.compile and torch.export ------------------------------------------------------------------------------------

_OPTIONS = [
    {},
    {"causal": True, "window": (3, None), "stride": 2, "scale": 0.5, "softcap": 4.0},
    {"causal": "top_left", "return_lse": True, "deterministic": False, "precision": "tf32"},
    {"tensors": ("mask", "bias", "alibi_slopes", "sink", "lengths_q", "lengths_k")},
]


def with_tensors(options, device):
    options = dict(options)
    given = {
        "mask": torch.rand(9, 11, device=device) > 0.2,
        "bias": torch.randn(4, 9, 11, device=device),
        "alibi_slopes": torch.rand(4, device=device),
        "sink": torch.randn(4, device=device),
        "lengths_q": torch.tensor([9, 4], device=device),
        "lengths_k": torch.tensor([5, 11], device=device),
    }
    return options | {name: given[name] for name in options.pop("tensors", ())} if "tensors" in options else options


@traced
@both
@pytest.mark.parametrize("options", _OPTIONS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_into_one_graph(call, inputs_of, options, backend, device):
    options = with_tensors({name: value for name, value in options.items()}, device)
    if call is varlen and "lengths_q" in options:
        del options["lengths_q"]
        options |= {"mask": options["mask"][:5, :6], "bias": options["bias"][:, :5, :6]}
        options["lengths_k"] = torch.tensor([2, 6], device=device)
    if backend == "inductor" and device == "cpu" and options:
        pytest.skip("once is enough: inductor takes the operator as it is")

    def f(q, k, v):
        result = call(q * 2, k, v, **options)
        if "return_lse" not in options:
            return result.sin()
        lse = result[1].nan_to_num(neginf=0)
        return result[0].sin() + (lse.T if call is varlen else lse)[..., None]

    torch._dynamo.reset()
    inputs = inputs_of(device)
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    same([compiled(*inputs)], [f(*inputs)], 1e-6)
    same(gradients(compiled, inputs), gradients(f, inputs), 1e-5)
    with torch.no_grad():
        same([compiled(*inputs)], [f(*inputs)], 1e-6)


@traced
def test_every_function_compiles(device):
    q, k, v = qkv(device, T=9, grad=False)
    k4, v4 = (t.repeat_interleave(2, 1) for t in (k, v))
    cu = torch.tensor([0, 4, 18], dtype=torch.int32, device=device)
    packed = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    layer = heed.nn.Attention(8, 2, rotary=True, causal=True, device=device)
    lengths = torch.tensor([3, 8], device=device)
    calls = [
        lambda: heed.attention_varlen(*packed, cu, cu, 14, 14, causal=True),
        lambda: heed.scaled_dot_product_attention(q, k4, v4, is_causal=True),
        lambda: heed.fused_attention(q, k4, v4),
        lambda: heed.fused_attention_with_mask(q, k4, v4, q[:, :1] @ q[:, :1].transpose(-2, -1) > 0),
        lambda: heed.CustomStridedAttention(3)(q, k, v),
        lambda: layer(q[:, 0]),
        lambda: heed.attention_with_kvcache(q, k4, v4, cache_seqlens=lengths.clamp(max=4)),
        lambda: heed.attention_with_kvcache(q, k4 + 0, v4 + 0, q[:, :1], q[:, :1], lengths.clamp(max=3), causal=True),
        lambda: heed.attention_backward(q, q, k, v, *heed.attention(q, k, v, return_lse=True))[1],
    ]
    for number, call in enumerate(calls):
        torch._dynamo.reset()
        with torch.no_grad():
            try:
                compiled = torch.compile(call, fullgraph=True, backend="aot_eager")()
            except Exception as error:
                raise AssertionError(f"call {number}") from error
            same([compiled], [call()], 1e-6)


@traced
@both
def test_dropout_compiles_and_draws_anew(call, inputs_of, device):
    q, k, v = inputs_of(device)
    f = torch.compile(lambda q, k, v: call(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    a, b = f(q, k, v), f(q, k, v)
    assert not torch.equal(a, b)
    assert all(g.isfinite().all() for g in gradients(f, [q, k, v]))


@traced
def test_compiles_where_torch_comes_after_heed():
    program = """
import numpy, heed
from heed import attention
x = numpy.zeros((1, 1, 2, 4), numpy.float32)
heed.attention(x, x, x)
import torch
q = torch.randn(1, 2, 8, 16)
both = lambda: heed.attention(q, q, q, causal=True) + attention(q, q, q)
assert torch.equal(torch.compile(both, fullgraph=True, backend="aot_eager")(), both())
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@traced
def test_compiles_with_changing_sizes(device):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    f = torch.compile(
        lambda q, k, v: heed.attention(q, k, v, causal=True), fullgraph=True, dynamic=True, backend=counter
    )
    counts = []
    for S in (9, 17, 33):
        inputs = qkv(device, S=S, T=S + 2)
        same([f(*inputs)], [heed.attention(*inputs, causal=True)])
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1], "no graph is made anew"


@traced
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_compiles_with_sizes_that_only_the_numbers_tell(device, dim):
    torch._dynamo.reset()
    (q,) = make(device, (4, 6, 8, 4))

    def call(q, keep, cu):
        part = q[(slice(None),) * dim + (keep,)]
        packed = part.flatten(0, 1)
        packed = heed.attention_varlen(packed, packed, packed, cu, cu, 24, 24)
        return packed, heed.attention(part, part, part, layout="bshd"), heed.attention(*3 * (part.transpose(1, 2),))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        f = torch.compile(call, fullgraph=True, backend="aot_eager")
        for size in 4, 1:
            keep = torch.arange(q.shape[dim], device=device) < size
            rows = (6 * size, 4 * size, 24)[dim]
            cu = torch.tensor([0, rows // 2, rows], dtype=torch.int32, device=device)
            got, want = f(q, keep, cu), call(q, keep, cu)
            same(got, want)
            same(*(torch.autograd.grad(sum(t.square().sum() for t in results), q) for results in (got, want)), 1e-6)


class Layer(torch.nn.Module):
    def forward(self, q, k, v):
        return heed.attention(q, k, v, causal=True, layout="bshd")


@traced
def test_exports(device):
    S = torch.export.Dim("S", min=2, max=512)
    inputs = [t.transpose(1, 2) for t in qkv(device, T=9, grad=False)]
    program = torch.export.export(Layer(), tuple(inputs), dynamic_shapes=({1: S}, {1: S}, {1: S}))
    assert "heed.attention" in program.graph_module.code
    longer = [t.transpose(1, 2) for t in qkv(device, S=30, T=30, grad=False)]
    same([program.module()(*longer)], [Layer()(*longer)])


@traced
def test_exports_packed_sequences(device):
    class Packed(torch.nn.Module):
        def forward(self, q, k, v, cu, sink):
            return heed.attention_varlen(q, k, v, cu, cu, 6, 6, causal=True, sink=sink)

    def inputs(tokens, cu):
        q, k, v, sink = make(device, (tokens, 4, 8), (tokens, 2, 8), (tokens, 2, 8), (4,), grad=False)
        return q, k, v, torch.tensor(cu, dtype=torch.int32, device=device), sink

    T, B = torch.export.Dim("T", min=2, max=512), torch.export.Dim("B", min=2, max=9)
    shapes = ({0: T}, {0: T}, {0: T}, {0: B}, None)
    program = torch.export.export(Packed(), inputs(9, [0, 4, 9]), dynamic_shapes=shapes)
    assert "heed.attention" in program.graph_module.code
    longer = inputs(14, [0, 3, 8, 14])
    same([program.module()(*longer)], [Packed()(*longer)])


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_opcheck(layout, device):
    q, k, v = qkv(device)
    rest = {
        "bias": torch.randn(4, 1, 11, device=device, requires_grad=True),
        "mask": torch.rand(9, 11, device=device) > 0.2,
    }
    if layout == "bshd":
        q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v))
    if layout == "thd":
        q, k, v = make(device, (9, 4, 8), (11, 2, 8), (11, 2, 5))
        cu = [torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 4, 9], [0, 5, 11])]
        rest = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "max_seqlen_q": 5, "max_seqlen_k": 6}
    sink = torch.randn(4, device=device, requires_grad=True)
    a = Arguments(q, k, v, layout, causal=True, sink=sink, **rest)
    opcheck(torch.ops.heed.attention.default, _ops.to_op(a))
    transposed = a._replace(q=q.detach().transpose(0, 1).contiguous().transpose(0, 1))
    opcheck(torch.ops.heed.attention.default, _ops.to_op(transposed))
    with torch.no_grad():
        o, lse = torch.ops.heed.attention(*_ops.to_op(a))
        flat = [t.detach() if isinstance(t, torch.Tensor) else t for t in _ops.to_op(a)]
        wants = [True, True, False, a.bias is not None, True]
        opcheck(torch.ops.heed.attention_backward.default, (o, None, o, lse, wants, *flat))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["lengths", "scores", "dropout", "pages"])
def test_opcheck_with_every_argument(kind, dtype, device):
    q, k, v = qkv(device, dtype=dtype)
    given = {
        "lengths": {
            "lengths_q": torch.tensor([9, 4], dtype=torch.int32, device=device), "window": (3, None),
            "lengths_k": torch.tensor([5, 11], dtype=torch.int32, device=device), "stride": 2, "scale": 0.5,
        },
        "scores": {
            "alibi_slopes": torch.rand(2, 4, device=device), "softcap": 2.0, "deterministic": False, "precision": "plain",
            "bias": torch.randn(1, 11, device=device, dtype=dtype, requires_grad=True),
        },
        "dropout": {"dropout_p": 0.25, "dropout_seed": torch.tensor([5], device=device), "causal": "top_left"},
        "pages": {
            "block_table": torch.tensor([[2, 0], [1, 3]], dtype=torch.int32, device=device),
            "lengths_k": torch.tensor([5, 11], dtype=torch.int32, device=device),
        },
    }  # fmt: skip
    a = Arguments(q, k, v, **given[kind])
    if kind == "pages":  # there is no gradient
        q, *pages = make(device, (2, 9, 4, 8), (4, 6, 2, 8), (4, 6, 2, 8), grad=False, dtype=dtype)
        a = Arguments(q, *pages, "bshd", **given[kind])
    opcheck(torch.ops.heed.attention.default, _ops.to_op(a))
    if kind == "pages":
        return
    with torch.no_grad():
        o, lse = torch.ops.heed.attention(*_ops.to_op(a))
        flat = [t.detach() if isinstance(t, torch.Tensor) else t for t in _ops.to_op(a)]
        wants = [True, True, True, a.bias is not None, False]
        opcheck(torch.ops.heed.attention_backward.default, (o, torch.randn_like(lse), o, lse, wants, *flat))


# ---- Transforms, modes and subclasses ----------------------------------------------------------------------------------


def test_vmap_in_every_dimension(device):
    q, k, v = make(device, (3, 2, 4, 9, 8), (3, 2, 2, 11, 8), (3, 2, 2, 11, 8), grad=False)
    bias, slopes = torch.randn(3, 4, 9, 11, device=device), torch.rand(3, 4, device=device)
    lengths = torch.randint(1, 11, (3, 2), device=device)
    sinks = torch.randn(3, 4, device=device)
    vmap = torch.func.vmap
    for f, dims, extra in [
        (lambda q, k, v: heed.attention(q, k, v, causal=True), (0, 0, 0), ()),
        (lambda q, k, v, b: heed.attention(q, k, v, bias=b), (0, 0, 0, 0), (bias,)),
        (
            lambda q, k, v, s, n: heed.attention(q, k, v, alibi_slopes=s, lengths_k=n),
            (0, 0, 0, 0, 0),
            (slopes, lengths),
        ),
        (lambda q, k, v, s: heed.attention(q, k, v, sink=s), (0, 0, 0, 0), (sinks,)),
        (lambda q, k, v, m: heed.attention(q, k, v, mask=m), (0, 0, 0, None), (bias[0] > 0,)),
    ]:
        want = [
            f(q[n], k[n], v[n], *(x if d is None else x[n] for x, d in zip(extra, dims[3:], strict=True)))
            for n in range(3)
        ]
        same([vmap(f, in_dims=dims)(q, k, v, *extra)], [torch.stack(want)], 1e-6)
    only_q = vmap(lambda q: heed.attention(q, k[0], v[0]), in_dims=1, out_dims=2)(q.movedim(0, 1))
    same([only_q], [torch.stack([heed.attention(x, k[0], v[0]) for x in q], 2)])
    twice = vmap(vmap(lambda q, k, v: heed.attention(q[None], k[None], v[None])))(q, k, v)
    same([twice[:, :, 0]], [torch.stack([heed.attention(*x) for x in zip(q, k, v, strict=True)])], 1e-6)


def test_vmap_over_packed_sequences(device):
    q, k, v = make(device, (3, 9, 4, 8), (3, 11, 2, 8), (3, 11, 2, 8), grad=False)
    sinks, bias = torch.randn(3, 4, device=device), torch.randn(5, 6, device=device)

    def f(q, k, v, sink):
        return varlen(q, k, v, sink=sink, bias=bias, causal=True)

    def loss(*inputs):
        return f(*inputs).square().sum()

    want = [f(*given) for given in zip(q, k, v, sinks, strict=True)]
    same([torch.func.vmap(f)(q, k, v, sinks)], [torch.stack(want)])
    by_func = torch.func.vmap(torch.func.grad(loss, (0, 1, 2, 3)))(q, k, v, sinks)
    for n in range(3):
        inputs = [t[n].clone().requires_grad_() for t in (q, k, v, sinks)]
        same([t[n] for t in by_func], torch.autograd.grad(loss(*inputs), inputs))


def test_gradients_under_transforms(device):
    q, k, v = make(device, (3, 2, 4, 9, 8), (3, 2, 2, 11, 8), (3, 2, 2, 11, 8), grad=False)
    bias = torch.randn(9, 11, device=device)

    def loss(q, k, v, bias):
        return heed.attention(q, k, v, bias=bias, causal=True).square().sum()

    by_func = torch.func.vmap(torch.func.grad(loss, (0, 1, 2, 3)), in_dims=(0, 0, 0, None))(q, k, v, bias)
    for n in range(3):
        inputs = [t.clone().requires_grad_() for t in (q[n], k[n], v[n], bias)]
        same([t[n] for t in by_func], torch.autograd.grad(loss(*inputs), inputs), 1e-5)
    jacobian = torch.func.jacrev(lambda q: heed.attention(q, k[0, :1], v[0, :1])[0, 0, 0, :2])(q[0, :1])
    assert jacobian.shape == (2, 1, 4, 9, 8) and jacobian.any()
    with pytest.raises(NotImplementedError, match="tangent"):
        torch.func.jvp(lambda q: heed.attention(q, k[0], v[0]), (q[0],), (q[0],))


def test_fake_tensors_and_dispatch_modes(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        seen: list = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = qkv(device, grad=False)
    with Record() as record:
        heed.attention(q, k, v)
    assert "heed.attention.default" in record.seen
    with torch._subclasses.FakeTensorMode() as mode:
        o = heed.attention(*(mode.from_tensor(t) for t in (q, k, v)))
        cache, lengths = torch.zeros(2, 16, 4, 8, device=device), torch.ones(2, dtype=torch.int32, device=device)
        new = heed.attention_with_kvcache(o.transpose(1, 2), cache, cache, *2 * (o.transpose(1, 2),), lengths)
    assert type(o).__name__ == "FakeTensor" and o.shape == q.shape
    assert type(new).__name__ == "FakeTensor" and new.shape == q.transpose(1, 2).shape


@both
def test_a_trace_computes_anew(call, inputs_of, device):
    inputs, others = inputs_of(device), [2 * t for t in inputs_of(device, grad=False)]
    for grad in False, True:
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(lambda q, k, v: call(q * 1.5, k, v, causal=True), inputs)
        same([traced(*others)], [call(others[0] * 1.5, *others[1:], causal=True)])


class Marked(torch.Tensor):
    pass


def test_subclasses_and_parameters(device):
    q, k, v = qkv(device, grad=False)
    want = heed.attention(q, k, v)
    same([heed.attention(q.as_subclass(Marked), k, v).as_subclass(torch.Tensor)], [want])
    parameter = torch.nn.Parameter(q.clone())
    o = heed.attention(parameter, k, v)
    o.sum().backward()
    same([o], [want])
    assert type(o) is torch.Tensor and parameter.grad is not None


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sink"])
def test_gradients_of_subclasses(name, device):
    q, k, v, *rest = make(device, (2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8), (9, 11), (4,), grad=False)
    plain = dict(zip(("q", "k", "v", "bias", "sink"), (q, k, v, *rest), strict=True))

    class Kept(torch.nn.Parameter):
        pass

    ways = [lambda t: t.clone().requires_grad_(), lambda t: t.clone().as_subclass(Marked).requires_grad_(), Kept]
    results = []
    for way in ways:
        given = plain | {name: way(plain[name])}
        o = heed.attention(**given)
        o.square().sum().backward()
        results.append((o, given[name].grad))
        with torch.no_grad():
            results.append((heed.attention(**given), given[name].grad))
    for result in results[1:]:
        same([t.as_subclass(torch.Tensor) for t in result], results[0])


def test_subclasses_that_require_gradients_in_other_functions(device):
    def marked(*shape):
        t = torch.randn(shape, device=device)
        return t.as_subclass(Marked).requires_grad_(), t.detach()

    def check(function, *shape, **options):
        results = [function(t, **options) for t in marked(*shape)]
        for got, want in zip(*results, strict=True):
            same([got.as_subclass(torch.Tensor)], [want])

    def backward(t):
        q, k, v = qkv(device, grad=False)
        return heed.attention_backward(t, q, k, v, *heed.attention(q, k, v, return_lse=True))

    @torch.no_grad()
    def self_attention(t):
        output = torch.empty(7, 64, device=device)
        heed.self_attention(t, output)
        return [output]

    check(backward, 2, 4, 9, 8)
    check(self_attention, 7, 64)
    check(lambda t: heed.self_attention_backward(t, t), 7, 64)
    check(torch.no_grad()(lambda t: heed.attention_with_kvcache(t, t, t, return_lse=True)), 2, 5, 4, 8)
    x, plain = marked(9, 2, 8)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    (got,), (want,) = (gradients(lambda t: heed.attention_varlen(t, t, t, cu, cu, 5, 5), [t])
                       for t in (x, plain.clone().requires_grad_()))  # fmt: skip
    same([got.as_subclass(torch.Tensor)], [want])
    negated = torch._neg_view(plain[None]).as_subclass(Marked)
    same([heed.attention(negated, plain[None], plain[None]).as_subclass(torch.Tensor)],
         [heed.attention(-plain[None], plain[None], plain[None])])  # fmt: skip


def test_subclasses_without_memory_are_refused(device):
    from torch.testing._internal.two_tensor import TwoTensor

    x = torch.randn(5, 64, device=device)
    for given in (TwoTensor(x, x.clone()), x.clone()), (x, TwoTensor(x.clone(), x.clone())):
        with pytest.raises(ValueError, match="data is NULL"):
            heed.self_attention(*given)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_the_lower_type(call, inputs_of, device, dtype):
    q, k, v = inputs_of(device)
    bias = torch.randn((5, 6) if call is varlen else (9, 11), device=device, requires_grad=True)
    with torch.autocast(device, dtype=dtype):
        o = call(q, k, v, bias=bias)
    assert o.dtype == dtype
    want = call(q.to(dtype), k.to(dtype), v.to(dtype), bias=bias)
    same([o], [want])
    grads, wanted = (torch.autograd.grad(x.float().sum(), (q, k, v, bias)) for x in (o, want))
    assert all(g.dtype == torch.float32 for g in grads)
    same(grads, wanted)
    with torch.autocast(device, enabled=False):
        assert call(q, k, v).dtype == torch.float32


def test_negated_and_conjugated_views(device):
    q, k, v = qkv(device)

    def views(shape):
        x = torch.randn(shape, dtype=torch.complex64, device=device).conj().imag
        assert x.is_neg()
        return x, x.resolve_neg().contiguous()

    def results(q, k, v, do, **options):
        o = heed.attention(q, k, v, **options)
        return [o, *torch.autograd.grad(o, (k, v), do)]

    x, plain = views(q.shape)
    same(results(x, k, v, x), results(plain, k, v, plain))
    same([heed.attention(torch._neg_view(q), k, v)], [heed.attention(-q, k, v)])
    for name, shape in (("bias", (9, 11)), ("sink", (4,)), ("alibi_slopes", (4,))):
        x, plain = views(shape)
        same(results(q, k, v, q, **{name: x}), results(q, k, v, q, **{name: plain}))
    with torch.no_grad():
        o, lse = heed.attention(q, k, v, return_lse=True)
        x, plain = views(o.shape)
        same(*(heed.attention_backward(do, q, k, v, o, lse) for do in (x, plain)))
        x, plain = views((7, 64))
        outputs = [torch.empty_like(plain) for _ in range(2)]
        heed.self_attention(x, outputs[0]), heed.self_attention(plain, outputs[1])
        same(outputs[:1], outputs[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_numbers_for_each_head_may_be_of_any_type(device, dtype):
    q, k, v = qkv(device, dtype=torch.bfloat16)
    sink = torch.randn(4, device=device, dtype=dtype, requires_grad=True)
    slopes = torch.rand(4, device=device, dtype=dtype)
    o = heed.attention(q, k, v, sink=sink, alibi_slopes=slopes)
    as_float = sink.detach().float().requires_grad_()
    want = heed.attention(q, k, v, sink=as_float, alibi_slopes=slopes.float())
    (got,), (wanted,) = (torch.autograd.grad(x.sum(), s) for x, s in ((o, sink), (want, as_float)))
    same([o, got], [want, wanted.to(dtype)])


def test_a_seed_is_a_tensor_of_one_element_in_any_shape(device):
    q, k, v = qkv(device, grad=False)
    want = heed.attention(q, k, v, dropout_p=0.5, dropout_seed=5)
    for shape in (), (1,), (1, 1):
        seed = torch.full(shape, 5, device=device)
        same([heed.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)], [want])
    same([heed.attention(q, k, v, dropout_p=0.5, dropout_seed=np.int64(5))], [want])


# ---- Autograd ----------------------------------------------------------------------------------------------------------


def test_gradcheck_in_double_precision(device):
    if device != "cpu":
        pytest.skip("float64 is for the CPU")
    q, k, v = make(device, (1, 2, 3, 4), (1, 1, 5, 4), (1, 1, 5, 3), dtype=torch.float64)
    bias = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def f(q, k, v, bias):
        return heed.attention(q, k, v, bias=bias, causal=True, softcap=2.0, return_lse=True)

    assert torch.autograd.gradcheck(f, (q, k, v, bias))


def test_second_derivatives_are_refused(device):
    inputs = qkv(device)
    first = torch.autograd.grad(heed.attention(*inputs).square().sum(), inputs, create_graph=True)
    same(first, gradients(heed.attention, inputs))
    with pytest.raises(NotImplementedError, match="second derivatives"):
        first[0].sum().backward()
    with pytest.raises(NotImplementedError, match="tangent"), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[0].detach(), inputs[0].detach())
        heed.attention(dual, *inputs[1:])


@both
@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"sink": True}, {"dropout_p": 0.25, "dropout_seed": 3}])
def test_gradients_of_many_at_once(call, inputs_of, options, device):
    inputs = inputs_of(device)
    if options.get("sink"):
        inputs.append(torch.zeros(inputs[0].shape[1], device=device, requires_grad=True))
        options = {"sink": inputs[-1]}
    results = call(*inputs[:3], causal=True, **options)
    results = results if isinstance(results, tuple) else (results,)
    given = [torch.randn(3, *t.shape, device=device) for t in results]
    got = torch.autograd.grad(results, inputs, given, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(results, inputs, g, retain_graph=True) for g in zip(*given, strict=True)]
    want = [torch.stack(parts) for parts in zip(*one_by_one, strict=True)]
    same(got, want, 1e-6)
    got = torch.func.vmap(lambda *given: torch.autograd.grad(results, inputs, given, retain_graph=True))(*given)
    same(got, want, 1e-6)


def test_only_lse_may_be_used(device):
    q, k, v = qkv(device)
    _, lse = heed.attention(q, k, v, return_lse=True)
    _, want = reference.attention(q, k, v)
    grads = torch.autograd.grad(lse.square().sum(), (q, k, v))
    wanted = torch.autograd.grad(want.square().sum(), (q, k), allow_unused=True)
    for a, b in zip(grads, wanted, strict=False):
        check_close("gradient", a, b, torch.float32)
    assert not grads[2].any()


@both
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes(call, inputs_of, device, reentrant):
    inputs = inputs_of(device)

    def f(q, k, v):
        return call(q, k, v, dropout_p=0.25, causal=True)

    torch.manual_seed(3)
    want = gradients(f, inputs)
    torch.manual_seed(3)
    checkpoint(f, *inputs, use_reentrant=reentrant).square().sum().backward()
    same([t.grad for t in inputs], want)


def test_saved_tensors_can_be_moved_and_are_watched(device):
    inputs = qkv(device)
    bias = torch.randn(9, 11, device=device)
    saved = []

    def pack(t):
        saved.append(t.shape)
        return t.detach().cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(device)):
        o = heed.attention(*inputs, bias=bias)
    same(torch.autograd.grad(o.sum(), inputs), torch.autograd.grad(heed.attention(*inputs, bias=bias).sum(), inputs))
    assert len(saved) == 6  # o and lse too
    o = heed.attention(*inputs, bias=bias)
    bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("rows", [5, 400])
def test_a_result_that_is_changed_in_place(device, rows):
    """Autograd notices, or the backward has a copy: of a small result it is quicker to make one than to watch it."""
    inputs = [torch.randn(1, 2, rows, 16, device=device, requires_grad=True) for _ in range(3)]
    d_o = torch.randn(1, 2, rows, 16, device=device)
    want = torch.autograd.grad(heed.attention(*inputs), inputs, 2 * d_o)
    o = heed.attention(*inputs).mul_(2)
    if device == "cpu" and rows == 5 and DIRECT:
        same(torch.autograd.grad(o, inputs, d_o), want)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(o, inputs, d_o)


@pytest.mark.parametrize("rows", [5, 400])
def test_inputs_are_watched_whoever_keeps_them(device, rows):
    """Autograd, or, where the call is small, heed itself."""
    shape = (1, 2, rows, 16)
    leaf = torch.randn(shape, device=device, requires_grad=True)
    for n in range(3):
        inputs = [leaf * 2 for _ in range(3)]
        o = heed.attention(*inputs)
        same(torch.autograd.grad(o.sum(), leaf, retain_graph=True), torch.autograd.grad(o.sum(), leaf, retain_graph=True))
        inputs[n].mul_(2)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                o.sum().backward()
    o = heed.attention(leaf, leaf, leaf)
    o.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        o.sum().backward()
    with torch.inference_mode():
        other = torch.randn(shape, device=device)
    with pytest.raises(RuntimeError, match="[Ii]nference"):
        heed.attention(leaf, other, other)


def test_another_tensor_in_an_inputs_place_is_noticed(device):
    inputs, others = qkv(device), qkv(device)
    o = heed.attention(*inputs)
    try:
        torch.utils.swap_tensors(inputs[0], others[0])
    except RuntimeError:
        return  # PyTorch sees who else holds it
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@direct
def test_a_backward_after_one_that_failed_behind_it(device):
    q, k, v = qkv(device)
    o = heed.attention(q, k, v)

    def fail(*_):
        raise KeyError("a hook")

    hook = o.grad_fn.register_hook(fail)
    with pytest.raises(KeyError):
        o.sum().backward()
    hook.remove()
    with pytest.raises(RuntimeError, match="a second time"):
        o.sum().backward()


def test_a_long_graph_is_freed_in_little_stack(device):
    x = torch.randn(1, 1, 2, 4, device=device, requires_grad=True)
    for _ in range(20_000):
        x = heed.attention(x, x, x)
    del x


@pytest.mark.parametrize("options", [{}, {"create_graph": True, "retain_graph": False}])
def test_a_last_backward_lets_go_of_the_inputs(device, options):
    import weakref

    leaf = torch.randn(1, 2, 9, 16, device=device, requires_grad=True)
    q = leaf * 2
    o = heed.attention(q, q, q)
    watched = weakref.ref(q)
    del q
    gc.collect()
    total = o.sum()
    assert watched() is not None
    torch.autograd.grad(total, leaf, **options)
    gc.collect()
    assert watched() is None


def test_no_memory_is_kept_after_backward(device):
    import gc
    import weakref

    inputs = qkv(device)
    mask = torch.ones(9, 11, dtype=torch.bool, device=device)
    o = heed.attention(*inputs, mask=mask)
    watched = weakref.ref(mask)
    o.sum().backward()
    del o, mask
    gc.collect()
    assert watched() is None


def test_memory_that_python_does_not_see_is_given_back(device):
    """lse of a small call, 400 kB here."""

    def in_use():
        if device == "cuda":
            return torch.cuda.memory_allocated()
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    q = torch.randn(1, 1, 100_000, 1, device=device, requires_grad=True)
    k = torch.randn(1, 1, 1, 1, device=device)
    for _ in range(5):
        heed.attention(q, k, k).sum().backward()
    before = in_use()
    for _ in range(100):
        o = heed.attention(q, k, k)
        o.sum().backward()
        heed.attention(q, k, k)
        del o
    assert in_use() - before < 20e6


@pytest.mark.parametrize("rows", [100, 10_000])
def test_a_graph_lets_go_of_what_its_last_backward_has_read(cuda, rows):
    inputs = [torch.randn(1, 4, rows, 64, device=cuda, requires_grad=True) for _ in range(3)]
    total = heed.attention(*inputs).sum()
    for keep in True, False:
        torch.autograd.grad(total, inputs, retain_graph=keep)
    with_graph = torch.cuda.memory_allocated()
    del total
    assert with_graph - torch.cuda.memory_allocated() <= 1024  # the sum itself


def test_no_reference_is_lost_or_kept(device):
    inputs = qkv(device)
    plain = [t.detach() for t in inputs]
    arrays = [t.cpu().numpy() for t in plain]
    mask = torch.ones(9, 11, dtype=torch.bool, device=device)
    sink = torch.randn(4, device=device, requires_grad=True)
    wrong = torch.ones(9, 12, dtype=torch.bool, device=device)

    def refused(*arguments, **options):
        with pytest.raises((TypeError, ValueError)):
            heed.attention(*arguments, **options)

    def work():
        heed.attention(*plain, mask=mask, return_lse=True)
        heed.attention(*inputs, mask=mask).sum().backward()
        torch.autograd.grad(heed.attention(*inputs, sink=sink, return_lse=True)[1].sum(), sink)
        torch.autograd.grad(heed.attention(*inputs).sum(), inputs, create_graph=True)
        heed.attention(*arrays, window=(3, None), lengths_k=arrays[0][:, 0, 0, 0].astype(int) * 0 + 3)
        refused(*plain, mask=wrong)
        refused(*inputs, mask=wrong)
        refused(*plain, stride=0)
        refused(plain[0], arrays[1], plain[2])

    def count():
        time.sleep(0.02)  # autograd's thread for a GPU may wait for the GIL in order to drop a graph
        gc.collect()
        return sys.getallocatedblocks(), [sys.getrefcount(t) for t in (*plain, *inputs, *arrays, mask, sink, wrong)]

    work()
    before, references = count()
    growth = []
    while len(growth) < 12 and (not growth or growth[-1] >= 50):  # torch fills pools of its own at first
        for _ in range(100):
            work()
        blocks, after = count()
        assert after == references
        growth.append(blocks - before)
        before = blocks
    assert growth[-1] < 50, growth


def test_retain_graph_and_partial_gradients(device):
    q, k, v = qkv(device)
    o = heed.attention(q, k.detach(), v)
    first = torch.autograd.grad(o.sum(), (q, v), retain_graph=True)
    same(first, torch.autograd.grad(o.sum(), (q, v)))
    with pytest.raises(RuntimeError):
        torch.autograd.grad(o.sum(), (q, v))
    with torch.inference_mode():
        assert heed.attention(q, k, v).is_inference()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_of_one_allocation_do_not_meet(device, dtype):
    q, k, v = (torch.randn(1, 2, 5, 8, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    o = heed.attention(q, k, v)
    kept = o.detach().clone()
    grads = torch.autograd.grad(o, (q, k, v), torch.ones_like(o), retain_graph=True)
    copies = [g.clone() for g in grads]
    for g, copy in zip(grads, copies, strict=True):
        assert torch.equal(g, copy) and g.is_contiguous()
        g.fill_(torch.nan)
    again = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))  # o and lse are as they were
    assert torch.equal(o, kept) and all(map(torch.equal, again, copies))
    del o
    assert all(map(torch.equal, again, copies))


def test_other_threads_run_while_the_cpu_works():
    """The GIL is not held: what this thread does in the meantime has no pause as long as the call."""
    q = torch.randn(1, 8, 1024, 64)
    ends = []

    def work():
        start = time.perf_counter()
        while time.perf_counter() < start + 0.2:
            begin = time.perf_counter()
            heed.attention(q, q, q)
            ends.append((begin, time.perf_counter()))

    ticks = []
    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(1e-4)
    inside = [sum(begin < tick < end for tick in ticks) for begin, end in ends]
    assert sum(n > 0 for n in inside) > len(inside) / 2, inside


def test_many_threads_at_once(device):
    inputs = qkv(device, S=65, T=65)
    want = gradients(heed.attention, inputs)
    failures = []

    def work():
        mine = [t.detach().clone().requires_grad_() for t in inputs]
        for _ in range(10):
            for a, b in zip(gradients(heed.attention, mine), want, strict=True):
                if not torch.equal(a, b):
                    failures.append("differs")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("way", ["replicated", "sharded"])
def test_data_parallel_training(device, way):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    shards = torch.__version__ >= (2, 6) and (device == "cuda" or hasattr(torch.cpu.Stream, "record_event"))
    if way == "sharded" and not shards:
        pytest.skip("this PyTorch has no fully_shard, or one that needs a GPU")
    torch.manual_seed(0)
    layer = heed.nn.Attention(16, 2, causal=True, device=device)
    x = torch.randn(2, 5, 16, device=device)
    want = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
    backend = "nccl" if device == "cuda" and way == "sharded" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        if way == "replicated":
            parallel = torch.nn.parallel.DistributedDataParallel(layer)  # which must live until the backward
            parallel(x).sum().backward()
            got = [p.grad for p in layer.parameters()]
        else:
            from torch.distributed.fsdp import fully_shard

            fully_shard(layer, mesh=init_device_mesh(device, (1,)))
            layer(x).sum().backward()
            got = [p.grad.full_tensor() for p in layer.parameters()]
    finally:
        dist.destroy_process_group()
    same(got, want)


def test_tensors_that_python_let_go_and_took_back(device):
    """What Python's object for a tensor holds is read directly; PyTorch keeps the object or makes another."""
    held, (q, k, v) = qkv(device), qkv(device, grad=False)
    want = heed.attention(q, k, v)
    for leaf, t in zip(held, (q, k, v), strict=True):
        leaf.grad = t.clone()
        leaf.grad.mark = "kept"  # an attribute keeps the object alive while only PyTorch holds the tensor
    for _ in range(3):
        gc.collect()
        assert held[0].grad.mark == "kept"
        same([heed.attention(*(leaf.grad for leaf in held))], [want])
    parts = torch.stack((q, q, q)).unbind(0)
    same([heed.attention(parts[1], k, v)], [want])
    swapped = q.clone()
    swapped.data = k
    same([heed.attention(swapped, k, v)], [heed.attention(k, k, v)])


def test_old_ways_in_give_the_same_bits(device):
    """What has no C functions for DLPack comes through __dlpack__ or the buffer protocol."""

    class Old:
        def __init__(self, t):
            self.t = t

        def __dlpack__(self, **how):
            if self.t.requires_grad:
                raise BufferError("requires a gradient")  # as PyTorch's does; an old one's is a RuntimeError
            return self.t.__dlpack__(**how)

        def copy(self):
            return Old(self.t.clone())

    q, k, v = qkv(device, grad=False)
    if device == "cpu":
        o = torch.empty_like(q)
        heed._C.forward(Old(o), False, *Arguments(Old(q), Old(k), Old(v), causal=True))
        same([o], [heed.attention(q, k, v, causal=True)])
        with pytest.raises(ValueError, match="q: is a .*Old.* that does not let its memory be read"):
            heed._C.forward(None, False, *Arguments(Old(q.clone().requires_grad_()), Old(k), Old(v)))
    made = _torch.empty(q, (2, 3), (1, 2), "bfloat16")
    assert made.shape == (2, 3) and made.stride() == (1, 2) and made.dtype == torch.bfloat16 and made.device == q.device


def test_a_torch_without_c_functions(device, tmp_path):
    """Before 2.10 tensors come as capsules, and all else is asked and made through Python: it computes the same."""
    program = """
import sys
import torch
if sys.argv[1] == "capsules":
    torch.Tensor.__dlpack_c_exchange_api__ = None
import heed
from heed import _C, _torch
seen, capsule = [], torch.utils.dlpack.to_dlpack
torch.utils.dlpack.to_dlpack = lambda t: seen.append(t) or capsule(t)

torch.manual_seed(0)
shapes = dict(q=(2, 4, 9, 8), k=(2, 2, 11, 8), v=(2, 2, 11, 8), bias=(4, 9, 11), sink=(4,))
results = []
for names, dtype in ("qkv", torch.float32), ("qkv", torch.bfloat16), (shapes, torch.float32):
    given = {n: torch.randn(shapes[n], device=sys.argv[2]).to(dtype).requires_grad_() for n in names}
    seen.clear()
    o, lse = heed.attention(**given, causal=True, return_lse=True)
    assert bool(seen) == (sys.argv[1] == "capsules" or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"))
    assert all(t.requires_grad for t in given.values()) and o.requires_grad and lse.requires_grad
    results += [o, lse, *torch.autograd.grad(o.square().sum() + lse.sum(), given.values())]
    o = heed.attention(**given, stride=2)
    o.square().sum().backward()
    results += [o, *(t.grad for t in given.values())]
    results += [heed.attention(given["q"], given["k"].detach(), given["v"].detach())]
    assert results[-1].requires_grad
    with torch.no_grad():
        results += [heed.attention(**given)]
        assert not results[-1].requires_grad
    x = given["q"].transpose(1, 2)
    results += [heed.attention(x, x, x, layout="bshd"), heed.attention(x, x[:1, :1, :1, :1].expand_as(x), x)]
kept = torch.nn.Parameter(torch.randn(2, 3, 8, 16, device=sys.argv[2]))
heed.attention(kept, kept, torch._neg_view(kept)).sum().backward()
results += [kept.grad]
torch.save([t.detach() for t in results], sys.argv[3])
"""
    for way in "usual", "capsules":
        subprocess.run([sys.executable, "-c", program, way, device, str(tmp_path / way)], check=True)
    same(*(torch.load(tmp_path / way, weights_only=True) for way in ("usual", "capsules")))


# ---- CUDA --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(device):
    if device != "cuda":
        pytest.skip("needs --gpu")
    return device


def test_runs_on_the_current_stream(cuda):
    q = torch.randn(4, 8, 512, 64, device=cuda)
    want = heed.attention(q, q, q)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        x = torch.zeros_like(q)
        torch.cuda._sleep(20_000_000)
        x.copy_(q)
        o = heed.attention(x, x, x)
    stream.synchronize()
    assert torch.equal(o, want)


def test_is_captured_in_a_graph(cuda):
    inputs = qkv(cuda, S=64, T=64, dtype=torch.bfloat16)
    do = torch.randn_like(inputs[0])

    def step():
        o = heed.attention(*inputs, causal=True, dropout_p=0.25)
        return (o, *torch.autograd.grad(o, inputs, do))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    graph.replay()
    first = [t.clone() for t in results]
    graph.replay()
    assert not torch.equal(first[0], results[0]), "dropout draws anew at each replay"
    static = torch.cuda.CUDAGraph()
    with torch.cuda.graph(static):
        o = heed.attention(*inputs, causal=True)
    inputs[0].data.normal_()
    static.replay()
    torch.cuda.synchronize()
    same([o], [heed.attention(*inputs, causal=True)])


def test_does_not_wait_for_the_device(cuda):
    q = torch.randn(1, 2, 64, 64, device=cuda, requires_grad=True)
    heed.attention(q, q, q).sum().backward()
    new = torch.randn(4, 1, 2, 64, device=cuda)
    cache = [torch.randn(4, n, 2, 64, device=cuda) for n in (1, 64, 64)]
    lengths, table = torch.arange(4, device=cuda), torch.arange(4, device=cuda)[:, None]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        heed.attention(q, q, q, causal=True, dropout_p=0.5).sum().backward()
        with torch.no_grad():
            heed.attention_with_kvcache(*cache, new, new, lengths)
            heed.attention_with_kvcache(*cache, new, new, lengths, table)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_reduce_overhead_mode_compiles(cuda):
    torch._dynamo.reset()
    q, k, v = qkv(cuda, grad=False)
    f = torch.compile(lambda q, k, v: heed.attention(q, k, v) * 2, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        o = f(q, k, v).clone()
    same([o], [heed.attention(q, k, v) * 2])


# Makes the bad luck: after the last backward PyTorch's thread goes on only when the results are gone, and then has to wait
# for Python's lock until the program ends.
_ENDS_AT_A_BAD_TIME = """
import os, sys, threading, time
import torch, heed

inputs = [torch.randn(1, 2, 64, 64, device="cuda", requires_grad=True) for _ in range(3)]
do = torch.randn(1, 2, 64, 64, device="cuda")
held = []

def hold_back(_):
    held.append(threading.get_native_id())
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

cores = os.sched_getaffinity(0)
os.sched_setaffinity(0, [int(sys.argv[1])])  # of this thread and those that it makes: the idle one is the last to run
o = heed.attention(*inputs)
o.register_hook(hold_back)
torch.autograd.grad(o, inputs, do)
time.sleep(0.1)
o = heed.attention(*inputs)
sys.setswitchinterval(1000)
torch.autograd.grad(o, inputs, do)
del o
os.sched_setscheduler(held[0], os.SCHED_OTHER, os.sched_param(0))
os.sched_setaffinity(held[0], cores)
until = time.perf_counter() + 0.2
while time.perf_counter() < until:
    pass
"""


def test_a_program_ends_in_peace_after_a_backward(cuda):
    cores = list(os.sched_getaffinity(0))[:4]
    command = [sys.executable, "-c", _ENDS_AT_A_BAD_TIME]
    programs = [subprocess.Popen([*command, str(core)], stderr=subprocess.PIPE, text=True) for core in cores]
    for program in programs:
        _, errors = program.communicate(timeout=120)
        assert program.returncode == 0, errors


def test_what_a_program_does_last_takes_no_longer_than_it_may():
    began = time.perf_counter()
    assert not heed._C.call_within(0.05, lambda: time.sleep(0.5))
    assert time.perf_counter() - began < 0.4
    assert heed._C.call_within(60.0, lambda: 1 / 0)
    program = "import atexit, heed; atexit.register(lambda: heed._C.call_within(60.0, lambda: print('done')))"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout == b"done\n"
