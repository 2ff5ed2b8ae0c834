"""What the host folds into the reward, kept apart: raw rewards, truncations and the observations they cut off."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces


class Recorder:
    """One rollout's raw rewards ``[T, N]``, truncations ``[T, N]`` and terminal observations in order of (t, env)."""

    def __init__(self, steps: int, n_envs: int) -> None:
        self.rewards = np.zeros((steps, n_envs), dtype=np.float32)
        self.truncated = np.zeros((steps, n_envs), dtype=bool)
        self._terminal: list[Any] = []
        self._recorded = np.zeros(steps, dtype=bool)

    @property
    def complete(self) -> bool:
        """Whether every step of the rollout was recorded."""
        return bool(self._recorded.all())

    def record(self, step: int, rewards: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]]) -> None:
        """The step's rewards (copied: the host edits them in place afterwards), and what its infos say of the ends."""
        if self._recorded[step]:  # by a second callback
            return
        self.rewards[step] = rewards
        for i, (done, info) in enumerate(zip(dones, infos, strict=True)):
            observation = info.get("terminal_observation")
            # the host's own condition: without the flag, or the observation, there is no bootstrap
            if done and observation is not None and info.get("TimeLimit.truncated", False):
                self.truncated[step, i] = True
                self._terminal.append(observation)
        self._recorded[step] = True

    def terminal_observations(self, space: spaces.Space[Any]) -> Any:
        """All of them as one batch, in the order of ``truncated``'s True entries."""
        if isinstance(space, spaces.Dict):
            return {key: np.stack([x[key] for x in self._terminal]) for key in space.spaces}
        return np.stack(self._terminal)
