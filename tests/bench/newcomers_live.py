"""A third replica that `warmroute scale` adds to two simulated ones: its share of what `warmroute bench` sends.

It takes two minutes. The seed of `warmroute bench` decides the system prompt that all of its requests share.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import httpx2

from tests.bench.fleet import up

NEWEST = "demo-2"
BEFORE = ("--for", "20", "--seed", "1")
AFTER = {
    "the prompts of before": BEFORE,
    "other prompts": ("--for", "20", "--seed", "2"),
    "those, 40 a second in bursts": ("--for", "15", "--seed", "2", "--rate", "40", "--arrivals", "bursty"),
}


def run(rounds: int) -> None:
    del rounds
    titles = "requests | sent | demo-0 | demo-1 | the new one | mean TTFT | p99 | why the new one is idle"
    print(f"\n| {titles} |\n|{' --- |' * 8}")
    with (
        tempfile.TemporaryDirectory(prefix="b-") as folder,
        patch.dict(os.environ, XDG_RUNTIME_DIR=folder),
        up("--no-ray", "--simulated", "--replicas", "2") as (_, url, _),
    ):
        _row("two replicas", url, BEFORE)
        _warmroute("scale", "demo", "3", "--fleet", str(urlsplit(url).port))
        for name, options in AFTER.items():
            _row(name, url, options)


def _row(name: str, url: str, options: Sequence[str]) -> None:
    figures = json.loads(_warmroute("bench", url, "--json", *options))["endpoints"][0]["figures"]
    shares = [figures["replicas"].get(f"demo-{number}", {"share": 0})["share"] for number in range(3)]
    ttft = figures["ttft_s"]
    times = [f"{ttft[each] * 1000:.0f} ms" for each in ("mean", "p99")]
    cells = (name, f"{figures['requests']:,}", *(f"{share:.0%}" for share in shares), *times, _idle(url) or "")
    print(f"| {' | '.join(cells)} |", flush=True)


def _idle(url: str) -> str | None:
    answer: Any = httpx2.get(f"{url}/replicas", trust_env=False).json()
    return next((one["idle"] for one in answer["replicas"] if one["name"] == NEWEST), None)


def _warmroute(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "fleet", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
