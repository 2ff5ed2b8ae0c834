"""Sweep the kernels' plans over shapes and layouts: what ``choose`` in ``_core/launch.py`` was made from.

    python benchmarks/tune.py --out benchmarks/results/tune.json

For every shape and layout: device microseconds by CUDA-graph replay for each plan (kernel, BLOCK_ROWS, BLOCK_TIME,
warps, tiles a chunk), best first, beside a copy of the same bytes and what ``choose`` chooses. The kernels are compiled
first, in parallel.
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

from vtrace_plugins import vtrace
from vtrace_plugins._core import launch, ops

NT = (
    *((64, 128), (4096, 128), (16384, 16), (65536, 32), (8, 2048), (256, 2048), (8192, 1024), (32768, 1024)),
    *((64, 16384), (4, 65536), (16, 131072), (1, 1048576)),
)
TN = (
    *((64, 128), (512, 128), (4096, 128), (65536, 32), (512, 512), (64, 2048), (1024, 2048)),
    *((8192, 1024), (32768, 1024), (64, 16384)),
)
SHAPES = [(*shape, False) for shape in NT] + [(*shape, True) for shape in TN]


def plans(envs: int, steps: int, time_major: bool) -> Iterator[launch.Plan]:
    """Tiles of 2 to 16 steps a thread, lanes of one or two rows a thread; as many programs as can be of use."""
    whole = max(8, triton.next_power_of_2(steps))
    found = []
    if time_major:
        for block_rows, block_time, warps in itertools.product(
            (8, 16), {min(whole, x) for x in (128, 256)}, (4, 8, 16)
        ):
            found.append(("tiles", block_rows, block_time, warps))
        for (block_rows, warps), block_time in itertools.product(((32, 1), (64, 1), (64, 2)), (4, 8)):
            found.append(("lanes", block_rows, block_time, warps))
    elif steps <= 2048:
        for block_rows, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16)):
            found.append(("tiles", block_rows, whole, warps))
    else:
        found += [("tiles", 1, size, warps) for size, warps in ((1024, 4), (1024, 8), (2048, 8), (2048, 16))]
    for kernel, block_rows, block_time, warps in found:
        each_thread = block_rows * block_time / (32 * warps)
        if block_rows > max(32, envs) or (kernel == "tiles" and not 2 <= each_thread <= 16):
            continue
        tiles = triton.cdiv(steps, block_time)
        most = 1024 if block_rows == 1 else 32  # a program holds block_rows * chunks maps as it enters its chunk
        for chunks in (1, 2, 4, 8, 16, 32, 64, 128, 512, 1024):
            programs = triton.cdiv(envs, block_rows) * chunks
            if chunks == 1 or (chunks <= min(tiles, most) and 64 <= programs <= 4096):
                yield launch.Plan(kernel, block_rows, block_time, warps, triton.cdiv(tiles, chunks))


def use(plan: launch.Plan) -> None:
    launch.choose = lambda *_: plan
    ops._launches.clear()


def compile_all(jobs: list[tuple[int, int, bool, launch.Plan]]) -> None:
    for envs, steps, time_major, plan in jobs:
        use(plan)
        vtrace(**window(min(envs, 2048), steps, time_major), gamma=0.99, time_dim=0 if time_major else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--commit", help="the commit that is measured, where this copy has no git history")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    args = parser.parse_args()

    jobs = {}  # one for each variant of the code
    for shape in SHAPES:
        for plan in plans(*shape):
            chunked = shape[1] > plan.block_time * plan.chunk_tiles
            jobs[shape[2], plan[:4], plan.chunk_tiles == 1, chunked] = (*shape, plan)
    listed = list(jobs.values())
    print(f"compiling {len(listed)} variants", flush=True)
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        list(pool.map(compile_all, [listed[i :: args.workers] for i in range(args.workers)]))

    chosen = launch.choose
    rows = []
    for envs, steps, time_major in SHAPES:
        ops._launches.clear()
        launch.choose = chosen
        run = candidates(envs, steps, time_major)
        found = {"copy": device_microseconds(run["copy"]), "chosen": device_microseconds(run["triton"])}
        times = {}
        for plan in plans(envs, steps, time_major):
            use(plan)
            times[plan] = device_microseconds(run["triton"])
        best = sorted(times.items(), key=lambda item: item[1])
        found = {name: round(us, 2) for name, us in found.items()}
        rows.append({"envs": envs, "steps": steps, "layout": "[T,N]" if time_major else "[N,T]", **found})
        rows[-1]["plans"] = [[*plan, round(us, 2)] for plan, us in best]
        head = f"{envs} x {steps} {rows[-1]['layout']} copy {found['copy']} chosen {found['chosen']}"
        print(head, *rows[-1]["plans"][:5], flush=True)

    if args.out:
        header = {
            "what": "device us by graph replay; plans are [kernel, BLOCK_ROWS, BLOCK_TIME, warps, tiles a chunk, us]",
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
