"""From the caller's dtypes and dimensions to the ones the torch code computes in, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vtrace_plugins._core.clipping import held_by
from vtrace_plugins._core.inputs import CLIPS, FLAGS, Inputs


def compute_dtype(x: Inputs) -> torch.dtype:
    """float64 if any of the data is, else float32 (half precision accumulates in float32). gamma and clips follow."""
    data = (x.log_pi, x.log_mu, x.values, x.rewards, x.bootstrap_values, x.last_value, x.next_values)
    return torch.float64 if any(t is not None and t.dtype is torch.float64 for t in data) else torch.float32


def on_time_first(function: Callable[[Inputs], tuple[Tensor, Tensor]], x: Inputs) -> tuple[Tensor, Tensor]:
    """Call ``function`` on views with time first, floats in the compute dtype and flags as bool; undo that after.

    A 0-d tensor stays one, and so does a number.
    """
    dtype = compute_dtype(x)

    def number(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.movedim(x.time_dim, 0).to(dtype)

    def flag(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        t = t.movedim(x.time_dim, 0)
        return t if t.dtype is torch.bool else t != 0

    def clip(bar: float | Tensor) -> float | Tensor:
        return bar.to(dtype) if isinstance(bar, Tensor) else held_by(dtype, bar)

    prepared: dict[str, Any] = {
        **{name: number(getattr(x, name)) for name in ("log_pi", "log_mu", "values", "rewards")},
        **{name: number(getattr(x, name)) for name in ("bootstrap_values", "next_values")},
        **{name: flag(getattr(x, name)) for name in FLAGS},
        **{name: clip(getattr(x, name)) for name in CLIPS},
        "last_value": None if x.last_value is None else x.last_value.to(dtype),
        "gamma": number(x.gamma) if isinstance(x.gamma, Tensor) else x.gamma,
        "time_dim": 0,
    }
    results = function(x._replace(**prepared))
    targets, advantages = (t.to(x.values.dtype).movedim(0, x.time_dim) for t in results)
    return targets, advantages


def folded_shape(shape: torch.Size, time_dim: int) -> tuple[int, int, int]:
    """``[outer, time, inner]``, the kernel's view of any number of dimensions."""
    return math.prod(shape[:time_dim]), shape[time_dim], math.prod(shape[time_dim + 1 :])


def empty_results(values: Tensor, time_dim: int) -> tuple[Tensor, Tensor]:
    """Uninitialised targets and advantages, laid out as ``values`` is, if ``[outer, time, inner]`` is a view of that.

    They are tensors of their own: autograd would not let a caller edit a view made by an operator in place.
    """
    if not values.is_contiguous():
        try:
            torch.empty_like(values, device="meta").view(folded_shape(values.shape, time_dim))
        except (RuntimeError, ValueError):  # the latter from fake tensors
            values = values.contiguous()
    return torch.empty_like(values), torch.empty_like(values)


def empty_gradients(x: Inputs, wanted: Sequence[str]) -> list[Tensor]:
    """Uninitialised gradients by the inputs named, in their dtypes and laid out as the results are."""
    like = empty_results(torch.empty_strided(x.values.shape, x.values.stride(), device="meta"), x.time_dim)[0]

    def empty(t: Tensor) -> Tensor:
        if t.shape != like.shape:  # last_value
            return torch.empty(t.shape, dtype=t.dtype, device=t.device)
        return torch.empty_strided(like.shape, like.stride(), dtype=t.dtype, device=t.device)

    return [empty(getattr(x, name)) for name in wanted]
