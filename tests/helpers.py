"""Random windows, the call on any backend, and the comparison every test uses."""

import numpy as np
import torch

from vtrace_plugins import vtrace

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def window(rows, T, *, seed=0, continuation="bootstrap_values", boundaries=0.1, masked=False, off_policy=1.0):
    """A window of [rows, T] float64 arrays, ready for the oracle (and, through ``call``, for every backend)."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape)  # noqa: E731
    log_mu = normal(rows, T) - 1
    data = {
        "log_pi": log_mu + off_policy * normal(rows, T),
        "log_mu": log_mu,
        "values": normal(rows, T),
        "rewards": normal(rows, T),
        "terminated": rng.random((rows, T)) < boundaries,
    }
    if continuation == "last_value":
        return data | {"last_value": normal(rows)}
    data["truncated"] = rng.random((rows, T)) < boundaries
    data[continuation] = normal(rows, T)
    if masked:
        data["mask"] = np.arange(T) < rng.integers(0, T + 1, size=(rows, 1))
    return data


def tensors(data, device="cpu", dtype=torch.float64):
    """The window as tensors: floats in ``dtype``, flags as bool."""
    return {
        name: torch.as_tensor(x, device=device, dtype=None if x.dtype == bool else dtype) for name, x in data.items()
    }


def rounded(data, dtype):
    """The window as float64 arrays that ``dtype`` holds exactly, so that only the computation is judged."""
    return {k: x if x.dtype == bool else torch.as_tensor(x).to(dtype).double().numpy() for k, x in data.items()}


def call(on, data, *, dtype=torch.float64, **options):
    backend, device = on
    return vtrace(**tensors(data, device, dtype), backend=backend, **options)


def assert_close(actual, expected, *, tolerance=None):
    """NaN and inf exactly where expected; else within the dtype's tolerance, scaled by the row's largest magnitude."""
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    actual = actual.detach().double().cpu().numpy()
    expected = np.asarray(expected, dtype=np.float64)
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected), err_msg="NaN elsewhere than expected")
    finite = np.isfinite(expected)
    infinite = ~finite & ~np.isnan(expected)
    np.testing.assert_array_equal(actual[infinite], expected[infinite])
    scale = np.maximum(1.0, np.abs(np.where(finite, expected, 0.0)).max(axis=-1, keepdims=True, initial=0.0))
    error = np.where(finite, np.abs(actual - np.where(finite, expected, 0.0)) / scale, 0.0)
    assert error.max(initial=0.0) <= tolerance, f"error {error.max():.3g} above {tolerance:.3g} at {np.argmax(error)}"
