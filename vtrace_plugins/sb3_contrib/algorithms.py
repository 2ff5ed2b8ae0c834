"""sb3-contrib's on-policy algorithms with the buffer and the callback in place."""

from __future__ import annotations

from typing import Any

from sb3_contrib import TRPO, MaskablePPO, RecurrentPPO

from vtrace_plugins.sb3.algorithms import VTraceAlgorithmMixin
from vtrace_plugins.sb3_contrib.buffers import (
    VTraceMaskableDictRolloutBuffer,
    VTraceMaskableRolloutBuffer,
    VTraceRecurrentDictRolloutBuffer,
    VTraceRecurrentRolloutBuffer,
)


class VTraceTRPO(VTraceAlgorithmMixin, TRPO):
    """TRPO on V-trace targets; the critic's passes after the actor's step see targets under the new policy.

    Raises:
        VTraceError: for a ``rollout_buffer_class`` that is not a V-trace buffer for this algorithm, and for
            ``rollout_buffer_kwargs`` that are no dict.
    """


class VTraceMaskablePPO(VTraceAlgorithmMixin, MaskablePPO):
    """MaskablePPO on V-trace targets, refreshed at each epoch; ``rollout_buffer_kwargs`` takes the buffer's options.

    Raises:
        VTraceError: for a ``rollout_buffer_class`` that is not a V-trace buffer for this algorithm, and for
            ``rollout_buffer_kwargs`` that are no dict.
    """

    buffer_classes = (VTraceMaskableRolloutBuffer, VTraceMaskableDictRolloutBuffer)


class VTraceRecurrentPPO(VTraceAlgorithmMixin, RecurrentPPO):
    """RecurrentPPO on V-trace targets, refreshed at each epoch.

    Takes ``rollout_buffer_class`` and ``rollout_buffer_kwargs``, as SB3's PPO does and RecurrentPPO does not.

    Raises:
        VTraceError: for a ``rollout_buffer_class`` that is not a V-trace buffer for this algorithm, and for
            ``rollout_buffer_kwargs`` that are no dict.
    """

    buffer_classes = (VTraceRecurrentRolloutBuffer, VTraceRecurrentDictRolloutBuffer)

    def __init__(
        self,
        *args: Any,
        rollout_buffer_class: type[Any] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        _init_setup_model: bool = True,
        **kwargs: Any,
    ) -> None:
        kwargs["_init_setup_model"] = False
        super().__init__(*args, **kwargs)
        self.rollout_buffer_class = rollout_buffer_class
        self.rollout_buffer_kwargs = rollout_buffer_kwargs or {}
        if _init_setup_model:
            self._setup_model()

    def _build(self) -> None:
        super()._build()
        stock = self.rollout_buffer  # hard-coded upstream
        self.rollout_buffer = self.rollout_buffer_class(
            stock.buffer_size,
            stock.observation_space,
            stock.action_space,
            stock.hidden_state_shape,
            stock.device,
            gamma=stock.gamma,
            gae_lambda=stock.gae_lambda,
            n_envs=stock.n_envs,
            **self.rollout_buffer_kwargs,
        )
