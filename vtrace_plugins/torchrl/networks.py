"""The passes through actor and critic: as few as the data allows, and without waiting for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    set_interaction_type,
    skip_existing,
)
from tensordict.nn.probabilistic import interaction_type
from tensordict.utils import NestedKey
from torch import Tensor
from torch.distributions import Distribution
from torchrl.modules import ProbabilisticActor, SafeProbabilisticModule, ValueOperator

from vtrace_plugins._core.checks import VTraceError
from vtrace_plugins.torchrl.categorical import Categorical
from vtrace_plugins.torchrl.entries import entry


@contextmanager
def held_out(network: Any) -> Iterator[None]:
    """Keep gradients out of the network's parameters, and only those that had them; nothing to do without gradients.

    Upstream's ``hold_out_net`` unfreezes those that were frozen, if the first one was not.
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


def _is_plain(module: Any) -> bool:
    """Whether calling it comes to ``module.module`` on its inputs: no option or hook of tensordict's is in between."""
    return (
        type(module) in (TensorDictModule, ValueOperator)
        and not isinstance(module.module, TensorDictModuleBase)
        and module.method is None
        and module._kwargs is None
        and not (module._forward_hooks or module._forward_pre_hooks or skip_existing())
    )


def _outputs(module: Any, inputs: list[Any]) -> dict[NestedKey, Any] | None:
    """What a module writes, if it is a plain one that gives tensors; tensordict's own way takes longer than a small
    network does."""
    if any(x is None for x in inputs) or not _is_plain(module):
        return None
    found = module.module(*inputs)
    found = found if isinstance(found, tuple) else (found,)
    if len(found) != len(module.out_keys_source) or not all(isinstance(x, Tensor) for x in found):
        return None
    return dict(zip(module.out_keys_source, found, strict=True))


def _last(module: ProbabilisticTensorDictModule, entries: dict[NestedKey, Any], tensordict: TensorDictBase) -> Any:
    """Its distribution, of the entries that the modules before it wrote and else of the tensordict's (a mask, say)."""
    if (
        module.distribution_class is torch.distributions.Categorical
        and type(module) in (ProbabilisticTensorDictModule, SafeProbabilisticModule)
        and list(module.dist_keys) == ["logits"]
        and not module.distribution_kwargs
        and module.in_keys[0] in entries
    ):
        return Categorical(entries[module.in_keys[0]])
    state = tensordict.select(*module.in_keys, strict=False).copy()  # shallow, nested ones too
    return module.get_dist(state.update(entries))


def distribution(actor: Any, tensordict: TensorDictBase) -> Any:
    """``actor.get_dist`` of the tensordict, by the short way where its modules are plain."""
    if type(actor) in (ProbabilisticActor, ProbabilisticTensorDictSequential) and not actor.return_composite:
        *modules, last = actor.module.children()
        if isinstance(last, ProbabilisticTensorDictModule):
            entries: dict[NestedKey, Any] = {}
            with set_interaction_type(interaction_type() or actor.default_interaction_type):
                for module in modules:
                    inputs = [entries[k] if k in entries else tensordict.get(k, None) for k in module.in_keys]
                    found = _outputs(module, inputs)
                    if found is None:
                        break
                    entries |= found
                else:
                    return _last(last, entries, tensordict)
    return actor.get_dist(tensordict.select(*actor.in_keys, strict=False))


class WithDistribution:
    """An actor whose ``get_dist`` is :func:`distribution`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def get_dist(self, tensordict: TensorDictBase) -> Any:
        return distribution(self._actor, tensordict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)


def root_and_next_values(
    network: Any, tensordict: TensorDictBase, key: NestedKey, time_dim: int
) -> tuple[Tensor, Tensor]:
    """V(x_t) and V(x_{t+1}) by one plain call on both, side by side along a batch dimension; upstream takes vmap.

    A next observation that is NaN (as collectors with ``compact_obs=True`` leave it at a trajectory's end) is replaced
    by the observation before it, as upstream does; terminated steps never read that value.
    """
    after = tensordict.get("next")
    only_time = tensordict.batch_dims == 1
    dim = 0 if only_time or time_dim > 0 else 1
    join = torch.stack if only_time else torch.cat
    shape = list(tensordict.batch_size)
    shape = [2, *shape] if only_time else [*shape[:dim], 2 * shape[dim], *shape[dim + 1 :]]

    joined: dict[NestedKey, Tensor] = {}
    for name in (*network.in_keys, *((key,) if skip_existing() else ())):
        now, then = tensordict.get(name, None), after.get(name, None)
        if now is None or (then is None and name == key):
            continue  # the network says what it misses
        if name == "is_init":  # else a recurrent net would run on from the step before an episode's first
            then = now if then is None else then | now
        elif then is None:
            raise VTraceError(str(("next", name)), "an input of the value network after the step too", "nothing")
        elif now.shape != then.shape:
            wanted = f"shape {list(now.shape)} (that of {name!r})"
            raise VTraceError(str(("next", name)), wanted, f"shape {list(then.shape)}")
        elif name != key and now.is_floating_point():
            then = torch.where(torch.isnan(then), now, then)
        joined[name] = join([now, then], dim)
    found = _outputs(network, [joined.get(name) for name in network.in_keys])
    values = None if found is None else found.get(key)
    if values is None:
        both = TensorDict(joined, batch_size=shape, device=tensordict.device)
        values = entry(network(both), key, "the value, which the value network should write: set_keys(value=...)")
    root, following = values.unbind(dim) if only_time else values.chunk(2, dim)
    return root, following
