"""The controller's state as people and programs read it (docs/fleet.md)."""

from typing import Any

import msgspec

from fleet.control.controller import Controller
from fleet.control.reconcile import Replica

OF_LOGS = ("last_words", "notes")  # what they say may be anything


def view(controller: Controller, *, logs: bool) -> dict[str, Any]:
    """`logs`: with the parts of logs that it has; else these are empty."""
    reconciler = controller.reconciler
    models = {
        **dict.fromkeys(model.name for model in reconciler.plan.models),
        **dict.fromkeys(replica.task.plan.name for replica in reconciler.replicas.values()),
    }
    return {
        "ending": reconciler.ending,
        "models": [model_view(controller, name) for name in models],
        "replicas": [_replica_view(controller, replica, logs) for replica in reconciler.replicas.values()],
    }


def model_view(controller: Controller, name: str) -> dict[str, Any]:
    reconciler = controller.reconciler
    mine = [each for each in reconciler.replicas.values() if each.task.plan.name == name]
    plan = reconciler.plan.model(name) or mine[0].task.plan  # a leaving model is no longer in the plan
    generation = reconciler.generation(name)
    return {
        "name": name,
        "model": plan.model,
        "engine": plan.engine,
        "wanted": reconciler.count(name),
        "ready": sum(each.ready and not each.leaving for each in mine),
        "replicas": len(mine),
        "generation": generation,
        "restarting": not reconciler.ending and any(each.task.generation < generation for each in mine),
        "autoscale": None if plan.autoscale is None else msgspec.structs.asdict(plan.autoscale),
        "autoscale_why": controller.why_scaled(name),
    }


def _replica_view(controller: Controller, replica: Replica, logs: bool) -> dict[str, Any]:
    task, report = replica.task, replica.report
    shown: dict[str, Any] = {
        "name": task.name,
        "model": task.plan.name,
        "generation": task.generation,
        "old": task.generation < controller.reconciler.generation(task.plan.name),
        "life": life(replica),
        "why": replica.lost or (controller.waits.get(task.name, "") if report is None else report.why),
    }
    if report is None:
        return shown
    place = report.place
    said = ("since", "node", "pid", "starts", "log")
    measured = ("hit_rate", "prompt_tokens_per_s", "open_requests", "total_blocks", "block_size", "measured_at")
    return (
        shown
        | {name: getattr(report, name) for name in (*said, *measured)}
        | {name: getattr(report, name) if logs else () for name in OF_LOGS}
        | {
            "load": msgspec.structs.asdict(report.load),
            "url": place and place.url,
            "events": place and place.events,
            "incarnation": place and place.incarnation,
        }
    )


def life(replica: Replica) -> str:
    """Return a replica's state in one word."""
    if replica.lost:
        return "lost"
    if replica.report is None:
        return "placing"
    said = replica.report.life
    if replica.leaving and said != "ended":
        return "leaving"
    return "draining" if replica.draining and said == "ready" else said
