"""The controller's state as people, programs (docs/fleet.md) and Prometheus (docs/metrics.md, "The fleet") read it."""

import os
from collections import Counter
from importlib.metadata import version
from typing import Any

import msgspec

from api.http.prometheus import labels, metric
from fleet.control.controller import Controller
from fleet.control.reconcile import Replica
from fleet.control.record import ModelView, ReplicaView, View
from fleet.host.report import Said

OF_LOGS = ("last_words", "notes")  # they may say anything


def view(controller: Controller, *, logs: bool) -> View:
    """`logs`: with the parts of logs that it has; else these are empty."""
    reconciler = controller.reconciler
    models = {
        **dict.fromkeys(model.name for model in reconciler.plan.models),
        **dict.fromkeys(replica.task.plan.name for replica in reconciler.replicas.values()),
    }
    return View(
        version=version("warmroute"),
        pid=os.getpid(),
        ending=reconciler.ending,
        models=tuple(model_view(controller, name) for name in models),
        replicas=tuple(_replica_view(controller, replica, logs) for replica in reconciler.replicas.values()),
    )


def model_view(controller: Controller, name: str) -> ModelView:
    reconciler = controller.reconciler
    mine = [each for each in reconciler.replicas.values() if each.task.plan.name == name]
    plan = reconciler.plan.model(name) or mine[0].task.plan  # a leaving model is no longer in the plan
    generation, scaler = reconciler.generation(name), controller.scalers.get(name)
    return ModelView(
        name=name,
        serves=plan.served_name,
        model=plan.model,
        engine=plan.engine,
        wanted=reconciler.count(name),
        ready=sum(each.ready and not each.leaving for each in mine),
        replicas=len(mine),
        generation=generation,
        restarting=not reconciler.ending and any(each.task.generation < generation for each in mine),
        autoscale=None if plan.autoscale is None else msgspec.structs.asdict(plan.autoscale),
        autoscale_why=scaler.why or None if scaler else None,
    )


def _replica_view(controller: Controller, replica: Replica, logs: bool) -> ReplicaView:
    task, report = replica.task, replica.report
    told: dict[str, Any] = {}
    if report is not None:
        told = {name: getattr(report, name) for name in Said.__struct_fields__ if logs or name not in OF_LOGS}
    if report is not None and (place := report.place) is not None:
        told |= {"url": place.url, "events": place.events, "incarnation": place.incarnation}
    return ReplicaView(
        name=task.name,
        model=task.plan.name,
        generation=task.generation,
        old=task.generation < controller.reconciler.generation(task.plan.name),
        life=life(replica),
        why=replica.lost or (controller.waits.get(task.name, "") if report is None else report.why),
        **told,
    )


def life(replica: Replica) -> str:
    if replica.lost:
        return "lost"
    if replica.report is None:
        return "placing"
    said = replica.report.life
    if replica.leaving and said != "ended":
        return "leaving"
    return "draining" if replica.draining and said == "ready" else said


# ---- for Prometheus

PREFIX = "warmroute_fleet:"
LIVES = ("placing", "starting", "ready", "failing", "draining", "leaving", "lost", "ended")


def metrics_text(controller: Controller) -> bytes:
    reconciler = controller.reconciler
    names = [model.name for model in reconciler.plan.models]
    counts = Counter((each.task.plan.name, life(each)) for each in reconciler.replicas.values())
    wanted = [(labels(model=name), reconciler.count(name)) for name in names]
    by_life = [(labels(life=each, model=name), counts[name, each]) for name in names for each in LIVES]
    started = [
        (labels(replica=each.task.name), each.report.starts)
        for each in reconciler.replicas.values()
        if each.report is not None
    ]
    return "".join(
        (
            metric("gauge", f"{PREFIX}wanted_replicas", "Replicas that there should be.", wanted),
            metric("gauge", f"{PREFIX}replicas", "Replicas by their state.", by_life),
            metric("counter", f"{PREFIX}starts", "Starts of a replica's process, the first one included.", started),
            metric(
                "counter",
                f"{PREFIX}hosts_replaced",
                "Hosts that were lost and started again.",
                [("", controller.replaced)],
            ),
        )
    ).encode()
