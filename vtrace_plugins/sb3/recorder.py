"""What the host folds or forgets, kept apart: raw rewards, truncations, and the observations they cut off."""

from __future__ import annotations

from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecNormalize

from vtrace_plugins.sb3.observations import each


class Recorder:
    """One rollout's rewards ``[T, N]`` and truncations ``[T, N]``, and the observations at them in order of (t, env).

    Under a VecNormalize, replay needs observations and rewards as they were before it, too: hand it over as
    ``normaliser``.
    """

    def __init__(self, steps: int, n_envs: int) -> None:
        self.rewards = np.zeros((steps, n_envs), dtype=np.float32)
        self.truncated = np.zeros((steps, n_envs), dtype=bool)
        self.terminal: list[Any] = []
        self.raw_observations: list[Any] = []  # of s_0 to s_T
        self.raw_rewards: list[np.ndarray] = []
        self.raw_terminal: list[Any] = []
        self._recorded = np.zeros(steps, dtype=bool)

    @property
    def complete(self) -> bool:
        """Whether every step of the rollout was recorded."""
        return bool(self._recorded.all())

    @property
    def has_raw(self) -> bool:
        return self.complete and len(self.raw_observations) == len(self._recorded) + 1

    def start(self, normaliser: VecNormalize | None) -> None:
        """Before the rollout's first step."""
        if normaliser is not None and not self.raw_observations:
            self.raw_observations.append(each(np.copy, normaliser.get_original_obs()))

    def record(
        self,
        step: int,
        rewards: np.ndarray,
        dones: np.ndarray,
        infos: list[dict[str, Any]],
        normaliser: VecNormalize | None = None,
    ) -> None:
        """The step's rewards (copied: the host edits them in place afterwards), and what its infos say of the ends."""
        if self._recorded[step]:  # by a second callback
            return
        self.rewards[step] = rewards
        for i, (done, info) in enumerate(zip(dones, infos, strict=True)):
            observation = info.get("terminal_observation")
            # the host's own condition: without the flag, or the observation, there is no bootstrap
            if done and observation is not None and info.get("TimeLimit.truncated", False):
                self.truncated[step, i] = True
                self.terminal.append(observation)
                if normaliser is not None:
                    self.raw_terminal.append(normaliser.unnormalize_obs(observation))
        if normaliser is not None:
            self.raw_observations.append(each(np.copy, normaliser.get_original_obs()))
            self.raw_rewards.append(normaliser.get_original_reward())
        self._recorded[step] = True
