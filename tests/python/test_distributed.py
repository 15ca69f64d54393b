"""heed.distributed: on 2 to 4 processes what one process computes; messages counted; faults said on every rank."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from heed.distributed import _plan, _routes, _shards, plan
from heed.distributed._shards import Band, Piece, band, in_order, on_stride, pieces_of, size, visible_keys
from ranks import BRIEF, Ranks

MEASURES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def ranks(device: str) -> Any:
    processes = Ranks(4, device)
    yield processes
    processes.stop()


# ---- Results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_method_layout_and_mask_agrees_with_one_process(ranks: Ranks, count: int) -> None:
    assert ranks.run("every_mask", 37, ranks=count) == [[]] * count


def test_one_rank_is_a_group_too(ranks: Ranks) -> None:
    assert ranks.run("every_mask", 12, ranks=1) == [[]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(ranks: Ranks, dtype: torch.dtype) -> None:
    assert ranks.run("low_precision", dtype, ranks=4) == [[]] * 4


def test_more_ranks_than_heads(ranks: Ranks) -> None:
    assert ranks.run("more_ranks_than_heads", ranks=4) == [[]] * 4


@pytest.mark.parametrize("lengths", [[9, 0, 21, 1], [0, 0, 5, 0]])
@pytest.mark.parametrize("options", [{}, {"causal": True, "stride": 2}, {"window": (4, 4)}])
def test_uneven_and_empty_shards(ranks: Ranks, lengths: list[int], options: dict[str, Any]) -> None:
    assert ranks.run("uneven", lengths, options, ranks=4) == [[]] * 4


@pytest.mark.parametrize("count", [2, 3])
def test_heads_in_groups(ranks: Ranks, count: int) -> None:
    assert ranks.run("head_by_head", ranks=count) == [[]] * count
    assert ranks.run("same_bits", True, ranks=count) == [[True] * 4] * count


def test_keys_of_another_sequence(ranks: Ranks) -> None:
    assert ranks.run("other_keys", ranks=3) == [[]] * 3


@pytest.mark.parametrize("starts", [[0, 3, 3, 11, 14, 40], [0, 45]])
def test_packed_sequences(ranks: Ranks, starts: list[int]) -> None:
    assert ranks.run("ragged", starts, ranks=3) == [[]] * 3


def test_memory_orders(ranks: Ranks) -> None:
    assert ranks.run("memory_orders", ranks=2) == [[]] * 2


def test_the_same_bits_each_time(ranks: Ranks) -> None:
    assert ranks.run("same_bits", ranks=4) == [[True] * 4] * 4


def test_what_is_cut_comes_back_together(ranks: Ranks) -> None:
    assert all(ranks.run("back_together", ranks=3))


# ---- Messages --------------------------------------------------------------------------------------------------------

TOKENS, HEADS, KEY_HEADS, DIM, BATCH = 256, 8, 4, 16, 2  # as in distributed_cases.problem


def formulas(method: str, count: int, element: int, share: float = 1.0, stride: int = 1) -> tuple[float, float]:
    """docs/distributed.md: bytes that all ranks together send, forward and backward. share: of pairs of different
    ranks, those of which one sees keys of the other."""
    team = _routes.ulysses_ranks(method, count, KEY_HEADS)
    ring = count // team
    keys = BATCH * TOKENS // stride * KEY_HEADS * 2 * DIM
    rows = BATCH * TOKENS * HEADS * DIM
    hops = (ring - 1) * share
    swap = (team - 1) / team
    lse = 4 * BATCH * TOKENS * HEADS
    forward = hops * keys * element + swap * (element * (2 * rows + keys) + lse)
    return forward, hops * keys * (element + 4) + swap * element * (2 * rows + keys)


@pytest.mark.parametrize("method", _routes.METHODS)
@pytest.mark.parametrize("dtype", list(MEASURES))
def test_as_many_bytes_as_the_formula_says(ranks: Ranks, method: str, dtype: str) -> None:
    sent = ranks.run("volume", method, "zigzag", TOKENS, {"causal": True}, MEASURES[dtype], ranks=4)
    for got, want in zip(map(sum, zip(*sent, strict=True)), formulas(method, 4, _plan.BYTES[dtype]), strict=True):
        assert abs(got - want) <= 0.05 * want


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_keys_that_nobody_sees_are_not_sent(ranks: Ranks, method: str) -> None:
    def check(options: dict[str, Any], share: float, stride: int = 1) -> None:
        sent = ranks.run("volume", method, "contiguous", TOKENS, options, torch.float32, ranks=4)
        want = formulas(method, 4, 4, share, stride)
        assert [sum(s) for s in zip(*sent, strict=True)] == [pytest.approx(w, rel=0.05) for w in want]

    check({"causal": True}, 1 / 2)
    check({"causal": True, "window": (TOKENS // 4, None)}, 3 / 12)
    check({"window": (10, 10)}, 6 / 12)
    check({"window": (0, 0)}, 0)
    check({"stride": 4}, 1, 4)


def test_keys_that_nobody_sees_are_not_worked_on(ranks: Ranks) -> None:
    for options, blocks in (
        ({}, [4, 4, 4, 4]),
        ({"causal": True}, [1, 2, 3, 4]),
        ({"causal": True, "window": (TOKENS // 4, None)}, [1, 2, 2, 2]),
        ({"window": (10, 10)}, [2, 3, 3, 2]),
        ({"window": (0, 0)}, [1, 1, 1, 1]),
    ):
        assert ranks.run("computed", "ring", options, ranks=4) == [(n, n) for n in blocks]
        assert [backward for _, backward in ranks.run("computed", "all_gather", options, ranks=4)] == blocks


def test_the_planner_counts_the_same_bytes(ranks: Ranks) -> None:
    for method in _routes.METHODS:
        sent = ranks.run("volume", method, "zigzag", TOKENS, {"causal": True}, torch.bfloat16, ranks=4)
        task = _plan.Task(4, TOKENS, HEADS, KEY_HEADS, DIM, DIM, "bf16", BATCH)
        said = _plan.cost(task, method, _plan.machine_of("h200", "bf16", DIM, "nvlink")).sent
        for n in (0, 1):
            assert said[n] == pytest.approx(max(s[n] for s in sent), rel=0.05)


def test_messages_are_under_way_while_it_computes(ranks: Ranks, tmp_path: Any) -> None:
    for events in ranks.run("trace", "ring", str(tmp_path / "trace"), ranks=3):
        names = [f"{kind} {name.partition(',')[0]}" for kind, name in events]
        for step in (0, 1):  # keys of the next step are asked for, then this one is computed, then they are waited for
            asked = names.index(f"receive keys of step {step + 1}")
            assert asked < names.index(f"compute step {step}") < names.index(f"wait keys of step {step + 1}")
            assert names.index(f"send keys of step {step + 1}") < names.index(f"compute step {step}")
    for rank in range(3):
        saved = json.loads((tmp_path / f"trace.{rank}").read_text())["traceEvents"]
        assert {e["cat"] for e in saved} == {"send", "receive", "compute", "wait"}


def test_gathered_gradients_go_home_under_the_next_block(ranks: Ranks, tmp_path: Any) -> None:
    for events in ranks.run("trace", "all_gather", str(tmp_path / "trace"), ranks=3):
        names = [f"{kind} {name.partition(',')[0]}" for kind, name in events]
        names = names[names.index("compute all keys") + 1 :]  # the backward
        for block, after in ((1, 2), (2, 0)):  # this rank's own is the last
            sent = names.index(f"send gradients for the rank {block} behind")
            work = names.index(f"compute keys of the rank {after} behind")
            assert sent < work < names.index(f"wait gradients for the rank {block} behind")


@pytest.mark.parametrize(("method", "first"), [("ring", "keys of step 1"), ("all_gather", "keys of the rank 1 behind")])
def test_a_group_of_heads_begins_before_another_ends(ranks: Ranks, method: str, first: str) -> None:
    for events in ranks.run("trace_head_by_head", method, ranks=2):
        names = [f"{kind} {name}" for kind, name in events]
        sent = [n for n, name in enumerate(names) if name.startswith(f"send {first}")]
        work = [n for n, name in enumerate(names) if name.startswith("compute")]
        assert len(sent) >= 2 * KEY_HEADS and sent[1] < work[0] and sent[2] < names.index(names[work[0]], work[0] + 1)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("method", _routes.METHODS)
@pytest.mark.parametrize("dtype", list(MEASURES))
def test_memory_is_as_much_as_the_planner_says(ranks: Ranks, device: str, method: str, dtype: str, groups: int) -> None:
    block = _plan.BLOCK_BYTES[device]
    rows, heads, key_heads, dim = block >> 13, 16 * groups, 8 * groups, 128
    task = _plan.Task(4, 4 * rows, heads, key_heads, dim, dim, dtype, shards="striped", band=Band(8, 0))
    machine = _plan.machine_of("h200", "bf16", dim, "nvlink")
    said = _plan.cost(task, method, replace(machine, block=block, splits=device == "cuda")).memory
    sizes = {"heads": heads, "key_heads": key_heads, "rows": rows, "dim": dim, "dtype": MEASURES[dtype]}
    got = ranks.run("peak_memory", method, sizes, ranks=4)
    for n in (0, 1):
        most, pages = max(g[n] for g in got), 1 << 22
        assert 0.5 * said[n] - pages <= most <= 1.1 * said[n] + pages, f"{most:.2e} of {said[n]:.2e} bytes"


def test_two_blocks_are_in_flight_however_many_ranks_there_are() -> None:
    machine = _plan.machine_of("h200", "bf16", 64, "nvlink")
    for method in ("ring", "ulysses_ring"):
        few, many = (_plan.cost(_plan.Task(n, n * 1024, 8, 2, 64, 64), method, machine).memory for n in (8, 64))
        assert many == few
    _plan._choose.cache_clear()
    assert _plan._choose(_plan.Task(2, 8192, 8, 1, 64, 64, "fp32"), "cpu", "loopback") == "all_gather"
    wide = _plan.Task(64, 64 * 1024, 8, 1, 64, 64)
    assert _plan.costs(wide, machine)[0].method == "all_gather" and _plan._choose(wide, "h200", "nvlink") == "ring"


# ---- The ecosystem ---------------------------------------------------------------------------------------------------


def test_compiled_around(ranks: Ranks) -> None:
    assert all(ranks.run("compiled", ranks=2))


def test_device_mesh_and_fsdp(ranks: Ranks) -> None:
    assert all(ranks.run("mesh_and_fsdp", ranks=4))


@pytest.mark.parametrize("way", ["replicated", "sharded"])
def test_data_parallel_training(ranks: Ranks, way: str) -> None:
    assert all(ranks.run("data_parallel", way, ranks=2))


def test_autocast(ranks: Ranks) -> None:
    assert ranks.run("autocast", ranks=2) == [torch.bfloat16] * 2


def test_tensors_that_are_under_way(ranks: Ranks) -> None:
    assert ranks.run("under_way", ranks=3) == [[]] * 3


def test_training_after_inference(ranks: Ranks) -> None:
    assert all(ranks.run("trains_after_inference", ranks=2))


def test_context_parallel_has_zigzag_shards(ranks: Ranks) -> None:
    assert all(ranks.run("context_parallel_shards", ranks=4))


# ---- Pieces, without processes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
def test_every_token_has_one_place(shards: str, tokens: int) -> None:
    for ranks_ in (1, 2, 3, 5):
        pieces = pieces_of(shards, tokens, ranks_)
        assert sorted(p.first + i * p.step for shard in pieces for p in shard for i in range(p.tokens)) == list(
            range(tokens)
        )


def test_pieces_of_a_packed_stream_end_where_its_sequences_do() -> None:
    assert pieces_of("contiguous", 10, 2, None, (0, 3, 7, 10)) == (
        (Piece(0, 0, 1, 3, 0), Piece(1, 0, 1, 2, 3)), (Piece(1, 2, 1, 2, 0), Piece(2, 0, 1, 3, 2)),
    )  # fmt: skip
    assert pieces_of("striped", 10, 2, None, (0, 3, 10))[1] == (Piece(0, 1, 2, 1, 0), Piece(1, 0, 2, 4, 1))


def test_keys_on_a_stride() -> None:
    pieces, rows = on_stride((Piece(0, 5, 2, 10, 0), Piece(0, 30, 1, 1, 10)), 3)
    assert pieces == (Piece(0, 9, 6, 3, 0), Piece(0, 30, 3, 1, 3)) and rows is not None
    assert rows.tolist() == [2, 5, 8, 10]


def test_shards_in_order_are_few_pieces() -> None:
    pieces, order = in_order(pieces_of("zigzag", 64, 4))
    assert pieces == (Piece(0, 0, 1, 64, 0),) and order is not None and order[:9].tolist() == [*range(8), 16]
    assert in_order(pieces_of("striped", 12, 3))[0] == (Piece(0, 0, 1, 12, 0),)
    assert in_order(pieces_of("contiguous", 12, 3)) == ((Piece(0, 0, 1, 12, 0),), None)


@pytest.mark.parametrize("shards", ["zigzag", "striped"])
def test_causal_work_is_even(shards: str) -> None:
    work = [visible_keys(p, [4096], band(True, None), 1, 0) for p in pieces_of(shards, 4096, 8)]
    assert max(work) < 1.01 * min(work)
    assert sum(work) == 4096 * 4097 / 2


def test_plans_of_many_sequences_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    sees = _shards.sees
    monkeypatch.setattr(_shards, "sees", lambda *pair: looked.append(1) or sees(*pair))
    ranks_, starts, limits = 16, tuple(n * (n + 1) // 2 for n in range(256)), band(True, (100, None))
    rows = tuple(map(size, pieces_of("striped", starts[-1], ranks_)))
    plan_, _ = _routes.plan_of("ring", 3, "striped", rows, rows, starts, limits, 0, 1, 4, 4)
    assert all(map(all, plan_.wanted)) and len(looked) < 8 * ranks_ * ranks_  # of 256 times as many pairs of pieces
    lengths = [b - a for a, b in itertools.pairwise(starts)]
    work = sum(visible_keys(p, lengths, limits, 1, 0) for p in pieces_of("striped", starts[-1], ranks_, None, starts))
    assert work == pytest.approx(sum(min(i, 100) + 1 for n in lengths for i in range(n)), rel=1e-3)


# ---- The planner -----------------------------------------------------------------------------------------------------


def test_the_planner_prefers_what_sends_least_on_slow_fabrics() -> None:
    task = _plan.Task(64, 1_000_000, 32, 8, 128, 128)
    for fabric in ("nvlink", "infiniband", "ethernet"):
        found = _plan.costs(task, _plan.machine_of("h200", "bf16", 128, fabric))
        assert next(c.method for c in found) == "ulysses_ring" and found[0].ulysses == 8
    assert "ulysses" not in {c.method for c in found}  # eight key heads cannot go to 64 ranks
    full = _plan.cost(task, "ring", _plan.machine_of("h200", "bf16", 128, "ethernet"))
    near = _plan.cost(_plan.Task(**{**task.__dict__, "band": Band(4096, 0), "shards": "contiguous"}), "ring",
                      _plan.machine_of("h200", "bf16", 128, "ethernet"))  # fmt: skip
    assert near.blocks == 1 and full.blocks == 63 and near.sent[0] < full.sent[0] / 60


def test_the_planner_counts_flops() -> None:
    full = _plan.Task(4, 4096, 8, 8, 64, 64, band=Band(None, None))
    machine = _plan.machine_of("h200", "bf16", 64, "nvlink")
    for method in _routes.METHODS:
        forward, backward = _plan.cost(full, method, machine).flops
        assert forward == 4 * 8 * 4096 * 1024 * 64 and backward == 2.5 * forward


def test_the_plan_as_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--gpus", "1024", "--tokens", "10M", "--key-heads", "8"]
    assert plan.main(command) == 0
    out = capsys.readouterr().out
    assert "10,000,000 tokens, causal, over 1024 x h200" in out
    for word in ("nvlink", "infiniband", "ethernet", "ring", "all_gather", "ulysses_ring 8 x 128"):
        assert word in out
    assert plan.main([*command, "--device", "abacus"]) == 2
    assert "device: is 'abacus', expected one of h200" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpus 0", "--gpus/--ranks: '0' is not a whole number from 1 on"),
        ("--tokens 1e6", "--tokens: '1e6' is not"),
        ("--stride 0", "--stride: '0' is not"),
        ("--heads 8 --key-heads 3", "--key-heads: is 3, expected a divisor of --heads, which is 8"),
        ("--compare 1", "--compare: '1': one process is always there"),
        ("--table /no/such", "table: /no/such is no file of measured numbers"),
        ("--measure --write /no/such/file", "--write: there is no folder /no/such"),
    ],
)
def test_wrong_options_of_the_plan_are_named(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = plan.main(options.split())
    except SystemExit as error:
        code = error.code
    assert code == 2 and message in capsys.readouterr().err


def test_the_model_beside_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    command = "--compare 2 --tokens 256 --heads 2 --head-dim 16 --dtype fp32 --rounds 1 --full".split()
    assert plan.main(command) == 0
    rows = re.findall(
        r"^  full, 2, (\w+) +(\d+) +(\d+) +[\d.]+x +(\d+) +(\d+) +[\d.]+x$", capsys.readouterr().out, re.M
    )
    assert tuple(row[0] for row in rows) == _routes.METHODS


# ---- Faults: last, as they cost ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("heads", "q differs between ranks (rank 0: [2, 8, 16], rank 1: [2, 4, 16]"),
        ("dtype", "dtype differs between ranks (rank 0: torch.float32, rank 1: torch.float16"),
        ("shape", "rank 1: k: head_dim is 8, q has 16"),
        ("method", "method differs between ranks (rank 0: ring, rank 1: ulysses"),
        ("order", "window differs between ranks (rank 0: None, rank 1: [3, 3]"),
        ("gradients", "gradients differs between ranks (rank 0: False, rank 1: True"),
        ("tokens", "q: shards have [16, 9, 16] tokens, expected [13, 14, 14]: zigzag shards of 41 tokens"),
        ("type", "rank 1: q: is a str, expected a torch.Tensor"),
        ("device", "rank 1: group: its backend, gloo, does not take tensors that are on meta"),
        ("mesh", "rank 1: q: is a torch.distributed.tensor.DTensor, expected a plain tensor"),
        ("long", "rank 1: method: is '\N{CYRILLIC SMALL LETTER ZHE}"),
        ("fabric", "rank 1: fabric: is <object object"),
        ("cu_seqlens", "rank 1: cu_seqlens: expected numbers that begin with 0"),
        ("scale", "rank 1: scale: is inf, expected a finite number"),
        ("unshard", "rank 1: Dimension out of range"),
    ],
)
def test_a_mismatch_is_an_error_on_every_rank(ranks: Ranks, what: str, says: str) -> None:
    for rank, (kind, text) in enumerate(ranks.run("mismatch", what, ranks=3, fails=True)):
        assert kind in ("DisagreementError", "ValueError"), f"rank {rank}: {kind} {text}"
        assert says in text, f"rank {rank}: {text}"


def test_after_a_mismatch_the_group_works_on(ranks: Ranks) -> None:
    ranks.run("mismatch", "nothing", ranks=3)


def test_backward_out_of_order_is_an_error_on_every_rank(ranks: Ranks) -> None:
    for kind, text in ranks.run("backward_out_of_order", ranks=2, fails=True):
        assert kind == "DisagreementError" and "call differs between ranks (rank 0: backward of call" in text


@pytest.mark.parametrize(("when", "count"), [("ring", 4), ("before", 3)])
def test_a_rank_that_dies_is_an_error_on_the_others(ranks: Ranks, when: str, count: int) -> None:
    *others, (last, _) = ranks.run("dies", when, ranks=count, fails=True)
    assert last == "died"
    for kind, waited in others:
        assert kind == "done" and waited < BRIEF + 5, f"{kind}: {waited}"
