"""Endpoints that answer as a test says, on threads of their own: the load generator has the event loop."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lab.bench.load import Limits
from lab.bench.measure import Measured, Plan, measured
from lab.bench.probe import RequestSettings
from lab.bench.workloads import Arrival, Conversation, Passage, Turn, at_once
from router.members.spec import parse_target

MODEL = "m"


class Call:
    """One request, and its answer, to be written piece by piece."""

    def __init__(self, number: int, handler: BaseHTTPRequestHandler, body: Any, server: "Endpoint") -> None:
        self.number = number  # of those that the load consists of; -1: the probe's
        self.path = handler.path
        self.body = body
        self.headers = handler.headers
        self.server = server
        self._handler = handler

    def refuse(self, status: int, message: str, **headers: str) -> None:
        self.whole(json.dumps({"error": {"message": message}}).encode(), status, **headers)

    def whole(self, body: bytes, status: int = 200, **headers: str) -> None:
        self._handler.send_response(status)
        for name, value in headers.items():
            self._handler.send_header(name.replace("_", "-"), value)
        self._handler.send_header("content-length", str(len(body)))
        self._handler.end_headers()
        self._handler.wfile.write(body)

    def begin(self, **headers: str) -> None:
        self._handler.send_response(200)
        for name, value in {"content-type": "text/event-stream", "transfer-encoding": "chunked", **headers}.items():
            self._handler.send_header(name.replace("_", "-"), value)
        self._handler.end_headers()

    def event(self, payload: Any) -> None:
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        event = b"data: " + raw + b"\n\n"
        self._handler.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))

    def token(self, text: str = " able", finish_reason: str | None = None) -> None:
        self.event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]})

    def end(self) -> None:
        self._handler.wfile.write(b"0\r\n\r\n")

    def drop(self) -> None:
        self._handler.close_connection = True

    def answer(self, tokens: int = 2, cached: int | None = None, tells_usage: bool = True, **headers: str) -> None:
        """As an endpoint does that nothing is wrong with."""
        self.begin(**headers)
        for number in range(tokens):
            self.token(finish_reason="length" if number == tokens - 1 else None)
        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
        if tells_usage:
            usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": tokens, **details}
            self.event({"choices": [], "usage": usage})
        self.event(b"[DONE]")
        self.end()

    @property
    def prompt_tokens(self) -> int:
        words = sum(len(message["content"].split()) for message in self.body.get("messages", ()))
        return round(words * self.server.tokens_per_word)


Answer = Callable[[Call], object]


class Endpoint:
    def __init__(self, url: str, tokens_per_word: float) -> None:
        self.url = url
        self.tokens_per_word = tokens_per_word
        self.calls: list[Call] = []  # of the load
        self.most_at_once = 0
        self.at_once = 0
        self.lock = threading.Lock()
        self.released = threading.Event()  # for answers that wait until a test has seen enough


def models(call: Call) -> None:
    call.whole(json.dumps({"data": [{"id": MODEL}]}).encode())


@contextmanager
def endpoint(
    answer: Answer = Call.answer,
    *,
    on_probe: Answer = lambda call: call.answer(1),
    on_get: Answer = models,
    tokens_per_word: float = 1.0,
) -> Iterator[Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            with suppress(ConnectionError):
                on_get(self._call({}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            call = self._call(body)
            if 1 in (body.get("max_tokens"), body.get("max_completion_tokens")):  # the probe's
                on_probe(call)
                return
            with made.lock:
                call.number = len(made.calls)
                made.calls.append(call)
                made.at_once += 1
                made.most_at_once = max(made.most_at_once, made.at_once)
            with suppress(ConnectionError):
                answer(call)
            with made.lock:
                made.at_once -= 1

        def _call(self, body: Any) -> Call:
            return Call(-1, self, body, made)

        def log_message(self, *arguments: Any) -> None:
            """Not into the test's output."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that hung up is what some tests are about."""

    server = Server(("127.0.0.1", 0), Handler)
    made = Endpoint(f"http://127.0.0.1:{server.server_port}", tokens_per_word)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield made
    finally:
        made.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def singles(count: int, words: int = 20, output_tokens: int = 2) -> list[Conversation]:
    return [Conversation(str(n), (), (Turn((Passage(f"p{n}", words),), output_tokens),)) for n in range(count)]


def closed(
    url: str, conversations: list[Conversation], clients: int, timeout_s: float = 10.0, **limits: Any
) -> Measured:
    return _run(url, lambda _: at_once(conversations), Limits(clients=clients, **limits), timeout_s)


def opened(
    url: str, conversations: list[Conversation], rate: float, timeout_s: float = 10.0, **limits: Any
) -> Measured:
    return arriving(
        url, [Arrival(number / rate, talk) for number, talk in enumerate(conversations)], timeout_s, **limits
    )


def arriving(url: str, arrivals: list[Arrival], timeout_s: float = 10.0, **limits: Any) -> Measured:
    return _run(url, lambda _: iter(arrivals), Limits(**limits), timeout_s)


def _run(url: str, arrivals: Any, limits: Limits, timeout_s: float) -> Measured:
    plan = Plan(parse_target(url), RequestSettings(MODEL, "1"), arrivals, limits, timeout_s=timeout_s)
    return measured(plan)


__all__ = ["Call", "Endpoint", "arriving", "closed", "endpoint", "opened", "singles"]
