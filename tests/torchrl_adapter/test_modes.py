"""Tensordicts of every kind: recurrent nets, lazy stacks, memory maps, locks, non-tensors, nested keys, odd batches."""

import pytest
import torch
from rollouts import ACTORS, critic, moved, rollout
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Categorical
from torchrl.collectors.utils import split_trajectories
from torchrl.modules import GRUModule, LSTMModule, ProbabilisticActor, ValueOperator, set_recurrent_mode
from torchrl.objectives import A2CLoss, ClipPPOLoss
from torchrl.objectives.value import VTrace

from vtrace_plugins.torchrl import TritonVTrace

RESULTS = ("advantage", "value_target")


def estimator(actor, value=None, **options):
    value = critic() if value is None else value
    return TritonVTrace(gamma=0.97, actor_network=actor, value_network=value, weight_advantages=True, **options)


def assert_same(x, y):
    for key in RESULTS:
        torch.testing.assert_close(x[key], y[key])


@pytest.fixture
def actor():
    return ACTORS["Categorical"]()


def test_lazy_stack(actor):
    data, vt = rollout(actor, 3, 8), estimator(actor)
    lazy = LazyStackedTensorDict(*[x.clone() for x in data.unbind(0)], stack_dim=0)
    assert_same(vt(lazy), vt(data))


def test_lazy_stack_along_time(actor):
    data, vt = rollout(actor, 8, 8), estimator(actor)
    lazy = LazyStackedTensorDict(*[x.clone() for x in data.unbind(1)], stack_dim=1)
    assert_same(vt(lazy), vt(data))


def test_only_next_is_locked(actor):
    data, vt = rollout(actor, 3, 8), estimator(actor)
    wanted = vt(data.clone())
    data["next"].lock_()
    assert_same(vt(data), wanted)
    assert data["next"].get("state_value", None) is None


def test_locked_data_is_not_written_to(actor):
    data, vt = rollout(actor, 3, 8), estimator(actor)
    wanted = vt(data.clone())
    locked = data.lock_()
    before = set(locked.keys(True, True))
    result = vt(locked)
    assert_same(result, wanted)
    assert set(locked.keys(True, True)) == before and locked.is_locked


def test_memory_mapped(actor, tmp_path):
    data, vt = rollout(actor, 3, 8), estimator(actor)
    wanted = vt(data.clone())
    assert_same(vt(data.memmap(tmp_path)), wanted)


def test_non_tensor_entries(actor):
    data, vt = rollout(actor, 3, 8), estimator(actor)
    wanted = vt(data.clone())
    data["note"] = NonTensorData("who collected this", batch_size=data.batch_size)
    data["next", "note"] = NonTensorData("and when", batch_size=data.batch_size)
    result = vt(data)
    assert_same(result, wanted)
    assert result["note"] == "who collected this"


@pytest.mark.parametrize("batch", [(1, 1), (1, 7), (7,), (0, 7), (3, 0)], ids=str)
def test_batches_of_one_and_none(actor, batch):
    result = estimator(actor)(rollout(actor, *batch))
    assert result["advantage"].shape == (*batch, 1)
    assert torch.isfinite(result["advantage"]).all()


@pytest.mark.parametrize(
    "options", [{"skip_existing": True}, {"skip_existing": None}, {"skip_existing": False}], ids=str
)
def test_skip_existing(actor, options):
    data, vt = rollout(actor, 3, 8), estimator(actor, **options)
    data["state_value"] = torch.randn(3, 8, 1)
    data["next", "state_value"] = torch.randn(3, 8, 1)
    given = data["state_value"].clone()
    assert torch.equal(vt(data)["state_value"], given) is (options["skip_existing"] is True)


@pytest.mark.parametrize("options", [{"value_chunk_size": 2}, {"num_chunks": 2}, {"num_chunk": 3}], ids=str)
def test_chunked_value_calls(actor, options):
    value = critic()
    data = rollout(actor, 5, 8)
    assert_same(estimator(actor, value, **options)(data.clone()), estimator(actor, value)(data.clone()))


def test_params_and_target_params(actor):
    value = critic()
    data, vt = rollout(actor, 3, 8), estimator(actor, value)
    params = TensorDict.from_module(value)
    assert_same(vt(data.clone(), params=params), vt(data.clone()))
    target = params.clone().apply(lambda p: p + 0.1)
    result = vt(data.clone(), params=params, target_params=target)
    stock = VTrace(gamma=0.97, actor_network=actor, value_network=value)(
        data.clone(), params=params, target_params=target
    )
    torch.testing.assert_close(result["next", "state_value"], stock["next", "state_value"])
    assert not torch.equal(result["value_target"], vt(data.clone())["value_target"])


