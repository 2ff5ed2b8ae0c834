"""The callback that binds a stock algorithm's policy to its V-trace buffer, and records what the host would fold."""

from __future__ import annotations

import warnings
from inspect import signature
from typing import Any

import numpy as np
from stable_baselines3 import A2C
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from vtrace_plugins._core.checks import VTraceError
from vtrace_plugins.sb3.buffers import VTraceMixin


class VTraceCallback(BaseCallback):
    """For ``PPO(..., rollout_buffer_class=VTraceRolloutBuffer)``: ``model.learn(..., callback=VTraceCallback())``.

    The same for A2C, TRPO and MaskablePPO. Binds the model's buffer at every ``learn``, and records rewards,
    truncations and terminal observations, so that a refresh prices them with the current value function. Among several
    callbacks it moves to the end, since what the others make of a reward is the reward.

    Raises:
        VTraceError: if the model's rollout buffer is not one of ours, or not for its action masks, and for an algorithm
            that is not on-policy.
    """

    def _init_callback(self) -> None:
        buffer = self._bind()
        if not isinstance(self.model, A2C) and buffer.weight_advantages:
            warnings.warn(
                "this loss multiplies by pi / mu itself: weight_advantages=True would count the ratio twice",
                stacklevel=2,
            )
        if isinstance(self.model, A2C) and not buffer.weight_advantages and buffer.replayed.maxlen:
            warnings.warn(
                "A2C's loss does not multiply by pi / mu, so replayed rollouts need weight_advantages=True in "
                "rollout_buffer_kwargs (or VTraceA2C, which sets it)",
                stacklevel=2,
            )

    def _bind(self) -> VTraceMixin:
        buffer = getattr(self.model, "rollout_buffer", None)
        if not isinstance(self.model, OnPolicyAlgorithm):
            raise VTraceError("VTraceCallback", "an on-policy algorithm", type(self.model).__name__)
        if not isinstance(buffer, VTraceMixin):
            raise VTraceError(
                "rollout_buffer_class",
                "a V-trace buffer such as VTraceRolloutBuffer (RecurrentPPO takes none: use VTraceRecurrentPPO)",
                type(buffer).__name__,
            )
        masks = "action_masks" in signature(self.model.policy.evaluate_actions).parameters
        if masks != ("action_masks" in buffer._extras):
            wanted = f"a V-trace buffer {'with' if masks else 'without'} action masks for {type(self.model).__name__}"
            raise VTraceError("rollout_buffer_class", wanted, type(buffer).__name__)
        buffer.bind(self.model)
        return buffer

    def _on_training_start(self) -> None:
        """To the end of the outermost list, which is walked as it was. In a list inside, it stays besides: that one may
        be the user's, and be used again."""
        everything = self.locals["callback"]
        if isinstance(everything, CallbackList):
            everything.callbacks = [*(callback for callback in everything.callbacks if callback is not self), self]

    def update_locals(self, locals_: dict[str, Any]) -> None:
        """The host's own array of the step's rewards, before any callback sees it: one may edit it, or put another in
        its place, which the host does not see."""
        super().update_locals(locals_)
        if "rewards" in locals_:
            self._rewards = locals_["rewards"]
            self._given = np.array(self._rewards, dtype=np.float32)

    def _on_rollout_start(self) -> None:
        self._bind().start()  # again: the buffer may have been replaced

    def _on_step(self) -> bool:
        # Before the host folds gamma * V(terminal_observation) into rewards, and before it adds the step.
        buffer: VTraceMixin = self.model.rollout_buffer  # type: ignore[attr-defined]
        buffer.record(self._rewards, self.locals["dones"], self.locals["infos"], self._given)
        return True
