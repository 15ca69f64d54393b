"""heed run against NumPy: every way in which NumPy writes an array, every option, and the JSON of the other commands.

    test_cli_numpy.py path/to/heed        runs in the current folder
"""
import itertools
import json
import subprocess
import sys

import numpy as np

HEED = sys.argv[1]
rng = np.random.default_rng(7)


def heed(*arguments, code=0):
    done = subprocess.run([HEED, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == code, f"heed {' '.join(map(str, arguments))}: {done.returncode}\n{done.stderr}"
    return done.stdout


def attention(q, k, v, visible=None, bias=0.0, scale=None, softcap=0.0, sink=None):
    """The definition, in double, over (..., rows, D) with as many heads in k as in q."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = q @ np.swapaxes(k, -1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = (softcap * np.tanh(s / softcap) if softcap else s) + bias
    if visible is not None:
        s = np.where(visible, s, -np.inf)
    m = s.max(-1, keepdims=True)
    if sink is not None:
        m = np.maximum(m, sink)
    m = np.where(np.isinf(m), 0, m)
    e = np.exp(s - m)
    total = e.sum(-1, keepdims=True)
    seen = total > 0
    if sink is not None:
        total = total + np.exp(sink - m) * seen
    lse = np.where(seen, m + np.log(np.where(seen, total, 1)), -np.inf)
    return e / np.where(seen, total, 1) @ v, lse[..., 0]


def positions(rows, keys, top_left=False):
    i, j = np.arange(rows)[:, None], np.arange(keys)[None, :]
    return i + (0 if top_left else keys - rows), j


def run(q, k, v, *options, **files):
    for name, array in dict(q=q, k=k, v=v, **files).items():
        np.save(f"{name}.npy", array)
    extra = itertools.chain.from_iterable((f"--{name}", f"{name}.npy") for name in files)
    heed("run", "-q", "q.npy", "-k", "k.npy", "-v", "v.npy", "-o", "o.npy", "--lse", "lse.npy", *extra, *options)
    return np.load("o.npy"), np.load("lse.npy")


def close(got, want, tolerance):
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance)


def normal(*shape):
    return rng.standard_normal(shape)


TOLERANCE = {"f2": 2e-3, "f4": 2e-6, "f8": 1e-13}  # fp64 so near only where 1/sqrt(D) is an fp32 number


def test_every_dtype_byte_order_memory_order_and_rank():
    for kind, order, fortran, rank in itertools.product(("f2", "f4", "f8"), "<>", (False, True), (2, 3, 4)):
        heads = (2, 3)[4 - rank:]
        arrays = [normal(*heads, n, d).astype(order + kind) for n, d in ((5, 16), (9, 16), (9, 6))]
        if fortran:
            arrays = [np.asfortranarray(a) for a in arrays]
        o, lse = run(*arrays)
        want, want_lse = attention(*arrays)
        assert o.dtype == np.dtype(kind) and o.shape == want.shape and lse.shape == want_lse.shape
        close(o, want, TOLERANCE[kind])
        close(lse, want_lse, 2e-6)


def test_every_version_of_the_format():
    q, k, v = normal(4, 8).astype("f4"), normal(6, 8).astype("f4"), normal(6, 8).astype("f4")
    for version in ((1, 0), (2, 0), (3, 0)):
        for name, array in dict(q=q, k=k, v=v).items():
            with open(f"{name}.npy", "wb") as file:
                np.lib.format.write_array(file, array, version=version)
        heed("run", "-q", "q.npy", "-k", "k.npy", "-v", "v.npy", "-o", "o.npy")
        close(np.load("o.npy"), attention(q, k, v)[0], 2e-6)


def test_layout_bshd_and_fewer_key_heads():
    q, k, v = (normal(2, s, h, 16).astype("f4") for s, h in ((7, 4), (11, 2), (11, 2)))
    o, lse = run(q, k, v, "--layout", "bshd")
    turned = [np.swapaxes(x, 1, 2) for x in (q, np.repeat(k, 2, 2), np.repeat(v, 2, 2))]
    want, want_lse = attention(*turned)
    close(o, np.swapaxes(want, 1, 2), 2e-6)
    close(lse, want_lse, 2e-6)
    o3, _ = run(q[0], k[0], v[0], "--layout", "bshd")
    close(o3, o[0], 0)


def test_bands_and_strides():
    q, k, v = normal(2, 9, 8).astype("f4"), normal(2, 14, 8).astype("f4"), normal(2, 14, 8).astype("f4")
    p, j = positions(9, 14)
    top, _ = positions(9, 14, top_left=True)
    for options, visible in (
        (["--causal"], j <= p),
        (["--causal", "--align", "top-left"], j <= top),
        (["--window", "2,1"], (j >= p - 2) & (j <= p + 1)),
        (["--window", "-1,0", "--stride", "3"], (j <= p) & (j % 3 == 0)),
        (["--stride", "5"], np.broadcast_to(j % 5 == 0, (9, 14))),
    ):
        o, lse = run(q, k, v, *options)
        want, want_lse = attention(q, k, v, visible)
        close(o, want, 2e-6)
        close(lse, want_lse, 2e-6)


def test_scores():
    q, k, v = (normal(2, 3, n, 8).astype("f4") for n in (6, 10, 10))
    mask = rng.random((2, 1, 6, 10)) < 0.5
    mask[1, 0, 2] = False
    bias, sink, slopes = normal(3, 6, 10).astype("f4"), normal(3).astype("f8"), np.array([0.5, 0.25, 0.125])
    p, j = positions(6, 10)
    alibi = -slopes[:, None, None] * abs(p - j)
    for want, options, files in (
        (attention(q, k, v, mask), [], dict(mask=mask)),
        (attention(q, k, v, mask[0, 0]), [], dict(mask=mask[0, 0])),
        (attention(q, k, v, bias=bias), [], dict(bias=bias)),
        (attention(q, k, v, bias=alibi), [], dict(alibi=slopes)),
        (attention(q, k, v, sink=sink[:, None, None]), [], dict(sink=sink)),
        (attention(q, k, v, scale=-0.7, softcap=1.5), ["--scale", -0.7, "--softcap", 1.5], {}),
        (attention(q, k, v, scale=0.0), ["--scale", 0], {}),
    ):
        o, lse = run(q, k, v, *options, **files)
        close(o, want[0], 3e-6)
        close(lse, want[1], 3e-6)
    o, lse = run(q, k, v, mask=mask)
    assert (o[1, :, 2] == 0).all() and (lse[1, :, 2] == -np.inf).all()


def test_dtype_converts():
    q, k, v = normal(5, 16), normal(7, 16).astype("f4"), normal(7, 8).astype("f2")
    for dtype, kind, tolerance in (
        ("fp32", "f4", 2e-6), ("fp16", "f2", 3e-3), ("bf16", "f4", 3e-2), ("fp64", "f8", 1e-13),
    ):
        o, _ = run(q, k, v, "--dtype", dtype)
        assert o.dtype == np.dtype(kind)
        close(o, attention(q, k, v)[0], tolerance)
    o, _ = run(q, k, v, "--dtype", "bf16")
    assert (o.view("u4") & 0xFFFF == 0).all()


def test_gradients_match_differences():
    q, k, v, do, bias = normal(2, 4, 5), normal(2, 6, 5), normal(2, 6, 3), normal(2, 4, 3), normal(2, 4, 6)
    sink, dlse = normal(2), normal(2, 4)
    # The files of slopes, sinks and lse are fp32.
    sink, dlse = sink.astype("f4"), dlse.astype("f4")
    outputs = {"dq": q, "dk": k, "dv": v, "dbias": bias, "dsink": sink}
    options = itertools.chain.from_iterable((f"--{name}", f"{name}.npy") for name in outputs)
    p, j = positions(4, 6)
    run(q, k, v, "--causal", *options, bias=bias, sink=sink, do=do, dlse=dlse)

    def loss():
        o, lse = attention(q, k, v, j <= p, bias=bias, sink=sink[:, None, None])
        return (o * do).sum() + (lse * dlse).sum()

    sink = sink.astype("f8")
    outputs["dsink"] = sink
    for name, x in outputs.items():
        got, want = np.load(f"{name}.npy"), np.zeros_like(x)
        assert got.shape == x.shape
        for at in np.ndindex(*x.shape):
            old = x[at]
            x[at] = old + 1e-5
            up = loss()
            x[at] = old - 1e-5
            want[at] = (up - loss()) / 2e-5
            x[at] = old
        close(got, want, 2e-6)


def test_dropout_is_a_matter_of_the_seed():
    q, k, v = (normal(64, 8).astype("f4") for _ in range(3))
    a, b, c = (run(q, k, v, "--dropout", 0.5, "--seed", seed)[0] for seed in (1, 1, 2))
    assert (a == b).all() and (a != c).any()


def test_empty_sizes():
    o, lse = run(*(np.zeros((2, n, 4), "f4") for n in (3, 0, 0)))
    assert (o == 0).all() and o.shape == (2, 3, 4) and (lse == -np.inf).all()
    o, _ = run(*(np.zeros((0, 2, n, 4), "f4") for n in (3, 5, 5)))
    assert o.shape == (0, 2, 3, 4)


def test_json_is_json():
    assert json.loads(heed("info", "--json"))["kernels"]
    assert json.loads(heed("explain", "--shape", "1,2,64,64", "--json"))["kernel"].startswith("forward_")
    rows = json.loads(heed("bench", "--shape", "1,2,64,32", "--min-time", "0.01", "--json"))["rows"]
    assert [r["pass"] for r in rows] == ["forward", "backward"] and all(r["us"] > 0 for r in rows)
    report = json.loads(heed("check", "--quick", "--kernel", "forward_reference_f32", "--json"))
    assert report["kernels"][0]["failures"] == 0 and report["kernels"][0]["cases"] > 20


failed = 0
for name, test in [(n, t) for n, t in globals().items() if n.startswith("test_")]:
    try:
        test()
    except AssertionError as error:
        failed += 1
        print(f"FAILED: {name}: {error}")
sys.exit(failed > 0)
