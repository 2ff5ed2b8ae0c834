"""Measure the error of every dtype against the float64 loop, by the length of the window.

    python benchmarks/precision.py --out benchmarks/results/precision_cpu.json
    python benchmarks/precision.py --device cuda --out benchmarks/results/precision_h200.json

The inputs are rounded to the dtype first, so that only the computation and the rounding of the results are judged. An
error is the largest over targets and advantages of all rows, over the largest magnitude of its row; the worst of the
backends that run on the device. Off-policy data (log-ratios of deviation 0.5), gamma 0.99, lambda 0.95, an end every 50
steps or so, and once none at all.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import report
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import oracle
from helpers import call, rounded, window

LENGTHS = (16, 128, 1024, 8192, 65536)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ROWS = 4
OPTIONS = {"gamma": 0.99, "lam": 0.95}


def largest_error(data, dtype: torch.dtype, device: str) -> float:
    data = rounded(data, dtype)
    worst = 0.0
    expected = oracle.loop(**data, **OPTIONS)
    for backend in ("torch", "triton") if device == "cuda" else ("torch",):
        for found, wanted in zip(call((backend, device), data, dtype=dtype, **OPTIONS), expected, strict=True):
            error = abs(found.double().cpu().numpy() - wanted).max(-1) / abs(wanted).max(-1)
            worst = max(worst, float(error.max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    report.add_arguments(parser)
    args = parser.parse_args()

    rows = []
    for T in tqdm(LENGTHS, disable=None):
        for boundaries in (0.01, 0.0):
            data = window(ROWS, T, seed=T, boundaries=boundaries, off_policy=0.5)
            errors = {str(dtype).removeprefix("torch."): largest_error(data, dtype, args.device) for dtype in DTYPES}
            rows.append({"T": T, "boundaries": boundaries} | {k: float(f"{x:.2g}") for k, x in errors.items()})
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    print("| T | " + " | ".join(names) + " |\n" + "|---" * (1 + len(names)) + "|")
    for row in rows:
        kind = "" if row["boundaries"] else ", no ends"
        print(f"| {row['T']}{kind} | " + " | ".join(f"{row[name]:.1e}" for name in names) + " |")
    what = {"what": "largest error of targets and advantages over the largest magnitude of their row"}
    report.write(args, what, args.device, ("torch",), rows)


if __name__ == "__main__":
    main()
