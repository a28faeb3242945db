"""Replay of an incident: the present code's decisions, or another policy's, beside the logged ones; as text or JSON."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from api.process.settings import Unusable
from events.recording.recording import BadRecording, Recording
from lab.incident.comparison import KINDS, Difference, Figures, kind_of
from lab.incident.facts import runs_of, survey
from lab.incident.recorded import RecordedRouter
from lab.trace.formats import read_log
from lab.writing import aligned
from router.log_lines import Decided, LogLine
from router.placement.policy import POLICIES

FACTS_PER_TELLING = 64


class Choices(Struct):
    """Sums over the chosen replicas of all compared decisions."""

    cached_tokens: float = 0
    queued_tokens: float = 0
    computed_tokens: float = 0  # the computed tokens of prompts

    def add(self, prompt_tokens: int, matched: float, queued: float) -> None:
        self.cached_tokens += matched
        self.queued_tokens += queued
        self.computed_tokens += max(1.0, prompt_tokens - matched)


class IncidentReplay(Struct, kw_only=True):
    recording: str
    log: str
    policy: str | None  # the requested one; None: the log's own
    requests: int = 0
    decisions: int = 0
    compared: int = 0
    same: int = 0
    other_matches: int = 0  # the same choice, but the cached blocks of a candidate differ
    other_load: int = 0  # the same choice, but the load of a candidate differs
    differences: list[Difference] = []
    uncovered: dict[str, int] = {}  # decisions that the recording does not cover, by reason
    sources: dict[str, str] = {}  # replica -> source of the recording
    from_log: dict[str, int] = {}  # replica -> number of its matches taken from the log
    missing: list[str] = []  # replicas with events that the recording lacks
    offset_s: dict[str, float] = {}  # the recorder's clock minus the router's wall clock, for each run
    damage: list[str] = []
    logged: Choices = field(default_factory=Choices)
    replayed: Choices = field(default_factory=Choices)

    @property
    def is_same(self) -> bool:
        return self.compared > 0 and not self.differences

    @property
    def kinds(self) -> Counter[str]:
        return Counter(one.kind for one in self.differences)


def replay(
    recording: Path,
    log: Path,
    *,
    policy: str | None = None,
    sources: Mapping[str, str] | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> IncidentReplay:
    """Replay a log against a recording; raise `api.process.settings.Unusable` for unusable files.

    `sources`: by replica, the name or endpoint of its source, if not the inferred one. `on_progress` takes percents.
    """
    try:
        tape = Recording(recording)
        lines = list(read_log(log))
    except (BadRecording, OSError) as error:
        raise Unusable(str(error)) from error
    runs = runs_of(lines)
    if not runs:
        raise Unusable(f"{log}: none of its {len(lines):,} lines says how it was decided; write it with --request-log")
    questions = [decided for run in runs for line in run.lines for decided in line.decisions]
    policies = {policy: ""} if policy is not None else {one.policy: f"{log}: " for one in questions}
    for name, where in policies.items():  # the log's own ones need not be known if another one is asked for
        if name not in POLICIES:
            raise Unusable(f"{where}the policy {name!r} is not known; use one of {', '.join(POLICIES)}")
    known = survey(tape, runs, sources or {})
    told = IncidentReplay(
        recording=str(recording),
        log=str(log),
        policy=policy,
        requests=sum(len(run.lines) for run in runs),
        decisions=len(questions),
        sources={name: tape.sources[number].name for name, number in sorted(known.sources.items())},
        missing=list(known.missing),
        offset_s={run.name: round(known.offset_s[run.name] - run.zero_s, 6) for run in runs},
        damage=list(map(str, tape.damage)),
    )
    done, total = 0, sum(len(run.facts) for run in runs)
    for run in runs:
        router = RecordedRouter(tape, run, known)
        for number, fact in enumerate(run.facts):
            router.advance(fact)
            if isinstance(fact.of, Decided):
                _compare(told, router, fact.line, fact.of)
            if number % FACTS_PER_TELLING == 0:
                on_progress(100 * (done + number) // total)
        done += len(run.facts)
        for name, count in router.guessed.items():
            told.from_log[name] = told.from_log.get(name, 0) + count
    on_progress(100)
    return told


def _compare(told: IncidentReplay, router: RecordedRouter, line: LogLine, decided: Decided) -> None:
    why_not = router.uncovered(decided)
    if why_not is not None:
        told.uncovered[why_not] = told.uncovered.get(why_not, 0) + 1
        return
    decision = router.again(line, decided, told.policy or decided.policy)
    sides = router.beside(line, decided, decision)
    chosen = None if decision.chosen is None else decision.chosen.name
    told.compared += 1
    for side in sides:  # figures of both choices are those of the replay, so that they are comparable
        figures = line.prompt_tokens, side.replayed.matched_tokens, side.replayed.queued_tokens
        if side.name == decided.chosen:
            told.logged.add(*figures)
        if side.name == chosen:
            told.replayed.add(*figures)
    if chosen == decided.chosen:
        told.same += 1
        told.other_matches += any(side.has_other_matches for side in sides)
        told.other_load += any(side.has_other_load for side in sides)
        return
    kind = kind_of(sides) if told.policy in (None, decided.policy) else "policy"
    told.differences.append(Difference(line.request_id, line.ts, decided.chosen, chosen, kind, sides))


# ---- as text and as JSON

SHOWN = 10  # differences
FIGURES = (  # the figures of choices
    ("cached tokens", "cached_tokens"),
    ("tokens to compute", "computed_tokens"),
    ("queued before them", "queued_tokens"),
)


def lines(replay: IncidentReplay) -> Iterator[str]:
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
