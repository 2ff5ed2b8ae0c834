"""What recurrent policies need: evaluation of whole sequences, and minibatches of padded ones."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from torch import Tensor

from vtrace_plugins.sb3.evaluate import evaluating, in_chunks, policy_actions, rows_at_once
from vtrace_plugins.sb3.minibatches import edges
from vtrace_plugins.sb3.observations import each, join
from vtrace_plugins.sb3.rollout import Rollout


def _states(rows: dict[str, Any], net: str, where: Any) -> tuple[Tensor, Tensor]:
    """(hidden, cell) ``[layers, k, dim]`` of the rows at ``where``, those before the step."""
    hidden, cell = (rows[f"{kind}_states_{net}"][where].swapaxes(0, 1).contiguous() for kind in ("hidden", "cell"))
    return hidden, cell


def evaluate(policy: Any, rollout: Rollout, space: spaces.Space[Any]) -> tuple[Tensor, Tensor]:
    """(values, log-probs) of the rollout's rows, each environment one sequence from its state at step 0."""
    (n_envs, steps), rows = rollout.shape, rollout.rows
    actions = policy_actions(rows["actions"], space)

    def chunk(envs: slice) -> tuple[Tensor, ...]:
        some = slice(envs.start * steps, envs.stop * steps)
        first = slice(some.start, some.stop, steps)
        states = RNNStates(*(tuple(x.to(policy.device) for x in _states(rows, net, first)) for net in ("pi", "vf")))
        inputs = each(lambda x: x[some].to(policy.device, copy=True), rows["observations"])
        starts = rows["episode_starts"][some].flatten().to(policy.device)
        values, log_probs, _ = policy.evaluate_actions(inputs, actions[some].to(policy.device), states, starts)
        return values, log_probs

    at_once = max(1, rows_at_once(rows["observations"]) // steps)
    with evaluating(policy):
        values, log_probs = in_chunks(chunk, n_envs, at_once, actions.device)
    return values, log_probs


def continuation(policy: Any, rollout: Rollout) -> tuple[Tensor, Tensor | None]:
    """V(s_T) ``[N]``, and V of the terminal observations, from the states that collection left behind."""
    steps, rows = rollout.shape[1], rollout.rows
    device = rows["values"].device
    last = tuple(x.to(device) for x in rollout.end.states.vf)

    def values(observations: Any, states: tuple[Tensor, ...], starts: Any) -> Tensor:
        def chunk(some: slice) -> tuple[Tensor, ...]:
            inputs, _ = policy.obs_to_tensor(each(operator.itemgetter(some), observations))
            lstm = tuple(x[:, some].contiguous().to(policy.device) for x in states)
            return (policy.predict_values(inputs, lstm, starts[some].to(policy.device)),)

        with evaluating(policy):
            return in_chunks(chunk, len(starts), rows_at_once(observations), device)[0]

    starts = torch.as_tensor(rollout.end.dones, dtype=torch.float32)
    last_values = values(rollout.end.observations, last, starts)
    if not rollout.recorder.terminal:
        return last_values, None
    t, env = np.nonzero(rollout.recorder.truncated)
    at_end = torch.as_tensor(t == steps - 1, device=device)[None, :, None]
    after = _states(rows, "vf", torch.as_tensor(env * steps + np.minimum(t + 1, steps - 1), device=device))
    states = tuple(
        torch.where(at_end, x[:, torch.as_tensor(env, device=device)], y) for x, y in zip(last, after, strict=True)
    )
    return last_values, values(join(np.stack, rollout.recorder.terminal), states, torch.zeros(len(t)))


def sequences(
    sample_type: Callable[..., Any],
    rows: dict[str, Any],
    shapes: list[tuple[int, int]],
    batch_size: int | None,
    merge_single: bool,
) -> Generator[Any, None, None]:
    """Minibatches of rows in order of time, cut where an episode or an environment starts, and padded with zeros to the
    longest piece: ``[pieces * longest, ...]``. As in sb3-contrib, the order is turned by a random number of rows.

    ``shapes`` are the rollouts' (environments, steps).
    """
    device = rows["values"].device
    starts = rows["episode_starts"].flatten().cpu().numpy() != 0
    total = len(starts)
    starts |= np.concatenate([np.arange(n_envs * steps) % steps == 0 for n_envs, steps in shapes])
    order = np.roll(np.arange(total), -np.random.randint(total))

    for begin, end in pairwise(edges(total, batch_size, merge_single)):
        batch = order[begin:end]
        first = np.flatnonzero(np.append(True, starts[batch[1:]]))
        lengths = np.diff(np.append(first, len(batch)))
        offsets = np.arange(lengths.max())
        is_real = offsets < lengths[:, None]
        index = torch.as_tensor(batch, device=device)
        places = torch.as_tensor(np.where(is_real, first[:, None] + offsets, len(batch)).flatten(), device=device)

        def padded(x: Tensor) -> Tensor:
            # by gathers alone, from the batch and a row of zeros: torch has little else for unsigned dtypes
            return torch.cat([x[index], x.new_zeros((1, *x.shape[1:]))])[places]  # noqa: B023

        heads = torch.as_tensor(batch[first], device=device)
        yield sample_type(
            observations=each(padded, rows["observations"]),
            actions=padded(rows["actions"]),
            old_values=padded(rows["values"]),
            old_log_prob=padded(rows["log_probs"]),
            advantages=padded(rows["advantages"]),
            returns=padded(rows["returns"]),
            lstm_states=RNNStates(_states(rows, "pi", heads), _states(rows, "vf", heads)),
            episode_starts=padded(rows["episode_starts"].flatten()),
            mask=torch.as_tensor(is_real.flatten(), dtype=torch.float32, device=device),
        )
