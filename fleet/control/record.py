"""The answer of GET /fleet, typed; fields of newer controllers are ignored."""

from typing import Any

from msgspec import Struct

from fleet.host.report import Said


class ModelView(Struct, frozen=True, kw_only=True):
    name: str
    serves: str = ""  # the name that clients use; empty: `name`
    model: str = ""  # a folder, or a name that the engine knows
    engine: str = ""
    wanted: int = 0
    ready: int = 0
    replicas: int = 0  # those that leave included
    generation: int = 0
    restarting: bool = False
    autoscale: dict[str, Any] | None = None
    autoscale_why: str | None = None


class ReplicaView(Said, frozen=True, kw_only=True):
    """One replica; before its first report what it has said, and its addresses, are not set."""

    name: str
    model: str
    life: str
    generation: int = 0
    old: bool = False
    why: str = ""
    incarnation: str | None = None
    url: str | None = None
    events: str | None = None

    @property
    def serves(self) -> bool:
        """True if its figures are current."""
        return self.life in ("ready", "draining", "leaving") and self.measured_at > 0

    def died_since(self, before: "ReplicaView | None") -> bool:
        """Return True if it has ended and was started again since this earlier look, which did not see that."""
        return before is not None and not (before.why or self.why) and 0 < before.starts < self.starts

    @property
    def number(self) -> int:
        """The number in its name: sorts `demo-10` after `demo-9`."""
        digits = self.name.rpartition("-")[2]
        return int(digits) if digits.isdecimal() else 0


class View(Struct, frozen=True, kw_only=True):
    models: tuple[ModelView, ...]
    replicas: tuple[ReplicaView, ...]
    version: str = ""
    ending: bool = False
    pid: int = 0

    def model(self, name: str) -> ModelView | None:
        return next((model for model in self.models if model.name == name), None)

    def of(self, model: str) -> list[ReplicaView]:
        mine = [replica for replica in self.replicas if replica.model == model]
        return sorted(mine, key=lambda replica: (replica.number, replica.name))

    @property
    def complete(self) -> bool:
        """True if every wanted replica is ready."""
        return not self.ending and all(model.ready >= model.wanted for model in self.models)
