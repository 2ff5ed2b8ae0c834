"""``python -m vtrace_plugins doctor``: what is installed, which backend runs and why, whether it computes right."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

from vtrace_plugins import vtrace
from vtrace_plugins._core.api import resolve, why_no_triton
from vtrace_plugins._core.checks import BACKENDS, VTraceError

_PACKAGES = (
    "vtrace-plugins",
    "torch",
    "triton",
    "torchrl",
    "tensordict",
    "stable-baselines3",
    "sb3-contrib",
    "gymnasium",
)
_TOLERANCE = 2e-6  # of float32 against the float64 loop, over the largest magnitude


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def devices() -> Iterator[tuple[torch.device, str]]:
    """The devices that tensors may be on, described."""
    yield torch.device("cpu"), f"{torch.get_num_threads()} threads"
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        size = properties.total_memory / 2**30
        yield (
            torch.device("cuda", i),
            f"{properties.name}, {properties.multi_processor_count} multiprocessors, {size:.0f} GiB",
        )


def reason(device: torch.device) -> str:
    """Why ``backend="auto"`` means what it does there."""
    if device.type != "cuda":
        return "the Triton kernel runs on CUDA devices"
    missing = why_no_triton()
    return "one fused kernel" if missing is None else f"triton cannot be imported: {missing}"


def error_of(backend: str, device: torch.device) -> float:
    """The largest error of float32 results against the readable loop in float64, over the largest magnitude."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(33, 200, generator=generator, dtype=torch.float64)  # noqa: E731
    log_mu = draw()
    data: dict[str, Any] = {
        "log_pi": log_mu + 0.3 * draw(),
        "log_mu": log_mu,
        "values": draw(),
        "rewards": draw(),
        "bootstrap_values": draw(),
    }
    data = {name: x.float() for name, x in data.items()}
    flags: dict[str, Any] = {
        name: torch.rand(33, 200, generator=generator) < 0.02 for name in ("terminated", "truncated")
    }
    wanted = vtrace(
        **{name: x.double() for name, x in data.items()}, **flags, gamma=0.99, lam=0.95, backend="reference"
    )
    given = {name: x.to(device) for name, x in (data | flags).items()}
    found = vtrace(**given, gamma=0.99, lam=0.95, backend=backend)
    errors = [(x.cpu().double() - y).abs().max() / y.abs().max() for x, y in zip(found, wanted, strict=True)]
    return max(error.item() for error in errors)


def doctor() -> int:
    """Print it all; 0 if everything that should run computes right, else 1."""
    print(f"Python {platform.python_version()}, {platform.platform()}")
    for package in _PACKAGES:
        print(f"  {package:<18} {version(package)}")
    healthy = True
    for device, description in devices():
        print(f"\n{device}: {description}")
        chosen = resolve("auto", device)
        print(f'  backend="auto" means "{chosen}": {reason(device)}')
        for backend in BACKENDS[1:]:
            try:
                resolve(backend, device)
            except VTraceError as error:
                print(f"  {backend:<10} not here: it needs {error.expected}")
                continue
            try:
                error_size = error_of(backend, device)
            except Exception as error:  # whatever a driver, a compiler or a build of torch may raise
                healthy = False
                first_line = (str(error).splitlines() or [""])[0]
                print(f"  {backend:<10} FAILED: {type(error).__name__}: {first_line}")
                continue
            right = error_size <= _TOLERANCE
            healthy &= right
            verdict = "right" if right else f"WRONG, above {_TOLERANCE:g}"
            print(f"  {backend:<10} {verdict}: error {error_size:.1e} of float32 against the float64 loop")
    print("\nall is well" if healthy else "\nsomething is wrong, see above")
    return 0 if healthy else 1
