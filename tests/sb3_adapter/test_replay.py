"""replay=K: the last K rollouts are handed out too, each corrected under the current policy."""

import pickle

import numpy as np
import oracle
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize
from worlds import A2C_, ALGORITHMS, PPO_, RECURRENT, collect, envs, move, parameters

from vtrace_plugins import VTraceError
from vtrace_plugins.sb3.minibatches import minibatches

DICT = spaces.Dict({"position": spaces.Box(-1, 1, (3,)), "kind": spaces.MultiBinary(2)})


def replaying(algorithm=PPO_, env=None, replay=2, rollouts=4, **kwargs):
    env = envs(limit=4) if env is None else env
    model = algorithm.make(env, gae_lambda=0.9, rollout_buffer_kwargs={"replay": replay} | kwargs)
    collect(model, rollouts)
    move(model)
    return model


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("observation_space", [DICT, spaces.Box(-1, 1, (3,))], ids=["Dict", "Box"])
def test_every_rollout_is_corrected_under_the_current_policy(algorithm, observation_space):
    model = replaying(algorithm, envs(limit=4, observation_space=observation_space))
    buffer = model.rollout_buffer
    batch = next(buffer.get(None))
    rollouts = [buffer._rollout, *buffer.replayed]
    assert len(rollouts) == 3
    real = batch.mask > 0 if algorithm is RECURRENT else torch.ones_like(batch.returns, dtype=torch.bool)
    assert real.sum() == 3 * 48
    handed = torch.stack([batch.returns, batch.advantages, batch.old_log_prob], 1)[real]
    wanted = []
    for rollout in rollouts:
        values, log_pi = buffer._evaluate(model.policy, rollout)
        last, terminal = buffer._continuation(model.policy, rollout)
        truncated, ends = rollout.recorder.truncated, rollout.ends
        bootstrap = np.zeros((16, 3))
        bootstrap[-1], bootstrap[truncated] = last.numpy(), terminal.numpy()
        log_mu = rollout.rows["log_probs"]
        results = oracle.loop(
            log_pi.view(3, 16).double().numpy(), log_mu.view(3, 16).double().numpy(), values.view(3, 16).numpy(),
            rollout.recorder.rewards.T.astype(float), (ends & ~truncated).T, truncated.T, bootstrap_values=bootstrap.T,
            gamma=0.97, lam=0.9, weight_advantages=algorithm is A2C_,
        )  # fmt: skip
        wanted.append(np.stack([*(x.flatten() for x in results), log_mu.numpy()], 1))
    wanted = np.concatenate(wanted)
    in_order = lambda x: x[np.argsort(x[:, 0], kind="stable")]  # noqa: E731
    np.testing.assert_allclose(in_order(handed.numpy()), in_order(wanted), rtol=0, atol=5e-5)
    assert buffer.returns.shape == (48, 1)  # what the host logs is the current rollout's


def test_the_oldest_goes_and_the_lag_is_logged():
    model = PPO_.make(envs(limit=4), rollout_buffer_kwargs={"replay": 2}).learn(48 * 5)
    buffer = model.rollout_buffer
    # two updates a rollout, seen at the second epoch of the fifth: 1, 3 and 5 behind
    assert [model._n_updates - r.end.updates for r in (buffer._rollout, *buffer.replayed)] == [2, 4, 6]
    assert model.logger.name_to_value["vtrace/lag"] == 3
    assert sum(len(batch.returns) for batch in buffer.get(16)) == 3 * 48


@pytest.mark.parametrize("algorithm", [PPO_, RECURRENT], ids=str)
def test_rollouts_may_differ_in_length(algorithm):
    model = algorithm.make(envs(limit=4), rollout_buffer_kwargs={"replay": 2}).learn(48 * 2)
    buffer = model.rollout_buffer
    model.n_steps = buffer.buffer_size = 24
    if algorithm is RECURRENT:
        buffer.hidden_state_shape = (24, *buffer.hidden_state_shape[1:])
    model.learn(72, reset_num_timesteps=False)
    assert [r.shape for r in (buffer._rollout, *buffer.replayed)] == [(3, 24), (3, 16), (3, 16)]
    (batch,) = buffer.get(None)
    if algorithm is RECURRENT:  # a new sequence at each environment's first row: no episode goes on into the next
        assert batch.lstm_states.pi[0].shape[1] >= 9
        assert (batch.mask > 0).sum() == 72 + 48 + 48
    else:
        assert len(batch.returns) == 72 + 48 + 48


