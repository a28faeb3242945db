"""A thread that sends the GenAI metrics by OTLP. Requests never wait for it; of a lost collector it only logs."""

import logging
import os
import time
from threading import Event, Thread

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)

from router.records.genai_metrics import GenaiMetrics, Instrument, Series
from router.records.otlp import CLOSE_LIMIT_S, EXPORT_LIMIT_S, METRICS_PATH, Collector

log = logging.getLogger(__name__)

INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
USUAL_MS, MAX_MS = 60_000.0, 86_400_000.0


class MetricsExport:
    """Sends the counts again and again; `close` it at the end."""

    def __init__(self, metrics: GenaiMetrics, collector: Collector) -> None:
        self._metrics = metrics
        self._collector = collector
        self._exporter = OTLPMetricExporter(collector.url(METRICS_PATH), timeout=EXPORT_LIMIT_S)
        self._interval_s = interval_s(os.environ.get(INTERVAL, ""))
        self._closing = Event()
        self._thread = Thread(target=self._run, name="otlp-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._send()
        self._send()

    def _send(self) -> None:
        now_ns = time.time_ns()
        shown = [metric for one in self._metrics if (metric := metric_of(one, now_ns)) is not None]
        if shown:
            of_scope = ScopeMetrics(self._collector.scope, shown, "")
            self._exporter.export(MetricsData([ResourceMetrics(self._collector.resource, [of_scope], "")]))

    def close(self) -> None:
        self._closing.set()
        self._thread.join(CLOSE_LIMIT_S)
        self._exporter.shutdown()


def interval_s(text: str) -> float:
    """The time between two exports, from the variable's text in milliseconds."""
    try:
        milliseconds = float(text or USUAL_MS)
        if not 0 < milliseconds <= MAX_MS:
            raise ValueError("out of range")
    except ValueError:
        log.warning("%s is %r; give milliseconds, up to a day (%d). It is 60000 now", INTERVAL, text, MAX_MS)
        milliseconds = USUAL_MS
    return milliseconds / 1000


def metric_of(instrument: Instrument, now_ns: int) -> Metric | None:
    """The instrument's values as OTLP knows them; None if there are none yet."""
    series = instrument.series()
    if not series:
        return None
    data: Histogram | Sum
    if instrument.bounds:
        data = Histogram([distribution(one, now_ns) for one in series], AggregationTemporality.CUMULATIVE)
    else:
        totals = [NumberDataPoint(one.attributes, one.since_ns, now_ns, int(one.total)) for one in series]
        data = Sum(totals, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    return Metric(instrument.name, instrument.description, instrument.unit, data)


def distribution(series: Series, now_ns: int) -> HistogramDataPoint:
    counts = series.counts.copy()  # a copy takes one step: the router's thread may count meanwhile
    return HistogramDataPoint(
        series.attributes,
        series.since_ns,
        now_ns,
        sum(counts),
        series.total,
        counts,
        series.bounds,
        series.least,
        series.greatest,
    )
