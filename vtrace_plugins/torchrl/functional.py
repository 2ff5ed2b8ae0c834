"""A drop-in for ``torchrl.objectives.value.functional.vtrace_advantage_estimate``."""

from __future__ import annotations

from torch import Tensor

from vtrace_plugins._core.api import vtrace
from vtrace_plugins._core.checks import FLAG, check_tensor, check_type, lists_its_options, named_as
from vtrace_plugins.torchrl.boundaries import split_done

_NAMES = {
    "values": "state_value",
    "next_values": "next_state_value",
    "rewards": "reward",
    "rho_bar": "rho_thresh",
    "c_bar": "c_thresh",
}


@lists_its_options
def vtrace_advantage_estimate(
    gamma: float | Tensor,
    log_pi: Tensor,
    log_mu: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rho_thresh: float | Tensor = 1.0,
    c_thresh: float | Tensor = 1.0,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """V-trace advantages and value targets, with TorchRL's signature (arXiv:1802.01561, eq. 1 and section 4.2).

    Args:
        gamma: discount: a number in [0, 1], a 0-d tensor or a tensor that broadcasts to the data.
        log_pi: log-probability of the recorded action under the current policy, ``[*B, T, *F]``.
        log_mu: the same under the policy that collected the data.
        state_value: V(x_t), ``[*B, T, *F]``; floating.
        next_state_value: V(x_{t+1}) of the true next state, same shape.
        reward: r_t, same shape.
        done: where an episode ended, same shape; bool, integer or floating.
        terminated: where it ended in a terminal state. If None, every done is one (as upstream).
        rho_thresh: clip of the ratio in the temporal differences and the advantages: a number or a 0-d tensor.
        c_thresh: clip of the ratio in the trace.
        time_dim: dimension of time; upstream's default.

    Returns:
        (advantages, value targets), in upstream's order, with the shape and dtype of ``state_value``.

    Raises:
        VTraceError: for a wrong shape, dtype, device or range. It is a ValueError; upstream raises RuntimeError.
    """
    check_type("state_value", state_value)
    check_tensor("next_state_value", next_state_value, state_value, "floating", of="state_value")
    check_tensor("done", done, state_value, FLAG, of="state_value")
    if terminated is not None:
        check_tensor("terminated", terminated, state_value, FLAG, of="state_value")
    terminated, truncated = split_done(done, terminated, None)
    with named_as(lambda: _NAMES):
        targets, advantages = vtrace(
            log_pi,
            log_mu,
            state_value,
            reward,
            terminated,
            truncated,
            next_values=next_state_value,
            gamma=gamma,
            rho_bar=rho_thresh,
            c_bar=c_thresh,
            time_dim=time_dim,
        )
    return advantages, targets
