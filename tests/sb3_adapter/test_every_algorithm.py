"""All five algorithms: stock's end without a refresh, the oracle's numbers with one, and a life."""

import copy
import warnings

import numpy as np
import oracle
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from worlds import A2C_, ALGORITHMS, MASKABLE, PPO_, RECURRENT, TRPO_, collect, envs, move, parameters

from vtrace_plugins import VTraceError
from vtrace_plugins.sb3 import VTraceCallback, VTraceRolloutBuffer
from vtrace_plugins.sb3.observations import each
from vtrace_plugins.sb3_contrib import VTraceMaskableRolloutBuffer

every = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
DICT = spaces.Dict({"position": spaces.Box(-1, 1, (3,)), "kind": spaces.Discrete(4)})


@every
@pytest.mark.parametrize("limit", [None, 4], ids=["terminations", "time limits"])
def test_without_refresh_training_ends_where_stock_ends(algorithm, limit):
    model = algorithm.make(envs(limit=limit), rollout_buffer_kwargs={"refresh": "never"}, n_steps=32).learn(512)
    stock = algorithm.make(envs(limit=limit), algorithm.stock, n_steps=32).learn(512)
    torch.testing.assert_close(parameters(model), parameters(stock), rtol=0, atol=1e-5)


@every
@pytest.mark.parametrize("observation_space", [DICT, spaces.Box(-1, 1, (3,))], ids=["Dict", "Box"])
def test_a_refresh_is_the_oracle_under_the_current_policy(algorithm, observation_space):
    """log pi, V, V(terminal observation) and V(s_T), each evaluated here, one environment and one step at a time."""
    options = {"rho_bar": 1.2, "c_bar": 0.9, "weight_advantages": True}
    model = algorithm.make(
        envs(limit=4, observation_space=observation_space), gae_lambda=0.9, rollout_buffer_kwargs=options
    )
    buffer, policy = collect(model), model.policy
    move(model)
    host = {name: copy.deepcopy(getattr(buffer, name)) for name in ("observations", "actions", "log_probs", "values")}
    masks, starts = getattr(buffer, "action_masks", None), buffer.episode_starts.copy()
    truncated, rewards = buffer.recorder.truncated, buffer.recorder.rewards
    ends = np.concatenate([starts[1:] != 0, model._last_episode_starts[None]])
    terminal = dict(zip(zip(*np.nonzero(truncated), strict=True), buffer.recorder.terminal, strict=True))
    assert terminal

    policy.set_training_mode(False)
    tensors = lambda obs: policy.obs_to_tensor(obs)[0]  # noqa: E731
    pick = lambda obs, *i: each(lambda x: x[i], obs)  # noqa: E731
    log_pi, values, bootstrap = np.empty((16, 3)), np.empty((16, 3)), np.zeros((16, 3))
    for n in range(3):
        if algorithm is RECURRENT:
            lstm = [(buffer.hidden_states_pi, buffer.cell_states_pi), (buffer.hidden_states_vf, buffer.cell_states_vf)]
            at = lambda t: [tuple(torch.as_tensor(x[t][:, n : n + 1]) for x in pair) for pair in lstm]  # noqa: B023, E731
            after = lambda t: at(t + 1)[1] if t < 15 else tuple(x[:, n : n + 1] for x in model._last_lstm_states.vf)  # noqa: B023, E731
            from sb3_contrib.common.recurrent.type_aliases import RNNStates

            state = RNNStates(*at(0))
        for t in range(16):
            obs = each(torch.as_tensor, pick(host["observations"], t, slice(n, n + 1)))
            action = torch.as_tensor(host["actions"][t, n : n + 1]).flatten()
            start = torch.as_tensor(starts[t, n : n + 1])
            if algorithm is RECURRENT:
                value, log_prob, _ = policy.evaluate_actions(obs, action, state, start)
                state = policy.forward(obs, state, start, deterministic=True)[3]
                after_end = {"lstm_states": after(t), "episode_starts": torch.zeros(1)}
            else:
                more = {"action_masks": torch.as_tensor(masks[t, n : n + 1])} if algorithm is MASKABLE else {}
                value, log_prob, _ = policy.evaluate_actions(obs, action, **more)
                after_end = {}
            log_pi[t, n], values[t, n] = log_prob.item(), value.item()
            if (t, n) in terminal:
                bootstrap[t, n] = policy.predict_values(tensors(terminal[t, n]), **after_end).item()
        last = (
            {"lstm_states": after(15), "episode_starts": torch.as_tensor(ends[15, n : n + 1]).float()}
            if algorithm is RECURRENT
            else {}
        )
        if not truncated[15, n]:
            bootstrap[15, n] = policy.predict_values(tensors(pick(model._last_obs, slice(n, n + 1))), **last).item()
    targets, advantages = oracle.loop(
        log_pi.T, host["log_probs"].T.astype(float), values.T, rewards.T.astype(float), (ends & ~truncated).T,
        truncated.T, bootstrap_values=bootstrap.T, gamma=0.97, lam=0.9, rho_bar=1.2, c_bar=0.9,
    )  # fmt: skip

    policy.set_training_mode(True)
    list(buffer.get(None))
    assert policy.training
    np.testing.assert_allclose(buffer.returns.flatten(), targets.flatten(), rtol=0, atol=3e-5)
    np.testing.assert_allclose(buffer.advantages.flatten(), advantages.flatten(), rtol=0, atol=3e-5)
    # what PPO's own clips read stays that of collection
    np.testing.assert_array_equal(buffer.log_probs.flatten(), host["log_probs"].T.flatten())
    np.testing.assert_array_equal(buffer.values.flatten(), host["values"].T.flatten())


