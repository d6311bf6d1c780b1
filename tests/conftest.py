"""Fixtures of all tests.

The tests of ops run three ways with the same files: on the CPU against the references' own
implementation, on the CPU with the kernels in Triton's interpreter (`TRITON_INTERPRET=1`), and on a
GPU (`-m gpu`).
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from echokernels import _checks, _replay

settings.register_profile(
    "ci",
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("deep", parent=settings.get_profile("ci"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_grad_enabled(False)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """For tests that only a GPU can run; they also carry the `gpu` mark."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.fixture
def debug_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As under ECHOKERNELS_DEBUG=1, which is read when the ops are registered."""
    monkeypatch.setattr(_checks, "DEBUG", True)
    with _replay.bypass():
        yield


@pytest.fixture(scope="session")
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; `make test` installs the package that carries it."""
    from echokernels.runtime.demo_model import find_demo_model

    try:
        return find_demo_model()
    except ValueError as error:
        pytest.skip(str(error))
