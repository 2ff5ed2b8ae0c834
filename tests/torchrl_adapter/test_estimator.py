"""TritonVTrace against stock VTrace, and where it means to differ."""

import copy
import re
import warnings

import oracle
import pytest
import torch
from helpers import assert_close
from rollouts import ACTORS, critic, moved, rollout
from tensordict import TensorDict
from torchrl.objectives import A2CLoss, ClipPPOLoss, PPOLoss, ReinforceLoss
from torchrl.objectives.value import VTrace

from vtrace_plugins import VTraceError
from vtrace_plugins.torchrl import TritonVTrace
from vtrace_plugins.torchrl.log_probs import action_keys, recorded_log_prob, summed

RESULTS = ("advantage", "value_target")


def pair(name="Categorical", **options):
    """An actor, its critic, stock VTrace and ours on upstream's log-probs."""
    actor, value = ACTORS[name](), critic()
    stock = VTrace(gamma=0.97, actor_network=actor, value_network=value, **options)
    ours = TritonVTrace(gamma=0.97, actor_network=actor, value_network=value, log_prob_of="upstream", **options)
    return actor, stock, ours


def assert_same(ours, stock, tolerance=2e-6):
    for key in RESULTS:
        scale = max(1.0, stock[key].abs().max().item())
        assert ours[key].shape == stock[key].shape
        assert (ours[key] - stock[key]).abs().max().item() <= tolerance * scale, key


@pytest.mark.parametrize("clips", [{}, {"rho_thresh": 0.6, "c_thresh": 0.8}, {"rho_thresh": 2, "c_thresh": 1}], ids=str)
@pytest.mark.parametrize(
    ("batch", "time_dim"),
    [((7,), None), ((1,), None), ((3, 1), None), ((3, 20), None), ((3, 20), -1), ((20, 3), 0), ((20, 3), -2),
     ((2, 20, 3), 1), ((2, 3, 33), 2), ((20, 2, 3), 0)],
)  # fmt: skip
def test_parity_with_stock(batch, time_dim, clips):
    actor, stock, ours = pair(**clips)
    data = rollout(actor, *batch)
    moved(actor)
    assert_same(ours(data.clone(), time_dim=time_dim), stock(data.clone(), time_dim=time_dim))


@pytest.mark.parametrize("name", ["OneHotCategorical", "TanhNormal"])
def test_parity_with_stock_on_other_distributions(name):
    actor, stock, ours = pair(name)
    data = rollout(actor, 4, 25)
    moved(actor, 0.1)
    assert_same(ours(data.clone()), stock(data.clone()))


@pytest.mark.parametrize(
    "options",
    [{"time_dim": 0}, {"average_adv": True}, {"average_adv": True, "group_key": "task"}, {"value_chunk_size": 2},
     {"num_chunks": 3}, {"shifted": True}, {"shifted": True, "shifted_budget": 3}, {"differentiable": True}],
    ids=str,
)  # fmt: skip
def test_parity_with_stock_under_its_options(options):
    actor, stock, ours = pair(**options)
    data = rollout(actor, 6, 10)
    data["task"] = torch.arange(6)[:, None].expand(6, 10) % 2
    if options.get("shifted"):  # upstream bootstraps past a terminal step there: tested below
        data["next", "terminated"][:] = False
        data["next", "truncated"] = data["next", "done"]
    moved(actor)
    assert_same(ours(data.clone()), stock(data.clone()), tolerance=1e-5 if "average_adv" in options else 2e-6)


def test_parity_with_stock_on_multi_step_data():
    actor, stock, ours = pair()
    data = rollout(actor, 4, 12)
    data["steps_to_next_obs"] = torch.randint(1, 4, (4, 12, 1))
    assert_same(ours(data.clone()), stock(data.clone()))


def test_parity_with_stock_by_the_time_name():
    actor, stock, ours = pair()
    data = rollout(actor, 12, 4)
    data.names = ["time", None]
    assert_same(ours(data.clone()), stock(data.clone()))


@pytest.mark.parametrize("name", ACTORS)
def test_on_policy_every_ratio_is_one(name):
    actor = ACTORS[name]()
    data = rollout(actor, 8, 50)
    with torch.no_grad():
        ratio = (recorded_log_prob(actor, action_keys(actor), data) - summed(data.select(*actor.log_prob_keys))).exp()
    # TanhNormal has to invert the tanh of an action in float32
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-4 if name == "TanhNormal" else 1e-6)