def test_nested_keys(actor):
    data, vt = rollout(actor, 3, 8), estimator(actor)
    wanted = vt(data.clone())
    nested = data.clone()
    for key in ("reward", "done", "terminated", "truncated"):
        nested["next", "agent", key] = nested["next"].pop(key)
    nested["agent"] = {"action_log_prob": nested.pop("action_log_prob")}
    vt.set_keys(
        reward=("agent", "reward"),
        done=("agent", "done"),
        terminated=("agent", "terminated"),
        sample_log_prob=("agent", "action_log_prob"),
        advantage=("agent", "advantage"),
        value_target=("agent", "target"),
    )
    result = vt(nested)
    torch.testing.assert_close(result["agent", "advantage"], wanted["advantage"])
    torch.testing.assert_close(result["agent", "target"], wanted["value_target"])


def test_several_values_a_step(actor):
    """[B, T, F]: one reward and one value for each of F objectives, one action for all."""
    value = critic(values=2)
    data = rollout(actor, 3, 8, features=2)
    result = estimator(actor, value)(data.clone())
    assert result["advantage"].shape == (3, 8, 2)
    for i in range(2):
        alone = data.clone()
        for key in ("reward", "done", "terminated", "truncated"):
            alone["next", key] = data["next", key][..., i : i + 1]
        alone["state_value"] = value(data.clone())["state_value"][..., i : i + 1].detach()
        alone["next", "state_value"] = value(data["next"].clone())["state_value"][..., i : i + 1].detach()
        one = TritonVTrace(gamma=0.97, actor_network=actor, value_network=None, weight_advantages=True)(alone)
        torch.testing.assert_close(one["advantage"], result["advantage"][..., i : i + 1])


@pytest.mark.parametrize("trajectory_key", [("collector", "traj_ids"), "traj_ids"], ids=str)
def test_split_trajectories(actor, trajectory_key):
    """One row of three episodes, split into padded ones: the same numbers, zeros in the padding."""
    data, vt = rollout(actor, 1, 20, boundaries=0.0), estimator(actor)
    for t, flag in ((5, "terminated"), (12, "truncated")):
        data["next", flag][:, t] = data["next", "done"][:, t] = True
    data[trajectory_key] = (torch.arange(20) > 5).long().add((torch.arange(20) > 12).long())[None]
    wanted = vt(data.clone())
    padded = vt(split_trajectories(data.clone(), trajectory_key=trajectory_key))
    mask = padded["mask" if trajectory_key == "traj_ids" else ("collector", "mask")]
    assert not mask.all()
    for key in RESULTS:
        torch.testing.assert_close(padded[key][mask], wanted[key][0])
        assert torch.all(padded[key][~mask] == 0)


def test_next_observations_that_collectors_left_out(actor):
    """compact_obs leaves NaN after a trajectory's end; the step before stands in, and no NaN comes through."""
    value = critic()
    data = rollout(actor, 2, 10)
    ends = data["next", "done"].squeeze(-1)
    filled = data.clone()
    filled["next", "observation"][ends] = filled["observation"][ends]
    data["next", "observation"][ends] = float("nan")
    assert ends.any()
    assert_same(estimator(actor, value)(data), estimator(actor, value)(filled))


def test_frozen_parameters_stay_frozen(actor):
    """Upstream's hold_out_net unfreezes them on its way out."""
    value = critic()
    frozen = list(value.parameters())[1]
    frozen.requires_grad_(False)
    estimator(actor, value, differentiable=True)(rollout(actor, 2, 5))
    assert not frozen.requires_grad and next(value.parameters()).requires_grad
    assert all(p.requires_grad for p in actor.parameters())


cells = pytest.mark.parametrize("cell", [LSTMModule, GRUModule], ids=["LSTM", "GRU"])


