"""Measure a whole router in front of very many replicas: until it is exact, its memory, its CPU and its decisions.

The replicas are stand-ins, a hundred in a process: their HTTP control, and sockets that publish four reports a second
and 2,000,000 blocks in all, which every two of them share. On two cores 400 of them leave the router enough: 1,000 take
three quarters of the machine, and seem silent. Linux only: it reads /proc.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.bench.measure import heading, row
from tests.chaos.replicas import cpu_s, resident_bytes
from tests.chaos.routers import RouterProcess, router
from tests.events.processes import wait_until

REPLICAS, ENTRIES = 400, 2_000_000
OF_A_PROCESS = 100
EXACT_WITHIN_S = 300.0
SETTLED_S, WATCHED_S = 5.0, 20.0
REQUESTS = 1000
WORDS = 700  # of a prompt: some 4,000 bytes, each a token
SECONDS = re.compile(r'^warmroute_router:decision_seconds_bucket\{le="([^"]+)"\} (\S+)', re.MULTILINE)


def run(rounds: int) -> None:
    del rounds  # once is long enough
    heading(f"{REPLICAS:,} replicas, {ENTRIES:,} entries")
    with stand_ins() as urls:
        options = [text for number, url in enumerate(urls) for text in ("--replica", f"url={url},name=r{number}")]
        began_s = time.monotonic()
        with router(*options, "--log-level", "error", ready=False, within_s=EXACT_WITHIN_S) as running:
            wait_until(running.is_ready, "the router is ready: every replica is exact, or late", EXACT_WITHIN_S)
            wait_until(lambda: exact(running) == REPLICAS, "every replica is exact", EXACT_WITHIN_S)
            row("from its start until every replica is exact", [time.monotonic() - began_s], "s")
            row("CPU until then", [cpu_s(running.process.pid)], "s")
            time.sleep(SETTLED_S)
            row("CPU without requests", [busy(running)], "% of a core")
            row("memory", [resident_bytes(running.process.pid) / 1e6], "MB")
            ask(running)
            for share in (0.5, 0.99):
                row(f"CPU of a decision, p{100 * share:g}: at most", [1e3 * decision_s(running, share)], "ms")
    print()


@contextmanager
def stand_ins() -> Iterator[list[str]]:
    urls: list[str] = []
    with ExitStack() as stack:
        for _ in range(REPLICAS // OF_A_PROCESS):
            command = [sys.executable, "-m", "tests.bench.publishing", str(OF_A_PROCESS), str(ENTRIES // REPLICAS)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None, "it is a pipe"
            urls += json.loads(process.stdout.readline())["urls"]
        yield urls


def exact(running: RouterProcess) -> int:
    return len(
        re.findall(r"^warmroute_router:index_exact\{[^}]*\} 1\.0$", running.get("/metrics").body.decode(), re.MULTILINE)
    )


def busy(running: RouterProcess) -> float:
    before_s, began_s = cpu_s(running.process.pid), time.monotonic()
    time.sleep(WATCHED_S)
    return 100 * (cpu_s(running.process.pid) - before_s) / (time.monotonic() - began_s)


def ask(running: RouterProcess) -> None:
    """Place prompts; the stand-ins generate nothing, and refuse them."""
    for number in range(REQUESTS):
        text = " ".join(f"{number}-{word}" for word in range(WORDS))
        body = {"model": "demo", "messages": [{"role": "user", "content": text}]}
        running.post("/v1/chat/completions", body)


def decision_s(running: RouterProcess, share: float) -> float:
    """The upper bound of the bucket in which this share of the decisions is reached."""
    buckets = [(float(bound), float(count)) for bound, count in SECONDS.findall(running.get("/metrics").body.decode())]
    return next(bound for bound, count in buckets if count >= share * buckets[-1][1])