def test_composite_actions():
    """On-policy end to end: the keys of the parts' log-probs are set as a list, and targets are those of ratio 1."""
    actor = ACTORS["composite"]()
    data, vt = rollout(actor, 3, 15), ours_for(actor)
    vt.set_keys(sample_log_prob=actor.log_prob_keys)
    result = vt(data.clone())
    free = ours_for(actor, rho_thresh=float("inf"), c_thresh=float("inf"))
    free.__dict__["value_network"] = vt.value_network
    free.set_keys(sample_log_prob=actor.log_prob_keys)
    assert_same(free(data.clone()), result, tolerance=1e-5)


@pytest.mark.parametrize("name", ["Categorical", "OneHotCategorical", "Normal"])
def test_the_recorded_action_through_the_oracle(name):
    """Off-policy end to end: log pi of the recorded action, values, flags and all, against the float64 loop."""
    actor, value = ACTORS[name](), critic()
    data = rollout(actor, 5, 30)
    moved(actor, 0.1)
    options = {"lmbda": 0.9, "rho_thresh": 1.2, "c_thresh": 0.9, "pg_rho_thresh": 1.5, "weight_advantages": True}
    result = TritonVTrace(gamma=0.97, actor_network=actor, value_network=value, **options)(data.clone())
    numbers = lambda x: x.detach().squeeze(-1).numpy()  # noqa: E731
    dist = actor.get_dist(data.clone())
    targets, advantages = oracle.loop(
        dist.log_prob(data["action"]).detach().double().numpy(),
        data["action_log_prob"].double().numpy(),
        numbers(value.module(data["observation"]).double()),
        numbers(data["next", "reward"].double()),
        numbers(data["next", "terminated"]),
        numbers(data["next", "truncated"]),
        next_values=numbers(value.module(data["next", "observation"]).double()),
        gamma=0.97,
        rho_bar=1.2,
        c_bar=0.9,
        pg_rho_bar=1.5,
        lam=0.9,
    )
    torch.testing.assert_close(result["value_target"].squeeze(-1).double(), torch.as_tensor(targets), rtol=0, atol=1e-5)
    torch.testing.assert_close(result["advantage"].squeeze(-1).double(), torch.as_tensor(advantages), rtol=0, atol=1e-5)


def ours_for(actor, **options):
    return TritonVTrace(gamma=0.97, actor_network=actor, value_network=critic(), weight_advantages=True, **options)


