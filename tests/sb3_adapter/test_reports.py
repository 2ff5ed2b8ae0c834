"""Reports on SB3's rollout buffer that touch what ours does, each with the right value."""

import copy
import warnings

import numpy as np
import oracle
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.vec_env import VecEnvWrapper, VecNormalize
from worlds import A2C_, ALGORITHMS, BOX, PPO_, collect, envs, move

from vtrace_plugins.sb3 import VTraceCallback, VTraceRolloutBuffer
from vtrace_plugins.sb3.observations import each


def buffer_of(rewards, values, episode_starts, last_value, done, **kwargs):
    """One environment, one value a step."""
    steps = len(rewards)
    buffer = VTraceRolloutBuffer(steps, *(getattr(envs(1), f"{x}_space") for x in ("observation", "action")), **kwargs)
    for reward, value, start in zip(rewards, values, episode_starts, strict=True):
        one = torch.tensor([value])
        buffer.add(np.zeros((1, 3)), np.zeros((1, 1)), np.array([reward]), np.array([start]), one, torch.zeros(1))
    buffer.compute_returns_and_advantage(torch.tensor([last_value]), np.array([done]))
    return buffer


def test_105_done_belongs_to_the_step_before_the_episode_start():
    buffer = buffer_of([1.0, 2.0, 4.0], [0.0, 0.0, 0.0], [True, False, True], 100.0, False, gamma=0.5, gae_lambda=1.0)
    np.testing.assert_allclose(buffer.returns.flatten(), [2.0, 2.0, 54.0])  # the second step ended an episode


@pytest.mark.parametrize(("done", "wanted"), [(False, 1 + 0.5 * 100), (True, 1.0)])
def test_183_the_last_step_bootstraps_unless_it_ended(done, wanted):
    buffer = buffer_of([1.0], [7.0], [False], 100.0, done, gamma=0.5, gae_lambda=0.3)
    np.testing.assert_allclose(buffer.returns.flatten(), [wanted])
    np.testing.assert_allclose(buffer.advantages.flatten(), [wanted - 7])


@pytest.mark.parametrize("algorithm", [PPO_, A2C_], ids=str)
def test_633_a_time_limit_is_no_termination(algorithm):
    """Reward 1 for ever, under a limit: with V = 1 / (1 - gamma) every target is that value, at any lag."""
    model = algorithm.make(envs(limit=4, reward=lambda t: 1.0), gamma=0.9, gae_lambda=0.8)
    with torch.no_grad():
        for p in (*model.policy.value_net.parameters(),):
            p.zero_()
        model.policy.value_net.bias.fill_(10.0)
    buffer = collect(model)
    np.testing.assert_allclose(buffer.returns, 10.0, rtol=1e-5)
    with torch.no_grad():
        model.policy.action_net.weight.add_(torch.randn_like(model.policy.action_net.weight))
    list(buffer.get(16))
    assert buffer._rollout.log_ratio.abs().max() > 0.1
    np.testing.assert_allclose(buffer.returns, 10.0, rtol=1e-5)


@pytest.mark.parametrize("algorithm", [PPO_, A2C_], ids=str)
def test_1276_a_step_with_both_flags_has_terminated(algorithm):
    """No bootstrap: neither at collection nor at a refresh."""
    model = algorithm.make(envs(limit=4, both=True, reward=lambda t: 1.0), gamma=0.9, gae_lambda=1.0)
    with torch.no_grad():
        model.policy.value_net.weight.zero_()
        model.policy.value_net.bias.fill_(100.0)
    buffer = collect(model)
    ends = buffer._ends(buffer._end)
    assert ends.any() and not buffer.recorder.truncated.any()
    np.testing.assert_allclose(buffer.returns[ends], 1.0)
    with torch.no_grad():
        model.policy.value_net.bias.add_(50.0)  # ratios stay 1
    list(buffer.get(16))
    np.testing.assert_allclose(buffer.returns.reshape(3, 16).T[ends], 1.0, rtol=1e-4)


def test_864_values_at_a_later_pass_are_those_of_the_current_value_function():
    model = PPO_.make(envs(limit=4))
    buffer = collect(model)
    with torch.no_grad():
        model.policy.value_net.bias.add_(50.0)
    list(buffer.get(16))
    values, _ = buffer._evaluate(model.policy, buffer._rollout)
    torch.testing.assert_close(values.mean(), torch.as_tensor(buffer.values.mean()) + 50, rtol=1e-4, atol=0)
    assert buffer.returns.mean() > 25  # V(s_T) and V(terminal) moved along


