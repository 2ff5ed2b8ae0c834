"""The specification: V-trace as one readable loop over time.

Everything else in the package (vectorised torch, the Triton kernel) is tested against this file, and this file against
an independent float64 loop in ``tests/oracle.py``. Where they disagree, read this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vtrace_plugins._core.clipping import clip_ratio
from vtrace_plugins._core.inputs import Inputs


def vtrace_reference(x: Inputs) -> tuple[Tensor, Tensor]:
    """Targets and advantages of inputs that :func:`~vtrace_plugins._core.layout.on_time_first` has prepared.

    Every tensor is ``[T, ...]`` (``last_value`` is ``[...]``, clips are 0-d), floats share one dtype, flags are bool.
    """
    T = x.values.shape[0]
    nothing = torch.zeros_like(x.values[0])
    no = torch.zeros_like(x.terminated[0])

    targets, advantages = [], []
    delta_next, target_next, real_next = nothing, nothing, no  # of step t + 1; there is none after the last step
    for t in reversed(range(T)):
        real = ~no if x.mask is None else x.mask[t]
        term = x.terminated[t] & real
        trunc = no if x.truncated is None else x.truncated[t] & real & ~term
        end = ~real_next
        cut = term | trunc | end

        # A masked-out step is never read.
        reward = torch.where(real, x.rewards[t], 0.0)
        value = torch.where(real, x.values[t], 0.0)
        log_ratio = torch.where(real, x.log_pi[t] - x.log_mu[t], 0.0)
        gamma = torch.where(real, x.gamma[t], 0.0) if isinstance(x.gamma, Tensor) else x.gamma

        rho = clip_ratio(log_ratio, x.rho_bar)
        c = x.lam * clip_ratio(log_ratio, x.c_bar)

        # What the episode is worth from the next state on: selected, so that an unread entry may be NaN.
        following = nothing if t == T - 1 else x.values[t + 1]
        if x.next_values is not None:
            next_value = x.next_values[t]
        elif x.bootstrap_values is not None:
            next_value = torch.where(trunc | end, x.bootstrap_values[t], following)
        else:
            assert x.last_value is not None
            next_value = torch.where(end, x.last_value, following)
        next_value = torch.where(term | ~real, 0.0, next_value)

        # IMPALA eq. 1, as its recursion (remark 1): Delta_t = v_t - V_t; a cut step starts from its own alpha.
        alpha = rho * (reward + gamma * next_value - value)
        beta = torch.where(cut, 0.0, gamma * c)
        delta = alpha + beta * torch.where(cut, 0.0, delta_next)
        target = value + delta

        # IMPALA section 4.2: the policy gradient's advantage, from the target of the next state.
        mixed = target_next if x.lam == 1 else next_value + x.lam * (target_next - next_value)
        advantage = reward + gamma * torch.where(cut, next_value, mixed) - value
        if x.weight_advantages:
            advantage = clip_ratio(log_ratio, x.pg_rho_bar) * advantage

        targets.append(torch.where(real, target, 0.0))
        advantages.append(torch.where(real, advantage, 0.0))
        delta_next, target_next, real_next = delta, target, real

    return torch.stack(targets[::-1]), torch.stack(advantages[::-1])
