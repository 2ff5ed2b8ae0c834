"""TorchRL's VTrace estimator on our core."""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, dispatch
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.objectives import A2CLoss, PPOLoss, ReinforceLoss
from torchrl.objectives.utils import ValueEstimators
from torchrl.objectives.value import VTrace
from torchrl.objectives.value.advantages import (
    _self_set_grad_enabled,
    _self_set_skip_existing,
    _standardize_by_group,
)

from vtrace_plugins._core.api import vtrace
from vtrace_plugins._core.checks import (
    VTraceError,
    check_backend,
    check_flag,
    check_known,
    check_number,
    check_time_dim,
    named_as,
)
from vtrace_plugins._core.ops import torch_must_see
from vtrace_plugins.torchrl.boundaries import both, padding_mask, split_done, unmarked_ends
from vtrace_plugins.torchrl.entries import entry, match
from vtrace_plugins.torchrl.log_probs import action_keys, collected_log_prob, recorded_log_prob, upstreams_log_prob
from vtrace_plugins.torchrl.networks import check_after, held_out, root_and_next_values, unvalidated
from vtrace_plugins.validation import Finding, Report, validate

_DEPRECATED = {"advantage_key", "value_key", "value_target_key"}  # upstream's, which says itself that set_keys is it
_NUMBERS = ("gamma", "rho_thresh", "c_thresh", "pg_rho_thresh")


def check_options(**options: Any) -> None:
    """These of the constructor's arguments: that it takes them, and what they may be."""
    known = inspect.signature(TritonVTrace).parameters.keys() | inspect.signature(VTrace).parameters.keys()
    check_known(options.keys() - _DEPRECATED, known - _DEPRECATED - {"kwargs"}, "TritonVTrace")
    of, weighted = options.get("log_prob_of", "recorded"), options.get("weight_advantages")
    if of not in ("recorded", "upstream"):
        raise VTraceError("log_prob_of", "'recorded' or 'upstream'", repr(of))
    if weighted is not None:
        check_flag("weight_advantages", weighted)
    if of == "upstream" and weighted is False:
        wanted = "True or None beside log_prob_of='upstream', whose purpose is upstream's numbers"
        raise VTraceError("weight_advantages", wanted, "False")
    for name in ("differentiable", "average_adv", "shifted"):
        if name in options:
            check_flag(name, options[name])
    check_backend(options.get("backend", "auto"))
    check_number("lmbda", options.get("lmbda", 1.0), 1.0)
    for name in _NUMBERS:
        number = options.get(name)
        absent = number is None and (name == "pg_rho_thresh" or name not in options)
        if not absent and not isinstance(number, Tensor):
            check_number(name, number, 1.0 if name == "gamma" else math.inf, "a number or a tensor")


def _unmarked(count: int) -> str:
    return (
        f"another episode after {count} steps: slices, shuffled steps, or environments in one row. Mark the ends of "
        "slices as truncated under the key that is read (SliceSampler's truncated_key), keep an environment a row, and "
        "call the estimator before anything is shuffled"
    )


def _may_be_read(x: Tensor) -> bool:
    """Whether x has data to look at without waiting: on the CPU, and not under a compiler, a tracer or a transform."""
    return x.device.type == "cpu" and type(x) in (Tensor, MemoryMappedTensor) and not torch_must_see()


def _takes_advantages(loss_module: Any) -> bool:
    """False for one of TorchRL's losses that lists its value estimators, or its keys, without V-trace or an advantage
    among them. Another's loss says less of itself."""
    if isinstance(loss_module, (A2CLoss, PPOLoss, ReinforceLoss)) or not type(loss_module).__module__.startswith(
        "torchrl."
    ):
        return True
    estimators = getattr(loss_module, "SUPPORTED_VALUE_ESTIMATORS", ())
    if estimators and ValueEstimators.VTrace not in estimators:
        return False
    keys = getattr(loss_module, "tensor_keys", None)
    names = [field.name for field in dataclasses.fields(keys)] if dataclasses.is_dataclass(keys) else []
    return not names or "advantage" in names


def _moved(number: Tensor, device: torch.device | str) -> Tensor:
    """On the device in its own dtype, or float32 where the device has no float64."""
    return number.to(device, torch.float32 if torch.device(device).type == "mps" else number.dtype)


