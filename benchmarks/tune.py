"""Sweep the kernels' plans over shapes and layouts: what ``choose`` in ``_core/launch.py`` was made from.

    python benchmarks/tune.py --out benchmarks/results/tune.json

For every shape and layout: device microseconds by CUDA-graph replay for each plan (the fields of ``launch.Plan``), best
first, beside a copy of the same bytes and what ``choose`` chooses. The kernels are compiled first, in parallel.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context

import report
import triton
from bench import BYTES_A_STEP, candidates, device_microseconds, window
from triton.runtime.errors import OutOfResources

from vtrace_plugins import vtrace
from vtrace_plugins._core import launch, ops
from vtrace_plugins._core.kernels import AS_NEEDED, AT_ONCE, IN_ORDER

NT = (
    *((64, 5), (64, 16), (64, 32), (512, 5), (512, 32), (4096, 16), (1, 512)),  # where nothing hides a wait
    *((64, 128), (4096, 128), (16384, 16), (65536, 32), (8, 2048), (256, 2048), (8192, 1024), (32768, 1024)),
    *((8, 16384), (64, 16384), (4, 65536), (16, 131072), (1, 1048576)),
)
TN = (
    (64, 5),
    (64, 32),
    (4096, 5),
    (64, 512),
    (512, 2048),
    (64, 128),
    (4096, 128),
    (65536, 32),
    (512, 512),
    (64, 2048),
    (8, 16384),
    (64, 16384),
    (1024, 2048),
    (8192, 1024),
    (32768, 1024),
)
LOADS = {AS_NEEDED: "as needed", IN_ORDER: "in order", AT_ONCE: "at once"}
SMALL = 2**20  # steps: above, the order of the loads is the compiler's
SHAPES = [(*shape, False) for shape in NT] + [(*shape, True) for shape in TN]


def plans(envs: int, steps: int, time_major: bool) -> Iterator[launch.Plan]:
    """Tiles that give a thread 4, 8 or 16 steps, whole or streamed, and in chunks where there are few programs else.

    Whole windows in one tile, if they are small, in every order of loads; the shortest with a step a thread as well.
    Chunks in two launches, and in one that looks back.
    """
    whole = max(8, triton.next_power_of_2(steps))
    if time_major:
        tiles = itertools.product((8, 16, 32), [x for x in (8, 16, 32, 64, 128) if x <= whole], (4, 8, 16))
    elif steps <= 2048:
        tiles = itertools.product((1, 2, 4, 8, 16, 32), (whole,), (4, 8))
    else:
        tiles = itertools.product((1,), (512, 1024, 2048), (4, 8))
    for block_rows, block_time, each in tiles:
        warps = block_rows * block_time // (32 * each)
        if block_rows > max(8, envs) or not 1 <= warps <= 16:
            continue
        count = triton.cdiv(steps, block_time)
        most = 1024 // block_rows  # a program holds block_rows * chunks maps as it enters its chunk
        for chunks in (1, 16, 32, 64, 128, 256, 512, 1024):
            programs = triton.cdiv(envs, block_rows) * chunks
            if chunks > 1 and (chunks > min(count, most) or not 128 <= programs <= 2300):
                continue
            if chunks > 1 and time_major and (block_time < 16 or block_rows > 16):  # more chunks, fewer programs
                continue
            if chunks == 1 and programs < 64 and count > 4:  # most multiprocessors would have none
                continue
            chunk_tiles = triton.cdiv(count, chunks)
            for stages in (1, 2, 3) if chunks == 1 else (1, 2):
                if stages > chunk_tiles or (stages == 1 and chunk_tiles > 16):
                    continue
                in_flight = chunks == chunk_tiles == 1 and envs * steps <= SMALL
                for loads in LOADS if in_flight else (AS_NEEDED,):
                    plan = launch.Plan(block_rows, block_time, warps, chunk_tiles, stages, loads)
                    yield plan
                    if 1 < chunks <= 32 * warps and chunk_tiles == 1 and not time_major:
                        yield plan._replace(look_back=True)
    if not time_major and steps <= 128:
        for block_rows, warps in itertools.product((1, 2, 4, 8), (1, 2, 4)):
            if 32 * warps <= block_rows * whole <= 128 * warps:
                yield launch.Plan(block_rows, whole, warps, 1, loads=AT_ONCE, run=1)


def described(plan: launch.Plan) -> str:
    loads = f", loads {LOADS[plan.loads]}" if plan.loads != AS_NEEDED else ""
    run = ", a step a thread" if plan.run == 1 else ""
    tile = f"{plan.block_rows} x {plan.block_time}, warps {plan.warps}"
    look_back = ", look back" if plan.look_back else ""
    return f"{tile}, tiles {plan.chunk_tiles}, stages {plan.stages}{loads}{run}{look_back}"


def use(plan: launch.Plan) -> None:
    launch.choose = lambda *_: plan
    ops._launches.clear()


def compiled(envs: int, steps: int, time_major: bool, plan: launch.Plan) -> None:
    use(plan)
    with suppress(OutOfResources):
        vtrace(**window(min(envs, 2048), steps, time_major), gamma=0.99, time_dim=0 if time_major else 1)


def specialised(n: int) -> str:
    """What triton compiles an integer argument apart for."""
    return "1" if n == 1 else "16" if n % 16 == 0 else "any"


def code(envs: int, steps: int, time_major: bool, plan: launch.Plan) -> tuple[object, ...]:
    """The same for jobs that share their compiled kernels."""
    chunks = triton.cdiv(triton.cdiv(steps, plan.block_time), plan.chunk_tiles)
    integers = (envs, steps, plan.chunk_tiles, chunks)
    block_chunks = max(8, triton.next_power_of_2(chunks))
    return time_major, described(plan._replace(chunk_tiles=0)), block_chunks, *map(specialised, integers)


def steps_a_thread(plan: launch.Plan) -> float:
    return plan.block_rows * plan.block_time / plan.warps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(parser)
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    args = parser.parse_args()

    jobs = {code(*shape, plan): (*shape, plan) for shape in SHAPES for plan in plans(*shape)}
    slowest_first = sorted(jobs.values(), key=lambda job: -steps_a_thread(job[3]))
    began = time.perf_counter()
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        list(pool.map(compiled, *zip(*slowest_first, strict=True)))
    print(f"compiled {len(jobs)} variants in {time.perf_counter() - began:.0f} s", flush=True)

    what = "device us by graph replay; plans are 'rows x steps of a tile, ...': us, best first"
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
            with suppress(OutOfResources):  # too much shared memory
                times[plan] = device_microseconds(run["triton"])
        best = sorted(times.items(), key=lambda item: item[1])
        found = {name: round(us, 2) for name, us in found.items()}
        rows.append({"envs": envs, "steps": steps, "layout": "[T,N]" if time_major else "[N,T]", **found})
        rows[-1]["plans"] = {described(plan): round(us, 2) for plan, us in best}
        head = f"{envs} x {steps} {rows[-1]['layout']} copy {found['copy']} chosen {found['chosen']}"
        print(head, *list(rows[-1]["plans"].items())[:5], flush=True)
        report.write(args, {"what": what, "bytes a step": BYTES_A_STEP[True]}, "cuda", ("torch", "triton"), rows)


if __name__ == "__main__":
    main()
