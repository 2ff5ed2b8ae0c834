"""A long random campaign of every backend against the float64 loop, wider than the property tests.

    python tests/fuzz.py --windows 20000 --out benchmarks/results/fuzz_cpu.json
    python tests/fuzz.py --device cuda --windows 100000 --styles 120 --workers 14 \\
        --out benchmarks/results/fuzz_h200.json

Draws shapes, the launcher's plan (its own choice, or any other way to cut a window into tiles and chunks), time
dimensions, strides (holes, time-major memory, zero strides from ``expand``), a dtype a tensor, flags of any dtype,
padding, every option as a number or a tensor; and then poisons one step of one episode (NaN, inf, denormals, huge
values and ratios) and wants every bit outside of that episode unchanged. A window is reproduced by its number:
``--first 1234 --windows 1``. Exit status 1 if anything disagreed.
On a GPU nearly every window is a new variant of the kernel, which takes most of a second to compile; with ``--styles``
the windows share so many combinations of dtypes, layouts and options, and differ in shapes, numbers and data.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import date
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import oracle
import test_plans
import torch
from helpers import TOLERANCE, assert_close
from tqdm import tqdm

from vtrace_plugins import vtrace

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FLAGS = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32)
POISONS = (math.nan, math.inf, -math.inf, 1e38, -1e38, 1e-40)
PLANS = (None, *test_plans.PLANS.values())
INTERPRETED_ELEMENTS = 60  # the interpreter takes 0.1 ms an element

Outcome = tuple[Counter[str], dict[str, float], list[str]]


_prepared: dict[object, object] = {}  # launches by plan


@contextmanager
def planned(plan: tuple[int, ...] | None) -> Iterator[None]:
    """The launcher chooses this plan, or as it will."""
    if plan is None:
        yield
        return
    from vtrace_plugins._core import launch, ops

    before = launch.choose, ops._launches
    launch.choose, ops._launches = lambda *_: launch.Plan(*plan), _prepared.setdefault(plan, {})
    try:
        yield
    finally:
        launch.choose, ops._launches = before


class Window:
    """One random call: float64 arrays ``[rows, T]`` for the oracle, and tensors of other clothes for ``vtrace``."""

    def __init__(self, seed: int, most: int, styles: int | None = None) -> None:
        rng = self.rng = np.random.default_rng(seed)
        style = np.random.default_rng([seed % styles]) if styles else rng  # what decides on the kernel's variant
        self.T = int(np.exp(rng.uniform(0, np.log(most))))
        self.batch = tuple(int(x) for x in rng.integers(1, 5, size=style.integers(0, 3)))
        if math.prod(self.batch) * self.T > 2 * most:
            self.batch = ()
        self.rows = math.prod(self.batch)
        self.time_dim = int(style.integers(0, len(self.batch) + 1))
        shape = (self.rows, self.T)
        boundaries = rng.choice([0.0, 0.02, 0.1, 0.5, 1.0])
        log_mu = rng.normal(size=shape) - 1
        self.data = {
            "log_pi": log_mu + rng.choice([0.0, 0.1, 1.0]) * rng.normal(size=shape),
            "log_mu": log_mu,
            "values": rng.normal(size=shape),
            "rewards": rng.normal(size=shape),
            "terminated": rng.random(shape) < boundaries,
        }
        continuation = style.choice(["bootstrap_values", "last_value", "next_values"])
        self.data[continuation] = rng.normal(size=self.rows if continuation == "last_value" else shape)
        if continuation != "last_value":
            if style.random() < 0.7:
                self.data["truncated"] = rng.random(shape) < boundaries
            if style.random() < 0.3:
                self.data["mask"] = rng.random(shape) < rng.choice([0.5, 0.95])
        self.options = {
            "gamma": float(rng.choice([0.0, 0.5, 0.97, 0.99, 1.0])),
            "rho_bar": float(rng.choice([0.0, 0.5, 1.0, 3.7, math.inf])),
            "c_bar": float(rng.choice([0.0, 0.5, 1.0])),  # above 1, long products leave the float range
            "pg_rho_bar": None if style.random() < 0.5 else float(rng.choice([0.9, 2.2])),
            "lam": float(style.choice([0.0, 0.9, 1.0])),
            "weight_advantages": bool(style.random() < 0.5),
        }
        self.plan = PLANS[style.integers(len(PLANS))]
        if style.random() < 0.2:
            self.data["gamma"] = self.options["gamma"] ** rng.integers(1, 4, size=shape)
        common = FLOATS[style.choice(4, p=[0.3, 0.4, 0.15, 0.15])]
        mixed = style.random() < 0.3
        self.clothes = {}
        for name, x in self.data.items():
            dtype = FLOATS[style.integers(4)] if mixed else common
            dtype = FLAGS[style.integers(len(FLAGS))] if x.dtype == bool else dtype
            layout = style.choice(["plain", "holes", "time-major", "expanded"], p=[0.4, 0.2, 0.2, 0.2])
            self.clothes[name] = (dtype, layout)
            if layout == "expanded" and x.ndim == 2:
                x = np.repeat(x[:1], self.rows, 0)
            self.data[name] = x if x.dtype == bool else torch.as_tensor(x).to(dtype).double().numpy()
        self.as_tensors = {name for name in ("gamma", "rho_bar", "c_bar") if style.random() < 0.2}

    def dressed(self, data: dict[str, np.ndarray], device: str) -> dict[str, object]:
        tensors: dict[str, object] = {
            name: torch.tensor(x, dtype=torch.float64, device=device) if name in self.as_tensors else x
            for name, x in self.options.items()
        }
        for name, x in data.items():
            dtype, layout = self.clothes[name]
            # Nothing waits for the GPU: where processes share one, that takes as long as their turns.
            t = torch.as_tensor(x).to(device, non_blocking=True).to(dtype)
            if name == "last_value":
                tensors[name] = t.view(self.batch)
                continue
            if layout == "expanded":
                tensors[name] = t[0].expand(*self.batch, self.T).movedim(-1, self.time_dim)
                continue
            t = t.view(*self.batch, self.T).movedim(-1, self.time_dim)
            if layout == "holes":
                larger = torch.ones((*t.shape[:-1], 2 * t.shape[-1] + 1), dtype=dtype, device=device)
                larger[..., 1::2] = t
                t = larger[..., 1::2]
            elif layout == "time-major":
                t = t.movedim(self.time_dim, 0).contiguous().movedim(0, self.time_dim)
            tensors[name] = t
        return tensors

    def run(self, backend: str, tensors: dict[str, object]) -> torch.Tensor:
        with planned(self.plan if backend == "triton" else None):
            results = torch.stack(list(vtrace(**tensors, time_dim=self.time_dim, backend=backend)))
        return results.movedim(1 + self.time_dim, -1).reshape(2, self.rows, self.T).cpu()

    def tolerance(self) -> float:
        data = ("log_pi", "log_mu", "values", "rewards", "bootstrap_values", "last_value", "next_values")
        computed = any(self.clothes[name][0] is torch.float64 for name in data if name in self.data)
        result = TOLERANCE[self.clothes["values"][0]]
        return 2 * max(result, TOLERANCE[torch.float64 if computed else torch.float32])

    def episodes(self) -> np.ndarray:
        """A number for each step, the same within an episode of a row. Padding belongs to none."""
        ends = self.data["terminated"] | self.data.get("truncated", False)
        mask = self.data.get("mask", np.ones((self.rows, self.T), dtype=bool))
        ends = ends | ~mask | ~np.append(mask[:, 1:], np.ones((self.rows, 1), dtype=bool), 1)
        starts = np.append(np.ones((self.rows, 1), dtype=bool), ends[:, :-1], 1)
        return np.cumsum(starts.flatten()).reshape(self.rows, self.T)

    def poisoned(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The data with one value at one step gone bad, and where results may change.

        In every row, if the rows are one that is expanded: memory laid out otherwise would be another variant of the
        kernel, which rounds as it likes.
        """
        rng = self.rng
        row, t = int(rng.integers(self.rows)), int(rng.integers(self.T))
        names = [
            n for n in ("log_pi", "log_mu", "values", "rewards", "bootstrap_values", "next_values") if n in self.data
        ]
        name = names[rng.integers(len(names))]
        data = self.data | {name: self.data[name].copy()}
        rows = slice(None) if self.clothes[name][1] == "expanded" else row
        data[name][rows, t] = POISONS[rng.integers(len(POISONS))]
        episodes = self.episodes()
        return data, np.isin(episodes, episodes[rows, t])


