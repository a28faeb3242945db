"""Clients' view of each process of a local Ray that is killed or stopped, and the time it takes. Linux only."""

import os
import signal
import statistics
import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

from tests.chaos.ray_here import Load, Stream, Victims, kill, under_load, up
from tests.fleet.test_up import Up

REPLICAS = 2
DEADLINE_S = 180.0
SETTLE_S = 4.0
SHORT_S, LONG_S = 5.0, 75.0
OPTIONS = ("--simulated", "--replicas", str(REPLICAS), "--", "--set=simulated_decode_tokens_per_s=20")


class Fault(NamedTuple):
    name: str
    words: tuple[str, ...]  # of the command lines of its victims
    stopped_s: float = 0.0  # 0: killed


PROCESSES = {
    "a replica": ("--replica-name",),
    "a replica's actor": ("ray::Replica",),
    "the controller's actor": ("ray::Controller",),
    "the GCS": ("gcs/gcs_server ",),
    "the raylet": ("raylet/raylet ",),
    "the dashboard's agent": ("ray::DashboardAgent",),
    "the agent of runtime environments": ("ray::RuntimeEnvAgent",),
    "the process that started Ray": ("fleet.on_ray.launch",),
}
LONG = ("a replica's actor", "the controller's actor", "the GCS", "the raylet")


class Seen(NamedTuple):
    requests: int
    refused: int
    longest_s: float  # without an answer to any request
    broken: int  # of two streams
    again_s: float  # from the fault to all replicas being ready, and staying so


def run(rounds: int) -> None:
    faults = [Fault(f"kill -9 of {name}", words) for name, words in PROCESSES.items()]
    faults += [Fault(f"{name} stopped for {SHORT_S:g} s", words, SHORT_S) for name, words in PROCESSES.items()]
    faults += [Fault(f"{name} stopped for {LONG_S:g} s", PROCESSES[name], LONG_S) for name in LONG]
    print("`warmroute up` on a Ray of its own, 2 simulated replicas, one request at a time and two streams;")
    print("medians of wall time.\n")
    print("| what happens | requests refused | longest gap | streams broken | all ready again after |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for fault in faults:
        seen = [one(fault) for _ in range(1 if fault.stopped_s else rounds)]
        requests, refused = sum(each.requests for each in seen), sum(each.refused for each in seen)
        broken, streams = sum(each.broken for each in seen), 2 * len(seen)
        gap_s, again_s = (statistics.median(getattr(each, key) for each in seen) for key in ("longest_s", "again_s"))
        row = (fault.name, f"{refused} of {requests}", f"{gap_s:.1f} s", f"{broken} of {streams}", f"{again_s:.1f} s")
        print(f"| {' | '.join(row)} |", flush=True)


def one(fault: Fault) -> Seen:
    with up(*OPTIONS) as running, under_load(running) as load:
        victims = Victims(running)
        streams = [Stream(running, tokens=60) for _ in range(2)]
        pids = victims.of(fault.words[0])[:1]
        began_s = time.monotonic()
        if fault.stopped_s:
            stop_for(pids, fault.stopped_s)
        else:
            for pid in pids:
                kill(pid)
        back_s = all_ready_since(running, load, began_s)
        said = [stream.end() for stream in streams]
        end_s = time.monotonic()
    answers = [began_s, *(each for each in load.answered_s if each > began_s), end_s]
    gap_s = max(later - earlier for earlier, later in pairwise(answers))
    broken = sum(not each.endswith(b"data: [DONE]\n\n") or b'"error"' in each for each in said)
    if os.environ.get("SHOW_STREAMS"):
        print(*(each[-300:] for each in said), sep="\n", file=sys.stderr)
    return Seen(load.asked, len(load.failed), gap_s, broken, max(0.0, back_s - began_s))


def stop_for(pids: list[int], seconds: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    threading.Event().wait(seconds)
    for pid in pids:
        with suppress(ProcessLookupError):  # it was killed as one that hangs
            os.kill(pid, signal.SIGCONT)


def ready_now(running: Up) -> bool:
    with suppress(OSError):
        return list(running.state().values()) == [True] * REPLICAS
    return False


def all_ready_since(running: Up, load: Load, began_s: float) -> float:
    """End of the last gap in readiness, observed until the fleet has been ready for a while."""
    last_bad_s, end_s = began_s, began_s + DEADLINE_S
    while (now_s := time.monotonic()) < end_s:
        if not ready_now(running):
            last_bad_s = now_s
        elif now_s - max(last_bad_s, began_s) > SETTLE_S:
            return last_bad_s
        threading.Event().wait(0.05)
    raise AssertionError(f"not ready again within {DEADLINE_S:g} s: {running.output[-2000:]} {load.failed[-1:]}")
