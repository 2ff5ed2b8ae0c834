"""Every loss that lists VTrace trains one step on our estimator, by every way in."""

import pytest
import torch
from rollouts import ACTORS, critic, rollout
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ActorValueOperator, MultiAgentMLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import (
    A2CLoss,
    ClipPPOLoss,
    KLPENPPOLoss,
    LossModule,
    PPOLoss,
    ReinforceLoss,
    SACLoss,
    TD3Loss,
)
from torchrl.objectives.multiagent import IPPOLoss, MAPPOLoss
from torchrl.objectives.utils import ValueEstimators

from vtrace_plugins import VTraceError
from vtrace_plugins.torchrl import TritonVTrace, register, unregister

LOSSES = {
    "A2C": lambda actor, value, functional: A2CLoss(actor, value, functional=functional),
    "Reinforce": lambda actor, value, functional: ReinforceLoss(actor, value, functional=functional),
    "PPO": lambda actor, value, functional: PPOLoss(actor, value, functional=functional),
    "ClipPPO": lambda actor, value, functional: ClipPPOLoss(actor, value, functional=functional),
    "KLPENPPO": lambda actor, value, functional: KLPENPPOLoss(actor, value, functional=functional),
    "MAPPO": lambda actor, value, functional: MAPPOLoss(actor, value, functional=functional),
    "IPPO": lambda actor, value, functional: IPPOLoss(actor, value, functional=functional),
}
AGENTS = 3


def multi_agent(centralized):
    """Actor, critic and data of a team that shares reward and done."""
    net = lambda outputs, central: MultiAgentMLP(  # noqa: E731
        n_agent_inputs=4, n_agent_outputs=outputs, n_agents=AGENTS, centralized=central, share_params=True
    )
    actor = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(net(4, False), NormalParamExtractor()),
            in_keys=[("agents", "observation")],
            out_keys=[("agents", "loc"), ("agents", "scale")],
        ),
        in_keys=[("agents", "loc"), ("agents", "scale")],
        out_keys=[("agents", "action")],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    value = TensorDictModule(
        net(1, centralized), in_keys=[("agents", "observation")], out_keys=[("agents", "state_value")]
    )
    torch.manual_seed(0)
    agents = TensorDict({"observation": torch.randn(2, 10, AGENTS, 4)}, [2, 10, AGENTS])
    data = TensorDict({"agents": agents}, [2, 10])
    with torch.no_grad():
        actor(data)
    terminated = torch.rand(2, 10, 1) < 0.1
    data["next"] = TensorDict(
        {
            "agents": TensorDict({"observation": torch.randn(2, 10, AGENTS, 4)}, [2, 10, AGENTS]),
            "reward": torch.randn(2, 10, 1),
            "done": terminated,
            "terminated": terminated,
        },
        [2, 10],
    )
    return actor, value, data


def setup(name, functional):
    if name in ("MAPPO", "IPPO"):
        actor, value, data = multi_agent(centralized=name == "MAPPO")
        loss = LOSSES[name](actor, value, functional)
        loss.set_keys(
            value=("agents", "state_value"),
            action=("agents", "action"),
            sample_log_prob=("agents", "action_log_prob"),
        )
        return loss, data
    loss = LOSSES[name](ACTORS["Normal"](), critic(), functional)
    return loss, rollout(ACTORS["Normal"](), 2, 10)


def value_of(estimator, data):
    return estimator(data.clone())[estimator.tensor_keys.value].clone()


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "stateful"])
@pytest.mark.parametrize("name", LOSSES)
def test_one_step(name, functional):
    loss, data = setup(name, functional)
    estimator = TritonVTrace.for_loss(loss, gamma=0.97)
    assert estimator.weight_advantages is (name in ("A2C", "Reinforce"))
    before = value_of(estimator, data)
    losses = loss(estimator(data.clone()))
    sum(x for key, x in losses.items() if key.startswith("loss_")).backward()
    grads = [p.grad for p in loss.parameters() if p.grad is not None]
    assert grads and all(torch.isfinite(g).all() for g in grads) and any(g.abs().max() > 0 for g in grads)
    torch.optim.SGD(loss.parameters(), lr=0.5).step()
    assert not torch.equal(value_of(estimator, data), before), "the estimator's critic is not the one that learns"


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "stateful"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_makes_and_calls_it_by_the_registry(name, functional, registered):
    loss, data = setup(name, functional)
    loss.make_value_estimator("vtrace", gamma=0.97)
    assert isinstance(loss.value_estimator, TritonVTrace)
    losses = loss(data.clone())
    sum(x for key, x in losses.items() if key.startswith("loss_")).backward()
    assert all(torch.isfinite(p.grad).all() for p in loss.parameters() if p.grad is not None)
    wanted = TritonVTrace.for_loss(loss, gamma=0.97)(data.clone())["advantage"]
    torch.testing.assert_close(loss.value_estimator(data.clone())["advantage"], wanted)


