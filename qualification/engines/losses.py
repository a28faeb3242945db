"""Print how long the router takes to be exact again after losses, and what it claims meanwhile.

`python -m qualification.engines.losses [EVENT...]`: a small cache, a short replay buffer, and one request at a time.
With `--mirror` the router follows `warmroute events mirror` in place of the engine.
"""

import argparse
import asyncio
import math
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx2
from msgspec import Struct

from qualification.engines import traffic
from qualification.engines.engine import MODEL, Engine, SGLang, ready
from qualification.engines.judge import Tally, drive, judge
from qualification.engines.printing import check, show
from qualification.engines.traffic import Asked, requests
from router.members.predictions import JUDGED_WITHIN_S
from tests.chaos.replicas import free_ports
from tests.chaos.routers import RouterProcess, router
from tests.events.processes import Tool

BLOCKS = 420
BUFFER, HWM = 5, 10
AT_ONCE = 5  # requests between two looks at the router
MAX_REQUESTS = 1500  # until it has to be exact again
MAX_FOR_GOOD = 200  # where it will not be
AFTERWARDS = 100  # more requests, once it is
MANY = 600  # long prompts of another client: enough to fill every queue between engine and router


class Mirror:
    """`warmroute events mirror` beside an engine, from its first batch on."""

    def __init__(self, engine: Engine) -> None:
        first = free_ports(4)
        ends = [f"tcp://127.0.0.1:{port}" for port in range(first, first + 4)]
        self.sockets = "events={},replay={},status={},snapshot={}".format(*ends)
        self._words = ("mirror", engine.events, "--replay", engine.replay, "--model", MODEL, "--bind", ends[0])
        self.start()

    def start(self) -> None:
        """Until it has asked the engine for the beginning."""
        self._process = Tool(*self._words)
        asked = re.compile("nothing published|joined at|'sure': True")
        self._process.wait_for(lambda lines: asked.search(str(lines)), "the mirror follows the engine")

    def end(self) -> None:
        self._process.end(signal.SIGKILL)


class Scene(Struct):
    """An engine, a router, and the requests that go through it."""

    engine: Engine
    mirror: Mirror | None
    front: RouterProcess
    asked: Iterator[Asked]
    elsewhere: Iterator[Asked]  # other clients' requests, past the router
    sent: int = 0  # of ours
    errors: list[str] = []  # among their answers

    def through(self, count: int) -> None:
        self.errors += asyncio.run(drive(self.front.url, self.asked, count, 1)).errors
        self.sent += count

    def past(self, count: int, clients: int = 4) -> None:
        asyncio.run(drive(self.engine.url, self.elsewhere, count, clients))

    @property
    def is_exact(self) -> bool:
        return bool(self.front.get("/replicas").json["replicas"][0]["state"] == "exact")

    @property
    def lost_batches(self) -> int:
        return int(self.front.get("/replicas").json["replicas"][0]["events"]["lost_batches"])

    def counter(self, name: str) -> int:
        """The router's own count."""
        text = httpx2.get(f"{self.front.url}/metrics").text
        found = re.search(rf"^warmroute_router:{name}_total{{.*}} (.+)$", text, re.M)
        return int(float(found[1])) if found else 0


def late_join(scene: Scene) -> None:
    """Nothing: the router has come late."""


def overflow(scene: Scene) -> None:
    """The router stands still while another client fills every queue."""
    scene.front.process.send_signal(signal.SIGSTOP)
    try:
        asyncio.run(drive(scene.engine.url, long_prompts(1), MANY, 4))
        scene.past(20)  # after these, the replay buffer holds only a small part of the cache
    finally:
        scene.front.process.send_signal(signal.SIGCONT)


def standstill(scene: Scene) -> None:
    """The router stands still for a moment, and all that was sent meanwhile is waiting for it."""
    scene.front.process.send_signal(signal.SIGSTOP)
    try:
        scene.past(8)
    finally:
        scene.front.process.send_signal(signal.SIGCONT)


def kill(scene: Scene) -> None:
    """The engine dies with all of its processes, and is started again."""
    scene.engine.restart()


def reset(scene: Scene) -> None:
    """Somebody empties the cache, which vLLM announces with its next step."""
    answer = httpx2.post(f"{scene.engine.url}{scene.engine.reset_path}", timeout=30)
    assert answer.status_code == 200, answer.text


def mirror_restart(scene: Scene) -> None:
    """The mirror dies and comes back, when the engine has forgotten how its stream began."""
    if scene.mirror is not None:
        scene.mirror.end()
        scene.mirror.start()


