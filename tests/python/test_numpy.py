"""NumPy and other arrays, with and without PyTorch in the process."""

from __future__ import annotations

import copy
import inspect
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import heed

rng = np.random.default_rng(0)


def naive(q, k, v, **how):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = np.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
    scores = scores + how.get("bias", 0)
    visible = np.broadcast_to(how.get("mask", True), scores.shape)
    if how.get("causal"):
        S, T = scores.shape[-2:]
        visible = visible & (np.arange(T) <= np.arange(S)[:, None] + T - S)
    weights = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return np.einsum("bhij,bhjd->bhid", weights / weights.sum(-1, keepdims=True), v)


class Named(np.ndarray):
    """Such as units of measurement or labels of dimensions have."""


def arrays(*shape, dtype=np.float32):
    return [rng.standard_normal(shape).astype(dtype) for _ in range(3)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float32, 1e-5), (np.float16, 4e-3), (np.float64, 1e-12), ("bfloat16", 4e-2)]
)
def test_arrays_in_arrays_out(dtype, tolerance):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    q, k, v = arrays(2, 3, 7, 16, dtype=dtype)
    bias = rng.standard_normal((7, 7)).astype(dtype)
    o, lse = heed.attention(q, k, v, causal=True, bias=bias, return_lse=True)
    assert type(o) is np.ndarray and o.dtype == dtype and lse.shape == (2, 3, 7)
    np.testing.assert_allclose(o.astype(float), naive(q, k, v, causal=True, bias=bias), atol=tolerance)
    grads = heed.attention_backward(o, q, k, v, o, lse, causal=True, bias=bias)
    assert all(type(g) is np.ndarray and g.dtype == dtype for g in grads)


def test_any_order_in_memory():
    q, k, v = (a.transpose(0, 2, 1, 3)[:, ::-1, ::2] for a in arrays(2, 14, 3, 16))
    frozen = k.copy()
    frozen.flags.writeable = False
    np.testing.assert_allclose(heed.attention(q, frozen, v), naive(q, k, v), atol=1e-5)
    fortran = np.asfortranarray(q)
    np.testing.assert_allclose(heed.attention(fortran, k, v), naive(q, k, v), atol=1e-5)
    one = np.broadcast_to(np.float32(1), (2, 2, 3, 4))
    np.testing.assert_allclose(heed.attention(one, one, one), one)
    np.testing.assert_array_equal(heed.attention(q, k.view(Named), v), heed.attention(q.view(Named), k, v))
    turned = heed.attention(*(a.swapaxes(1, 2) for a in (q, k, v)), layout="bshd")
    np.testing.assert_array_equal(turned.swapaxes(1, 2), heed.attention(q, k, v))


def test_every_other_argument():
    q, k, v = arrays(2, 4, 6, 8)
    how = {
        "window": (2, 2), "stride": 2, "mask": rng.random((6, 6)) > 0.2, "scale": 0.3, "softcap": 3.0,
        "alibi_slopes": rng.random(4), "sink": rng.standard_normal(4), "lengths_q": np.array([6, 3]),
        "lengths_k": np.array([4, 6]), "dropout_p": 0.25, "dropout_seed": 5, "deterministic": False,
        "precision": "plain",
    }  # fmt: skip
    o, lse = heed.attention(q, k, v, return_lse=True, **how)
    torch = pytest.importorskip("torch")
    as_tensors = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in how.items()}
    want = heed.attention(*map(torch.from_numpy, (q, k, v)), return_lse=True, **as_tensors)
    np.testing.assert_array_equal(o, want[0])
    np.testing.assert_array_equal(lse, want[1])
    do = rng.standard_normal(o.shape).astype(np.float32)
    grads = heed.attention_backward(do, q, k, v, o, lse, **how)
    inputs = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    heed.attention(*inputs, **as_tensors).backward(torch.from_numpy(do))
    for a, b in zip(grads, inputs, strict=False):
        np.testing.assert_array_equal(a, b.grad)
    assert len(grads) == 4


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float16, 4e-3), (np.float64, 1e-12)])
def test_the_short_names(dtype, tolerance):
    q, k, v = arrays(2, 3, 7, 16, dtype=dtype)
    np.testing.assert_allclose(heed.fused_attention(q, k, v), naive(q, k, v), atol=tolerance)
    mask, bias = rng.random((3, 1, 7)) > 0.3, rng.standard_normal((2, 1, 7, 7)).astype(dtype)
    mask[..., 0] = True
    for given, how in (None, {}), (mask, {"mask": mask}), (bias, {"bias": bias}):
        o = heed.fused_attention_with_mask(q, k, v, given)
        assert type(o) is np.ndarray and o.dtype == dtype
        np.testing.assert_allclose(o, naive(q, k, v, **how), atol=tolerance)


