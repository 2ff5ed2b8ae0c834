"""What the host adds up or forgets, kept apart: rewards, truncations, and the observations they cut off."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from stable_baselines3.common.vec_env import VecNormalize

from vtrace_plugins.sb3.observations import each


class _Step(NamedTuple):
    """What a callback sees of a step, before the host folds values into the rewards (an array that it edits)."""

    rewards: np.ndarray
    dones: np.ndarray
    infos: list[dict[str, Any]]
    given: np.ndarray


class Recorder:
    """One rollout's rewards ``[T, N]`` and truncations ``[T, N]``, and the observations at them in order of (t, env).

    Rewards are as all callbacks left them, without time-limit bootstraps. Under a VecNormalize, replay needs
    observations and rewards as they were before it, too: hand it over as ``normaliser``. What an environment hands out
    is copied: it may write its next step over it.
    """

    def __init__(self, steps: int, n_envs: int) -> None:
        self.rewards = np.zeros((steps, n_envs), dtype=np.float32)
        self.given = np.zeros((steps, n_envs), dtype=np.float32)  # as the environment gave them
        self.truncated = np.zeros((steps, n_envs), dtype=bool)
        self.terminal: list[Any] = []
        self.raw_observations: list[Any] = []  # of s_0 to s_T
        self.raw_rewards: list[np.ndarray] = []
        self.raw_terminal: list[Any] = []
        self._recorded = np.zeros(steps, dtype=bool)
        self._source: int | None = None  # which normaliser
        self._pending: _Step | None = None

    @property
    def complete(self) -> bool:
        """Whether every step of the rollout was recorded."""
        return bool(self._recorded.all())

    @property
    def has_raw(self) -> bool:
        return self.complete and len(self.raw_observations) == len(self._recorded) + 1

    def start(self, normaliser: VecNormalize | None, observations: Any) -> None:
        """Before the rollout's first step, from ``observations``."""
        if normaliser is None or self.raw_observations:
            return
        self._source = id(normaliser)
        raw = normaliser.get_original_obs()
        same = each(np.array_equal, each(np.float32, normaliser.normalize_obs(raw)), each(np.float32, observations))
        if not (all(same.values()) if isinstance(same, dict) else same):  # the rollout before was broken off
            raw = normaliser.unnormalize_obs(observations)
        self.raw_observations.append(each(np.copy, raw))

    def record(self, rewards: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]], given: np.ndarray) -> None:
        """From a callback, before the host folds V(terminal observation) into rewards."""
        self._pending = _Step(np.array(rewards, dtype=np.float32), dones, infos, np.array(given, dtype=np.float32))

    def added(self, step: int, rewards: np.ndarray, normaliser: VecNormalize | None) -> None:
        """The step as the host stores it, bootstraps inside."""
        self.rewards[step] = rewards
        if self._pending is None:
            return
        seen, self._pending = self._pending, None
        for i, (done, info) in enumerate(zip(seen.dones, seen.infos, strict=True)):
            observation = info.get("terminal_observation")
            # the host's own condition: without the flag, or the observation, there is no bootstrap
            if done and observation is not None and info.get("TimeLimit.truncated", False):
                self.truncated[step, i] = True
                self.terminal.append(each(np.array, observation))
                if normaliser is not None:
                    self.raw_terminal.append(each(np.array, normaliser.unnormalize_obs(observation)))
        self.rewards[step, self.truncated[step]] = seen.rewards[self.truncated[step]]
        self.given[step] = seen.given
        if self._source is not None and id(normaliser) != self._source:  # another environment, in the middle
            self.raw_observations, self._source = [], None
        if normaliser is not None and self._source is not None:
            self.raw_observations.append(each(np.copy, normaliser.get_original_obs()))
            self.raw_rewards.append(normaliser.get_original_reward())
        self._recorded[step] = True
