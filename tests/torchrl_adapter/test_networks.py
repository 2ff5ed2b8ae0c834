"""The short way through plain modules: the numbers of tensordict's own, and only where it is the same."""

import pytest
import torch
from rollouts import ACTORS, critic, rollout
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, set_skip_existing
from torch import nn
from torchrl.modules import ValueOperator

from vtrace_plugins.torchrl.categorical import Categorical
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_same_categorical(dtype):
    logits = (4 * torch.randn(5, 7, 3)).to(dtype)
    logits[0, :, 1] = -torch.inf
    found, wanted = Categorical(logits), torch.distributions.Categorical(logits=logits)
    for name in ("logits", "probs", "mode", "batch_shape", "event_shape", "param_shape"):
        x, y = getattr(found, name), getattr(wanted, name)
        assert x == y if isinstance(y, torch.Size) else torch.allclose(x.double(), y.double(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(found.entropy(), wanted.entropy(), atol=0.02, rtol=0.02)


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