class Edits(BaseCallback):
    """Adds 5 to every reward, where a callback may: in place at each step, or in the buffer at the rollout's end."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def _on_step(self):
        if self.where == "step":
            self.locals["rewards"] += 5
        if self.where == "infos":
            for info in self.locals["infos"]:
                info["TimeLimit.truncated"] = False
        return True

    def _on_rollout_end(self):
        if self.where == "end":
            self.model.rollout_buffer.rewards += 5


class TestEdits2000:
    """Rewards edited by a callback count, in the first pass, in refreshed ones and in replayed rollouts. SB3 ignores
    those made in ``_on_rollout_end``."""

    def test_in_the_first_pass(self):
        model = PPO_.make(envs(limit=4))
        plain = copy.deepcopy(collect(model))
        buffer = copy.deepcopy(plain)
        buffer.rewards += 1.0
        for one in (plain, buffer):
            one.refresh = "never"
            list(one.get(16))
        terminal = np.flatnonzero(plain.recorder.truncated.T.flatten() | plain._rollout.ends.T.flatten())
        np.testing.assert_allclose(buffer.returns[terminal], plain.returns[terminal] + 1.0, rtol=1e-5)

    @pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
    @pytest.mark.parametrize("where", ["step", "end"])
    @pytest.mark.parametrize("normalised", [False, True], ids=["raw", "VecNormalize"])
    def test_in_refreshed_and_replayed_rollouts(self, algorithm, where, normalised):
        env = envs(limit=4, reward=lambda t: 1.0)
        env = VecNormalize(env, norm_reward=False) if normalised else env
        model = algorithm.make(env, rollout_buffer_kwargs={"replay": 1}).learn(96, callback=Edits(where))
        list(model.rollout_buffer.get(16))
        for rollout in (model.rollout_buffer._rollout, *model.rollout_buffer.replayed):
            np.testing.assert_allclose(rollout.rewards, 6.0, rtol=1e-5)

    @pytest.mark.parametrize("order", [1, -1], ids=["before ours", "after ours"])
    @pytest.mark.parametrize("given", ["a list", "a CallbackList", "one inside another"])
    def test_in_either_order_of_callbacks(self, order, given):
        """At time limits, too: ours moves to the end, and stays in a list that is used again."""
        callbacks = [Edits("step"), VTraceCallback()][::order]
        if given != "a list":
            callbacks = CallbackList(callbacks)
        for i in range(4):
            if i % 2 == 0:  # another model, with the same list
                options = {"rollout_buffer_class": VTraceRolloutBuffer}
                model = PPO_.make(envs(limit=4, reward=lambda t: 1.0), PPO_.stock, **options)
            model.learn(48, callback=[callbacks] if given == "one inside another" else callbacks)
            assert model.rollout_buffer.recorder.complete
            assert model.rollout_buffer.recorder.truncated.any()
            np.testing.assert_array_equal(model.rollout_buffer._rollout.rewards, 6.0)

    @pytest.mark.parametrize("order", [1, -1], ids=["before ours", "after ours"])
    def test_another_array_in_the_place_of_the_hosts(self, order):
        """The host does not see it, so nothing is edited, at time limits neither."""

        class Rebinds(Edits):
            def _on_step(self):
                self.locals["rewards"] = self.locals["rewards"] + 5
                return True

        model = PPO_.make(envs(limit=4, reward=lambda t: 1.0), PPO_.stock, rollout_buffer_class=VTraceRolloutBuffer)
        model.learn(48, callback=[Rebinds("step"), VTraceCallback()][::order])
        assert model.rollout_buffer.recorder.truncated.any()
        np.testing.assert_array_equal(model.rollout_buffer._rollout.rewards, 1.0)

    def test_a_normalised_reward_that_comes_to_be_what_was_edited(self):
        """Whether a reward was edited is decided once, not by what today's statistics make of it."""
        env = VecNormalize(envs(limit=4, reward=lambda t: 0.1 * t), clip_reward=0.5, training=False)
        model = PPO_.make(env, rollout_buffer_kwargs={"replay": 1})
        buffer = collect(model)
        buffer.rewards[:, 1] = 0.5
        list(buffer.get(16))
        for variance in (1e-6, 1e6):  # all are clipped to 0.5, then none
            env.ret_rms.var = np.float64(variance)
            buffer._rollout.normalise(env)
            np.testing.assert_array_equal(buffer._rollout.rewards[:, 1], 0.5)
        assert (buffer._rollout.rewards[:, [0, 2]] < 0.1).all()

    def test_statistics_that_a_callback_changes_edit_no_reward(self):
        class Toggles(Edits):
            def _on_step(self):
                self.training_env.norm_reward = not self.training_env.norm_reward
                return True

        env = VecNormalize(envs(limit=4))
        model = PPO_.make(env, rollout_buffer_kwargs={"replay": 1}).learn(96, callback=Toggles("step"))
        assert all(
            rollout.untouched.all() for rollout in (model.rollout_buffer._rollout, *model.rollout_buffer.replayed)
        )

    def test_a_time_limit_that_a_callback_denies(self):
        model = PPO_.make(envs(limit=4)).learn(48, callback=Edits("infos"))
        assert not model.rollout_buffer.recorder.truncated.any()


