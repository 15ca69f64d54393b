"""What the tests of heed.distributed do on each rank: see ranks.py."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import heed
import heed.distributed as hd
import torch
import torch.distributed as dist
from heed.distributed import _methods
from problems import TOLERANCE
from torch.distributed.device_mesh import DeviceMesh

DEVICE = "cpu"
SHARDS = ("contiguous", "zigzag", "striped")
METHODS = ("ring", "all_gather", "ulysses", "ulysses_ring")
MASKS: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"window": (5, 3)}, {"causal": True, "window": (9, None)}, {"causal": True, "stride": 3},
    {"stride": 4, "window": (13, 2)}, {"causal": True, "softcap": 5.0, "scale": 0.3},
)  # fmt: skip


def problem(
    tokens: int, heads: int = 8, key_heads: int = 4, dim: int = 16, dtype: torch.dtype = torch.float32, batch: int = 2,
    keys: int | None = None, value_dim: int | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """q, k, v and the gradients of o and lse: the same numbers on every rank."""
    g = torch.Generator().manual_seed(7)
    keys, value_dim = tokens if keys is None else keys, value_dim or dim
    shapes = [(heads, tokens, dim), (key_heads, keys, dim), (key_heads, keys, value_dim), (heads, tokens, value_dim)]
    tensors = [torch.randn(batch, *shape, generator=g).to(dtype) for shape in shapes]
    return [t.to(DEVICE) for t in (*tensors, torch.randn(batch, heads, tokens, generator=g))]


def gradients(call: Any, q: Any, k: Any, v: Any, do: Any, dlse: Any) -> list[torch.Tensor]:
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    o, lse = call(q, k, v)
    torch.autograd.backward((o, lse.masked_fill(lse == -torch.inf, 0.0)), (do, dlse))
    return [o.detach(), lse.detach(), q.grad, k.grad, v.grad]  # type: ignore[list-item]


def one_process(tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """In double, by the reference."""
    wide = [t.cpu().double() for t in tensors]
    if "alibi_slopes" in options:
        options = {**options, "alibi_slopes": options["alibi_slopes"].cpu()}
    return gradients(lambda q, k, v: heed.attention(q, k, v, return_lse=True, **options), *wide)


def errors(got: list[torch.Tensor], want: list[torch.Tensor], dtype: torch.dtype, what: str) -> list[str]:
    found = []
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
        a, b = a.cpu().double(), b.cpu().double()
        if a.shape != b.shape or not torch.equal(a.isinf(), b.isinf()):
            found.append(f"{what}: {name}: shapes {tuple(a.shape)}, {tuple(b.shape)}, or rows without keys, differ")
            continue
        off = (a - b).nan_to_num().abs().max() if a.numel() else torch.zeros(())
        finite = b[~b.isinf()]
        size = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        if not off <= TOLERANCE[dtype] * size:
            found.append(f"{what}: {name}: off by {float(off):.2e}, largest element {size:.2e}")
    return found


def compare(
    group: Any, tensors: list[torch.Tensor], method: str, shards: str, want: list[torch.Tensor], **options: Any
) -> list[str]:
    cut = lambda t: hd.shard(t, 2, group=group, shards=shards)
    call = lambda q, k, v: hd.attention(q, k, v, group=group, method=method, shards=shards, return_lse=True, **options)
    got = gradients(call, *map(cut, tensors))
    names = {key: value for key, value in options.items() if key != "alibi_slopes"}
    return errors(got, [cut(t) for t in want], tensors[0].dtype, f"{method}, {shards}, {names}")


# ---- Results ---------------------------------------------------------------------------------------------------------


def every_mask(group: Any, tokens: int, key_heads: int = 4) -> list[str]:
    found = []
    tensors = problem(tokens, key_heads=key_heads)
    for options in MASKS:
        want = one_process(tensors, **options)
        for method, shards in itertools.product(METHODS, SHARDS):
            found += compare(group, tensors, method, shards, want, **options)
    return found


def low_precision(group: Any, dtype: torch.dtype) -> list[str]:
    found = []
    tensors = problem(70, dim=32, dtype=dtype, value_dim=24)
    slopes = torch.linspace(0.1, 0.8, 8, device=DEVICE)
    for options in ({}, {"causal": True, "alibi_slopes": slopes}):
        want = one_process(tensors, **options)
        for method, shards in itertools.product((*METHODS, "auto"), SHARDS):
            found += compare(group, tensors, method, shards, want, **options)
    return found


def more_ranks_than_heads(group: Any) -> list[str]:
    found = []
    tensors = problem(41, heads=4, key_heads=2)
    want = one_process(tensors, causal=True)
    for shards in SHARDS:
        found += compare(group, tensors, "ulysses_ring", shards, want, causal=True)
    return found


def uneven(group: Any, lengths: list[int], options: dict[str, Any]) -> list[str]:
    me, found = dist.get_rank(group), []
    begin = sum(lengths[:me])
    tensors = problem(sum(lengths))
    want = one_process(tensors, **options)
    cut = lambda t: t[:, :, begin : begin + lengths[me]]
    for method in (*METHODS, "auto"):
        call = lambda q, k, v, m=method: hd.attention(q, k, v, group=group, method=m, return_lse=True, **options)
        got = gradients(call, *map(cut, tensors))
        found += errors(got, [cut(t) for t in want], torch.float32, f"{method}, lengths {lengths}, {options}")
    return found


def other_keys(group: Any) -> list[str]:
    """Cross-attention: more keys than rows, fewer keys than rows; causal with either alignment."""
    found = []
    cases = (50, {}), (11, {}), (50, {"causal": True}), (50, {"window": (4, 2)}), (30, {"causal": "top_left"})
    for keys, options in cases:
        tensors = problem(23, keys=keys)
        want = one_process(tensors, **options)
        for method, shards in itertools.product(METHODS, SHARDS):
            found += compare(group, tensors, method, shards, want, **options)
    return found


def ragged(group: Any, starts: list[int]) -> list[str]:
    found = []
    tensors = problem(starts[-1], batch=1)
    for options in ({}, {"causal": True}, {"causal": True, "window": (6, None)}, {"stride": 2, "causal": True}):
        parts = [
            one_process([t[:, :, a:b] for t in tensors], **options) for a, b in itertools.pairwise(starts) if b > a
        ]
        want = [torch.cat(pieces, dim=2) for pieces in zip(*parts, strict=True)]
        for method, shards in itertools.product(METHODS, SHARDS):
            found += compare(group, tensors, method, shards, want, cu_seqlens=starts, **options)
    return found


def memory_orders(group: Any) -> list[str]:
    """layout bshd, and views whose memory is in no simple order."""
    found = []
    tensors = problem(26)
    want = one_process(tensors, causal=True)
    cut = lambda t: hd.shard(t, 2, group=group, shards="zigzag")
    for method in METHODS:

        def call(q: Any, k: Any, v: Any, m: str = method) -> Any:
            flipped = (t.transpose(1, 2) for t in (q, k, v))
            o, lse = hd.attention(
                *flipped, group=group, method=m, shards="zigzag", layout="bshd", causal=True, return_lse=True
            )
            return o.transpose(1, 2), lse

        spread = [torch.stack((t, t), dim=-1)[..., 0] for t in map(cut, tensors)]
        got = gradients(call, *spread)
        found += errors(got, [cut(t) for t in want], torch.float32, method)
    return found


@contextlib.contextmanager
def groups_of_one_head() -> Iterator[None]:
    sizes = {**_methods.BLOCK_BYTES}
    _methods.BLOCK_BYTES.update(dict.fromkeys(sizes, 1))
    try:
        yield
    finally:
        _methods.BLOCK_BYTES.update(sizes)


def head_by_head(group: Any) -> list[str]:
    with groups_of_one_head():
        return [*every_mask(group, 21), *ragged(group, [0, 3, 3, 11, 14, 40])]


def same_bits(group: Any, head_by_head: bool = False) -> list[bool]:
    """Each method twice, the second time perhaps in other groups of heads."""
    q, k, v, do, dlse = (hd.shard(t, 2, group=group, shards="zigzag") for t in problem(67, dtype=torch.bfloat16))
    equal = []
    for method in METHODS:
        call = lambda q, k, v, m=method: hd.attention(
            q, k, v, group=group, method=m, shards="zigzag", causal=True, return_lse=True
        )
        first = gradients(call, q, k, v, do, dlse)
        with groups_of_one_head() if head_by_head else contextlib.nullcontext():
            second = gradients(call, q, k, v, do, dlse)
        equal.append(all(torch.equal(a, b) for a, b in zip(first, second, strict=True)))
    return equal


def back_together(group: Any) -> bool:
    t = torch.arange(2 * 29 * 3.0, device=DEVICE).reshape(2, 29, 3)
    whole = [hd.unshard(hd.shard(t, 1, group=group, shards=s), 1, group=group, shards=s) for s in SHARDS]
    places = [hd.positions(29, group=group, shards=s) for s in SHARDS]
    cuts = [hd.shard(t, 1, group=group, shards=s)[0, :, 0] / 3 for s in SHARDS]
    return all(torch.equal(w, t) for w in whole) and all(
        torch.equal(p.float(), c.cpu()) for p, c in zip(places, cuts, strict=True)
    )


# ---- Messages --------------------------------------------------------------------------------------------------------


def volume(
    group: Any, method: str, shards: str, tokens: int, options: dict[str, Any], dtype: torch.dtype
) -> tuple[int, int]:
    """Bytes sent by this rank, forward and backward."""
    q, k, v, do, _ = (hd.shard(t, 2, group=group, shards=shards).requires_grad_() for t in problem(tokens, dtype=dtype))
    with hd.record() as forward:
        o = hd.attention(q, k, v, group=group, method=method, shards=shards, **options)
    with hd.record() as backward:
        o.backward(do.detach())
    return forward.sent_bytes, backward.sent_bytes


def computed(group: Any, method: str, options: dict[str, Any]) -> tuple[int, int]:
    """How many blocks of keys this rank works on, forward and backward."""
    q, k, v, do, _ = (hd.shard(t, 2, group=group).requires_grad_() for t in problem(256))
    with hd.record() as forward:
        o = hd.attention(q, k, v, group=group, method=method, **options)
    with hd.record() as backward:
        o.backward(do.detach())
    count = lambda r: sum(e.kind == "compute" for e in r.events)
    return count(forward), count(backward)


def trace_head_by_head(group: Any, method: str) -> list[tuple[str, str]]:
    with groups_of_one_head():
        return trace(group, method, os.devnull)


def trace(group: Any, method: str, path: str) -> list[tuple[str, str]]:
    """Kinds and names in the order in which they began."""
    q, k, v = (hd.shard(t, 2, group=group).requires_grad_() for t in problem(512, batch=1)[:3])
    with hd.record() as r:
        hd.attention(q, k, v, group=group, method=method).sum().backward()
    r.save(path if path == os.devnull else f"{path}.{dist.get_rank(group)}", dist.get_rank(group))
    return [(e.kind, e.name) for e in sorted(r.events, key=lambda e: e.begin)]


class Peak:
    """The most memory that was in use since, in bytes, beyond what was before: PyTorch's allocator says it of a GPU, the
    operating system of a process."""

    def __init__(self) -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            ctypes.CDLL(None).mallopt(-3, 1 << 18)  # M_MMAP_THRESHOLD: what is freed is given back at once
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            self.before = self._said("VmRSS")

    def _said(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    def bytes(self) -> int:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - self.before
        return self._said("VmHWM") - self.before


def peak_memory(group: Any, method: str, task: dict[str, Any]) -> tuple[int, int]:
    """Bytes beyond the shards and results, forward and backward, at the worst moment. Shards are striped: all ranks see
    keys of each other under the narrowest window, which makes for little work."""
    shape = task["rows"], task["dim"]
    q, do = (torch.randn(1, task["heads"], *shape, device=DEVICE).to(task["dtype"]) for _ in "qo")
    k, v = (torch.randn(1, task["key_heads"], *shape, device=DEVICE).to(task["dtype"]) for _ in "kv")
    for t in (q, k, v):
        t.requires_grad_()
    size = lambda *ts: sum(t.numel() * t.element_size() for t in ts)
    for _ in range(2):  # the first time buys workspace
        peak = Peak()
        o = hd.attention(q, k, v, group=group, method=method, shards="striped", causal=True, window=(8, None))
        forward = peak.bytes() - size(o)
        grads = torch.autograd.grad(o, (q, k, v), do)
        both = peak.bytes() - size(o, *grads)
        del o, grads
    return forward, both


# ---- Faults ----------------------------------------------------------------------------------------------------------


def mismatch(group: Any, what: str) -> None:
    """Rank 1 does something else."""
    odd = dist.get_rank(group) == 1
    q, k, v, _, _ = problem(16)
    options: dict[str, Any] = {"group": group, "method": "ring"}
    if odd and what == "heads":
        q = q[:, :4]
    elif odd and what == "dtype":
        q, k, v = q.half(), k.half(), v.half()
    elif odd and what == "shape":
        k = k[..., :8]
    elif odd and what == "method":
        options["method"] = "ulysses"
    elif odd and what == "order":  # the second of two calls comes first
        options["window"] = (3, 3)
    elif odd and what == "gradients":
        q.requires_grad_()
    elif odd and what == "tokens":
        q, k, v = (t[:, :, :9] for t in (q, k, v))
    elif odd and what == "type":
        q = "no tensor"  # type: ignore[assignment]
    elif odd and what == "device":
        q, k, v = (t.to("meta") for t in (q, k, v))
    elif odd and what == "mesh":
        from torch.distributed.tensor import DTensor

        q = DTensor.from_local(q, DeviceMesh.from_group(group, "cpu"))
    elif odd and what == "long":
        options["method"] = "\N{CYRILLIC SMALL LETTER ZHE}" * 1000
    elif odd and what == "fabric":
        options["fabric"] = object()
    elif odd and what == "cu_seqlens":
        options["cu_seqlens"] = []
    if what == "tokens":
        options["shards"] = "zigzag"
    if what == "scale":
        options["scale"] = float("inf")
    if what == "unshard":
        hd.unshard(q, 5 if odd else 2, group=group)
    else:
        hd.attention(q, k, v, **options)


def backward_out_of_order(group: Any) -> None:
    q, k, v, _, _ = (t.requires_grad_() for t in problem(16))
    first, second = (hd.attention(q, k, v, group=group, method="ring") for _ in range(2))
    (second if dist.get_rank(group) else first).sum().backward()


def dies(group: Any, when: str) -> float:
    """The last rank is gone in the middle; how long the others waited for their error."""
    q, k, v, _, _ = problem(16)
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        if when == "ring":
            from heed.distributed import _work

            _work.Forward.add = lambda *_: os._exit(1)  # type: ignore[method-assign]
        else:
            os._exit(1)
    begin = time.monotonic()
    try:
        hd.attention(q, k, v, group=group, method="ring")
    except hd.CommunicationError as error:
        if "died" not in str(error):
            raise
        return time.monotonic() - begin
    raise AssertionError("no error")


# ---- The ecosystem ---------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, group: Any, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.group, self.heads = group, heads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, dim=-1))
        if self.group == "one process":
            o = heed.attention(q, k, v, layout="bshd", causal=True)
        else:
            o = hd.attention(q, k, v, group=self.group, shards="zigzag", layout="bshd", causal=True, method="ring")
        return x + self.out(torch.nn.functional.gelu(o.flatten(2)))


def _block_results(block: Any, x: torch.Tensor) -> list[torch.Tensor]:
    y = block(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in block.parameters())]


def _whole(device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(5)).to(device)
    return x, _block_results(Block("one process").to(device), x)


def compiled(group: Any) -> bool:
    x, want = _whole(DEVICE)
    block = torch.compile(Block(group).to(DEVICE), backend="aot_eager")
    y, *grads = _block_results(block, hd.shard(x, 1, group=group, shards="zigzag"))
    for g in grads:
        host = g.cpu()
        dist.all_reduce(host, group=group)
        g.copy_(host)
    got = [hd.unshard(y, 1, group=group, shards="zigzag"), *grads]
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(got, want, strict=True))


def mesh_and_fsdp(group: Any) -> bool:
    """Parameters sharded by FSDP over the same ranks that share the sequence: it averages their gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x, want = _whole("cpu")
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),), mesh_dim_names=("sequence",))
    block = fully_shard(Block(mesh["sequence"]), mesh=mesh)
    y, *grads = _block_results(block, hd.shard(x, 1, group=group, shards="zigzag"))
    got = [
        hd.unshard(y, 1, group=group, shards="zigzag"),
        *(g.full_tensor() * dist.get_world_size(group) for g in grads),
    ]
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(got, want, strict=True))


