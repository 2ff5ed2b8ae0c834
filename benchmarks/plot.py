"""Draw what ``bench.py`` measured: device time and the whole call against the window's length, a line for each rival.

python benchmarks/plot.py benchmarks/results/vtrace.json docs/speed.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

NAMES = {
    "triton": "vtrace_plugins",
    "rl-triton": "rl-triton",
    "jax.lax.associative_scan": "JAX associative_scan",
    "torch.associative_scan": "torch.associative_scan",
    "CUDA, a thread a row": "CUDA, a thread a row",
    "compiled loop": "torch.compile, a loop",
    "jax.lax.scan": "JAX scan",
    "torchrl": "TorchRL",
    "copy": "a copy of the same bytes",
}
ENVS = (64, 4096)
KINDS = {"device_us": "on the device", "call_us": "the whole call"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    rows = [r for r in results["rows"] if r["layout"] == "[N,T]" and r["truncation"] and "rl-triton" in r]

    figure, axes = plt.subplots(len(KINDS), len(ENVS), figsize=(10, 7), sharex=True, sharey=True, layout="constrained")
    for line, (kind, what) in zip(axes, KINDS.items(), strict=True):
        for ax, envs in zip(line, ENVS, strict=True):
            for name, label in NAMES.items():
                points = [(r["steps"], r[name][kind]) for r in rows if r["envs"] == envs and r.get(name, {}).get(kind)]
                if points:
                    ours, copy = name == "triton", name == "copy"
                    style = {"lw": 3, "color": "black"} if ours else {"ls": ":", "color": "gray"} if copy else {}
                    ax.loglog(*zip(*sorted(points), strict=True), marker=None if copy else ".", label=label, **style)
            ax.set_title(f"{envs} windows: {what}")
            ax.grid(alpha=0.3)
    for ax in axes[-1]:
        ax.set_xlabel("steps in a window")
    for ax in axes[:, 0]:
        ax.set_ylabel("microseconds")
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside right upper")
    figure.suptitle(f"V-trace on an {results['device']}: lower is better")
    figure.savefig(args.picture, dpi=110)


if __name__ == "__main__":
    main()