@every
@pytest.mark.parametrize("observation_space", [DICT, spaces.Box(-1, 1, (3,))], ids=["Dict", "Box"])
@pytest.mark.parametrize("batch_size", [16, 47, None], ids=lambda x: f"batch {x}")
def test_minibatches_are_stocks(algorithm, observation_space, batch_size):
    """Same seed, same rows in the same order, dtypes and padding included."""
    world = {"observation_space": observation_space, "limit": 4}
    ours = collect(algorithm.make(envs(**world)))
    stock = collect(algorithm.make(envs(**world), algorithm.stock))
    for _ in range(2):
        np.random.seed(1)
        found = list(ours.get(batch_size))
        np.random.seed(1)
        for x, y in zip(
            found,
            stock.get(batch_size if batch_size != 47 or algorithm not in (MASKABLE, RECURRENT) else 48),
            strict=True,
        ):
            assert type(x) is type(y)
            for name, wanted in y._asdict().items():
                torch.testing.assert_close(
                    getattr(x, name), wanted, rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
                )


@every
def test_save_load_and_learn_on(algorithm, tmp_path):
    model = algorithm.make(envs(limit=4), rollout_buffer_kwargs={"rho_bar": 2.0, "replay": 1}).learn(96)
    weighted = model.rollout_buffer.weight_advantages
    assert weighted is (algorithm.stock.__name__ == "A2C")
    model.save(tmp_path / "model")
    loaded = algorithm.ours.load(tmp_path / "model", env=envs(n=2), device="cpu")  # another number of environments
    buffer = loaded.rollout_buffer
    assert type(buffer) is type(model.rollout_buffer) and buffer._bound is loaded
    assert buffer.clips["rho_bar"] == 2.0 and buffer.replayed.maxlen == 1 and buffer.weight_advantages is weighted
    torch.testing.assert_close(parameters(loaded), parameters(model))
    loaded.set_parameters(model.get_parameters())
    loaded.learn(96)
    loaded.set_env(envs(n=2, limit=3))
    loaded.learn(64)
    assert loaded.rollout_buffer.recorder.complete


@every
def test_a_deepcopy_learns_on_its_own(algorithm):
    model = algorithm.make(envs())  # SB3's own cannot be copied after they have learned (all but TRPO)
    before = parameters(model)
    twin = copy.deepcopy(model)
    twin.learn(48)
    assert twin.rollout_buffer._bound is twin
    torch.testing.assert_close(parameters(model), before)
    assert not torch.equal(parameters(twin), before)