def check(seed: int, device: str, most: int, styles: int | None = None) -> Outcome:
    """Everything about one window: what was run, the largest error in units of the tolerance, what disagreed."""
    ran: Counter[str] = Counter()
    worst: dict[str, float] = {}
    wrong = []
    window = Window(seed, most, styles)
    named = window.options | ({"gamma": window.data["gamma"]} if "gamma" in window.data else {})
    expected = oracle.loop(**{k: x for k, x in window.data.items() if k != "gamma"}, **named)
    backends = ["torch", "triton"] if device == "cuda" else ["reference", "torch"]
    if device == "cpu" and window.rows * window.T <= INTERPRETED_ELEMENTS:
        bfloat16 = any(dtype is torch.bfloat16 for dtype, _ in window.clothes.values())
        backends += [] if bfloat16 else ["triton"]  # the interpreter truncates what it stores as bfloat16
    dirty, may_change = window.poisoned()
    tensors, poisoned = (window.dressed(data, device) for data in (window.data, dirty))
    for backend in backends:
        ran[backend] += 1
        try:
            clean = window.run(backend, tensors)
            for actual, wanted in zip(clean, expected, strict=True):
                assert_close(actual, wanted, tolerance=window.tolerance())
                scale = np.maximum(1.0, np.abs(wanted).max(-1, keepdims=True))
                error = np.abs(actual.double().numpy() - wanted).max(initial=0.0, where=np.isfinite(wanted / scale))
                worst[backend] = max(worst.get(backend, 0.0), float(error / scale.max() / window.tolerance()))
            for before, after in zip(clean, window.run(backend, poisoned), strict=True):
                same = torch.as_tensor(~may_change)
                assert torch.equal(before[same], after[same]), "a poisoned step changed another episode"
        except Exception as error:
            wrong.append(f"{seed} {backend}: {type(error).__name__} {str(error).splitlines()[0][:200]}")
    return ran, worst, wrong


