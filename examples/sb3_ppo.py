"""Stock PPO on CartPole-v1 with V-trace, by naming a buffer class and a callback (15 s on a CPU core).

python examples/sb3_ppo.py
python examples/sb3_ppo.py --replay 0     # the current rollout alone

Replay trains on the last rollouts as well, corrected for their age: more updates for the same steps in the environment.
"""

from __future__ import annotations

import argparse

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from vtrace_plugins.sb3 import VTraceCallback, VTraceRolloutBuffer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--replay", type=int, default=2, help="earlier rollouts to train on besides the current one")
    args = parser.parse_args()

    torch.set_num_threads(1)  # networks this small lose more to threads than they gain
    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=8, seed=0),
        n_steps=128,
        batch_size=256,
        gae_lambda=0.95,
        seed=0,
        device="cpu",
        rollout_buffer_class=VTraceRolloutBuffer,
        rollout_buffer_kwargs={"replay": args.replay},
    )
    model.learn(args.steps, callback=VTraceCallback(), progress_bar=True)

    diagnostics = {name: value for name, value in model.logger.name_to_value.items() if name.startswith("vtrace/")}
    print("\nlast pass:", ", ".join(f"{name} {value:.3g}" for name, value in diagnostics.items()))
    mean, deviation = evaluate_policy(model, make_vec_env("CartPole-v1", seed=1), n_eval_episodes=20)
    print(f"return of 20 episodes: {mean:.0f} +- {deviation:.0f} (500 is the most)")


if __name__ == "__main__":
    main()
