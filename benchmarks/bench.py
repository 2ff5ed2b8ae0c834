"""Time ``vtrace`` itself against its rivals: device time, and the whole eager call, beside a copy of the same bytes.

    python benchmarks/bench.py --out benchmarks/results/vtrace.json
    python benchmarks/plot.py benchmarks/results/vtrace.json docs/speed.png

Device time is that of one call among the several in a captured CUDA graph, the median over replays; inputs that fit in
the L2 cache stay there, the GPU is busy beforehand, and up to 8 million steps the candidates' graphs take turns, as its
clocks rise and fall. JAX's cannot be captured: it is the sum of its kernels' durations by the profiler, gaps not
counted, and ours by the same measure stands as kernel_us; processes of their own take them last, since a profiler once
used slows every later launch. A call is wall-clock from Python to Python, back to back (one goes ahead untimed: after
another candidate's turn its code is not in the CPU's caches), the GPU waited for after the last; the candidates take
turns, so that a slow spell of the host hits all of them. Several GPUs share the sizes. Where time is short, --seconds
ends a run and --resume goes on with it.

``copy`` moves as many bytes as the kernel must: five float32 inputs and two flags read, two float32 results written, so
30 bytes a step; without truncation one input and a flag less, 25. A rival that is not installed, cannot do a case or
runs out of memory has no figure there. All that compiles is compiled first, in parallel.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

import report
import torch
from rivals import jax_rivals, torch_rivals
from torch import Tensor
from tqdm import tqdm

from vtrace_plugins import vtrace

NT = (
    *((64, 128), (8, 2048), (4096, 128), (256, 2048), (16384, 16), (65536, 32), (8192, 1024), (32768, 1024)),
    *((4, 65536), (16, 131072), (1, 1048576)),
)
TN = ((64, 128), (64, 2048), (512, 512), (1024, 2048), (4096, 128), (65536, 32), (8192, 1024), (32768, 1024))
GRID = [(envs, steps) for envs in (1, 8, 64, 512, 4096, 32768) for steps in (5, 16, 32, 128, 512, 2048, 16384)]
BYTES_A_STEP = {True: 5 * 4 + 2 + 2 * 4, False: 4 * 4 + 1 + 2 * 4}  # with and without truncation
LONGEST_PROFILED = 128  # a scan of JAX is some kernels a step
GRAPHED = 10  # calls in a graph
TURNS = 21  # of quick calls
TOGETHER = 2**23  # steps: the graphs of all candidates for so many are in memory at once
CALLS = ("torchrl", "torch")  # their many small kernels are not worth a graph


def window(envs: int, steps: int, time_major: bool, truncation: bool = True) -> dict[str, Tensor]:
    shape = (steps, envs) if time_major else (envs, steps)
    normal = lambda: torch.randn(shape, device="cuda")  # noqa: E731
    log_mu = normal() - 1
    data = {
        "log_pi": log_mu + 0.3 * normal(),
        "log_mu": log_mu,
        "values": normal(),
        "rewards": normal(),
        "terminated": torch.rand(shape, device="cuda") < 0.01,
    }
    if truncation:
        data["truncated"] = (torch.rand(shape, device="cuda") < 0.01) & ~data["terminated"]
        return data | {"bootstrap_values": normal()}
    return data | {"last_value": torch.randn(envs, device="cuda")}


def candidates(
    envs: int, steps: int, time_major: bool, truncation: bool = True, rivals: bool = False
) -> dict[str, Callable[[], object]]:
    data = window(envs, steps, time_major, truncation)
    time_dim = 0 if time_major else 1
    source = torch.empty(envs * steps * BYTES_A_STEP[truncation] // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    found: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "triton": lambda: vtrace(**data, gamma=0.99, time_dim=time_dim, backend="triton"),
        "torch": lambda: vtrace(**data, gamma=0.99, time_dim=time_dim, backend="torch"),
    }
    if rivals:
        found |= dict(torch_rivals(data, time_dim))
        with suppress(ImportError):
            found |= dict(jax_rivals(data, time_dim))
    return found


def milliseconds_between(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def captured(function: Callable[[], object]) -> tuple[Callable[[], None], int]:
    """The replay of a CUDA graph of some calls, and how many they are."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    calls = 1 if milliseconds_between(function) > 1 else GRAPHED
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return graph.replay, calls


def in_turns(graphs: dict[str, tuple[Callable[[], None], int]]) -> dict[str, float]:
    """Device microseconds of a call in each: the median over replays, of all in turn, as clocks rise and fall."""
    began = time.perf_counter()
    while time.perf_counter() - began < 0.01:  # an idle GPU is slower at first
        for replay, _ in graphs.values():
            milliseconds_between(replay)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(30):
        for name, (replay, calls) in graphs.items():
            if calls > 1 or turn < 5:
                times[name].append(1e3 * milliseconds_between(replay) / calls)
    return {name: statistics.median(each) for name, each in times.items()}