EVENTS: dict[str, Callable[[Scene], None]] = {
    "late join": late_join,
    "overflow": overflow,
    "standstill": standstill,
    "reset": reset,
    "kill -9": kill,
    "mirror": mirror_restart,
}
# A pool that is not seen to turn over leaves a router partial until the cache starts anew, as does its mirror.
FOR_GOOD = {SGLang.kind: ("late join", "overflow")}
HEADING = f"{'exact after':>12} {'requests':>9} {'claims':>7} {'differ':>7} {'late':>5} {'wrong':>6} {'lost':>6}"


def long_prompts(seed: int) -> Iterator[Asked]:
    """Prompts that nearly fill the model's length, with nothing in common."""
    number = seed
    while True:
        number += 1
        prompt = [(number * 7919 + position * 31) % 4000 + 300 for position in range(3800)]
        yield Asked("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 2}, traffic.unremembered)


class Measured(Struct):
    """`tally` is of all predictions; `late` and `wrong` are the router's own counts of those that differed."""

    took_s: float
    requests: int
    tally: Tally
    late: int
    wrong: int
    lost_batches: int

    @property
    def line(self) -> str:
        took = f"{self.took_s:.1f} s" if self.took_s < math.inf else "never"
        differ = self.tally.exact - self.tally.equal
        return (
            f"{took:>12} {self.requests:9} {self.tally.exact:7} {differ:7} {self.late:5} {self.wrong:6}"
            f" {self.lost_batches:6}"
        )


def for_good(name: str, running: Engine, mirror: Mirror | None) -> bool:
    return running.kind in FOR_GOOD and name in (FOR_GOOD[running.kind] if mirror is None else ("mirror",))


def measure(name: str, running: Engine, seed: int, mirror: Mirror | None = None) -> Measured:
    """Let the event happen, and send requests until the router is exact again, and some more."""
    event = EVENTS[name]
    sockets = f"events={running.events},replay={running.replay}" if mirror is None else mirror.sockets
    source = f"url={running.url},engine={running.kind},{sockets}"
    options = ("--replica", source, "--model-dir", f"m={running.folder / 'model'}", "--set=decisions=4000")
    ours, others = requests(seed, traffic.chat), requests(seed + 100, traffic.chat)
    if event is late_join:
        asyncio.run(drive(running.url, others, AFTERWARDS, 4))
    with router(*options) as front:
        scene = Scene(running, mirror, front, ours, others)
        if event is not late_join:
            if not scene.is_exact and (running.kind == SGLang.kind or mirror is not None):
                reset(scene)  # nothing else makes one exact that came late
            while not scene.is_exact and scene.sent < MAX_REQUESTS:
                scene.through(AT_ONCE)
            scene.through(AFTERWARDS)
        event(scene)
        since_s, before = time.monotonic(), scene.sent
        scene.through(1)
        most = MAX_FOR_GOOD if for_good(name, running, mirror) else MAX_REQUESTS
        while not scene.is_exact and scene.sent - before < most:
            scene.through(AT_ONCE)
        took_s, needed = time.monotonic() - since_s if scene.is_exact else math.inf, scene.sent - before
        scene.through(AFTERWARDS)
        time.sleep(JUDGED_WITHIN_S)
        return Measured(
            took_s,
            needed,
            judge(scene.sent, front.decisions(4000), running.found(), scene.errors),
            scene.counter("overtaken_predictions"),
            scene.counter("wrong_predictions"),
            scene.lost_batches,
        )


def small_engine(folder: Path, kind: str = Engine.kind) -> AbstractContextManager[Engine]:
    """An engine with a small cache that keeps few batches for replay."""
    events = {"buffer_steps": BUFFER, "hwm": HWM}
    made = SGLang if kind == SGLang.kind else Engine
    return ready(made(folder / "hits.jsonl", {}, (), blocks=BLOCKS, events=events))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m qualification.engines.losses", description=__doc__)
    parser.add_argument("events", nargs="*", metavar="EVENT", help=f"by default all of: {', '.join(EVENTS)}")
    parser.add_argument("--engine", choices=(Engine.kind, SGLang.kind), default=Engine.kind)
    parser.add_argument("--mirror", action="store_true", help="let the router follow a mirror of the engine")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    args = parser.parse_args()
    check(parser, args.events, EVENTS, "event")
    print(f"{'':12} {HEADING}", flush=True)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, small_engine(Path(folder), args.engine) as running:
        mirror = Mirror(running) if args.mirror else None
        try:
            for name in args.events or (name for name in EVENTS if mirror is not None or name != "mirror"):
                measured = measure(name, running, args.seed, mirror)
                show(f"{name:12} {measured.line}", measured.tally)
                wrong += measured.wrong
        finally:
            if mirror is not None:
                mirror.end()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
