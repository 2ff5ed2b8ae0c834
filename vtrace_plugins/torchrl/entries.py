"""Entries of a tensordict: present, and in the value's shape, or an error that names the key."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from vtrace_plugins._core.checks import VTraceError


def entry(tensordict: TensorDictBase, key: NestedKey, why: str) -> Any:
    """What stands under ``key``, a tensor or a tensordict, or an error that names the key."""
    found = tensordict.get(key, None)
    if found is None:
        keys = tensordict.keys(include_nested=True, leaves_only=True)
        beside = sorted(str(k) for k in keys if (k[0] == "next") == (key[0] == "next"))  # of the same step
        raise VTraceError(str(key), f"an entry in the tensordict ({why})", f"the keys {beside}")
    if not isinstance(found, Tensor) and (is_non_tensor(found) or not is_tensor_collection(found)):
        raise VTraceError(str(key), f"a tensor ({why})", type(getattr(found, "data", found)).__name__)
    return found


def match(key: NestedKey, x: Tensor, value: Tensor, batch_dims: int, of: str = "the value") -> Tensor:
    """x in the shape of value, where it has one entry for each step, or for each step and agent.

    ``[B, T]``, ``[B, T, 1]`` and ``[B, T, agents, 1]`` all fit values of ``[B, T, agents, 1]``. Nothing is copied.
    """
    if not isinstance(x, Tensor):
        raise VTraceError(str(key), "a tensor", type(x).__name__)
    if x.device != value.device:
        raise VTraceError(str(key), f"device {value.device} (that of {of})", f"device {x.device}")
    if x.shape == value.shape:
        return x
    steps = x
    while steps.ndim > batch_dims and steps.shape[-1] == 1:
        steps = steps.squeeze(-1)
    if steps.ndim < batch_dims or steps.shape != value.shape[: steps.ndim]:
        raise VTraceError(
            str(key), f"shape {list(value.shape)} (that of {of}) or one entry a step", f"shape {list(x.shape)}"
        )
    return steps.reshape(*steps.shape, *[1] * (value.ndim - steps.ndim)).expand(value.shape)
