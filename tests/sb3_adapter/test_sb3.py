"""The rollout buffers: stock's numbers on-policy, the oracle's off-policy, and a life in PPO and A2C."""

import copy
import pickle
import warnings

import numpy as np
import oracle
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import SimpleMultiObsEnv
from worlds import BOX, assert_outputs_as_stored, collect, envs, move

from vtrace_plugins import VTraceError
from vtrace_plugins.sb3 import VTraceA2C, VTraceCallback, VTraceDictRolloutBuffer, VTracePPO, VTraceRolloutBuffer

SPACES = (BOX, spaces.Discrete(2))


def filled(cls, steps=32, n_envs=4, **kwargs):
    buffer = cls(steps, *SPACES, device="cpu", n_envs=n_envs, **kwargs)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        buffer.add(
            rng.normal(size=(n_envs, 3)),
            rng.integers(2, size=(n_envs, 1)),
            rng.normal(size=n_envs),
            rng.random(n_envs) < 0.2,
            torch.from_numpy(rng.normal(size=n_envs).astype(np.float32)),
            torch.from_numpy(-rng.random(n_envs).astype(np.float32)),
        )
    buffer.compute_returns_and_advantage(
        torch.from_numpy(rng.normal(size=n_envs).astype(np.float32)), rng.random(n_envs) < 0.5
    )
    return buffer


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize(("steps", "n_envs"), [(1, 4), (5, 4), (512, 4), (700, 65), (700, 4)])
def test_on_policy_it_is_the_stock_buffer(gae_lambda, steps, n_envs):
    """To the bit, but for a long rollout of few environments, which is scanned."""
    stock = filled(RolloutBuffer, steps, n_envs, gae_lambda=gae_lambda)
    ours = filled(VTraceRolloutBuffer, steps, n_envs, gae_lambda=gae_lambda)
    for name in ("returns", "advantages"):
        x, y = getattr(ours, name), getattr(stock, name)
        assert x.dtype == y.dtype and x.shape == y.shape
        if (steps, n_envs) == (700, 4):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-6 * max(1.0, np.abs(y).max()))
        else:
            np.testing.assert_array_equal(x, y)


