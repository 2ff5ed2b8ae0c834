"""What the arguments must be. Looks at shapes, dtypes and devices only, so it never waits for a GPU."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from vtrace_plugins._core.inputs import CLIPS, CONTINUATIONS, FLAGS, Inputs

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DTYPES = {
    "floating": _FLOATING,
    "floating or integer": (*_FLOATING, *_INTEGER),
    "integer": _INTEGER,
    "bool, integer or floating": (torch.bool, *_FLOATING, *_INTEGER),
}
_REQUIRED = ("log_pi", "log_mu", "rewards", "terminated")
_OPTIONAL = ("truncated", *CONTINUATIONS, "mask")
FLAG = "bool, integer or floating"
_KINDS = {"rewards": "floating or integer", **dict.fromkeys(FLAGS, FLAG)}
BACKENDS = ("auto", "triton", "torch", "reference")

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class VTraceError(ValueError):
    """An argument is not what it must be: its name, what was expected and what came."""

    def __init__(self, argument: str, expected: str, got: str) -> None:
        super().__init__(argument, expected, got)
        self.argument, self.expected, self.got = argument, expected, got

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __str__(self) -> str:
        return f"{self.argument}: expected {self.expected}, got {self.got}"


class UnknownOptionError(VTraceError, TypeError):
    """An option that there is not: a TypeError too, as Python's own answer is."""


