"""``python -m vtrace_plugins``: ``doctor`` and ``bench``."""

from __future__ import annotations

import argparse
import sys

from vtrace_plugins import bench
from vtrace_plugins.doctor import doctor


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vtrace_plugins", description="V-trace for PyTorch, TorchRL and SB3."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor",
        help="what is installed, which backend runs where and why, and a check of each against a float64 loop",
        description=f"Prints versions, devices and backends, and checks each backend. {doctor.__doc__}",
    )
    bench.add_options(
        commands.add_parser(
            "bench",
            help="time V-trace on this machine, each backend and TorchRL's function",
            description=bench.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    options = parser.parse_args(arguments)
    return doctor() if options.command == "doctor" else bench.bench(options)


if __name__ == "__main__":
    sys.exit(main())
