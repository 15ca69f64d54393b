"""torch.compile cannot see into the extension. It is told which Python function says the same; and that only when it is
loaded, as it takes longer to load than the rest of PyTorch."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

_DYNAMO = "torch._dynamo"


def when_used(function: Callable[..., Any], traceable: Callable[..., Any]) -> None:
    """From when torch.compile is there on, it takes `traceable` where it finds `function`."""

    def tell() -> None:
        import torch

        if hasattr(torch.compiler, "substitute_in_graph"):  # 2.4 has none: a graph ends before the function
            torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traceable)

    if _DYNAMO in sys.modules:
        tell()
    else:
        sys.meta_path.insert(0, _Watch(tell))


class _Watch(importlib.abc.MetaPathFinder):
    """Waits for the module to be imported, and goes."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_tell(module: Any) -> None:
                load(module)
                self.then()

            spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec
