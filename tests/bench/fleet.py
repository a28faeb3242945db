"""Measure a whole local fleet, with Ray and without: time until it answers, and memory. Linux only."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from tests.bench.measure import heading, row
from tests.processes import family

DEADLINE_S = 120.0
MEGABYTE = 10**6
KINDS = (
    ("--no-ray --simulated", ("--no-ray", "--simulated"), "<= 10"),
    ("--no-ray, demo model", ("--no-ray", "--model", "demo"), ""),
    ("Ray, demo model", ("--model", "demo"), "<= 40"),
)


def run(rounds: int) -> None:
    memory: dict[str, list[float]] = {}
    heading("`warmroute up`, 2 replicas: wall time from the command to the first answer")
    for name, options, target in KINDS:
        took_s = []
        for _ in range(rounds):
            with up(*options) as (pid, url, began_s):
                ask(url)
                took_s.append(time.monotonic() - began_s)
                memory.setdefault(name, []).append(pss_bytes(pid) / MEGABYTE)
        row(name, took_s, "s", target)
    print()
    heading("memory of all its processes after the first answer (PSS: shared pages are counted once)")
    for name, found in memory.items():
        row(name, found, "MB")
    print()


@contextmanager
def up(*options: str) -> Iterator[tuple[int, str, float]]:
    """Its pid, its URL, and when it was called."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="b-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "fleet", "up", "--port", "0", *options],
            env=os.environ | {"TMPDIR": folder},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield process.pid, announced(process), began_s
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=DEADLINE_S)


def announced(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"answers? at (\S+)", line)
        if found:
            return found[1]
    raise AssertionError(f"it ended with status {process.wait()}")


def ask(url: str) -> None:
    body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
    with httpx2.Client(timeout=DEADLINE_S, trust_env=False) as http:
        answer = http.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


def pss_bytes(root: int) -> int:
    """Proportional memory of a process and its descendants, including those that Ray moves to other sessions."""
    return sum(kilobytes_of(pid) for pid in family(root)) * 1024


def kilobytes_of(pid: int) -> int:
    try:
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:  # it has ended meanwhile
        return 0
    return int(found[1]) if found else 0
