"""A span for every generation request and one for each of its attempts, sent by OTLP; no word of a prompt.

Needs the extra `tracing`. Spans are built when the request has ended, from its summary, and sent by a thread. Until
then only the ids exist, which replicas get in a header. If the collector is lost, so are its spans.
"""

import os
import random
import re
import time
from collections.abc import Iterable
from importlib.metadata import version
from threading import Thread
from typing import TypeAlias
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from router.members.upstream import Header
from router.proxy.attempt import Attempt
from router.proxy.headers import value_of
from router.proxy.predicted_hit import PredictedHit
from router.proxy.request_summary import RequestSummary

Attributes: TypeAlias = dict[str, str | int | float | bool]
Known: TypeAlias = dict[str, str | int | float | bool | None]  # None: nothing is to be told

PROVIDER = "warmroute"  # none of the conventions' names is that of a server's own models
INSTANCE = "service.instance.id"
TRACES_PATH = "/v1/traces"
EXPORT_LIMIT_S = 5.0
CLOSE_LIMIT_S = 2.0  # the time for the last spans; a lost collector must not delay the end
TRACEPARENT = b"traceparent"
NS = 1_000_000_000

_PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Tracing:
    """Sends spans to a collector; `close` it at the end."""

    def __init__(self, endpoint: str, worker: int | None = None) -> None:
        """`worker`: the number of this process if it is one of several."""
        url = endpoint.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH
        self._batches = BatchSpanProcessor(OTLPSpanExporter(url, timeout=EXPORT_LIMIT_S))
        self._resource = resource(worker)
        self._scope = InstrumentationScope("warmroute.router", version("warmroute"))

    def begin(self, headers: Iterable[Header]) -> "RequestTrace | None":
        """Begin a request's trace; None if its client decided against tracing."""
        said = value_of(headers, TRACEPARENT)
        found = _PARENT.fullmatch(said) if said is not None else None
        if found is None:
            return RequestTrace(self, random.getrandbits(128) or 1, None)
        if not int(found[3], 16) & TraceFlags.SAMPLED:
            return None
        return RequestTrace(self, int(found[1], 16), int(found[2], 16))

    def tell(
        self,
        name: str,
        kind: SpanKind,
        context: SpanContext,
        parent: SpanContext | None,
        times_ns: tuple[int, int],
        attributes: Attributes,
        fault: str | None,
    ) -> None:
        """Queue a span; `fault` describes its error, and is None if there was none."""
        self._batches.on_end(
            ReadableSpan(
                name,
                context,
                parent,
                self._resource,
                attributes,
                kind=kind,
                status=Status() if fault is None else Status(StatusCode.ERROR, fault or None),
                start_time=times_ns[0],
                end_time=times_ns[1],
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        closing = Thread(target=self._batches.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_LIMIT_S)


def tracing_to(endpoint: str, worker: int | None) -> Tracing | None:
    """Return None if OpenTelemetry's own variables switch traces off."""
    off = (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none"))
    if any(os.environ.get(variable, "").strip().lower() == value for variable, value in off):
        return None
    return Tracing(endpoint, worker)


def resource(worker: int | None) -> Resource:
    """Describe this process; the environment's names win, and each worker gets an instance of its own."""
    named = OTELResourceDetector().detect().attributes
    instance = str(named.get(INSTANCE) or uuid4())
    if INSTANCE in named and worker is not None:
        instance = f"{instance}-{worker}"
    usual = {"service.name": "warmroute-router", "service.version": version("warmroute")}
    return Resource.create({**usual, **named, INSTANCE: instance})


class RequestTrace:
    """The ids of one request and of its attempts."""

    __slots__ = ("_attempt_ids", "_parent_id", "_span_id", "_trace_id", "_tracing")

    def __init__(self, tracing: Tracing, trace_id: int, parent_id: int | None) -> None:
        self._tracing = tracing
        self._trace_id = trace_id
        self._parent_id = parent_id
        self._span_id = _new_id()
        self._attempt_ids: list[int] = []

    def line(self) -> bytes:
        """The header of the next attempt, which makes its span the parent of the replica's."""
        span_id = _new_id()
        self._attempt_ids.append(span_id)
        return b"traceparent: 00-%032x-%016x-01\r\n" % (self._trace_id, span_id)

    def end(self, summary: RequestSummary) -> None:
        """Queue the spans of a finished request and of its attempts."""
        now_s = summary.ended_s
        zero_ns = time.time_ns() - round(now_s * NS)  # the zero of the loop's clock
        scope = summary.exchange.scope
        own = self._context(self._span_id)
        parent = None if self._parent_id is None else self._context(self._parent_id, is_remote=True)
        times_ns = (zero_ns + round(summary.arrived_s * NS), zero_ns + round(now_s * NS))
        attributes = request_attributes(summary)
        name = f"{scope['method']} {scope['path']}"
        self._tracing.tell(name, SpanKind.SERVER, own, parent, times_ns, attributes, fault_of(summary))
        for span_id, attempt in zip(self._attempt_ids, summary.attempts, strict=True):
            ended_s = attempt.ended_s or now_s
            times_ns = (zero_ns + round(attempt.placed.sent_s * NS), zero_ns + round(ended_s * NS))
            attributes = attempt_attributes(summary, attempt)
            name = f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}"
            context = self._context(span_id)
            self._tracing.tell(name, SpanKind.CLIENT, context, own, times_ns, attributes, attempt.fault)

    def _context(self, span_id: int, *, is_remote: bool = False) -> SpanContext:
        return SpanContext(self._trace_id, span_id, is_remote, _SAMPLED)


def _new_id() -> int:
    return random.getrandbits(64) or 1


def known(attributes: Known) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}


def operation(summary: RequestSummary) -> str:
    return "text_completion" if summary.chat is False else "chat"


def fault_of(summary: RequestSummary) -> str | None:
    """Describe the request's error, without the client's text. A client's own error is none here."""
    if summary.exchange.status >= 500:
        return ""
    return "the answer broke off" if summary.is_broken else None


def request_attributes(summary: RequestSummary) -> Attributes:
    exchange, status = summary.exchange, summary.exchange.status
    error = str(status) if status >= 500 else "broken_stream" if summary.is_broken else None
    return known(
        {
            "http.request.method": exchange.scope["method"],
            "http.route": exchange.scope["path"],
            "url.path": exchange.scope["path"],
            "url.scheme": exchange.scope["scheme"],
            "gen_ai.operation.name": operation(summary),
            "gen_ai.provider.name": PROVIDER,
            "warmroute.request_id": summary.admitted.request_id,
            "warmroute.retries": summary.retries,
            "warmroute.resumes": summary.resumes,
            "http.response.status_code": status or None,
            "error.type": error,
            "warmroute.client_left": exchange.disconnected or None,
            **({} if summary.generation is None else answer_attributes(summary, summary.generation)),
        }
    )


def answer_attributes(summary: RequestSummary, generation: PredictedHit) -> Known:
    """Attributes of the placement and of its outcome."""
    decision, chosen, prompt = generation.decision, generation.member, generation.prompt
    predicted = generation.prediction
    return {
        "gen_ai.request.model": generation.prompt.peek.model,
        "gen_ai.request.stream": bool(generation.prompt.peek.stream),
        "warmroute.policy": decision.policy,
        "warmroute.prompt_is_exact": prompt.exact,
        "warmroute.prediction_is_exact": generation.exactness.prediction,
        "warmroute.waited_s": summary.waited_s,
        "gen_ai.usage.input_tokens": prompt.all_tokens if prompt.exact else None,
        "warmroute.replica": None if chosen is None else chosen.name,
        "warmroute.matched_tokens": None if chosen is None else int(decision.question.matched.get(chosen.slot, 0)),
        "warmroute.predicted_cached_tokens": None if predicted is None else predicted.tokens,
        "gen_ai.usage.cache_read.input_tokens": generation.reported_tokens,
        "gen_ai.response.time_to_first_chunk": summary.ttft_s,
    }


def attempt_attributes(summary: RequestSummary, attempt: Attempt) -> Attributes:
    target = attempt.member.upstream.target
    error = str(attempt.status) if attempt.status >= 400 else "replica_lost"
    tokens = sum(len(packed) // 4 for said in attempt.token_ids.values() for packed in said)
    return known(
        {
            "http.request.method": "POST",
            "server.address": target.host,
            "server.port": target.port,
            "gen_ai.operation.name": operation(summary),
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": summary.generation.prompt.peek.model if summary.generation else "",
            "warmroute.replica": attempt.member.name,
            "http.response.status_code": attempt.status or None,
            "warmroute.half": "prefill" if attempt.half == "prefill" else None,
            "gen_ai.usage.output_tokens": tokens if attempt.framed else None,  # else they were not counted
            "error.type": None if attempt.fault is None else error,
        }
    )
