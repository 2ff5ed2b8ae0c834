"""One collected rollout, as rows on the device, and its V-trace under a later policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from vtrace_plugins._core.api import vtrace
from vtrace_plugins.sb3.observations import each, join
from vtrace_plugins.sb3.recorder import Recorder


class End(NamedTuple):
    """What collection left behind after the last step; the last three are known only with an algorithm bound."""

    values: np.ndarray
    """V(s_T) of the policy that collected, ``[N]``."""
    dones: np.ndarray
    """Whether the last step ended an episode, ``[N]``, bool."""
    observations: Any = None
    """s_T, ``[N, ...]``."""
    states: Any = None
    """The recurrent states after the last step."""
    updates: int = 0
    """The algorithm's count of updates."""


@dataclass(eq=False)
class Rollout:
    """``rows`` are ``[N * T, ...]``, environment by environment in order of time; ``[N, T]`` is a view of them."""

    shape: tuple[int, int]
    """(N, T): environments, steps."""
    rows: dict[str, Any]
    """observations (a tensor or a dict of them), actions, values and log_probs of collection, and the host's extras."""
    rewards: np.ndarray
    """``[T, N]``: as callbacks left them; with the host's time-limit bootstraps at steps that were not recorded."""
    untouched: np.ndarray
    """``[T, N]``: where rewards are the environment's own, which no callback edited."""
    ends: np.ndarray
    """``[T, N]``: where an episode ended, either way."""
    recorder: Recorder
    end: End
    evaluated: Any
    """The snapshot of the policy that ``results`` belong to."""
    results: dict[str, Tensor]
    """returns and advantages, ``[N * T]``."""
    log_ratio: Tensor | None = None
    """log pi - log mu, ``[N * T]``, once the policy has moved."""

    def correct(
        self,
        values: Tensor,
        log_pi: Tensor,
        last_value: Tensor,
        terminal_values: Tensor | None,
        options: dict[str, Any],
    ) -> None:
        """From V and log pi of the rows, V(s_T) ``[N]``, and V of the terminal observations in order of (t, n)."""
        device, log_mu = values.device, self.rows["log_probs"]
        ends = torch.as_tensor(self.ends.T, device=device)
        truncated = torch.as_tensor(self.recorder.truncated.T, device=device)
        bootstrap_values = torch.zeros(self.shape, device=device)
        bootstrap_values[:, -1] = last_value
        if terminal_values is not None:
            bootstrap_values.T[truncated.T] = terminal_values
        results = vtrace(
            log_pi.view(self.shape),
            log_mu.view(self.shape),
            values.view(self.shape),
            torch.as_tensor(self.rewards.T, device=device),
            ends & ~truncated,
            truncated,
            bootstrap_values=bootstrap_values,
            **options,
        )
        self.log_ratio = log_pi - log_mu
        self.results = {"returns": results.targets.flatten(), "advantages": results.advantages.flatten()}

    def normalise(self, normaliser: VecNormalize) -> None:
        """Observations and rewards under today's statistics, where the rollout was collected under others'.

        A reward that a callback edited is no longer the environment's, and stays as it is.
        """
        *observations, last = (normaliser.normalize_obs(x) for x in self.recorder.raw_observations)

        def as_rows(x: np.ndarray, rows: Tensor) -> Tensor:
            return torch.as_tensor(x.swapaxes(0, 1), dtype=rows.dtype, device=rows.device).reshape(rows.shape)

        self.rows["observations"] = each(as_rows, join(np.stack, observations), self.rows["observations"])
        self.end = self.end._replace(observations=last)
        self.recorder.terminal = [normaliser.normalize_obs(x) for x in self.recorder.raw_terminal]
        now = np.stack([normaliser.normalize_reward(x) for x in self.recorder.raw_rewards])
        self.rewards = np.where(self.untouched, now, self.rewards).astype(np.float32)
        self.evaluated = None


def pooled(rollouts: list[Rollout]) -> dict[str, Any]:
    """All rollouts' rows under one another; each keeps a view of its own, so that they lie in memory once."""
    if len(rollouts) == 1:
        return dict(rollouts[0].rows)
    pool = {name: join(torch.cat, [r.rows[name] for r in rollouts]) for name in rollouts[0].rows}
    start = 0
    for rollout in rollouts:
        own = slice(start, start + math.prod(rollout.shape))
        rollout.rows = {name: each(lambda x: x[own], rows) for name, rows in pool.items()}  # noqa: B023
        start = own.stop
    return pool