EDITS = {
    "added to": lambda x: x + 0.1,
    "replaced": lambda x: np.full_like(x, 7.3),
    "scaled": lambda x: 0.1 * x,
    "cleaned": lambda x: np.nan_to_num(x, nan=-1.0, posinf=2.0, neginf=-2.0),
    "clipped": lambda x: np.clip(x, -0.5, 0.5),
    "of huge ones": lambda x: np.where(np.abs(x) > 1e20, 3.3, x),
    "made huge": lambda x: x + 1e12,
    "at one environment": lambda x: np.where(np.arange(x.shape[-1]) == 1, 5.5, x),
}


class Edited(BaseCallback):
    """Edits rewards at one of the two hooks, and keeps what it left and where it changed something, by rollout."""

    def __init__(self, where, edit):
        super().__init__()
        self.where, self.edit, self.left, self.changed = where, edit, [], []

    def _on_rollout_start(self):
        self.given, self.steps = [], []

    def _on_step(self):
        rewards = self.locals["rewards"]
        self.given.append(rewards.astype(np.float32))
        if self.where == "step":
            rewards[:] = self.edit(rewards)
        self.steps.append(rewards.astype(np.float32))
        return True

    def _on_rollout_end(self):
        rewards = self.model.rollout_buffer.rewards
        np.testing.assert_array_equal(rewards, np.stack(self.steps))  # without the bootstraps
        if self.where == "end":
            rewards[:] = self.edit(rewards)
        self.left.insert(0, rewards.copy())
        self.changed.insert(0, rewards != np.stack(self.given))


REWARDS = {
    "ordinary": lambda t: 0.3 * t,
    "broken": lambda t: [0.1, np.nan, np.inf, -np.inf, np.nan, 0.2][t],  # at the time limit's step, too
    "huge": lambda t: [0.1, 1e30, 0.7, -1e30, 1e30, 0.2][t],
}


EDITED = [
    *(("ordinary", edit) for edit in EDITS if edit not in ("cleaned", "of huge ones")),
    ("broken", "cleaned"),
    ("huge", "of huge ones"),
    ("huge", "clipped"),
]


@pytest.mark.parametrize("where", ["step", "end"])
@pytest.mark.parametrize(("reward", "edit"), EDITED)
@pytest.mark.parametrize("normalised", [False, True], ids=["", "VecNormalize"])
def test_any_edit_reads_back_exactly(where, reward, edit, normalised):
    """By either hook, of any magnitude, with time limits and replay: to the bit. Bootstraps alone are priced anew."""
    env = envs(limit=4, reward=REWARDS[reward])
    if normalised:
        env = VecNormalize(env, norm_reward=reward == "ordinary")
    callback = Edited(where, EDITS[edit])
    model = PPO_.make(env, rollout_buffer_kwargs={"replay": 2}, learning_rate=1e-4).learn(48 * 4, callback=callback)
    buffer = model.rollout_buffer
    list(buffer.get(16))
    rollouts = [buffer._rollout, *buffer.replayed]
    assert len(rollouts) == 3 and all(rollout.recorder.truncated.any() for rollout in rollouts)
    for rollout, left, changed in zip(rollouts, callback.left, callback.changed, strict=False):
        assert changed.any()
        wanted = left
        if normalised and rollout is not rollouts[0]:  # what is still the environment's own, under today's statistics
            wanted = np.where(changed, left, env.normalize_reward(np.stack(rollout.recorder.raw_rewards)))
        np.testing.assert_array_equal(rollout.rewards, wanted)
        assert_oracle(buffer, model.policy, rollout)
    assert np.isfinite(buffer.returns).all()