def test_an_unbound_buffer_gives_stocks_minibatches_and_says_so_once():
    stock, ours = filled(RolloutBuffer), filled(VTraceRolloutBuffer)
    np.random.seed(0)
    wanted = list(stock.get(16))
    np.random.seed(0)
    with pytest.warns(UserWarning, match="no algorithm is bound"):
        found = list(ours.get(16))
    for x, y in zip(found, wanted, strict=True):
        for a, b in zip(x, y, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=5e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(ours.get(16))


@pytest.mark.parametrize(
    ("ours", "stock"),
    [(VTracePPO, PPO), pytest.param(VTraceA2C, A2C, marks=pytest.mark.slow)],
    ids=["PPO", "A2C"],
)
def test_without_refresh_training_is_stocks_to_the_bit(ours, stock):
    """Over more steps than it takes to make a rounding difference large."""

    def parameters(cls, **kwargs):
        size = {"n_steps": 64, "batch_size": 64, "n_epochs": 4} if stock is PPO else {"n_steps": 64}
        env = make_vec_env("CartPole-v1", n_envs=4, seed=0)
        model = cls("MlpPolicy", env, seed=0, device="cpu", **size, **kwargs).learn(12_288)
        return torch.cat([p.detach().flatten() for p in model.policy.parameters()])

    assert torch.equal(parameters(ours, rollout_buffer_kwargs={"refresh": "never"}), parameters(stock))


def collected(limit=None, action_space=SPACES[1], **kwargs):
    """A PPO that has filled its buffer, and whose policy has then moved."""
    model = VTracePPO(
        "MlpPolicy", envs(limit=limit, action_space=action_space), n_steps=16, device="cpu", seed=0, **kwargs
    )
    collect(model)
    before = copy.deepcopy(model.policy.state_dict())
    move(model)
    return model, before


def assert_same_rows(batch, wanted):
    """The batch's rows, in whatever order, are the wanted ones."""
    names = sorted(wanted)
    found = np.stack([getattr(batch, name).numpy() for name in names], 1)
    rows = np.stack([wanted[name] for name in names], 1)
    np.testing.assert_allclose(found[np.lexsort(found.T)], rows[np.lexsort(rows.T)], rtol=0, atol=2e-5)


@pytest.mark.parametrize("limit", [None, 4], ids=["terminations", "time limits"])
@pytest.mark.parametrize(
    "action_space",
    [spaces.Discrete(3), spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)],
    ids=lambda s: type(s).__name__,
)
def test_a_refresh_is_the_oracle_under_the_current_policy(action_space, limit):
    """log pi, V, V(terminal observation) and V(s_T), each evaluated here, apart from the buffer."""
    options = {"rho_bar": 1.2, "c_bar": 0.9, "weight_advantages": True}
    model, _ = collected(limit, action_space, gamma=0.97, gae_lambda=0.9, rollout_buffer_kwargs=options)
    buffer, policy = model.rollout_buffer, model.policy
    assert buffer.recorder.truncated.any() == (limit is not None)
    observations, actions = buffer.observations.copy(), buffer.actions.copy()
    mu, old_values = buffer.log_probs.copy(), buffer.values.copy()
    rewards, truncated = buffer.recorder.rewards.copy(), buffer.recorder.truncated.copy()
    ends = np.concatenate([buffer.episode_starts[1:] != 0, model._last_episode_starts[None]])
    terminal = iter(buffer.recorder.terminal)

    value_of = lambda obs: policy.predict_values(torch.as_tensor(obs)).detach().numpy().flatten()  # noqa: E731
    values, log_pi = np.empty((16, 3)), np.empty((16, 3))
    bootstrap = np.zeros((16, 3))
    bootstrap[-1] = value_of(model._last_obs)
    for t in range(16):
        taken = torch.as_tensor(actions[t])
        taken = taken.long().flatten() if isinstance(action_space, spaces.Discrete) else taken.float()
        value, log_prob, _ = policy.evaluate_actions(torch.as_tensor(observations[t]), taken)
        values[t], log_pi[t] = value.detach().numpy().flatten(), log_prob.detach().numpy()
        for i in np.flatnonzero(truncated[t]):
            bootstrap[t, i] = value_of(next(terminal)[None])[0]
    targets, advantages = oracle.loop(
        log_pi.T, mu.T.astype(float), values.T, rewards.T.astype(float), (ends & ~truncated).T, truncated.T,
        bootstrap_values=bootstrap.T, gamma=0.97, lam=0.9, rho_bar=1.2, c_bar=0.9,
    )  # fmt: skip

    training = policy.training
    batch = next(buffer.get(None))
    assert policy.training == training
    np.testing.assert_allclose(buffer.returns.flatten(), targets.flatten(), rtol=0, atol=2e-5)
    np.testing.assert_allclose(buffer.advantages.flatten(), advantages.flatten(), rtol=0, atol=2e-5)
    assert_same_rows(batch, {"returns": targets.flatten(), "advantages": advantages.flatten()})
    # what PPO's own clips read stays that of collection
    np.testing.assert_array_equal(buffer.log_probs.flatten(), mu.T.flatten())
    np.testing.assert_array_equal(buffer.values.flatten(), old_values.T.flatten())
    assert batch.returns.shape == (48,)


def test_an_unmoved_policy_has_the_stored_log_probs_and_is_not_evaluated_again(monkeypatch):
    from vtrace_plugins.sb3 import buffers
    from vtrace_plugins.sb3.evaluate import evaluate

    model, before = collected()
    model.policy.load_state_dict(before)
    buffer = model.rollout_buffer
    assert_outputs_as_stored(model)

    calls = []
    monkeypatch.setattr(buffers, "evaluate", lambda *a: calls.append(1) or evaluate(*a))
    list(buffer.get(16))
    assert not calls
    with torch.no_grad():
        next(model.policy.parameters()).add_(0.1)
    list(buffer.get(16))
    list(buffer.get(16))
    assert len(calls) == 1


def test_refreshing_on_folded_rewards_says_so_once():
    model, _ = collected(limit=4)
    model.rollout_buffer.recorder._recorded[0] = False  # as if the recorder had come late
    with pytest.warns(UserWarning, match="time-limit bootstraps"):
        list(model.rollout_buffer.get(None))


