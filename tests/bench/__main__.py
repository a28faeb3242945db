"""`python -m tests.bench [PART ...]`: what costs what."""

import argparse
import platform
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

PARTS = (
    "events",
    "front",
    "fleet",
)
# Take long, or need what is no part of the project: other routers, traces, Chromium. Some write to docs/.
BY_NAME = (
    "demo",
    "peers",
    "prove",
    "sessions",
    "screenshots",
    "terminal",
)


def machine() -> str:
    model = "unknown CPU"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = f"{len(names)} x {names[0]}" if names else model
    return f"{model}, {platform.system()}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        default=PARTS,
        help=f"of {', '.join(PARTS)}, which are all run by default, and {', '.join(BY_NAME)}",
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds per figure, of which the median is printed")
    parser.add_argument("--small", action="store_true", help="peers, sessions: a short trial")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - {*PARTS, *BY_NAME}
    if unknown:
        sys.exit(f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join((*PARTS, *BY_NAME))}")
    print(f"On {machine()}; CPU time, median of {arguments.rounds} rounds (lowest to highest).\n")
    for part in arguments.parts:
        options: dict[str, Any] = {"small": True} if arguments.small and part in ("peers", "sessions") else {}
        import_module(f"tests.bench.{part}").run(arguments.rounds, **options)


if __name__ == "__main__":
    main()
