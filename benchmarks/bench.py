"""Time ``vtrace`` itself: device time by CUDA-graph replay, and the whole eager call, beside a copy of the same bytes.

    python benchmarks/bench.py --out benchmarks/results/vtrace.json

Device time is that of one call among the several in a captured graph, the median over replays; inputs that fit in the
L2 cache stay there. A call is wall-clock from Python to Python, back to back, the GPU waited for after the last.
``copy`` moves as many bytes as the kernel must: five float32 inputs and two flags read, two float32 results written, so
30 bytes a step. Rivals: this package's torch backend, and TorchRL's functional (a Python loop over time, so only where
that ends within reason).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import report
import torch
from torch import Tensor
from tqdm import tqdm

from vtrace_plugins import vtrace

NT = (
    *((64, 128), (8, 2048), (4096, 128), (256, 2048), (16384, 16), (65536, 32), (8192, 1024), (32768, 1024)),
    *((4, 65536), (16, 131072), (1, 1048576)),
)
TN = ((64, 128), (64, 2048), (512, 512), (1024, 2048), (4096, 128), (65536, 32), (8192, 1024), (32768, 1024))
BYTES_A_STEP = 5 * 4 + 2 + 2 * 4
LONGEST_LOOP = 2048
GRAPHED = 10  # calls in a graph


def window(envs: int, steps: int, time_major: bool) -> dict[str, Tensor]:
    shape = (steps, envs) if time_major else (envs, steps)
    normal = lambda: torch.randn(shape, device="cuda")  # noqa: E731
    log_mu = normal() - 1
    return {
        "log_pi": log_mu + 0.3 * normal(),
        "log_mu": log_mu,
        "values": normal(),
        "rewards": normal(),
        "terminated": torch.rand(shape, device="cuda") < 0.01,
        "truncated": torch.rand(shape, device="cuda") < 0.01,
        "bootstrap_values": normal(),
    }


def candidates(envs: int, steps: int, time_major: bool) -> dict[str, Callable[[], object]]:
    data = window(envs, steps, time_major)
    time_dim = 0 if time_major else 1
    source = torch.empty(envs * steps * BYTES_A_STEP // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    found: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "triton": lambda: vtrace(**data, gamma=0.99, time_dim=time_dim, backend="triton"),
        "torch": lambda: vtrace(**data, gamma=0.99, time_dim=time_dim, backend="torch"),
    }
    if steps <= LONGEST_LOOP:
        from torchrl.objectives.value.functional import vtrace_advantage_estimate

        after = torch.where(data["truncated"], data["bootstrap_values"], data["values"].roll(-1, time_dim))
        done = data["terminated"] | data["truncated"]
        columns = [x.unsqueeze(-1) for x in (data["log_pi"], data["log_mu"], data["values"], after, data["rewards"])]
        flags = [x.unsqueeze(-1) for x in (done, data["terminated"])]
        gamma = torch.tensor(0.99, device="cuda")
        found["torchrl"] = lambda: vtrace_advantage_estimate(gamma, *columns, *flags, time_dim=time_dim - 3)
    return found


def device_microseconds(function: Callable[[], object]) -> float:
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPHED):
            function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    times = []
    for _ in range(30):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / GRAPHED)
    return statistics.median(times)


def call_microseconds(function: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start) / calls)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(parser)
    args = parser.parse_args()
    torch.manual_seed(0)

    rows = []
    for envs, steps, layout in tqdm([(*s, "[N,T]") for s in NT] + [(*s, "[T,N]") for s in TN]):
        row: dict[str, object] = {"envs": envs, "steps": steps, "layout": layout, "bytes": envs * steps * BYTES_A_STEP}
        for name, function in candidates(envs, steps, layout == "[T,N]").items():
            slow = name == "torchrl"
            row[name] = {
                "device_us": None if slow else round(device_microseconds(function), 2),
                "call_us": round(call_microseconds(function, calls=1 if slow else 20), 1),
            }
        rows.append(row)
        torch.cuda.empty_cache()

    names = ("copy", "triton", "torch", "torchrl")
    print(f"\n{'envs x steps':>14} {'':>6}" + "".join(f"{name + ' device/call us':>26}" for name in names))
    for row in rows:
        figures = [row.get(name) or {"device_us": None, "call_us": None} for name in names]
        shape = f"{row['envs']} x {row['steps']}"
        print(
            f"{shape:>14} {row['layout']:>6}"
            + "".join(f"{f['device_us']!s:>14} /{f['call_us']!s:>10}" for f in figures)
        )
    what = {"what": "microseconds: device_us of a CUDA-graph replay, call_us of a whole eager call; medians"}
    report.write(args, what, "cuda", ("torch", "triton", "torchrl"), rows)


if __name__ == "__main__":
    main()
