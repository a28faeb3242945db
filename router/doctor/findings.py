"""A finding, and the places where it is told."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from router.doctor.figures import Figures, Replica

PAGE = "docs/troubleshooting.md"


class Told(NamedTuple):
    """What a rule says when it has found something."""

    what: str  # is wrong
    turn: str  # which knob, and which way
    figures: dict[str, float | str]  # that it judged by


class Finding(Struct, frozen=True):
    rule: str
    replica: str | None  # None: it is about the router, or all replicas together
    what: str
    turn: str
    figures: dict[str, float | str]

    @property
    def anchor(self) -> str:
        return f"{PAGE}#{self.rule}"


class OfReplica(NamedTuple):
    """A rule about one replica; its name is the anchor in the page."""

    name: str
    judge: Callable[[Replica, Figures], Told | None]


class OfRouter(NamedTuple):
    """A rule about the router, or about its replicas together."""

    name: str
    judge: Callable[[Figures], Told | None]


Rule: TypeAlias = OfReplica | OfRouter
