"""Small environments and the five algorithms, for all tests of the buffers."""

from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib import TRPO, MaskablePPO, RecurrentPPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env

from vtrace_plugins.sb3 import VTraceA2C, VTracePPO
from vtrace_plugins.sb3_contrib import VTraceMaskablePPO, VTraceRecurrentPPO, VTraceTRPO

BOX = spaces.Box(-1, 1, (3,))


class Episodes(gym.Env):
    """Random observations; an episode ends after five steps, or is cut short by the time limit below at ``limit``; with
    ``both`` it has terminated there, too.

    The odd actions are masked out in odd steps.
    """

    def __init__(self, action_space=None, observation_space=BOX, limit=None, reward=float, both=False):
        self.observation_space, self.action_space = observation_space, action_space or spaces.Discrete(3)
        self.limit, self.reward, self.both = limit, reward, both

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.t += 1
        terminated = self.t >= 5
        truncated = not terminated and self.t == self.limit
        terminated |= truncated and self.both
        return self.observation_space.sample(), self.reward(self.t), terminated, truncated, {}

    def action_masks(self):
        if isinstance(self.action_space, spaces.Discrete):
            return np.arange(self.action_space.n) % 2 <= (self.t + 1) % 2
        return np.ones(
            2 * self.action_space.n
            if isinstance(self.action_space, spaces.MultiBinary)
            else sum(self.action_space.nvec)
        )


def envs(n=3, **kwargs):
    return make_vec_env(Episodes, n_envs=n, seed=0, env_kwargs=kwargs)


@dataclass
class Algorithm:
    ours: type
    stock: type
    policy: str = "MlpPolicy"
    kwargs: dict = field(default_factory=dict)

    def __str__(self):
        return self.stock.__name__

    def make(self, env, cls=None, **kwargs):
        policy = self.policy
        if isinstance(env.observation_space, spaces.Dict):
            policy = policy.replace("Mlp", "MultiInput")
        options = {"n_steps": 16, "seed": 0, "device": "cpu", "gamma": 0.97} | self.kwargs | kwargs
        return (cls or self.ours)(policy, env, **options)


SMALL = {"batch_size": 16, "n_epochs": 2}
LSTM = {"policy_kwargs": {"lstm_hidden_size": 8, "net_arch": [8]}}
PPO_, A2C_ = Algorithm(VTracePPO, PPO, kwargs=SMALL), Algorithm(VTraceA2C, A2C)
TRPO_ = Algorithm(VTraceTRPO, TRPO, kwargs={"batch_size": 16})
MASKABLE = Algorithm(VTraceMaskablePPO, MaskablePPO, kwargs=SMALL)
RECURRENT = Algorithm(VTraceRecurrentPPO, RecurrentPPO, "MlpLstmPolicy", SMALL | LSTM)
ALGORITHMS = [PPO_, A2C_, TRPO_, MASKABLE, RECURRENT]


def collect(model, rollouts=1):
    """Fill the model's buffer, so many times; between them one pass, as training would make it."""
    _, callback = model._setup_learn(10**6)
    for i in range(rollouts):
        if i:
            list(model.rollout_buffer.get(16))
            move(model)
        model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    return model.rollout_buffer


def move(model, by=0.1):
    """The policy after some training."""
    with torch.no_grad():
        for p in model.policy.parameters():
            p.add_(by * torch.randn_like(p))


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.policy.parameters()])


def assert_outputs_as_stored(model):
    """What the unmoved policy says of the rollout is what it said when it collected it; its mode is kept."""
    buffer = model.rollout_buffer
    rollout = buffer._refreshed()[0]
    model.policy.set_training_mode(True)
    values, log_probs = buffer._evaluate(model.policy, rollout)
    assert model.policy.training
    torch.testing.assert_close(log_probs, rollout.rows["log_probs"], rtol=0, atol=2e-6)
    torch.testing.assert_close(values, rollout.rows["values"], rtol=0, atol=2e-6)
