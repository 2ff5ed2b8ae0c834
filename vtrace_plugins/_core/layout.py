"""From the caller's dtypes and dimensions to the ones the torch code computes in, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any of the data is float64, else float32 (half precision accumulates in float32)."""
    return torch.float64 if any(x is not None and x.dtype is torch.float64 for x in tensors) else torch.float32


def on_time_first(
    function: Callable[..., tuple[Tensor, Tensor]],
    log_pi: Tensor,
    log_mu: Tensor,
    values: Tensor,
    rewards: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    bootstrap_values: Tensor | None,
    last_value: Tensor | None,
    next_values: Tensor | None,
    mask: Tensor | None,
    gamma: float | Tensor,
    rho_bar: float | Tensor,
    c_bar: float | Tensor,
    pg_rho_bar: float | Tensor,
    lam: float,
    weight_advantages: bool,
    time_dim: int,
) -> tuple[Tensor, Tensor]:
    """Call ``function`` on views with time first, floats in the compute dtype, flags as bool; undo that after."""
    dtype = compute_dtype(log_pi, log_mu, values, rewards, bootstrap_values, last_value, next_values)

    def number(x: Tensor) -> Tensor:
        return x.movedim(time_dim, 0).to(dtype)

    def flag(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.movedim(time_dim, 0) != 0

    results = function(
        number(log_pi),
        number(log_mu),
        number(values),
        number(rewards),
        flag(terminated),
        flag(truncated),
        None if bootstrap_values is None else number(bootstrap_values),
        None if last_value is None else last_value.to(dtype),
        None if next_values is None else number(next_values),
        flag(mask),
        number(gamma) if isinstance(gamma, Tensor) else gamma,
        *(x.to(dtype) if isinstance(x, Tensor) else x for x in (rho_bar, c_bar, pg_rho_bar)),
        lam,
        weight_advantages,
    )
    targets, advantages = (x.to(values.dtype).movedim(0, time_dim) for x in results)
    return targets, advantages
