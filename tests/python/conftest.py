"""pytest tests/python          everything on the CPU
pytest tests/python --gpu    the same on the first CUDA device
"""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("heed", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("heed")

# Without PyTorch, what is left is NumPy's.
collect_ignore = [] if importlib.util.find_spec("torch") else ["test_attention.py", "test_errors.py", "test_kvcache.py",
                                                                "test_nn.py", "test_properties.py", "test_torch.py"]  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run on the first CUDA device")
    parser.addoption("--examples", type=int, default=0, help="how many problems each property test draws")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--examples"):
        settings.register_profile("many", settings.get_profile("heed"), max_examples=config.getoption("--examples"))
        settings.load_profile("many")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    if not request.config.getoption("--gpu"):
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        pytest.fail("--gpu: there is no CUDA device")
    return "cuda"
