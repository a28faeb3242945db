"""The router's actions from a request log, in their original order; pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from router.log_lines import Decided, LogLine, Sending, Weighed


class Asked(NamedTuple):
    """The router looked for a replica."""

    order: int
    at_s: float
    line: LogLine
    decided: Decided


class _OfSending(Struct, frozen=True, eq=False):
    order: int
    at_s: float
    line: LogLine
    sending: Sending


class Sent(_OfSending, frozen=True, eq=False):
    """The request went to a replica."""


class Begun(_OfSending, frozen=True, eq=False):
    """A good response head came, or the first token of a streamed answer."""


class Ended(_OfSending, frozen=True, eq=False):
    """The answer was complete, it failed, or its client left."""


Fact: TypeAlias = Asked | Sent | Begun | Ended


class Run(NamedTuple):
    name: str
    lines: Sequence[LogLine]
    facts: Sequence[Fact]  # in the router's order

    @property
    def weighed(self) -> Iterable[Weighed]:
        return (one for line in self.lines for decided in line.decisions for one in decided.candidates)

    @property
    def zero_s(self) -> float:
        """The wall-clock time at 0 of the router's clock: a median over its lines, as wall clocks are corrected."""
        zeros = sorted(line.ts - line.at_s for line in self.lines)
        return zeros[len(zeros) // 2]


def runs_of(lines: Iterable[LogLine]) -> list[Run]:
    """Runs in the order of their start; lines without decisions come from other writers and are left out."""
    by_name: dict[str, list[LogLine]] = {}
    for line in lines:
        if line.decisions:
            by_name.setdefault(line.run, []).append(line)
    found = [
        Run(name, own, sorted((fact for line in own for fact in facts_of(line)), key=lambda fact: fact.order))
        for name, own in by_name.items()
    ]
    return sorted(found, key=lambda run: run.zero_s + run.facts[0].at_s)


def facts_of(line: LogLine) -> Iterable[Fact]:
    for decided in line.decisions:
        yield Asked(decided.order, decided.at_s, line, decided)
    for one in line.sendings:
        yield Sent(one.sent_order, one.sent_at_s, line, one)
        if one.begun_order >= 0:
            yield Begun(one.begun_order, one.begun_at_s, line, one)
        if one.ended_order >= 0:
            yield Ended(one.ended_order, one.ended_at_s, line, one)
