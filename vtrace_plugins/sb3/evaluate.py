"""log pi and V of a rollout under an algorithm's current policy: no gradient, evaluation mode, restored after."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.utils import obs_as_tensor

_ROWS_AT_ONCE = 8192  # of observations on the device


def fingerprint(policy: torch.nn.Module) -> tuple[tuple[int, int], ...]:
    """Changes whenever a parameter or buffer of the policy is replaced or written to."""
    return tuple((id(t), t._version) for t in (*policy.parameters(), *policy.buffers()))


@contextmanager
def _evaluating(policy: Any) -> Iterator[None]:
    """Dropout and batch norm as they were when the actions were drawn."""
    training = policy.training
    policy.set_training_mode(False)
    try:
        with torch.no_grad():
            yield
    finally:
        policy.set_training_mode(training)


def each(function: Callable[[np.ndarray], np.ndarray], observations: Any) -> Any:
    """``function`` of an array of observations, or of every entry of a dict of them."""
    if isinstance(observations, dict):
        return {key: function(x) for key, x in observations.items()}
    return function(observations)


def _flat(x: np.ndarray) -> np.ndarray:
    """[T, N, ...] as [T * N, ...], a view."""
    return x.reshape(-1, *x.shape[2:])


def evaluate(algorithm: Any, buffer: Any, observations: Any, actions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, log-probs) of the recorded actions, float32 on the CPU, ``[T, N]``."""
    policy, shape = algorithm.policy, actions.shape[:2]
    observations, actions = each(_flat, observations), _flat(actions)
    values, log_probs = [], []
    with _evaluating(policy):
        for start in range(0, len(actions), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            taken = buffer.to_torch(actions[rows].astype(np.float32, copy=False))
            if isinstance(buffer.action_space, spaces.Discrete):
                taken = taken.long().flatten()
            inputs = obs_as_tensor(each(operator.itemgetter(rows), observations), policy.device)
            value, log_prob, _ = policy.evaluate_actions(inputs, taken)
            values.append(value.flatten().float().cpu())
            log_probs.append(log_prob.flatten().float().cpu())
    return torch.cat(values).view(shape), torch.cat(log_probs).view(shape)


def values_of(algorithm: Any, observations: Any) -> torch.Tensor:
    """V of a batch of observations, float32 on the CPU, ``[batch]``."""
    policy = algorithm.policy
    with _evaluating(policy):
        inputs, _ = policy.obs_to_tensor(observations)
        value: torch.Tensor = policy.predict_values(inputs).flatten().float().cpu()
    return value
