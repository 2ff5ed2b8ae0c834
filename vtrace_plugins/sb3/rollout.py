"""One collected rollout, as rows on the device, with what a refresh under a later policy needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from vtrace_plugins.sb3.observations import each, join
from vtrace_plugins.sb3.recorder import Recorder


@dataclass(eq=False)
class Rollout:
    """``rows`` are ``[N * T, ...]``, environment by environment in order of time; ``[N, T]`` is a view of them."""

    shape: tuple[int, int]
    """(N, T): environments, steps."""
    rows: dict[str, Any]
    """observations (a tensor or a dict of them), actions, values and log_probs of collection, and the host's extras."""
    rewards: np.ndarray
    """``[T, N]``: as the environment gave them, or with the host's time-limit bootstraps where nothing was recorded."""
    ends: np.ndarray
    """``[T, N]``: where an episode ended, either way."""
    recorder: Recorder
    last_observations: Any
    """s_T, ``[N, ...]``."""
    last_dones: np.ndarray | None
    last_states: Any
    """The recurrent states after the last step, or None."""
    collected_at: int
    """The algorithm's count of updates when the rollout was complete."""
    evaluated: Any
    """The fingerprint of the policy that ``results`` belong to."""
    results: dict[str, Tensor] = field(default_factory=dict)
    """returns and advantages, ``[N * T]``."""
    log_ratio: Tensor | None = None
    """log pi - log mu, ``[N * T]``, once the policy has moved."""

    def normalise(self, normaliser: VecNormalize) -> None:
        """Observations and rewards under today's statistics, where the rollout was collected under others'."""
        *observations, last = (normaliser.normalize_obs(x) for x in self.recorder.raw_observations)

        def as_rows(x: np.ndarray, rows: Tensor) -> Tensor:
            return torch.as_tensor(x.swapaxes(0, 1), dtype=rows.dtype, device=rows.device).reshape(rows.shape)

        self.rows["observations"] = each(as_rows, join(np.stack, observations), self.rows["observations"])
        self.last_observations = last
        self.recorder.terminal = [normaliser.normalize_obs(x) for x in self.recorder.raw_terminal]
        self.rewards = np.stack([normaliser.normalize_reward(x) for x in self.recorder.raw_rewards]).astype(np.float32)
