"""GenAI metrics: counts of finished requests, at a collector by real OTLP over HTTP."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")


from router.proxy.request_summary import RequestSummary
from router.records import genai_metrics, otlp
from router.records.genai_metrics import MAX_MODELS, OTHER, GenaiMetrics, Instrument, Labels
from router.records.metrics_export import interval_s
from router.records.otlp import CLOSE_LIMIT_S, INSTANCE
from tests.router.collector import Collector, attributes, collecting, metrics_of, points
from tests.router.loopback import until
from tests.router.scripted import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Call,
    Script,
    Served,
    chat,
    connect,
    drops,
    event,
    says,
    served,
)

USAGE = b'{"usage":{"prompt_tokens":40,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":16}}}'
TOKEN_TYPE = "gen_ai.token.type"

REQUEST_S, OPERATION_S = "gen_ai.server.request.duration", "gen_ai.client.operation.duration"
FIRST_TOKEN_S, TOKEN_S = "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token"
TOKENS, CACHED = "gen_ai.client.token.usage", "gen_ai.client.inference.usage.cache_read.input_tokens"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


def native(call: Call) -> None:
    call.begin_frames(x_warmroute_cached_tokens="4")
    call.frame(event("one"), 1, 2)
    call.frame(event("two"), 3)
    call.end()


async def told(running: Served) -> None:
    """Have the metrics sent now, as at the end."""
    await running.idle()
    export = running.front._metrics_export
    assert export is not None
    await asyncio.to_thread(export._send)


async def test_a_streamed_answer_is_counted_in_every_metric(collector: Collector) -> None:
    before_ns = time.time_ns()
    replicas = Script(native, native).replicas(1, native=True)
    async with served(*replicas, otlp_endpoint=collector.url) as running, connect(running.port) as client:
        for _ in range(2):
            await client.post(COMPLETIONS, {"model": MODEL, "prompt": "hello", "stream": True})
        await told(running)
        target = next(iter(running.router.members)).upstream.target
    metrics = collector.metrics
    served_by = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "warmroute",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
    }
    for name in (REQUEST_S, FIRST_TOKEN_S, TOKEN_S):
        [point] = points(metrics[name])
        assert attributes(point) == served_by and point.count == sum(point.bucket_counts) == 2
        assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
        assert 0 < 2 * point.min <= point.sum <= 2 * point.max < 60
        assert before_ns <= point.start_time_unix_nano < point.time_unix_nano <= time.time_ns()
    asked = served_by | {"server.address": target.host, "server.port": target.port}
    assert [attributes(point) for point in points(metrics[OPERATION_S])] == [asked]
    [prompts] = points(metrics[TOKENS], TOKEN_TYPE, "input")
    [answers] = points(metrics[TOKENS], TOKEN_TYPE, "output")
    assert (prompts.count, prompts.sum) == (2, 2 * (1 + len("hello"))) and (answers.count, answers.sum) == (2, 2 * 3)
    assert attributes(answers) == asked | {"gen_ai.token.type": "output"}
    [cached] = points(metrics[CACHED])
    assert cached.as_int == 2 * 4 and metrics[CACHED].sum.is_monotonic
    assert attributes(cached) == asked | {"gen_ai.token.modality": "unknown"}
    assert b"hello" not in collector.exports[-1].SerializeToString()


async def test_tokens_of_other_engines_are_those_that_they_report(collector: Collector) -> None:
    replicas = Script(says(USAGE), says(b'{"choices":[]}')).replicas(1)
    async with served(*replicas, otlp_endpoint=collector.url) as running, connect(running.port) as client:
        for _ in range(2):  # of the second, nothing is known but estimates
            assert (await client.post(CHAT, chat())).status == 200
        await told(running)
    metrics = collector.metrics
    [prompts] = points(metrics[TOKENS], TOKEN_TYPE, "input")
    [answers] = points(metrics[TOKENS], TOKEN_TYPE, "output")
    assert (prompts.count, prompts.sum, answers.count, answers.sum) == (1, 40, 1, 7)
    assert [point.as_int for point in points(metrics[CACHED])] == [16]
    assert points(metrics[REQUEST_S])[0].count == 2
    assert FIRST_TOKEN_S not in metrics and TOKEN_S not in metrics  # the whole answer came at once


async def test_an_api_that_only_engines_speak_is_a_chat(collector: Collector) -> None:
    answer = b'{"type":"message","usage":{"input_tokens":24,"cache_read_input_tokens":16,"output_tokens":7}}'
    async with (
        served(*Script(says(answer)).replicas(1), otlp_endpoint=collector.url) as running,
        connect(running.port) as client,
    ):
        assert (await client.post("/v1/messages", chat(max_tokens=9))).status == 200
        await told(running)
    metrics = collector.metrics
    [request] = points(metrics[REQUEST_S])
    assert attributes(request)["gen_ai.operation.name"] == "chat" and request.count == 1
    assert {attributes(one)[TOKEN_TYPE]: one.sum for one in points(metrics[TOKENS])} == {"input": 40, "output": 7}
    assert [point.as_int for point in points(metrics[CACHED])] == [16]


async def test_an_attempt_that_failed_is_an_operation_of_its_own(collector: Collector) -> None:
    replicas = Script(drops, says(USAGE)).replicas(2)
    async with served(*replicas, otlp_endpoint=collector.url) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat())).status == 200
        await told(running)
    metrics = collector.metrics
    lost = points(metrics[OPERATION_S], "error.type", "replica_lost")
    done = [one for one in points(metrics[OPERATION_S]) if "error.type" not in attributes(one)]
    assert [point.count for point in (*lost, *done)] == [1, 1]
    assert "gen_ai.response.model" not in attributes(lost[0]) and "gen_ai.response.model" in attributes(done[0])
    assert attributes(lost[0])["server.port"] != attributes(done[0])["server.port"]
    assert [attributes(one).get("error.type") for one in points(metrics[REQUEST_S])] == [None]


async def test_names_that_clients_invent_are_no_attributes(collector: Collector) -> None:
    async with (
        served(*Script(drops).replicas(1), otlp_endpoint=collector.url, queue_size=0) as running,
        connect(running.port) as client,
    ):
        for number in range(20):
            await client.post(CHAT, chat() | {"model": f"invented-{number}"})
        await client.post(CHAT, chat())
        await told(running)
    found = {attributes(one)["error.type"]: one for one in points(collector.metrics[REQUEST_S])}
    assert found.keys() == {"404", "503"} and found["404"].count == 20
    assert "gen_ai.request.model" not in attributes(found["404"])
    assert attributes(found["503"])["gen_ai.request.model"] == MODEL
    assert b"invented" not in collector.exports[-1].SerializeToString()


async def test_a_client_that_leaves_is_told_apart(collector: Collector) -> None:
    def begins(call: Call) -> None:
        call.begin()
        call.chunk(event('{"choices":[]}'))

    async with served(*Script(begins).replicas(1), otlp_endpoint=collector.url) as running:
        async with connect(running.port) as client:
            client.send("POST", CHAT, chat(stream=True))
            await client.head()
            await client.chunk()
        await told(running)
    assert [attributes(one)["error.type"] for one in points(collector.metrics[REQUEST_S])] == ["client_left"]
    assert [attributes(one)["error.type"] for one in points(collector.metrics[OPERATION_S])] == ["client_left"]
    assert FIRST_TOKEN_S not in collector.metrics


@pytest.mark.parametrize("signal", ["TRACES", "METRICS"])
async def test_either_may_be_switched_off(collector: Collector, monkeypatch: pytest.MonkeyPatch, signal: str) -> None:
    monkeypatch.setenv(f"OTEL_{signal}_EXPORTER", "none")
    replicas = Script(says(USAGE)).replicas(1)
    async with served(*replicas, otlp_endpoint=collector.url) as running, connect(running.port) as client:
        await client.post(CHAT, chat())
    assert (bool(collector.spans), bool(collector.exports)) == (signal == "METRICS", signal == "TRACES")


async def test_metrics_are_sent_at_the_interval_and_add_up(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    replicas = Script(*[says(USAGE)] * 2).replicas(1)
    async with served(*replicas, otlp_endpoint=collector.url) as running, connect(running.port) as client:
        await client.post(CHAT, chat())
        await until(lambda: len(collector.exports) > 1, "they come again and again")
        await client.post(CHAT, chat())
        await until(lambda: points(collector.metrics[REQUEST_S])[0].count == 2, "the second request is added")
    first, last = (points(metrics_of(one)[REQUEST_S])[0] for one in (collector.exports[0], collector.exports[-1]))
    assert first.start_time_unix_nano == last.start_time_unix_nano < first.time_unix_nano < last.time_unix_nano


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 60), ("250", 0.25), ("-1", 60), ("nan", 60), ("1e300", 60), ("x", 60)]
)
def test_an_interval_that_is_none_is_not_obeyed(text: str, seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    assert interval_s(text) == seconds
    assert (repr(text) in caplog.text) == (text not in ("", "250"))


async def test_a_collector_whose_answer_never_ends_delays_no_request_and_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    replicas, over = Script(*[says(USAGE)] * 20).replicas(1), Event()

    def hangs(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\nx")
        over.wait(30)

    with collecting(hangs) as collector:
        async with served(*replicas, otlp_endpoint=collector.url) as running, connect(running.port) as client:
            assert (await client.post(CHAT, chat())).status == 200
            await until(lambda: bool(collector.exports), "the answer has begun")
            begun_s = time.monotonic()
            for _ in range(19):
                assert (await client.post(CHAT, chat())).status == 200
            assert time.monotonic() - begun_s < 5
            begun_s = time.monotonic()
        assert time.monotonic() - begun_s < CLOSE_LIMIT_S + 3
        assert len(collector.exports) == 1  # it was still being answered
        over.set()


def summary(model: str) -> RequestSummary:
    some: Any = SimpleNamespace
    exchange = some(status=200, disconnected=False)
    return RequestSummary(
        exchange=exchange, admitted=some(), arrived_s=1.0, ended_s=2.0, chat=True, model=some(name=model)
    )


def test_models_after_the_first_ones_share_a_name() -> None:
    metrics = GenaiMetrics()
    for number in range(MAX_MODELS + 50):
        metrics.over(summary(f"m{number}"), number)
    for number in range(MAX_MODELS + 50):
        metrics.over(summary(f"m{number}"), 1000 + number)
    series = {one.attributes["gen_ai.request.model"]: sum(one.counts) for one in metrics.request_s.series()}
    assert len(series) == MAX_MODELS + 1
    assert series["m0"] == series[f"m{MAX_MODELS - 1}"] == 2 and series[OTHER] == 100


def test_of_too_many_series_the_one_unused_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(genai_metrics, "MAX_SERIES", 3)
    instrument = Instrument("n", "s", "", (1.0,))
    for now_ns, port in enumerate((1, 2, 3, 1, 4, 2)):
        instrument.observe(Labels("chat", "m", None, "h", port), 0.5, now_ns)
    found = {one.attributes["server.port"]: (one.since_ns, sum(one.counts)) for one in instrument.series()}
    assert found == {1: (0, 2), 4: (4, 1), 2: (5, 1)}


@pytest.mark.parametrize(
    ("worker", "attributes_in_environment", "expected"),
    [(None, f"{INSTANCE}=pod-7", "pod-7"), (3, f"{INSTANCE}=pod-7", "pod-7-3"), (3, "", None)],
)
def test_each_process_is_an_instance(
    monkeypatch: pytest.MonkeyPatch, worker: int | None, attributes_in_environment: str, expected: str | None
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", attributes_in_environment)
    one, other = (otlp.resource(worker).attributes[INSTANCE] for _ in range(2))
    assert (one == other == expected) if expected else one != other


@pytest.mark.parametrize("given", ["", "/", "/v1/traces", "/v1/metrics"])
def test_the_endpoint_may_name_a_path_of_either(given: str) -> None:
    assert otlp.Collector(f"http://h:4318{given}").url("/v1/metrics") == "http://h:4318/v1/metrics"


def test_without_the_switch_nothing_of_it_is_imported() -> None:
    program = "import sys, router.process.server; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
