"""V-trace over sb3-contrib's own rollout buffers: with action masks, and with recurrent states."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from sb3_contrib.common.maskable.buffers import (
    MaskableDictRolloutBuffer,
    MaskableDictRolloutBufferSamples,
    MaskableRolloutBuffer,
    MaskableRolloutBufferSamples,
)
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from sb3_contrib.common.recurrent.type_aliases import RecurrentDictRolloutBufferSamples, RecurrentRolloutBufferSamples
from torch import Tensor

from vtrace_plugins.sb3.buffers import VTraceMixin
from vtrace_plugins.sb3.rollout import Rollout
from vtrace_plugins.sb3_contrib.recurrent import continuation, evaluate, sequences

_STATES = ("hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf")


class _Maskable(VTraceMixin):
    _extras = ("action_masks",)
    _float_actions = False
    _merge_single = True


class VTraceMaskableRolloutBuffer(_Maskable, MaskableRolloutBuffer):
    """``MaskableRolloutBuffer`` with V-trace, for MaskablePPO.

    Its options are those of :class:`~vtrace_plugins.sb3.VTraceMixin`.
    """

    _sample_type = MaskableRolloutBufferSamples


class VTraceMaskableDictRolloutBuffer(_Maskable, MaskableDictRolloutBuffer):
    """``MaskableDictRolloutBuffer`` with V-trace.

    Its options are those of :class:`~vtrace_plugins.sb3.VTraceMixin`.
    """

    _sample_type = MaskableDictRolloutBufferSamples


class _Recurrent(VTraceMixin):
    """A refresh runs each environment's whole rollout through the LSTM, from the state it was collected in at step 0.

    V(s_T) and V of terminal observations start from the states that collection left behind, as the host's own do.
    """

    _extras = (*_STATES, "episode_starts")
    _float_actions = False
    _merge_single = True

    def _flatten(self) -> None:
        for name in _STATES:  # [T, layers, N, dim], as the host has them, to [T, N, layers, dim]
            setattr(self, name, getattr(self, name).swapaxes(1, 2))
        super()._flatten()

    def _minibatches(self, rollouts: list[Rollout], batch_size: int | None) -> Generator[Any, None, None]:
        shapes = [rollout.shape for rollout in rollouts]
        yield from sequences(self._sample_type, self._pool, shapes, batch_size, self._merge_single)

    def _evaluate(self, policy: Any, rollout: Rollout) -> tuple[Tensor, Tensor]:
        return evaluate(policy, rollout, self.action_space)

    def _continuation(self, policy: Any, rollout: Rollout) -> tuple[Tensor, Tensor | None]:
        return continuation(policy, rollout)


class VTraceRecurrentRolloutBuffer(_Recurrent, RecurrentRolloutBuffer):
    """``RecurrentRolloutBuffer`` with V-trace, for VTraceRecurrentPPO.

    Its options are those of :class:`~vtrace_plugins.sb3.VTraceMixin`.
    """

    _sample_type = RecurrentRolloutBufferSamples


class VTraceRecurrentDictRolloutBuffer(_Recurrent, RecurrentDictRolloutBuffer):
    """``RecurrentDictRolloutBuffer`` with V-trace.

    Its options are those of :class:`~vtrace_plugins.sb3.VTraceMixin`.
    """

    _sample_type = RecurrentDictRolloutBufferSamples