def assert_oracle(buffer, policy, rollout):
    """The rollout's results are V-trace of its rewards, with V of the terminal observations of today."""
    values, log_pi = buffer._evaluate(policy, rollout)
    last, terminal = buffer._continuation(policy, rollout)
    truncated = rollout.recorder.truncated
    bootstrap = np.zeros((16, 3))
    bootstrap[-1], bootstrap[truncated] = last.numpy(), terminal.numpy()
    targets, advantages = oracle.loop(
        log_pi.view(3, 16).double().numpy(), rollout.rows["log_probs"].view(3, 16).double().numpy(),
        values.view(3, 16).double().numpy(), rollout.rewards.T.astype(float), (rollout.ends & ~truncated).T,
        truncated.T, bootstrap_values=bootstrap.T, gamma=buffer.gamma, lam=buffer.gae_lambda, weight_advantages=False,
    )  # fmt: skip
    for name, wanted in (("returns", targets), ("advantages", advantages)):
        found, scale = rollout.results[name].numpy(), max(1.0, np.abs(wanted).max())
        np.testing.assert_allclose(found / scale, wanted.flatten() / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("edit", ["replaced", "cleaned"])
def test_an_edit_in_the_first_pass_and_without_a_refresh(algorithm, edit):
    """Every ratio is 1, time limits bootstrap, and nothing of what was edited away is left."""
    env = envs(limit=4, reward=REWARDS["broken" if edit == "cleaned" else "ordinary"])
    model = algorithm.make(env, rollout_buffer_kwargs={"refresh": "never", "weight_advantages": False})
    buffer = collect(model)
    buffer.rewards[:] = EDITS[edit](buffer.rewards)
    list(buffer.get(16))
    assert_oracle(buffer, model.policy, buffer._rollout)
    np.testing.assert_array_equal(buffer.returns.flatten(), buffer._rollout.results["returns"])


class Reusing(VecEnvWrapper):
    """Hands out views of buffers that it writes its next step into, as simulators do."""

    def __init__(self, venv):
        super().__init__(venv)
        self.final = {}

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        observations, rewards, dones, infos = self.venv.step_wait()
        for i, info in enumerate(infos):
            if "terminal_observation" in info:
                kept = self.final.setdefault(i, each(np.array, info["terminal_observation"]))
                each(np.copyto, kept, info["terminal_observation"])
                info["terminal_observation"] = kept
        return observations, rewards, dones, infos


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("kind", ["Box", "Dict", "VecNormalize", "VecNormalize, rewards only"])
def test_terminal_observations_are_copied(algorithm, kind):
    space = spaces.Dict(x=BOX, y=spaces.Box(-1, 1, (2,))) if kind == "Dict" else BOX

    def run(wrapper):
        env = wrapper(envs(limit=4, observation_space=space))
        if "Vec" in kind:
            env = VecNormalize(env, norm_obs="only" not in kind)
        buffer = collect(algorithm.make(env, rollout_buffer_kwargs={"replay": 1}))
        return buffer.recorder.terminal + buffer.recorder.raw_terminal

    for found, wanted in zip(run(Reusing), run(lambda env: env), strict=True):
        each(np.testing.assert_array_equal, found, wanted)


class AfterTheReset(VecEnvWrapper):
    """Its terminal observation is the one after the reset, as IsaacLab's is; at all of them, or at all but one."""

    def __init__(self, venv, all_but=None):
        super().__init__(venv)
        self.all_but, self.seen = all_but, 0

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        observations, rewards, dones, infos = self.venv.step_wait()
        for i, info in enumerate(infos):
            if info.get("TimeLimit.truncated"):
                self.seen += 1
                if self.seen != self.all_but:
                    info["terminal_observation"] = each(lambda x: x[i].copy(), observations)  # noqa: B023
        return observations, rewards, dones, infos


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize(
    "space",
    [BOX, spaces.Dict(x=BOX, n=spaces.Discrete(50)), spaces.Dict(x=BOX, goal=spaces.Box(2, 2, (2,)))],
    ids=["Box", "Dict", "Dict with a constant"],
)
def test_a_terminal_observation_that_is_the_resets(algorithm, space):
    model = algorithm.make(AfterTheReset(envs(limit=4, observation_space=space)))
    with pytest.warns(UserWarning, match="terminal_observation.*is the observation after the reset") as caught:
        collect(model, 3)
    assert sum("after the reset" in str(one.message) for one in caught) == 1
    for env in (envs(limit=4, observation_space=space), AfterTheReset(envs(limit=4, observation_space=space), 2)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            collect(algorithm.make(env))


@pytest.mark.parametrize(
    "space", [spaces.Box(1, 1, (3,)), spaces.Discrete(1), spaces.Discrete(2)], ids=["a constant", "one state", "two"]
)
def test_small_worlds_come_back_to_their_start(space):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collect(PPO_.make(envs(limit=4, observation_space=space)), 5)


def test_advantages_edited_in_place_count_until_a_refresh():
    model = PPO_.make(envs())
    buffer = collect(model)
    buffer.advantages[:] = 3.0
    assert all((batch.advantages == 3.0).all() for batch in buffer.get(16))
    move(model)
    assert not any((batch.advantages == 3.0).any() for batch in buffer.get(16))


def test_a_full_buffer_that_was_never_computed_hands_out_zeros():
    buffer = VTraceRolloutBuffer(4, envs(1).observation_space, envs(1).action_space)
    buffer.pos, buffer.full = 4, True
    assert all((batch.returns == 0).all() for batch in buffer.get(2))
