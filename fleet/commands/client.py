"""Talks to a fleet's controller over HTTP, also while it restarts, perhaps elsewhere.

Every failure is an error of one line that says what to do.
"""

import time
from collections.abc import Callable
from typing import Self, TypeVar

import click
from msgspec import Struct

from fleet.commands.addresses.local_fleets import Where, listed, running_fleets
from fleet.control.record import ModelView, View
from fleet.plan import FleetPlan
from router.console.asking import Client, Server, Unreachable

T = TypeVar("T")

CONTROLLER = Server(
    "controller",
    "see --fleet",
    "give the fleet's key as WARMROUTE_FLEET_KEY",
    more=lambda: f"; is the fleet running? On this machine there are: {listed(running_fleets())}",
)
TIMEOUT_S = 10.0


class _Names(Struct):
    replicas: tuple[str, ...]


class FleetClient(Client):
    def __init__(self, url: str, key: str | None = None) -> None:
        super().__init__(url, key, CONTROLLER, TIMEOUT_S)

    def view(self) -> View:
        return self.read(self.answer())

    def answer(self) -> bytes:
        return self.ask("GET", "/fleet")

    def read(self, answer: bytes) -> View:
        return self.decode("/fleet", answer, View)

    def scale(self, model: str, count: int) -> ModelView:
        return self.post("/models/scale", {"model": model, "replicas": count}, ModelView)

    def restart(self, model: str, surge: int = 0) -> ModelView:
        return self.post("/models/restart", {"model": model, "surge": surge}, ModelView)

    def drain(self, replica: str, wanted: bool = True) -> None:
        self.ask("POST", "/replicas/drain", {"replica": replica, "drain": wanted})

    def drain_node(self, node: str, wanted: bool = True) -> tuple[str, ...]:
        """Return the replicas that run there."""
        return self.post("/nodes/drain", {"node": node, "drain": wanted}, _Names).replicas

    def log(self, replica: str, lines: int) -> str:
        content = self.ask("GET", "/replicas/log", parameters={"replica": replica, "lines": str(lines)})
        return content.decode(errors="replace")

    def want(self, plan: FleetPlan) -> None:
        self.ask("PUT", "/fleet", plan)

    def end(self) -> None:
        self.ask("POST", "/end", {})


class Poller:
    """A fleet that is polled; to be closed, or used as a context manager."""

    def __init__(self, locate: Callable[[], Where]) -> None:
        self.why = ""  # why there is no answer
        self.is_news = False  # the last question was the first without an answer
        self._locate = locate
        self._away_since_s: float | None = None
        where = locate()
        self.fleet = FleetClient(where.url, where.key)

    @property
    def away_s(self) -> float:
        """Seconds since the controller answered last."""
        return 0.0 if self._away_since_s is None else time.monotonic() - self._away_since_s

    def look(self) -> View | None:
        return self.ask(FleetClient.view)

    def ask(self, question: Callable[[FleetClient], T]) -> T | None:
        """Return the answer; None while the controller does not answer."""
        try:
            answer = question(self.fleet)
        except Unreachable as error:
            self.why = error.reason
            self.is_news = self._away_since_s is None
            self._away_since_s = self._away_since_s or time.monotonic()
            try:
                where = self._locate()
            except click.ClickException:  # none is there now
                return None
            if where.url != self.fleet.url:
                self.fleet.close()
                self.fleet = FleetClient(where.url, where.key)
            return None
        self._away_since_s = None
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.close()
