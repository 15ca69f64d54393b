"""Every example runs, says what it should, and notices when heed is wrong (by its exit code)."""
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def run(folder, *arguments, expect=0):
    done = subprocess.run([sys.executable, *arguments], cwd=EXAMPLES / folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == expect, f"{folder} {arguments}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_self_attention(device):
    out = run("self_attention", "test.py", "--device", device)
    assert out.count("ok  ") == 6 and f"{device}: 0 failures" in out


def test_self_attention_notices_a_wrong_result():
    wrong = "import heed, runpy, sys\nright = heed.self_attention\n" \
            "heed.self_attention = lambda x, output, d=64: (right(x, output, d), output.mul_(1.001))[0]\n" \
            "sys.argv = ['test.py', '--device', 'cpu']\nrunpy.run_path('test.py', run_name='__main__')\n"
    out = run("self_attention", "-c", wrong, expect=1)
    assert "FAIL  accuracy" in out and "ok    gradients" in out


def test_strided_transformer_is_correct(device):
    out = run("strided_transformer", "test.py", "--mode=correctness", "--quick", "--device", device)
    assert out.count("ok  ") == 7 and f"{device}: 0 failures" in out


def test_strided_transformer_benchmark(device):
    """Twice as fast is the example's own aim, and its exit code; on a busy machine only the order is tested."""
    done = subprocess.run([sys.executable, "test.py", "--mode=benchmark", "--quick", "--device", device], text=True,
                          cwd=EXAMPLES / "strided_transformer", capture_output=True, timeout=900)
    rows = re.findall(r"^(\w+) +\d+,\d+,\d+,\d+ .*", done.stdout, re.M)
    ratios = [float(x) for x in re.findall(r"([\d.]+)x ", done.stdout)]
    assert rows == ["tiny", "small"] and len(ratios) == 6, done.stdout + done.stderr
    assert ratios[3] > 1 and ratios[4] > 1, done.stdout


def test_video_diffusion_properties(device):
    out = run("video_diffusion", "test.py", "--device", device)
    assert out.count("ok  ") == 12 and f"{device}: 0 failures" in out


def test_video_diffusion_performance(device):
    done = subprocess.run([sys.executable, "test.py", "--mode=performance", "--device", device], text=True,
                          cwd=EXAMPLES / "video_diffusion", capture_output=True, timeout=900)
    rows = re.findall(r"^ *(\d+,\d+,\d+,64) (\w+) +(forward(?: \+ backward)?)", done.stdout, re.M)
    assert len(rows) == (16 if device == "cuda" else 8), done.stdout + done.stderr


def test_flash_demo_prints_the_known_numbers():
    out = run("flash_demo", "demo.py")
    for line in ("0.016065, -0.029043, -0.027025", "0.009470,  0.005691,  0.000785", "0.004809, -0.007761, -0.004021",
                 "-0.071279, -0.007277, -0.009107", "0.680375,  0.823295, -0.444451"):
        assert line in out, f"{line} is not in\n{out}"
    assert re.search(r"keys 0\.\.127: row 0 has m = 0\.6621, l =  71\.4256, o_0 =  0\.016065", out)


def test_train_gpt_learns_and_both_curves_agree(device, tmp_path):
    more = []
    try:
        import matplotlib
        more = ["--plot", str(tmp_path / "loss.png")]
    except ImportError:
        pass
    out = run("train_gpt", "train.py", "--steps", "21", "--batch", "4", "--device", device, *more)
    first, last = (float(x) for x in re.findall(r"^heed +step +\d+ +loss ([\d.]+)", out, re.M))
    assert last < first - 1 and "the curves are at most 0.0" in out
    assert not more or (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_train_gpt_asks_for_matplotlib_before_it_trains():
    hidden = "import runpy, sys\nsys.modules['matplotlib'] = None\nsys.argv = ['train.py', '--steps', '1', '--plot', 'no.png']\n" \
             "runpy.run_path('train.py', run_name='__main__')\n"
    assert not run("train_gpt", "-c", hidden, expect=2)


def test_long_context_agrees_with_one_process(tmp_path):
    pytest.importorskip("transformers")
    out = run("long_context", "run.py", "--ranks", "4", "--tokens", "200", "--trace", str(tmp_path / "trace"))
    assert "ok    logits, loss and 39 gradients" in out and len(list(tmp_path.glob("trace.*.json"))) == 4


def test_every_example_has_a_line_in_the_readme():
    text = (EXAMPLES / "README.md").read_text()
    for folder in EXAMPLES.iterdir():
        assert not folder.is_dir() or folder.name.startswith((".", "__")) or f"]({folder.name})" in text, folder.name
