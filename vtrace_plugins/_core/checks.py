"""What the arguments must be. Looks at shapes, dtypes and devices only, so it never waits for a GPU."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DTYPES = {
    "floating": _FLOATING,
    "floating or integer": (*_FLOATING, *_INTEGER),
    "bool, integer or floating": (torch.bool, *_FLOATING, *_INTEGER),
}
_REQUIRED = ("log_pi", "log_mu", "rewards", "terminated")
_KINDS = {
    "rewards": "floating or integer",
    **dict.fromkeys(("terminated", "truncated", "mask"), "bool, integer or floating"),
}
BACKENDS = ("auto", "triton", "torch", "reference")


class VTraceError(ValueError):
    """An argument is not what it must be. The message names the argument, what was expected and what came."""


def _fail(name: str, expected: str, got: str) -> VTraceError:
    return VTraceError(f"{name}: expected {expected}, got {got}")


def check_time_dim(time_dim: Any, ndim: int) -> int:
    """``time_dim`` as a non-negative index."""
    if isinstance(time_dim, bool) or not isinstance(time_dim, int):
        raise _fail("time_dim", "an int", type(time_dim).__name__)
    if not -ndim <= time_dim < ndim:
        raise _fail("time_dim", f"a dimension of the {ndim}-d data", str(time_dim))
    return time_dim % ndim


def check_backend(backend: Any) -> None:
    if backend not in BACKENDS:
        raise _fail("backend", "one of " + ", ".join(map(repr, BACKENDS)), repr(backend))


def _check_dtype(name: str, x: Tensor, kind: str) -> None:
    if x.dtype not in _DTYPES[kind]:
        raise _fail(name, f"a {kind} dtype", f"dtype {x.dtype}")


def _check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise _fail(name, f"device {device} (that of values)", f"device {x.device}")


def _check_tensor(name: str, x: Any, values: Tensor, shape: torch.Size, kind: str) -> None:
    if not isinstance(x, Tensor):
        raise _fail(name, "a torch.Tensor", type(x).__name__)
    if x.shape != shape:
        which = "the shape of values" if shape == values.shape else "the shape of values without time"
        raise _fail(name, f"shape {list(shape)} ({which})", f"shape {list(x.shape)}")
    _check_dtype(name, x, kind)
    _check_device(name, x, values.device)


def check_tensors(values: Any, others: dict[str, Any], time_dim: Any) -> int:
    """Check every tensor against ``values``, the optional ones where given; returns the non-negative time_dim."""
    if not isinstance(values, Tensor):
        raise _fail("values", "a torch.Tensor", type(values).__name__)
    if values.ndim == 0:
        raise _fail("values", "at least one dimension (time)", "a 0-d tensor")
    _check_dtype("values", values, "floating")
    time_dim = check_time_dim(time_dim, values.ndim)
    without_time = values.shape[:time_dim] + values.shape[time_dim + 1 :]
    for name, x in others.items():
        if x is None and name not in _REQUIRED:
            continue
        shape = without_time if name == "last_value" else values.shape
        _check_tensor(name, x, values, shape, _KINDS.get(name, "floating"))
    return time_dim


def check_continuation(data: dict[str, Any]) -> None:
    """Exactly one of the three ways to say what follows a window or a truncated step."""
    names = ("bootstrap_values", "last_value", "next_values")
    given = [name for name in names if data[name] is not None]
    if len(given) != 1:
        raise _fail(
            "bootstrap_values, last_value, next_values", "exactly one of the three", " and ".join(given) or "none"
        )
    if given == ["last_value"]:
        for other in ("truncated", "mask"):
            if data[other] is not None:
                raise _fail(
                    "last_value",
                    "no truncated and no mask beside it (it prices only the end of the window; "
                    "use bootstrap_values or next_values)",
                    other,
                )


def _check_option(name: str, x: Any, values: Tensor, low: float, high: float, tensor_allowed: bool = True) -> None:
    """A number in [low, high] or, unchecked (reading it would wait for the GPU), a tensor."""
    if isinstance(x, Tensor) and tensor_allowed:
        _check_dtype(name, x, "floating or integer")
        _check_device(name, x, values.device)
        return
    if isinstance(x, bool) or not isinstance(x, Real):
        raise _fail(name, "a number or a tensor" if tensor_allowed else "a number", type(x).__name__)
    if not low <= float(x) <= high:  # NaN fails as well
        interval = f"in [{low:g}, {high:g}]" if math.isfinite(high) else f"of at least {low:g} (inf is allowed)"
        raise _fail(name, f"a number {interval}", str(x))


def check_options(values: Tensor, gamma: Any, rho_bar: Any, c_bar: Any, pg_rho_bar: Any, lam: Any) -> None:
    _check_option("gamma", gamma, values, 0.0, 1.0)
    if isinstance(gamma, Tensor):
        missing = values.ndim - gamma.ndim
        if missing < 0 or any(g not in (1, v) for g, v in zip(gamma.shape, values.shape[missing:], strict=True)):
            raise _fail("gamma", f"a shape that broadcasts to {list(values.shape)}", f"shape {list(gamma.shape)}")
    for name, bar in (("rho_bar", rho_bar), ("c_bar", c_bar), ("pg_rho_bar", pg_rho_bar)):
        _check_option(name, bar, values, 0.0, math.inf)
        if isinstance(bar, Tensor) and bar.ndim > 0:
            raise _fail(name, "a number or a 0-d tensor", f"shape {list(bar.shape)}")
    _check_option("lam", lam, values, 0.0, 1.0, tensor_allowed=False)
