"""Measure how long a newcomer waits: from a fresh clone to an answer, for README's commands, and for each `--help`.

The clone has what is committed. pip may have its packages in its cache, but the wheel with the model never lies there.
"""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fleet.cli import COMMANDS
from fleet.up.announcement import QUESTION
from replica.fetching.fetch import smollm2_folder
from tests.bench.measure import heading, row
from tests.docs.walking import walked
from tests.fleet.test_up import chat, starting

ROOT = Path(__file__).parents[2]
UP = {
    "simulated, plain processes": ("--simulated", "--no-ray"),
    "demo model, plain processes": ("--model", "demo", "--no-ray"),
    "demo model, on Ray": ("--model", "demo"),
}
TARGET_S, HELP_TARGET_MS = 15, 300
STEPS = {"the model is there": "Starting 2 replicas", "Ray is ready": "Ray is ready", "replicas answer": "answer at"}
ANSWERED = "it has said Paris"
COLD_TARGET_S, CACHED_TARGET_S = 30, 12
INSTALL_LIMIT_S, ANSWER_LIMIT_S = 1800, 300


def run(rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="n-") as folder:
        clone, cache = Path(folder) / "warmroute", Path(folder) / "cache"
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        began_s = time.monotonic()
        install = ["make", "-s", "environment"]
        subprocess.run(install, cwd=clone, check=True, timeout=INSTALL_LIMIT_S, stderr=subprocess.DEVNULL)
        heading("a fresh clone")
        row("`make environment`, of which `make up` begins with", [time.monotonic() - began_s], "s")
        for how, target_s in (("without the model", COLD_TARGET_S), ("with the model in the cache", CACHED_TARGET_S)):
            found = []
            for _ in range(rounds):
                if target_s == COLD_TARGET_S:
                    shutil.rmtree(cache, ignore_errors=True)
                found.append(first_answer(clone, cache))
            for step in found[0]:
                target = f"<= {target_s} s" if step == ANSWERED else ""
                row(f"`make up` {how}: {step}", [each[step] for each in found], "s", target)
        smollm2_folder()  # the commands have no network
        print("\nREADME's commands, in their order:\n", flush=True)
        (reader := Path(folder) / "reader").mkdir()
        walked("README.md", reader)
    print()
    heading("`--help` of each command, CPU")
    for name in sorted(COMMANDS):
        times = [cpu_ms((sys.executable, "-m", "fleet", name, "--help")) for _ in range(rounds)]
        row(f"`warmroute {name}`", times, "ms", f"<= {HELP_TARGET_MS} ms" if name == "up" else "")
    print()
    heading("from the start to the second answer of `warmroute up`, which finds the first in the cache")
    for name, options in UP.items():
        times = [first_warm_s(options) for _ in range(rounds)]
        row(name, times, "s", f"<= {TARGET_S} s")


def first_answer(clone: Path, cache: Path) -> dict[str, float]:
    """Return the seconds from `make up` to each step."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("WARMROUTE_")}
    began_s, seen = time.monotonic(), dict[str, float]()
    with subprocess.Popen(
        ["make", "-s", "up", "ARGS=--port 0"],
        cwd=clone,
        env=mine | {"WARMROUTE_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            said = ""
            for line in process.stdout:
                said += line
                for step, mark in STEPS.items():
                    if mark in line:
                        seen.setdefault(step, time.monotonic() - began_s)
                if url := re.search(r"answers? at (\S+)", line):
                    asked = [{"role": "user", "content": QUESTION}]
                    _, answer = chat(url[1], ANSWER_LIMIT_S, model="smollm2", messages=asked, max_tokens=16)
                    assert "Paris" in answer["choices"][0]["message"]["content"], answer
                    return seen | {ANSWERED: time.monotonic() - began_s}
            raise AssertionError(said)
        finally:
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=ANSWER_LIMIT_S)


def cpu_ms(command: Sequence[str]) -> float:
    def spent_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before_s = spent_s()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"COLUMNS": "80"})
    return 1000 * (spent_s() - before_s)


def first_warm_s(options: Sequence[str]) -> float:
    began_s = time.monotonic()
    with starting(*options, "--port", "0") as running:
        running.wait_for("Ctrl-C ends everything")
        cached = [running.ask()[1]["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
        took_s = time.monotonic() - began_s
        assert cached[0] == 0 < cached[1], f"cached tokens of both answers: {cached}"
        running.end()
    return took_s
