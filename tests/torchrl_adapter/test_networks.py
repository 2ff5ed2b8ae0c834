"""The short way through plain modules: the numbers of tensordict's own, and only where it is the same."""

import pytest
import torch
from rollouts import ACTORS, critic, rollout
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    set_interaction_type,
    set_skip_existing,
)
from torch import nn
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator

from vtrace_plugins import vtrace
from vtrace_plugins.torchrl import TritonVTrace
from vtrace_plugins.torchrl.log_probs import collected_log_prob
from vtrace_plugins.torchrl.networks import distribution, root_and_next_values


@pytest.mark.parametrize("kind", ACTORS)
def test_the_same_distribution(kind):
    actor = ACTORS[kind]()
    data = rollout(actor, 3, 5)
    found, wanted = distribution(actor, data), actor.get_dist(data.select(*actor.in_keys))
    assert isinstance(found, type(wanted))
    action = data if kind == "composite" else data["action"]
    torch.testing.assert_close(found.log_prob(action), wanted.log_prob(action))
    if kind != "composite":
        assert found.batch_shape == wanted.batch_shape
        torch.testing.assert_close(actor._dist_sample(found), actor._dist_sample(wanted))


PRECISIONS = {
    "float32": (torch.float32, False),
    "float64": (torch.float64, False),
    "bfloat16": (torch.bfloat16, False),
    "float16": (torch.float16, False),
    "autocast": (torch.float32, True),
}