def test_register_takes_defaults_and_unregister_restores():
    loss = A2CLoss(ACTORS["Normal"](), critic())
    register(lmbda=0.9, backend="torch")
    try:
        loss.make_value_estimator(ValueEstimators.VTrace, gamma=0.97)
        assert type(loss.value_estimator) is TritonVTrace
        assert (loss.value_estimator.lmbda, loss.value_estimator.backend) == (0.9, "torch")
        register()
        loss.make_value_estimator("vtrace")
        assert loss.value_estimator.lmbda == 1.0
    finally:
        unregister()
    loss.make_value_estimator("vtrace", gamma=0.97)
    assert not isinstance(loss.value_estimator, TritonVTrace)
    unregister()  # twice does no harm
    with pytest.raises(VTraceError, match="lambda_: expected one of TritonVTrace's arguments"):
        register(lambda_=0.5)
    with pytest.raises(VTraceError, match=r"gamma: expected a number in \[0, 1\], got 2.0"):
        register(gamma=2.0)


def test_a_loss_without_an_actor():
    with pytest.raises(VTraceError, match="loss_module: expected a loss with an actor_network"):
        TritonVTrace.for_loss(nn.Module(), gamma=0.97)


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "stateful"])
@pytest.mark.parametrize("cls", [A2CLoss, ClipPPOLoss])
def test_a_value_head_is_the_losss_critic(cls, functional):
    """Upstream's own pattern for a shared backbone: the loss has the head, the estimator the whole operator."""
    common = TensorDictModule(nn.Linear(4, 8), ["observation"], ["hidden"])
    policy = TensorDictModule(nn.Linear(8, 3), ["hidden"], ["logits"])
    policy = ProbabilisticActor(policy, ["logits"], distribution_class=Categorical, return_log_prob=True)
    both = ActorValueOperator(common, policy, ValueOperator(nn.Linear(8, 1), in_keys=["hidden"]))
    actor, whole = both.get_policy_operator(), both.get_value_operator()
    data = rollout(ACTORS["Categorical"](), 2, 5)
    with torch.no_grad():
        actor(data)
    loss = cls(actor, both.get_value_head(), functional=functional)
    loss.make_value_estimator(TritonVTrace.for_loss(loss, gamma=0.9, value_network=whole))
    wanted = TritonVTrace.for_loss(loss, gamma=0.9, value_network=whole)(data.clone())
    found = []
    loss.value_estimator.register_forward_hook(lambda *call: found.append(call[-1]))
    losses = loss(data.clone())
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(found[0][key], wanted[key])
    sum(x for key, x in losses.items() if key.startswith("loss_")).backward()
    grads = [p.grad for p in loss.parameters() if p.grad is not None]
    assert grads and all(grad.isfinite().all() for grad in grads)

    with pytest.raises(VTraceError, match=r"\('next', 'hidden'\): expected .*value_network=...get_value_operator\(\)"):
        TritonVTrace.for_loss(loss, gamma=0.9)(actor(data.clone()))
    loss.make_value_estimator(TritonVTrace.for_loss(loss, gamma=0.9))
    with pytest.raises(VTraceError, match=r"\('next', 'hidden'\): expected .*value_network=...get_value_operator\(\)"):
        loss(data.clone())
    other = TensorDict.from_module(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))).detach()
    with pytest.raises(VTraceError, match=r"params: expected those of the value network, or of a part of it"):
        TritonVTrace.for_loss(loss, gamma=0.9, value_network=whole)(data.clone(), params=other)