class TritonVTrace(VTrace):
    """V-trace value estimator: :class:`torchrl.objectives.value.VTrace` with the recurrence in one kernel.

    Takes every argument of upstream's class, reads and writes the same entries, and differs in this:

    * log pi is that of the **recorded** action (upstream evaluates the distribution's mode), so on-policy every
      importance ratio is 1 and stays an importance ratio off-policy.
    * ``("next", "truncated")`` is read too, where it is present; flags may have any dtype.
    * Nothing behind a terminated step is read: a NaN there poisons no earlier step.

    Reads a tensordict ``[*B, T]``; the value is ``[*B, T, *F]`` (mostly ``F = 1``), floating. Reward, flags and
    log-probs have its shape or one entry for each step (or for each step and agent); the reward is floating or integer,
    flags are of any dtype. Writes ``"advantage"`` and ``"value_target"`` in the value's shape and dtype, the two values
    ``"state_value"`` and ``("next", "state_value")`` that it computed, all renamed by ``set_keys``, and with
    ``shifted=True`` ``"shifted_valid"``.

    Keyword Args:
        gamma (float or 0-d Tensor): discount.
        actor_network (TensorDictModule): the policy being trained; it must offer ``get_dist``.
        value_network (TensorDictModule): the value function, or None to read values from the tensordict.
        rho_thresh (float or 0-d Tensor): clip of the ratio in the temporal differences. Defaults to 1.0.
        c_thresh (float or 0-d Tensor): clip of the ratio in the trace. Defaults to 1.0.
        pg_rho_thresh (float or 0-d Tensor, optional): clip of the ratio in the advantage. Defaults to ``rho_thresh``.
        lmbda (float): lambda in [0, 1]; on-policy the unweighted advantage is GAE(lmbda). Defaults to 1.0.
        weight_advantages (bool, optional): whether the advantage carries ``min(pg_rho_thresh, pi / mu)``. A2C-like
            losses want it; PPO-like losses multiply by the ratio themselves and must not get it twice. None, the
            default, lets :meth:`for_loss` decide by the loss; an estimator built without one takes True.
        log_prob_of (str): ``"recorded"`` (the default), or ``"upstream"`` for upstream's log-probs and thereby its
            numbers; the latter implies weighted advantages.
        backend (str): as in :func:`vtrace_plugins.vtrace`. Defaults to ``"auto"``.
        **kwargs: upstream's others: ``average_adv``, ``group_key``, ``differentiable``, ``skip_existing``,
            ``shifted``, ``shifted_budget``, ``device``, ``time_dim``, ``value_chunk_size``, ``num_chunks``,
            ``value_chunk_dim``.

    Raises:
        VTraceError: for a wrong option, and in :meth:`forward` for a tensordict without the recorded action.

    Example:
        >>> loss = A2CLoss(actor, critic)
        >>> advantage = TritonVTrace.for_loss(loss, gamma=0.99)
        >>> advantage(tensordict)
        >>> loss(tensordict)
    """

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        actor_network: TensorDictModule,
        value_network: TensorDictModule | None,
        rho_thresh: float | Tensor = 1.0,
        c_thresh: float | Tensor = 1.0,
        pg_rho_thresh: float | Tensor | None = None,
        lmbda: float = 1.0,
        weight_advantages: bool | None = None,
        log_prob_of: str = "recorded",
        backend: str = "auto",
        **kwargs: Any,
    ) -> None:
        check_options(
            gamma=gamma,
            rho_thresh=rho_thresh,
            c_thresh=c_thresh,
            pg_rho_thresh=pg_rho_thresh,
            lmbda=lmbda,
            weight_advantages=weight_advantages,
            log_prob_of=log_prob_of,
            backend=backend,
            **kwargs,
        )
        if value_network is not None and not hasattr(value_network, "in_keys"):
            wanted = "a TensorDictModule, or None where the tensordict has the values"
            raise VTraceError("value_network", wanted, type(value_network).__name__)
        super().__init__(
            gamma=gamma,
            actor_network=actor_network,
            value_network=value_network,
            rho_thresh=rho_thresh,
            c_thresh=c_thresh,
            **kwargs,
        )
        # Not persistent: a checkpoint of upstream's class fits ours, whatever the options.
        self.register_buffer("pg_rho_thresh", None, persistent=False)
        for name, number in zip(_NUMBERS, (gamma, rho_thresh, c_thresh, pg_rho_thresh), strict=True):
            if number is not None:  # upstream's are in the default dtype
                x = number if isinstance(number, Tensor) else torch.tensor(float(number), dtype=torch.float64)
                x = x.detach() if isinstance(x, torch.nn.Parameter) else x  # a buffer, not one more parameter
                setattr(self, name, _moved(x, self._device or x.device))
        self._action_keys = action_keys(actor_network)
        self.lmbda = lmbda
        self.log_prob_of = log_prob_of
        self.backend = backend
        # None until for_loss has seen the loss. Without one it counts as True.
        self.weight_advantages = True if log_prob_of == "upstream" else weight_advantages
        self._warned = False
        # Given parameters, upstream's code calls the critic in a loop over states and next states, not through vmap,
        # which recurrent networks do not pass.
        self.deactivate_vmap = True

    @classmethod
    def for_loss(cls, loss_module: Any, **hyperparams: Any) -> TritonVTrace:
        """An estimator on the loss's own actor, critic and keys, weighted as that loss needs it.

        Losses of the PPO family multiply the advantage by pi/mu themselves and get it unweighted; all others weighted.

        Args:
            loss_module: a TorchRL loss, which has ``actor_network`` and ``critic_network``.
            **hyperparams: the constructor's arguments; ``gamma`` is needed, the networks default to the loss's.

        Returns:
            The estimator, with the loss's keys.

        Raises:
            VTraceError: for a loss without ``actor_network``, for one that has no use for an advantage (SAC, say), and
                as the constructor does.
        """
        if not _takes_advantages(loss_module):
            wanted = "a loss that takes an advantage (A2C, Reinforce, those of the PPO family)"
            raise VTraceError("loss_module", wanted, type(loss_module).__name__)
        if "actor_network" not in hyperparams and not hasattr(loss_module, "actor_network"):
            raise VTraceError("loss_module", "a loss with an actor_network", type(loss_module).__name__)
        estimator: TritonVTrace = super().for_loss(loss_module, **hyperparams)
        if estimator.weight_advantages is None:
            estimator.weight_advantages = not isinstance(loss_module, PPOLoss)
        keys = getattr(loss_module, "tensor_keys", None)
        names = (field.name for field in dataclasses.fields(estimator.default_keys))
        found = {name: getattr(keys, name) for name in names if getattr(keys, name, None) is not None}
        if "value" in found and not estimator._critic_writes(unravel_key(found["value"])):
            del found["value"]  # the loss's keys are yet to be set, which upstream's for_loss does not mind
        estimator.set_keys(**found)
        return estimator

    def _critic_writes(self, key: NestedKey) -> bool:
        written = getattr(self.value_network, "out_keys", None)
        return written is None or key in written

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TritonVTrace:
        """``.to``, ``.half`` and their like: gamma and the clips go to the device, and keep their dtype.

        In bfloat16, 0.99 would be 0.98828: a horizon of 85 steps instead of 100.
        """
        numbers = {name: self._buffers[name] for name in _NUMBERS}
        super()._apply(fn, recurse)
        for name, before in numbers.items():
            now = self._buffers[name]
            if before is not None and now is not None:
                self._buffers[name] = _moved(before, now.device)
        return self

    @property
    def in_keys(self) -> list[NestedKey]:
        """What :meth:`forward` reads; the recorded action is upstream's addition to make, so it is made here."""
        keys: list[NestedKey] = list(super().in_keys)
        if self.log_prob_of == "recorded":
            keys += [key for key in self._action_keys if key not in keys]
        return keys

    @property
    def truncated_key(self) -> NestedKey:
        """Where truncation is read: ``"truncated"`` beside the terminated entry."""
        key = self.tensor_keys.terminated
        return "truncated" if isinstance(key, str) else (*key[:-1], "truncated")

    @_self_set_skip_existing
    @_self_set_grad_enabled
    @dispatch
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        time_dim: int | None = None,
    ) -> TensorDictBase:
        """Write advantages and value targets of ``tensordict`` into it.

        Args:
            tensordict (TensorDictBase): data ``[*B, T]`` as collected: the actor's and critic's inputs, the action, its
                log-prob (``"action_log_prob"`` unless set_keys says otherwise), and ``("next", ...)`` with observation,
                reward and flags. The mask of ``split_trajectories``, where present, marks the real steps: padding gets
                0, and the step before it ends a window.

        Keyword Args:
            params (TensorDictBase, optional): parameters for the value network, for functional use.
            target_params (TensorDictBase, optional): its parameters for the next state's value.
            time_dim (int, optional): dimension of time; else the constructor's, else the one named "time", else the
                last.

        Returns:
            The same tensordict; a shallow copy of it if that was locked (memory-mapped data, say).

        Raises:
            VTraceError: naming the entry that is missing or has the wrong shape, dtype or device.
        """
        if target_params is not None and params is None:
            raise VTraceError("target_params", "params beside it", "target_params alone")
        if tensordict.batch_dims < 1:
            raise VTraceError("tensordict", "at least one batch dimension (time)", str(tensordict.batch_size))
        time_dim = self._resolve_time_dim(time_dim, tensordict)
        if tensordict.is_locked or entry(tensordict, "next", "the step's outcome").is_locked:
            tensordict = tensordict.copy()  # shallow; what is locked is not written to
        keys = self.tensor_keys
        given, valid = self._given(tensordict, params, target_params, time_dim)
        with named_as(self._names):
            target, advantage = vtrace(**given)
        if self.average_adv:
            advantage = self._standardized(advantage, given["mask"], tensordict)

        if valid is not None:
            tensordict.set("shifted_valid", valid)
        tensordict.set(keys.advantage, advantage)
        tensordict.set(keys.value_target, target)
        return tensordict

    def validate(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        time_dim: int | None = None,
    ) -> Report:
        """Look for likely mistakes in a batch: :func:`vtrace_plugins.validate` on what :meth:`forward` makes of it.

        And whether an episode ends where no flag says so: trajectory ids that change, or ``is_init`` at the next step,
        as in slices or shuffled steps of a replay buffer and environments flattened into one row. (On the CPU, forward
        itself raises for that; on a GPU it would have to wait.) Writes nothing; reads the data, so it waits for a GPU.

        Args:
            tensordict (TensorDictBase): as :meth:`forward` takes it.

        Keyword Args:
            params (TensorDictBase, optional): as :meth:`forward` takes them.
            target_params (TensorDictBase, optional): likewise.
            time_dim (int, optional): likewise.

        Returns:
            A :class:`~vtrace_plugins.validation.Report`: true if it has no error and no warning.

        Raises:
            VTraceError: for what :meth:`forward` refuses, but for such ends.

        Example:
            >>> print(advantage.validate(next(iter(collector))))
            nothing suspicious
        """
        time_dim = self._resolve_time_dim(time_dim, tensordict)
        data = tensordict.copy()
        with torch.no_grad():
            given, _ = self._given(data, params, target_params, time_dim, must_be_marked=False)
            with named_as(self._names):
                findings = validate(**given).findings
            ended = given["terminated"] | given["truncated"]
            unmarked = unmarked_ends(data, ended, self.tensor_keys.done, time_dim)
            missing = [Finding(str(key), _unmarked(count), "error") for key, count in unmarked]
        names = self._names()
        return Report(
            (*missing, *(found._replace(argument=names.get(found.argument, found.argument)) for found in findings))
        )

    def value_estimate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Upstream's class has none."""
        raise NotImplementedError("V-trace gives targets and advantages at once: call the estimator itself")

    def _given(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None,
        target_params: TensorDictBase | None,
        time_dim: int,
        must_be_marked: bool = True,
    ) -> tuple[dict[str, Any], Tensor | None]:
        """What :func:`vtrace_plugins.vtrace` is given, and which steps found a slot under shifted=True."""
        keys, batch_dims = self.tensor_keys, tensordict.batch_dims
        done = entry(tensordict, ("next", keys.done), "whether the episode ended")
        flags = split_done(done, *(self._flag(tensordict, key, done) for key in (keys.terminated, self.truncated_key)))
        if must_be_marked and _may_be_read(done):
            for key, count in unmarked_ends(tensordict, flags[0] | flags[1], keys.done, time_dim):
                raise VTraceError(str(key), f"one episode wherever {('next', keys.done)!s} says so", _unmarked(count))
        value, next_value, valid = self._values(tensordict, flags, params, target_params, time_dim)

        def matched(key: NestedKey, x: Tensor | None) -> Any:
            return None if x is None else match(key, x, value, batch_dims)

        terminated, truncated = (matched(("next", keys.done), flag) for flag in flags)
        steps = matched(keys.steps_to_next_obs, tensordict.get(keys.steps_to_next_obs, None))
        gamma = self._on(value.device, "gamma")
        given = {
            "log_pi": matched("log pi", self._log_pi(tensordict, value.device)),
            "log_mu": matched(keys.sample_log_prob, collected_log_prob(tensordict, keys.sample_log_prob)),
            "values": value,
            "rewards": matched(("next", keys.reward), entry(tensordict, ("next", keys.reward), "the reward")),
            "terminated": terminated,
            "truncated": truncated,
            "next_values": next_value,
            "mask": matched("mask", both(valid, padding_mask(tensordict))),
            "gamma": gamma if steps is None else (gamma**steps).to(torch.promote_types(value.dtype, torch.float32)),
            "rho_bar": self._on(value.device, "rho_thresh"),
            "c_bar": self._on(value.device, "c_thresh"),
            "pg_rho_bar": self._on(value.device, "pg_rho_thresh"),
            "lam": self.lmbda,
            "weight_advantages": self._weighted(),
            "time_dim": time_dim,
            "backend": self.backend,
        }
        return given, valid

    def _flag(self, tensordict: TensorDictBase, key: NestedKey, done: Tensor) -> Tensor | None:
        """A flag that may be absent, in the shape of done."""
        flag = tensordict.get(("next", key), None)
        return None if flag is None else match(("next", key), flag, done, tensordict.batch_dims, of="done")

    def _resolve_time_dim(self, time_dim: int | None, tensordict: TensorDictBase) -> int:
        """The call's, else the constructor's, else the dimension named "time", else the last batch dimension."""
        if time_dim is None:
            time_dim = self.time_dim
        if time_dim is None:
            time_dim = self._get_time_dim(None, tensordict)
        return check_time_dim(time_dim, tensordict.batch_dims)

    def _values(
        self,
        tensordict: TensorDictBase,
        flags: tuple[Tensor, Tensor],
        params: TensorDictBase | None,
        target_params: TensorDictBase | None,
        time_dim: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """V(x_t), V(x_{t+1}) and, under shifted=True, which steps found a slot in the one call."""
        keys = self.tensor_keys
        if self.value_network is None:
            value, next_value = (
                entry(tensordict, key, "the value, as value_network is None")
                for key in (keys.value, ("next", keys.value))
            )
            return value, next_value, tensordict.get("shifted_valid", None) if self.shifted else None
        if not self._critic_writes(keys.value):
            wanted = "an entry that the value network writes (set_keys(value=...), on the loss or the estimator)"
            raise VTraceError(str(keys.value), wanted, f"a network that writes {self.value_network.out_keys}")
        check_after(self.value_network, tensordict, keys.value)
        if params is not None and self._are_of_a_part(params):
            params = target_params = None  # the network has them, and more
        plain = params is None and not self.shifted and self.value_chunk_size is None and self.num_chunks is None
        valid = None
        with held_out(self.value_network):  # gradients may pass through, but not into its parameters
            if plain:
                value, next_value = root_and_next_values(self.value_network, tensordict, keys.value, time_dim)
                next_value = next_value.detach()
            else:
                if params is not None:
                    params = params.detach()
                    if target_params is None:
                        target_params = params.clone(False)
                value, next_value, valid = self._call_value_nets(
                    data=self._for_shifted_call(tensordict, flags, time_dim) if self.shifted else tensordict.copy(),
                    params=params,
                    next_params=target_params,
                    single_call=self.shifted,
                    value_key=keys.value,
                    detach_next=True,
                    vmap_randomness=self.vmap_randomness,
                )
        tensordict.set(keys.value, value)
        tensordict.set(("next", keys.value), next_value)
        return value, next_value, valid

    def _are_of_a_part(self, params: TensorDictBase) -> bool:
        """Whether these are parameters of a part of the value network: those of the value head of a shared backbone,
        where that is the loss's critic and the estimator has the whole operator."""
        own = TensorDict.from_module(self.value_network)
        if set(own.keys(True, True)) == set(params.keys(True, True)):
            return False
        memory = {x.data_ptr() for x in own.values(True, True)}
        if not all(x.data_ptr() in memory for x in params.values(True, True)):
            raise VTraceError(
                "params",
                "those of the value network, or of a part of it (with a shared backbone, give the estimator the loss's "
                "whole critic: value_network=...get_value_operator())",
                "another network's",
            )
        return True

    def _for_shifted_call(
        self, tensordict: TensorDictBase, flags: tuple[Tensor, Tensor], time_dim: int
    ) -> TensorDictBase:
        """Upstream's single call reads two flags, as bools, and finds time by its name alone: give it those."""
        terminated, truncated = flags
        data = tensordict.copy()
        data.set(("next", self.tensor_keys.done), terminated | truncated)
        data.set(("next", self.tensor_keys.terminated), terminated)
        data.names = ["time" if i == time_dim else None for i in range(data.batch_dims)]
        return data

    def _log_pi(self, tensordict: TensorDictBase, device: torch.device) -> Tensor:
        if not hasattr(self.actor_network, "get_dist"):
            raise VTraceError("actor_network", "a module with get_dist", type(self.actor_network).__name__)
        with held_out(self.actor_network), unvalidated(device):
            if self.log_prob_of == "recorded":
                return recorded_log_prob(self.actor_network, self._action_keys, tensordict)
            return upstreams_log_prob(self.actor_network, tensordict)

    def _weighted(self) -> bool:
        if self.weight_advantages is None and not self._warned:
            self._warned = True
            warnings.warn(
                "this TritonVTrace was built without its loss, so its advantages carry the importance weight "
                "min(rho, pi/mu), as A2C-like losses want them. PPO-like losses multiply by pi/mu themselves: pass "
                "weight_advantages=False for those (or True to say that this is meant), or build it with "
                "TritonVTrace.for_loss(loss, ...).",
                stacklevel=2,
            )
        return self.weight_advantages is not False

    def _names(self) -> dict[str, str]:
        """What the core's arguments are called here, for its errors."""
        keys = self.tensor_keys
        return {
            "log_mu": str(keys.sample_log_prob),
            "values": str(keys.value),
            "next_values": str(("next", keys.value)),
            "rewards": str(("next", keys.reward)),
            "terminated": str(("next", keys.terminated)),
            "truncated": str(("next", self.truncated_key)),
            "rho_bar": "rho_thresh",
            "c_bar": "c_thresh",
            "pg_rho_bar": "pg_rho_thresh",
            "lam": "lmbda",
        }

    def _on(self, device: torch.device, name: str) -> Any:
        """A buffer (pg_rho_thresh may be None), moved once to where the data is."""
        buffer = self._buffers[name]
        if buffer is not None and buffer.device != device:
            buffer = _moved(buffer, device)
            setattr(self, name, buffer)
        return buffer

    def _standardized(self, advantage: Tensor, real: Tensor | None, tensordict: TensorDictBase) -> Tensor:
        """Zero mean and unit deviation over the real steps, or over those of each group."""
        dtype = advantage.dtype
        advantage = advantage.to(torch.promote_types(dtype, torch.float32))  # sums of squares overflow float16
        groups = self._group_ids(tensordict)
        real = torch.ones_like(advantage, dtype=torch.bool) if real is None else real
        if groups is not None:
            return torch.where(real, _standardize_by_group(advantage, groups, mask=real, eps=1e-5), 0.0).to(dtype)
        count = real.sum()
        centred = torch.where(real, advantage - advantage.sum() / count.clamp_min(1), 0.0)
        deviation = (centred.square().sum() / (count - 1).clamp_min(1)).sqrt()
        return (centred / deviation.clamp_min(1e-5)).to(dtype)