def test_sequences_never_cross_environments_of_rollouts_of_any_length():
    from vtrace_plugins.sb3_contrib.recurrent import sequences

    shapes = [(2, 3), (2, 5)]
    rows = {name: torch.arange(16.0) for name in ("values", "log_probs", "advantages", "returns")}
    rows |= {"observations": torch.arange(16.0)[:, None], "actions": torch.zeros(16, 1)}
    rows |= {f"{kind}_states_{net}": torch.zeros(16, 1, 1) for kind in ("hidden", "cell") for net in ("pi", "vf")}
    rows["episode_starts"] = torch.zeros(16, 1)
    environment = np.repeat([0, 1, 2, 3], [3, 3, 5, 5])
    for _ in range(10):
        for batch in sequences(lambda **fields: fields, rows, shapes, 7, False):
            pieces = batch["mask"].view(batch["lstm_states"].pi[0].shape[1], -1) > 0
            for piece, real in zip(batch["old_values"].view(pieces.shape), pieces, strict=True):
                assert len(set(environment[piece[real].long().numpy()])) == 1


def test_rows_of_all_rollouts_lie_in_memory_once():
    model = replaying()
    buffer = model.rollout_buffer
    list(buffer.get(16))
    pool = buffer._pool["observations"]
    assert all(r.rows["observations"]._base is pool for r in (buffer._rollout, *buffer.replayed))


def test_a_pickled_buffer_hands_out_its_own_rollout():
    buffer = pickle.loads(pickle.dumps(replaying().rollout_buffer))
    with pytest.warns(UserWarning, match="no algorithm is bound"):
        assert sum(len(batch.returns) for batch in buffer.get(16)) == 48


def test_an_interrupted_pass_can_be_made_again(monkeypatch):
    model = replaying()
    with monkeypatch.context() as m:
        m.setattr(model.policy, "evaluate_actions", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(model.rollout_buffer.get(16))
    assert sum(len(batch.returns) for batch in model.rollout_buffer.get(16)) == 3 * 48


@pytest.mark.parametrize("algorithm", [PPO_, A2C_], ids=str)
def test_without_replay_nothing_is_kept(algorithm):
    model = algorithm.make(envs()).learn(48 * 3)
    assert not model.rollout_buffer.replayed


def test_replay_trains():
    model = PPO_.make(envs(limit=4), rollout_buffer_kwargs={"replay": 3})
    before = parameters(model)
    model.learn(48 * 6)
    assert torch.isfinite(parameters(model)).all() and not torch.equal(before, parameters(model))


class TestVecNormalize:
    """Older rollouts are seen under today's statistics, the current one as it was collected."""

    @pytest.mark.parametrize("observation_space", [DICT, spaces.Box(-1, 1, (3,))], ids=["Dict", "Box"])
    def test_older_rollouts_are_normalised_anew(self, observation_space):
        keys = ["position"] if isinstance(observation_space, spaces.Dict) else None
        env = VecNormalize(envs(limit=4, observation_space=observation_space), norm_obs_keys=keys)
        model = replaying(env=env, rollouts=2)
        buffer = model.rollout_buffer
        current = buffer.observations["position"] if keys else buffer.observations
        current = current.copy().swapaxes(0, 1).reshape(48, 3)
        list(buffer.get(16))
        (older,) = buffer.replayed
        raw = older.recorder.raw_observations
        assert len(raw) == 17
        rows = lambda rollout: rollout.rows["observations"]["position"] if keys else rollout.rows["observations"]  # noqa: E731
        np.testing.assert_array_equal(rows(buffer._rollout).numpy(), current)
        normalised = [env.normalize_obs(x)["position" if keys else ...] for x in raw]
        np.testing.assert_allclose(
            rows(older).numpy(), np.stack(normalised[:16]).swapaxes(0, 1).reshape(48, 3), rtol=1e-5
        )
        last = older.end.observations["position"] if keys else older.end.observations
        np.testing.assert_allclose(last, normalised[16], rtol=1e-5)
        np.testing.assert_allclose(
            older.rewards, np.stack([env.normalize_reward(x) for x in older.recorder.raw_rewards]), rtol=1e-6
        )
        (terminal, *_), (raw_terminal, *_) = older.recorder.terminal, older.recorder.raw_terminal
        np.testing.assert_allclose(
            terminal["position"] if keys else terminal,
            env.normalize_obs(raw_terminal)["position"] if keys else env.normalize_obs(raw_terminal),
            rtol=1e-5,
        )

    def test_the_first_observation_of_a_rollout_is_the_last_of_the_one_before(self):
        model = replaying(env=VecNormalize(envs(limit=4)), rollouts=3)
        newer, older = model.rollout_buffer.replayed
        np.testing.assert_array_equal(older.recorder.raw_observations[16], newer.recorder.raw_observations[0])

    def test_after_a_rollout_that_was_broken_off(self):
        """SB3 then goes on from an observation that is no longer the environment's last one."""
        env = VecNormalize(envs())
        model = PPO_.make(env, rollout_buffer_kwargs={"replay": 1})
        model.learn(48, callback=lambda *_: model.num_timesteps < 24)
        env.training = False
        model.learn(48, reset_num_timesteps=False)
        rollout = model.rollout_buffer._rollout
        before = rollout.rows["observations"].clone()
        rollout.normalise(env)
        torch.testing.assert_close(rollout.rows["observations"], before, rtol=1e-4, atol=1e-4)

    def test_another_environment_in_the_middle_of_a_rollout(self):
        model = PPO_.make(VecNormalize(envs()), rollout_buffer_kwargs={"replay": 2})

        def swap(*_):
            if model.num_timesteps == 24:
                env = VecNormalize(envs())
                model.set_env(env, force_reset=False)
                env.reset()
            return True

        model.learn(48 * 4, callback=swap)
        assert [r.recorder.has_raw for r in model.rollout_buffer.replayed] == [True, True]

    def test_under_another_wrapper_it_says_that_it_cannot(self):
        env = VecFrameStack(VecNormalize(envs(limit=4)), 2)
        with pytest.warns(UserWarning, match="not the outermost wrapper"):
            replaying(env=env, rollouts=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replay": -1}, "replay: expected a number of rollouts, 0 or more, got -1"),
        ({"replay": True}, "replay: expected a number of rollouts"),
        ({"replay": 1.0}, "replay: expected a number of rollouts"),
        ({"replay": 1, "refresh": "never"}, "replay: expected 0 beside refresh='never'"),
    ],
    ids=str,
)
def test_wrong_options(options, message):
    with pytest.raises(VTraceError, match=message):
        PPO_.make(envs(), rollout_buffer_kwargs=options)


