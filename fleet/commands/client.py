"""Talks to a fleet's controller over HTTP. Every failure is an error of one line that says what to do."""

from msgspec import Struct

from fleet.commands.local_fleets import listed, running_fleets
from fleet.commands.view import ModelView, View
from fleet.plan import FleetPlan
from router.asking import Client, Server

CONTROLLER = Server(
    "controller",
    "see --fleet",
    "give the fleet's key as WARMROUTE_FLEET_KEY",
    more=lambda: f"; is the fleet running? On this machine there are: {listed(running_fleets())}",
)
TIMEOUT_S = 10.0


class _Names(Struct):
    replicas: tuple[str, ...]


class Fleet(Client):
    """One fleet's controller."""

    def __init__(self, url: str, key: str | None = None) -> None:
        super().__init__(url, key, CONTROLLER, TIMEOUT_S)

    def view(self) -> View:
        return self.read(self.answer())

    def answer(self) -> bytes:
        """The bytes that `read` decodes."""
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
        """Returns the replicas that run there."""
        return self.post("/nodes/drain", {"node": node, "drain": wanted}, _Names).replicas

    def log(self, replica: str, lines: int) -> str:
        content = self.ask("GET", "/replicas/log", parameters={"replica": replica, "lines": str(lines)})
        return content.decode(errors="replace")

    def want(self, plan: FleetPlan) -> None:
        self.ask("PUT", "/fleet", plan)

    def end(self) -> None:
        self.ask("POST", "/end", {})
