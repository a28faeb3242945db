"""The fleet in Prometheus' text format (docs/metrics.md, "The fleet")."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from fleet.control.controller import Controller
from fleet.control.view import life

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
