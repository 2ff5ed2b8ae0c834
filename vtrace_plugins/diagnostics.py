"""How far behind the data is: what the importance ratios are, and what V-trace's clips leave of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vtrace_plugins._core.checks import (
    FLAG,
    VTraceError,
    check_broadcasts,
    check_device,
    check_dtype,
    check_number,
    check_tensor,
    check_time_dim,
    check_type,
    lists_its_options,
)
from vtrace_plugins._core.clipping import as_tensor, clipped
from vtrace_plugins._core.torch_scan import LinearScan

_ROUNDING = 1e-5  # a ratio of 1 that rounding put above a clip of 1 is not clipped


class Importance(NamedTuple):
    """What :func:`importance` returns: 0-d tensors, or ``[lags]`` with NaN for a lag that no step has."""

    ratio: Tensor
    """Mean of w = pi / mu. Its expectation is 1 at any lag; far from it, the estimates are poor."""
    rho_clipped: Tensor
    """Share of steps whose w is above rho_bar."""
    c_clipped: Tensor
    """Share of steps whose w is above c_bar."""
    ess: Tensor
    """Effective sample size, (sum w)^2 / (n sum w^2): 1 on-policy, 1/n if one step has all the weight. Computed from
    log-ratios, so that w may overflow; NaN where a log-ratio is, or every w is 0."""
    kl: Tensor
    """Estimate of KL(mu || pi), the mean of w - 1 - log w (Schulman's k3): never negative."""
    trace_length: Tensor
    """Mean of 1 + c_t + c_t c_{t+1} + ..., c = lam min(c_bar, w), up to the episode's end: how many temporal
    differences reach a target (undiscounted)."""

    def scalars(self, prefix: str = "vtrace") -> dict[str, float]:
        """The 0-d tensors as numbers under ``prefix/...``, for a logger; waits for a GPU once."""
        return {f"{prefix}/{name}": x for name, x in zip(self._fields, torch.stack(tuple(self)).tolist(), strict=True)}


def _check_lags(lag: Any, lags: Any, log_pi: Tensor) -> None:
    if isinstance(lags, bool) or not isinstance(lags, int) or lags < 1:
        raise VTraceError("lags", "how many lags to report, 1 or more", repr(lags))
    check_type("lag", lag)
    check_broadcasts("lag", lag, log_pi.shape)
    check_dtype("lag", lag, "integer")
    check_device("lag", lag, log_pi.device, of="log_pi")


def _over_the_largest(log_ratio: Tensor, real: Tensor, bins: Tensor | None, lags: int | None) -> Tensor:
    """Each w over the largest real one of its bin: squares of these do not overflow, and a scale is all they lack."""
    x = torch.where(real, log_ratio, -torch.inf)
    if bins is None or lags is None:
        largest = x.max()
    else:
        largest = x.new_full((lags,), -torch.inf).scatter_reduce(0, bins, x, "amax")[bins]
    return torch.where(x == torch.inf, 0.0, x - largest).exp()


@lists_its_options
def importance(
    log_pi: Tensor,
    log_mu: Tensor,
    *,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    mask: Tensor | None = None,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    lam: float = 1.0,
    time_dim: int = -1,
    lag: Tensor | None = None,
    lags: int | None = None,
) -> Importance:
    r"""Statistics of the importance ratios :math:`w_t = \pi(a_t|x_t) / \mu(a_t|x_t)` of a batch, or of each lag in it.

    Nothing here waits for a GPU; reading a result does. No gradients.

    Args:
        log_pi: log-probability of the recorded action under the policy being trained, ``[*B, T, *F]``; floating.
        log_mu: the same under the policy that collected the data.
        terminated: where an episode ended, same shape, any dtype; it ends the trace. Without it (and ``truncated``),
            only the window does.
        truncated: where it was cut short; likewise.
        mask: True where the step is real; padding is left out.
        rho_bar: clip of the ratio in the temporal differences.
        c_bar: clip of the ratio in the trace.
        lam: lambda, the trace's other factor.
        time_dim: dimension of time.
        lag: how many updates each step is behind, ``[*B, T, *F]`` or a shape that broadcasts to it; integer.
        lags: how many lags to report, 0 to lags - 1; larger ones count as the last. Needed beside ``lag``.

    Returns:
        ``Importance(ratio, rho_clipped, c_clipped, ess, kl, trace_length)``.

    Raises:
        VTraceError: for a shape, dtype, device or number that is none of these.

    Example:
        >>> import torch
        >>> log_mu = torch.zeros(1, 2)
        >>> importance(torch.tensor([0.5, 2.0]).log()[None], log_mu).rho_clipped
        tensor(0.5000)
    """
    check_type("log_pi", log_pi)
    check_dtype("log_pi", log_pi, "floating")
    check_tensor("log_mu", log_mu, log_pi, "floating", of="log_pi")
    for name, x in (("terminated", terminated), ("truncated", truncated), ("mask", mask)):
        if x is not None:
            check_tensor(name, x, log_pi, FLAG, of="log_pi")
    check_number("rho_bar", rho_bar, float("inf"))
    check_number("c_bar", c_bar, float("inf"))
    check_number("lam", lam, 1.0)
    if (lag is None) != (lags is None):
        raise VTraceError("lags", "lag and lags together", "one of them")
    if lag is not None:
        _check_lags(lag, lags, log_pi)
    time_dim = check_time_dim(time_dim, log_pi.ndim)
    if log_pi.numel() == 0:
        return Importance(*(log_pi.new_full(() if lags is None else (lags,), torch.nan) for _ in Importance._fields))

    with torch.no_grad():
        dtype = torch.promote_types(log_pi.dtype, torch.float32)
        real = torch.ones_like(log_pi, dtype=torch.bool) if mask is None else mask != 0
        log_ratio = torch.where(real, log_pi.to(dtype) - log_mu.to(dtype), 0.0)
        w = log_ratio.exp()
        rho_limit, c_limit = (as_tensor(bar, w) for bar in (rho_bar, c_bar))

        cut = ~real
        for ends in (terminated, truncated):
            cut = cut if ends is None else cut | (ends != 0)
        cut, c, present = (x.movedim(time_dim, 0) for x in (cut, lam * clipped(log_ratio, c_limit), real))
        cut = cut | ~torch.cat([present[1:], torch.zeros_like(present[:1])])
        trace = LinearScan.apply(torch.ones_like(c), c, cut).movedim(0, time_dim)

        bins = None if lag is None or lags is None else lag.expand(w.shape).flatten().clamp(0, lags - 1).long()
        scaled = _over_the_largest(log_ratio.flatten(), real.flatten(), bins, lags).view(w.shape)
        # expm1, where w - 1 would round; and 0 where that still rounds below
        k3 = torch.where(log_ratio == torch.inf, torch.inf, (torch.expm1(log_ratio) - log_ratio).clamp_min(0.0))
        columns = (
            torch.ones_like(w),
            w,
            scaled,
            scaled.square(),
            w > rho_limit * (1 + _ROUNDING),
            w > c_limit * (1 + _ROUNDING),
            k3,
            trace,
        )
        table = torch.stack([torch.where(real, x, 0.0).flatten() for x in columns])
        if bins is None or lags is None:
            sums = table.sum(1)
        else:
            # In sequence, float32 would stop counting at 2^24.
            precise = table if table.device.type == "mps" else table.double()
            sums = precise.new_zeros(len(columns), lags).index_add_(1, bins, precise)
        count, ratio, weights, squares, rho, c_, kl, length = sums
        means = ratio / count, rho / count, c_ / count, weights.square() / (count * squares), kl / count, length / count
        return Importance(*(x.to(dtype) for x in means))
