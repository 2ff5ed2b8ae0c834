"""V-trace in TorchRL's Hydra configurations. Importing this module registers:

====================  ==============================================================================================
``value/vtrace``      :class:`VTraceConfig`: a :class:`~vtrace_plugins.torchrl.TritonVTrace`
``value/upstream``    :class:`UpstreamVTraceConfig`: upstream's ``VTrace``, to switch to and fro
``trainer/vtrace_*``  upstream's trainers ``ppo``, ``a2c``, ``reinforce``, the estimator on the loss's own networks
====================  ==============================================================================================

The trainers exist because ``value@trainer.gae: ...`` with ``${models...}`` would build copies of actor and critic that
nothing ever trains. Ours builds the estimator with ``for_loss`` once the loss is there::

    defaults:
      - trainer: vtrace_ppo
      - value@trainer.gae: vtrace   # or upstream
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrl.objectives.common import LossModule
from torchrl.objectives.value import VTrace

from vtrace_plugins._core.checks import VTraceError
from vtrace_plugins._extras import needs
from vtrace_plugins.torchrl.estimator import TritonVTrace

with needs("torchrl,examples", "hydra-core"):
    from hydra.core.config_store import ConfigStore
    from torchrl.trainers.algorithms.configs import A2CTrainerConfig, PPOTrainerConfig, ReinforceTrainerConfig
    from torchrl.trainers.algorithms.configs.common import ConfigBase, _normalize_hydra_key
    from torchrl.trainers.algorithms.configs.trainers import (
        _make_a2c_trainer,
        _make_ppo_trainer,
        _make_reinforce_trainer,
    )


@dataclass
class UpstreamVTraceConfig(ConfigBase):
    """Upstream's ``VTrace``; every field is its constructor's argument of that name.

    The networks are the loss's under a ``vtrace_*`` trainer, which is why the target is partial. Set both, and
    ``_partial_: false``, to build an estimator of its own networks.
    """

    gamma: float = 0.99
    rho_thresh: float = 1.0
    c_thresh: float = 1.0
    average_adv: bool = False
    group_key: Any = None
    differentiable: bool = False
    skip_existing: bool | None = None
    shifted: bool = False
    shifted_budget: int = 1
    device: Any = None
    time_dim: int | None = None
    value_chunk_size: int | None = None
    num_chunks: int | None = None
    value_chunk_dim: int = 0
    actor_network: Any = None
    value_network: Any = None
    _target_: str = "vtrace_plugins.torchrl.hydra.make_upstream_vtrace"
    _partial_: bool = True

    def __post_init__(self) -> None:
        """Nothing to derive; upstream's base asks for it."""


@dataclass
class VTraceConfig(UpstreamVTraceConfig):
    """A :class:`~vtrace_plugins.torchrl.TritonVTrace`; every field is its constructor's argument of that name."""

    pg_rho_thresh: float | None = None
    lmbda: float = 1.0
    weight_advantages: bool | None = None
    log_prob_of: str = "recorded"
    backend: str = "auto"
    _target_: str = "vtrace_plugins.torchrl.hydra.make_vtrace"


def _make(estimator: type[VTrace], loss_module: LossModule | None, options: dict[str, Any]) -> VTrace:
    options["group_key"] = _normalize_hydra_key(options.get("group_key"))
    networks = {name: options.pop(name, None) for name in ("actor_network", "value_network")}
    given = {name: network for name, network in networks.items() if network is not None}
    if loss_module is not None:
        built: VTrace = estimator.for_loss(loss_module, **given, **options)
        return built
    if len(given) < 2:
        raise VTraceError(
            "trainer.gae",
            "the loss's networks, which the trainers vtrace_ppo, vtrace_a2c and vtrace_reinforce hand over to a "
            "partial config, or actor_network and value_network of its own",
            " and ".join(given) or "neither",
        )
    return estimator(**given, **options)


def make_vtrace(loss_module: LossModule | None = None, **options: Any) -> VTrace:
    """What :class:`VTraceConfig` instantiates: for a loss, or with networks of its own."""
    return _make(TritonVTrace, loss_module, options)


def make_upstream_vtrace(loss_module: LossModule | None = None, **options: Any) -> VTrace:
    """What :class:`UpstreamVTraceConfig` instantiates."""
    return _make(VTrace, loss_module, options)


def _on_its_loss(options: dict[str, Any]) -> dict[str, Any]:
    """The trainer's options, with ``gae`` built on ``loss_module`` where it is still a partial."""
    loss, gae = options.get("loss_module"), options.get("gae")
    if not isinstance(loss, LossModule):
        raise VTraceError("trainer.loss_module", "a loss (a config with _partial_: false)", type(loss).__name__)
    if isinstance(gae, functools.partial):
        return {**options, "gae": gae(loss_module=loss)}
    if gae is None or isinstance(gae, nn.Module):
        return options
    raise VTraceError(
        "trainer.gae",
        "a group such as value@trainer.gae: vtrace, after the trainer in the defaults list",
        f"the bare options {gae}",
    )


def make_ppo_trainer(**options: Any) -> Any:
    """Upstream's PPO trainer, its estimator built on the loss's own networks."""
    return _make_ppo_trainer(**_on_its_loss(options))


def make_a2c_trainer(**options: Any) -> Any:
    """Upstream's A2C trainer, likewise."""
    return _make_a2c_trainer(**_on_its_loss(options))


def make_reinforce_trainer(**options: Any) -> Any:
    """Upstream's Reinforce trainer, likewise."""
    return _make_reinforce_trainer(**_on_its_loss(options))


@dataclass
class VTracePPOTrainerConfig(PPOTrainerConfig):
    """Upstream's PPO trainer, for ``value@trainer.gae: vtrace``."""

    _target_: str = "vtrace_plugins.torchrl.hydra.make_ppo_trainer"


@dataclass
class VTraceA2CTrainerConfig(A2CTrainerConfig):
    """Upstream's A2C trainer, for ``value@trainer.gae: vtrace``."""

    _target_: str = "vtrace_plugins.torchrl.hydra.make_a2c_trainer"


@dataclass
class VTraceReinforceTrainerConfig(ReinforceTrainerConfig):
    """Upstream's Reinforce trainer, for ``value@trainer.gae: vtrace``."""

    _target_: str = "vtrace_plugins.torchrl.hydra.make_reinforce_trainer"


_store = ConfigStore.instance()
_store.store(group="value", name="vtrace", node=VTraceConfig)
_store.store(group="value", name="upstream", node=UpstreamVTraceConfig)
_store.store(group="trainer", name="vtrace_ppo", node=VTracePPOTrainerConfig)
_store.store(group="trainer", name="vtrace_a2c", node=VTraceA2CTrainerConfig)
_store.store(group="trainer", name="vtrace_reinforce", node=VTraceReinforceTrainerConfig)
