"""Metrics and traces of a whole router with several workers, at a collector, to the request and to the token."""

from collections import Counter

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")

from tests.chaos.routers import fleet, router
from tests.events.processes import wait_until
from tests.replica.serving import MODEL
from tests.router.collector import Collector, attributes, collecting, metrics_of, points

pytestmark = pytest.mark.chaos

FAST = ("--engine", "simulated", "--served-model-name", MODEL, "--model", "demo", "--set=simulated_step_overhead=0")
WORKERS, REQUESTS = 2, 40


def last_of_each(collector: Collector) -> dict[str, dict[str, float]]:
    """By instance: its requests and tokens in its last export."""
    found = {}
    for export in list(collector.exports):
        instance = attributes(export.resource_metrics[0].resource)["service.instance.id"]
        metrics = metrics_of(export)
        [answered] = points(metrics["gen_ai.server.request.duration"])
        [generated] = points(metrics["gen_ai.client.token.usage"], "gen_ai.token.type", "output")
        [prompts] = points(metrics["gen_ai.client.token.usage"], "gen_ai.token.type", "input")
        cached = sum(point.as_int for point in points(metrics["gen_ai.client.inference.usage.cache_read.input_tokens"]))
        found[instance] = {
            "requests": answered.count,
            "generated": generated.sum,
            "prompt": prompts.sum,
            "cached": cached,
        }
    return found


def test_the_workers_of_a_router_add_up_to_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
    with collecting() as collector, fleet(1, *FAST) as replicas:
        options = (*replicas.as_options, "--workers", WORKERS, "--otlp-endpoint", collector.url)
        sums: Counter[str] = Counter()
        with router(*options) as running:
            for number in range(REQUESTS):  # each on a connection of its own, so that every worker gets some
                body = {"model": MODEL, "prompt": "the same beginning " * 20 + str(number), "max_tokens": 5}
                usage = running.post("/v1/completions", body).json["usage"]
                sums["prompt"] += usage["prompt_tokens"]
                sums["generated"] += usage["completion_tokens"]
                sums["cached"] += usage["prompt_tokens_details"]["cached_tokens"]
                sums["requests"] += 1
            wait_until(lambda: len(last_of_each(collector)) == WORKERS, "every worker has sent metrics")
            running.process.terminate()
            assert running.process.wait(30) == 0
        told = last_of_each(collector)
    assert sum((Counter(one) for one in told.values()), Counter()) == sums
    assert sums["requests"] == REQUESTS and 0 < sums["cached"] < sums["prompt"]
    instances = {attributes(one.resource_spans[0].resource)["service.instance.id"] for one in collector.requests}
    assert instances == told.keys()
    assert len([span for span in collector.spans if span.kind == span.SPAN_KIND_SERVER]) == REQUESTS
