"""V-trace with every ratio 1, in NumPy: the rollout lies in host memory, and at these sizes NumPy's calls are cheapest.

Same arithmetic as SB3's own loop, step by step, and so the same bits; a scan only where that loop would be long and its
rows few. (Training amplifies a difference of one rounding.)
"""

from __future__ import annotations

import numpy as np

_FEW_ENVS, _MANY_STEPS = 64, 512  # where the calls of a loop over time cost more than the work of a scan


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    episode_starts: np.ndarray,
    last_values: np.ndarray,
    dones: np.ndarray,
    gamma: float,
    lam: float,
) -> np.ndarray:
    """GAE(lam) advantages ``[T, N]``, float32 (arXiv:1506.02438, eq. 16), of what SB3's RolloutBuffer holds."""
    goes_on = np.empty_like(values)
    np.subtract(1.0, episode_starts[1:], out=goes_on[:-1])
    np.subtract(1.0, dones.astype(np.float32), out=goes_on[-1])

    delta = np.empty_like(values)  # becomes the advantages
    np.multiply(values[1:], gamma, out=delta[:-1])
    np.multiply(last_values, gamma, out=delta[-1])
    delta *= goes_on
    delta += rewards
    delta -= values
    goes_on *= gamma * lam
    steps, n_envs = values.shape
    if n_envs > _FEW_ENVS or steps <= _MANY_STEPS:
        later = np.empty_like(delta[0])
        for t in range(steps - 2, -1, -1):
            np.multiply(goes_on[t], delta[t + 1], out=later)
            delta[t] += later
        return delta
    span = 1  # how many steps of the future each element has taken in
    while span < steps:
        delta[:-span] += goes_on[:-span] * delta[span:]
        goes_on[:-span] *= goes_on[span:]
        span *= 2
    return delta