def test_a_rollout_that_is_normalised_anew_gets_new_results_though_the_policy_has_not_moved():
    env = VecNormalize(envs(limit=4))
    model = PPO_.make(env, gae_lambda=0.9, rollout_buffer_kwargs={"replay": 1}, learning_rate=0.0)
    buffer = collect(model)
    list(buffer.get(16))
    env.obs_rms.var *= 9.0  # as if other observations had come
    env.ret_rms.var *= 25.0
    _, callback = model._setup_learn(10**6, reset_num_timesteps=False)
    model.collect_rollouts(model.env, callback, buffer, model.n_steps)
    list(buffer.get(16))
    (older,) = buffer.replayed
    before = older.results["returns"].clone()
    last, terminal = buffer._continuation(model.policy, older)
    older.correct(*buffer._evaluate(model.policy, older), last, terminal, buffer._options())
    torch.testing.assert_close(before, older.results["returns"])
    assert older.rewards.max() < 5.0 / 3, "smaller under the larger variance"


def test_a_step_that_was_not_recorded_has_the_hosts_reward_and_no_truncation():
    """Not those of the last step that was."""
    model = PPO_.make(envs(limit=4))
    buffer = model.rollout_buffer
    buffer.reset()
    buffer.start()
    step = (np.zeros((3, 3)), np.zeros((3, 1)))
    rest = (np.zeros(3), torch.zeros(3), torch.zeros(3))
    info = {"TimeLimit.truncated": True, "terminal_observation": np.ones(3, np.float32)}
    buffer.record(np.full(3, 2.0), np.array([True, False, False]), [info, {}, {}])
    buffer.add(*step, np.array([9.0, 2.0, 2.0]), *rest)
    buffer.add(*step, np.full(3, 5.0), *rest)
    np.testing.assert_array_equal(buffer.rewards[:2], [[2.0, 2.0, 2.0], [5.0, 5.0, 5.0]])
    assert buffer.recorder.truncated.sum() == 1 and len(buffer.recorder.terminal) == 1
    assert not buffer.recorder.complete


@pytest.mark.parametrize("batch_size", [None, 1, 100, 16_384, 16_385, 20_000, 50_000, 60_000], ids=str)
def test_every_row_once_in_batches_of_any_size(batch_size):
    """Rows are gathered 16,384 at a time; a batch may be larger."""
    rows = 50_000 if batch_size != 1 else 20_000
    column = torch.arange(rows)
    batches = list(minibatches(lambda *columns: columns, [{"x": column}, column], batch_size, False))
    assert all(torch.equal(one["x"], other) for one, other in batches)
    sizes = [len(x) for _, x in batches]
    wanted = batch_size or rows
    assert sizes[:-1] == [wanted] * (len(sizes) - 1) and 0 < sizes[-1] <= wanted
    found = torch.cat([x for _, x in batches])
    assert torch.equal(found.sort().values, column) and not torch.equal(found, column)
