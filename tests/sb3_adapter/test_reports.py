"""Reports on SB3's rollout buffer that touch what ours does, each with the right value."""

import copy

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecNormalize
from worlds import A2C_, ALGORITHMS, PPO_, collect, envs, move

from vtrace_plugins.sb3 import VTraceCallback, VTraceRolloutBuffer


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
        for each in (plain, buffer):
            each.refresh = "never"
            list(each.get(16))
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
    def test_in_either_order_of_callbacks(self, order):
        model = PPO_.make(envs(reward=lambda t: 1.0), PPO_.stock, rollout_buffer_class=VTraceRolloutBuffer)
        model.learn(48, callback=[Edits("step"), VTraceCallback()][::order])
        np.testing.assert_allclose(model.rollout_buffer._rollout.rewards, 6.0)

    def test_a_time_limit_that_a_callback_denies(self):
        model = PPO_.make(envs(limit=4)).learn(48, callback=Edits("infos"))
        assert not model.rollout_buffer.recorder.truncated.any()


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