def test_the_callback_on_stock_ppo():
    model = PPO("MlpPolicy", envs(), n_steps=16, batch_size=16, device="cpu", rollout_buffer_class=VTraceRolloutBuffer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.learn(96, callback=VTraceCallback())
    assert model.rollout_buffer.recorder.complete
    logged = model.logger.name_to_value  # of the last training phase, not dumped yet
    assert logged["vtrace/ratio"] != 1 and 0 < logged["vtrace/ess"] <= 1
    assert 0 <= logged["vtrace/rho_clipped"] <= 1 and 0 <= logged["vtrace/c_clipped"] <= 1
    with pytest.raises(VTraceError, match="rollout_buffer_class: expected a V-trace buffer"):
        PPO("MlpPolicy", envs(), n_steps=16, batch_size=16, device="cpu").learn(48, callback=VTraceCallback())


@pytest.mark.parametrize("algorithm", [VTracePPO, VTraceA2C])
@pytest.mark.parametrize("callback", [None, lambda *_: True, [VTraceCallback()]], ids=["none", "function", "list"])
def test_save_load_and_learn_on(algorithm, callback, tmp_path):
    model = algorithm("MlpPolicy", envs(), n_steps=16, device="cpu", seed=0, rollout_buffer_kwargs={"rho_bar": 2.0})
    model.learn(96, callback=callback)
    model.save(tmp_path / "model")
    loaded = algorithm.load(tmp_path / "model", env=envs(n=2), device="cpu")
    assert isinstance(loaded.rollout_buffer, VTraceRolloutBuffer)
    assert loaded.rollout_buffer.clips["rho_bar"] == 2.0
    assert loaded.rollout_buffer._algorithm() is loaded
    assert loaded.rollout_buffer.weight_advantages is (algorithm is VTraceA2C)
    loaded.set_parameters(model.get_parameters())
    loaded.learn(96)


def test_pickle_and_deepcopy_of_the_buffer():
    model, _ = collected()
    for again in (pickle.loads(pickle.dumps(model.rollout_buffer)), copy.deepcopy(model.rollout_buffer)):
        np.testing.assert_array_equal(again.returns, model.rollout_buffer.returns)
        assert again._algorithm is None


def test_dict_observations():
    env = make_vec_env(lambda: SimpleMultiObsEnv(random_start=False), n_envs=2)
    model = VTracePPO("MultiInputPolicy", env, n_steps=16, batch_size=16, n_epochs=2, device="cpu").learn(64)
    assert isinstance(model.rollout_buffer, VTraceDictRolloutBuffer) and isinstance(
        model.rollout_buffer, DictRolloutBuffer
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho_bar": -1.0}, "rho_bar: expected a number of at least 0"),
        ({"c_bar": "one"}, "c_bar: expected a number, got str"),
        ({"refresh": "epoch"}, "refresh: expected 'pass' or 'never', got 'epoch'"),
        ({"weight_advantages": None}, "weight_advantages: expected True or False"),
        ({"backend": "cuda"}, "backend: expected one of"),
        ({"rho_bar": None}, "rho_bar: expected a number, got NoneType"),
        ({"gamma": 2.0}, r"gamma: expected a number in \[0, 1\], got 2.0"),
        ({"gae_lambda": None}, "gae_lambda: expected a number, got NoneType"),
        (
            {"rho_bars": 1.0},
            r"rho_bars: expected one of VTraceRolloutBuffer's arguments, \[.*'gae_lambda'.*'replay'.*\]",
        ),
        ({"discounts": 0.9}, r"discounts: expected one of VTraceRolloutBuffer's arguments, .*'gamma'"),
    ],
    ids=str,
)
def test_wrong_options(options, message):
    with pytest.raises(VTraceError, match=message):
        VTraceRolloutBuffer(4, *SPACES, **options)


def test_an_unknown_option_is_a_type_error_as_upstreams_is():
    with pytest.raises(TypeError, match="wrong: expected one of VTraceRolloutBuffer's arguments"):
        VTracePPO("MlpPolicy", envs(1), rollout_buffer_kwargs={"wrong": 1})


def test_wrong_calls():
    buffer = VTraceRolloutBuffer(4, *SPACES)
    with pytest.raises(VTraceError, match="get: expected a full buffer, 4 steps, got 0"):
        list(buffer.get())
    with pytest.raises(VTraceError, match="dones: expected a flag for each environment, got None"):
        buffer.compute_returns_and_advantage(torch.zeros(1), None)
    with pytest.raises(VTraceError, match="algorithm: expected an on-policy algorithm with its policy, got NoneType"):
        buffer.bind(None)
    for batch_size in (0, -5, 2.5):
        with pytest.raises(VTraceError, match="batch_size: expected None or a number of rows, 1 or more"):
            list(filled(VTraceRolloutBuffer).get(batch_size))


def test_observations_of_another_kind():
    with pytest.raises(VTraceError, match=r"observation_space: expected no Dict space .*, got VTraceRolloutBuffer"):
        VTraceRolloutBuffer(4, spaces.Dict(x=BOX), SPACES[1])


def test_an_algorithm_that_is_not_on_policy():
    with pytest.raises(VTraceError, match="VTraceCallback: expected an on-policy algorithm, got DQN"):
        DQN("MlpPolicy", envs(1), device="cpu").learn(8, callback=VTraceCallback())
