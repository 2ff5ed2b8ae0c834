"""The clipping rule, for rho, c and pg_rho alike. The kernels' is ``is_clipped`` and ``clip`` in ``kernels.py``."""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor


def held_by(dtype: torch.dtype, bar: float) -> float:
    """The clip, or inf where the dtype cannot hold it: no ratio is above either."""
    return bar if bar <= torch.finfo(dtype).max else float("inf")


def as_tensor(bar: float | Tensor, like: Tensor) -> Tensor:
    """The clip as a 0-d tensor beside ``like``."""
    if isinstance(bar, Tensor):
        return bar
    # Inductor keeps a number that changes from call to call at its second value (pytorch#194976), in comparisons,
    # torch.where and torch.full. In arithmetic with a tensor it does not.
    return torch.zeros((), dtype=like.dtype, device=like.device) + held_by(like.dtype, bar)


def clip_ratio(log_ratio: Tensor, bar: float | Tensor) -> Tensor:
    """``min(bar, exp(log_ratio))``, NaN kept; its gradient is w up to and at the bar, exactly 0 above it.

    The gradient is selected, not multiplied: exp sees 0 where the clip answers, so an overflowing exp (w = inf) does
    not turn the zero into ``0 * inf = NaN``.
    """
    bar = as_tensor(bar, log_ratio)
    above = log_ratio.detach().exp() > bar
    return torch.where(above, bar, torch.where(above, 0.0, log_ratio).exp())


def clipped(log_ratio: Tensor, bar: float | Tensor) -> Tensor:
    """:func:`clip_ratio`, in two operations where nothing is differentiated."""
    plain = not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or log_ratio.requires_grad
        or (isinstance(bar, Tensor) and bar.requires_grad)
    )
    if not plain:
        return clip_ratio(log_ratio, bar)
    w = log_ratio.exp()
    return torch.minimum(w, bar) if isinstance(bar, Tensor) else w.clamp(max=bar)
