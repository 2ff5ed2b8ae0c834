"""V-trace twice more, in float64 NumPy and apart from the package: a scalar loop, and the paper's own sum."""

import math

import numpy as np


def _steps(log_pi, log_mu, gamma, rho_bar, c_bar, pg_rho_bar, lam):
    with np.errstate(over="ignore", invalid="ignore"):
        w = np.exp(log_pi - log_mu)
    clip = lambda bar: np.where(w > bar, bar, w)  # noqa: E731
    return (
        np.broadcast_to(gamma, w.shape),
        clip(rho_bar),
        lam * clip(c_bar),
        clip(rho_bar if pg_rho_bar is None else pg_rho_bar),
    )


def _cuts(row, t, terminated, truncated, mask):
    """(terminated, cut) at step t of a row."""
    T = terminated.shape[1]
    last = t == T - 1 or (mask is not None and not mask[row, t + 1])
    term = bool(terminated[row, t])
    return term, term or last or (truncated is not None and bool(truncated[row, t]))


def _after(row, t, term, cut, values, bootstrap_values, last_value, next_values):
    """The value of the state after step t."""
    if term:
        return 0.0
    if next_values is not None:
        return next_values[row, t]
    if not cut:
        return values[row, t + 1]
    return bootstrap_values[row, t] if bootstrap_values is not None else last_value[row]


def loop(
    log_pi, log_mu, values, rewards, terminated, truncated=None, *, bootstrap_values=None, last_value=None,
    next_values=None, mask=None, gamma, rho_bar=1.0, c_bar=1.0, pg_rho_bar=None, lam=1.0, weight_advantages=True,
):  # fmt: skip
    """Scalar backward loop over arrays [rows, T]."""
    gamma, rho, c, pg = _steps(log_pi, log_mu, gamma, rho_bar, c_bar, pg_rho_bar, lam)
    targets, advantages = np.zeros(values.shape), np.zeros(values.shape)
    with np.errstate(all="ignore"):
        for row in range(values.shape[0]):
            target_after = correction_after = math.nan
            for t in range(values.shape[1] - 1, -1, -1):
                if mask is not None and not mask[row, t]:
                    continue
                term, cut = _cuts(row, t, terminated, truncated, mask)
                after = _after(row, t, term, cut, values, bootstrap_values, last_value, next_values)
                V, r, g = values[row, t], rewards[row, t], gamma[row, t]
                correction = rho[row, t] * (r + (0.0 if term else g * after) - V)
                backup = after
                if not cut:
                    correction += g * c[row, t] * correction_after
                    backup = target_after if lam == 1 else (1 - lam) * after + lam * target_after
                targets[row, t] = V + correction
                advantage = r + (0.0 if term else g * backup) - V
                advantages[row, t] = pg[row, t] * advantage if weight_advantages else advantage
                target_after, correction_after = targets[row, t], correction
    return targets, advantages


def quadratic(
    log_pi, log_mu, values, rewards, terminated, truncated=None, *, bootstrap_values=None, last_value=None,
    next_values=None, gamma, rho_bar=1.0, c_bar=1.0, lam=1.0,
):  # fmt: skip
    """IMPALA eq. 1 as it is written: v_t = V_t + sum_k (prod_{j<k} gamma_j c_j) delta_k. Targets only."""
    gamma, rho, c, _ = _steps(log_pi, log_mu, gamma, rho_bar, c_bar, None, lam)
    targets = np.array(values, dtype=np.float64)
    for row in range(values.shape[0]):
        for start in range(values.shape[1]):
            weight = 1.0
            for k in range(start, values.shape[1]):
                term, cut = _cuts(row, k, terminated, truncated, None)
                after = _after(row, k, term, cut, values, bootstrap_values, last_value, next_values)
                delta = rho[row, k] * (rewards[row, k] + gamma[row, k] * after - values[row, k])
                targets[row, start] += weight * delta
                if cut:
                    break
                weight *= gamma[row, k] * c[row, k]
    return targets