# a TanhNormal takes its action back through atanh, which rounds in any dtype
@pytest.mark.parametrize("kind", [kind for kind in ACTORS if kind != "TanhNormal"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_unmoved_actor_has_ratios_of_exactly_one(kind, precision):
    """To the bit: half precision rounds log-probs so coarsely that another order of operations is another policy."""
    dtype, autocast = PRECISIONS[precision]
    actor, value = ACTORS[kind]().to(dtype), critic().to(dtype)
    data = rollout(ACTORS[kind](), 4, 50).select("observation", "action_mask", "next", strict=False)
    data = data.apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
    data["observation"] *= 3
    estimator = TritonVTrace(gamma=0.97, actor_network=actor, value_network=value, weight_advantages=False)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
            actor(data)
        keys = [key for key in data.keys(True, True) if "log_prob" in str(key)]
        estimator.set_keys(sample_log_prob=keys if len(keys) > 1 else keys[0])
        log_mu = collected_log_prob(data, estimator.tensor_keys.sample_log_prob)
        assert torch.equal(estimator._log_pi(data, data["observation"].device), log_mu)
        estimator(data)
    # and so the targets are those of ratios that are 1
    log_prob = log_mu.reshape(data["state_value"].shape)
    names = {"terminated": ("next", "terminated"), "truncated": ("next", "truncated"), "rewards": ("next", "reward")}
    given = {name: data[key] for name, key in names.items()}
    wanted = vtrace(
        log_prob,
        log_prob,
        data["state_value"],
        **given,
        next_values=data["next", "state_value"],
        gamma=0.97,
        time_dim=1,
    )
    assert torch.equal(data["value_target"], wanted.targets)


class Groups(nn.Module):
    """Looks at an observation that is a tensordict: groups of sensors."""

    def __init__(self, outputs):
        super().__init__()
        self.net = nn.Linear(4, outputs)

    def forward(self, groups):
        return self.net(torch.cat([groups["joints"], groups["camera"]], -1))


@pytest.mark.parametrize("shape", [(3, 5), (5,)], ids=str)
def test_an_observation_that_is_a_tensordict(shape):
    """The numbers of the same observation as one tensor; a NaN after the step is replaced by what was before."""
    torch.manual_seed(0)
    data = rollout(ACTORS["Categorical"](), *shape)
    data["next", "observation"][..., 2, :] = torch.nan
    split = lambda x: TensorDict({"joints": x[..., :2], "camera": x[..., 2:]}, shape)  # noqa: E731
    grouped = data.clone()
    grouped["observation"], grouped["next", "observation"] = (split(x["observation"]) for x in (data, data["next"]))
    policy, value = Groups(3), Groups(1)
    found = []
    for one, modules in ((grouped, (policy, value)), (data, (policy.net, value.net))):
        actor = ProbabilisticActor(
            TensorDictModule(modules[0], ["observation"], ["logits"]),
            ["logits"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )
        network = ValueOperator(modules[1], in_keys=["observation"])
        estimator = TritonVTrace(gamma=0.9, actor_network=actor, value_network=network, weight_advantages=True)
        found.append(estimator(one))
    for key in ("advantage", "value_target", "state_value", ("next", "state_value")):
        assert found[0][key].isfinite().all()
        torch.testing.assert_close(found[0][key], found[1][key])


def values(network, data):
    with_next = torch.cat([data["observation"], data["next", "observation"]])
    return network(TensorDict({"observation": with_next}, [2 * len(data), data.shape[1]]))["state_value"].chunk(2)


def test_the_same_values_without_the_wrapper():
    calls = []

    class Counting(ValueOperator):
        def forward(self, *args, **kwargs):
            calls.append(1)
            return super().forward(*args, **kwargs)

    data = rollout(ACTORS["Categorical"](), 3, 5)
    for cls, called in ((ValueOperator, 0), (Counting, 1)):  # a subclass may do more than its parent
        network = cls(nn.Linear(4, 1), in_keys=["observation"])
        found = root_and_next_values(network, data, "state_value", 1)
        assert len(calls) == called
        for x, y in zip(found, values(network, data), strict=True):
            torch.testing.assert_close(x, y)


def test_hooks_are_called():
    data, network, actor = rollout(ACTORS["Categorical"](), 3, 5), critic(), ACTORS["Categorical"]()
    heard = []
    network.register_forward_hook(lambda *_: heard.append("critic"))
    actor.module[0].register_forward_pre_hook(lambda *_: heard.append("actor"))
    root_and_next_values(network, data, "state_value", 1)
    distribution(actor, data)
    assert heard == ["critic", "actor"]


def test_what_exists_is_skipped_if_that_is_asked_for():
    data, network = rollout(ACTORS["Categorical"](), 3, 5), critic()
    data["state_value"] = data["next", "state_value"] = torch.ones(3, 5, 1)
    assert root_and_next_values(network, data, "state_value", 1)[0].ne(1).any()
    with set_skip_existing(True):
        assert all(x.eq(1).all() for x in root_and_next_values(network, data, "state_value", 1))


class Scaled(nn.Module):
    """A module that does as its keyword says, however that reaches it."""

    def __init__(self, outputs=3):
        super().__init__()
        self.net = nn.Linear(4, outputs)

    def forward(self, x, by=1.0):
        return self.net(x) * (by if isinstance(by, float) else 3.0 if isinstance(by, str) else 100.0)


class Recurrent(nn.Module):
    """Its hidden state has another shape than the data."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        x, (hidden, cell) = self.lstm(x)
        return self.head(x), hidden, cell


def module(net, in_keys=("observation",), out_keys=("logits",), **options):
    return TensorDictModule(net, list(in_keys), list(out_keys), **options)


def tripled(module):
    forward = module.forward
    module.forward = lambda state: (lambda out: out.set("logits", 3 * out["logits"]))(forward(state))
    return module


class Agents(TensorDictModuleBase):
    """Looks at the batch dimensions of a nested tensordict."""

    in_keys, out_keys = [("agents", "observation")], [("agents", "state_value")]

    def forward(self, state):
        agents = state["agents"]
        value = agents["observation"].sum(-1, keepdim=True)
        agents["state_value"] = value - value.mean(agents.batch_dims - 1, keepdim=True)
        return state


one_layer = nn.Linear(4, 4)
ACTORS_WITH_MORE_TO_THEM = {
    "outputs that nobody wants": lambda: [module(Recurrent(), out_keys=["logits", "_", "_"])],
    "a keyword": lambda: [module(Scaled(), method_kwargs={"by": 5.0})],
    "an input that is no tensor": lambda: [module(Scaled(), ["observation", "task"])],
    "an option of the read": lambda: [module(lambda x: torch.stack(x) / len(x), get_kwargs={"as_list": True})],
    "the same module twice": lambda: [
        *[module(one_layer, out_keys=["observation"])] * 2,
        module(nn.Linear(4, 3)),
    ],
    "a nested input of what came before": lambda: [
        module(nn.Linear(4, 4), [("inside", "x")], [("inside", "h")]),
        module(lambda inside: inside["h"][..., :3], ["inside"]),
    ],
    "another forward": lambda: [tripled(module(nn.Linear(4, 3)))],
    "outputs in a new tensordict": lambda: [
        module(nn.Linear(4, 4), out_keys=["hidden"], inplace=False),
        module(lambda h, x: h[..., :3] if x is None else x[..., :3], ["hidden", "observation"]),
    ],
}


@pytest.mark.parametrize("distribution_class", [torch.distributions.Categorical, OneHotCategorical])
@pytest.mark.parametrize("kind", ACTORS_WITH_MORE_TO_THEM)
def test_the_same_distribution_of_modules_with_more_to_them(kind, distribution_class):
    torch.manual_seed(0)
    last = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=distribution_class)
    actor = ProbabilisticTensorDictSequential(*ACTORS_WITH_MORE_TO_THEM[kind](), last)
    x = torch.randn(3, 5, 4)
    inside = TensorDict({"x": torch.randn(3, 5, 4), "h": torch.randn(3, 5, 4)}, [3, 5])
    data = TensorDict({"observation": x, "inside": inside, "task": NonTensorData("walk", [3, 5])}, [3, 5])
    if "option" in kind:
        data = LazyStackedTensorDict(*data.unbind(0), stack_dim=0)
    before = data.clone()
    found = distribution(actor, data)
    assert (data == before).all()  # and nothing was written
    torch.testing.assert_close(found.logits, actor.get_dist(data.select(*actor.in_keys, strict=False)).logits)


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(4, 8), nn.Softmax(dim=1), nn.Linear(8, 1)),
        nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(2, 1)),
        nn.TransformerEncoderLayer(4, 2, 8).eval(),
    ],
    ids=["softmax", "convolution", "attention"],
)
def test_data_of_time_alone(net):
    """To the network it has as many dimensions as ever, and as many steps."""
    data = rollout(ACTORS["Categorical"](), 6)
    network = ValueOperator(net, in_keys=["observation"])
    found = root_and_next_values(network, data, "state_value", 0)
    for x, observation in zip(found, (data["observation"], data["next", "observation"]), strict=True):
        torch.testing.assert_close(x, net(observation))


def test_nested_batch_dimensions():
    inside = TensorDict({"observation": torch.randn(3, 5, 2, 4)}, [3, 5, 2])
    data = TensorDict({"agents": inside, "next": TensorDict({"agents": inside + 1}, [3, 5])}, [3, 5])
    key = ("agents", "state_value")
    for x, given in zip(root_and_next_values(Agents(), data, key, 1), (data, data["next"]), strict=True):
        torch.testing.assert_close(x, Agents()(given.clone())[key])


def test_a_critic_with_a_keyword():
    data = rollout(ACTORS["Categorical"](), 3, 5)
    network = module(Scaled(1), out_keys=["state_value"], method_kwargs={"by": 5.0})
    torch.testing.assert_close(
        root_and_next_values(network, data, "state_value", 1)[0], network(data.clone())["state_value"]
    )


@pytest.mark.parametrize("results", ["a dict", "a list with None"])
def test_a_network_runs_once(results):
    calls = []

    def net(x):
        calls.append(1)
        return {"logits": x} if results == "a dict" else (x, None)

    out_keys = ["logits"] if results == "a dict" else ["logits", "_"]
    last = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=torch.distributions.Categorical)
    actor = ProbabilisticTensorDictSequential(module(net, out_keys=out_keys), last)
    data = rollout(ACTORS["Categorical"](), 3, 5)
    torch.testing.assert_close(distribution(actor, data).logits, data["observation"].log_softmax(-1))
    assert len(calls) == 1


def test_global_hooks_are_called():
    heard, actor = [], ACTORS["Categorical"]()
    handle = nn.modules.module.register_module_forward_hook(lambda net, *_: heard.append(type(net)))
    try:
        distribution(actor, rollout(ACTORS["Categorical"](), 3, 5))
    finally:
        handle.remove()
    assert TensorDictModule in heard


@pytest.mark.parametrize("outputs", ["dict", "tensordict", "too many"])
def test_a_module_with_other_outputs_goes_tensordicts_way(outputs):
    class Net(nn.Module):
        def forward(self, x):
            value = x.sum(-1, keepdim=True)
            if outputs == "too many":
                return value, value
            found = {"state_value": value}
            return found if outputs == "dict" else TensorDict(found, x.shape[:-1])

    data = rollout(ACTORS["Categorical"](), 3, 5)
    network = TensorDictModule(Net(), ["observation"], ["state_value"])
    if outputs == "too many":
        with pytest.raises(RuntimeError, match="There are more tensors"):
            root_and_next_values(network, data, "state_value", 1)
    else:
        found, _ = root_and_next_values(network, data, "state_value", 1)
        torch.testing.assert_close(found, data["observation"].sum(-1, keepdim=True))


class AlongTime(nn.Module):
    """A critic whose value depends on the steps before, along a dimension of its own."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return x.sum(-1, keepdim=True).cumsum(self.dim)


@pytest.mark.parametrize(
    ("shape", "time_dim"), [((5, 3), 0), ((3, 5), 1), ((5, 3, 2), 0), ((3, 5, 2), 1), ((2, 3, 5), 2)]
)
def test_states_and_next_states_lie_side_by_side_along_a_batch_dimension(shape, time_dim):
    """Joined along time, the next states would continue the states."""
    data = rollout(ACTORS["Categorical"](), *shape)
    network = ValueOperator(AlongTime(time_dim), in_keys=["observation"])
    found = root_and_next_values(network, data, "state_value", time_dim)
    for x, observation in zip(found, (data["observation"], data["next", "observation"]), strict=True):
        torch.testing.assert_close(x, network.module(observation))
