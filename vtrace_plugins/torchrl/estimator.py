"""TorchRL's VTrace estimator on our core."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, dispatch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives import PPOLoss
from torchrl.objectives.utils import _maybe_get_or_select, hold_out_net
from torchrl.objectives.value import VTrace
from torchrl.objectives.value.advantages import (
    _call_actor_net,
    _self_set_grad_enabled,
    _self_set_skip_existing,
    _standardize_by_group,
)

from vtrace_plugins._core.api import vtrace
from vtrace_plugins._core.checks import VTraceError, check_backend
from vtrace_plugins.torchrl.boundaries import split_done
from vtrace_plugins.torchrl.log_probs import match, recorded_log_prob, summed


class TritonVTrace(VTrace):
    """V-trace value estimator: :class:`torchrl.objectives.value.VTrace` with the recurrence in one kernel.

    Takes every argument of upstream's class, reads and writes the same entries, and differs in this:

    * log pi is that of the **recorded** action (upstream evaluates the distribution's mode), so on-policy every
      importance ratio is 1 and stays an importance ratio off-policy.
    * ``("next", "truncated")`` is read too, where it is present; flags may have any dtype.
    * Nothing behind a terminated step is read: a NaN there poisons no earlier step.

    Writes ``"advantage"`` and ``"value_target"`` (or the keys set by ``set_keys``), in the shape of the value.

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
        value_network: TensorDictModule,
        rho_thresh: float | Tensor = 1.0,
        c_thresh: float | Tensor = 1.0,
        pg_rho_thresh: float | Tensor | None = None,
        lmbda: float = 1.0,
        weight_advantages: bool | None = None,
        log_prob_of: str = "recorded",
        backend: str = "auto",
        **kwargs: Any,
    ) -> None:
        if log_prob_of not in ("recorded", "upstream"):
            raise VTraceError(f"log_prob_of: expected 'recorded' or 'upstream', got {log_prob_of!r}")
        if log_prob_of == "upstream" and weight_advantages is False:
            raise VTraceError(
                "weight_advantages: expected True (or nothing) beside log_prob_of='upstream', whose purpose is "
                "upstream's numbers, got False"
            )
        check_backend(backend)
        super().__init__(
            gamma=gamma,
            actor_network=actor_network,
            value_network=value_network,
            rho_thresh=rho_thresh,
            c_thresh=c_thresh,
            **kwargs,
        )
        if pg_rho_thresh is not None:
            pg_rho_thresh = torch.as_tensor(pg_rho_thresh, device=self._device)
        self.register_buffer("pg_rho_thresh", pg_rho_thresh)
        self.lmbda = lmbda
        self.log_prob_of = log_prob_of
        self.backend = backend
        # None until for_loss, or else the first call, decides.
        self.weight_advantages = True if log_prob_of == "upstream" else weight_advantages

    @classmethod
    def for_loss(cls, loss_module: Any, **hyperparams: Any) -> TritonVTrace:
        """An estimator on the loss's own actor and critic, weighted as that loss needs it.

        Losses of the PPO family multiply the advantage by pi/mu themselves and get it unweighted; all others weighted.
        ``hyperparams`` are the constructor's.
        """
        estimator: TritonVTrace = super().for_loss(loss_module, **hyperparams)
        if estimator.weight_advantages is None:
            estimator.weight_advantages = not isinstance(loss_module, PPOLoss)
        return estimator

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
                log-prob (``sample_log_prob``), and ``("next", ...)`` with observation, reward and the flags.

        Keyword Args:
            params (TensorDictBase, optional): parameters for the value network, for functional use.
            target_params (TensorDictBase, optional): its parameters for the next state's value.
            time_dim (int, optional): dimension of time; else the constructor's, else the one named "time", else the
                last.

        Returns:
            The same tensordict.

        Raises:
            VTraceError: naming the entry that is missing or has the wrong shape, dtype or device.
        """
        if tensordict.batch_dims < 1:
            raise VTraceError(f"tensordict: expected at least one batch dimension (time), got {tensordict.batch_size}")
        if self.weight_advantages is None:
            self.weight_advantages = True
            _warn_once_about_weights()
        time_dim = self._get_time_dim(time_dim, tensordict)

        value, next_value, valid = self._values(tensordict, params, target_params)
        log_mu = match(summed(_maybe_get_or_select(tensordict, self.tensor_keys.sample_log_prob)), value)
        log_pi = match(self._log_pi(tensordict), value)

        # Under shifted=True the steps that found no slot are padding, and the one before them ends its window.
        data = self._prepare_shifted_tensordict(tensordict, valid, time_dim)
        reward = data.get(("next", self.tensor_keys.reward))
        terminated, truncated = split_done(
            data.get(("next", self.tensor_keys.done)),
            data.get(("next", self.tensor_keys.terminated), None),
            data.get(("next", self.truncated_key), None),
        )
        target, advantage = vtrace(
            log_pi,
            log_mu,
            value,
            reward,
            terminated,
            truncated,
            next_values=next_value,
            gamma=self._discount(tensordict, reward),
            rho_bar=self._on(reward.device, "rho_thresh"),
            c_bar=self._on(reward.device, "c_thresh"),
            pg_rho_bar=self._on(reward.device, "pg_rho_thresh"),
            lam=self.lmbda,
            weight_advantages=self.weight_advantages,
            time_dim=time_dim,
            backend=self.backend,
        )
        if self.average_adv:
            advantage = self._standardized(advantage, tensordict)

        tensordict.set(self.tensor_keys.advantage, advantage)
        tensordict.set(self.tensor_keys.value_target, target)
        self._mask_shifted_output(tensordict, valid)
        return tensordict

    def _values(
        self, tensordict: TensorDictBase, params: TensorDictBase | None, target_params: TensorDictBase | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """V(x_t), V(x_{t+1}) and, under shifted=True, which steps are real."""
        if self.value_network is None:
            valid = tensordict.get("shifted_valid", None) if self.shifted else None
            return tensordict.get(self.tensor_keys.value), tensordict.get(("next", self.tensor_keys.value)), valid
        if params is not None:
            params = params.detach()
            if target_params is None:
                target_params = params.clone(False)
        with hold_out_net(self.value_network):  # gradients may pass through, but not into its parameters
            value, next_value, valid = self._call_value_nets(
                data=tensordict,
                params=params,
                next_params=target_params,
                single_call=self.shifted,
                value_key=self.tensor_keys.value,
                detach_next=True,
                vmap_randomness=self.vmap_randomness,
            )
        return value, next_value, valid

    def _log_pi(self, tensordict: TensorDictBase) -> Tensor:
        with hold_out_net(self.actor_network):
            if self.log_prob_of == "recorded":
                return recorded_log_prob(self.actor_network, tensordict)
            return _call_actor_net(
                actor_net=self.actor_network,
                data=tensordict,
                params=None,
                log_prob_key=self.tensor_keys.sample_log_prob,
            )

    def _on(self, device: torch.device, name: str) -> Any:
        """A buffer (pg_rho_thresh may be None), moved once to where the data is."""
        buffer = getattr(self, name)
        if buffer is not None and buffer.device != device:
            buffer = buffer.to(device)
            setattr(self, name, buffer)
        return buffer

    def _discount(self, tensordict: TensorDictBase, reward: Tensor) -> Tensor:
        """gamma, or gamma to the number of steps that each transition spans."""
        gamma = self._on(reward.device, "gamma")
        steps = tensordict.get(self.tensor_keys.steps_to_next_obs, None)
        return gamma if steps is None else gamma ** steps.view_as(reward)

    def _standardized(self, advantage: Tensor, tensordict: TensorDictBase) -> Tensor:
        groups = self._group_ids(tensordict)
        if groups is None:
            return (advantage - advantage.mean()) / advantage.std().clamp_min(1e-5)
        return _standardize_by_group(advantage, groups, eps=1e-5)


_warned = False


def _warn_once_about_weights() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "TritonVTrace was built without a loss, so its advantages carry the importance weight min(rho, pi/mu), as "
            "A2C-like losses want them. PPO-like losses multiply by pi/mu themselves: pass weight_advantages=False for "
            "those (or True to say that this is meant), or build it with TritonVTrace.for_loss(loss, ...).",
            stacklevel=3,
        )