def test_one_sequence_with_itself():
    x, do = (a[0, 0] for a in arrays(1, 1, 9, 8)[:2])
    output = np.empty_like(x)
    assert heed.self_attention(x, output, d=8) is None
    np.testing.assert_allclose(output, naive(*[x[None, None]] * 3)[0, 0], atol=1e-5)
    grads = heed.self_attention_backward(do, x, d=8)
    assert len(grads) == 3 and all(type(g) is np.ndarray and g.shape == x.shape for g in grads)
    for n in range(3):  # of the three places where x enters, one is moved
        parts = [x[None, None].astype(np.float64) for _ in range(3)]
        step = rng.standard_normal(x.shape)
        moved = []
        for sign in 1, -1:
            parts[n] = x[None, None] + sign * 1e-5 * step
            moved.append((naive(*parts)[0, 0] * do).sum())
        np.testing.assert_allclose((grads[n] * step).sum(), (moved[0] - moved[1]) / 2e-5, rtol=1e-4, atol=1e-4)


def test_a_cache_in_pages():
    q, new_k, new_v = arrays(2, 1, 4, 8)
    pages = [rng.standard_normal((5, 3, 4, 8)).astype(np.float32) for _ in range(2)]
    table, lengths = np.array([[4, 1], [0, 2]]), np.array([2, 4], np.int32)
    o = heed.attention_with_kvcache(q, *pages, new_k, new_v, lengths, table, causal=True)
    for b, length in enumerate(lengths):
        keys, values = (p[table[b]].reshape(1, 6, 4, 8)[:, : length + 1].swapaxes(1, 2) for p in pages)
        np.testing.assert_array_equal(keys[0, :, -1], new_k[b, 0])
        np.testing.assert_array_equal(values[0, :, -1], new_v[b, 0])
        np.testing.assert_allclose(o[b : b + 1].swapaxes(1, 2), naive(q[b : b + 1].swapaxes(1, 2), keys, values), atol=1e-5)


@pytest.mark.parametrize("which", [0, 1])
def test_a_cache_that_cannot_be_written_to_is_refused_before_the_other_is_written(which):
    q, k, v = arrays(1, 1, 4, 8)
    caches = [np.zeros((1, 8, 4, 8), np.float32) for _ in range(2)]
    caches[which].flags.writeable = False
    with pytest.raises(ValueError, match=("k_cache: is read-only", "v_cache: is read-only")[which]):
        heed.attention_with_kvcache(q, *caches, k, v, np.array([2]))
    assert not caches[1 - which].any()


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_lengths_of_a_cache_are_whole_numbers_of_any_type(kind):
    q, k, v = arrays(1, 10, 4, 8)
    caches = [rng.standard_normal((1, 300, 4, 8)).astype(np.float32) for _ in range(2)]
    length = min(np.iinfo(kind).max, 250)
    want = heed.attention_with_kvcache(q, *(c.copy() for c in caches), k, v, np.array([length], np.int32))
    np.testing.assert_array_equal(heed.attention_with_kvcache(q, *caches, k, v, np.array([length], kind)), want)


def test_dropout_follows_the_generator_of_numpy():
    q, k, v = arrays(1, 2, 20, 8)
    np.random.seed(0)
    a = heed.attention(q, k, v, dropout_p=0.5)
    np.random.seed(0)
    np.testing.assert_array_equal(a, heed.attention(q, k, v, dropout_p=0.5))
    assert (a != heed.attention(q, k, v, dropout_p=0.5)).any()


