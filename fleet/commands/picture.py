"""Draws a fleet: a line for each model, a table of its replicas, and their problems."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from events.tool.words import printable
from fleet.commands.words import age_of, happened
from fleet.control.record import ModelView, ReplicaView, View
from router.console.formatting import Column, duration, short, table_of

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
MAX_IDLE = 5  # replicas that have a line each


NONE_IDLE: Mapping[str, str] = MappingProxyType({})


def draw(console: Console, view: View, now_s: float, addresses: str = "", idle: Mapping[str, str] = NONE_IDLE) -> None:
    """Print a fleet, as wide as the console. `idle`: why a replica is given nothing, by name."""
    parts: list[RenderableType] = [Text(addresses, style="dim")] if addresses else []
    parts += heading(view)
    if view.replicas:
        names = dict.fromkeys([*(model.name for model in view.models), *(each.model for each in view.replicas)])
        replicas = [replica for name in names for replica in view.of(name)]
        parts += [Text(), table_of(columns_at(now_s), replicas, console.width, header_style="dim")]
    for lines in (trouble(view), idleness(view, idle)):
        parts += [Text(), *lines] if lines else []
    for part in parts:  # lines are wrapped on a terminal only, so that grep finds whole ones elsewhere
        console.print(part, crop=False, soft_wrap=isinstance(part, Text) and not console.is_terminal)


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
            between = f"from {model.autoscale.get('min', '?')} to {model.autoscale.get('max', '?')}"
            why = f": {model.autoscale_why}" if model.autoscale_why else ""
            lines.append(Text(f"  scaled automatically {between}{why}"))
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


# ---- the table


def columns_at(now_s: float) -> tuple[Column[ReplicaView], ...]:
    """The columns at a Unix time; those that tell nothing are left out."""

    def column(title: str, text: Callable[[ReplicaView], str], *usual: str, **how: Any) -> Column[ReplicaView]:
        """`usual`: left out when all say the same, if that is one of these."""
        return Column(title, text, is_shown=lambda replicas: bool({*map(text, replicas)} - {*usual}), **how)

    return (
        Column("replica", lambda each: each.name, right=False),
        Column(
            "node",
            lambda each: each.node or UNKNOWN,
            right=False,
            drop_order=3,
            is_shown=lambda replicas: len({each.node for each in replicas} - {None, ""}) > 1,
        ),
        column("pid", lambda each: str(each.pid or UNKNOWN), UNKNOWN, drop_order=5),
        column(
            "incarnation",
            lambda each: (each.incarnation or UNKNOWN)[:INCARNATION_LETTERS],
            UNKNOWN,
            right=False,
            drop_order=6,
        ),
        Column("state", lambda each: each.life, right=False, style=lambda each: STYLES.get(each.life, "")),
        Column("for", lambda each: age_of(now_s - each.since) if each.since else UNKNOWN, drop_order=1),
        column("starts", lambda each: str(each.starts or UNKNOWN), UNKNOWN, "1", drop_order=4),
        column("cached", cached, UNKNOWN),
        column("hits", hits, UNKNOWN, drop_order=2),
        Column("run", lambda each: figure(each, each.load.running)),
        Column("wait", lambda each: figure(each, each.load.waiting)),
        column("tok/s", lambda each: figure(each, each.generated_tokens_per_s), UNKNOWN, "0", drop_order=1),
        column("each", lambda each: duration(each.token_s or None), UNKNOWN, drop_order=2),
        Column("queued", lambda each: figure(each, each.load.queued_prefill_tokens)),
    )


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
    lines = [Text.assemble((name, "bold"), f" idle: {printable(idle[name])}") for name in names[:MAX_IDLE]]
    if len(names) > MAX_IDLE:
        lines.append(Text(f"{len(names) - MAX_IDLE} more are idle; warmroute top says why"))
    return lines
