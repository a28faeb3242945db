"""How far a run is, on a terminal while it goes on; nothing elsewhere."""

import asyncio
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from events.tool.words import seconds
from lab.bench.load import Load
from lab.bench.percentiles import percentile
from router.target import Target

SHOW_EVERY_S = 0.5  # drawing takes time that the load generator needs


class Live:
    """To be used as a context manager around `measured`, which is given `load`."""

    def __init__(self, rounds: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._rounds = rounds
        self._bar: Progress | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
            said = TextColumn("{task.fields[said]}", markup=False)
            self._bar = Progress(
                *columns, said, TimeElapsedColumn(), console=self._console, transient=True, auto_refresh=False
            )
            self._task = self._bar.add_task("asking for the model", total=None, said="")
        self._load: Load | None = None

    def load(self, load: Load, target: Target, number: int) -> None:
        if self._bar is None:
            return
        begins = self._load is None
        self._load = load
        title = target.url if self._rounds == 1 else f"round {number + 1} of {self._rounds}: {target.url}"
        self._bar.reset(self._task, total=load.limits.requests, description=title, said="")
        if begins:
            self._show()

    def _show(self) -> None:
        assert self._bar is not None and self._load is not None
        load = self._load
        self._bar.update(self._task, completed=load.done, said=state(load))
        self._bar.refresh()
        asyncio.get_running_loop().call_later(SHOW_EVERY_S, self._show)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def state(load: Load) -> str:
    total = f"/{load.limits.requests:,}" if load.limits.requests is not None else ""
    words = [f"{load.done:,}{total} done", f"{load.in_flight:,} in flight"]
    if load.ttfts_s:
        p50, p99 = (seconds(percentile(load.ttfts_s, share)) for share in (0.5, 0.99))
        words.append(f"TTFT {p50}, p99 {p99}")
    if load.errors:
        words.append(f"{load.errors:,} failed")
    return ", ".join(words)
