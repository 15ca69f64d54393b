"""pytest tests/python             everything on the CPU
pytest tests/python --gpu       the same on the first CUDA device
pytest tests/python --no-torch  what NumPy is enough for
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("heed", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("heed")

_NEED_TORCH = {f"test_{name}.py" for name in ("attention", "distributed", "errors", "kvcache", "nn", "properties", "torch")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run on the first CUDA device")
    parser.addoption(
        "--no-torch", action="store_true", help="run what NumPy is enough for, as if there were no PyTorch"
    )
    parser.addoption("--examples", type=int, default=0, help="how many problems each property test draws")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-torch"):
        sys.modules["torch"] = None  # type: ignore[assignment]  # to import it is an ImportError
    if config.getoption("--examples"):
        settings.register_profile("many", settings.get_profile("heed"), max_examples=config.getoption("--examples"))
        settings.load_profile("many")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    without = config.getoption("--no-torch") or importlib.util.find_spec("torch") is None
    return True if without and collection_path.name in _NEED_TORCH else None


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    if not request.config.getoption("--gpu"):
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        pytest.fail("--gpu: there is no CUDA device")
    return "cuda"
