"""The passes through actor and critic: as few as the data allows, and without waiting for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    set_interaction_type,
    skip_existing,
)
from tensordict.nn.probabilistic import interaction_type
from tensordict.utils import NestedKey
from torch import Tensor
from torch.distributions import Distribution
from torchrl.modules import ProbabilisticActor

from vtrace_plugins._core.checks import VTraceError
from vtrace_plugins.torchrl.entries import entry
from vtrace_plugins.torchrl.plain import called, written


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


def chosen_interaction(actor: Any) -> Any:
    """The interaction type of the context, else the actor's."""
    return interaction_type() or actor.default_interaction_type


def _goes_through(actor: Any) -> tuple[list[Any], Any]:
    """The modules that ``actor.get_dist`` runs, and the last, whose distribution it is; none where it does more."""
    if type(actor) not in (ProbabilisticActor, ProbabilisticTensorDictSequential) or actor.return_composite:
        return [], None
    before, (*_, last) = actor.det_part.module, actor.module.children()
    before = list(before.children() if isinstance(before, torch.nn.ModuleDict) else before)
    return before, last if isinstance(last, ProbabilisticTensorDictModule) else None


def distribution(actor: Any, tensordict: TensorDictBase) -> Any:
    """``actor.get_dist`` of the tensordict, by the short way where its modules are plain."""
    state = tensordict.select(*actor.in_keys, strict=False)
    modules, last = _goes_through(actor)
    if last is None:
        return actor.get_dist(state)
    state = state.copy()  # shallow, nested ones too
    with set_interaction_type(chosen_interaction(actor)):
        for module in modules:
            found = called(module, [state.get(key, None) for key in module.in_keys])
            state = written(module, found, state)
    return last.get_dist(state)


def _assembled(entries: dict[NestedKey, Tensor], shape: list[int], like: TensorDictBase) -> TensorDict:
    """A tensordict of the entries; nested ones have as many batch dimensions as in ``like``."""
    found = TensorDict(entries, batch_size=shape, device=like.device)
    for name, x in entries.items():
        for depth in range(1, len(name)) if isinstance(name, tuple) else ():
            found.get(name[:depth]).batch_size = x.shape[: like.get(name[:depth]).batch_dims]
    return found


def check_after(network: Any, tensordict: TensorDictBase, key: NestedKey) -> None:
    """That every input of the value network that is there is there after the step, too."""
    after = tensordict.get("next")
    for name in network.in_keys:
        if name not in ("is_init", key) and tensordict.get(name, None) is not None and after.get(name, None) is None:
            wanted = (
                "an input of the value network after the step too (if an actor's module writes it, give the estimator "
                "the whole operator: value_network=...get_value_operator(); compact_obs=True leaves observations out)"
            )
            raise VTraceError(str(("next", name)), wanted, "nothing")


def _without_nan(then: Any, now: Any) -> Any:
    """An observation (a tensor, or a tensordict of them), with what stood there before the step where it is NaN."""
    if is_tensor_collection(then):
        return then if is_non_tensor(then) else then.apply(_without_nan, now)
    return torch.where(torch.isnan(then), now, then) if then.is_floating_point() else then


def root_and_next_values(
    network: Any, tensordict: TensorDictBase, key: NestedKey, time_dim: int
) -> tuple[Tensor, Tensor]:
    """V(x_t) and V(x_{t+1}) by one plain call on both, side by side along a batch dimension; upstream takes vmap.

    Data that has no dimension but time takes two calls: to a network, more rows would be more time.

    A next observation that is NaN (as collectors with ``compact_obs=True`` leave it at a trajectory's end) is replaced
    by the observation before it, as upstream does; terminated steps never read that value.
    """
    after = tensordict.get("next")
    first: dict[NestedKey, Tensor] = {}
    second: dict[NestedKey, Tensor] = {}
    for name in (*network.in_keys, *((key,) if skip_existing() else ())):
        now, then = tensordict.get(name, None), after.get(name, None)
        if now is None or (then is None and name != "is_init"):
            continue  # the network says what it misses
        if name == "is_init":  # else a recurrent net would run on from the step before an episode's first
            then = now if then is None else then | now
        elif now.shape != then.shape:
            wanted = f"shape {list(now.shape)} (that of {name!r})"
            raise VTraceError(str(("next", name)), wanted, f"shape {list(then.shape)}")
        elif name != key:
            then = _without_nan(then, now)
        first[name], second[name] = now, then

    def values(entries: dict[NestedKey, Tensor], shape: list[int]) -> Tensor:
        found = called(network, [entries.get(name) for name in network.in_keys])
        if isinstance(found, Tensor) and network.out_keys == [key]:
            return found
        state = written(network, found, _assembled(entries, shape, tensordict))
        value: Tensor = entry(state, key, "the value")
        return value

    shape = list(tensordict.batch_size)
    if len(shape) == 1:
        return values(first, shape), values(second, shape)
    dim = 0 if time_dim > 0 else 1
    shape[dim] *= 2
    root, following = values({name: torch.cat([first[name], second[name]], dim) for name in first}, shape).chunk(2, dim)
    return root, following
