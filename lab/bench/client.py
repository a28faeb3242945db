"""Asks an endpoint over kept connections and times what comes back.

Nothing is sent twice: a connection that ends without an answer is a failure, as a client of the endpoint would see it.
"""

import asyncio
import ssl
import time
from importlib.metadata import version

import msgspec

from lab.bench.outcome import EVENT_STREAM, Outcome, error_text, read_event
from router.members.broken import Broken
from router.members.spec import Target
from router.members.upstream import Header, Sending, Upstream
from router.proxy.events import DONE, EventReader, payload_of

MAX_ERROR_BYTES = 64 * 1024
CONNECT_TIMEOUT_S = 10.0
SWEEP_EVERY_S = 5.0


class Endpoint:
    """The connections to an endpoint, and the headers of every request."""

    def __init__(self, target: Target, key: str | None, timeout_s: float) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self.in_flight: set[InFlight] = set()
        tls = ssl.create_default_context() if target.tls else None
        self.upstream = Upstream(target, min(timeout_s, CONNECT_TIMEOUT_S), tls)
        self._lines = b"user-agent: warmroute-bench/%b\r\n" % version("warmroute").encode()
        if key:
            self._lines += b"authorization: Bearer %b\r\n" % key.encode()
        self._loop = asyncio.get_running_loop()
        self._sweeper = self._loop.call_later(SWEEP_EVERY_S, self._sweep)

    def ask(self, path: str, body: bytes, outcome: Outcome, began_s: float, session: str = "") -> "InFlight":
        return InFlight(self, self._request("POST", path, body, session), outcome, began_s)

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return status and body of an answer; raises Broken or TimeoutError."""
        whole = Whole(self._loop.create_future())
        sending = self.upstream.send(self._request(method, path, body), whole)
        try:
            async with asyncio.timeout(self.timeout_s):
                return await whole.ended
        finally:
            sending.cancel()

    def _request(self, method: str, path: str, body: bytes, session: str = "") -> bytes:
        """`session`: keeps a conversation together where a router goes by that."""
        lines = self.upstream.host_line + self._lines
        if session:
            lines += b"x-session-id: %b\r\n" % session.encode()
        if body:
            lines += b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        start = b"%b %b%b HTTP/1.1\r\n" % (method.encode(), self.upstream.path, path.encode())
        return start + lines + b"\r\n" + body

    def _sweep(self) -> None:
        self.upstream.sweep(self._loop.time())
        self._sweeper = self._loop.call_later(SWEEP_EVERY_S, self._sweep)

    def close(self) -> None:
        """Abandon the requests in flight, and close."""
        self._sweeper.cancel()
        for asked in list(self.in_flight):
            asked.abandon()
        self.upstream.close()


class Whole:
    """Waits for an answer that is not timed."""

    def __init__(self, ended: asyncio.Future[tuple[int, bytes]]) -> None:
        self.ended = ended
        self._status = 0
        self._body = b""

    def answered(self, status: int, headers: list[Header]) -> None:  # noqa: ARG002
        self._status = status

    def received(self, body: bytes, complete: bool) -> None:
        self._body += body
        if complete and not self.ended.done():
            self.ended.set_result((self._status, self._body))

    def broke(self, broken: Broken) -> None:
        if not self.ended.done():
            self.ended.set_exception(broken)


class InFlight:
    """A request; what comes of it is in its outcome, which is complete when `ended` is done."""

    def __init__(self, endpoint: Endpoint, request: bytes, outcome: Outcome, began_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.outcome = outcome
        self.ended: asyncio.Future[None] = loop.create_future()
        self.said: list[str] = []  # the answer's text
        self._endpoint = endpoint
        self._began_s = began_s
        self._events = EventReader()
        self._error_body = b""
        self._finished = False  # the answer has said itself that it is complete
        self._is_stream = False
        self._last_s = 0.0
        endpoint.in_flight.add(self)
        late = f"not complete after {endpoint.timeout_s:g} s"
        self._timer = loop.call_later(endpoint.timeout_s, self._fail, "timeout", late)
        outcome.sent_s = self._now_s()
        self._sending: Sending | None = endpoint.upstream.send(request, self, resend=False)

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    # ---- what comes back

    def answered(self, status: int, headers: list[Header]) -> None:
        outcome = self.outcome
        outcome.status = status
        for name, value in headers:
            if name == b"content-type":
                self._is_stream = status == 200 and value.lower().startswith(EVENT_STREAM)
            elif name == b"x-warmroute-replica":
                outcome.replica = value.decode("latin-1")
            elif name == b"x-warmroute-cached-tokens" and value.isdigit():
                outcome.cached_tokens = int(value)

    def received(self, body: bytes, complete: bool) -> None:
        now_s = self._now_s()
        if self._is_stream:
            try:
                for event in self._events.feed(body):
                    self._event(payload_of(event), now_s)
            except (ValueError, msgspec.DecodeError) as error:
                self._fail("unreadable event", str(error))
                return
        elif len(self._error_body) < MAX_ERROR_BYTES:
            self._error_body += body
        if complete:
            self._complete()

    def broke(self, broken: Broken) -> None:
        if broken.refused:
            self._fail("no connection", str(broken))
        elif self.outcome.status is None:
            self._fail("no answer", str(broken))
        else:
            self._fail("broken stream", str(broken))

    def _event(self, payload: bytes | None, now_s: float) -> None:
        if not payload:
            return
        if payload == DONE:
            self._finished = self._finished or self.outcome.events > 0
            return
        event, outcome = read_event(payload), self.outcome
        if event.error is not None and not outcome.error:
            outcome.error, outcome.detail = "error in the stream", error_text(payload)
        for choice in event.choices:
            self._finished = self._finished or choice.finish_reason is not None
            if choice.says:
                if outcome.first_s is None:
                    outcome.first_s = now_s
                else:
                    outcome.gaps_s.append(now_s - self._last_s)
                outcome.events, self._last_s = outcome.events + 1, now_s
                self.said.append(choice.said)
        if event.usage is not None:
            outcome.prompt_tokens = event.usage.prompt_tokens
            outcome.output_tokens = event.usage.completion_tokens
            if event.usage.cached_tokens is not None:
                outcome.cached_tokens = event.usage.cached_tokens

    # ---- its end

    def _complete(self) -> None:
        outcome = self.outcome
        if outcome.error:
            self._end()
        elif outcome.status != 200:
            self._fail(f"status {outcome.status}", error_text(self._error_body))
        elif not self._is_stream:
            self._fail("not a stream", error_text(self._error_body))
        elif not self._finished:
            self._fail("cut short", "the stream ended without a finish_reason, and without [DONE] after a token")
        else:
            self._end()

    def _fail(self, kind: str, detail: str) -> None:
        if not self.outcome.error:  # or the endpoint has said itself what is wrong
            self.outcome.error, self.outcome.detail = kind, detail
        self._end()

    def _end(self) -> None:
        outcome = self.outcome
        outcome.end_s = self._now_s()
        if not outcome.error:
            if outcome.first_s is None:  # an empty answer begins with its end
                outcome.first_s = outcome.end_s
            if outcome.output_tokens is None:
                outcome.output_tokens = outcome.events
        self.abandon()
        if not self.ended.done():
            self.ended.set_result(None)

    def abandon(self) -> None:
        """Close the connection, unless the request has ended."""
        self._timer.cancel()
        self._endpoint.in_flight.discard(self)
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.cancel()
