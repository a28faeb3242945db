"""Compares the desired and the current state, and decides what to do: a state machine without sockets, clocks or Ray.

`want`, `scale`, `restart`, `drain`, `end` set the desired state; `reported`, `lost`, `gone` the current one; `decide`
returns each action once. `kept` is the state that a restarted controller needs.
"""

import math
from collections.abc import Iterator
from itertools import count as numbers
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from engines import NATIVE
from fleet.host.report import Report
from fleet.plan import FOREIGN, NO_MODELS, Autoscale, FleetPlan, ModelPlan, Task


class Kept(Struct, kw_only=True):
    """The wanted state. New fields go last, with a default."""

    plan: FleetPlan = NO_MODELS
    counts: dict[str, int] = {}  # model -> replicas wanted now
    generations: dict[str, int] = {}  # model -> that of replicas begun now; older ones are replaced, one by one
    surges: dict[str, int] = {}  # model -> replicas above its count while older ones are replaced
    tasks: list[Task] = []
    leaving: list[str] = []
    draining: list[str] = []  # an operator said so
    ending: bool = False
    retired: dict[str, str] = {}  # replica -> the life of its host that gets no new requests


class Begin(NamedTuple):
    task: Task


class Stop(NamedTuple):
    name: str
    limit_s: float


Action = Begin | Stop


class Replica:
    """A replica that is wanted, or leaving."""

    def __init__(self, task: Task, *, restored: bool = False) -> None:
        self.task = task
        self.restored = restored  # begun by an earlier controller, and it has not reported yet
        self.leaving = False
        self.kept_away = False  # an operator said so
        self.retired = ""  # the life of its host that gets no new requests; the next one does
        self.report: Report | None = None
        self.lost = ""  # why its host does not answer
        self.heard = False  # whether anything was heard of it, good or bad

    @property
    def ready(self) -> bool:
        return self.report is not None and self.report.life == "ready" and not self.lost

    @property
    def draining(self) -> bool:
        """True if it runs on without new requests."""
        return self.kept_away or bool(self.retired)

    @property
    def serves(self) -> int:
        """0: it does not; 1: perhaps, but its host does not say so now; 2: it does."""
        if self.draining or not (self.restored or (self.report and self.report.life == "ready")):
            return 0
        return 2 if self.ready else 1


class UnknownName(LookupError):
    """There is no such model or replica; the message says which there are."""


