"""The controller's state as people, programs (docs/fleet.md) and Prometheus (docs/metrics.md, "The fleet") read it."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from fleet.control.controller import Controller
from fleet.control.reconcile import Replica
from fleet.host.report import Said

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
        "room": controller.room,
    }


def model_view(controller: Controller, name: str) -> dict[str, Any]:
    reconciler = controller.reconciler
    mine = [each for each in reconciler.replicas.values() if each.task.plan.name == name]
    plan = reconciler.plan.model(name) or mine[0].task.plan  # a leaving model is no longer in the plan
    generation, scaler = reconciler.generation(name), controller.scalers.get(name)
    return {
        "name": name,
        "serves": plan.served_name,
        "model": plan.model,
        "engine": plan.engine,
        "wanted": reconciler.count(name),
        "ready": sum(each.ready and not each.leaving for each in mine),
        "replicas": len(mine),
        "generation": generation,
        "restarting": not reconciler.ending and any(each.task.generation < generation for each in mine),
        "autoscale": None if plan.autoscale is None else msgspec.structs.asdict(plan.autoscale),
        "autoscale_why": scaler.why or None if scaler else None,
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
    said = {name: getattr(report, name) if logs or name not in OF_LOGS else () for name in Said.__struct_fields__}
    addresses = {name: report.place and getattr(report.place, name) for name in ("url", "events", "incarnation")}
    return shown | said | {"load": msgspec.structs.asdict(report.load)} | addresses


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

LIVES = ("placing", "starting", "ready", "failing", "draining", "leaving", "lost", "ended")


def metrics_text(controller: Controller) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(controller))
    return generate_latest(registry)


class _Collector:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        reconciler = self._controller.reconciler
        names = [model.name for model in reconciler.plan.models]
        wanted = GaugeMetricFamily(
            "warmroute_fleet:wanted_replicas", "Replicas that there should be.", labels=["model"]
        )
        for name in names:
            wanted.add_metric([name], reconciler.count(name))
        yield wanted
        counts = Counter((each.task.plan.name, life(each)) for each in reconciler.replicas.values())
        replicas = GaugeMetricFamily("warmroute_fleet:replicas", "Replicas by their state.", labels=["model", "life"])
        for name in names:
            for each in LIVES:
                replicas.add_metric([name, each], counts[name, each])
        yield replicas
        starts = CounterMetricFamily(
            "warmroute_fleet:starts", "Starts of a replica's process, the first one included.", labels=["replica"]
        )
        for replica in reconciler.replicas.values():
            if replica.report is not None:
                starts.add_metric([replica.task.name], replica.report.starts)
        yield starts
        yield CounterMetricFamily(
            "warmroute_fleet:hosts_replaced", "Hosts that were lost and started again.", value=self._controller.replaced
        )
