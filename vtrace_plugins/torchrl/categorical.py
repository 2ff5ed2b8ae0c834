"""torch's Categorical by fewer kernels."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor
from torch.distributions import Categorical as _Categorical
from torch.distributions import Distribution
from torchrl.modules import SafeProbabilisticModule


class Categorical(_Categorical):
    """The same distribution, log-probs and mode, of logits.

    torch's takes some ten kernels for the log-sum-exp that it subtracts, and a softmax for the mode. One does here, and
    none; launching those took longer than a small network.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = self._param = logits.log_softmax(-1)
        self._num_events = logits.shape[-1]
        Distribution.__init__(self, logits.shape[:-1])

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args or value.shape != self.batch_shape:
            return super().log_prob(value)
        return self.logits.gather(-1, value.long().unsqueeze(-1)).squeeze(-1)

    @cached_property
    def deterministic_sample(self) -> Tensor:
        """The mode, by the name that tensordict asks for (twice: whether it is there, and for it)."""
        return self.logits.argmax(-1)

    @property
    def mode(self) -> Tensor:
        return self.deterministic_sample


def built(module: Any, state: TensorDictBase) -> Any:
    """``module.get_dist(state)``, with this Categorical in the place of torch's."""
    if (
        module.distribution_class is _Categorical
        and type(module) in (ProbabilisticTensorDictModule, SafeProbabilisticModule)
        and list(module.dist_keys) == ["logits"]
        and not module.distribution_kwargs
    ):
        logits = state.get(module.in_keys[0], None)
        if isinstance(logits, Tensor) and logits.is_floating_point() and logits.ndim > 0:
            return Categorical(logits)
    return module.get_dist(state)