@every
def test_the_policy_may_be_replaced_and_its_mode_is_kept(algorithm):
    model = algorithm.make(envs())
    buffer = collect(model)
    model.policy = copy.deepcopy(model.policy)
    move(model)
    model.policy.set_training_mode(True)
    list(buffer.get(16))
    assert model.policy.training and buffer._rollout.log_ratio.abs().max() > 1e-3
    assert all(p.grad is None for p in model.policy.parameters())


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a is not RECURRENT], ids=str)
def test_stock_with_a_buffer_class_and_the_callback(algorithm):
    cls = type(algorithm.make(envs()).rollout_buffer)
    model = algorithm.make(envs(limit=4), algorithm.stock, rollout_buffer_class=cls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.learn(96, callback=VTraceCallback())
    assert model.rollout_buffer.recorder.complete and model.rollout_buffer._bound is model


def test_the_callback_says_what_recurrent_ppo_needs():
    with pytest.raises(VTraceError, match="RecurrentPPO takes none: use VTraceRecurrentPPO"):
        RECURRENT.make(envs(), RECURRENT.stock).learn(48, callback=VTraceCallback())


@pytest.mark.parametrize("how", ["new data", "data in place", "fused Adam"])
def test_a_move_that_counts_no_version_up_is_seen(how):
    """TRPO's line search gives parameters new ``data``; fused optimisers and averages of weights write to it."""
    model = TRPO_.make(envs(), policy_kwargs={"optimizer_kwargs": {"fused": True}})
    buffer = collect(model)
    parameter = next(model.policy.parameters())
    if how == "new data":
        parameter.data = parameter.data + 0.1
    elif how == "data in place":
        parameter.data.add_(0.1)
    else:
        parameter.grad = torch.ones_like(parameter)
        model.policy.optimizer.step()
    assert buffer._rollout is None
    list(buffer.get(16))
    assert buffer._rollout.log_ratio is not None


@every
def test_a_stock_model_loads_into_ours(algorithm, tmp_path):
    algorithm.make(envs(), algorithm.stock).learn(48).save(tmp_path / "stock")
    model = algorithm.ours.load(tmp_path / "stock", env=envs(), device="cpu")
    assert type(model.rollout_buffer) is type(algorithm.make(envs()).rollout_buffer)
    model.learn(48)


def test_another_buffer_class_is_refused():
    class Mine(RolloutBuffer):
        pass

    with pytest.raises(
        VTraceError, match="rollout_buffer_class: expected a V-trace buffer such as VTraceRolloutBuffer, got Mine"
    ):
        PPO_.make(envs(), rollout_buffer_class=Mine)


@pytest.mark.parametrize(
    ("cls", "space"),
    [(VTraceRolloutBuffer, DICT), (VTraceMaskableRolloutBuffer, None)],
    ids=["plain for Dict", "masks for PPO"],
)
def test_a_buffer_class_for_something_else_is_refused(cls, space):
    with pytest.raises(VTraceError, match="rollout_buffer_class: expected a V-trace buffer such as VTrace"):
        PPO_.make(envs(observation_space=space or spaces.Box(-1, 1, (3,))), rollout_buffer_class=cls)


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a is not A2C_], ids=str)
def test_whose_loss_has_the_ratio_is_told_not_to_weight_twice(algorithm):
    with pytest.warns(UserWarning, match="count the ratio twice"):
        algorithm.make(envs(), rollout_buffer_kwargs={"weight_advantages": True}).learn(48)


def test_the_callback_refuses_masks_that_the_policy_does_not_take():
    model = PPO_.make(envs(), PPO_.stock, rollout_buffer_class=VTraceMaskableRolloutBuffer)
    with pytest.raises(
        VTraceError, match="rollout_buffer_class: expected a V-trace buffer without action masks for PPO"
    ):
        model.learn(48, callback=VTraceCallback())


@pytest.mark.parametrize("given", ["VTraceRolloutBuffer", 3], ids=str)
def test_a_buffer_class_that_is_none(given):
    with pytest.raises(
        VTraceError, match="rollout_buffer_class: expected a V-trace buffer such as VTraceRolloutBuffer"
    ):
        PPO_.make(envs(), rollout_buffer_class=given)


def test_a_buffer_that_is_replaced_is_bound_anew():
    class Replace(BaseCallback):
        def _on_training_start(self):
            old = self.model.rollout_buffer
            self.model.rollout_buffer = type(old)(16, old.observation_space, old.action_space, "cpu", n_envs=3)

        def _on_step(self):
            return True

    model = PPO_.make(envs()).learn(48, callback=Replace())
    assert model.rollout_buffer._bound is model and model.rollout_buffer.recorder.complete


@pytest.mark.parametrize("algorithm", [PPO_, RECURRENT], ids=str)
def test_a_policy_that_works_in_place_leaves_the_rows_alone(algorithm):
    model = algorithm.make(envs())
    buffer = collect(model)
    rollout = buffer._refreshed()[0]
    before = rollout.rows["observations"].clone()
    model.policy.features_extractor.register_forward_pre_hook(lambda module, inputs: (inputs[0].relu_(),))
    move(model)
    list(buffer.get(16))
    assert torch.equal(rollout.rows["observations"], before) and (before < 0).any()


def test_stock_a2c_is_told_what_replay_needs():
    options = {"rollout_buffer_class": VTraceRolloutBuffer, "rollout_buffer_kwargs": {"replay": 1}}
    with pytest.warns(UserWarning, match="weight_advantages=True"):
        A2C_.make(envs(), A2C_.stock, **options).learn(48, callback=VTraceCallback())


@pytest.mark.parametrize("algorithm", [MASKABLE, RECURRENT], ids=str)
def test_a_last_minibatch_of_one_makes_no_nan(algorithm):
    """SB3 #325: these two normalise the advantages of a minibatch of one, whose deviation is NaN."""
    model = algorithm.make(envs(n=1), n_steps=17, batch_size=16).learn(34)
    assert torch.isfinite(parameters(model)).all()
    assert [len(batch.returns) for batch in model.rollout_buffer.get(8)][-1] >= 9
