"""Messages between the ranks of a group, and what is known about them: how many bytes, when, and what went wrong.

Every exchange of every method is a set of point-to-point messages, posted together before work that does not need them
and waited for after it. NCCL runs them on a stream of its own; Gloo on threads of its own, and tensors of a GPU go
through host memory for it. There are no groups but the caller's, as making one is a collective call of all the world.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

Message = tuple[int, Sequence[torch.Tensor]]  # a rank of the group, and what it is sent or what it sends


class CommunicationError(RuntimeError):
    """Some rank did not do its part of a call: it died, hangs, or made another call. The group is of no use any
    more."""


class DisagreementError(ValueError):
    """The ranks of a group made different calls. Raised on all of them, before anything was computed."""


# ---- Records ---------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    kind: str  # "send" and "receive": when it was posted; "wait" and "compute": from when to when
    name: str
    begin: float
    end: float


class Record:
    """What happened on this rank inside `with heed.distributed.record() as r`. Bytes are those of the messages of
    attention itself, without the description that the ranks compare before each call."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.messages = 0
        self.events: list[Event] = []

    def seconds(self, kind: str) -> float:
        return sum(e.end - e.begin for e in self.events if e.kind == kind)

    def save(self, path: str, rank: int = 0) -> None:
        """As a trace for chrome://tracing or Perfetto: one line of messages, one of work and waiting."""
        lines = {"compute": 0, "wait": 0, "send": 1, "receive": 2}
        events = [
            {
                "name": f"{e.kind} {e.name}", "cat": e.kind, "ph": "X", "pid": rank, "tid": lines[e.kind],
                "ts": e.begin * 1e6, "dur": (e.end - e.begin) * 1e6,
            }
            for e in self.events
        ]  # fmt: skip
        with open(path, "w") as file:
            json.dump({"traceEvents": events}, file)


_records: list[Record] = []


@contextlib.contextmanager
def record() -> Iterator[Record]:
    """Counts messages and times work and waiting on this rank. On a GPU work is waited for, so that times are true."""
    r = Record()
    _records.append(r)
    try:
        yield r
    finally:
        _records.remove(r)


@contextlib.contextmanager
def timed(kind: str, name: str, device: torch.device) -> Iterator[None]:
    if not _records:
        yield
        return
    begin = time.perf_counter()
    with torch.profiler.record_function(f"heed {kind} {name}"):
        yield
    if device.type == "cuda" and kind == "compute":
        torch.cuda.current_stream(device).synchronize()
    for r in _records:
        r.events.append(Event(kind, name, begin, time.perf_counter()))


# ---- A group ---------------------------------------------------------------------------------------------------------

_DESCRIPTION_BYTES = 768
_EACH_ITS_OWN = ("rows", "keys", "error")  # what ranks may differ in


