"""sb3-contrib's on-policy algorithms with V-trace: one of them, or all (about a minute and a half on one CPU core).

python examples/sb3_contrib.py
python examples/sb3_contrib.py maskable
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]  # or this file would be what "import sb3_contrib" finds

import torch
from gymnasium.wrappers import TransformObservation
from sb3_contrib.common.envs import InvalidActionEnvDiscrete
from sb3_contrib.common.maskable.evaluation import evaluate_policy as evaluate_masked
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv

from vtrace_plugins.sb3_contrib import VTraceMaskablePPO, VTraceRecurrentPPO, VTraceTRPO

OPTIONS = {"seed": 1, "device": "cpu"}


def trpo() -> tuple[BaseAlgorithm, int, VecEnv]:
    """CartPole-v1."""
    env = make_vec_env("CartPole-v1", n_envs=8, seed=0)
    return VTraceTRPO("MlpPolicy", env, n_steps=256, batch_size=256, **OPTIONS), 40_000, env


def maskable() -> tuple[BaseAlgorithm, int, VecEnv]:
    """An environment of 80 actions of which 60 are invalid at each step."""
    env = make_vec_env(InvalidActionEnvDiscrete, n_envs=4, seed=0, env_kwargs={"dim": 80, "n_invalid_actions": 60})
    return VTraceMaskablePPO("MlpPolicy", env, n_steps=64, batch_size=64, gamma=0.4, **OPTIONS), 12_000, env


def recurrent() -> tuple[BaseAlgorithm, int, VecEnv]:
    """CartPole-v1 with the velocities hidden."""

    def hidden(env):
        return TransformObservation(env, lambda x: x * [1, 0, 1, 0], env.observation_space)

    env = make_vec_env("CartPole-v1", n_envs=8, seed=0, wrapper_class=hidden)
    policy = {"lstm_hidden_size": 32, "enable_critic_lstm": True}
    sizes = {"n_steps": 128, "batch_size": 256, "learning_rate": 1e-3}
    return VTraceRecurrentPPO("MlpLstmPolicy", env, policy_kwargs=policy, **sizes, **OPTIONS), 40_000, env


def main() -> None:
    algorithms = {make.__name__: make for make in (trpo, maskable, recurrent)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", nargs="?", choices=algorithms, help="all of them if left out")
    parser.add_argument("--steps", type=int, help="instead of each one's own number")
    args = parser.parse_args()

    torch.set_num_threads(1)
    for name in [args.algorithm] if args.algorithm else algorithms:
        model, steps, env = algorithms[name]()
        evaluate = evaluate_masked if name == "maskable" else evaluate_policy
        before, _ = evaluate(model, env, n_eval_episodes=20)
        model.learn(args.steps or steps, progress_bar=True)
        after, _ = evaluate(model, env, n_eval_episodes=20)
        print(f"\n{name}: mean return {before:.0f} before training, {after:.0f} after", flush=True)


if __name__ == "__main__":
    main()
