"""Time our SB3 rollout buffer against stock: computing returns, one pass of minibatches, and both as PPO does them.

    python benchmarks/sb3_buffer.py --out benchmarks/results/sb3_buffer.json
    python benchmarks/sb3_buffer.py --device cuda --out benchmarks/results/sb3_buffer_h200.json

Milliseconds, the median of the repeats; the two buffers hold the same data and take turns. On-policy: no refresh runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import report
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from tqdm import tqdm

from vtrace_plugins.sb3 import VTraceRolloutBuffer

SHAPES = ((128, 8), (2048, 8), (16, 4096), (128, 4096))
BATCH, EPOCHS = 64, 10
SECONDS = 6.0  # a measurement repeats until then, at least once


def filled(cls: type[RolloutBuffer], steps: int, envs: int, device: str) -> RolloutBuffer:
    buffer = cls(steps, spaces.Box(-1, 1, (4,)), spaces.Discrete(2), device=device, n_envs=envs, gae_lambda=0.95)
    fill(buffer)
    return buffer


def fill(buffer: RolloutBuffer) -> None:
    buffer.reset()
    shape = (buffer.buffer_size, buffer.n_envs)
    rng = np.random.default_rng(0)
    buffer.rewards[:], buffer.values[:] = rng.normal(size=(2, *shape))
    buffer.log_probs[:] = -1
    buffer.episode_starts[:] = rng.random(shape) < 0.02
    buffer.pos, buffer.full = buffer.buffer_size, True


def milliseconds(
    buffers: list[RolloutBuffer],
    function: Callable[[RolloutBuffer], object],
    prepare: Callable[[RolloutBuffer], object],
) -> list[float]:
    """Of ``function``, for each buffer; ``prepare`` is not timed."""
    times: list[list[float]] = [[] for _ in buffers]
    begin = time.perf_counter()
    while not times[0] or (len(times[0]) < 9 and time.perf_counter() - begin < SECONDS):
        for buffer, each in zip(buffers, times, strict=True):
            prepare(buffer)
            synchronize()
            start = time.perf_counter()
            function(buffer)
            synchronize()
            each.append(1e3 * (time.perf_counter() - start))
    return [round(statistics.median(each), 3) for each in times]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def one_pass(buffer: RolloutBuffer) -> None:
    for _ in buffer.get(BATCH):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    report.add_arguments(parser)
    args = parser.parse_args()

    rows = []
    print(f"{'steps x envs':>14}{'compute':>20}{f'get({BATCH})':>20}{f'compute, {EPOCHS} get':>24}   ms: stock, ours")
    for steps, envs in tqdm(SHAPES, disable=None):
        buffers = [filled(cls, steps, envs, args.device) for cls in (RolloutBuffer, VTraceRolloutBuffer)]
        buffers[1].refresh = "never"  # nothing is bound that could be refreshed
        last, dones = torch.randn(envs, device=args.device), np.zeros(envs, dtype=bool)

        def compute(buffer: RolloutBuffer) -> None:
            buffer.compute_returns_and_advantage(last, dones)  # noqa: B023

        def rollout(buffer: RolloutBuffer) -> None:
            compute(buffer)
            for _ in range(EPOCHS):
                one_pass(buffer)

        row = {
            "steps": steps,
            "envs": envs,
            "compute": milliseconds(buffers, compute, fill),
            "get": milliseconds(buffers, one_pass, lambda buffer: None),
            "rollout": milliseconds(buffers, rollout, fill),
        }
        rows.append(row)
        cells = [f"{row[name][0]:.3f}, {row[name][1]:.3f}" for name in ("compute", "get", "rollout")]
        tqdm.write(f"{f'{steps} x {envs}':>14}{cells[0]:>20}{cells[1]:>20}{cells[2]:>24}")
    what = {
        "what": f"milliseconds [stock, ours], median: compute_returns_and_advantage, one pass of get({BATCH}) on a "
        f"rollout that was read before, and a rollout from compute to the end of {EPOCHS} passes",
        "bytes a step": 4 * (4 + 4) + 8,  # observations, four floats and an action
    }
    report.write(args, what, args.device, ("torch", "numpy", "stable-baselines3"), rows)


if __name__ == "__main__":
    main()
