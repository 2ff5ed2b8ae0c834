"""Time our SB3 rollout buffer against stock on the CPU: computing returns, and one pass of minibatches.

    python benchmarks/sb3_buffer.py --out benchmarks/results/sb3_buffer.json

Milliseconds, the median of the repeats; the two buffers hold the same data and take turns. On-policy: no refresh runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from vtrace_plugins.sb3 import VTraceRolloutBuffer

SHAPES = ((128, 8), (2048, 8), (16, 4096), (128, 4096))
BATCH = 64
REPEATS = 9


def filled(cls: type[RolloutBuffer], steps: int, envs: int) -> RolloutBuffer:
    buffer = cls(steps, spaces.Box(-1, 1, (4,)), spaces.Discrete(2), device="cpu", n_envs=envs, gae_lambda=0.95)
    rng = np.random.default_rng(0)
    buffer.rewards[:], buffer.values[:] = rng.normal(size=(2, steps, envs))
    buffer.log_probs[:] = -1
    buffer.episode_starts[:] = rng.random((steps, envs)) < 0.02
    buffer.pos, buffer.full = steps, True
    return buffer


def milliseconds(functions: list[Callable[[], object]]) -> list[float]:
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(REPEATS):
        for function, each in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            each.append(1e3 * (time.perf_counter() - start))
    return [round(statistics.median(each), 3) for each in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()

    rows = []
    print(f"{'steps x envs':>14}{'compute: stock':>16}{'ours':>10}{'get(64): stock':>16}{'ours':>10}   milliseconds")
    for steps, envs in SHAPES:
        stock, ours = filled(RolloutBuffer, steps, envs), filled(VTraceRolloutBuffer, steps, envs)
        last, dones = torch.randn(envs), np.zeros(envs, dtype=bool)
        compute = milliseconds([partial(b.compute_returns_and_advantage, last, dones) for b in (stock, ours)])
        ours.refresh = "never"  # the pass itself; nothing is bound that could be refreshed
        get = milliseconds([lambda b=b: [None for _ in b.get(BATCH)] for b in (stock, ours)])
        rows.append({"steps": steps, "envs": envs, "compute": compute, "get": get})
        print(f"{f'{steps} x {envs}':>14}{compute[0]:>16}{compute[1]:>10}{get[0]:>16}{get[1]:>10}")
    if args.out:
        header = {
            "what": f"milliseconds [stock, ours], median of {REPEATS}: compute_returns_and_advantage, get({BATCH})",
            "device": f"CPU, {torch.get_num_threads()} threads",
            "date": date.today().isoformat(),
            "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "numpy", "stable-baselines3")},
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**header, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