class Reconciler:
    def __init__(self, kept: Kept | None = None) -> None:
        kept = kept or Kept()
        self.plan = kept.plan
        self.ending = kept.ending
        self._counts, self._generations, self._surges = dict(kept.counts), dict(kept.generations), dict(kept.surges)
        self.replicas = {task.name: Replica(task, restored=True) for task in kept.tasks}
        self._begun = set(self.replicas)  # not to be begun again
        self._stopped: set[str] = set()
        for name in kept.leaving:
            self.replicas[name].leaving = True
        for name in kept.draining:
            self.replicas[name].kept_away = True
        for name, host in kept.retired.items():
            self.replicas[name].retired = host

    def kept(self) -> Kept:
        return Kept(
            plan=self.plan,
            counts=dict(self._counts),
            generations=dict(self._generations),
            surges=dict(self._surges),
            tasks=[replica.task for replica in self.replicas.values()],
            leaving=[name for name, replica in self.replicas.items() if replica.leaving],
            draining=[name for name, replica in self.replicas.items() if replica.kept_away],
            ending=self.ending,
            retired={name: replica.retired for name, replica in self.replicas.items() if replica.retired},
        )

    # ---- the goal

    def want(self, plan: FleetPlan) -> None:
        """Models that are not in it leave; where a plan changed in more than its count, its replicas are replaced."""
        for model in plan.models:
            before = self.plan.model(model.name)
            if before is None:
                self._generations.setdefault(model.name, 0)
            elif _started_alike(before) != _started_alike(model):
                self._generations[model.name] += 1
                self._surges.pop(model.name, None)  # the wish was for one restart
            # Set the count; a count reached by scaling stays, within the new bounds.
            if before is None or before.replicas != model.replicas:
                self._counts[model.name] = first_count(model)
            elif model.autoscale is not None:
                self._counts[model.name] = within(model.autoscale, self._counts[model.name])
            elif before.autoscale is not None:
                self._counts[model.name] = model.replicas
            for replica in self._of(model.name):  # settings that need no restart apply to running replicas
                if _started_alike(replica.task.plan) == _started_alike(model):
                    replica.task = msgspec.structs.replace(replica.task, plan=model)
        self.plan = plan
        for name in list(self._counts):
            if plan.model(name) is None:
                self._counts.pop(name)
                self._surges.pop(name, None)
                for replica in self._of(name):
                    replica.leaving = True
        self.ending = False

    def scale(self, model: str, count: int) -> None:
        self._known(model)
        self._counts[model] = count

    def restart(self, model: str, surge: int = 0) -> None:
        """Replace the replicas one by one; with a surge, start new ones before an old one stops."""
        self._known(model)
        self._generations[model] += 1
        self._surges[model] = surge

    def drain(self, name: str, wanted: bool = True) -> None:
        """Keep new requests away from a running replica."""
        replica = self.replica(name)
        replica.kept_away = wanted
        if not wanted:
            replica.retired = ""

    def drain_node(self, node: str, wanted: bool = True) -> list[str]:
        """Keep new requests away from a node's replicas, until they start elsewhere; return their names."""
        there = [(each, each.report) for each in self.replicas.values() if each.report and each.report.node == node]
        for replica, report in there:
            replica.retired = report.host if wanted else ""
        return [replica.task.name for replica, _ in there]

    def end(self) -> None:
        """Every replica leaves; none is begun any more."""
        self.ending = True

    def count(self, model: str) -> int:
        return 0 if self.ending else self._counts.get(model, 0)

    def generation(self, model: str) -> int:
        return self._generations.get(model, 0)

    def replica(self, name: str) -> Replica:
        if name not in self.replicas:
            raise UnknownName(f"there is no replica {name!r}; there are {', '.join(self.replicas) or 'none'}")
        return self.replicas[name]

    def _known(self, model: str) -> None:
        if self.plan.model(model) is None:
            names = ", ".join(each.name for each in self.plan.models) or "none"
            raise UnknownName(f"there is no model {model!r}; there are {names}")

    # ---- state

    def reported(self, name: str, report: Report) -> None:
        replica = self.replicas[name]
        replica.report, replica.lost, replica.heard, replica.restored = report, "", True, False
        if replica.retired != report.host:
            replica.retired = ""

    def lost(self, name: str, why: str) -> None:
        """Note that a host does not answer. Its replica may live on, so its place is kept."""
        replica = self.replicas[name]
        replica.lost, replica.heard = why, True

    def gone(self, name: str) -> None:
        """Host and process are no more; if it is still wanted it is begun again."""
        replica = self.replicas[name]
        self._begun.discard(name)
        self._stopped.discard(name)
        if replica.leaving:
            del self.replicas[name]
        else:
            replica.report, replica.lost, replica.heard, replica.restored = None, "", True, False

    # ---- what to do

    def decide(self) -> list[Action]:
        for model in dict.fromkeys((*self._counts, *(each.task.plan.name for each in self.replicas.values()))):
            self._forget_those_that_were_gone(model)
            # Mark leaving replicas and add missing ones; a serving old one leaves only when all others serve.
            count = self.count(model)
            new = [each for each in self._staying(model) if not self._is_old(each)]
            too_many = self._leave_the_worst(self._old(model), count) + self._leave_the_worst(new, count)
            old = self._old(model)
            allowed = count + min(self._surges.get(model, 0), len(old))
            too_many += self._leave_the_worst(self._staying(model), allowed)
            mine = self._staying(model)
            in_the_way = sum(each.leaving and self._is_old(each) for each in self._of(model))
            if len(mine) < allowed:
                plan, generation = self.plan.model(model), self.generation(model)
                assert plan is not None, f"{model} has a count, but no plan"
                names = (f"{name_stem(model)}-{number}" for number in numbers())
                free = (name for name in names if name not in self.replicas)
                for name in islice(free, max(0, allowed - len(mine) - in_the_way)):
                    self.replicas[name] = Replica(Task(name=name, plan=plan, generation=generation))
            elif old and not in_the_way and not too_many:
                worst = self._worst_first(old)[0]
                # Nothing is lost with a replica that does not serve.
                worst.leaving = not worst.serves or all(each.serves == 2 for each in mine if each is not worst)
            self._forget_those_that_were_gone(model)
        begin = [
            Begin(msgspec.structs.replace(replica.task, warm_from=self._readable(replica.task.plan.name)))
            for name, replica in self.replicas.items()
            if name not in self._begun
        ]
        stop = [
            Stop(name, replica.task.plan.drain_timeout_s)
            for name, replica in self.replicas.items()
            if replica.leaving and name not in self._stopped
        ]
        self._begun.update(self.replicas)
        self._stopped.update(action.name for action in stop)
        return [*begin, *stop]

    def _forget_those_that_were_gone(self, model: str) -> None:
        """Before they were to leave, or to be replaced: there is nothing to stop, and another one may be begun."""
        for replica in list(self._of(model)):
            if replica.task.name not in self._begun and (replica.leaving or self._is_old(replica)):
                del self.replicas[replica.task.name]

    def _leave_the_worst(self, replicas: list[Replica], allowed: int) -> int:
        """Mark the worst of too many replicas as leaving; return how many."""
        leaving = self._worst_first(replicas)[: max(0, len(replicas) - allowed)]
        for replica in leaving:
            replica.leaving = True
        return len(leaving)

    def _worst_first(self, replicas: list[Replica]) -> list[Replica]:
        """Sort in the order of leaving: not serving, older plan, least valuable cache, highest number."""
        return sorted(
            replicas,
            key=lambda each: (
                each.serves,
                each.task.generation,
                cache_value(each.report),
                -int(each.task.name.rpartition("-")[2]),
            ),
        )

    def _staying(self, model: str) -> list[Replica]:
        return [replica for replica in self._of(model) if not replica.leaving]

    def _old(self, model: str) -> list[Replica]:
        return [replica for replica in self._staying(model) if self._is_old(replica)]

    def _is_old(self, replica: Replica) -> bool:
        return replica.task.generation < self.generation(replica.task.plan.name)

    def _readable(self, model: str) -> tuple[str, ...]:
        reports = (each.report for each in self._of(model) if each.ready)
        return tuple(report.kv_read for report in reports if report and report.kv_read)

    def _of(self, model: str) -> Iterator[Replica]:
        return (replica for replica in self.replicas.values() if replica.task.plan.name == model)

    # ---- what routers are told

    @property
    def settled(self) -> bool:
        """True once every replica has been heard of; before, a list of members would miss some."""
        return all(replica.heard for replica in self.replicas.values())

    def members(self) -> list[dict[str, Any]]:
        return [_member(replica) for replica in self.replicas.values() if replica.report and replica.report.place]