def data_parallel(group: Any, way: str) -> bool:
    """A part of the batch on every rank, with packed sequences and a bias: the gradients are those of the whole batch."""
    from torch.distributed.fsdp import fully_shard

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = heed.nn.Attention(16, 4, num_kv_heads=2, causal=True, rotary=True)
            self.bias = torch.nn.Parameter(torch.randn(4, 5, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            tokens = y.flatten(0, 1).unflatten(-1, (4, 4))
            cu = torch.arange(0, len(tokens) + 1, x.shape[1], dtype=torch.int32, device=x.device)
            return heed.attention_varlen(tokens, tokens, tokens, cu, cu, 5, 5, bias=self.bias)

    count, rank, device = dist.get_world_size(group), dist.get_rank(group), DEVICE if way == "replicated" else "cpu"
    torch.manual_seed(0)
    model = Model().to(device)
    x = torch.randn(2 * count, 5, 16).to(device)
    want = torch.autograd.grad(model(x).square().sum() / count, list(model.parameters()))
    mine = x[2 * rank : 2 * rank + 2]
    if way == "replicated":
        parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=group)  # which must live until the backward
        parallel(mine).square().sum().backward()
        got = [p.grad for p in model.parameters()]
    else:
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        model(mine).square().sum().backward()
        got = [p.grad.full_tensor() for p in model.parameters()]
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, want, strict=True))


