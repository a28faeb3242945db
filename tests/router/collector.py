"""A collector of OpenTelemetry that decodes what it gets with OpenTelemetry's own classes, and keeps it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """All exported requests, in the order in which they came."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.url = ""

    @property
    def spans(self) -> list[Span]:
        """Spans in order of time, server spans first."""
        found = [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        return sorted(found, key=lambda span: (span.kind != Span.SPAN_KIND_SERVER, span.start_time_unix_nano))


def attributes(carrier: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value") or "") for one in carrier.attributes}


@contextmanager
def collecting(answer: Callable[[BaseHTTPRequestHandler], None] | None = None) -> Iterator[Collector]:
    """`answer`: how the collector answers, if not with an empty 200."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.requests.append(ExportTraceServiceRequest.FromString(body))
            if answer is not None:
                answer(self)
                return
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        collector.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join()
