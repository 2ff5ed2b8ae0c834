"""Sweep the kernel's tiles over shapes and layouts: what ``choose_tile`` in ``_core/launch.py`` was made from.

    python benchmarks/tune.py --out benchmarks/results/tune.json

For every shape and layout: device microseconds by CUDA-graph replay for each (BLOCK_ROWS, BLOCK_TIME, warps), best
first, beside a copy of the same bytes and what ``choose_tile`` chooses. The kernels are compiled first, in parallel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from bench import candidates, device_microseconds, window
from tqdm import tqdm

from vtrace_plugins import vtrace
from vtrace_plugins._core import launch, ops

NT = ((64, 128), (4096, 128), (16384, 16), (65536, 32), (8, 2048), (256, 2048), (8192, 1024), (32768, 1024))
TN = ((64, 128), (4096, 128), (65536, 32), (512, 512), (1024, 2048), (8192, 1024), (32768, 1024))
SHAPES = [(*shape, False) for shape in NT] + [(*shape, True) for shape in TN]
Tile = tuple[int, int, int]


def tiles(envs: int, steps: int, time_major: bool) -> Iterator[Tile]:
    whole = max(8, triton.next_power_of_2(steps))
    rows = (8, 16, 32, 64) if time_major else (1, 2, 4, 8, 16, 32)
    times = {min(whole, size) for size in ((16, 32, 64, 128, 256, 512) if time_major else (512, 1024, 2048))}
    for block_rows, block_time, warps in itertools.product(rows, sorted(times), (1, 2, 4, 8, 16)):
        each_thread = block_rows * block_time / (32 * warps)
        if block_rows <= envs and 2 <= each_thread <= 16 and block_rows * block_time <= 8192:
            yield block_rows, block_time, warps


def with_tile(tile: Tile) -> None:
    launch.choose_tile = lambda *_: tile
    ops._launches.clear()


def compile_all(jobs: list[tuple[int, int, bool, Tile]]) -> None:
    for envs, steps, time_major, tile in jobs:
        with_tile(tile)
        envs = min(envs, 2048)  # the same code, as long as it divides by 16 alike
        vtrace(**window(envs, steps, time_major), gamma=0.99, time_dim=0 if time_major else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--commit", help="the commit that is measured, where this copy has no git history")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    args = parser.parse_args()

    jobs = [(*shape, tile) for shape in SHAPES for tile in tiles(*shape)]
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        list(pool.map(compile_all, [jobs[i :: args.workers] for i in range(args.workers)]))

    chosen = launch.choose_tile
    rows = []
    for envs, steps, time_major in tqdm(SHAPES, disable=None):
        ops._launches.clear()
        launch.choose_tile = chosen
        run = candidates(envs, steps, time_major)
        found = {"copy": device_microseconds(run["copy"]), "chosen": device_microseconds(run["triton"])}
        times = {}
        for tile in tiles(envs, steps, time_major):
            with_tile(tile)
            times[tile] = device_microseconds(run["triton"])
        best = sorted(times.items(), key=lambda item: item[1])
        found = {name: round(us, 2) for name, us in found.items()}
        rows.append({"envs": envs, "steps": steps, "layout": "[T,N]" if time_major else "[N,T]", **found})
        rows[-1]["tiles"] = [[*tile, round(us, 2)] for tile, us in best]
        print({key: x for key, x in rows[-1].items() if key != "tiles"}, rows[-1]["tiles"][:5], flush=True)

    if args.out:
        header = {
            "what": "device us, CUDA-graph replay; tiles are [BLOCK_ROWS, BLOCK_TIME, warps, us], best first",
            "bytes a step": 30,
            "device": torch.cuda.get_device_name(),
            "date": date.today().isoformat(),
            "commit": args.commit or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**header, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
