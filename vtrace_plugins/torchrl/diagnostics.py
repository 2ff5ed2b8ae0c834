"""The importance ratios of each batch in a TorchRL trainer's log."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.trainers import Trainer, TrainerHookBase

from vtrace_plugins._core.checks import VTraceError
from vtrace_plugins.diagnostics import importance
from vtrace_plugins.torchrl.boundaries import padding_mask
from vtrace_plugins.torchrl.entries import entry, match
from vtrace_plugins.torchrl.estimator import TritonVTrace
from vtrace_plugins.torchrl.log_probs import collected_log_prob

_PREFIXES = {"post_steps_log": "vtrace", "pre_steps_log": "vtrace/before"}


class LogImportance(TrainerHookBase):
    """Logs what :func:`vtrace_plugins.diagnostics.importance` says of a batch.

    Each call evaluates the actor on the batch once more, and waits for the GPU, as numbers are logged. Two hooks, one
    before and one after training, go into one trainer: they log under names of their own.

    Args:
        estimator (TritonVTrace): its actor is evaluated on the batch, and its clips are the clips.
        when (str): ``"post_steps_log"`` (the default), after training on the batch: how far that moved the policy from
            the one that collected; ``"pre_steps_log"``, before: how far the collector lags behind.
        prefix (str, optional): what the names in the log begin with. Defaults to ``"vtrace"`` after training and
            ``"vtrace/before"`` before it.

    Raises:
        VTraceError: for another estimator or ``when``; when called, for an entry that the batch lacks, or log-probs
            that do not fit the actor's.

    Example:
        >>> LogImportance(estimator, when="pre_steps_log").register(trainer)
        >>> LogImportance(estimator).register(trainer)
    """

    def __init__(self, estimator: TritonVTrace, when: str = "post_steps_log", prefix: str | None = None) -> None:
        if not isinstance(estimator, TritonVTrace):
            raise VTraceError("estimator", "a TritonVTrace", type(estimator).__name__)
        if when not in _PREFIXES:
            raise VTraceError("when", "'post_steps_log' or 'pre_steps_log'", repr(when))
        if prefix is not None and not isinstance(prefix, str):
            raise VTraceError("prefix", "a string, or None", repr(prefix))
        self.estimator, self.when = estimator, when
        self.prefix = prefix if prefix is not None else _PREFIXES[when]

    def __call__(self, batch: TensorDictBase) -> dict[str, Any]:
        estimator, keys = self.estimator, self.estimator.tensor_keys
        log_mu = collected_log_prob(batch, keys.sample_log_prob)
        with torch.no_grad():
            log_pi = estimator._log_pi(batch, log_mu.device)
        if log_pi.numel() != log_mu.numel():
            raise VTraceError(str(keys.sample_log_prob), f"shape {list(log_pi.shape)}", f"shape {list(log_mu.shape)}")
        done = entry(batch, ("next", keys.done), "whether the episode ended")
        found = importance(
            log_pi.reshape(log_mu.shape),
            log_mu,
            terminated=match(("next", keys.done), done, log_mu, batch.batch_dims, of="the log-prob"),
            mask=padding_mask(batch),
            rho_bar=float(estimator.rho_thresh),
            c_bar=float(estimator.c_thresh),
            lam=estimator.lmbda,
            time_dim=estimator._resolve_time_dim(None, batch),
        )
        return found.scalars(self.prefix)

    def state_dict(self) -> dict[str, Any]:
        """Nothing is kept between batches."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is kept between batches."""

    def register(self, trainer: Trainer, name: str | None = None) -> None:
        """Add the hook to the trainer at ``when``, as its module ``name`` (by default one that the prefix makes)."""
        trainer.register_op(self.when, self)
        trainer.register_module(name or f"{self.prefix}/importance".replace("/", "_"), self)