def group_of(group: Any) -> dist.ProcessGroup:
    """A process group, a one-dimensional DeviceMesh, or None for all ranks."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized; call torch.distributed.init_process_group first")
    if group is None:
        return cast(dist.ProcessGroup, dist.group.WORLD)
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise ValueError(f"group: is a mesh of {group.ndim} dimensions, expected one: mesh['name']")
        return cast(dist.ProcessGroup, group.get_group())
    return cast(dist.ProcessGroup, group)


class Link:
    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group_of(group)
        self.device = device
        self.ranks = dist.get_world_size(self.group)
        self.me = dist.get_rank(self.group)
        if self.me < 0:
            raise ValueError("group: this rank does not belong to it")
        name = dist.get_backend(self.group)
        config = dist.get_backend_config(self.group) if ":" in str(name) else None
        backend = dict(part.split(":") for part in config.split(",")).get(device.type, "") if config else str(name)
        self.staged = device.type == "cuda" and backend in ("gloo", "mpi", "undefined")
        self.call = "a call"
        self.blocking_device = torch.device("cpu") if self.staged else device
        self.wrong = ""
        try:
            self.group._get_backend(torch.device(self.blocking_device.type))
        except RuntimeError:
            self.wrong = f"group: its backend, {name}, does not take tensors that are on {device.type}"
            kinds = [d.type for d in self.group._device_types]  # for words: the others are to hear of it
            self.blocking_device = torch.device("cpu" if "cpu" in kinds else kinds[0])

    # ---- Do all ranks want the same? ----

    def agree(self, call: str, description: dict[str, Any]) -> list[dict[str, Any]]:
        """The descriptions of all ranks, in order. An error where they differ in something they must share, or where
        one of them says "error"; the same on every rank."""
        self.call = call
        text = _encoded({"call": call, **description})
        with _aside(self.blocking_device), self._explained():
            mine = torch.frombuffer(text, dtype=torch.uint8).to(self.blocking_device)
            theirs = [torch.empty_like(mine) for _ in range(self.ranks)]
            dist.all_gather(theirs, mine, group=self.group)
            told = [json.loads(bytes(t).rstrip(b"\0").decode()) for t in torch.stack(theirs).tolist()]
        broken = [f"rank {r}: {one['error']}" for r, one in enumerate(told) if "error" in one]
        if broken:
            raise DisagreementError(f"heed.distributed: {call}: {'; '.join(broken)}")
        for name in sorted(set().union(*told) - set(_EACH_ITS_OWN)):
            values = [one.get(name) for one in told]
            if any(value != values[0] for value in values):
                listed = ", ".join(f"rank {r}: {value}" for r, value in enumerate(values))
                raise DisagreementError(f"heed.distributed: {call}: {name} differs between ranks ({listed})")
        return told

    @contextlib.contextmanager
    def told_if_wrong(self, call: str) -> Iterator[None]:
        """Around what this rank checks by itself: the others are waiting for it, and hear of the error, too."""
        try:
            if self.wrong:
                raise ValueError(self.wrong)
            yield
        except Exception as error:
            self.agree(call, {"error": str(error)})
            raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(
                f"heed.distributed: {self.call}: rank {self.me} of {self.ranks} waited in vain for another rank, which "
                f"has died, hangs, or has made another call. Within the group's time-out every rank gets this error; "
                f"start anew with a new group. {type(error).__name__}: {error}"
            ) from error

    # ---- Messages ----

    def post(self, name: str, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Starts messages; the tensors must be left alone until wait(). The messages of two ranks to each other meet in
        the order in which they are listed."""
        pending = Pending(self, name)
        operations = []
        for peer, tensors in sends:
            for t in tensors:
                if t.numel():
                    out = t.cpu() if self.staged else t
                    operations.append(dist.P2POp(dist.isend, out, group=self.group, group_peer=peer))
                    pending.kept.append(out)
        for peer, tensors in receives:
            for t in tensors:
                if t.numel():
                    into = torch.empty(t.shape, dtype=t.dtype, pin_memory=True) if self.staged else t
                    operations.append(dist.P2POp(dist.irecv, into, group=self.group, group_peer=peer))
                    pending.kept.append(into)
                    if self.staged:
                        pending.landed.append((into, t))
        self._count(name, sends, receives)
        if operations:
            with self._explained():
                pending.works = dist.batch_isend_irecv(operations)
        return pending

    def _count(self, name: str, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        now = time.perf_counter()
        for r in _records:
            for kind, messages in (("send", sends), ("receive", receives)):
                for peer, tensors in messages:
                    amount = sum(t.numel() * t.element_size() for t in tensors)
                    if not amount:
                        continue
                    r.messages += 1
                    r.events.append(Event(kind, f"{name}, rank {peer}, {amount} bytes", now, now))
                    if kind == "send":
                        r.sent_bytes += amount
                    else:
                        r.received_bytes += amount


def _encoded(description: dict[str, Any]) -> bytearray:
    text = json.dumps(description, separators=(",", ":")).encode()
    while len(text) > _DESCRIPTION_BYTES and description.get("error"):
        description = {**description, "error": description["error"][: len(description["error"]) * 3 // 4]}
        text = json.dumps(description, separators=(",", ":")).encode()
    if len(text) > _DESCRIPTION_BYTES:
        raise ValueError(f"the description of a call has {len(text)} bytes, {_DESCRIPTION_BYTES} at most are sent")
    return bytearray(text.ljust(_DESCRIPTION_BYTES, b"\0"))


@lru_cache(maxsize=64)
def _stream_aside(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _aside(device: torch.device) -> Any:
    """A stream of its own, behind no work of the caller's: what the host waits for there is over soon. Memory that is
    allocated inside belongs to it, too."""
    return torch.cuda.stream(_stream_aside(device)) if device.type == "cuda" else contextlib.nullcontext()


class Pending:
    def __init__(self, link: Link, name: str) -> None:
        self.link, self.name = link, name
        self.works: list[Any] = []
        self.kept: list[torch.Tensor] = []
        self.landed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def wait(self) -> None:
        if not self.works:
            return
        with timed("wait", self.name, self.link.device), self.link._explained():
            for work in self.works:
                work.wait()
        for host, device in self.landed:
            device.copy_(host)
        self.works, self.kept, self.landed = [], [], []
