"""A fleet on Ray beside another busy program: one process per core that does nothing but spin, at the fleet's niceness.

Nothing is broken, so each retry, resumed answer and warning is a false alarm. That replicas are starved of CPU is true.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from api.process.cpus import usable_cpus
from tests.chaos.ray_here import Victims, up
from tests.fleet.test_up import Up

MINUTES = 10.0
EVERY_S = 1.0  # a request begins
TOKENS = 24
ENDS_WITHIN_S = 60.0
SYSTEM = "You are a patient librarian who answers in one short sentence, and who never invents a book. " * 8
COUNTED = ("retries_total", "resumes_total")
TRUE = {"starved-of-cpu"}
OF_PROMPTS = {"low-hits", "prompts-not-block-aligned", "approximate-prompts"}  # say nothing of a replica's health


class Traffic:
    """Begins a chat every second, whether those before have ended or not."""

    def __init__(self, url: str) -> None:
        self.first_s: list[float] = []
        self.failed: list[str] = []
        self._url = url
        self._threads: list[threading.Thread] = []

    def begin(self, number: int) -> None:
        thread = threading.Thread(target=self._ask, args=(number,))
        self._threads.append(thread)
        thread.start()

    def _ask(self, number: int) -> None:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Which is book {number}?"}]
        body = {"model": "demo", "messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(self._url + "/v1/chat/completions", json.dumps(body).encode())
        began_s, first_s, line = time.monotonic(), 0.0, b""
        try:
            with urllib.request.urlopen(request, timeout=ENDS_WITHIN_S) as answer:
                for line in filter(None, map(bytes.strip, answer)):
                    first_s = first_s or time.monotonic() - began_s
                    if line == b"data: [DONE]":
                        self.first_s.append(first_s)
                        return
        except OSError as error:
            line = repr(error).encode()
        self.failed.append(line.decode())

    def end(self) -> None:
        for thread in self._threads:
            thread.join()


def run(_: int, minutes: float = MINUTES) -> None:
    with up("--model", "demo", "--replicas", "2") as running, spinning(), watched(running) as alerts:
        nice = {os.getpriority(os.PRIO_PROCESS, pid) for pid in Victims(running).of("--replica-name")}
        before, said, traffic, begun_s = counts(running), len(running.output), Traffic(running.url), time.monotonic()
        for number in range(int(minutes * 60 / EVERY_S)):
            threading.Event().wait(max(0.0, begun_s + number * EVERY_S - time.monotonic()))
            traffic.begin(number)
        traffic.end()
        grown = {name: now - before[name] for name, now in counts(running).items()}
        warnings = running.output[said:].splitlines()  # it says nothing while all is well
    false = {rule: count for rule, count in alerts.items() if rule not in TRUE | OF_PROMPTS}
    first = sorted(traffic.first_s) or [0.0]
    p50, p90, p99 = (first[int(share * (len(first) - 1))] for share in (0.5, 0.9, 0.99))
    print(f"A fleet on Ray of two replicas of the demo model (nice {', '.join(map(str, nice))}), {minutes:g} minutes,")
    print(f"beside {usable_cpus()} processes that spin (nice {os.getpriority(os.PRIO_PROCESS, 0)}).\n")
    print("| requests | failed | retries | resumed | warnings | false alerts | first token, p50 | p90 | p99 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    figures = [len(first), len(traffic.failed), *map(int, grown.values()), len(warnings), sum(false.values())]
    print(f"| {' | '.join(map(str, figures))} | {p50:.2f} s | {p90:.2f} s | {p99:.2f} s |\n")
    print("Judgements of the dashboard in which an alert was found:", dict(alerts) or "none", flush=True)
    for line in [*warnings, *traffic.failed]:
        print(line)


def counts(running: Up) -> dict[str, float]:
    with urllib.request.urlopen(running.url + "/metrics") as answer:
        text = answer.read().decode()
    values = {name: re.findall(rf"^warmroute_router:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE) for name in COUNTED}
    return {name: sum(map(float, found)) for name, found in values.items()}


@contextmanager
def spinning() -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(usable_cpus()):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


@contextmanager
def watched(running: Up) -> Iterator[Counter[str]]:
    """Keep the dashboard's feed open, and count the judgements that found each alert."""
    found: Counter[str] = Counter()
    feed = urllib.request.urlopen(running.url + "/dashboard/feed", timeout=ENDS_WITHIN_S)

    def read() -> None:
        judged = None
        try:
            for line in feed:
                told = json.loads(line[5:]).get("alerts") if line.startswith(b"data:") else None
                if told and told["judged_at"] != judged:
                    judged = told["judged_at"]
                    found.update({one["rule"] for one in told["alerts"]})
        except (OSError, ValueError, AttributeError):  # it is closed
            return

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield found
