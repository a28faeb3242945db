"""Traces at a collector, by real OTLP over HTTP, and trace headers at replicas."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")

from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from router.records.tracing import CLOSE_LIMIT_S, INSTANCE, Tracing, resource
from tests.router.collector import Collector, attributes, collecting
from tests.router.scripted import (
    CHAT,
    COMPLETIONS,
    Call,
    Script,
    Served,
    chat,
    connect,
    drops,
    event,
    refused_port,
    served,
)

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "a word of the prompt"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


async def told(running: Served, collector: Collector) -> list[Span]:
    await running.idle()
    assert running.router.tracing is not None
    running.router.tracing._batches.force_flush()
    return collector.spans


def answers(call: Call) -> None:
    call.begin()
    call.chunk(event('{"choices":[]}'))
    call.end()


async def test_a_request_is_a_span_and_each_of_its_attempts_another(collector: Collector) -> None:
    script = Script(drops, answers)
    before_ns = time.time_ns()
    async with served(*script.replicas(2), otlp_endpoint=collector.url) as running, connect(running.port) as client:
        parent = f"00-{TRACE}-{PARENT}-01"
        answer = await client.post(CHAT, chat(SECRET, stream=True), traceparent=parent, tracestate="a=b")
        assert answer.status == 200
        request, first, second = await told(running, collector)
    assert {span.trace_id.hex() for span in (request, first, second)} == {TRACE}
    assert request.parent_span_id.hex() == PARENT
    assert first.parent_span_id == second.parent_span_id == request.span_id
    assert [span.kind for span in (request, first, second)] == [Span.SPAN_KIND_SERVER, *[Span.SPAN_KIND_CLIENT] * 2]
    for call, span in zip(script.calls, (first, second), strict=True):
        assert call.header("traceparent") == f"00-{TRACE}-{span.span_id.hex()}-01"
        assert call.header("tracestate") == "a=b"
    assert before_ns <= request.start_time_unix_nano + 10_000_000  # two clocks
    assert request.start_time_unix_nano <= first.start_time_unix_nano <= first.end_time_unix_nano
    assert first.end_time_unix_nano <= second.end_time_unix_nano <= request.end_time_unix_nano <= time.time_ns()
    said = attributes(request)
    assert request.name == f"POST {CHAT}" and said["http.response.status_code"] == 200
    assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.request.model"] == "m"
    assert said["warmroute.retries"] == 1 and said["warmroute.replica"] == attributes(second)["warmroute.replica"]
    assert said["warmroute.request_id"] == answer.headers["x-request-id"]
    assert said["warmroute.matched_tokens"] == 0 and "error.type" not in said
    assert 0 < said["gen_ai.response.time_to_first_chunk"] < 10
    assert first.status.code == Status.STATUS_CODE_ERROR and attributes(first)["error.type"] == "replica_lost"
    assert second.status.code == Status.STATUS_CODE_UNSET and second.name == "chat m"
    assert SECRET.encode() not in collector.requests[0].SerializeToString()


async def test_tokens_are_told_where_they_are_known(collector: Collector) -> None:
    def native(call: Call) -> None:
        call.begin_frames(x_warmroute_cached_tokens="16")
        call.frame(event("one"), 1, 2)
        call.frame(event("two"), 3)
        call.end()

    replicas = Script(native).replicas(1, native=True)
    async with served(*replicas, otlp_endpoint=collector.url + "/") as running, connect(running.port) as client:
        await client.post(COMPLETIONS, {"model": "m", "prompt": "hello", "stream": True})
        request, attempt = await told(running, collector)
    assert attributes(request)["gen_ai.usage.input_tokens"] == 1 + len("hello")
    assert attributes(request)["gen_ai.usage.cache_read.input_tokens"] == 16
    assert attributes(request)["gen_ai.operation.name"] == "text_completion"
    assert attributes(attempt)["gen_ai.usage.output_tokens"] == 3
    assert attempt.name == "text_completion m"


async def test_a_request_without_a_trace_starts_one(collector: Collector) -> None:
    script = Script(answers)
    async with served(*script.replicas(1), otlp_endpoint=collector.url) as running, connect(running.port) as client:
        await client.post(CHAT, chat(stream=True))
        await client.post(CHAT, chat(stream=True), traceparent="00-" + "0" * 32 + f"-{PARENT}-01")
        first, second, *_ = await told(running, collector)
    assert not first.parent_span_id and first.trace_id != second.trace_id
    assert re.fullmatch(f"00-{first.trace_id.hex()}-[0-9a-f]{{16}}-01", script.calls[0].header("traceparent") or "")


async def test_a_client_may_decide_that_it_is_not_traced(collector: Collector) -> None:
    script = Script(answers)
    async with served(*script.replicas(1), otlp_endpoint=collector.url) as running, connect(running.port) as client:
        await client.post(CHAT, chat(stream=True), traceparent=f"00-{TRACE}-{PARENT}-00")
        assert await told(running, collector) == []
    assert script.calls[0].header("traceparent") == f"00-{TRACE}-{PARENT}-00"


async def test_a_refusal_is_a_span_without_attempts(collector: Collector) -> None:
    async with (
        served(*Script(drops).replicas(1), otlp_endpoint=collector.url, queue_size=0) as running,
        connect(running.port) as client,
    ):
        await client.post(CHAT, chat() | {"model": "another"})
        await client.post(CHAT, chat())
        unknown, lost, _ = await told(running, collector)
    assert attributes(unknown)["http.response.status_code"] == 404 and unknown.status.code == Status.STATUS_CODE_UNSET
    assert attributes(lost)["error.type"] == "503" and lost.status.code == Status.STATUS_CODE_ERROR


async def test_a_missing_collector_disturbs_nothing() -> None:
    script = Script(answers)
    endpoint = f"http://127.0.0.1:{refused_port()}"
    async with served(*script.replicas(1), otlp_endpoint=endpoint) as running, connect(running.port) as client:
        for _ in range(20):
            assert (await client.post(CHAT, chat(stream=True))).status == 200
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < CLOSE_LIMIT_S + 5


@pytest.mark.parametrize("variable", [None, "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"])
def test_the_service_has_a_name(collector: Collector, monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    own = None if variable is None else "front-7"
    if variable is not None:
        monkeypatch.setenv(variable, "front-7" if variable == "OTEL_SERVICE_NAME" else "service.name=front-7")
    tracing = Tracing(collector.url + "/v1/traces")
    tracing.tell("one", SpanKind.SERVER, SpanContext(1, 2, False, TraceFlags(1)), None, (1, 2), {}, None)
    tracing.close()  # exports the rest
    [process] = collector.requests[0].resource_spans
    named = attributes(process.resource)
    assert named["service.name"] == (own or "warmroute-router") and named["service.version"]


async def test_a_collector_whose_answer_never_ends_delays_no_end() -> None:
    over = Event()

    def hangs(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\nx")
        over.wait(30)

    with collecting(hangs) as collector:
        async with (
            served(*Script(answers).replicas(1), otlp_endpoint=collector.url) as running,
            connect(running.port) as client,
        ):
            assert (await client.post(CHAT, chat(stream=True))).status == 200
            begun_s = time.monotonic()
        assert time.monotonic() - begun_s < CLOSE_LIMIT_S + 3
        over.set()


@pytest.mark.parametrize(("variable", "value"), [("OTEL_TRACES_EXPORTER", "none"), ("OTEL_SDK_DISABLED", "true")])
async def test_the_environment_switches_traces_off(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    script = Script(answers)
    async with (
        served(*script.replicas(1), otlp_endpoint=f"http://127.0.0.1:{refused_port()}") as running,
        connect(running.port) as client,
    ):
        assert (await client.post(CHAT, chat(stream=True))).status == 200
    assert script.calls[0].header("traceparent") is None


@pytest.mark.parametrize(
    ("worker", "attributes_in_environment", "expected"),
    [(None, f"{INSTANCE}=pod-7", "pod-7"), (3, f"{INSTANCE}=pod-7", "pod-7-3"), (3, "", None)],
)
def test_each_process_is_an_instance(
    monkeypatch: pytest.MonkeyPatch, worker: int | None, attributes_in_environment: str, expected: str | None
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", attributes_in_environment)
    one, other = (resource(worker).attributes[INSTANCE] for _ in range(2))
    assert (one == other == expected) if expected else one != other


def test_without_the_switch_nothing_of_it_is_imported() -> None:
    program = "import sys, router.process.server; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_without_the_extra_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "opentelemetry.py").write_text("raise ModuleNotFoundError('no', name='opentelemetry')")
    command = [sys.executable, "-m", "fleet", "router", "--port", "0", "--otlp-endpoint", "http://127.0.0.1:1"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    fix = "Install it with: pip install 'warmroute[tracing]'"
    assert f"warmroute router needs opentelemetry, which is not installed. {fix}\n" in ended.stderr
    assert "Traceback" not in ended.stderr
