"""Draws a fleet: a line for each model, a table of its replicas, and their problems."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from events.tool.words import printable
from fleet.commands.view import ModelView, ReplicaView, View
from fleet.commands.words import age_of, happened, short
from router.formatting import duration

STYLES = {
    "placing": "yellow",
    "starting": "yellow",
    "ready": "green",
    "failing": "bold red",
    "draining": "cyan",
    "leaving": "cyan",
    "lost": "bold red",
    "ended": "dim",
}
UNKNOWN = "-"
INCARNATION_LETTERS = 8
LAST_WORDS = 6
MOST_IDLE = 5  # with a line each
UNLIMITED = 10_000  # columns


NONE_IDLE: Mapping[str, str] = MappingProxyType({})


class Column(NamedTuple):
    title: str
    cell: Callable[[ReplicaView, float], str]  # of a replica, at a Unix time
    right: bool = True
    dispensable: int = 0  # the highest goes first where the columns do not fit; 0: never
    usual: Sequence[str] | None = None  # left out when all say the same, if that is one of these; empty: whatever it is


COLUMNS = (
    Column("replica", lambda each, _: each.name, right=False),
    Column("node", lambda each, _: each.node or UNKNOWN, right=False, dispensable=3, usual=()),
    Column("pid", lambda each, _: str(each.pid or UNKNOWN), dispensable=5, usual=(UNKNOWN,)),
    Column(
        "incarnation",
        lambda each, _: (each.incarnation or UNKNOWN)[:INCARNATION_LETTERS],
        right=False,
        dispensable=6,
        usual=(UNKNOWN,),
    ),
    Column("state", lambda each, _: each.life, right=False),
    Column("for", lambda each, now_s: age_of(now_s - each.since) if each.since else UNKNOWN, dispensable=1),
    Column("starts", lambda each, _: str(each.starts or UNKNOWN), dispensable=4, usual=(UNKNOWN, "1")),
    Column("cached", lambda each, _: cached(each), usual=(UNKNOWN,)),
    Column("hits", lambda each, _: hits(each), dispensable=2, usual=(UNKNOWN,)),
    Column("run", lambda each, _: figure(each, each.load.running)),
    Column("wait", lambda each, _: figure(each, each.load.waiting)),
    Column("tok/s", lambda each, _: figure(each, each.generated_tokens_per_s), dispensable=1, usual=(UNKNOWN, "0")),
    Column("each", lambda each, _: duration(each.token_s or None), dispensable=2, usual=(UNKNOWN,)),
    Column("queued", lambda each, _: figure(each, each.load.queued_prefill_tokens)),
)


class Picture:
    """A fleet to print or redraw, as wide as the console."""

    def __init__(
        self, view: View, now_s: float, remark: str = "", addresses: str = "", idle: Mapping[str, str] = NONE_IDLE
    ) -> None:
        """`idle`: why a replica is given nothing, by name."""
        self._view = view
        self._idle = idle
        self._addresses = addresses
        self._now_s = now_s
        self._remark = remark

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._addresses:
            yield from sentences(console, [Text(self._addresses, style="dim")])
        yield from sentences(console, heading(self._view))
        if self._view.replicas:
            yield Text()
            yield fitting(self._view, self._now_s, console, options)
        below = (trouble(self._view), idleness(self._view, self._idle))
        for lines in (*below, [Text(self._remark, style="bold red")] if self._remark else []):
            if lines:
                yield Text()
                yield from sentences(console, lines)


def sentences(console: Console, lines: Sequence[Text]) -> Sequence[Text]:
    """Wrap lines on a terminal only, so that grep finds whole ones elsewhere."""
    for line in lines:
        line.no_wrap = not console.is_terminal
        line.overflow = "fold" if console.is_terminal else "ignore"
    return lines


# ---- above the table


def heading(view: View) -> list[Text]:
    lines = [Text("The fleet is ending", style="bold")] if view.ending else []
    if not view.models:
        lines.append(Text("The fleet has no models"))
    for model in view.models:
        style = "" if view.ending else "green" if model.ready >= model.wanted else "bold yellow"
        lines.append(Text.assemble((model.name, "bold"), "  ", (so_far(model), style), f"  {said_of(view, model)}"))
        lines[-1].rstrip()
        if model.autoscale is not None:
            lines.append(Text(autoscaled(model)))
    return lines


def so_far(model: ModelView) -> str:
    more = model.replicas - max(model.ready, model.wanted)
    beside = f", {more} more to leave" if more > 0 and not model.restarting else ""
    return f"{model.ready} of {model.wanted} ready{beside}"


def said_of(view: View, model: ModelView) -> str:
    said = [model.engine] if model.engine not in ("", "native") else []
    if model.restarting:
        mine = view.of(model.name)
        renewed = sum(each.generation >= model.generation and each.life == "ready" for each in mine)
        said.append(f"restarting: {renewed} of {model.wanted} are new")
    return ", ".join(said)


def autoscaled(model: ModelView) -> str:
    bounds = model.autoscale or {}
    between = f"from {bounds.get('min', '?')} to {bounds.get('max', '?')}"
    return f"  scaled automatically {between}" + (f": {model.autoscale_why}" if model.autoscale_why else "")


# ---- the table


def fitting(view: View, now_s: float, console: Console, options: ConsoleOptions) -> Table:
    """Drop columns with equal values, and as many others as do not fit."""
    names = dict.fromkeys([*(model.name for model in view.models), *(each.model for each in view.replicas)])
    replicas = [replica for name in names for replica in view.of(name)]
    columns = [column for column in COLUMNS if tells(column, replicas, now_s)]
    unlimited = options.update(width=UNLIMITED)
    while True:
        table = table_of(columns, replicas, now_s)
        least = max(columns, key=lambda column: column.dispensable)
        if not least.dispensable or Measurement.get(console, unlimited, table).maximum <= options.max_width:
            return table
        columns.remove(least)


def tells(column: Column, replicas: Sequence[ReplicaView], now_s: float) -> bool:
    if column.usual is None:
        return True
    cells = {column.cell(replica, now_s) for replica in replicas} - {UNKNOWN}
    return len(cells) > 1 or (bool(column.usual) and bool(cells - set(column.usual)))


def table_of(columns: Sequence[Column], replicas: Sequence[ReplicaView], now_s: float) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=number > 0, overflow="fold")
    for replica in replicas:
        style = STYLES.get(replica.life, "")
        cells = [
            Text(column.cell(replica, now_s), style=style if column.title == "state" else "") for column in columns
        ]
        table.add_row(*cells)
    return table


def cached(replica: ReplicaView) -> str:
    if not replica.serves or not replica.total_blocks:
        return UNKNOWN
    part = replica.load.cached_blocks / replica.total_blocks
    percent = f"{part:.1%}" if 0 < part < 0.0995 else f"{part:.0%}"
    return f"{percent} {short(replica.load.cached_blocks * replica.block_size)}"


def hits(replica: ReplicaView) -> str:
    """Share of the last seconds' prompt tokens that came from the cache; other engines do not tell it."""
    return f"{replica.hit_rate:.0%}" if replica.serves and replica.total_blocks else UNKNOWN


def figure(replica: ReplicaView, number: float) -> str:
    return short(number) if replica.serves else UNKNOWN


# ---- below the table


def trouble(view: View) -> list[Text]:
    lines = []
    for replica in view.replicas:
        if not replica.why or replica.life == "ready":
            continue
        lines.append(Text.assemble((replica.name, "bold"), f" {happened(replica)}"))
        words = replica.last_words[-LAST_WORDS:] if replica.life in ("failing", "starting") else ()
        lines += [Text.assemble("  | ", Text.from_ansi(word), style="dim") for word in words]
    return lines


def idleness(view: View, idle: Mapping[str, str]) -> list[Text]:
    """Say why ready replicas are given nothing."""
    names = [replica.name for replica in view.replicas if replica.life == "ready" and replica.name in idle]
    lines = [Text.assemble((name, "bold"), f" idle: {printable(idle[name])}") for name in names[:MOST_IDLE]]
    if len(names) > MOST_IDLE:
        lines.append(Text(f"{len(names) - MOST_IDLE} more are idle; warmroute top says why"))
    return lines
