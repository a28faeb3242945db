"""Asks an endpoint over kept connections and times what comes back.

Nothing is sent twice: a connection that ends without an answer is a failure, as a client of the endpoint would see it.
"""

import asyncio
import ssl
import time
from importlib.metadata import version
from typing import Any

import msgspec
from msgspec import Struct

from router.members.broken import Broken
from router.members.fetch import Fetched, fetch
from router.members.spec import Target
from router.members.upstream import Header, Sending, Upstream
from router.proxy.streams.events import DONE, EventReader, payload_of

EVENT_STREAM = b"text/event-stream"
TOO_MANY = 429
MAX_DETAIL = 300  # characters kept of what an endpoint says of an error


class PromptDetails(Struct):
    cached_tokens: int | None = None


class Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    prompt_cache_hit_tokens: int | None = None  # DeepSeek's name

    @property
    def cached_tokens(self) -> int | None:
        details = self.prompt_tokens_details
        cached = details.cached_tokens if details is not None else None
        return self.prompt_cache_hit_tokens if cached is None else cached


class Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class Choice(Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def says(self) -> bool:
        """True if it has a token; a role alone is none."""
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)

    @property
    def said(self) -> str:
        return self.text or (self.delta.content if self.delta is not None else None) or ""


class Event(Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


read_event = msgspec.json.Decoder(Event).decode


class Outcome(Struct):
    """One request. Times are seconds since the run began; lengths are None if the endpoint does not tell them."""

    talk: str
    turn: int
    is_warm_up: bool
    intended_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    end_s: float = 0.0
    status: int | None = None
    error: str | None = None  # its kind
    detail: str = ""
    asked_tokens: int = 0  # the planned tokens of the prompt
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    replica: str | None = None
    events: int = 0  # those with a token in them
    gaps_s: list[float] = []  # between those
    session_turns: int = 0  # its session has so many; 0: it has none
    retry_after_s: int | None = None  # told with status 429
    sent_away: int = 0  # how often it was, and came again when told
    request_id: str = ""  # sent along, if there is one

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None or self.error else self.first_s - self.intended_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.error else self.end_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if self.error or self.first_s is None or not self.output_tokens or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.output_tokens - 1)

    def comes_again(self) -> None:
        self.sent_away += 1
        self.status = self.error = self.retry_after_s = None
        self.detail = ""


def error_text(body: bytes) -> str:
    """The message of an OpenAI-shaped error; of any other, how it begins."""
    try:
        found = msgspec.json.decode(body)
        error = found.get("error", found)
        text = error if isinstance(error, str) else error.get("message") or error.get("detail") or found.get("detail")
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
        text = None
    return (str(text) if text else body.decode(errors="replace"))[:MAX_DETAIL].strip()


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
        """`session`: keeps a conversation together where a router goes by that."""
        lines = self.upstream.host_line + self._lines
        if session:
            lines += b"x-session-id: %b\r\n" % session.encode()
        if outcome.request_id:
            lines += b"x-request-id: %b\r\n" % outcome.request_id.encode()
        lines += b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        request = b"POST %b%b HTTP/1.1\r\n%b\r\n%b" % (self.upstream.path, path.encode(), lines, body)
        return InFlight(self, request, outcome, began_s)

    async def get(self, path: str) -> Fetched:
        """Raise Broken if there is no answer in time."""
        return await fetch(self.upstream, path, lines=self._lines, timeout_s=self.timeout_s)

    def _sweep(self) -> None:
        self.upstream.sweep(self._loop.time())
        self._sweeper = self._loop.call_later(SWEEP_EVERY_S, self._sweep)

    def close(self) -> None:
        self._sweeper.cancel()
        for asked in list(self.in_flight):
            asked.abandon()
        self.upstream.close()


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

    # ---- answers

    def answered(self, status: int, headers: list[Header]) -> None:
        outcome = self.outcome
        outcome.status = status
        for name, value in headers:
            if name == b"content-type":
                self._is_stream = status == 200 and value.lower().startswith(EVENT_STREAM)
            elif name == b"retry-after" and status == TOO_MANY and value.isdigit():
                outcome.retry_after_s = int(value)
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
        if not complete:
            return
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