@contextmanager
def named_as(names: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Let errors from inside speak a host's names, asked for if there is one: ``{"rho_bar": "rho_thresh"}``."""
    try:
        yield
    except VTraceError as error:
        raise VTraceError(names().get(error.argument, error.argument), error.expected, error.got) from None


def check_known(given: Collection[str], known: Collection[str], of: str) -> None:
    """That every option is known: another library's name, or a misspelt one, is answered by the list of those that are.

    Python's own error names only the unknown one, or what is missing in its place.
    """
    for name in given:
        if name not in known:
            raise UnknownOptionError(name, f"one of {of}'s arguments, {sorted(known)}", "an unknown one")


def lists_its_options(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """The function, which passes its options through :func:`check_known` first."""
    known = frozenset(inspect.signature(function).parameters)
    name = function.__name__

    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if not known.issuperset(kwargs):
            check_known(kwargs, known, name)
        return function(*args, **kwargs)

    return call


def check_time_dim(time_dim: Any, ndim: int) -> int:
    """``time_dim`` as a non-negative index."""
    try:
        if isinstance(time_dim, bool):
            raise TypeError
        time_dim = operator.index(time_dim)
    except TypeError:
        raise VTraceError("time_dim", "an int", type(time_dim).__name__) from None
    if not -ndim <= time_dim < ndim:
        raise VTraceError("time_dim", f"a dimension of the {ndim}-d data", str(time_dim))
    return time_dim % ndim


def check_backend(backend: Any) -> None:
    if not isinstance(backend, str) or backend not in BACKENDS:
        got = repr(backend) if isinstance(backend, str) else type(backend).__name__
        raise VTraceError("backend", "one of " + ", ".join(map(repr, BACKENDS)), got)


def check_dtype(name: str, x: Tensor, kind: str) -> None:
    if x.dtype not in _DTYPES[kind]:
        raise VTraceError(name, f"a {kind} dtype", f"dtype {x.dtype}")


def check_broadcasts(name: str, x: Tensor, shape: torch.Size) -> None:
    missing = len(shape) - x.ndim
    if missing < 0 or any(n not in (1, m) for n, m in zip(x.shape, shape[missing:], strict=True)):
        raise VTraceError(name, f"a shape that broadcasts to {list(shape)}", f"shape {list(x.shape)}")


def check_device(name: str, x: Tensor, device: torch.device, of: str = "values") -> None:
    if x.device != device:
        raise VTraceError(name, f"device {device} (that of {of})", f"device {x.device}")


def check_type(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise VTraceError(name, "a torch.Tensor", type(x).__name__)
    if x.is_nested or x.layout is not torch.strided:
        raise VTraceError(name, "a dense tensor", "a nested one" if x.is_nested else f"one of layout {x.layout}")
    distributed = sys.modules.get("torch.distributed.tensor")  # whoever has a DTensor has imported it
    if distributed is not None and isinstance(x, distributed.DTensor):
        wanted = "a tensor of this process (x.to_local(): sharded along the batch, each process has whole windows)"
        raise VTraceError(name, wanted, "DTensor")


def check_tensor(
    name: str, x: Any, like: Tensor, kind: str, shape: torch.Size | None = None, of: str = "values"
) -> None:
    """x in the shape (unless another is given) and on the device of ``like``, which goes by the name of ``of``."""
    check_type(name, x)
    shape = like.shape if shape is None else shape
    if x.shape != shape:
        which = "" if shape == like.shape else " without time"
        raise VTraceError(name, f"shape {list(shape)} (the shape of {of}{which})", f"shape {list(x.shape)}")
    check_dtype(name, x, kind)
    check_device(name, x, like.device, of)


def check_inputs(x: Inputs) -> Inputs:
    """x, checked, and in one form: numbers are floats, gamma has the data's shape, time_dim is not negative."""
    time_dim = _check_tensors(x)
    _check_continuation(x)
    _check_options(x)

    def number(option: float | Tensor) -> float | Tensor:
        return option if isinstance(option, Tensor) else float(option)

    return x._replace(
        gamma=x.gamma.expand(x.values.shape) if isinstance(x.gamma, Tensor) else float(x.gamma),
        rho_bar=number(x.rho_bar),
        c_bar=number(x.c_bar),
        pg_rho_bar=number(x.pg_rho_bar),
        lam=float(x.lam),
        time_dim=time_dim,
    )


def _check_tensors(x: Inputs) -> int:
    """Check every tensor against ``values``, the optional ones where given; returns the non-negative time_dim."""
    values = x.values
    check_type("values", values)
    if values.ndim == 0:
        raise VTraceError("values", "at least one dimension (time)", "a 0-d tensor")
    check_dtype("values", values, "floating")
    time_dim = check_time_dim(x.time_dim, values.ndim)
    without_time = values.shape[:time_dim] + values.shape[time_dim + 1 :]
    for name in _REQUIRED + _OPTIONAL:
        t = getattr(x, name)
        if t is not None or name in _REQUIRED:
            shape = without_time if name == "last_value" else values.shape
            check_tensor(name, t, values, _KINDS.get(name, "floating"), shape)
    return time_dim


def _check_continuation(x: Inputs) -> None:
    """Exactly one of the three ways to say what follows a window or a truncated step."""
    given = [name for name in CONTINUATIONS if getattr(x, name) is not None]
    if len(given) != 1:
        raise VTraceError(", ".join(CONTINUATIONS), "exactly one of the three", " and ".join(given) or "none")
    if given == ["last_value"]:
        for other in ("truncated", "mask"):
            if getattr(x, other) is not None:
                raise VTraceError(
                    "last_value",
                    "no truncated and no mask beside it (it prices only the end of the window; "
                    "use bootstrap_values or next_values)",
                    other,
                )


def check_number(name: str, x: Any, high: float, kind: str = "a number") -> None:
    """A number in [0, high]."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise VTraceError(name, kind, type(x).__name__)
    try:
        inside = 0.0 <= float(x) <= high  # NaN is not
    except OverflowError:
        inside = False
    if not inside:
        interval = f"in [0, {high:g}]" if math.isfinite(high) else "of at least 0 (inf is allowed)"
        raise VTraceError(name, f"a number {interval}", str(x))


def check_flag(name: str, x: Any) -> None:
    if not isinstance(x, bool):
        raise VTraceError(name, "True or False", repr(x))


def _check_option(name: str, x: Any, values: Tensor, high: float) -> None:
    """A number in [0, high] or, unchecked (reading it would wait for the GPU), a tensor."""
    if isinstance(x, Tensor):
        check_type(name, x)
        check_dtype(name, x, "floating or integer")
        check_device(name, x, values.device)
    else:
        check_number(name, x, high, "a number or a tensor")


def _check_options(x: Inputs) -> None:
    values, gamma = x.values, x.gamma
    _check_option("gamma", gamma, values, 1.0)
    if isinstance(gamma, Tensor):
        check_broadcasts("gamma", gamma, values.shape)
    for name in CLIPS:
        bar = getattr(x, name)
        _check_option(name, bar, values, math.inf)
        if isinstance(bar, Tensor) and bar.ndim > 0:
            raise VTraceError(name, "a number or a 0-d tensor", f"shape {list(bar.shape)}")
    check_number("lam", x.lam, 1.0)
    check_flag("weight_advantages", x.weight_advantages)