def recurrent_networks(cell):
    """Actor, critic, and two sequences of two episodes each."""
    torch.manual_seed(0)

    def recurrent(name):
        hidden = [f"{name}_h", f"{name}_c"] if cell is LSTMModule else [f"{name}_h"]
        keys = {"in_keys": ["observation", *hidden], "out_keys": [f"{name}_features", *[("next", h) for h in hidden]]}
        return cell(input_size=4, hidden_size=8, **keys), hidden

    actor_rnn, actor_hidden = recurrent("actor")
    value_rnn, value_hidden = recurrent("value")
    actor = ProbabilisticActor(
        TensorDictSequential(actor_rnn, TensorDictModule(nn.Linear(8, 3), ["actor_features"], ["logits"])),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    value = TensorDictSequential(value_rnn, ValueOperator(nn.Linear(8, 1), in_keys=["value_features"]))
    data = TensorDict({"observation": torch.randn(2, 9, 4), "is_init": torch.zeros(2, 9, 1, dtype=torch.bool)}, [2, 9])
    data["is_init"][:, 0] = data["is_init"][:, 5] = True
    for h in actor_hidden + value_hidden:
        data[h] = torch.zeros(2, 9, 1, 8)
    done = torch.zeros(2, 9, 1, dtype=torch.bool)
    done[:, 4] = True
    with set_recurrent_mode(True), torch.no_grad():
        actor(data)
    data["next"] = TensorDict(
        {
            "observation": torch.randn(2, 9, 4),
            "is_init": torch.zeros(2, 9, 1, dtype=torch.bool),
            "reward": torch.randn(2, 9, 1),
            "done": done,
            "terminated": done.clone(),
            **{h: torch.zeros(2, 9, 1, 8) for h in actor_hidden + value_hidden},
        },
        [2, 9],
    )
    return actor, value, data


@cells
def test_recurrent_policies(cell):
    """The estimator's values and log-probs are those of a full pass over each sequence with its resets."""
    actor, value, data = recurrent_networks(cell)
    with set_recurrent_mode(True):
        on_policy = estimator(actor, value)(data.clone())
        free = estimator(actor, value, rho_thresh=float("inf"), c_thresh=float("inf"))(data.clone())
        stock = VTrace(gamma=0.97, actor_network=actor, value_network=value)
        stock.deactivate_vmap = True  # an LSTM does not go through vmap
        stocks = stock(data.clone())
        assert_same(on_policy, free)  # every ratio is 1
        torch.testing.assert_close(on_policy["state_value"], stocks["state_value"])
        torch.testing.assert_close(on_policy["next", "state_value"], stocks["next", "state_value"])
        moved(actor)
        later = estimator(actor, value, rho_thresh=float("inf"), c_thresh=float("inf"))(data.clone())
        assert not torch.equal(later["advantage"], free["advantage"])


@cells
@pytest.mark.parametrize("route", ["instance", "class", "registry"])
@pytest.mark.parametrize("loss_class", [A2CLoss, ClipPPOLoss])
def test_recurrent_networks_inside_a_loss(cell, route, loss_class, registered):
    """There the critic is called with the loss's parameters, which upstream's vmap refuses to do."""
    actor, value, data = recurrent_networks(cell)
    loss = loss_class(actor, value)
    given = {"actor_network": actor, "value_network": value, "weight_advantages": loss_class is A2CLoss}
    with set_recurrent_mode(True):
        wanted = loss(TritonVTrace.for_loss(loss, gamma=0.97)(data.clone()))
        if route == "instance":
            loss.make_value_estimator(TritonVTrace.for_loss(loss, gamma=0.97))
        elif route == "class":
            loss.make_value_estimator(TritonVTrace, gamma=0.97, **given)
        else:
            loss.make_value_estimator("vtrace", gamma=0.97)
        found = loss(data.clone())
    for name in ("loss_critic", "loss_objective"):
        torch.testing.assert_close(found[name], wanted[name])


@pytest.mark.parametrize("log_prob_of", ["recorded", "upstream"])
@pytest.mark.parametrize("name", ACTORS)
def test_forward_reads_no_data(name, log_prob_of):
    """Fake tensors have none: whoever would wait for a GPU to know a value raises."""
    actor, value = ACTORS[name](), critic()
    data = rollout(actor, 4, 5)
    data["collector", "mask"] = torch.ones(4, 5, dtype=torch.bool)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    given = data.apply(fakes.from_tensor)
    vt = estimator(actor, value, average_adv=True, log_prob_of=log_prob_of)
    if name == "composite":
        vt.set_keys(sample_log_prob=[("action", "discrete_log_prob"), ("action", "continuous_log_prob")])
    with fakes:
        found = vt(given)
    assert found["advantage"].shape == (4, 5, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Categorical", "OneHotCategorical", "Normal"])  # TanhNormal's constructor waits
def test_forward_never_waits_for_the_gpu(name):
    actor, value = ACTORS[name]().cuda(), critic().cuda()
    data = rollout(actor.cpu(), 16, 20).to("cuda")
    actor.cuda()
    data["collector", "mask"] = torch.ones(16, 20, dtype=torch.bool, device="cuda")
    vt = estimator(actor, value, average_adv=True, device="cuda")
    vt(data.clone())
    given = data.clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        vt(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_gpu_gives_the_cpus_numbers():
    actor, value = ACTORS["Categorical"](), critic()
    data = rollout(actor, 16, 50)
    moved(actor, 0.1)
    wanted = estimator(actor, value)(data.clone())
    result = estimator(actor.cuda(), value.cuda())(data.to("cuda"))
    for key in RESULTS:
        torch.testing.assert_close(result[key].cpu(), wanted[key], rtol=1e-4, atol=1e-4)
