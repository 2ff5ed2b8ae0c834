"""The specification: V-trace as one readable loop over time.

Everything else in the package (vectorised torch, the Triton kernel) is tested against this file, and this file against
an independent float64 loop in ``tests/oracle.py``. Where they disagree, read this one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clip_ratio(log_ratio: Tensor, bar: float | Tensor) -> Tensor:
    """``min(bar, exp(log_ratio))``, NaN kept; its gradient is w up to and at the bar, exactly 0 above it.

    The gradient is selected, not multiplied: exp sees 0 where the clip answers, so an overflowing exp (w = inf) does
    not turn the zero into ``0 * inf = NaN``.
    """
    above = log_ratio.detach().exp() > bar
    return torch.where(above, bar, torch.where(above, 0.0, log_ratio).exp())


def vtrace_reference(
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
) -> tuple[Tensor, Tensor]:
    """Targets and advantages of windows that are time-first: every tensor is ``[T, ...]``, ``last_value`` is ``[...]``.

    Floating tensors have the compute dtype, flags are bool. ``gamma`` is a number, a 0-d tensor or ``[T, ...]``.
    """
    T = values.shape[0]
    nothing = torch.zeros_like(values[0])
    no = torch.zeros_like(terminated[0])

    targets, advantages = [], []
    delta_next, target_next, real_next = nothing, nothing, no  # of step t + 1; there is none after the last step
    for t in reversed(range(T)):
        real = ~no if mask is None else mask[t]
        term = terminated[t] & real
        trunc = no if truncated is None else truncated[t] & real & ~term
        end = ~real_next
        cut = term | trunc | end

        def read(x: Tensor, real: Tensor = real, t: int = t) -> Tensor:
            return torch.where(real, x[t], 0.0)  # a masked-out step is never read

        reward, value = read(rewards), read(values)
        log_ratio = torch.where(real, log_pi[t] - log_mu[t], 0.0)
        discount = read(gamma) if isinstance(gamma, Tensor) and gamma.ndim > 0 else gamma

        rho = clip_ratio(log_ratio, rho_bar)
        c = lam * clip_ratio(log_ratio, c_bar)

        # What the episode is worth from the next state on: selected, so that an unread entry may be NaN.
        following = nothing if t == T - 1 else values[t + 1]
        if next_values is not None:
            next_value = next_values[t]
        elif bootstrap_values is not None:
            next_value = torch.where(trunc | end, bootstrap_values[t], following)
        else:
            assert last_value is not None
            next_value = torch.where(end, last_value, following)
        next_value = torch.where(term | ~real, 0.0, next_value)

        # IMPALA eq. 1, as its recursion (remark 1): Delta_t = v_t - V_t; a cut step starts from its own alpha.
        alpha = rho * (reward + discount * next_value - value)
        beta = torch.where(cut, 0.0, discount * c)
        delta = alpha + beta * torch.where(cut, 0.0, delta_next)
        target = value + delta

        # IMPALA section 4.2: the policy gradient's advantage, from the target of the next state.
        mixed = target_next if lam == 1 else next_value + lam * (target_next - next_value)
        advantage = reward + discount * torch.where(cut, next_value, mixed) - value
        if weight_advantages:
            advantage = clip_ratio(log_ratio, pg_rho_bar) * advantage

        targets.append(torch.where(real, target, 0.0))
        advantages.append(torch.where(real, advantage, 0.0))
        delta_next, target_next, real_next = delta, target, real

    return torch.stack(targets[::-1]), torch.stack(advantages[::-1])
