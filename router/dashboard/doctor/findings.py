"""Rules and their findings."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from router.dashboard.doctor.figures import Figures, ReplicaFigures

PAGE = "docs/troubleshooting.md"


class Diagnosis(NamedTuple):
    """A problem, its remedy, and the figures that show it."""

    what: str
    turn: str  # the option to change, and which way
    figures: dict[str, float | str]


class Finding(Struct, frozen=True):
    rule: str
    replica: str | None  # None: about the router, or all replicas together
    what: str
    turn: str
    figures: dict[str, float | str]

    @property
    def anchor(self) -> str:
        return f"{PAGE}#{self.rule}"


class ReplicaRule(NamedTuple):
    """A rule about one replica; its name is the anchor in the page."""

    name: str
    judge: Callable[[ReplicaFigures, Figures], Diagnosis | None]


class RouterRule(NamedTuple):
    """A rule about the router, or about its replicas together."""

    name: str
    judge: Callable[[Figures], Diagnosis | None]


Rule: TypeAlias = ReplicaRule | RouterRule
