"""Which backends this machine can run, and hypothesis' profiles.

Without a GPU the Triton kernel runs in triton's interpreter, which must be asked for before triton is imported.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # pytest-xdist brings the parallelism

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

_common = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("ci", derandomize=True, max_examples=60, **_common)
settings.register_profile("random", max_examples=500, **_common)  # HYPOTHESIS_PROFILE=random: a campaign
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

gpu = pytest.mark.gpu
BACKENDS = [
    pytest.param(("reference", "cpu"), id="reference"),
    pytest.param(("torch", "cpu"), id="torch"),
    pytest.param(
        ("triton", "cpu"), id="triton-interpreted", marks=pytest.mark.skipif(HAS_GPU, reason="compiled here instead")
    ),
    pytest.param(("torch", "cuda"), id="torch-cuda", marks=gpu),
    pytest.param(("triton", "cuda"), id="triton-cuda", marks=gpu),
]


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(params=BACKENDS)
def on(request):
    """(backend, device) pairs that must all give the same numbers."""
    return request.param


@pytest.fixture
def small_tiles(monkeypatch):
    """Make short windows cross tile boundaries: 4 rows by 8 steps in Triton, loops of 4 steps in torch."""
    from vtrace_plugins._core import launch, ops, torch_scan

    monkeypatch.setattr(torch_scan, "_LONGEST_LOOP", 4)
    monkeypatch.setattr(torch_scan, "_ELEMENTS_PER_STEP", 4)
    monkeypatch.setattr(launch, "choose", lambda *args: launch.Plan(4, 8, 1, 10**6))
    monkeypatch.setattr(ops, "_launches", {})
