"""PPO and A2C with the buffer and the callback in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gymnasium import spaces
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback, ConvertCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from vtrace_plugins._core.checks import VTraceError
from vtrace_plugins.sb3.buffers import VTraceDictRolloutBuffer, VTraceMixin, VTraceRolloutBuffer
from vtrace_plugins.sb3.callback import VTraceCallback

_Host: Any = OnPolicyAlgorithm if TYPE_CHECKING else object  # the mixin stands over one of several


class VTraceAlgorithmMixin(_Host):
    """Binds the buffer whenever the host builds one (at construction and at load); adds the callback to every learn."""

    buffer_classes: tuple[Any, Any] = (VTraceRolloutBuffer, VTraceDictRolloutBuffer)  # the second for Dict observations
    weight_advantages = False  # whether the loss leaves the importance weight to the advantages
    rollout_buffer_class: Any
    rollout_buffer_kwargs: dict[str, Any]

    def _setup_model(self) -> None:
        ours, given = self.buffer_classes[isinstance(self.observation_space, spaces.Dict)], self.rollout_buffer_class
        if given is None or given in ours.__mro__:  # a stock model that is loaded brings the host's own class
            self.rollout_buffer_class = ours
        elif not (
            isinstance(given, type)
            and issubclass(given, VTraceMixin)
            and getattr(given, "_sample_type", None) is ours._sample_type
        ):
            got = given.__name__ if isinstance(given, type) else repr(given)
            raise VTraceError("rollout_buffer_class", f"a V-trace buffer such as {ours.__name__}", got)
        if not isinstance(self.rollout_buffer_kwargs, Mapping):
            raise VTraceError("rollout_buffer_kwargs", "a dict of options", repr(self.rollout_buffer_kwargs))
        self.rollout_buffer_kwargs = {"weight_advantages": self.weight_advantages, **self.rollout_buffer_kwargs}
        self._build()
        self.rollout_buffer.bind(self)

    def _build(self) -> None:
        super()._setup_model()

    def _init_callback(self, callback: Any, progress_bar: bool = False) -> BaseCallback:
        if callback is None:
            callback = []
        elif not isinstance(callback, list):
            callback = [callback if isinstance(callback, BaseCallback) else ConvertCallback(callback)]
        # Last: what the others do to the step's rewards is to be seen.
        result: BaseCallback = super()._init_callback([*callback, VTraceCallback()], progress_bar)
        return result


class VTracePPO(VTraceAlgorithmMixin, PPO):
    """SB3's PPO on V-trace targets, refreshed at each epoch; ``rollout_buffer_kwargs`` takes the buffer's options.

    Raises:
        VTraceError: for a ``rollout_buffer_class`` that is not a V-trace buffer for this algorithm, and for
            ``rollout_buffer_kwargs`` that are no dict.
    """


class VTraceA2C(VTraceAlgorithmMixin, A2C):
    """SB3's A2C with V-trace; its loss has no ratio of its own, so the advantages carry the weight.

    Raises:
        VTraceError: for a ``rollout_buffer_class`` that is not a V-trace buffer for this algorithm, and for
            ``rollout_buffer_kwargs`` that are no dict.
    """

    weight_advantages = True
