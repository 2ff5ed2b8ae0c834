"""The arguments of V-trace, as every backend takes them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

FLAGS = ("terminated", "truncated", "mask")
CONTINUATIONS = ("bootstrap_values", "last_value", "next_values")  # exactly one is given
CLIPS = ("rho_bar", "c_bar", "pg_rho_bar")


class Inputs(NamedTuple):
    """What :func:`~vtrace_plugins.vtrace` was given, checked: see there for shapes and meanings.

    ``gamma`` is a number or has the data's shape; each clip is a number or a 0-d tensor.
    """

    log_pi: Tensor
    log_mu: Tensor
    values: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor | None
    bootstrap_values: Tensor | None
    last_value: Tensor | None
    next_values: Tensor | None
    mask: Tensor | None
    gamma: float | Tensor
    rho_bar: float | Tensor
    c_bar: float | Tensor
    pg_rho_bar: float | Tensor
    lam: float
    weight_advantages: bool
    time_dim: int

    @property
    def continuation(self) -> str:
        """The name of the continuation that was given."""
        return next(name for name in CONTINUATIONS if getattr(self, name) is not None)
