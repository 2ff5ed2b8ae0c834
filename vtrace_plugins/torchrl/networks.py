"""The passes through actor and critic: as few as the data allows, and without waiting for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.distributions import Distribution


@contextmanager
def held_out(network: Any) -> Iterator[None]:
    """Keep gradients out of the network's parameters, and only those that had them; nothing to do without gradients.

    Upstream's ``hold_out_net`` unfreezes frozen parameters on its way out.
    """
    trained = [p for p in network.parameters() if p.requires_grad] if torch.is_grad_enabled() else []
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_()


@contextmanager
def unvalidated(device: torch.device) -> Iterator[None]:
    """On a GPU, build distributions without reading their arguments back: that would wait for it."""
    before = Distribution._validate_args
    if device.type == "cuda":
        Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def root_and_next_values(network: Any, tensordict: TensorDictBase, key: NestedKey) -> tuple[Tensor, Tensor]:
    """V(x_t) and V(x_{t+1}) by one plain call each; upstream stacks both inputs (a copy) and calls under vmap.

    A next observation that is NaN (as collectors with ``compact_obs=True`` leave it at a trajectory's end) is replaced
    by the observation before it, as upstream does; terminated steps never read that value.
    """
    keys = [*network.in_keys, key]
    root = tensordict.select(*keys, strict=False)
    after = tensordict.get("next").select(*keys, strict=False)
    for name in network.in_keys:
        now, then = root.get(name, None), after.get(name, None)
        if then is not None and now is not None and now.shape == then.shape and then.is_floating_point():
            after.set(name, torch.where(torch.isnan(then), now, then))
    starts = root.get("is_init", None)
    if starts is not None:  # else a recurrent net would run on from the step before an episode's first
        after.set("is_init", starts | after.get("is_init", torch.zeros_like(starts)))
    return network(root).get(key), network(after).get(key)
