"""The public function: check, choose a backend, dispatch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from vtrace_plugins._core.checks import VTraceError, check_backend, check_inputs, lists_its_options
from vtrace_plugins._core.inputs import Inputs
from vtrace_plugins._core.layout import on_time_first
from vtrace_plugins._core.ops import known_launch, vtrace_triton
from vtrace_plugins._core.reference import vtrace_reference
from vtrace_plugins._core.torch_scan import vtrace_torch


class VTraceReturns(NamedTuple):
    """What :func:`vtrace` returns; both have the shape and dtype of ``values``."""

    targets: Tensor
    """v_t, the corrected value targets (IMPALA eq. 1)."""
    advantages: Tensor
    """The policy gradient's advantages (IMPALA section 4.2)."""


@lists_its_options
def vtrace(
    log_pi: Tensor,
    log_mu: Tensor,
    values: Tensor,
    rewards: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    bootstrap_values: Tensor | None = None,
    last_value: Tensor | None = None,
    next_values: Tensor | None = None,
    mask: Tensor | None = None,
    gamma: float | Tensor,
    rho_bar: float | Tensor = 1.0,
    c_bar: float | Tensor = 1.0,
    pg_rho_bar: float | Tensor | None = None,
    lam: float = 1.0,
    weight_advantages: bool = True,
    time_dim: int = -1,
    backend: str = "auto",
) -> VTraceReturns:
    r"""V-trace targets and advantages of windows of experience (Espeholt et al. 2018, arXiv:1802.01561).

    With importance ratios :math:`w_t = \pi(a_t|x_t) / \mu(a_t|x_t)`, :math:`\rho_t = \min(\bar\rho, w_t)` and
    :math:`c_t = \lambda \min(\bar c, w_t)` (IMPALA eq. 1 and remark 2)

    .. math::
        v_t = V_t + \rho_t (r_t + \gamma_t V_{t+1} - V_t) + \gamma_t c_t (v_{t+1} - V_{t+1}), \qquad
        A_t = \min(\bar\rho_{pg}, w_t) (r_t + \gamma_t v'_{t+1} - V_t)

    where :math:`v'_{t+1} = V_{t+1} + \lambda (v_{t+1} - V_{t+1})`, which is :math:`v_{t+1}` at :math:`\lambda = 1`.

    ``V_{t+1}`` is 0 after a terminated step, and the continuation value at a truncated step, at the end of the window
    and before padding; in all four places the trace is cut, so nothing behind them (NaN and inf included) counts.

    All tensors are on one device and have the shape of ``values``, ``[*B, T, *F]`` with time at ``time_dim``
    (``[num_envs, seq_len]`` in the plainest case); nothing broadcasts but ``gamma``, and ``last_value`` has no time.
    Floating means float16, bfloat16, float32 or float64; dtypes may be mixed.

    Args:
        log_pi: log-probability of the recorded action under the policy being trained; floating.
        log_mu: the same under the policy that collected the data.
        values: V(x_t) of the current value function; floating, as are all values below.
        rewards: r_t; floating or integer.
        terminated: where the episode ended in a terminal state after step t. bool, or any integer or floating dtype
            (non-zero is true).
        truncated: where it was cut short without one. A step that is both counts as terminated.
        bootstrap_values: V of the state that follows a truncated step, and of the one that follows the window at
            t = T-1; ignored everywhere else, whatever it holds.
        last_value: V(x_T) alone, without the time dimension: the short form of ``bootstrap_values`` for windows
            without interior truncation, so neither ``truncated`` nor ``mask`` may stand beside it.
        next_values: V of the state that follows each step; used at every step that is not terminated. For data
            where that is not ``values[t+1]``. Exactly one of these three must be given.
        mask: True where the step is real. Padding contributes nothing, whatever it holds, and gets 0 in both results;
            the step before it counts as the end of a window. So does the step before a hole: no credit crosses it. To
            let an episode go on behind steps that are not the policy's own (another player's turn, tokens of a tool),
            leave those out of the row. :func:`vtrace_plugins.validate` finds holes. Same dtypes as ``terminated``.
        gamma: discount in [0, 1]: a number, a 0-d tensor, or a floating or integer tensor that broadcasts to the data's
            shape (multi-step data: ``gamma ** steps_to_next_obs``). Only numbers are range-checked, here and in the
            clips: reading a tensor would wait for the GPU, so one out of range gives undefined results.
        rho_bar: clip of the ratio in the temporal differences, at least 0; a number (inf allowed) or a 0-d tensor.
        c_bar: clip of the ratio in the trace.
        pg_rho_bar: clip of the ratio in the advantages; ``rho_bar`` if None.
        lam: lambda in [0, 1], a number. On-policy, with ``next_values`` absent, the advantage is GAE(lam).
        weight_advantages: False leaves out ``min(pg_rho_bar, w_t)``, for losses that multiply by the ratio
            themselves (PPO, TRPO).
        time_dim: dimension of time. The default is the last one: pass 1 for ``[B, T, 1]``, 0 for ``[T, N]``.
        backend: ``"auto"``, ``"triton"``, ``"torch"`` or ``"reference"`` (a slow, readable loop).
            ``"auto"`` is decided by device alone:

            ==============================  =========
            tensors on                      backend
            ==============================  =========
            CUDA (or ROCm), with triton     triton
            CUDA, triton not installed      torch
            anything else                   torch
            ==============================  =========

            The others mean that one, or an error that says why not.

    Returns:
        ``VTraceReturns(targets, advantages)``, each with the shape and dtype of ``values``. The computation is in
        float64 if any of log_pi, log_mu, values, rewards or the continuation is, else in float32; gamma and the clips
        follow. Gradients reach every floating input but the flags; pass detached tensors (V-trace users mostly do) and
        nothing is kept for them. Where something is, inputs and targets must not be edited in place before the
        backward: the triton backend has saved them (torch raises if they are).

    Raises:
        VTraceError: (a ValueError) for a wrong shape, dtype, device, range or combination of arguments, and (a
            TypeError, too) for an unknown option; the message lists the valid ones.

    Example:
        >>> import torch
        >>> from vtrace_plugins import vtrace
        >>> log_prob = torch.full((1, 3), -0.7)
        >>> targets, advantages = vtrace(
        ...     log_prob, log_prob, values=torch.tensor([[1.0, 2.0, 3.0]]), rewards=torch.ones(1, 3),
        ...     terminated=torch.zeros(1, 3, dtype=torch.bool), last_value=torch.tensor([10.0]), gamma=0.9)
        >>> targets
        tensor([[10.0000, 10.0000, 10.0000]])
    """
    given = Inputs(
        log_pi=log_pi,
        log_mu=log_mu,
        values=values,
        rewards=rewards,
        terminated=terminated,
        truncated=truncated,
        bootstrap_values=bootstrap_values,
        last_value=last_value,
        next_values=next_values,
        mask=mask,
        gamma=gamma,
        rho_bar=rho_bar,
        c_bar=c_bar,
        pg_rho_bar=rho_bar if pg_rho_bar is None else pg_rho_bar,
        lam=lam,
        weight_advantages=weight_advantages,
        time_dim=time_dim,
    )
    known: tuple[Hashable, ...] | None = None
    if backend == "triton" or (backend == "auto" and isinstance(values, Tensor) and values.is_cuda):
        known, launch = known_launch(given)
        if launch is not None:  # a call like this one has passed the checks
            return VTraceReturns(*launch(given))

    check_backend(backend)
    inputs = check_inputs(given)
    backend = resolve(backend, values.device)
    if values.numel() == 0:
        return VTraceReturns(_nothing(inputs), _nothing(inputs))
    if backend == "triton":
        return VTraceReturns(*vtrace_triton(inputs, given, known))
    return VTraceReturns(*on_time_first(vtrace_torch if backend == "torch" else vtrace_reference, inputs))


def _nothing(x: Inputs) -> Tensor:
    """The result of no data. It still depends on what asks for a gradient, so that a loss's backward passes."""
    result = torch.empty_like(x.values)
    for t in x:
        if isinstance(t, Tensor) and t.requires_grad:
            result = result + t.sum().to(result.dtype)
    return result


def resolve(backend: str, device: torch.device) -> str:
    """The backend that ``backend`` means for tensors on ``device``: the table in :func:`vtrace`."""
    if backend == "auto":
        return "triton" if device.type == "cuda" and why_no_triton() is None else "torch"
    if backend == "triton":
        missing = why_no_triton()
        if missing is not None:
            raise VTraceError("backend", "triton to be installed for 'triton'", missing)
        if device.type != "cuda" and not (device.type == "cpu" and _interpreted()):
            raise VTraceError(
                "backend",
                "tensors on a CUDA device for 'triton' (on CPU it runs only in triton's interpreter: set "
                "TRITON_INTERPRET=1 before Python starts)",
                str(device),
            )
    return backend


def why_no_triton() -> str | None:
    """None if triton can be imported, else the reason."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def _interpreted() -> bool:
    from vtrace_plugins._core.launch import INTERPRETED

    return INTERPRETED
