"""The YAML in examples/ through TorchRL's own trainers; the critic that values the data is the one that learns."""

from pathlib import Path

import pytest
import torch
from rollouts import critic

pytest.importorskip("hydra")
import hydra
from torchrl.objectives.value import VTrace

import vtrace_plugins.torchrl.hydra
from vtrace_plugins import VTraceError
from vtrace_plugins.torchrl import LogImportance, TritonVTrace

CONFIG = str(Path(__file__).parents[2] / "examples" / "config")
SMALL = ["total_frames=512", "frames_per_batch=128", "replay_buffer.batch_size=32", "trainer.progress_bar=false"]
PPO, A2C = [], ["trainer=vtrace_a2c", "loss=a2c", "trainer.num_epochs=1"]
REINFORCE = ["trainer=vtrace_reinforce", "loss=reinforce", "trainer.num_epochs=1"]


def build(*overrides):
    with hydra.initialize_config_dir(CONFIG, version_base="1.3"):
        config = hydra.compose("vtrace", [*SMALL, *overrides])
    return hydra.utils.instantiate(config.trainer)


def estimator_of(trainer):
    return trainer._modules["value_estimator"].value_estimator


@pytest.mark.parametrize("value", [[], ["value@trainer.gae=upstream"]], ids=["ours", "upstream"])
@pytest.mark.parametrize("algorithm", [PPO, A2C, REINFORCE], ids=["ClipPPO", "A2C", "Reinforce"])
@pytest.mark.filterwarnings("ignore")
def test_train_from_the_yaml(algorithm, value):
    trainer = build(*algorithm, *value)
    estimator, loss = estimator_of(trainer), trainer.loss_module
    assert isinstance(estimator, TritonVTrace) is (not value) and isinstance(estimator, VTrace)
    if not value:
        assert estimator.weight_advantages is (algorithm is not PPO)
        assert estimator.gamma.item() == pytest.approx(0.9) and estimator.average_adv

    observation = torch.randn(16, 3)

    def valued():
        return estimator.value_network.module(observation).detach().clone()

    def logits():
        return torch.cat([p.detach().flatten() for p in estimator.actor_network.parameters()]).clone()

    before, actor_before = valued(), logits()
    trainer.train()
    assert not torch.equal(valued(), before), "the estimator's critic did not learn"
    assert not torch.equal(logits(), actor_before), "the estimator's actor did not learn"
    with loss.critic_network_params.to_module(loss.critic_network):
        trained = loss.critic_network.module(observation).detach()
    torch.testing.assert_close(valued(), trained)


@pytest.mark.filterwarnings("ignore")
def test_importance_is_logged():
    trainer = build("trainer.num_epochs=2")
    LogImportance(estimator_of(trainer)).register(trainer)
    trainer.train()
    logged = trainer._log_dict
    assert len(logged["vtrace/ess"]) == 4 and all(0 < x <= 1.0001 for x in logged["vtrace/ess"])
    assert logged["vtrace/kl"][-1] > 0


@pytest.mark.filterwarnings("ignore")
def test_upstreams_trainer_says_which_one_to_take():
    with pytest.raises(hydra.errors.InstantiationException, match="vtrace_ppo, vtrace_a2c and vtrace_reinforce"):
        build("trainer=ppo", "value@trainer.gae=vtrace")


def test_networks_of_its_own():
    from rollouts import ACTORS

    options = {"gamma": 0.97, "weight_advantages": False}
    actor, value = ACTORS["Normal"](), critic()
    made = vtrace_plugins.torchrl.hydra.make_vtrace(actor_network=actor, value_network=value, **options)
    assert made.value_network is value and made.actor_network is actor
    with pytest.raises(VTraceError, match=r"trainer\.gae: expected the loss's networks.*got neither"):
        vtrace_plugins.torchrl.hydra.make_vtrace(**options)


@pytest.mark.filterwarnings("ignore")
def test_other_estimators_pass_through():
    """An estimator that is built already, GAE say, is left alone; bare options are refused."""
    from rollouts import ACTORS
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    value = critic()
    gae = GAE(gamma=0.97, lmbda=0.95, value_network=value)
    options = {"loss_module": ClipPPOLoss(ACTORS["Normal"](), value), "gae": gae}
    assert vtrace_plugins.torchrl.hydra._on_its_loss(options)["gae"] is gae
    with pytest.raises(hydra.errors.InstantiationException, match="after the trainer in the defaults list"):
        build("~value@trainer.gae")


def test_every_field_is_an_argument_of_the_constructor():
    """So that no option of the YAML is dropped on the way, and none is missing there."""
    import dataclasses
    import inspect

    from vtrace_plugins.torchrl.hydra import UpstreamVTraceConfig, VTraceConfig

    deprecated = {"advantage_key", "value_target_key", "value_key", "num_chunk"}
    upstream = {p for p in inspect.signature(VTrace.__init__).parameters if p not in {"self", *deprecated}}
    extra = {"pg_rho_thresh", "lmbda", "weight_advantages", "log_prob_of", "backend"}
    names = lambda config: {f.name for f in dataclasses.fields(config)} - {"_target_", "_partial_"}  # noqa: E731
    assert names(UpstreamVTraceConfig) == upstream
    assert names(VTraceConfig) == upstream | extra
