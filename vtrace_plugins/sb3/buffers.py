"""Rollout buffers whose returns and advantages are V-trace's, refreshed under the policy that is being trained."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
import weakref
from collections import deque
from collections.abc import Generator
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from vtrace_plugins._core.api import vtrace
from vtrace_plugins._core.checks import VTraceError, check_backend, check_flag, check_known, check_number
from vtrace_plugins.diagnostics import importance
from vtrace_plugins.sb3.evaluate import evaluate, is_unmoved, snapshot, values_of
from vtrace_plugins.sb3.minibatches import minibatches
from vtrace_plugins.sb3.observations import each, join, same
from vtrace_plugins.sb3.on_policy import gae
from vtrace_plugins.sb3.recorder import Recorder
from vtrace_plugins.sb3.rollout import End, Rollout, pooled

_TELLING = 16  # entries of an integer observation from which two that are equal are the same

_Host: Any = RolloutBuffer if TYPE_CHECKING else object  # the mixin stands over one of several


class VTraceMixin(_Host):
    """What every V-trace rollout buffer does, over any of the host's own.

    On-policy its numbers are the host's GAE(gae_lambda). With an algorithm bound, each pass after the policy has moved
    re-evaluates log pi and V under the current policy and recomputes ``returns`` (V-trace targets, IMPALA eq. 1) and
    ``advantages``; ``log_probs`` and ``values`` stay those of collection, which PPO's own clips read. The arrays are
    the host's: ``[buffer_size, n_envs]`` while collected, ``[n_envs * buffer_size, 1]`` rows once ``get`` was called.
    ``rewards`` hold no time-limit bootstrap where the callback has recorded the step: what is edited there is the
    reward.

    Args:
        rho_bar: clip of the ratio in the temporal differences.
        c_bar: clip of the ratio in the trace.
        pg_rho_bar: clip of the ratio in the advantages; ``rho_bar`` if None.
        weight_advantages: whether advantages carry ``min(pg_rho_bar, pi / mu)``: False for PPO-like losses, which
            multiply by the ratio themselves, True for A2C.
        refresh: ``"pass"`` recomputes at the start of each ``get`` after the policy has moved, ``"never"`` not at all.
        replay: how many earlier rollouts each pass hands out besides the current one, corrected like it (IMPALA with
            replay). They stay on ``device``.
        backend: as in :func:`vtrace_plugins.vtrace`.

    The host's arguments (``buffer_size``, ``observation_space``, ``action_space``, ``device``, ``gae_lambda``,
    ``gamma``, ``n_envs``) come first, as ever.

    Raises:
        VTraceError: for an option that is unknown or out of range, ``replay`` beside ``refresh="never"``, and a Dict
            space in a buffer that is not for one.
    """

    _sample_type: Any  # the host's samples: observations, actions, old_values, ..., then the extras
    _extras: tuple[str, ...] = ()  # the host's other arrays of one entry a step, which its policy wants to see
    _float_actions = True  # whether the host hands actions out as float32
    _merge_single = False  # whether a minibatch of one is to be avoided, as the host's loss makes NaN of it

    def __init__(
        self,
        *args: Any,
        rho_bar: float = 1.0,
        c_bar: float = 1.0,
        pg_rho_bar: float | None = None,
        weight_advantages: bool = False,
        refresh: str = "pass",
        replay: int = 0,
        backend: str = "auto",
        **kwargs: Any,
    ) -> None:
        taken = (inspect.signature(cls).parameters for cls in type(self).__mro__[:-1])
        check_known(kwargs, set().union(*taken) - {"args", "kwargs"}, type(self).__name__)
        for name, bar in (("rho_bar", rho_bar), ("c_bar", c_bar), ("pg_rho_bar", pg_rho_bar)):
            if bar is not None or name != "pg_rho_bar":
                check_number(name, bar, math.inf)
        check_flag("weight_advantages", weight_advantages)
        check_backend(backend)
        if not isinstance(refresh, str) or refresh not in ("pass", "never"):
            raise VTraceError("refresh", "'pass' or 'never'", repr(refresh))
        if isinstance(replay, bool) or not isinstance(replay, Integral) or replay < 0:
            raise VTraceError("replay", "a number of rollouts, 0 or more", repr(replay))
        if replay and refresh == "never":
            raise VTraceError("replay", "0 beside refresh='never', which would not correct older rollouts", str(replay))
        self.clips: dict[str, Any] = {"rho_bar": rho_bar, "c_bar": c_bar, "pg_rho_bar": pg_rho_bar}
        self.weight_advantages: bool = weight_advantages
        self.refresh: str = refresh
        self.backend: str = backend
        self.replayed: deque[Rollout] = deque(maxlen=int(replay))  # the latest first
        self._rollout: Rollout | None = None
        self._seen: list[Tensor] = []  # the policy, when it was last looked at
        self._algorithm: weakref.ref[Any] | None = None
        self._warned: set[str] = set()
        self._resets_for_ends: float = 0.0  # time limits whose terminal observation is the one after the reset
        self._check_observations(kwargs.get("observation_space", args[1] if len(args) > 1 else None))
        super().__init__(*args, **kwargs)
        for name in ("gamma", "gae_lambda"):
            check_number(name, getattr(self, name), 1.0)

    def _check_observations(self, space: Any) -> None:
        """The host's Dict buffers refuse all other spaces themselves."""
        if isinstance(space, spaces.Dict) and not isinstance(self, DictRolloutBuffer):
            wanted = "no Dict space (VTraceDictRolloutBuffer and its kin take those)"
            raise VTraceError("observation_space", wanted, type(self).__name__)

    def bind(self, algorithm: Any) -> None:
        """Let the buffer evaluate ``algorithm.policy``, whichever that is when it is needed.

        Raises:
            VTraceError: for an object without a policy.
        """
        if not hasattr(algorithm, "policy"):
            raise VTraceError("algorithm", "an on-policy algorithm with its policy", type(algorithm).__name__)
        self._algorithm = weakref.ref(algorithm)

    @property
    def _bound(self) -> Any:
        """The algorithm, or None if none was bound or it is gone."""
        return None if self._algorithm is None else self._algorithm()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_algorithm": None}  # a weak reference cannot be saved; load binds anew

    # --- collection ---

    def reset(self) -> None:
        """Empty the buffer; with ``replay`` the rollout that it held is kept for later passes."""
        if self._rollout is not None and self._rollout.end.observations is not None:
            self.replayed.appendleft(self._rollout)
        self._rollout = None
        self._pool: dict[str, Any] = {}
        self._pooled: list[Rollout] = []
        self._end: End | None = None
        super().reset()
        self.recorder = Recorder(self.buffer_size, self.n_envs)
        self._folded = self.rewards.copy()  # as the host added them, time-limit bootstraps inside

    def start(self) -> None:
        """Before the first step of a rollout, after :meth:`reset`."""
        algorithm = self._bound
        if algorithm is not None:
            self.recorder.start(self._normaliser(), algorithm._last_obs)

    def record(
        self, rewards: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]], given: np.ndarray | None = None
    ) -> None:
        """Keep rewards and terminal observations apart, before the host folds a value into the reward.

        All are what the VecEnv's step returned, one entry for each environment; ``rewards`` as other callbacks left
        them, ``given`` as they were before (by default the same).
        """
        self.recorder.record(rewards, dones, infos, rewards if given is None else given)

    def add(self, *args: Any, **kwargs: Any) -> None:
        """One step of all environments, as the host takes it."""
        step = self.pos
        super().add(*args, **kwargs)
        self._folded[step] = self.rewards[step]
        self.recorder.added(step, self._folded[step], self._normaliser())
        self.rewards[step] = self.recorder.rewards[step]

    def compute_returns_and_advantage(self, last_values: Tensor, dones: np.ndarray) -> None:
        """Returns and advantages of the policy that collected: the host's GAE, every ratio being 1.

        Args:
            last_values: V of what follows the rollout, ``[n_envs]`` or ``[n_envs, 1]``.
            dones: where that begins a new episode, ``[n_envs]``.

        Raises:
            VTraceError: for ``dones`` that are None.
        """
        if dones is None:
            raise VTraceError("dones", "a flag for each environment", "None")
        end = End(last_values.detach().cpu().numpy().flatten(), np.array(dones, dtype=bool))
        algorithm = self._bound
        if algorithm is not None:
            end = end._replace(
                observations=each(np.array, algorithm._last_obs),
                states=copy.deepcopy(getattr(algorithm, "_last_lstm_states", None)),
                updates=algorithm._n_updates,
            )
            self._look_at_terminal_observations(end)
            if self.refresh == "pass":
                self._look(algorithm.policy)
        self._end = end
        rewards = self._folded
        if self._is_edited():
            rewards = np.where(same(self.rewards, self.recorder.rewards), rewards, self.rewards + self._bootstraps())
        self._compute(end, rewards)

    def _is_edited(self) -> bool:
        """Whether a callback wrote into ``rewards`` after the steps were added."""
        return not same(self.rewards, self.recorder.rewards).all()

    def _bootstraps(self) -> np.ndarray:
        """What the host added for time limits, as the difference that it made, ``[T, N]``."""
        with np.errstate(invalid="ignore"):
            return np.where(self.recorder.truncated, self._folded - self.recorder.rewards, np.float32(0))

    def _compute(self, end: End, folded: np.ndarray) -> None:
        """``folded``: rewards as the host has them, time-limit bootstraps inside, ``[T, N]``."""
        if min(bar for bar in self.clips.values() if bar is not None) >= 1:
            advantages = gae(
                folded, self.values, self.episode_starts, end.values, end.dones, self.gamma, self.gae_lambda
            )
            if np.isfinite(advantages.sum()):
                self.advantages, self.returns = advantages, advantages + self.values
                return
        # The host's own rule: what ended has terminated, and a time limit's bootstrap is in the reward already.
        log_probs, values, rewards = map(torch.from_numpy, (self.log_probs, self.values, folded))
        ends = torch.from_numpy(self._ends(end))
        last_value = torch.from_numpy(end.values)
        results = vtrace(
            log_probs, log_probs, values, rewards, ends, last_value=last_value, time_dim=0, **self._options()
        )
        self.returns, self.advantages = (x.numpy() for x in results)

    def _look_at_terminal_observations(self, end: End) -> None:
        """Whether each is the observation after the reset: some GPU simulators hand that out as the last one.

        Small discrete worlds come back to their start; so those are not looked at, and one time limit is not enough.
        """
        t, env = np.nonzero(self.recorder.truncated)
        if not len(t):
            return
        at_end = t == self.buffer_size - 1

        def rows(x: np.ndarray) -> np.ndarray:
            return np.reshape(x, (len(t), -1))

        def compared(stored: np.ndarray, last: np.ndarray, terminal: np.ndarray) -> tuple[bool, bool] | None:
            """Whether all are the ones after the reset, and those of the step before."""
            now, after = rows(stored[t, env]), rows(stored[np.minimum(t + 1, len(stored) - 1), env])
            if now.dtype.kind != "f" and now.shape[1] < _TELLING:
                return None
            after[at_end] = rows(last[env])[at_end]
            terminal = rows(terminal).astype(now.dtype)
            return bool((terminal == after).all()), bool((terminal == now).all())

        found = each(compared, self.observations, end.observations, join(np.stack, self.recorder.terminal))
        pairs = [pair for pair in (found.values() if isinstance(found, dict) else [found]) if pair is not None]
        if not pairs or all(now for _, now in pairs):  # a world that looks the same everywhere
            return
        self._resets_for_ends += len(t) if all(after for after, _ in pairs) else -math.inf
        if self._resets_for_ends > 1:
            self._warn_once(
                "at every time limit, info['terminal_observation'] is the observation after the reset, to the bit, so "
                "V of it is the value of the next episode's start: the environment should keep the last observation"
            )

    def _look(self, policy: Any) -> list[Tensor]:
        """The policy's snapshot; the same list for as long as it does not move."""
        if not self._seen or not is_unmoved(policy, self._seen):
            self._seen = snapshot(policy)
        return self._seen

    def _ends(self, end: End) -> np.ndarray:
        """Where an episode ended, ``[T, N]``."""
        return np.concatenate([self.episode_starts[1:] != 0, end.dones[None]])

    def _options(self) -> dict[str, Any]:
        return {
            **self.clips,
            "gamma": self.gamma,
            "lam": self.gae_lambda,
            "weight_advantages": self.weight_advantages,
            "backend": self.backend,
        }

    # --- training ---

    @property
    def _columns(self) -> tuple[str, ...]:
        """The arrays of one entry a step, in the order of the host's samples."""
        return ("observations", "actions", "values", "log_probs", "advantages", "returns", *self._extras)

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """The host's minibatches, over the replayed rollouts too, after a refresh where the policy has moved.

        Args:
            batch_size: rows in each, or None for all rows at once.

        Raises:
            VTraceError: for a buffer that is not full, or another batch size.
        """
        if not self.full:
            raise VTraceError("get", f"a full buffer, {self.buffer_size} steps", f"{self.pos}")
        if batch_size is not None and (not isinstance(batch_size, Integral) or batch_size < 1):
            raise VTraceError("batch_size", "None or a number of rows, 1 or more", repr(batch_size))
        rollouts = self._refreshed()
        if self._pooled != rollouts:
            self._pool, self._pooled = pooled(rollouts), rollouts
        self._pool |= {name: torch.cat([r.results[name] for r in rollouts]) for name in ("advantages", "returns")}
        yield from self._minibatches(rollouts, batch_size)

    def _minibatches(self, rollouts: list[Rollout], batch_size: int | None) -> Generator[Any, None, None]:
        columns = [self._pool[name] for name in self._columns]
        yield from minibatches(self._sample_type, columns, batch_size, self._merge_single)

    def _refreshed(self) -> list[Rollout]:
        """The rollouts of this pass, their results those of the current policy."""
        current = self._rollout
        new = current is None
        if current is None:
            current = self._rollout = self._collected()
        algorithm = self._bound
        rollouts = [current]
        if self.refresh == "pass" and self._end is not None:
            if algorithm is None or current.end.observations is None:
                self._warn_once(
                    "no algorithm is bound to this buffer, so every importance ratio stays 1: use VTraceCallback"
                )
            else:
                rollouts += self.replayed
                if new:
                    self._normalise()
                self._correct_all(algorithm, rollouts)
        return rollouts

    def _collected(self) -> Rollout:
        """The rollout that the host's arrays hold, flattened as the host flattens them, on the device."""
        end, edited = self._end, self._end is not None and self._is_edited()
        end = end or End(np.zeros(self.n_envs, dtype=np.float32), np.zeros(self.n_envs, dtype=bool))
        ends = self._ends(end)
        self._flatten()
        on_device = lambda x: torch.as_tensor(x, device=self.device)  # noqa: E731
        rows = {name: each(on_device, getattr(self, name)) for name in self._columns}
        if self._float_actions or isinstance(self.action_space, spaces.MultiBinary):  # Bernoulli takes no int8
            rows["actions"] = rows["actions"].float()
        for name in ("values", "log_probs", "advantages", "returns"):
            rows[name] = rows[name].flatten()
        results = {name: rows.pop(name) for name in ("advantages", "returns")}
        shape = (self.n_envs, self.buffer_size)
        rewards = np.array(self.rewards, dtype=np.float32)
        untouched = same(rewards, self.recorder.given)
        rollout = Rollout(shape, rows, rewards, untouched, ends, self.recorder, end, self._seen, results)
        if edited:
            self._compute_edited(rollout)
        return rollout

    def _compute_edited(self, rollout: Rollout) -> None:
        """Results of rewards that a callback edited, under the policy that collected: every ratio is 1.

        The bootstraps are priced by it once more. As a difference they would be lost beside a large reward, or a NaN.
        """
        algorithm = self._bound
        if algorithm is not None and rollout.end.observations is not None:
            _, terminal_values = self._continuation(algorithm.policy, rollout)
        else:
            bootstraps = self._bootstraps()[self.recorder.truncated]
            terminal_values = torch.as_tensor(bootstraps / self.gamma if self.gamma else bootstraps, device=self.device)
        last_value = torch.as_tensor(rollout.end.values, device=self.device)
        values, log_mu = rollout.rows["values"], rollout.rows["log_probs"]
        rollout.correct(values, log_mu, last_value, terminal_values, self._options())
        self._show(rollout)

    def _show(self, rollout: Rollout) -> None:
        """The current rollout's results, ``[N * T, 1]`` as the host flattens them: its logging reads them."""
        self.returns, self.advantages = (rollout.results[k].cpu().numpy()[:, None] for k in ("returns", "advantages"))

    def _flatten(self) -> None:
        """``[T, N, ...]`` to ``[N * T, ...]``, as the host does at its first ``get``."""
        for name in self._columns:
            setattr(self, name, each(self.swap_and_flatten, getattr(self, name)))
        self.generator_ready = True

    # --- correction ---

    def _correct_all(self, algorithm: Any, rollouts: list[Rollout]) -> None:
        policy = self._look(algorithm.policy)
        stale = [rollout for rollout in rollouts if rollout.evaluated is not policy]
        for rollout in stale:
            self._correct(algorithm.policy, rollout)
            rollout.evaluated = policy
        if not stale:
            return
        if rollouts[0] in stale:
            self._show(rollouts[0])
        self._log(algorithm, rollouts)

    def _correct(self, policy: Any, rollout: Rollout) -> None:
        """V-trace of one rollout under the policy as it is now."""
        if not rollout.recorder.complete:
            self._warn_once("time-limit bootstraps inside the rewards are those of collection: use VTraceCallback")
        values, log_pi = self._evaluate(policy, rollout)
        rollout.correct(values, log_pi, *self._continuation(policy, rollout), self._options())

    def _evaluate(self, policy: Any, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """(V, log pi) of the rollout's rows."""
        return evaluate(policy, rollout.rows, self.action_space, *self._extras)

    def _continuation(self, policy: Any, rollout: Rollout) -> tuple[Tensor, Tensor | None]:
        """V(s_T) ``[N]``, and V of the terminal observations where there are some."""
        last_value = values_of(policy, rollout.end.observations, self.device)
        terminal = rollout.recorder.terminal
        return last_value, values_of(policy, join(np.stack, terminal), self.device) if terminal else None

    def _normaliser(self) -> VecNormalize | None:
        """The VecNormalize whose statistics move on between rollouts, if replay has to follow it."""
        algorithm = self._bound
        if not self.replayed.maxlen or algorithm is None:
            return None
        normaliser: VecNormalize | None = algorithm.get_vec_normalize_env()
        if normaliser is not None and algorithm.env is not normaliser:
            self._warn_once(
                "VecNormalize is not the outermost wrapper, so replayed rollouts keep the normalisation of collection"
            )
            return None
        return normaliser

    def _normalise(self) -> None:
        normaliser = self._normaliser()
        for rollout in self.replayed:
            if normaliser is not None and rollout.recorder.has_raw:
                rollout.normalise(normaliser)

    def _log(self, algorithm: Any, rollouts: list[Rollout]) -> None:
        logger = getattr(algorithm, "_logger", None)
        if logger is None:
            return
        # All rows as one sequence, cut where an environment ends: rollouts may differ in length.
        log_mu = torch.cat([r.rows["log_probs"] for r in rollouts])
        moved = torch.cat([0 * r.rows["log_probs"] if r.log_ratio is None else r.log_ratio for r in rollouts])
        ends = np.concatenate([np.append(r.ends[:-1], np.ones_like(r.ends[:1]), 0).T.flatten() for r in rollouts])
        found = importance(
            log_mu + moved,
            log_mu,
            terminated=torch.as_tensor(ends, device=log_mu.device),
            rho_bar=self.clips["rho_bar"],
            c_bar=self.clips["c_bar"],
            lam=self.gae_lambda,
        )
        for name, value in found.scalars().items():
            logger.record(name, value)
        logger.record("vtrace/lag", float(np.mean([algorithm._n_updates - r.end.updates for r in rollouts])))

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)


class VTraceRolloutBuffer(VTraceMixin, RolloutBuffer):
    """SB3's ``RolloutBuffer`` with V-trace, for ``PPO(rollout_buffer_class=...)``, A2C and TRPO.

    Its options are those of :class:`VTraceMixin`.
    """

    _sample_type = RolloutBufferSamples


class VTraceDictRolloutBuffer(VTraceMixin, DictRolloutBuffer):
    """SB3's ``DictRolloutBuffer`` with V-trace. Its options are those of :class:`VTraceMixin`."""

    _sample_type = DictRolloutBufferSamples
