"""NumPy, and other arrays that show their memory: by the buffer protocol or __dlpack__. Results are made by the library that
the arguments come from. Arrays of JAX and TensorFlow cannot be written to: for them NumPy computes, and they get the result."""

from __future__ import annotations

import sys
from typing import Any

from heed import _C
from heed._arguments import INTEGERS, PER_HEAD, TENSORS, Arguments, drops, seed_of, type_name


_HOST = (1, 3)  # of DLPack's devices: the CPU, and memory of it that is pinned for CUDA


def _library(value: Any) -> str:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return "numpy"  # of subclasses too
    return type(value).__module__.partition(".")[0]


def _namespace(value: Any) -> Any:
    if _library(value) == "numpy":
        import numpy

        return numpy
    if hasattr(value, "__array_namespace__"):
        return value.__array_namespace__()
    return sys.modules[_library(value)]


def empty(like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
    """A new array of like's library, in the memory order that the strides say."""
    xp = _namespace(like)
    outer_first = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    packed = xp.empty([shape[d] for d in outer_first], dtype=getattr(xp, dtype) if dtype != "bfloat16" else like.dtype)
    turn = getattr(xp, "permute_dims", None) or xp.transpose  # which NumPy had before 2.0, and others still have
    return turn(packed, [outer_first.index(d) for d in range(len(shape))])


def on_host(value: Any) -> bool:
    return not hasattr(value, "__dlpack_device__") or value.__dlpack_device__()[0] in _HOST


def stream(like: Any) -> int:
    if _library(like) == "cupy":
        return _namespace(like).cuda.get_current_stream().ptr
    raise ValueError(f"q: is a {type_name(like)} on a GPU, whose stream heed does not know; expected CuPy or PyTorch")


def check(name: str, value: Any, q: Any) -> None:
    """An error unless value is an array of q's library."""
    if not (hasattr(q, "__dlpack__") or hasattr(q, "__array_interface__")):
        raise TypeError(f"q: is a {type_name(q)}, expected a PyTorch tensor or a NumPy array")
    if _library(value) != _library(q):
        raise TypeError(f"{name}: is a {type_name(value)}, expected what q is, a {type_name(q)}")
    if type(value).__name__ == "MaskedArray":
        raise TypeError(f"{name}: is a {type_name(value)}, expected an array without a mask (see mask for hidden keys)")


def is_like_numpy(value: Any) -> bool:
    """Whether its library has NumPy's functions and methods."""
    return _library(value) in ("numpy", "cupy")


def numbers(value: Any) -> Any:
    """A small array, such as lengths, as one that is like NumPy's."""
    if value is None or is_like_numpy(value):
        return value
    import numpy

    return numpy.asarray(value)


def _is_seed(name: str, value: Any) -> bool:
    """A number, of the arguments that are arrays."""
    return name == "dropout_seed" and isinstance(value, int)


def _prepare(a: Arguments) -> Arguments:
    """All arrays of one library; small integer and per-head arrays in the types that the kernels read."""
    if is_immutable(a.q):
        a = _all_to_numpy(a)
    a = a._replace(dropout_seed=seed_of(a.dropout_seed))
    for name in TENSORS:
        value = getattr(a, name)
        if name == "q" or (value is not None and not _is_seed(name, value)):
            check(name, value, a.q)
    changes: dict[str, Any] = {}
    for name in INTEGERS:
        value = numbers(getattr(a, name))
        if value is None:
            continue
        if value.dtype.kind not in "iu":
            raise TypeError(f"{name}: dtype is {value.dtype}, expected int32 or int64")
        if value.dtype.itemsize > 2:  # what int32 cannot say is refused, not taken for another number
            value = value.clip(0 if value.dtype.kind == "u" else -1, (1 << 31) - 1)
        changes[name] = _namespace(value).ascontiguousarray(value, dtype="int32")
    for name in PER_HEAD:
        value = getattr(a, name)
        if is_like_numpy(value):  # of others float32 is expected
            changes[name] = _namespace(value).ascontiguousarray(value, dtype="float32")
    if a.dropout_seed is not None and not _is_seed("dropout_seed", a.dropout_seed):
        seed = numbers(a.dropout_seed).reshape(-1)
        changes["dropout_seed"] = seed.astype("int64") if seed.dtype.kind in "iu" else seed
    if a.dropout_seed is None and drops(a):
        import numpy

        changes["dropout_seed"] = int(numpy.random.randint(1 << 62))
    return a._replace(**changes)


def is_immutable(value: Any) -> bool:
    """Whether its library has no arrays that can be written to."""
    if is_like_numpy(value):
        return False
    return _library(value) in ("jax", "jaxlib") or (hasattr(value, "__dlpack__") and not hasattr(_namespace(value), "empty"))


def _to_numpy(name: str, value: Any) -> Any:
    """The same memory as a NumPy array. One of a GPU would be copied, and is refused."""
    import numpy

    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name}: is traced by JAX and has no numbers yet; expected an array (see jax.pure_callback)")
    if not on_host(value):
        raise ValueError(f"{name}: is a {type_name(value)} on a GPU, expected the CPU; on a GPU CuPy or PyTorch")
    return numpy.asarray(value)


def _all_to_numpy(a: Arguments) -> Arguments:
    changes: dict[str, Any] = {
        name: _to_numpy(name, value)
        for name in TENSORS
        if (value := getattr(a, name)) is not None and not _is_seed(name, value)
    }
    return a._replace(**changes)


def _to_library_of(like: Any, results: Any) -> Any:
    if not is_immutable(like):
        return results
    xp = _namespace(like)
    convert = getattr(xp, "asarray", None) or xp.convert_to_tensor  # the array API's name, and TensorFlow's
    if isinstance(results, tuple):
        return tuple(None if r is None else convert(r) for r in results)
    return convert(results)


def attention(return_lse: bool, a: Arguments) -> Any:
    return _to_library_of(a.q, _C.forward(None, return_lse, *_prepare(a)))


def attention_backward(do: Any, dlse: Any, o: Any, lse: Any, a: Arguments) -> tuple[Any, ...]:
    if a.dropout_seed is None and drops(a):
        raise ValueError("dropout_seed: is None, expected the seed of the forward call")
    wants = (True, True, True, a.bias is not None, a.sink is not None)
    given = {"do": do, "dlse": dlse, "o": o, "lse": lse}
    if is_immutable(a.q):
        given = {name: None if t is None else _to_numpy(name, t) for name, t in given.items()}
    prepared = _prepare(a)
    for name, t in given.items():
        if name != "dlse" or t is not None:
            check(name, t, prepared.q)
    return _to_library_of(a.q, _C.backward(*given.values(), wants, *prepared))