def test_a_seed_is_any_whole_number():
    q, k, v = arrays(1, 2, 20, 8)
    want = heed.attention(q, k, v, dropout_p=0.5, dropout_seed=5)
    for seed in np.int64(5), np.uint8(5), np.array(5), np.array([5]), np.array([[5]]), np.array(5, np.int32):
        np.testing.assert_array_equal(heed.attention(q, k, v, dropout_p=0.5, dropout_seed=seed), want)


def test_packed_sequences():
    q, k, v = (a[0] for a in arrays(1, 9, 2, 8))
    cu = np.array([0, 4, 9])
    o = heed.attention_varlen(q, k, v, cu, cu, 5, 5)
    for rows in (slice(0, 4), slice(4, 9)):
        part = heed.attention(*(a[None, rows] for a in (q, k, v)), layout="bshd")
        np.testing.assert_array_equal(o[rows], part[0])


def test_wrong_arguments():
    q, k, v = arrays(1, 2, 3, 4)
    for kind, text, call in [
        (TypeError, "q: is a list", lambda: heed.attention([1], k, v)),
        (TypeError, "mask: is a list", lambda: heed.attention(q, k, v, mask=[True])),
        (TypeError, "q: dtype is int64", lambda: heed.attention(q.astype(int), k, v)),
        (TypeError, "format|dtype", lambda: heed.attention(q.astype("O"), k, v)),
        (TypeError, "format|dtype", lambda: heed.attention(q.astype(np.complex64), k, v)),
        (TypeError, "format", lambda: heed.attention(q.astype(">f4"), k, v)),
        (ValueError, "head_dim is 3", lambda: heed.attention(q, k[..., :3], v)),
        (ValueError, "q: has 5 dimensions", lambda: heed.attention(q[None], k, v)),
        (TypeError, "lengths_k: dtype is float64", lambda: heed.attention(q, k, v, lengths_k=np.ones(1))),
        (TypeError, "lengths_k: is a int", lambda: heed.attention(q, k, v, lengths_k=3)),
        (TypeError, "mask: is a bool", lambda: heed.attention(q, k, v, mask=True)),
        (TypeError, "dropout_seed: is a float", lambda: heed.attention(q, k, v, dropout_p=0.5, dropout_seed=5.0)),
        (ValueError, "lengths_k", lambda: heed.attention(q, k, v, lengths_k=np.array([(1 << 32) + 1]))),
        (ValueError, "lengths_k", lambda: heed.attention(q, k, v, lengths_k=np.array([1 << 63], np.uint64))),
        (TypeError, "k: is a numpy.ma", lambda: heed.attention(q, np.ma.masked_array(k, k > 0), v)),
        (TypeError, "do: is a numpy.ma", lambda: heed.attention_backward(np.ma.masked_array(q), q, k, v, q, q[..., 0])),
        (TypeError, "lse: is a list, expected what q is", lambda: heed.attention_backward(q, q, k, v, q, [0])),
        (ValueError, "stride 3 is 6 bytes", lambda: heed.attention(_uneven(), k, v)),
    ]:
        with pytest.raises(kind, match=text):
            call()


def _uneven():
    record = np.zeros((1, 2, 3, 4), dtype=np.dtype([("x", "<f4"), ("y", "<i2")]))
    return record["x"]


def test_without_torch():
    """heed works where PyTorch is not, and does not load it where it is not asked for."""
    program = """
import sys
from pathlib import Path
import numpy as np, heed
x = np.ones((1, 1, 2, 4), np.float32)
assert (heed.attention(x, x, x) == 1).all() and "torch" not in sys.modules
sys.modules["torch"] = None
try:
    heed.nn
except ImportError:
    print("fine", heed.__version__)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("fine 0.")


def test_a_torch_that_is_too_old_is_refused_where_it_is_used():
    program = """
import sys, types
import numpy as np
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.__version__, torch.Tensor = "2.3.1", type("Tensor", (), {})
torch.nn, torch.library = types.ModuleType("torch.nn"), types.ModuleType("torch.library")
import heed
x = np.ones((1, 1, 2, 4), np.float32)
assert (heed.attention(x, x, x) == 1).all()
for use in lambda: heed.attention(*[torch.Tensor()] * 3), lambda: heed.nn, lambda: heed.scaled_dot_product_attention:
    try:
        use()
    except ImportError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == 3 * ["heed: torch is 2.3.1, expected 2.4 or later; NumPy arrays need none"]


