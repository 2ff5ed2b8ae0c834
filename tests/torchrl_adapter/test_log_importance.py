"""The hook that logs importance ratios from a trainer."""

import pytest
import torch
from rollouts import ACTORS, critic, rollout
from torchrl.collectors import Collector
from torchrl.envs import GymEnv
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers.algorithms import PPOTrainer

from vtrace_plugins import VTraceError
from vtrace_plugins.torchrl import LogImportance, TritonVTrace


@pytest.mark.parametrize("kind", ["Categorical", "Normal"])
def test_on_policy_and_after_a_step(kind):
    actor = ACTORS[kind]()
    data = rollout(actor, 3, 12)
    hook = LogImportance(TritonVTrace(gamma=0.97, actor_network=actor, value_network=critic()))
    before = hook(data)
    assert before["vtrace/ratio"] == pytest.approx(1, abs=1e-5) and before["vtrace/rho_clipped"] == 0
    with torch.no_grad():
        for p in actor.parameters():
            p.add_(0.3 * torch.randn_like(p))
    after = hook(data)
    assert after["vtrace/ess"] < 1 - 1e-4 and after["vtrace/kl"] > 1e-4
    assert set(after) == {f"vtrace/{x}" for x in ("ratio", "rho_clipped", "c_clipped", "ess", "kl", "trace_length")}


def test_in_a_trainer():
    class Trainer:
        def __init__(self):
            self.ops, self.modules = [], []

        def register_op(self, dest, op):
            self.ops.append((dest, op))

        def register_module(self, name, module):
            self.modules.append(name)

    actor = ACTORS["Normal"]()
    trainer = Trainer()
    LogImportance(TritonVTrace(gamma=0.97, actor_network=actor, value_network=critic())).register(trainer)
    ((where, op),) = trainer.ops
    assert where == "post_steps_log" and op(rollout(actor, 2, 5))["vtrace/ess"] == pytest.approx(1, abs=1e-4)


NAMES = ("ratio", "rho_clipped", "c_clipped", "ess", "kl", "trace_length")


def test_before_and_after_training_in_one_trainer():
    """Without names: each logs under names of its own. After training the policy has moved, before it has not."""
    logged = {}

    class Log:
        exp_name = "log"

        def log_scalar(self, name, value, step=None):
            logged.setdefault(name, []).append(float(value))

    actor, value = ACTORS["Categorical"](), critic()
    two_actions(actor)
    loss = ClipPPOLoss(actor, value)
    estimator = TritonVTrace.for_loss(loss, gamma=0.97)
    trainer = PPOTrainer(
        collector=Collector(
            GymEnv("CartPole-v1", categorical_action_encoding=True),
            actor,
            frames_per_batch=64,
            total_frames=128,
        ),
        total_frames=128,
        frame_skip=1,
        optim_steps_per_batch=2,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=0.1),
        gae=estimator,
        progress_bar=False,
        num_epochs=2,
        log_actions=False,
        log_interval=1,
        logger=Log(),
    )
    LogImportance(estimator, when="pre_steps_log").register(trainer)
    LogImportance(estimator).register(trainer)
    LogImportance(estimator, prefix="again").register(trainer)
    trainer.train()
    for prefix in ("vtrace/before", "vtrace", "again"):
        assert all(f"{prefix}/{name}" in logged for name in NAMES), prefix
    assert all(x == pytest.approx(1, abs=1e-5) for x in logged["vtrace/before/ess"])
    assert all(x < 1 - 1e-4 for x in logged["vtrace/ess"])
    assert logged["again/kl"] == logged["vtrace/kl"]


def two_actions(actor):
    """CartPole has two, the actors of the tests three."""
    actor.module[0].module[-1] = torch.nn.Linear(16, 2)


def test_wrong_arguments():
    estimator = TritonVTrace(gamma=0.97, actor_network=ACTORS["Normal"](), value_network=critic())
    with pytest.raises(VTraceError, match="estimator: expected a TritonVTrace, got str"):
        LogImportance("vtrace")
    with pytest.raises(VTraceError, match="prefix: expected a string, or None, got 3"):
        LogImportance(estimator, prefix=3)
    with pytest.raises(VTraceError, match="when: expected 'post_steps_log' or 'pre_steps_log', got 'always'"):
        LogImportance(estimator, when="always")
