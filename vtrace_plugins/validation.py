"""An opt-in look at the data itself, for mistakes that have the right shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vtrace_plugins._core.api import resolve
from vtrace_plugins._core.checks import VTraceError, check_backend, check_inputs, lists_its_options
from vtrace_plugins._core.inputs import Inputs
from vtrace_plugins._findings import Data, Finding, findings

__all__ = ["Finding", "Report", "validate"]


class Report(NamedTuple):
    """What :func:`validate` found; true if there is no error and no warning in it."""

    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return all(finding.severity == "note" for finding in self.findings)

    def __str__(self) -> str:
        if not self.findings:
            return "nothing suspicious"
        return "\n".join(f"{found.severity}: {found.argument}: {found.message}" for found in self.findings)


@lists_its_options
def validate(
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
) -> Report:
    """Look for likely mistakes in the data of a :func:`vtrace_plugins.vtrace` call; takes the same arguments.

    Reads the data, so it waits for the GPU: for a first batch, or a test, and not for a training loop. A finding is an
    error (certainly a mistake), a warning (likely one) or a note (worth knowing; right data may have it).

    ============================  =========  ===========================================================================
    about                         severity   what is found
    ============================  =========  ===========================================================================
    any floating argument         error      NaN or inf where it is read
    gamma and the three clips     error      tensors out of range, which the call itself does not read
    log_pi                        note       -inf: the policy now gives a recorded action no probability
    log_pi, log_mu                warning    all lie between 0 and 1 (probabilities?); far apart (other actions?)
    terminated, truncated         error      set one step late, by ``next_values``: as ``dones[t]`` that means "done
                                             before step t" (CleanRL, SB3's ``episode_starts``)
    terminated, truncated         warning    set one step late, where rewards or values show it (often they do not);
                                             set at most steps (inverted?); only ever at step 0 of the window
    truncated                     note       set beside terminated: the step counts as terminated
    mask                          warning    a hole: real steps after padding, where the step before the padding ended
                                             no episode
    rewards                       warning    climb for 8 steps and fall back at once where no episode ends (a boundary
                                             missing?)
    next_values                   error      equal to ``values`` (not shifted); those of other steps (windows shuffled
                                             in time, or another time dimension)
    next_values                   warning    behind truncated steps, equal to the next value (V of the state after the
                                             reset?)
    bootstrap_values              warning    0 at the steps where it is used, and nonzero beside them (one step off?)
    bootstrap_values              note       nonzero where it is ignored
    time_dim                      warning    values jump to and fro along time and change little along another dimension
                                             (axes swapped?)
    ============================  =========  ===========================================================================

    Returns:
        A ``Report``: true if it has no error and no warning, and readable as a string.

    Raises:
        VTraceError: for what :func:`vtrace_plugins.vtrace` itself refuses.

    Example:
        >>> import torch
        >>> p = torch.tensor([[0.5, 0.4, 0.6]])
        >>> print(validate(p, p.log(), p, p, p > 1, last_value=p[:, 0], gamma=0.9))
        warning: log_pi: all are in [0, 1]: log-probabilities wanted, these look like probabilities
    """
    check_backend(backend)
    given = Inputs(
        log_pi, log_mu, values, rewards, terminated, truncated, bootstrap_values, last_value, next_values, mask,
        gamma, rho_bar, c_bar, rho_bar if pg_rho_bar is None else pg_rho_bar, lam, weight_advantages, time_dim,
    )  # fmt: skip
    x = check_inputs(given)
    resolve(backend, x.values.device)
    if x.values.is_meta:
        raise VTraceError("values", "data to look at", "meta tensors, which have none")
    if x.values.numel() == 0:
        return Report(())
    with torch.no_grad():
        return Report(tuple(findings(Data(x))))