def device_microseconds(function: Callable[[], object]) -> float:
    return in_turns({"": captured(function)})[""]


def is_jax(name: str) -> bool:
    return name.startswith("jax") or name == "rlax"


def kernel_microseconds(function: Callable[[], object]) -> float | None:
    calls = 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.time_range.elapsed_us() for e in on_device) / calls or None


def wall_microseconds(function: Callable[[], object], calls: int) -> float:
    if calls > 1:
        function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        result = function()
    if isinstance(result, tuple) and hasattr(result[0], "block_until_ready"):
        [x.block_until_ready() for x in result]
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / calls


def measure(functions: dict[str, Callable[[], object]], together: bool) -> dict[str, dict[str, float | str | None]]:
    """Figures of each; a failure (out of memory, a case that the rival does not take) is one too.

    ``together``: graphs of all of them fit into memory, and take turns.
    """
    found: dict[str, dict[str, float | str | None]] = {}
    turns = {}
    graphs: dict[str, tuple[Callable[[], None], int]] = {}
    device: dict[str, float] = {}
    for name, function in functions.items():
        try:
            wall_microseconds(function, 1)
            once = wall_microseconds(function, 1)
            turns[name] = TURNS if once < 2e3 else 3 if once < 5e4 else 1
            if name not in CALLS and not is_jax(name):
                graphs[name] = captured(function)
        except Exception as error:
            turns.pop(name, None)
            found[name] = {"call_us": None, "device_us": None, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        else:
            found[name] = {"call_us": None, "device_us": None}
        if graphs and not together:
            device |= in_turns(graphs)
            graphs.clear()
    if graphs:
        device |= in_turns(graphs)
        graphs.clear()
    times: dict[str, list[float]] = {name: [] for name in turns}
    for turn in range(TURNS):
        for name, most in turns.items():
            if turn < most:
                times[name].append(wall_microseconds(functions[name], 10 if most == TURNS else 1))
    for name, each in times.items():
        call = found[name]["call_us"] = round(statistics.median(each), 1)
        if name in device:  # a copy of gigabytes was seen to take longer in a graph than without
            found[name]["device_us"] = min(round(device[name], 2), call)
    return found


def use_jax_cache() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with suppress(ImportError):
        import jax

        jax.config.update("jax_compilation_cache_dir", os.path.join(tempfile.gettempdir(), "jax_cache"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compile_all(cases: list[tuple[int, int, bool, bool]]) -> None:
    """Into the caches on disk."""
    use_jax_cache()
    for envs, steps, time_major, truncation in cases:
        time_dim = 0 if time_major else 1
        data = window(envs, steps, time_major, truncation)
        vtrace(**data, gamma=0.99, time_dim=time_dim)
        for name, call in torch_rivals(data, time_dim):
            with suppress(Exception):
                if "compiled" in name or "associative" in name:
                    call()
        with suppress(Exception):
            for _, call in jax_rivals(data, time_dim, compile_only=True):
                call()
        del data
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(parser)
    parser.add_argument("--no-rivals", action="store_true", help="the copy and this package's backends only")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no new size after so long")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has, and add what is missing")
    args = parser.parse_args()
    torch.manual_seed(0)
    began = time.perf_counter()

    targets = [(*s, False, True, False) for s in NT] + [(*s, True, True, False) for s in TN]
    grid = [(*s, tm, tr, True) for tm, tr in ((False, True), (False, False), (True, True)) for s in GRID]
    cases = targets if args.no_rivals else targets + grid
    found: dict[int, dict[str, Any]] = {}
    if args.resume and args.out.exists():
        found = {cases.index(case_of(row)): row for row in json.loads(args.out.read_text())["rows"]}
    missing = [i for i in range(len(cases)) if i not in found]
    if not args.no_rivals:
        use_jax_cache()
        todo = sorted((cases[i][:4] for i in missing if cases[i] in grid), key=lambda case: -case[0] * case[1])
        with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
            list(pool.map(compile_all, [todo[i :: args.workers] for i in range(args.workers)]))
        print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)

    what = {
        "what": "microseconds: device_us of a call on the device, call_us of a whole eager call; medians",
        "devices": torch.cuda.device_count(),
    }

    def write() -> list[dict[str, Any]]:
        rows = [found[k] for k in sorted(found)]
        report.write(args, what, "cuda", ("torch", "triton", "torchrl", "jax", "rlax", "rl-triton"), rows)
        return rows

    left = args.seconds - (time.perf_counter() - began)
    for i, row in on_every_gpu(measured, [cases[i] for i in missing], left):
        found[missing[i]] = row
        write()
    with_jax = [i for i, row in found.items() if any(map(is_jax, row)) and "kernel_us" not in row["triton"]]
    if with_jax:
        for i, durations in on_every_gpu(profiled, [cases[i] for i in with_jax]):
            row = found[with_jax[i]]
            row["triton"]["kernel_us"] = durations.pop("triton", None)
            for name, us in durations.items():
                row[name]["device_us"] = us
            write()

    rows = write()
    for row in (row for row in rows if not row["rivals"]):
        ours, copy = (row[name]["device_us"] for name in ("triton", "copy"))
        shape = f"{row['envs']} x {row['steps']} {row['layout']}"
        print(f"{shape:>24} {ours:>9} us = {ours / copy:.2f} x copy; call {row['triton']['call_us']} us")
    report_losses([row for row in rows if row["rivals"]])


def use_gpu(gpus: Any) -> None:
    """This process sees one GPU only, the next of the queue."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpus.get())
    use_jax_cache()
    torch.manual_seed(0)


def case_of(row: dict[str, Any]) -> tuple[int, int, bool, bool, bool]:
    return row["envs"], row["steps"], row["layout"] == "[T,N]", row["truncation"], row["rivals"]


def measured(case: tuple[int, int, bool, bool, bool]) -> dict[str, object]:
    envs, steps, time_major, truncation, rivals = case
    row: dict[str, object] = {"envs": envs, "steps": steps, "layout": "[T,N]" if time_major else "[N,T]"}
    row |= {"truncation": truncation, "rivals": rivals, "bytes": envs * steps * BYTES_A_STEP[truncation]}
    row |= measure(candidates(envs, steps, time_major, truncation, rivals), envs * steps <= TOGETHER)
    torch.cuda.empty_cache()
    return row


def profiled(case: tuple[int, int, bool, bool, bool]) -> dict[str, float]:
    """The kernels' durations of what uses JAX, and of this package's beside."""
    found = {}
    for name, function in candidates(*case).items():
        if name == "triton" or (is_jax(name) and (case[1] <= LONGEST_PROFILED or "associative" in name)):
            with suppress(Exception):
                function()
                found[name] = round(kernel_microseconds(function) or 0.0, 2)
    torch.cuda.empty_cache()
    return found


def on_every_gpu(
    function: Callable[[Any], Any], cases: list[Any], seconds: float = math.inf
) -> Iterator[tuple[int, Any]]:
    """(index, result) of each case, as they come, until the time is over."""
    began = time.perf_counter()
    context = get_context("spawn")
    gpus = context.Queue()
    for i in range(torch.cuda.device_count()):
        gpus.put(i)
    with ProcessPoolExecutor(torch.cuda.device_count(), context, use_gpu, (gpus,)) as pool:
        jobs = {pool.submit(function, case): i for i, case in enumerate(cases)}
        for job in tqdm(as_completed(jobs), total=len(jobs), mininterval=10, desc=function.__name__):
            yield jobs[job], job.result()
            if time.perf_counter() - began > seconds:
                print("out of time: not every size is", function.__name__)
                pool.shutdown(wait=False, cancel_futures=True)
                return


def report_losses(rows: list[dict]) -> None:
    """Print at how many sizes each rival was measured, and where one is more than 5 % faster."""
    own = ("copy", "triton", "torch")
    rivals = {name for row in rows for name, figures in row.items() if isinstance(figures, dict)} - {*own}
    for name in sorted(rivals):
        counts = [sum(bool(row.get(name, {}).get(kind)) for row in rows) for kind in ("device_us", "call_us")]
        print(f"{name}: device {counts[0]}, call {counts[1]} of {len(rows)} sizes")
    for kind in ("device_us", "call_us"):
        lost = 0
        for row in rows:
            rivals = {k: v[kind] for k, v in row.items() if isinstance(v, dict) and k not in own and v.get(kind)}
            ours = dict.fromkeys(rivals, row["triton"][kind])
            if kind == "device_us":  # by the measure of each
                ours |= {k: row["triton"]["kernel_us"] for k in rivals if is_jax(k)}
            worst = max(rivals, key=lambda k: ours[k] / rivals[k], default=None)
            if worst and ours[worst] > 1.05 * rivals[worst]:
                lost += 1
                shape = f"{row['envs']} x {row['steps']} {row['layout']} {'' if row['truncation'] else 'no '}truncation"
                print(f"{kind} {shape}: {ours[worst]}, {worst} {rivals[worst]}")
        print(f"{kind}: slower than a rival by more than 5 % at {lost} of {len(rows)}")


if __name__ == "__main__":
    main()
