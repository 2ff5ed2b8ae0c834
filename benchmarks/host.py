"""Time the host's part of a call: ``vtrace`` against triton's own launch of the same kernel with the same arguments.

    python benchmarks/host.py --out benchmarks/results/host.json

Microseconds until Python has the call behind it, the GPU not waited for; the median of many, the candidates taking
turns, since hosts have slow spells. ``launch`` is ``kernel[grid](...)`` as triton's users write it, with nothing
validated or allocated; a window cut into many chunks takes two.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import report
import torch
from bench import window
from torch import Tensor

from vtrace_plugins import vtrace
from vtrace_plugins._core import launch, ops

SHAPES = ((64, 128, False), (64, 128, True), (8, 16384, False), (8, 131072, False))
TURNS, EACH = 30, 100


def launches(data: dict[str, Tensor], time_dim: int) -> Callable[[], None]:
    """What ``vtrace`` launches for the data, as triton's own launches."""
    recorded: list[tuple[Any, ...]] = []
    kernel = launch.vtrace_kernel

    class Recorder:
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
            def run(*args: Any, **options: Any) -> Any:
                recorded.append((kernel[grid], args, options))
                return kernel[grid](*args, **options)

            return run

    launch.vtrace_kernel = Recorder()
    ops._launches.clear()
    vtrace(**data, gamma=0.99, time_dim=time_dim)
    launch.vtrace_kernel = kernel
    ops._launches.clear()

    def again() -> None:
        for run, args, options in recorded:
            run(*args, **options)

    return again


def two_alike(t: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(t), torch.empty_like(t)


def microseconds(function: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(EACH):
        start = time.perf_counter()
        function()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(parser)
    args = parser.parse_args()

    rows = []
    for envs, steps, time_major in SHAPES:
        data = window(envs, steps, time_major)
        time_dim = 0 if time_major else 1
        trained = data | {"values": data["values"].clone().requires_grad_()}
        tensors = {name: torch.tensor(x, device="cuda") for name, x in {"gamma": 0.99, "rho_bar": 1.0}.items()}
        number = partial(vtrace, gamma=0.99, time_dim=time_dim)
        functions: dict[str, Callable[[], object]] = {
            "launch": launches(data, time_dim),
            "vtrace": partial(number, **data),
            "vtrace, gamma and rho_bar as tensors": partial(vtrace, **data, **tensors, time_dim=time_dim),
            "vtrace, a gradient asked for": partial(number, **trained),
            "two empty_like": partial(two_alike, data["values"]),
        }
        times: dict[str, list[float]] = {name: [] for name in functions}
        for turn in range(TURNS + 1):
            for name, function in functions.items():
                found = microseconds(function)
                if turn:  # the first one compiles
                    times[name] += found
        row = {"envs": envs, "steps": steps, "layout": "[T,N]" if time_major else "[N,T]"}
        rows.append(row | {name: round(statistics.median(x), 1) for name, x in times.items()})
        print(rows[-1], flush=True)
    what = {"what": f"microseconds of the host, median of {TURNS * EACH} calls"}
    report.write(args, what, "cuda", ("torch", "triton"), rows)


if __name__ == "__main__":
    main()