@pytest.mark.parametrize("shifted", [False, True], ids=["plain", "shifted"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_flags_of_any_dtype(dtype, shifted):
    actor = ACTORS["Categorical"]()
    data, vt = rollout(actor, 4, 20), ours_for(actor, shifted=shifted)
    wanted = vt(data.clone())
    for flag in ("done", "terminated", "truncated"):
        data["next", flag] = data["next", flag].to(dtype)
    assert_same(vt(data), wanted, tolerance=0)


def test_truncated_may_be_absent():
    actor = ACTORS["Categorical"]()
    data, vt = rollout(actor, 4, 20), ours_for(actor)
    wanted = vt(data.clone())
    assert_same(vt(data.exclude(("next", "truncated"))), wanted, tolerance=0)


def test_terminated_may_be_absent():
    actor = ACTORS["Categorical"]()
    data, vt = rollout(actor, 4, 20), ours_for(actor)
    wanted = vt(data.clone())
    assert_same(vt(data.exclude(("next", "terminated"))), wanted, tolerance=0)
    only_done = data.exclude(("next", "terminated"), ("next", "truncated"))
    data["next", "terminated"] = data["next", "done"]
    data["next", "truncated"] = torch.zeros_like(data["next", "done"])
    assert_same(vt(only_done), vt(data), tolerance=0)


def test_truncated_without_done_is_a_boundary():
    actor = ACTORS["Categorical"]()
    data, vt = rollout(actor, 4, 20), ours_for(actor)
    wanted = vt(data.clone())
    data["next", "done"] = data["next", "terminated"].clone()
    assert_same(vt(data), wanted, tolerance=0)


def test_a_nan_after_a_terminal_step_is_not_read():
    """Upstream multiplies by not_terminated, and 0 * NaN poisons every earlier step."""
    actor = ACTORS["Categorical"]()
    data = rollout(actor, 2, 10, boundaries=0.0)
    data["state_value"], data["next", "state_value"] = torch.randn(2, 2, 10, 1)
    data["next", "terminated"][:, 6] = data["next", "done"][:, 6] = True
    vt = TritonVTrace(gamma=0.97, actor_network=actor, value_network=None, weight_advantages=True)
    wanted = vt(data.clone())
    data["next", "state_value"][:, 6] = float("nan")
    assert_same(vt(data), wanted, tolerance=0)


def test_shifted_keeps_a_terminal_step_terminal():
    """At the last step that finds a slot, upstream clears terminated and bootstraps from the next episode."""
    actor = ACTORS["Categorical"]()
    data = rollout(actor, 1, 6, boundaries=0.0)
    for t, flag in ((1, "truncated"), (4, "terminated")):  # the one spare slot goes to t = 1, so t = 5 finds none
        data["next", flag][:, t] = data["next", "done"][:, t] = True
    result = ours_for(actor, shifted=True)(data)
    assert result["shifted_valid"].tolist() == [[True] * 5 + [False]]
    torch.testing.assert_close(result["value_target"][:, 4], data["next", "reward"][:, 4])
    torch.testing.assert_close(result["advantage"][:, 4], data["next", "reward"][:, 4] - data["state_value"][:, 4])
    assert torch.all(result["advantage"][:, 5] == 0) and torch.all(result["value_target"][:, 5] == 0)


def test_the_constructors_time_dim_counts_under_shifted():
    actor = ACTORS["Categorical"]()
    data, vt = rollout(actor, 4, 20, boundaries=0.05), ours_for(actor, shifted=True)
    wanted = vt(data.clone())
    first = ours_for(actor, shifted=True, time_dim=0)
    first.__dict__["value_network"] = vt.value_network
    result = first(data.transpose(0, 1).contiguous())
    for key in RESULTS:
        torch.testing.assert_close(result[key].transpose(0, 1), wanted[key])


def test_a_stale_shifted_valid_masks_nothing():
    actor = ACTORS["Categorical"]()
    data, vt = rollout(actor, 4, 20), ours_for(actor)
    wanted = vt(data.clone())
    data["shifted_valid"] = torch.zeros(4, 20, dtype=torch.bool)
    assert_same(vt(data), wanted, tolerance=0)


def test_padded_trajectories():
    """split_trajectories' mask: padding gets 0, is left out of average_adv, and the step before it ends a window."""
    actor = ACTORS["Categorical"]()
    data, vt = rollout(actor, 2, 12, boundaries=0.1), ours_for(actor)
    short = vt(data[:, :8].clone())
    data["next", "observation"][:, 8:] = float("nan")
    data["observation"][:, 8:] = float("nan")
    data["collector", "mask"] = torch.arange(12).expand(2, 12) < 8
    result = vt(data.clone())
    for key in RESULTS:
        torch.testing.assert_close(result[key][:, :8], short[key])
        assert torch.all(result[key][:, 8:] == 0)
    vt.average_adv = True
    averaged = vt(data.clone())["advantage"]
    torch.testing.assert_close(averaged[:, :8].mean(), torch.tensor(0.0), rtol=0, atol=1e-6)
    torch.testing.assert_close(averaged[:, :8].std(), torch.tensor(1.0))
    assert torch.all(averaged[:, 8:] == 0)


def test_average_adv_in_half_precision():
    actor = ACTORS["Categorical"]()
    data = rollout(actor, 8, 256)
    data["next", "reward"] *= 50
    data["state_value"], data["next", "state_value"] = torch.randn(2, 8, 256, 1, dtype=torch.float16)
    vt = TritonVTrace(gamma=0.97, actor_network=actor, value_network=None, weight_advantages=True, average_adv=True)
    advantage = vt(data)["advantage"]
    assert advantage.dtype == torch.float16
    torch.testing.assert_close(advantage.float().std(), torch.tensor(1.0), rtol=0, atol=1e-2)


def test_shifted_keeps_truncation_where_terminated_is_absent():
    actor = ACTORS["Categorical"]()
    data, vt = rollout(actor, 3, 12), ours_for(actor, shifted=True, shifted_budget=12)
    wanted = vt(data.clone())
    assert_same(vt(data.exclude(("next", "terminated"))), wanted, tolerance=0)


def test_a_checkpoint_of_upstreams_class_fits():
    actor = ACTORS["Categorical"]()
    stock = VTrace(gamma=0.5, actor_network=actor, value_network=critic())
    ours = ours_for(actor, pg_rho_thresh=2.0)
    ours.load_state_dict(stock.state_dict())
    assert ours.gamma == 0.5 and ours.pg_rho_thresh == 2.0


def test_average_adv_of_a_single_step_is_finite():
    actor = ACTORS["Categorical"]()
    assert torch.isfinite(ours_for(actor, average_adv=True)(rollout(actor, 1, 1))["advantage"]).all()


def test_team_flags_and_rewards_fit_values_of_each_agent():
    actor, agents = ACTORS["Categorical"](), 3
    data = rollout(actor, 2, 10)
    vt = TritonVTrace(gamma=0.97, actor_network=actor, value_network=None, weight_advantages=True)
    data["state_value"], data["next", "state_value"] = torch.randn(2, 2, 10, agents, 1)
    result = vt(data.clone())
    assert result["advantage"].shape == (2, 10, agents, 1)
    for agent in range(agents):
        alone = data.clone()
        alone["state_value"] = data["state_value"][:, :, agent]
        alone["next", "state_value"] = data["next", "state_value"][:, :, agent]
        torch.testing.assert_close(vt(alone)["advantage"], result["advantage"][:, :, agent])


def test_a_call_by_keyword():
    actor = ACTORS["Categorical"]()
    data, vt = rollout(actor, 2, 5), ours_for(actor)
    advantage, target = vt(
        observation=data["observation"],
        action=data["action"],
        action_log_prob=data["action_log_prob"],
        next_observation=data["next", "observation"],
        next_reward=data["next", "reward"],
        next_done=data["next", "done"],
        next_terminated=data["next", "terminated"],
    )
    wanted = vt(data.clone())
    torch.testing.assert_close(advantage, wanted["advantage"])
    torch.testing.assert_close(target, wanted["value_target"])


def test_for_loss_takes_the_losss_keys():
    loss = A2CLoss(ACTORS["Categorical"](), critic())
    loss.set_keys(advantage="adv", value_target="target", reward="r")
    vt = TritonVTrace.for_loss(loss, gamma=0.97)
    assert (vt.tensor_keys.advantage, vt.tensor_keys.value_target, vt.tensor_keys.reward) == ("adv", "target", "r")


def test_the_loss_calls_the_estimator_it_was_given():
    loss = ClipPPOLoss(ACTORS["Categorical"](), critic())
    vt = TritonVTrace.for_loss(loss, gamma=0.97)
    loss.make_value_estimator(vt)
    data = rollout(loss.actor_network, 2, 10)
    by_itself = loss(data.clone())["loss_objective"]
    torch.testing.assert_close(by_itself, loss(vt(data.clone()))["loss_objective"])


MISSING = ["next", ("next", "reward"), ("next", "done"), "action_log_prob", "action"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_mask_of_any_dtype(dtype):
    actor = ACTORS["Categorical"]()
    data, vt = rollout(actor, 2, 12), ours_for(actor, average_adv=True)
    data["collector", "mask"] = torch.arange(12).expand(2, 12) < 8
    wanted = vt(data.clone())
    data["collector", "mask"] = data["collector", "mask"].to(dtype)
    assert_same(vt(data), wanted, tolerance=0)


@pytest.mark.parametrize("key", MISSING, ids=str)
def test_a_missing_entry_is_named(key):
    actor = ACTORS["Categorical"]()
    with pytest.raises(VTraceError, match=f"^{re.escape(str(key))}: expected an entry in the tensordict"):
        ours_for(actor)(rollout(actor, 2, 5).exclude(key))


def test_an_actor_without_a_distribution():
    data = rollout(ACTORS["Categorical"](), 2, 5)
    with pytest.raises(VTraceError, match="actor_network: expected a module with get_dist, got NoneType"):
        ours_for(None)(data)


def test_missing_values_are_named():
    actor = ACTORS["Categorical"]()
    vt = TritonVTrace(gamma=0.97, actor_network=actor, value_network=None, weight_advantages=True)
    with pytest.raises(VTraceError, match=r"^state_value: expected an entry in the tensordict"):
        vt(rollout(actor, 2, 5))


def test_a_missing_input_of_the_critic_is_named():
    actor = ACTORS["Categorical"]()
    with pytest.raises(VTraceError, match=r"^\('next', 'observation'\): expected an input of the value network"):
        ours_for(actor)(rollout(actor, 2, 5).exclude(("next", "observation")))
    vt = ours_for(actor)
    vt.value_network.out_keys = ["v"]
    with pytest.raises(VTraceError, match=r"^state_value: expected an entry"):
        vt(rollout(actor, 2, 5))


@pytest.mark.parametrize("key", [("next", "reward"), ("next", "done"), ("next", "truncated")], ids=str)
def test_a_wrong_shape_is_named(key):
    actor = ACTORS["Categorical"]()
    data = rollout(actor, 4, 5)
    data[key] = torch.stack([data[key]] * 2, -1)
    with pytest.raises(VTraceError, match=rf"^{re.escape(str(key))}: expected shape \[4, 5, 1\]"):
        ours_for(actor)(data)


@pytest.mark.parametrize(
    ("kind", "action", "shape"),
    [
        ("Categorical", torch.zeros(4, 5, 1).long(), r"\[4, 5\]"),
        ("Normal", torch.zeros(4, 5, 1), r"\[4, 5, 3\]"),
        ("TanhNormal", torch.zeros(4, 5, 1), r"\[4, 5, 3\]"),
        ("OneHotCategorical", torch.zeros(4, 5, 1).long(), r"\[4, 5, 3\]"),
        ("OneHotCategorical", torch.zeros(4, 5, 6).long(), r"\[4, 5, 3\]"),
    ],
    ids=str,
)
def test_an_action_of_another_shape_is_not_broadcast(kind, action, shape):
    actor = ACTORS[kind]()
    data = rollout(actor, 4, 5)
    data["action"] = action
    with pytest.raises(VTraceError, match=f"^action: expected shape {shape}"):
        ours_for(actor)(data)


WRONG_DATA = {
    "next observation": (
        lambda d: d.set(("next", "observation"), torch.zeros(4, 5, 7)),
        r"\('next', 'observation'\): expected shape \[4, 5, 4\] \(that of 'observation'\), got shape \[4, 5, 7\]",
    ),
    "a log-prob that is none": (
        lambda d: d.set_non_tensor("action_log_prob", "x"),
        r"action_log_prob: expected a tensor \(the log-prob of the action.*, got str",
    ),
    "an action that is none": (lambda d: d.set_non_tensor("action", "x"), r"action: expected a tensor \(.*, got str"),
}


@pytest.mark.parametrize("wrong", WRONG_DATA)
def test_wrong_data_is_named(wrong):
    change, message = WRONG_DATA[wrong]
    actor = ACTORS["Categorical"]()
    data = rollout(actor, 4, 5)
    change(data)
    with pytest.raises(VTraceError, match=f"^{message}"):
        ours_for(actor)(data)


def test_wrong_calls():
    actor = ACTORS["Categorical"]()
    data, vt = rollout(actor, 4, 5), ours_for(actor)
    params = TensorDict.from_module(vt.value_network)
    with pytest.raises(VTraceError, match=r"^target_params: expected params beside it"):
        vt(data, target_params=params)
    with pytest.raises(NotImplementedError, match="call the estimator itself"):
        vt.value_estimate(data)
    vt.set_keys(sample_log_prob=[])
    with pytest.raises(VTraceError, match=r"^sample_log_prob: expected at least one key"):
        vt(data)


def test_a_mask_with_a_dimension_more():
    actor = ACTORS["Categorical"]()
    data, vt = rollout(actor, 2, 12), ours_for(actor)
    data["mask"] = torch.arange(12).expand(2, 12) < 8
    wanted = vt(data.clone())
    assert (wanted["advantage"][:, 8:] == 0).all()
    data["mask"] = data["mask"].unsqueeze(-1)
    assert_same(vt(data), wanted, tolerance=0)


@pytest.mark.parametrize("time_dim", [2, -3, "time", 1.0])
def test_a_wrong_time_dim(time_dim):
    actor = ACTORS["Categorical"]()
    with pytest.raises(VTraceError, match=r"^time_dim: expected"):
        ours_for(actor)(rollout(actor, 4, 5), time_dim=time_dim)
    with pytest.raises(VTraceError, match=r"^time_dim: expected"):
        ours_for(actor, time_dim=time_dim)(rollout(actor, 4, 5))


def test_a_missing_entry_is_told_beside_what_there_is_of_its_step():
    actor = ACTORS["Categorical"]()
    data = rollout(actor, 2, 5)
    data["agents", "action_log_prob"] = data.pop("action_log_prob")
    with pytest.raises(VTraceError, match=r"^action_log_prob: .*\('agents', 'action_log_prob'\).*'action'") as told:
        ours_for(actor)(data)
    assert "next" not in str(told.value)


def test_the_tensordict_without_the_action():
    actor = ACTORS["Categorical"]()
    data = rollout(actor, 2, 5).exclude("action")
    with pytest.raises(
        VTraceError, match=r"^action: expected an entry.*log_prob_of='upstream'.*, got the keys \['action_log_prob'"
    ):
        ours_for(actor)(data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_prob_of": "mode"}, "log_prob_of: expected 'recorded' or 'upstream', got 'mode'"),
        ({"log_prob_of": "upstream", "weight_advantages": False}, "weight_advantages: expected True"),
        ({"backend": "cuda"}, "backend: expected one of"),
        ({"gamma": 1.5}, r"gamma: expected a number in \[0, 1\], got 1.5"),
        ({"rho_thresh": -1.0}, "rho_thresh: expected a number of at least 0"),
        ({"c_thresh": -1.0}, "c_thresh: expected a number of at least 0"),
        ({"pg_rho_thresh": -1.0}, "pg_rho_thresh: expected a number of at least 0"),
        ({"lmbda": 2}, r"lmbda: expected a number in \[0, 1\], got 2"),
        ({"weight_advantages": "no"}, "weight_advantages: expected True or False, got 'no'"),
        ({"differentiable": None}, "differentiable: expected True or False, got None"),
        ({"lam": 0.9}, "lam: expected one of TritonVTrace's arguments, .*'lmbda'.*, got an unknown one"),
        (
            {"value_network": torch.nn.Linear(4, 1)},
            "value_network: expected a TensorDictModule, or None .*, got Linear",
        ),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(VTraceError, match=message):
        TritonVTrace(**{"gamma": 0.97, "actor_network": ACTORS["Categorical"](), "value_network": critic()} | options)


@pytest.mark.parametrize(
    ("loss_class", "weighted"), [(A2CLoss, True), (ReinforceLoss, True), (PPOLoss, False), (ClipPPOLoss, False)]
)
def test_for_loss_weights_the_advantage_as_the_loss_needs(loss_class, weighted):
    loss = loss_class(ACTORS["Categorical"](), critic())
    assert TritonVTrace.for_loss(loss, gamma=0.97).weight_advantages is weighted
    assert TritonVTrace.for_loss(loss, gamma=0.97, weight_advantages=not weighted).weight_advantages is not weighted
    assert TritonVTrace.for_loss(loss, gamma=0.97, log_prob_of="upstream").weight_advantages is True


def test_without_a_loss_it_weights_and_says_so_once():
    actor = ACTORS["Categorical"]()
    data = rollout(actor, 2, 5)
    vt = TritonVTrace(gamma=0.97, actor_network=actor, value_network=critic())
    with pytest.warns(UserWarning, match="weight_advantages=False"):
        vt(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        vt(data)
    weighted = TritonVTrace(gamma=0.97, actor_network=actor, value_network=vt.value_network, weight_advantages=True)
    assert_same(vt(data.clone()), weighted(data.clone()), tolerance=0)


@pytest.mark.parametrize("functional", [True, False])
def test_a_loss_trains_on_it(functional):
    actor, value = ACTORS["Categorical"](), critic()
    loss = A2CLoss(actor, value, functional=functional)
    vt = TritonVTrace.for_loss(loss, gamma=0.97)
    data = rollout(actor, 4, 20)
    before = vt(data.clone())
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.5)
    losses = loss(before)
    sum(losses[k] for k in ("loss_objective", "loss_critic", "loss_entropy")).backward()
    assert all(torch.isfinite(p.grad).all() for p in loss.parameters() if p.grad is not None)
    optimizer.step()
    # the estimator sees the parameters that were just trained
    assert not torch.equal(vt(data.clone())["value_target"], before["value_target"])


def test_gradients_agree_with_stock():
    actor, stock, ours = pair(differentiable=True)
    data = rollout(actor, 4, 20)
    grads = []
    for vt in (stock, ours):
        given = copy.deepcopy(data)
        reward = given["next", "reward"].clone().requires_grad_()
        given["next", "reward"] = reward
        result = vt(given)
        grads.append(torch.autograd.grad(result["value_target"].sum() + result["advantage"].square().sum(), reward)[0])
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "by upstream's call"])
def test_gradients_reach_the_observation_and_not_the_next_one(plain):
    """The value that follows is a target: it is detached, as upstream's is."""
    actor, value = ACTORS["Normal"](), critic()
    collected, found = rollout(ACTORS["Normal"](), 3, 8), {}
    for cls in (TritonVTrace, VTrace):
        data = collected.clone()
        for where in (data, data["next"]):
            where["observation"] = where["observation"].clone().requires_grad_()
        more = {"log_prob_of": "upstream"} if cls is TritonVTrace else {}
        chunks = {} if plain else {"value_chunk_size": 2}
        estimator = cls(gamma=0.97, actor_network=actor, value_network=value, differentiable=True, **more, **chunks)
        leaves = [data["observation"], data["next", "observation"]]
        loss = estimator(data.clone())["value_target"].square().sum()
        found[cls] = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    assert found[TritonVTrace][0].abs().max() > 0 and (found[TritonVTrace][1] == 0).all()
    for x, y in zip(found[TritonVTrace], found[VTrace], strict=True):
        torch.testing.assert_close(x, y)


EIGHT = [(done, terminated, truncated) for done in (0, 1) for terminated in (0, 1) for truncated in (0, 1)]
GIVEN = [("done",), ("done", "terminated"), ("done", "truncated"), ("done", "terminated", "truncated")]


@pytest.mark.parametrize("given", GIVEN, ids="-".join)
def test_every_combination_of_the_flags(given):
    """A step with each, in the middle of a window: where it is a boundary, and of which kind, by the oracle."""
    actor = moved(ACTORS["Categorical"]())
    data = rollout(ACTORS["Categorical"](), len(EIGHT), 7, boundaries=0.0)
    flags = {name: torch.zeros(len(EIGHT), 7, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    for row, combination in enumerate(EIGHT):
        for name, flag in zip(flags, combination, strict=True):
            flags[name][row, 3] = bool(flag)
    data["next"] = data["next"].exclude("done", "terminated", "truncated")
    for name in given:
        data["next", name] = flags[name]
    done, terminated, truncated = (flags[name].squeeze(-1).numpy() for name in ("done", "terminated", "truncated"))
    if "terminated" not in given:  # what is done and not truncated has terminated
        terminated = done & ~truncated if "truncated" in given else done
    ends = done | (truncated if "truncated" in given else False) | terminated
    vt = TritonVTrace(gamma=0.97, actor_network=actor, value_network=critic(), weight_advantages=True)
    result = vt(data.clone())
    array = lambda key: result[key].squeeze(-1).double().numpy()  # noqa: E731
    targets, advantages = oracle.loop(
        vt._log_pi(data, torch.device("cpu")).double().detach().numpy(),
        data["action_log_prob"].double().numpy(),
        array("state_value"),
        array(("next", "reward")),
        terminated,
        ends & ~terminated,
        next_values=array(("next", "state_value")),
        gamma=0.97,
    )
    assert_close(result["value_target"].squeeze(-1), targets, tolerance=1e-5)
    assert_close(result["advantage"].squeeze(-1), advantages, tolerance=1e-5)
