"""Time a call of V-trace on this machine: each backend, and TorchRL's function where it is installed.

Medians of whole calls by torch.utils.benchmark, the GPU waited for; float32, ``[N, T]``, no gradients. Against other
libraries, on the device alone and in other layouts: ``benchmarks/bench.py`` in the repository.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from vtrace_plugins import vtrace
from vtrace_plugins._core.api import resolve
from vtrace_plugins._core.checks import VTraceError
from vtrace_plugins.doctor import version

_SHAPES = ["64x128", "512x128", "4096x128", "64x2048", "16x16384"]
_PICTURES = (".png", ".pdf", ".svg", ".jpg", ".webp")
_LONGEST_LOOP = 2048  # of TorchRL's Python loop


def _shape(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected ENVSxSTEPS, as in 64x128, got {text!r}")
    envs, steps = text.split("x")
    return int(envs), int(steps)


def _device(text: str) -> torch.device:
    try:
        device = torch.zeros(1, device=text).device
    except (AssertionError, RuntimeError) as error:  # the first is torch's, built without CUDA
        why = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"expected a device that torch has here, got {text!r} ({why})") from None
    if device.type == "meta":
        raise argparse.ArgumentTypeError("expected a device that computes, got 'meta'")
    return device


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return seconds


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    return path


def _picture(text: str) -> Path:
    path = _file(text)
    if path.suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(f"expected a name that ends in one of {' '.join(_PICTURES)}, got {text!r}")
    return path


def add_options(parser: argparse.ArgumentParser) -> None:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=_device, default=here, help="default: %(default)s")
    parser.add_argument(
        "--shapes", nargs="+", type=_shape, default=[_shape(x) for x in _SHAPES], metavar="NxT", help="envs x steps"
    )
    parser.add_argument("--seconds", type=_seconds, default=0.2, help="how long to time each (default: %(default)s)")
    parser.add_argument("--json", type=_file, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=_picture, metavar="FILE", help="draw them (needs matplotlib)")


def torchrl_call(
    data: dict[str, torch.Tensor], gamma: float, time_dim: int
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A call of TorchRL's function that gives (targets, advantages) of a window as ``vtrace`` takes it, which has
    ``truncated`` and ``bootstrap_values``."""
    from torchrl.objectives.value.functional import vtrace_advantage_estimate

    values, terminated, truncated = (data[name] for name in ("values", "terminated", "truncated"))
    bootstraps = truncated.clone()
    bootstraps.select(time_dim, -1).fill_(True)
    ahead = torch.where(bootstraps, data["bootstrap_values"], values.roll(-1, time_dim))
    arguments = (data["log_pi"], data["log_mu"], values, ahead, data["rewards"], terminated | truncated, terminated)
    columns = [x.unsqueeze(-1) for x in arguments]
    discount = torch.tensor(gamma, device=values.device)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        advantages, targets = vtrace_advantage_estimate(discount, *columns, time_dim=time_dim - 3)
        return targets.squeeze(-1), advantages.squeeze(-1)

    return call


def _candidates(envs: int, steps: int, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    log_mu, noise, values, rewards, bootstrap_values = torch.randn(5, envs, steps, device=device)
    terminated, truncated = torch.rand(2, envs, steps, device=device) < 0.01
    data = {"log_pi": log_mu + 0.3 * noise, "log_mu": log_mu, "values": values, "rewards": rewards}
    data |= {"terminated": terminated, "truncated": truncated & ~terminated, "bootstrap_values": bootstrap_values}
    for backend in ("triton", "torch"):
        try:
            resolve(backend, device)
        except VTraceError:
            continue
        yield backend, partial(vtrace, **data, gamma=0.99, backend=backend)
    if steps <= _LONGEST_LOOP and find_spec("torchrl"):
        yield "TorchRL", torchrl_call(data, 0.99, 1)


def bench(options: argparse.Namespace) -> int:
    """Time, and print a table; 0, or 2 where something that it needs is missing."""
    wanted = ["rich", *(["matplotlib"] if options.plot else [])]
    missing = [name for name in wanted if not find_spec(name)]
    if missing:
        print(f"bench needs {' and '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
    from torch.utils.benchmark import Timer  # a tenth of a second, which the doctor need not wait for

    device = options.device
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for envs, steps in track(options.shapes, description="timing", console=Console(stderr=True)):
            row: dict[str, Any] = {"envs": envs, "steps": steps}
            for name, call in _candidates(envs, steps, device):
                timed = Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=options.seconds)
                row[name] = round(1e6 * timed.median, 1)
            rows.append(row)

    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("envs", "steps")))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    table = Table(title=f"microseconds a call, {where}")
    for column in ("envs x steps", *names):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(f"{row['envs']} x {row['steps']}", *(f"{row[name]:,}" if name in row else "" for name in names))
    Console().print(table)
    if options.json:
        packages = {name: version(name) for name in ("vtrace-plugins", "torch", "triton", "torchrl")}
        header = {"what": "microseconds a call, median", "device": where, "python": platform.python_version()}
        options.json.write_text(json.dumps({**header, **packages, "rows": rows}, indent=2) + "\n")
    if options.plot:
        _draw(rows, names, where, options.plot)
    return 0


def _draw(rows: list[dict[str, Any]], names: list[str], where: str, picture: Path) -> None:
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(layout="constrained")
    places = range(len(rows))
    for name in names:
        ax.plot(places, [row.get(name, float("nan")) for row in rows], marker="o", label=name)
    ax.set(yscale="log", ylabel="microseconds a call", title=where)
    ax.set_xticks(places, [f"{row['envs']} x {row['steps']}" for row in rows])
    ax.legend()
    figure.savefig(picture)