def test_a_fork_computes_too():
    program = """
import os, signal, heed, numpy as np
q = np.random.standard_normal((2, 4, 128, 64)).astype(np.float32)
heed.set_threads(2)
o = heed.attention(q, q, q)
child = os.fork()
if not child:
    signal.alarm(50)  # not to wait for ever
    os._exit(0 if (heed.attention(q, q, q) == o).all() else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


def test_torch_may_come_later():
    if not hasattr(pytest.importorskip("torch").compiler, "substitute_in_graph"):
        pytest.skip("this PyTorch ends a graph before a function of C")
    program = """
import heed, torch
x = torch.ones(1, 1, 2, 4)
compiled = torch.compile(heed.attention, fullgraph=True, backend="eager")
print(compiled(x, x, x).sum().item(), heed.attention(x, x, x).sum().item())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "8.0 8.0"


def test_attention_is_a_function_like_any_other():
    """It is one of C; what Python does with functions works all the same."""
    parameters = inspect.signature(heed.attention).parameters
    assert list(parameters)[:4] == ["q", "k", "v", "layout"] and parameters["layout"].default == "bhsd"
    assert set(parameters) - {"return_lse"} <= set(heed._arguments.Arguments._fields)
    assert heed.attention.__name__ == "attention" and "Shapes" in heed.attention.__doc__
    assert pickle.loads(pickle.dumps(heed.attention)) is copy.deepcopy(heed.attention) is heed.attention
    x = np.random.default_rng(0).standard_normal((1, 2, 3, 4), np.float32)
    np.testing.assert_array_equal(
        heed.attention(x, x, v=x, **{"causal": True}), heed.attention(q=x, k=x, v=x, causal=True)
    )
    for arguments, named, text in (
        ((x, x), {}, "missing 1 required positional argument: 'v'"),
        ((x, x, x, x), {}, "takes 3 positional arguments but 4 were given"),
        ((x, x, x), {"q": x}, "multiple values for argument 'q'"),
        ((x, x, x), {"colour": 1}, "unexpected keyword argument 'colour'"),
    ):
        with pytest.raises(TypeError, match=text):
            heed.attention(*arguments, **named)


