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
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

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
    PICTURE.write_text(picture(measured))
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


# ---- the picture: greys and two colours on white, so that it can be read on a dark page too

WIDTH, HEIGHT = 960, 560
LEFT, RIGHT = 70, 890
HITS, TTFT, READY, TEXT, GRID = "#1f6feb", "#c2410c", "#9aa4b2", "#444c56", "#e3e7ec"


class Panel(NamedTuple):
    """An area with the time from left to right, and from 0 upwards to `highest`."""

    top: float
    bottom: float
    highest: float

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * value / self.highest

    def line(self, values: Sequence[float | None], colour: str) -> str:
        """A line, broken at seconds without a value; points are in the middle of their second."""
        pieces = []
        for known, group in groupby(enumerate(values), key=lambda each: each[1] is not None):
            if known:
                points = " ".join(f"{across(second + 0.5):.1f},{self.y(value or 0):.1f}" for second, value in group)
                pieces.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        return "".join(pieces)

    def steps(self, values: Sequence[int], colour: str) -> str:
        corners = [
            point
            for second, value in enumerate(values)
            for point in ((second, value), (min(second + 1, SPAN_S), value))
        ]
        points = " ".join(f"{across(second):.1f},{self.y(value):.1f}" for second, value in corners)
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'

    def grid(self, values: Iterable[float], label: Callable[[float], str]) -> str:
        return "".join(
            f'<path d="M{LEFT} {self.y(value):.1f}H{RIGHT}" stroke="{GRID}"/>'
            + words(LEFT - 8, self.y(value) + 4, label(value), anchor="end")
            for value in values
        )


def across(second: float) -> float:
    return LEFT + (RIGHT - LEFT) * second / SPAN_S


def words(x: float, y: float, text: str, *, anchor: str = "start", colour: str = TEXT, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{turn}>{text}</text>'


def picture(measured: Run) -> str:
    ttft_ms = [value and 1000 * value for value in measured.by_second(ttft_p50_s)]
    step_ms = round_step(max(value or 0 for value in ttft_ms))
    hits, count = Panel(80, 290, 1.0), Panel(80, 290, 8)
    ttft = Panel(340, 500, 4 * step_ms)
    title = "Token hit rate, ready replicas and time to first token of a fleet that is restarted and scaled under load"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img"><title>{title}</title>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
        *(shade(change, hits.top, ttft.bottom) for change in measured.changes),
        hits.grid((0, 0.25, 0.5, 0.75, 1), lambda value: f"{value:.0%}"),
        *(words(RIGHT + 8, count.y(value) + 4, str(value)) for value in range(0, 9, 2)),
        ttft.grid([step_ms * number for number in range(5)], lambda value: f"{value:g}"),
        *(words(across(second), ttft.bottom + 20, str(second), anchor="middle") for second in range(0, SPAN_S + 1, 10)),
        words((LEFT + RIGHT) / 2, ttft.bottom + 42, "seconds", anchor="middle"),
        words(22, (hits.top + hits.bottom) / 2, "token hit rate", anchor="middle", colour=HITS, turned=True),
        words(WIDTH - 22, (hits.top + hits.bottom) / 2, "ready replicas", anchor="middle", turned=True),
        words(22, (ttft.top + ttft.bottom) / 2, "TTFT p50, ms", anchor="middle", colour=TTFT, turned=True),
        words(LEFT, 30, f"{len(measured.heard):,} requests, {len(measured.failed)} failed"),
        count.steps(measured.ready[:SPAN_S], READY),
        hits.line(measured.by_second(hit_rate), HITS),
        ttft.line(ttft_ms, TTFT),
        *(failure(at_s, hits) for at_s, _ in measured.failed if at_s >= 0),
    ]
    return "\n".join(parts) + "\n</svg>\n"


def shade(change: Change, top: float, bottom: float) -> str:
    begin, end = across(change.began_s), across(change.ended_s)
    return (
        f'<rect x="{begin:.1f}" y="{top}" width="{end - begin:.1f}" height="{bottom - top}" fill="#f1f3f6"/>'
        f'<path d="M{begin:.1f} {top - 18}V{bottom}M{end:.1f} {top}V{bottom}" '
        f'stroke="{TEXT}" stroke-dasharray="4 4"/>' + words(begin + 5, top - 8, change.name)
    )


def failure(at_s: float, panel: Panel) -> str:
    return f'<circle cx="{across(at_s):.1f}" cy="{panel.bottom}" r="4" fill="#b91c1c"/>'


def round_step(highest: float) -> float:
    """Round distance between the labels of an axis with four steps."""
    power: float = 10.0 ** math.floor(math.log10(max(highest, 1) / 4))
    return next(factor * power for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 10) if 4 * factor * power >= highest)
