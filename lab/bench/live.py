"""The progress of a run, on terminals only."""

import asyncio
from math import ceil

from rich.console import Console
from rich.progress import Progress

from events.tool.words import seconds
from fleet.display import Display
from lab.bench.load import LoadGenerator
from lab.percentiles import percentile
from router.members.spec import Target

SHOW_EVERY_S = 0.5  # drawing takes time that the load generator needs


class Live(Display):
    """To be used as a context manager around `measured`, which is given `load`."""

    def __init__(self, rounds: int, console: Console | None = None) -> None:
        console = console or Console(stderr=True, highlight=False)
        super().__init__("asking for the model", console, quiet=True, auto_refresh=False)
        self._rounds = rounds
        self._load: LoadGenerator | None = None

    def load(self, load: LoadGenerator, target: Target, number: int) -> None:
        if self.bar is None:
            return
        begins = self._load is None
        self._load = load
        title = target.url if self._rounds == 1 else f"round {number + 1} of {self._rounds}: {target.url}"
        self.begin(title, progress(load)[1])
        if begins:
            self._show(self.bar)

    def _show(self, bar: Progress) -> None:
        assert self._load is not None
        self.step(*progress(self._load), state(self._load))
        bar.refresh()
        asyncio.get_running_loop().call_later(SHOW_EVERY_S, self._show, bar)


def progress(load: LoadGenerator) -> tuple[int, int | None]:
    """Return how far a run is, and of what: in milliseconds if it has a time limit, else in requests."""
    for_s, left_s = load.limits.for_s, load.left_s
    if for_s is None:
        return load.done, load.limits.requests
    return 0 if left_s is None else round(1000 * (for_s - left_s)), round(1000 * for_s)


def state(load: LoadGenerator) -> str:
    total = f"/{load.limits.requests:,}" if load.limits.requests is not None else ""
    words = [f"{load.done:,}{total} done", f"{load.in_flight:,} in flight"]
    if (left_s := load.left_s) is not None:
        words.append(f"{ceil(left_s)} s left" if left_s else "waiting for the last answers")
    if load.ttfts_s:
        p50, p99 = (seconds(percentile(load.ttfts_s, share)) for share in (0.5, 0.99))
        words.append(f"TTFT {p50}, p99 {p99}")
    if load.errors:
        words.append(f"{load.errors:,} failed")
    return ", ".join(words)
