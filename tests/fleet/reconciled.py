"""A reconciler with hosts that obey at once, and do nothing else until a test tells them to."""

from typing import Any

import msgspec

from fleet.control.reconcile import Action, Begin, Kept, Reconciler, Stop
from fleet.host.report import Life, ReplicaAddress, Report
from fleet.plan import FleetPlan, ModelPlan, Task

M = ModelPlan(name="m", model="demo", replicas=3, drain_timeout_s=7.0)


def but(plan: ModelPlan, **changed: Any) -> ModelPlan:
    return msgspec.structs.replace(plan, **changed)


def report(name: str, life: Life = "ready", host: str = "h", **more: Any) -> Report:
    place = ReplicaAddress(url=f"http://h/{name}", model="demo", incarnation=f"{name}!")
    return Report(name=name, host=host, life=life, place=place if life in ("ready", "draining") else None, **more)


class Fleet:
    """One of these models, ready to begin with."""

    def __init__(self, *models: ModelPlan, ready: bool = True) -> None:
        self.it = Reconciler()
        self.there: dict[str, Task] = {}
        self.stopping: list[str] = []
        self.want(*models)
        if ready:
            self.decide()
            self.ready()

    def want(self, *models: ModelPlan) -> None:
        self.it.want(FleetPlan(models=models))

    def decide(self) -> list[Action]:
        actions = self.it.decide()
        for action in actions:
            match action:
                case Begin(task):
                    assert task.name not in self.there, f"{task.name} is already running"
                    self.there[task.name] = task
                case Stop(name):
                    assert name in self.there and name not in self.stopping
                    self.stopping.append(name)
        return actions

    def ready(self, *names: str) -> None:
        for name in names or self.there:
            self.it.reported(name, report(name))

    def failing(self, name: str) -> None:
        self.it.reported(name, report(name, "failing", why="exit status 1"))

    def leave(self, *names: str) -> None:
        for name in names or list(self.stopping):
            self.stopping.remove(name)
            self.gone(name)

    def gone(self, name: str) -> None:
        del self.there[name]
        self.it.gone(name)

    def restore(self) -> None:
        """A new controller with the last one's state."""
        self.it = Reconciler(msgspec.json.decode(msgspec.json.encode(self.it.kept()), type=Kept))
        self.stopping.clear()

    def settle(self) -> list[str]:
        """Let everything succeed; return started and stopped replicas, in that order."""
        story: list[str] = []
        quiet = 0
        while quiet < 2:
            actions = self.decide()
            story += told(actions)
            quiet = 0 if actions or self.stopping else quiet + 1
            self.ready(*(name for name in self.there if name not in self.stopping))
            self.leave()
        return story

    def generations(self, model: str = "m") -> list[int]:
        return [task.generation for task in self.there.values() if task.plan.name == model]


def told(actions: list[Action]) -> list[str]:
    return [f"+{action.task.name}" if isinstance(action, Begin) else f"-{action.name}" for action in actions]
