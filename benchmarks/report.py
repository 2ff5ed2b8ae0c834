"""What every benchmark writes: its rows as JSON, under a header that says on what, when and of which commit."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from vtrace_plugins.doctor import version


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--commit", help="the commit that is measured, where this copy has no git history")


def device_name(device: str) -> str:
    cuda = torch.device(device).type == "cuda"
    return torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"


def write(
    args: argparse.Namespace, what: dict[str, Any], device: str, packages: Sequence[str], rows: list[Any]
) -> None:
    """To ``args.out``, if that was given. ``what`` says what the figures are; versions of ``packages`` stand beside."""
    if not args.out:
        return
    header = {
        **what,
        "device": device_name(device),
        "date": date.today().isoformat(),
        "commit": args.commit or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**header, "rows": rows}, indent=2) + "\n")
