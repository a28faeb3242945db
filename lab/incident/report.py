"""A replay as text and as JSON."""

from collections.abc import Iterator
from typing import Any

import msgspec

from lab.incident.comparison import KINDS, Difference, Figures
from lab.incident.replay import IncidentReplay
from lab.writing import aligned

SHOWN = 10  # differences
FIGURES = (  # the figures of choices
    ("cached tokens", "cached_tokens"),
    ("tokens to compute", "computed_tokens"),
    ("queued before them", "queued_tokens"),
)


def lines(replay: IncidentReplay) -> Iterator[str]:
    yield from _inputs(replay)
    share = f" ({replay.same / replay.compared:.2%})" if replay.compared else ""
    as_what = "as logged" if replay.policy is None else f"as logged by {replay.policy}"
    yield f"{replay.same:,} of {replay.compared:,} decisions {as_what}{share}"
    for kind, count in replay.kinds.most_common():
        yield f"  {count:,} differ: {KINDS[kind]}"  # type: ignore[index]
    if replay.other_matches:
        yield f"  {replay.other_matches:,} of the same with other cached tokens somewhere"
    if replay.other_load:
        yield f"  {replay.other_load:,} of the same with another queue somewhere"
    for reason, count in replay.uncovered.items():
        yield f"{count:,} decisions not compared: {reason}"
    if replay.policy is not None and replay.compared:
        changed = replay.compared - replay.same
        yield f"{replay.policy} would change {changed:,} of {replay.compared:,} decisions; with every queue as it was:"
        for name, field in FIGURES:
            was, is_now = getattr(replay.logged, field), getattr(replay.replayed, field)
            change = f"  {is_now / was - 1:+.1%}" if was else ""
            yield f"  {name:<20}{was:>14,.0f} -> {is_now:>14,.0f}{change}"
    for one in replay.differences[:SHOWN]:
        yield ""
        yield from difference_lines(one)
    if len(replay.differences) > SHOWN:
        yield f"\nand {len(replay.differences) - SHOWN:,} more (--json has them all)"


def as_json(replay: IncidentReplay) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(replay)
    return {**told, "is_same": replay.is_same, "kinds": dict(replay.kinds)}


def _inputs(replay: IncidentReplay) -> Iterator[str]:
    yield f"{replay.requests:,} requests of {replay.log}, {replay.decisions:,} decisions"
    named = [name if name == source else f"{name} = {source}" for name, source in replay.sources.items()]
    yield f"{replay.recording}: {', '.join(named) or 'none of its sources is a replica of the log'}"
    for damage in replay.damage:
        yield f"damaged: {damage}"
    for run, offset_s in replay.offset_s.items():
        if abs(offset_s) >= 0.001:
            yield f"clocks: the recorder's is {offset_s * 1000:+,.0f} ms from the router's (run {run})"
    if replay.missing:
        yield f"not recorded: {', '.join(replay.missing)} (--source NAME=ENDPOINT, if the recording has them)"
    if replay.from_log:
        counted = ", ".join(f"{name} {count:,}" for name, count in sorted(replay.from_log.items()))
        yield f"cached tokens taken from the log: {counted}"


def difference_lines(one: Difference) -> Iterator[str]:
    yield f"{one.request_id}: logged {one.logged or 'nobody'}, replayed {one.replayed or 'nobody'} ({one.kind})"
    rows: list[tuple[str, ...]] = [("", "cached", "queue", "busy", "tokens/s", "cost", "batch")]
    marks = {one.logged: " <- logged", one.replayed: " <- replayed"} if one.logged != one.replayed else {}
    for side in one.candidates:
        logged, replayed = _cells(side.logged), _cells(side.replayed)
        rows.append((side.name + marks.get(side.name, ""), *logged))
        if logged != replayed:
            rows.append(
                ("  replayed", *(now if now != was else "." for was, now in zip(logged, replayed, strict=True)))
            )
    yield from aligned((f"  {first}", *rest) for first, *rest in rows)


def _cells(figures: Figures) -> tuple[str, ...]:
    return (
        f"{figures.matched_tokens:,.0f}",
        f"{figures.queued_tokens:,.0f}",
        f"{figures.busy:,}",
        f"{figures.prefill_tokens_per_s:,.0f}",
        "-" if figures.cost_s is None else f"{figures.cost_s:.4f}",
        "-" if figures.seq is None else f"{figures.seq:,}",
    )
