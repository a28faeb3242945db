"""Qualify a release: `make qualify`, or `python -m qualification [PART...]`.

Parts run against what is foreign (engines, clients, container engines), need hardware, or try whole grids of what CI
tries a few cases of. A part whose needs are not met here is left out. `passed.json` keeps when each one last passed.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from qualification.clients.running import VARIABLE as CLIENTS
from qualification.engines import engine
from qualification.images import podman
from qualification.kubernetes import real

ROOT = Path(__file__).resolve().parent.parent
PASSED = Path(__file__).with_name("passed.json")
PYTHON = sys.executable
SILENCE = "tests/hostile/test_silence.py"


class Part(NamedTuple):
    holds: str
    commands: Sequence[tuple[str, ...]]
    missing: Callable[[], str | None] = lambda: None


def checks(marks: str, *paths: str, at_once: int = 0) -> tuple[str, ...]:
    workers = ("-n", str(at_once), "--dist", "loadfile")
    return (PYTHON, "-m", "pytest", "-q", *workers, "--timeout", "600", "-m", marks, *paths)


def rest_of_grids() -> list[str]:
    """Return the files with marks `grid`, but for those that are parts of their own."""
    files = (path for path in (ROOT / "tests").rglob("test_*.py") if "mark.grid" in path.read_text())
    names = sorted(path.relative_to(ROOT).as_posix() for path in files)
    return [name for name in names if not name.startswith(("tests/docs/", "tests/gpu/", SILENCE, "tests/kernels/gpu/"))]


def no_clients() -> str | None:
    return None if os.environ.get(CLIENTS) else f"{CLIENTS} is not set; `python -m qualification.clients DIR` makes it"


def no_gpu() -> str | None:
    return None if shutil.which("nvidia-smi") else "there is no GPU here"


PARTS: Mapping[str, Part] = {
    "engines": Part("predictions at real vLLM and SGLang", [checks("live", "qualification/engines")], engine.missing),
    "clients": Part("other projects' clients and agents", [checks("live", "qualification/clients")], no_clients),
    "containers": Part(
        "the images in real containers", [checks("live", "qualification/images/test_containers.py")], podman.why_not
    ),
    "kubernetes": Part(
        "discovery and roles at a real API server", [checks("live", "qualification/kubernetes")], real.no_cluster
    ),
    "compatibility": Part("every field of docs/compatibility.md", [checks("live", "qualification/compatibility")]),
    "walks": Part("every command of every page", [checks("grid", "tests/docs", at_once=2)]),
    "kernels": Part("the GPU's kernels at all shapes, interpreted and compiled", [("make", "triton-check", "CASES=")]),
    "gpu-run": Part("the GPU machine's check, on a CPU", [checks("grid", "tests/gpu")]),
    "gpu": Part("the same on a GPU", [checks("gpu", "tests")], no_gpu),
    "properties": Part("property tests with many examples", [("make", "test-thorough")]),
    "schemas": Part(
        "answers to a thousand random schemas, each also with its second half from another engine",
        [("env", "WARMROUTE_RANDOM_SCHEMAS=1000", PYTHON, "-m", "pytest", "-q", "tests/replica/test_schemas.py")],
    ),
    "requests": Part(
        "generated requests against the documents of replicas and routers",
        [("env", "WARMROUTE_SCHEMA_EXAMPLES=12", *checks("chaos", "tests/chaos/test_schema.py"))],
    ),
    "silence": Part("pauses of any length and a machine that is too busy break nothing off", [checks("grid", SILENCE)]),
    "grids": Part("the rest of each grid, and published figures", [checks("grid", *rest_of_grids(), at_once=2)]),
}


def main(arguments: Sequence[str], parts: Mapping[str, Part] = PARTS, passed: Path = PASSED) -> int:
    listed = "".join(f"\n  {name:14}{part.holds}" for name, part in parts.items())
    parser = argparse.ArgumentParser(
        prog="python -m qualification",
        description=f"{__doc__}\nparts:{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="by default all; a named one must not be left out")
    named: list[str] = parser.parse_args(arguments).parts
    if unknown := [name for name in named if name not in parts]:
        parser.error(f"{unknown[0]!r} is no part; the parts are {', '.join(parts)}")
    dates: dict[str, str] = json.loads(passed.read_text()) if passed.exists() else {}
    rows, failed = [], False
    for number, name in enumerate(chosen := named or [*parts], 1):
        part = parts[name]
        print(f"== {name} ({number} of {len(chosen)}): {part.holds}", flush=True)
        began_s = time.monotonic()
        if reason := part.missing():
            print(f"left out: {reason}", flush=True)
            result, is_bad = "left out", bool(named)
        elif any(subprocess.run(command, cwd=ROOT, check=False).returncode for command in part.commands):
            result, is_bad = "FAILED", True
        else:
            result, is_bad = "passed", False
            dates[name] = datetime.date.today().isoformat()
            passed.write_text(json.dumps(dates, indent=2, sort_keys=True) + "\n")
        failed |= is_bad
        rows.append(f"| {name} | {result} | {time.monotonic() - began_s:.0f} s | {dates.get(name, 'never')} |")
    print("\n| part | result | took | last passed |", "| --- | --- | --- | --- |", *rows, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
