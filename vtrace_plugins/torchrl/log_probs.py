"""log pi and log mu out of a tensordict."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase, is_tensor_collection
from tensordict.nn import CompositeDistribution, InteractionType, set_composite_lp_aggregate
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.modules import MaskedOneHotCategorical, OneHotCategorical
from torchrl.objectives.value.advantages import _call_actor_net

from vtrace_plugins._core.checks import VTraceError
from vtrace_plugins.torchrl.entries import entry
from vtrace_plugins.torchrl.networks import chosen_interaction, distribution

_ONE_HOT = (OneHotCategorical, MaskedOneHotCategorical)  # their event_shape says nothing of the action's


def action_keys(actor: Any) -> list[NestedKey]:
    """Where the actor writes, and so where a collector records, the action."""
    keys: list[NestedKey] = getattr(actor, "dist_sample_keys", None) or list(getattr(actor, "out_keys", ()))
    return keys


def recorded_log_prob(actor: Any, keys: list[NestedKey], tensordict: TensorDictBase) -> Tensor:
    """log pi(a_t | x_t) of the action in the tensordict (under the actor's ``action_keys``), as the actor stands now.

    Upstream's VTrace drops that action and takes the log-prob of the distribution's mode (or of a fresh sample), so its
    ratios are not 1 on-policy.
    """
    dist = distribution(actor, tensordict)
    composite = isinstance(dist, CompositeDistribution)
    dists = dist.dists if composite else {keys[0]: dist}
    for key, part in dists.items():
        action = entry(
            tensordict,
            key,
            "the recorded action, which log_prob_of='recorded' evaluates: record it, or pass log_prob_of='upstream' "
            "for the log-prob of the distribution's mode, as upstream's VTrace does",
        )
        _check_action(key, action, part)
    with set_composite_lp_aggregate(True):
        log_prob: Tensor = dist.log_prob(tensordict.select(*dists) if composite else action)
    return log_prob


def upstreams_log_prob(actor: Any, tensordict: TensorDictBase) -> Tensor:
    """What upstream's VTrace takes for log pi: that of the distribution's mode, or of whatever else the actor's
    interaction type chooses."""
    chosen = chosen_interaction(actor)
    if chosen is InteractionType.RANDOM:
        return _call_actor_net(actor_net=actor, data=tensordict, params=None, log_prob_key="sample_log_prob")
    dist = distribution(actor, tensordict)
    action = actor._dist_sample(dist, interaction_type=chosen)
    with set_composite_lp_aggregate(True):
        log_prob: Tensor = dist.log_prob(action)
    return log_prob


def _check_action(key: NestedKey, action: Any, dist: Any) -> None:
    """``log_prob`` would broadcast an action of another shape, and read an index as if it were one-hot."""
    if not isinstance(action, Tensor):
        raise VTraceError(str(key), "a tensor, the recorded action", type(action).__name__)
    shape = dist.logits.shape if isinstance(dist, _ONE_HOT) else dist.batch_shape + dist.event_shape
    if action.shape != shape:
        wanted = f"shape {list(shape)} (of an action of the actor's {type(dist).__name__})"
        raise VTraceError(str(key), wanted, f"shape {list(action.shape)}")


def collected_log_prob(tensordict: TensorDictBase, key: NestedKey | list[NestedKey]) -> Tensor:
    """log mu(a_t | x_t) as the collector wrote it; the parts of a composite one (a list of keys) added up."""
    why = (
        "the log-prob of the action under the policy that collected it: build the actor with return_log_prob=True, or "
        "name the entry with the estimator's set_keys(sample_log_prob=...)"
    )
    if key == []:
        raise VTraceError("sample_log_prob", "at least one key", "none")
    if not isinstance(key, list):
        return summed(entry(tensordict, key, why))
    for one in key:
        entry(tensordict, one, why)
    return summed(tensordict.select(*key))


def summed(log_prob: Any) -> Tensor:
    """The parts of a composite log-prob added up; a plain one as it is."""
    return log_prob.sum(dim="feature", reduce=True) if is_tensor_collection(log_prob) else log_prob