def test_the_stubs_of_the_extension_are_complete():
    import ast

    stubs = ast.parse((Path(heed.__file__).parent / "_C.pyi").read_text())
    said = {node.name for node in stubs.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert said == {name for name in dir(heed._C) if not name.startswith("__")}


def test_the_extension_keeps_to_the_stable_abi():
    """Of Python's private names those that the macros of the limited API stand for; of its own names one."""
    if shutil.which("nm") is None:
        pytest.skip("there is no nm")
    extension = Path(heed._C.__file__)
    assert extension.name == "_C.abi3.so"

    def names(kind):
        listed = subprocess.run(["nm", "-D", kind, extension], capture_output=True, text=True, check=True).stdout
        return {line.split()[-1].partition("@")[0] for line in listed.splitlines()}

    used = {name for name in names("--undefined-only") if name.startswith(("Py", "_Py"))}
    sized = {f"_{name}_SizeT" for name in ("PyArg_ParseTuple", "PyObject_CallFunction", "PyObject_CallMethod", "Py_BuildValue")}
    stable = {"_PyObject_New", "_Py_Dealloc", "_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct"} | sized
    assert "PyModule_Create2" in used and {name for name in used if name.startswith("_")} <= stable
    assert names("--defined-only") == {"PyInit__C"}


def test_what_the_library_says_of_itself():
    q = np.ones((1, 1, 8, 8), np.float32)
    assert "forward_" in heed.explain(q, q, q) and "backward_" in heed.explain(q, q, q, backward=True, causal=True)
    table = heed.kernels()
    assert {"name", "backend", "backward", "runs_here"} == set(table[0])
    assert any(row["backend"] == "cpu" and row["runs_here"] for row in table)
    before = heed.attention(q, q, q)
    heed.set_threads(1)
    np.testing.assert_array_equal(before, heed.attention(q, q, q))
    heed.set_threads(0)


def test_jax_arrays(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    jax, jnp = pytest.importorskip("jax"), pytest.importorskip("jax.numpy")
    q, k, v = arrays(1, 2, 5, 8)
    o, lse = heed.attention(*map(jnp.asarray, (q, k, v)), causal=True, return_lse=True)
    assert isinstance(o, jnp.ndarray)
    np.testing.assert_array_equal(np.asarray(o), heed.attention(q, k, v, causal=True))
    grads = heed.attention_backward(o, *map(jnp.asarray, (q, k, v)), o, lse, causal=True)
    assert all(isinstance(g, jnp.ndarray) for g in grads)
    cache = [jnp.asarray(a.swapaxes(1, 2)) for a in (q, k, v)]
    np.testing.assert_allclose(heed.attention_with_kvcache(*cache).swapaxes(1, 2), heed.attention(q, k, v), atol=1e-6)
    with pytest.raises(TypeError, match="k_cache: is a jaxlib.*, which heed cannot write k into"):
        heed.attention_with_kvcache(*cache, cache[1], cache[2], jnp.asarray([0]))
    with pytest.raises(ValueError, match="output: is a .* that does not let its memory be written"):
        heed.self_attention(jnp.ones((2, 64)), jnp.ones((2, 64)))
    half = [jnp.asarray(a, jnp.bfloat16) for a in (q, k, v)]
    assert heed.attention(*half).dtype == jnp.bfloat16 and "bf16" in heed.explain(*half)
    dropped = heed.attention(*map(jnp.asarray, (q, k, v)), dropout_p=0.5, dropout_seed=jnp.asarray(5))
    np.testing.assert_array_equal(dropped, heed.attention(q, k, v, dropout_p=0.5, dropout_seed=5))
    with pytest.raises(TypeError, match="mask: is traced by JAX"):
        jax.jit(lambda mask: heed.attention(*half, mask=mask))(jnp.ones((5, 5), bool))


class Plain:
    """An array of a library with no more than the array API standard has; its memory is seen by __dlpack__ alone."""

    def __init__(self, a):
        self.a = np.asarray(a)
        self.shape, self.dtype = self.a.shape, f"plain.{self.a.dtype}"

    def __dlpack__(self):
        return self.a.__dlpack__()

    def __dlpack_device__(self):
        return 1, 0

    def __array__(self, dtype=None, copy=None):
        return self.a


@pytest.mark.parametrize("writable", [True, False])
def test_arrays_of_other_libraries(monkeypatch, writable):
    functions = {
        "empty": lambda shape, dtype: Plain(np.empty(shape, dtype)),
        "permute_dims": lambda x, axes: Plain(x.a.transpose(axes)),
        "float32": "float32",
    }
    library = SimpleNamespace(**functions) if writable else SimpleNamespace(convert_to_tensor=Plain)
    monkeypatch.setitem(sys.modules, "plain", library)
    monkeypatch.setattr(Plain, "__module__", "plain.arrays")
    q, k, v = arrays(2, 4, 6, 8)
    how = {"alibi_slopes": np.ones(4, np.float32), "lengths_k": np.array([4, 3]), "dropout_p": 0.5, "dropout_seed": np.array(5)}
    o, lse = heed.attention(q, k, v, return_lse=True, **how)
    want = o, lse, *heed.attention_backward(o, q, k, v, o, lse, **how)
    q, k, v = map(Plain, (q, k, v))
    how = {name: Plain(x) if isinstance(x, np.ndarray) else x for name, x in how.items()}
    o, lse = heed.attention(q, k, v, return_lse=True, **how)
    for got, expected in zip((o, lse, *heed.attention_backward(o, q, k, v, o, lse, **how)), want, strict=True):
        assert type(got) is Plain
        np.testing.assert_array_equal(got.a, expected)
    lengths = how["lengths_k"]
    cached = heed.attention_with_kvcache(q, k, v, cache_seqlens=lengths).a
    np.testing.assert_array_equal(cached, heed.attention_with_kvcache(q.a, k.a, v.a, cache_seqlens=lengths.a))
    with pytest.raises(TypeError, match="k_cache: is a plain.arrays.Plain, which heed cannot write k into"):
        heed.attention_with_kvcache(q, k, v, k, v, lengths)


def test_arrays_of_jax_on_a_gpu_are_not_copied():
    class Array:  # as JAX's are, as far as heed looks
        __module__ = "jaxlib"
        dtype = np.dtype("float32")

        def __dlpack_device__(self):
            return 2, 0

        def __array__(self, *how, **more):
            raise AssertionError("copied to the CPU")

    q = Array()
    with pytest.raises(ValueError, match="q: is a .*Array on a GPU, expected the CPU"):
        heed.attention(q, q, q)
    with pytest.raises(ValueError, match="do: is a .*Array on a GPU, expected the CPU"):
        heed.attention_backward(q, q, q, q, q, q)


@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_on_a_gpu_is_not_waited_for(paged):
    """Arrays of a GPU, as far as heed looks: what does not fit is dropped, as to see that there is such would take a wait."""

    class Array(np.ndarray):
        def __dlpack_device__(self):
            return 2, 0

        def wait(self, *_, **__):
            raise AssertionError("waits for the GPU")

        __bool__ = __int__ = __index__ = __float__ = all = any = max = min = item = tolist = wait

    def there(a):
        return np.asarray(a).view(Array)

    shape = (6, 2, 2, 8) if paged else (2, 4, 2, 8)
    caches = [rng.standard_normal(shape) for _ in range(2)]
    new = [rng.standard_normal((2, 2, 2, 8)) for _ in range(2)]
    lengths = np.array([1, 1 if paged else 3])
    table = np.array([[0, 1], [9, 3]]) if paged else None  # there is no page 9
    with pytest.raises(ValueError, match="3 keys .* 6 pages" if paged else "5 keys"):
        heed._kvcache._append(*(a.copy() for a in caches), *new, lengths, table, list)
    given = [there(a.copy()) for a in caches]
    heed._kvcache._append(*given, *map(there, new), there(lengths), there(table) if paged else None, list)
    for after, want, rows in zip(given, caches, new, strict=True):
        want[[0, 1] if paged else [0, 0], [1, 0] if paged else [1, 2]] = rows[0]
        want[(3, 0) if paged else (1, 3)] = rows[1, 1 if paged else 0]
        np.testing.assert_array_equal(np.array(after), want)


def test_cupy_arrays(device):
    """Read and written where they lie, on CuPy's stream, forward and backward."""
    cupy = pytest.importorskip("cupy")
    if device != "cuda":
        pytest.skip("CuPy's arrays are on a GPU")
    q, k, v = arrays(2, 4, 33, 16)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        given = [cupy.asarray(x) for x in (q, k, v)]
        o, lse = heed.attention(*given, causal=True, return_lse=True)
        grads = heed.attention_backward(cupy.ones_like(o), *given, o, lse, causal=True)
        turned = heed.attention(*(x.transpose(0, 2, 1, 3) for x in given), layout="bshd", causal=True)
        stream.synchronize()
    assert all(isinstance(x, cupy.ndarray) for x in (o, lse, *grads))
    want, want_lse = heed.attention(q, k, v, causal=True, return_lse=True)
    wanted = heed.attention_backward(np.ones_like(want), q, k, v, want, want_lse, causal=True)
    for got, expected in zip((o, lse, *grads), (want, want_lse, *wanted), strict=True):
        np.testing.assert_allclose(got.get(), expected, atol=1e-5)
    np.testing.assert_array_equal(turned.get().transpose(0, 2, 1, 3), o.get())
    cache, lengths = [cupy.zeros((2, 4, 4, 16), cupy.float32) for _ in range(2)], cupy.array([1, 3])
    rows = [x.transpose(0, 2, 1, 3)[:, :2] for x in given]
    heed.attention_with_kvcache(rows[0], *cache, rows[1], rows[2], lengths)  # one row does not fit
    np.testing.assert_array_equal(cache[0][0, 1:3].get(), rows[1][0].get())
    np.testing.assert_array_equal(cache[1][1, 3].get(), rows[2][1, 0].get())
    with pytest.raises(TypeError, match="k: is a .*ndarray, expected what q is"):
        heed.attention(given[0], k, given[2])
