"""Time whole ``learn()`` calls: stock, ours without a refresh, ours by default, ours replaying one rollout.

    python benchmarks/sb3_learn.py --out benchmarks/results/sb3_learn.json

Seconds, the median of the repeats, which take turns; CartPole-v1, 8 environments, one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time

import report
import torch
from sb3_contrib import TRPO, RecurrentPPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env
from tqdm import tqdm

from vtrace_plugins.sb3 import VTraceA2C, VTracePPO
from vtrace_plugins.sb3_contrib import VTraceRecurrentPPO, VTraceTRPO

REPEATS = 5
MODELS = {
    "PPO, 128 x 8, batch 256": (PPO, VTracePPO, "MlpPolicy", {"n_steps": 128, "batch_size": 256}, 8192),
    "PPO, 128 x 8, batch 64": (PPO, VTracePPO, "MlpPolicy", {"n_steps": 128, "batch_size": 64}, 4096),
    "A2C, 5 x 8": (A2C, VTraceA2C, "MlpPolicy", {"n_steps": 5}, 8000),
    "TRPO, 128 x 8": (TRPO, VTraceTRPO, "MlpPolicy", {"n_steps": 128, "batch_size": 256}, 8192),
    "RecurrentPPO, 128 x 8": (
        RecurrentPPO,
        VTraceRecurrentPPO,
        "MlpLstmPolicy",
        {"n_steps": 128, "batch_size": 256},
        2048,
    ),
}
VARIANTS = {"stock": None, "never": {"refresh": "never"}, "default": {}, "replay=1": {"replay": 1}}


def seconds(name: str, options: dict[str, object] | None) -> float:
    stock, ours, policy, size, steps = MODELS[name]
    env = make_vec_env("CartPole-v1", n_envs=8, seed=0)
    extra = {} if options is None else {"rollout_buffer_kwargs": options}
    model = (stock if options is None else ours)(policy, env, seed=0, device="cpu", **size, **extra)
    start = time.perf_counter()
    model.learn(steps)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(parser)
    args = parser.parse_args()

    torch.set_num_threads(1)
    rows = []
    print(f"{'':<26}" + "".join(f"{name:>12}" for name in VARIANTS) + "   seconds")
    for name in tqdm(MODELS, disable=None):
        times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(REPEATS):
            for variant, options in VARIANTS.items():
                times[variant].append(seconds(name, options))
        row = {variant: round(statistics.median(each), 3) for variant, each in times.items()}
        rows.append({"model": name} | row)
        tqdm.write(f"{name:<26}" + "".join(f"{x:>12.2f}" for x in row.values()))
    what = {"what": f"seconds of learn(), median of {REPEATS}, CartPole-v1"}
    report.write(args, what, "cpu", ("torch", "stable-baselines3", "sb3-contrib"), rows)


if __name__ == "__main__":
    main()