def autocast(group: Any) -> torch.dtype:
    q, k, v = (hd.shard(t, 2, group=group) for t in problem(16)[:3])
    with torch.autocast(DEVICE, torch.bfloat16):
        return hd.attention(q, k, v, group=group).dtype


def under_way(group: Any) -> list[str]:
    """Shards, and gradients, that a collective of PyTorch's is still bringing."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    me, count = dist.get_rank(group), dist.get_world_size(group)
    tensors = problem(8 * count)
    coming = lambda t: all_reduce(t / count, "sum", group).narrow(2, 8 * me, 8)
    q, k, v, do, dlse = map(coming, tensors)
    assert all(isinstance(t, AsyncCollectiveTensor) for t in (q, k, v, do, dlse))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    o, lse = hd.attention(q, k, v, group=group, method="ring", causal=True, return_lse=True)
    got = [o.detach(), lse.detach(), *torch.autograd.grad((o, lse), (q, k, v), (do, dlse))]
    want = [t.narrow(2, 8 * me, 8) for t in one_process(tensors, causal=True)]
    return errors(got, want, torch.float32, "under way")


def trains_after_inference(group: Any) -> bool:
    """What is kept from one call for the next serves both: a size that no other test has."""
    q, k, v = (hd.shard(t, 2, group=group, shards="striped") for t in problem(52)[:3])
    ways: list[dict[str, Any]] = [{"stride": 3}, {"method": "ulysses"}]
    with torch.inference_mode():
        for way in ways:
            hd.attention(q, k, v, group=group, causal=True, shards="striped", **way)
    k.requires_grad_()
    for way in ways:
        hd.attention(q, k, v, group=group, causal=True, shards="striped", **way).sum().backward()
    return k.grad is not None and bool(k.grad.isfinite().all())


def context_parallel_shards(group: Any) -> bool:
    """Buffers that torch's context_parallel has cut are zigzag shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    x = torch.arange(48.0).reshape(1, 48, 1)
    want = hd.shard(x, 1, group=group, shards="zigzag")
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        return torch.equal(x, want)