@pytest.mark.parametrize("kind", ["SAC", "TD3"])
def test_a_loss_that_has_no_use_for_an_advantage(kind):
    actor = ACTORS["TanhNormal"]()
    state_action = ValueOperator(nn.Linear(7, 1), in_keys=["observation", "action"], out_keys=["state_action_value"])
    if kind == "SAC":
        loss = SACLoss(actor, state_action)
    else:
        loss = TD3Loss(actor, state_action, bounds=(-1, 1))
    with pytest.raises(VTraceError, match=f"loss_module: expected a loss that takes an advantage .*, got {kind}Loss"):
        TritonVTrace.for_loss(loss, gamma=0.97, actor_network=actor, value_network=critic())


def test_a_loss_of_the_family_with_a_list_of_its_own():
    class Mine(ClipPPOLoss):
        SUPPORTED_VALUE_ESTIMATORS = (ValueEstimators.GAE,)

    loss = Mine(ACTORS["Normal"](), critic())
    assert TritonVTrace.for_loss(loss, gamma=0.97).weight_advantages is False


def test_a_loss_of_ones_own_says_nothing_of_its_estimators():
    class Own(LossModule):
        functional = False

        def __init__(self):
            super().__init__()
            self.actor_network, self.critic_network = ACTORS["Normal"](), critic()

    data = rollout(ACTORS["Normal"](), 2, 5)
    assert TritonVTrace.for_loss(Own(), gamma=0.97)(data)["advantage"].isfinite().all()


def test_all_routes_give_a_ppo_loss_the_same_advantages():
    """Class route, for_loss, instance, registry and (in test_hydra) the trainers."""
    actor, value = ACTORS["Normal"](), critic()
    loss = ClipPPOLoss(actor, value, functional=False)
    data = rollout(ACTORS["Normal"](), 2, 10)
    results = {"for_loss": TritonVTrace.for_loss(loss, gamma=0.97)(data.clone())}

    networks = {"actor_network": actor, "value_network": value}
    loss.make_value_estimator(TritonVTrace, gamma=0.97, weight_advantages=False, **networks)
    loss.set_keys(advantage="advantage")  # a class route sets no keys by itself
    results["class"] = loss.value_estimator(data.clone())

    loss.make_value_estimator(TritonVTrace.for_loss(loss, gamma=0.97))
    results["instance"] = loss.value_estimator(data.clone())

    register()
    try:
        loss.make_value_estimator(ValueEstimators.VTrace, gamma=0.97)
        results["registry"] = loss.value_estimator(data.clone())
    finally:
        unregister()
    for route, result in results.items():
        torch.testing.assert_close(result["advantage"], results["for_loss"]["advantage"], msg=route)


def test_keys_set_before_or_after_for_loss():
    """As with upstream's for_loss, keys may come later; the error of a call that still lacks them says how."""
    actor, value = ACTORS["Categorical"](), critic()
    nested = TensorDictModule(value.module, ["observation"], [("nested", "value")])
    data = rollout(actor, 3, 5)
    first = A2CLoss(actor, nested)
    first.set_keys(value=("nested", "value"))
    wanted = TritonVTrace.for_loss(first, gamma=0.97)(data.clone())

    second = A2CLoss(actor, nested)
    estimator = TritonVTrace.for_loss(second, gamma=0.97)
    with pytest.raises(VTraceError, match=r"^state_value: expected .*set_keys\(value=.*, got .*\('nested', 'value'\)"):
        estimator(data.clone())
    second.make_value_estimator(estimator)
    second.set_keys(value=("nested", "value"))
    torch.testing.assert_close(estimator(data.clone())["advantage"], wanted["advantage"])

    unnormalised = A2CLoss(actor, TensorDictModule(value.module, ["observation"], [("a", "b", "value")]))
    unnormalised.set_keys(value=("a", ("b", "value")))
    assert TritonVTrace.for_loss(unnormalised, gamma=0.97).tensor_keys.value == ("a", "b", "value")

    third = A2CLoss(actor, nested)
    third.set_keys(value=("nested", "value"))
    third.make_value_estimator(TritonVTrace, gamma=0.97, actor_network=actor, value_network=nested)
    with pytest.raises(VTraceError, match=r"^state_value: expected .*set_keys\(value="):
        third(data.clone())