def _member(replica: Replica) -> dict[str, Any]:
    report = replica.report
    assert report is not None and report.place is not None
    place, plan = report.place, replica.task.plan
    more = {"adapters": list(plan.adapters), "api_key_env": plan.api_key_env, "resume": plan.resume, "role": plan.role}
    if place.engine != NATIVE.name:
        more |= {"model": plan.served_name, "events": place.events, "replay": place.replay}
    return {
        "name": report.name,
        "url": place.url,
        "engine": place.engine,
        "incarnation": place.incarnation,
        "draining": replica.leaving or replica.draining or report.life == "draining",
    } | {key: value for key, value in more.items() if value}


def first_count(model: ModelPlan) -> int:
    if model.autoscale is None:
        return model.replicas
    return within(model.autoscale, model.replicas)


def within(autoscale: Autoscale, count: int) -> int:
    return min(max(count, autoscale.min), autoscale.max)


def name_stem(model: str) -> str:
    """The replicas' names without their number, fit for URLs, file names and actors' names."""
    letters = (letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in model)
    return "".join(letters).strip("-.") or "model"


def _started_alike(plan: ModelPlan) -> ModelPlan:
    """Return the part of a plan that takes a restart to change; for ours that includes drain timeout and role."""
    plan = msgspec.structs.replace(plan, replicas=1, autoscale=None, adapters=(), resume=False)
    return msgspec.structs.replace(plan, drain_timeout_s=0.0, role=None) if plan.engine in FOREIGN else plan


SOON_S = 60.0  # a replica asked for again within that time is missed


def cache_value(report: Report | None) -> tuple[float, float]:
    """Prompt tokens that would soon be computed again without it, then those a second that it need not compute.

    What is gone is computed once: a prefix that every request begins with is not worth more than it is long.
    """
    if report is None:
        return (0.0, 0.0)
    saved_tokens_per_s = report.hit_rate * report.prompt_tokens_per_s
    held_tokens = report.load.cached_blocks * report.block_size if report.block_size else math.inf
    return (min(held_tokens, saved_tokens_per_s * SOON_S), saved_tokens_per_s)
