"""Restart and scale a fleet under load: hit rate and time to first token, second by second. Linux only.

It redraws docs/rolling.svg. It is one run in real time, whatever the number of rounds.
"""

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.bench.drawing import drawing
from tests.chaos.conversations import Heard
from tests.chaos.rolled import Rolled, talked_to, up

PICTURE = Path(__file__).parents[2] / "docs" / "rolling.svg"
REPLICAS = 4
CONVERSATIONS = 48
THINKS_S = 2.0
WARM_UP_S = 20.0
SPAN_S = 90
AROUND_S = 10  # before and after a change: the span of its figures
AS_BEFORE = 0.9  # share of the earlier hit rate at which the fleet counts as warm again
# Earliest time, name in the picture, command.
CHANGES = (
    (12.0, "rolling restart", ("restart", "demo")),
    (44.0, "scale 4 to 6", ("scale", "demo", "6")),
    (64.0, "scale 6 to 3", ("scale", "demo", "3")),
)


class Change(NamedTuple):
    name: str
    began_s: float
    ended_s: float
    fewest_ready: int


class Run(NamedTuple):
    """Times are seconds since it began."""

    heard: list[Heard]
    failed: list[tuple[float, str]]
    ready: list[int]  # second by second
    changes: list[Change]

    def during(self, begin_s: float, end_s: float) -> list[Heard]:
        return [each for each in self.heard if begin_s <= each.ended_s < end_s]

    def by_second(self, figure: Callable[[Sequence[Heard]], float | None]) -> list[float | None]:
        return [figure(self.during(second, second + 1)) for second in range(SPAN_S)]


def run(rounds: int) -> None:  # noqa: ARG001
    measured = asyncio.run(measure())
    print("| under load | took | hit rate before | until 10 s after | in the worst second | warm again after ", end="")
    print("| TTFT p50 before | until 10 s after | in the worst second | failed requests |")
    print("| --- " * 10 + "|")
    for change in measured.changes:
        print(f"| {change.name} | {' | '.join(figures(measured, change))} |")
    fewest = ", ".join(f"{change.fewest_ready} ({change.name})" for change in measured.changes)
    print(f"\n{len(measured.heard):,} requests, {len(measured.failed)} failed; fewest ready replicas: {fewest}.")
    for at_s, why in measured.failed[:5]:
        print(f"  after {at_s:.1f} s: {why[:200]}")
    draw(measured)
    print(f"{PICTURE.name} is written.\n")


def figures(measured: Run, change: Change) -> Iterable[str]:
    """Cells of a change's row: requests from before it until AROUND_S after it."""
    end_s = change.ended_s + AROUND_S
    before = measured.during(change.began_s - AROUND_S, change.began_s)
    during = measured.during(change.began_s, change.ended_s + AROUND_S)  # including the cost afterwards
    seconds = range(int(change.began_s), int(end_s))
    hits, ttfts = measured.by_second(hit_rate), measured.by_second(ttft_p50_s)
    failed = sum(change.began_s <= at_s < end_s for at_s, _ in measured.failed)
    yield f"{change.ended_s - change.began_s:.1f} s"
    yield percent(hit_rate(before))
    yield percent(hit_rate(during))
    yield percent(min((hits[second] for second in seconds), key=lambda rate: 1 if rate is None else rate))
    yield warm_again(hits, change, hit_rate(before) or 0)
    yield milliseconds(ttft_p50_s(before))
    yield milliseconds(ttft_p50_s(during))
    yield milliseconds(max((ttfts[second] for second in seconds), key=lambda ttft_s: ttft_s or 0))
    yield f"**{failed}**"


def warm_again(hits: Sequence[float | None], change: Change, before: float) -> str:
    """Seconds from the end of the change to the last second with a lower hit rate, before the next change."""
    later = [begin_s for begin_s, *_ in CHANGES if begin_s > change.ended_s]
    seconds = range(int(change.ended_s), int(min(later, default=SPAN_S)))
    cold = [second for second in seconds if (hits[second] or 0) < AS_BEFORE * before]
    return f"{max(0, cold[-1] + 1 - change.ended_s):.0f} s" if cold else "0 s"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"


def percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"


def hit_rate(heard: Sequence[Heard]) -> float | None:
    prompt_tokens = sum(each.prompt_tokens for each in heard)
    return sum(each.cached_tokens for each in heard) / prompt_tokens if prompt_tokens else None


def ttft_p50_s(heard: Sequence[Heard]) -> float | None:
    streamed = [each.ttft_s for each in heard if each.ttft_s is not None]
    return statistics.median(streamed) if streamed else None


# ---- the run


async def measure() -> Run:
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="r-") as folder,
        up(Path(folder), "--simulated", "--replicas", str(REPLICAS)) as running,
    ):
        async with talked_to(running, Path(folder), CONVERSATIONS, THINKS_S) as rolled:
            await asyncio.sleep(WARM_UP_S)
            measured = await change_it(rolled)
        running.end()
        return measured


async def change_it(rolled: Rolled) -> Run:
    began_s = time.monotonic()
    ready: list[int] = []
    counting = asyncio.create_task(count_ready(rolled, ready))
    changes = []
    for at_s, name, words in CHANGES:
        await asyncio.sleep(began_s + at_s - time.monotonic())
        change_s = time.monotonic()
        rolled.watched.fewest_ready = rolled.watched.now["ready"]
        await rolled.warmroute(*words)
        changes.append(Change(name, change_s - began_s, time.monotonic() - began_s, rolled.watched.fewest_ready))
    await asyncio.sleep(began_s + SPAN_S - time.monotonic())
    counting.cancel()
    with suppress(asyncio.CancelledError):
        await counting
    heard = [each._replace(ended_s=each.ended_s - began_s) for each in rolled.talking.heard]
    failed = [(at_s - began_s, why) for at_s, why in rolled.talking.failed]
    return Run([each for each in heard if each.ended_s >= 0], failed, ready, changes)


async def count_ready(rolled: Rolled, ready: list[int]) -> None:
    began_s = time.monotonic()
    while True:
        ready.append(rolled.watched.now["ready"])
        await asyncio.sleep(began_s + len(ready) - time.monotonic())


def draw(measured: Run) -> None:
    title = f"{len(measured.heard):,} requests, {len(measured.failed)} failed"
    with drawing(PICTURE, title=title, x="seconds", y="token hit rate") as axes:
        seconds = [second + 0.5 for second in range(SPAN_S)]
        axes.plot(seconds, [rate if rate is not None else math.nan for rate in measured.by_second(hit_rate)])
        axes.set_ylim(0, 1)
        waits = axes.twinx()
        waits.set_ylabel("TTFT p50, ms")
        waits.plot(seconds, [1000 * (s or math.nan) for s in measured.by_second(ttft_p50_s)], color="C1")
        for change in measured.changes:
            axes.axvspan(change.began_s, change.ended_s, alpha=0.1)
            axes.text(change.began_s, 1.02, change.name)
