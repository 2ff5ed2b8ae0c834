"""The hook that logs importance ratios from a trainer."""

import pytest
import torch
from rollouts import ACTORS, critic, rollout

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


def test_wrong_arguments():
    estimator = TritonVTrace(gamma=0.97, actor_network=ACTORS["Normal"](), value_network=critic())
    with pytest.raises(VTraceError, match="estimator: expected a TritonVTrace, got str"):
        LogImportance("vtrace")
    with pytest.raises(VTraceError, match="when: expected 'post_steps_log' or 'pre_steps_log', got 'always'"):
        LogImportance(estimator, when="always")
