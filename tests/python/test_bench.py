"""python -m heed.bench: the table, the CSV, the plot, and what is measured."""
import io
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
from heed import bench
from heed._measure import call_us, milliseconds, peak_bytes

CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--dtype", "fp32", "--head-dim", "16", "--seq", "32,64", "--tokens", "64", "--width", "32",
         "--budget", "1", "--peers", "math,flash"]


def test_one_line_for_each_problem_and_pass(capsys, tmp_path):
    bench.main([*SMALL, "--csv", str(tmp_path / "all.csv")])
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if re.match(r"fp32 \d", line)]
    assert [line.split()[1] for line in rows[:3]] == ["2,2,32,16", "2,2,32,16", "1,2,64,16"]
    assert len(rows) == 8 and all(len(re.findall(r"\d+\.\d+", line)) >= 5 for line in rows)
    results = bench.load(tmp_path / "all.csv")
    assert len(results) == 24 and {r.implementation for r in results} == {"heed", "math", "flash"}
    assert {r.direction for r in results} == {"forward", "backward"} and {r.causal for r in results} == {False, True}
    assert all(r.ms > 0 and r.call_us > 0 and r.rows in (32, 64) and r.head_dim == 16 for r in results)
    assert all(r.peak_mib is None or 0 <= r.peak_mib < 64 for r in results)
    assert {"ratio", "MiB", "call"} <= set(lines[1].split())


def test_the_rate_follows_from_time_and_shape():
    runner = bench.Bench(CPU, ["heed"], 1)
    problem = bench.Problem("fp32", 2, 4, 2, 24, 40, 16, False)
    runner.measure(problem, "backward", "heed")
    (result,) = runner.results
    assert result.tflops == pytest.approx(2.5 * 4 * 2 * 4 * 24 * 40 * 16 / (result.ms * 1e-3) / 1e12)


def test_mine(capsys):
    bench.main(["--device", "cpu", "--dtype", "fp32", "--mine", "2,4:2,10:30,8", "--budget", "1", "--peers", "flash"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fp32")]
    assert [line.split()[1:3] for line in lines] == [["2,4:2,10:30,8", "forward"], ["2,4:2,10:30,8", "backward"]]


def test_overhead_of_a_call(capsys, monkeypatch):
    monkeypatch.setattr(bench.overhead, "__defaults__", (2,))
    bench.main(["--device", "cpu", "--overhead"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fp32")]
    assert len(lines) == 3 and all(float(x) > 0 for line in lines for x in line.split()[-6:-2])  # the times


@pytest.mark.parametrize("arguments,message", [
    (["--mine", "1,2,3"], "not B,H,S,D"), (["--mine", "1,0,16,8"], "not B,H,S,D"), (["--mine", "1,2:3:4,16,8"], "not B,H,S,D"),
    (["--mine", "1,3:2,16,8"], "2 key heads, which do not divide 3"), (["--dtype", "fp8"], "'fp8'"),
    (["--peers", "cuda"], "'cuda'"), (["--pass", "up"], "'up'"), (["--seq", "a"], "--seq: 'a' is not a whole number"),
    (["--head-dim", "64,0"], "--head-dim: '0' is not"), (["--tokens", "-4"], "--tokens: '-4' is not"),
    (["--budget", "nan"], "--budget: 'nan' is not"), (["--device", "abacus"], "argument --device: "),
    (["--device", "meta"], "--device: 'meta' is not one of cuda, cpu"), (["--csv", "/no/such/a.csv"], "no folder /no/such"),
    (["--mine", "1,2,3:4,8", "--causal", "yes"], "nothing is left"), (["--from-csv", "a.csv"], "--from-csv: needs --plot"),
])
def test_wrong_options_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err


def test_a_wrong_implementation_is_not_timed(monkeypatch):
    real = bench.implementation
    wrong = lambda name, problem: (lambda *t: 1.01 * real("math", problem)(*t)) if name == "flash" else real(name, problem)
    monkeypatch.setattr(bench, "implementation", wrong)
    runner = bench.Bench(CPU, ["flash"], 1)
    runner.measure(bench.Problem("fp32", 1, 2, 2, 16, 16, 8, True), "forward", "flash")
    assert not runner.results and "from the result in fp64" in next(iter(runner.refused))[1]


def test_a_peer_that_does_not_exist_here_is_left_out(capsys):
    bench.main([*SMALL[:-1], "cudnn"])
    out = capsys.readouterr().out
    assert re.search(r"^cudnn: .*first at fp32 2,2,32,16", out, re.M)


@pytest.mark.parametrize("name,magic", [("p.png", b"\x89PNG"), ("p.svg", b"<?xml")])
def test_plot(name, magic, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    bench.main([*SMALL, "--csv", str(tmp_path / "a.csv"), "--plot", str(tmp_path / name)])
    assert (tmp_path / name).read_bytes().startswith(magic)
    bench.main(["--from-csv", str(tmp_path / "a.csv"), "--plot", str(tmp_path / ("again" + name)), "--title", "T"])
    assert (tmp_path / ("again" + name)).exists()
    for path, plot, message in (__file__, name, "is no file of --csv"), ("a.csv", "p.xyz", "'p.xyz' ends in none of"):
        with pytest.raises(SystemExit):
            bench.main(["--from-csv", str(path), "--plot", plot])
        assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "Bench", None)
    with pytest.raises(SystemExit):
        bench.main([*SMALL, "--plot", "p.png"])
    assert "--plot: needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("peer", bench.PEERS)
def test_every_peer_is_timed_where_it_runs(peer, device):
    device = torch.device(device)
    dtype = "bf16" if device.type == "cuda" else "fp32"
    runner = bench.Bench(device, [peer], 1)
    for causal in False, True:
        for direction in "forward", "backward":
            runner.measure(bench.Problem(dtype, 2, 4, 4, 64, 64, 64, causal), direction, peer)
    timed = [(r.direction, r.causal) for r in runner.results]
    if not timed:
        pytest.skip(f"{peer}: {next(iter(runner.refused))[1]}")
    if peer == "flex" and device.type == "cpu":  # which has no backward there
        assert timed == [("forward", False), ("forward", True)]
    else:
        assert not runner.refused and len(timed) == 4
    assert all(r.implementation == peer and r.ms > 0 and r.tflops > 0 and r.call_us > 0 for r in runner.results)


def test_progress_is_shown_on_a_terminal_alone(monkeypatch):
    for terminal in (True, False):
        shown = io.StringIO()
        shown.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stderr", shown)
        progress = bench.Progress(4)
        progress.step("first"), progress.step("second"), progress.clear()
        assert ("[######............" in shown.getvalue() and "1/4" in shown.getvalue() and "second" in shown.getvalue()) == terminal


def test_it_is_a_program():
    done = subprocess.run([sys.executable, "-m", "heed.bench", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--mine" in done.stdout and "flops" in done.stdout


def test_measures():
    assert milliseconds(lambda: torch.ones(4), CPU, 1) > 0 and call_us(lambda: None, CPU) < 100
    peak = peak_bytes(lambda: torch.ones(2048, 2048).exp(), CPU)  # two times 16 MiB
    assert peak is None or 30 * 2**20 < peak < 40 * 2**20
