"""Rollout buffers whose returns and advantages are V-trace's, refreshed under the policy that is being trained."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from vtrace_plugins._core.api import vtrace
from vtrace_plugins._core.checks import VTraceError, check_backend, check_flag, check_number
from vtrace_plugins.sb3.evaluate import each, evaluate, fingerprint, values_of
from vtrace_plugins.sb3.recorder import Recorder

_Host: Any = RolloutBuffer if TYPE_CHECKING else object  # the mixin stands over one of several


class VTraceMixin(_Host):
    """What every V-trace rollout buffer does, over any of the host's own.

    On-policy its numbers are the host's GAE(gae_lambda). With an algorithm bound, each pass after the policy has moved
    re-evaluates log pi and V under the current policy and recomputes ``returns`` (V-trace targets, IMPALA eq. 1) and
    ``advantages``; ``log_probs`` and ``values`` stay those of collection, which PPO's own clips read.

    Args:
        rho_bar: clip of the ratio in the temporal differences.
        c_bar: clip of the ratio in the trace.
        pg_rho_bar: clip of the ratio in the advantages; ``rho_bar`` if None.
        weight_advantages: whether advantages carry ``min(pg_rho_bar, pi / mu)``: False for PPO-like losses, which
            multiply by the ratio themselves, True for A2C.
        refresh: ``"pass"`` recomputes at the start of each ``get`` after the policy has moved, ``"never"`` not at all.
        backend: as in :func:`vtrace_plugins.vtrace`.

    The host's arguments (``buffer_size``, ``observation_space``, ``action_space``, ``device``, ``gae_lambda``,
    ``gamma``, ``n_envs``) come first, as ever.

    Raises:
        VTraceError: for an option out of range.
    """

    def __init__(
        self,
        *args: Any,
        rho_bar: float = 1.0,
        c_bar: float = 1.0,
        pg_rho_bar: float | None = None,
        weight_advantages: bool = False,
        refresh: str = "pass",
        backend: str = "auto",
        **kwargs: Any,
    ) -> None:
        for name, bar in (("rho_bar", rho_bar), ("c_bar", c_bar), ("pg_rho_bar", pg_rho_bar)):
            if bar is not None:
                check_number(name, bar, math.inf)
        check_flag("weight_advantages", weight_advantages)
        check_backend(backend)
        if refresh not in ("pass", "never"):
            raise VTraceError("refresh", "'pass' or 'never'", repr(refresh))
        self.clips: dict[str, Any] = {"rho_bar": rho_bar, "c_bar": c_bar, "pg_rho_bar": pg_rho_bar}
        self.weight_advantages = weight_advantages
        self.refresh = refresh
        self.backend = backend
        self._algorithm: weakref.ref[Any] | None = None
        self._warned: set[str] = set()
        super().__init__(*args, **kwargs)

    def bind(self, algorithm: Any) -> None:
        """Let the buffer evaluate ``algorithm.policy``, whichever that is when it is needed."""
        self._algorithm = weakref.ref(algorithm)

    @property
    def _bound(self) -> Any:
        """The algorithm, or None if none was bound or it is gone."""
        return None if self._algorithm is None else self._algorithm()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_algorithm": None}  # a weak reference cannot be saved; load binds anew

    def reset(self) -> None:
        super().reset()
        self.recorder = Recorder(self.buffer_size, self.n_envs)
        self._collected: dict[str, Any] = {}
        self._evaluated: Any = None

    def record(self, rewards: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]]) -> None:
        """Keep raw rewards and terminal observations apart, before the host folds a value into the reward."""
        self.recorder.record(self.pos, rewards, dones, infos)

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: np.ndarray) -> None:
        """Returns and advantages of the policy that collected: the host's GAE, every ratio being 1."""
        ends = np.concatenate([self.episode_starts[1:] != 0, np.asarray(dones, dtype=bool)[None]])
        self._collected = {
            # [T, N, ...]: get() replaces the buffer's arrays by flattened copies, these stay.
            "observations": dict(self.observations) if isinstance(self.observations, dict) else self.observations,
            "actions": self.actions,
            "log_probs": self.log_probs,
            "values": self.values,
            "ends": ends,
        }
        algorithm = self._bound
        if algorithm is not None:
            self._collected["last_obs"] = each(np.array, algorithm._last_obs)
            self._evaluated = fingerprint(algorithm.policy)
        # The host's own rule: what ended has terminated, and a time limit's bootstrap is in the reward already.
        self._write(
            torch.from_numpy(self.log_probs),
            torch.from_numpy(self.values),
            self.rewards,
            terminated=torch.from_numpy(ends),
            last_value=last_values.detach().cpu().flatten(),
        )

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """The host's minibatches, after a refresh where the policy has moved since the last."""
        assert self.full, "the rollout buffer is not full"
        self._refresh()
        yield from super().get(batch_size)

    def _refresh(self) -> None:
        if self.refresh == "never" or not self._collected:
            return
        algorithm = self._bound
        if algorithm is None or "last_obs" not in self._collected:
            self._warn_once(
                "no algorithm is bound to this buffer, so every importance ratio stays 1: use VTraceCallback"
            )
            return
        mark = fingerprint(algorithm.policy)
        if mark == self._evaluated:
            return
        self._evaluated = mark
        collected = self._collected
        values, log_pi = evaluate(algorithm, self, collected["observations"], collected["actions"])
        last_value = values_of(algorithm, collected["last_obs"])
        ends = torch.from_numpy(collected["ends"])
        if self.recorder.complete:
            truncated = torch.from_numpy(self.recorder.truncated)
            bootstrap_values = torch.zeros_like(values)
            bootstrap_values[-1] = last_value
            if truncated.any():
                terminal = values_of(algorithm, self.recorder.terminal_observations(self.observation_space))
                bootstrap_values[truncated] = terminal
            boundaries = {"terminated": ends & ~truncated, "truncated": truncated, "bootstrap_values": bootstrap_values}
            self._write(log_pi, values, self.recorder.rewards, **boundaries)
        else:
            self._warn_once("time-limit bootstraps inside the rewards are those of collection: use VTraceCallback")
            self._write(log_pi, values, self.rewards, terminated=ends, last_value=last_value)
        self._log(algorithm, log_pi)

    def _write(
        self, log_pi: torch.Tensor, values: torch.Tensor, rewards: np.ndarray, **boundaries: torch.Tensor
    ) -> None:
        """Compute returns and advantages ``[T, N]`` and put them where the host reads them."""
        results = vtrace(
            log_pi,
            torch.from_numpy(self._collected["log_probs"]),
            values,
            torch.from_numpy(rewards),
            **boundaries,
            **self.clips,
            gamma=self.gamma,
            lam=self.gae_lambda,
            weight_advantages=self.weight_advantages,
            time_dim=0,
            backend=self.backend,
        )
        for name, result in zip(("returns", "advantages"), results, strict=True):
            setattr(self, name, self.swap_and_flatten(result.numpy()) if self.generator_ready else result.numpy())

    def _log(self, algorithm: Any, log_pi: torch.Tensor) -> None:
        logger = getattr(algorithm, "_logger", None)
        if logger is not None:
            ratio = (log_pi - torch.from_numpy(self._collected["log_probs"])).exp()
            logger.record("vtrace/ratio_mean", ratio.mean().item())
            logger.record("vtrace/rho_clipped", (ratio > self.clips["rho_bar"]).float().mean().item())
            logger.record("vtrace/c_clipped", (ratio > self.clips["c_bar"]).float().mean().item())
            logger.record("vtrace/ess", (ratio.sum().square() / ratio.square().sum() / ratio.numel()).item())

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)


class VTraceRolloutBuffer(VTraceMixin, RolloutBuffer):
    """:class:`VTraceMixin` over SB3's ``RolloutBuffer``, for ``PPO(rollout_buffer_class=...)`` and A2C."""


class VTraceDictRolloutBuffer(VTraceMixin, DictRolloutBuffer):
    """:class:`VTraceMixin` over SB3's ``DictRolloutBuffer``."""
