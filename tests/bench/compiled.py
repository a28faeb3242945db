"""Measure what mypyc would save: hot modules compiled in a copy, and the same modules in pure Python, by turns.

Needs a C compiler and setuptools. `python -m tests.bench.compiled` measures the modules that it finds, in a process of
its own.
"""

import functools
import json
import logging
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

import uvloop

import router.core
from tests.bench import decisions, index
from tests.bench.events import payload
from tests.bench.front import PLAIN, REQUESTS, STREAM, FrontOnWires, bodies
from tests.bench.measure import cpu_us

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("api", "engines", "events", "router")
# On the way of a request or an event, and without msgspec structs or dataclasses: see decision 0035.
MODULES = {
    "events": "actions blocks capacity changes doubtful extras feed foreign_stream groups held naming native_stream "
    "orphans payloads pool pools reports resolver stream view hash_chain",
    "router": "core",
    "router/http": "opening",
    "router/members": "accuracy broken budget",
    "router/placement": "approximate eligibility holders optimistic policy prices pulls queue_positions reuse ring "
    "roles speed",
    "router/proxy": "headers answer responses sessions withheld",
}
MYPY_INI = "[mypy]\nstrict = True\nexplicit_package_bases = True\n"
EVENTS = {1: 4000, 64: 400}  # events by their blocks


def run(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        pure, compiled = Path(name, "pure"), Path(name, "compiled")
        for folder in (pure, compiled):
            for package in PACKAGES:
                shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        build(compiled)
        measured: dict[Path, list[dict[str, float]]] = {pure: [], compiled: []}
        for number in range(rounds):
            for folder in (pure, compiled) if number % 2 else (compiled, pure):
                measured[folder].append(figures_of(folder))
    print("| CPU, approximate mode, no sockets | pure | compiled | compiled / pure |\n| --- | --- | --- | --- |")
    for what in measured[pure][0]:
        one, other = ([figures[what] for figures in measured[folder]] for folder in (pure, compiled))
        ratio = statistics.median(fast / slow for slow, fast in zip(one, other, strict=True))
        print(f"| {what} | {shown(one)} | {shown(other)} | **{ratio:.2f}** |")
    print()


def shown(figures: list[float]) -> str:
    return f"{statistics.median(figures):.3g} us ({min(figures):.3g} to {max(figures):.3g})"


def build(folder: Path) -> None:
    (folder / "mypy.ini").write_text(MYPY_INI)
    files = [f"{package}/{name}.py" for package, names in MODULES.items() for name in names.split()]
    environment = {**os.environ, "MYPYC_OPT_LEVEL": "2", "MYPYC_MULTI_FILE": "1"}
    command = [sys.executable, "-m", "mypyc", *files]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def figures_of(folder: Path) -> dict[str, float]:
    """The figures with the packages in this folder."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-m", "tests.bench.compiled"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert Path(found.pop("core")).parent == folder / "router", "other modules were measured"
    figures: dict[str, float] = found
    return figures


# ---- in the process that measures


async def measure() -> None:
    figures: dict[str, float] = {}

    def note(name: str, prepare: Callable[[], Callable[[], object]], units: int) -> None:
        prepare()()
        figures[name] = min(cpu_us(prepare, units, 3))

    for name, characters, stream, answer in (
        ("a request of 800 characters, one answer", 800, False, [PLAIN]),
        ("a request of 16,000 characters, 16 events", 16_000, True, STREAM),
    ):
        front, starts = FrontOnWires(), count(0, REQUESTS)

        def asked(
            front: FrontOnWires = front,
            starts: "count[int]" = starts,
            characters: int = characters,
            stream: bool = stream,
            answer: list[bytes] = answer,
        ) -> Callable[[], object]:
            made = bodies(characters, stream, next(starts))

            def work() -> None:
                for body in made:
                    front.ask(body, answer)

            return work

        note(name, asked, REQUESTS)
        await front.close()
    for replicas in (4, 64):
        prepare = functools.partial(decisions.choosing, "cost", replicas, "busy")
        note(f"a choice among {replicas} replicas", prepare, decisions.DECISIONS)
    for kind in ("native", "foreign int"):
        for blocks, events in EVENTS.items():
            payloads = [payload(blocks, random.Random(n), kind) for n in range(events)]
            note(
                f"an event of {blocks} {'block' if blocks == 1 else 'blocks'}, {kind}",
                functools.partial(index.reading, payloads, kind, 1),
                events,
            )
    print(json.dumps({"core": router.core.__file__, **figures}))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    uvloop.run(measure())
