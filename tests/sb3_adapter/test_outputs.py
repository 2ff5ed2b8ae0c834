"""An unmoved policy says of a rollout what it said when it collected it, whatever it observes and does."""

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn
from worlds import A2C_, ALGORITHMS, BOX, MASKABLE, PPO_, RECURRENT, assert_outputs_as_stored, collect, envs

ACTIONS = [
    spaces.Discrete(3),
    spaces.Box(-1, 1, (2,)),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(3),
]
OBSERVATIONS = {
    "Box": BOX,
    "Box64": spaces.Box(-1, 1, (3,), dtype=np.float64),
    "uint16": spaces.Box(0, 5, (3,), dtype=np.uint16),
    "Discrete": spaces.Discrete(5),
    "MultiDiscrete": spaces.MultiDiscrete([4, 3]),
    "MultiBinary": spaces.MultiBinary(4),
    "image": spaces.Box(0, 255, (36, 36, 1), dtype=np.uint8),
    "Dict": spaces.Dict(
        {"image": spaces.Box(0, 255, (36, 36, 3), dtype=np.uint8), "kind": spaces.Discrete(3), "x": BOX}
    ),
}


def assert_as_stored(model):
    buffer = collect(model)
    assert_outputs_as_stored(model)
    assert buffer._rollout.log_ratio is None


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("space", ACTIONS, ids=lambda s: type(s).__name__)
def test_every_action_space(algorithm, space):
    if algorithm is MASKABLE and isinstance(space, spaces.Box):
        pytest.skip("MaskablePPO has no continuous actions")
    assert_as_stored(algorithm.make(envs(action_space=space, limit=4)))


@pytest.mark.parametrize("algorithm", [PPO_, MASKABLE, RECURRENT], ids=str)
@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_every_observation(algorithm, kind):
    if algorithm is RECURRENT and kind == "MultiDiscrete":
        pytest.skip("upstream cannot build its LSTM: the size is a NumPy integer")
    env = envs(observation_space=OBSERVATIONS[kind], limit=4)
    if kind == "image":
        algorithm = type(algorithm)(
            algorithm.ours, algorithm.stock, algorithm.policy.replace("Mlp", "Cnn"), algorithm.kwargs
        )
    model = algorithm.make(env)
    assert_as_stored(model)
    model.train()


@pytest.mark.parametrize("algorithm", [PPO_, A2C_, RECURRENT], ids=str)
@pytest.mark.parametrize("squash", [False, True], ids=["plain", "squashed"])
def test_state_dependent_exploration(algorithm, squash):
    policy = algorithm.kwargs.get("policy_kwargs", {}) | {"squash_output": squash}
    assert_as_stored(algorithm.make(envs(action_space=spaces.Box(-1, 1, (2,))), use_sde=True, policy_kwargs=policy))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_normalised_observations(algorithm):
    assert_as_stored(algorithm.make(VecNormalize(envs(limit=4))))


class Noisy(BaseFeaturesExtractor):
    """Differs between training and evaluation."""

    def __init__(self, space):
        super().__init__(space, 8)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_dropout_and_batch_norm(algorithm):
    policy = algorithm.kwargs.get("policy_kwargs", {}) | {"features_extractor_class": Noisy}
    assert_as_stored(algorithm.make(envs(), policy_kwargs=policy))
