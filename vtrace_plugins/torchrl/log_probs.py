"""log pi and log mu out of a tensordict."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase, is_tensor_collection
from tensordict.nn import CompositeDistribution, set_composite_lp_aggregate
from torch import Tensor

from vtrace_plugins._core.checks import VTraceError


def recorded_log_prob(actor: Any, tensordict: TensorDictBase) -> Tensor:
    """log pi(a_t | x_t) of the action in the tensordict, under the actor's current parameters.

    Upstream's VTrace drops that action and takes the log-prob of the distribution's mode (or of a fresh sample), so its
    ratios are not 1 on-policy.
    """
    dist = actor.get_dist(tensordict.select(*actor.in_keys, strict=False))
    composite = isinstance(dist, CompositeDistribution)
    keys = list(dist.dists) if composite else actor.dist_sample_keys[:1]
    for key in keys:
        if tensordict.get(key, None) is None:
            raise VTraceError(
                f"action: expected the recorded action under {key!r} in the tensordict (log_prob_of='recorded' needs "
                f"it), got the keys {sorted(map(str, tensordict.keys()))}; record it, or pass log_prob_of='upstream' "
                "for the log-prob of the distribution's mode, as upstream's VTrace does"
            )
    with set_composite_lp_aggregate(True):
        log_prob: Tensor = dist.log_prob(tensordict.select(*keys) if composite else tensordict.get(keys[0]))
    return log_prob


def summed(log_prob: Any) -> Tensor:
    """The parts of a composite log-prob added up; a plain one as it is."""
    return log_prob.sum(dim="feature", reduce=True) if is_tensor_collection(log_prob) else log_prob


def match(log_prob: Tensor, value: Tensor) -> Tensor:
    """log_prob in the shape of value: one log-prob a step, for as many values as that step has."""
    if log_prob.numel() == value.numel():
        return log_prob.reshape(value.shape)
    if log_prob.ndim == value.ndim - 1:
        log_prob = log_prob.unsqueeze(-1)
    return log_prob.expand_as(value)