def merged(outcomes: Iterable[Outcome]) -> Outcome:
    ran: Counter[str] = Counter()
    worst: dict[str, float] = {}
    wrong: list[str] = []
    for one_ran, one_worst, one_wrong in outcomes:
        ran += one_ran
        worst = {k: max(worst.get(k, 0.0), one_worst.get(k, 0.0)) for k in worst.keys() | one_worst.keys()}
        wrong += one_wrong
    return ran, worst, wrong


def campaign(seeds: range, device: str, most: int, styles: int | None = None, deadline: float = math.inf) -> Outcome:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(os.getpid() % torch.cuda.device_count())
    warnings.filterwarnings("ignore", module="triton.runtime.interpreter")  # NumPy's, on NaN and inf
    return merged(check(seed, device, most, styles) for seed in seeds if time.time() < deadline)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first window, which is its seed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--longest", type=int, default=200, help="steps of the longest window")
    parser.add_argument("--styles", type=int, help="how many combinations of dtypes, layouts and options")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no window after so many seconds")
    parser.add_argument("--out", type=Path, help="write the summary as JSON")
    parser.add_argument("--commit", help="the commit that is tested, where this copy has no git history")
    args = parser.parse_args()

    if args.device == "cpu":  # before triton is imported, here or in a worker
        os.environ["TRITON_INTERPRET"] = "1"
    start = time.time()
    each = 50
    parts = [
        range(first, min(first + each, args.first + args.windows))
        for first in range(args.first, args.first + args.windows, each)
    ]
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        same = (args.device, args.longest, args.styles, start + args.seconds)
        futures = pool.map(campaign, parts, *([x] * len(parts) for x in same))
        ran, worst, wrong = merged(tqdm(futures, total=len(parts), unit_scale=each, unit="window", disable=None))
    summary = {
        "windows": ran["torch"],
        "first seed": args.first,
        "longest window": args.longest,
        "styles": args.styles,
        "runs": dict(ran),
        "largest error, in tolerances": {k: round(x, 3) for k, x in worst.items()},
        "disagreements": len(wrong),
        "which": wrong[:20],
        "seconds": round(time.time() - start),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(json.dumps(summary, indent=2))
    if args.out:
        summary["commit"] = args.commit or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
        args.out.write_text(json.dumps(summary, indent=2) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
