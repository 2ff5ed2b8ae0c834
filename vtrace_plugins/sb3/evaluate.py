"""log pi and V of a rollout under an algorithm's current policy: no gradient, evaluation mode, restored after."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from vtrace_plugins.sb3.observations import each

_ELEMENTS_AT_ONCE = 2**24  # of observations on their way through the networks
_ROWS_AT_ONCE = 2**16


def snapshot(policy: torch.nn.Module) -> list[Tensor]:
    """A copy of all that the policy's outputs depend on."""
    return [t.detach().clone() for t in (*policy.parameters(), *policy.buffers())]


def is_unmoved(policy: torch.nn.Module, since: list[Tensor]) -> bool:
    """Whether the policy is as it was. By content: fused optimisers, and writes to ``data``, count no version up."""
    now = [*policy.parameters(), *policy.buffers()]
    return len(now) == len(since) and all(
        x.shape == y.shape and x.device == y.device and torch.equal(x, y) for x, y in zip(now, since, strict=True)
    )


@contextmanager
def evaluating(policy: Any) -> Iterator[None]:
    """Dropout and batch norm as they were when the actions were drawn."""
    training = policy.training
    policy.set_training_mode(False)
    try:
        with torch.no_grad():
            yield
    finally:
        policy.set_training_mode(training)


def rows_at_once(observations: Any) -> int:
    """How many rows of observations ``[rows, ...]`` to hand to the policy in one call."""
    arrays = observations.values() if isinstance(observations, dict) else [observations]
    row = max(1, sum(math.prod(x.shape[1:]) for x in arrays))
    return max(1, min(_ROWS_AT_ONCE, _ELEMENTS_AT_ONCE // row))


def policy_actions(actions: Tensor, space: spaces.Space[Any]) -> Tensor:
    """Recorded actions as ``evaluate_actions`` takes them."""
    return actions.long().flatten() if isinstance(space, spaces.Discrete) else actions


def in_chunks(
    function: Callable[[slice], tuple[Tensor, ...]], rows: int, at_once: int, device: torch.device
) -> tuple[Tensor, ...]:
    """What ``function`` gives for slices of the rows, each flattened, float32, joined on ``device``."""
    parts = [function(slice(start, start + at_once)) for start in range(0, rows, at_once)]
    return tuple(torch.cat([x.flatten().float() for x in one]).to(device) for one in zip(*parts, strict=True))


def evaluate(policy: Any, rows: dict[str, Any], space: spaces.Space[Any], *extras: str) -> tuple[Tensor, Tensor]:
    """(values, log-probs) of the recorded actions, ``[rows]``; ``extras`` go to the policy under their names."""
    observations, actions = rows["observations"], policy_actions(rows["actions"], space)

    def chunk(some: slice) -> tuple[Tensor, ...]:
        inputs = each(lambda x: x[some].to(policy.device, copy=True), observations)  # policies may work in place
        more = {name: rows[name][some].to(policy.device) for name in extras}
        values, log_probs, _ = policy.evaluate_actions(inputs, actions[some].to(policy.device), **more)
        return values, log_probs

    with evaluating(policy):
        values, log_probs = in_chunks(chunk, len(actions), rows_at_once(observations), actions.device)
    return values, log_probs


def values_of(policy: Any, observations: Any, device: torch.device) -> Tensor:
    """V of a batch of observations as the environment gives them (NumPy), ``[batch]``."""
    batch = len(next(iter(observations.values())) if isinstance(observations, dict) else observations)

    def chunk(some: slice) -> tuple[Tensor, ...]:
        inputs, _ = policy.obs_to_tensor(each(operator.itemgetter(some), observations))
        return (policy.predict_values(inputs),)

    with evaluating(policy):
        (values,) = in_chunks(chunk, batch, rows_at_once(each(np.asarray, observations)), device)
    return values
