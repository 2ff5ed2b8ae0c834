"""What the arguments must be. Looks at shapes, dtypes and devices only, so it never waits for a GPU."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BACKENDS = ("auto", "triton", "torch", "reference")


class VTraceError(ValueError):
    """An argument is not what it must be. The message names the argument, what was expected and what came."""


def _fail(name: str, expected: str, got: str) -> VTraceError:
    return VTraceError(f"{name}: expected {expected}, got {got}")


def _shape(shape: tuple[int, ...] | torch.Size) -> str:
    return str(list(shape))


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


def _check_tensor(name: str, x: Any, like: Tensor, shape: tuple[int, ...] | torch.Size, kind: str) -> None:
    if not isinstance(x, Tensor):
        raise _fail(name, "a torch.Tensor", type(x).__name__)
    if x.shape != shape:
        why = "the shape of values" if shape == like.shape else "the shape of values without time"
        raise _fail(name, f"shape {_shape(shape)} ({why})", f"shape {_shape(x.shape)}")
    allowed: tuple[torch.dtype, ...] = _FLOATS
    if kind == "float or integer":
        allowed = _FLOATS + _INTEGERS
    elif kind == "flag":
        allowed = (torch.bool, *_INTEGERS, *_FLOATS)
    if x.dtype not in allowed:
        what = {"float": "a floating dtype", "flag": "bool, an integer or a floating dtype"}.get(kind, f"a {kind} dtype")
        raise _fail(name, what, f"dtype {x.dtype}")
    if x.device != like.device:
        raise _fail(name, f"device {like.device} (that of values)", f"device {x.device}")


def check_tensors(values: Any, data: dict[str, Any], time_dim: Any) -> int:
    """Check every tensor against ``values``; returns the normalised time_dim. ``data`` lists them by name."""
    if not isinstance(values, Tensor):
        raise _fail("values", "a torch.Tensor", type(values).__name__)
    if values.ndim == 0:
        raise _fail("values", "at least one dimension (time)", "a 0-d tensor")
    _check_tensor("values", values, values, values.shape, "float")
    time_dim = check_time_dim(time_dim, values.ndim)
    without_time = values.shape[:time_dim] + values.shape[time_dim + 1 :]

    for name in ("log_pi", "log_mu"):
        _check_tensor(name, data[name], values, values.shape, "float")
    _check_tensor("rewards", data["rewards"], values, values.shape, "float or integer")
    _check_tensor("terminated", data["terminated"], values, values.shape, "flag")
    for name, shape, kind in (
        ("truncated", values.shape, "flag"),
        ("mask", values.shape, "flag"),
        ("bootstrap_values", values.shape, "float"),
        ("next_values", values.shape, "float"),
        ("last_value", without_time, "float"),
    ):
        if data[name] is not None:
            _check_tensor(name, data[name], values, shape, kind)
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


def _check_scalar(name: str, x: Any, values: Tensor, low: float, high: float, shapes: str) -> None:
    if isinstance(x, Tensor):
        if x.dtype not in _FLOATS + _INTEGERS:
            raise _fail(name, "a number or a floating tensor", f"dtype {x.dtype}")
        if x.device != values.device and not (x.ndim == 0 and x.device.type == "cpu"):
            raise _fail(name, f"device {values.device} (that of values) or a 0-d CPU tensor", f"device {x.device}")
        if x.ndim > 0 and shapes == "":
            raise _fail(name, "a number or a 0-d tensor", f"shape {_shape(x.shape)}")
        return
    if isinstance(x, bool) or not isinstance(x, Real):
        raise _fail(name, f"a number or a tensor{shapes}", type(x).__name__)
    number = float(x)
    if math.isnan(number) or not low <= number <= high:
        interval = f"in [{low:g}, {high:g}]" if math.isfinite(high) else f"of at least {low:g} (inf is allowed)"
        raise _fail(name, f"a number {interval}", str(x))


def check_options(values: Tensor, gamma: Any, rho_bar: Any, c_bar: Any, pg_rho_bar: Any, lam: Any) -> None:
    """Ranges are checked on Python numbers only; reading a tensor would wait for the GPU."""
    _check_scalar("gamma", gamma, values, 0.0, 1.0, shapes=" that broadcasts to the data")
    if isinstance(gamma, Tensor) and gamma.ndim > 0:
        ahead = values.ndim - gamma.ndim
        fits = ahead >= 0 and all(g in (1, v) for g, v in zip(gamma.shape, values.shape[ahead:], strict=True))
        if not fits:
            raise _fail("gamma", f"a shape that broadcasts to {_shape(values.shape)}", f"shape {_shape(gamma.shape)}")
    for name, bar in (("rho_bar", rho_bar), ("c_bar", c_bar), ("pg_rho_bar", pg_rho_bar)):
        _check_scalar(name, bar, values, 0.0, math.inf, shapes="")
    if isinstance(lam, Tensor):
        raise _fail("lam", "a number", "a tensor")
    _check_scalar("lam", lam, values, 0.0, 1.0, shapes="")
