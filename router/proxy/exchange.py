"""One request as its path through the router sees it: the body as it arrives, and the answer to be given.

No task runs it: events are method calls. `serve` is called with the exchange when the whole body is there. The other
end is a client's connection (`router.http.front`) or a gateway that forwards by itself (`router.http.picker`).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

from starlette.types import Scope

from api.errors import ApiError, internal
from api.generation_apis import error_body
from api.http.bodies import SMALL_BYTES, Bodies, check_coding, declared_size

log = logging.getLogger(__name__)

NONE_EXPECTED = Bodies(0)


class Answerer(Protocol):
    """The producer of an exchange's response; it gets the client's actions."""

    def client_full(self) -> None: ...  # its buffer is full: pause
    def client_ready(self) -> None: ...


@dataclass(slots=True, eq=False)
class Exchange:
    scope: Scope
    _open: "Callable[[Exchange], None]"
    # The connection reads and sets these, up to `response_complete`:
    keep_alive: bool = False
    waits_for_100: bool = False
    more_body: bool = True
    disconnected: bool = False
    response_started: bool = False
    response_complete: bool = False
    body: bytearray = field(default_factory=bytearray)
    answerer: Answerer | None = None
    is_watched: bool = True  # this router sees the answer's body
    aside: asyncio.Task[None] | None = None  # slow work for it; cancelled at its end
    on_end: "Callable[[Exchange], None] | None" = None  # called once, however it ends
    max_body_bytes: int = 0
    unheeded_bytes: int = -1  # `set` need not be called for parts of bodies up to this size
    status: int = 0
    sent_bytes: int = 0
    extra: bytes = b""  # header lines for any response
    more_lines: Callable[[], bytes] | None = None  # and those that are true only when they are sent
    _uncounted_bytes: int = 0  # smaller bodies are not counted
    _bodies: Bodies = NONE_EXPECTED
    _held_bytes: int = 0  # counted there
    _begun: bool = False
    _served: "Callable[[Exchange], None] | None" = None

    # ---- what comes from the client

    def begin(self) -> None:
        """Admit or refuse the request before its body has come, when its turn on the connection comes."""
        self._begun = True
        try:
            self._open(self)
        except ApiError as error:
            self.refuse(error)
            return
        if self.waits_for_100 and self.more_body:
            self._let_body_come()
        if self.body or not self.more_body or self.disconnected:
            self.set()

    def expect(self, serve: Callable[["Exchange"], None], max_body_bytes: int, bodies: Bodies) -> None:
        """Set the function for the whole body; raise ApiError for a declared length or coding that is refused."""
        self._served, self.max_body_bytes, self._bodies = serve, max_body_bytes, bodies
        self._uncounted_bytes = self.unheeded_bytes = min(SMALL_BYTES, max_body_bytes)
        by_name = dict(self.scope["headers"])  # no loop of ours over the headers: usually there are more than ten
        length = by_name.get(b"content-length")
        if length is not None and (size := declared_size(length) or 0) > self._uncounted_bytes:
            if size > max_body_bytes:
                raise too_large(size, max_body_bytes)
            bodies.check(size)
        if b"content-encoding" in by_name:
            for name, value in self.scope["headers"]:
                if name == b"content-encoding":
                    check_coding(value.decode("latin-1"))

    def set(self) -> None:
        """Handle a change: part of the body has come, or the client has left."""
        if self.response_complete or not self._begun:
            return
        if self.disconnected:
            self._end()
            return
        if (serve := self._served) is None:
            return
        size = len(self.body)
        if size > self._uncounted_bytes:
            try:
                if size > self.max_body_bytes:
                    raise too_large(size, self.max_body_bytes)
                self._held_bytes = self._bodies.claim(size, self._held_bytes)
            except ApiError as error:
                self.refuse(error)
                return
        if not self.more_body:
            self._served = None
            try:
                serve(self)
            except Exception:  # the caller serves other requests too
                log.exception("A request failed")
                self.fail()

    def take_body(self) -> bytes:
        """Hand the whole body over to the caller."""
        body, self.body = self.body, bytearray()
        # Readers and senders accept both types, and copying thirty megabytes would block the loop for 20 ms.
        return bytes(body) if len(body) <= SMALL_BYTES else cast(bytes, body)

    def replace_body(self, body: bytearray | None) -> None:
        """Have the request begin with another body than has come; raise ApiError 429 if there is no room for it."""
        if body is not None:
            self.hold(len(body))
            self.body = body

    def hold(self, size: int) -> None:
        """Count these bytes, of the body and its products, until the end; raise ApiError 429 if there is no room."""
        self._held_bytes = self._bodies.claim(size, self._held_bytes)

    def guard(self, step: Callable[..., None], *arguments: object) -> None:
        """Run a step of this request; an unexpected exception is logged, and ends this request alone.

        The callers serve other requests too: the parser would blame the client, and the clock would stop for all.
        """
        try:
            step(*arguments)
        except Exception:
            log.exception("A request failed")
            self.fail()

    def fail(self) -> None:
        """End the request after an internal error, which is in the log."""
        if self.response_started:
            self.cut()
        else:
            self.refuse(internal())

    def full(self) -> None:
        if self.answerer is not None:
            self.answerer.client_full()

    def ready(self) -> None:
        if self.answerer is not None:
            self.answerer.client_ready()

    # ---- overridden for each kind of other end

    def _let_body_come(self) -> None:
        """Say that the request is admitted: its sender waits for that."""

    def start(self, status: int, headers: bytes, *, length: int | None = None) -> None:
        """Set the head. `headers` are complete lines, but none that frames the body; without a length it is chunked."""
        raise NotImplementedError

    def flush(self) -> None:
        """Send the head without waiting for a body."""
        raise NotImplementedError

    def send(self, body: bytes) -> None:
        raise NotImplementedError

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        """A function for further chunks that are framed already; None: their bodies are to be sent."""
        return None

    def finish(self, body: bytes = b"") -> None:
        raise NotImplementedError

    def cut(self) -> None:
        """End in the middle of the answer, so that the client sees that it is not complete."""
        raise NotImplementedError

    @property
    def unread_bytes(self) -> int:
        raise NotImplementedError

    def abandon(self) -> None:
        """Break off an answer that the client does not read."""
        raise NotImplementedError

    # ---- the answer

    def answer(self, status: int, headers: bytes, body: bytes) -> None:
        if self.response_started:  # a second response would be read as part of the first one's body
            self.cut()
        elif not self.disconnected:
            self.start(status, headers, length=len(body))
            self.finish(body)

    def refuse(self, error: ApiError) -> None:
        error.__traceback__ = None  # its frames would keep this request, body and all, until they are collected
        if self.more_body or error.status == 413:
            self.keep_alive = False  # the rest of the body is not read
        headers = {name.lower(): value for name, value in error.headers.items() if name != "Connection"}
        lines = b"".join(b"%s: %s\r\n" % (name.encode(), value.encode()) for name, value in headers.items())
        self.answer(error.status, b"content-type: application/json\r\n" + lines, error_body(error, self.scope["path"]))

    def _end(self) -> None:
        if self.response_complete:
            return
        self.response_complete = True
        self.body = bytearray()  # an idle connection keeps its last exchange
        self._served = self.more_lines = None
        if self._held_bytes:
            self._bodies.release(self._held_bytes)
            self._held_bytes = 0
        aside, self.aside = self.aside, None
        if aside is not None:
            aside.cancel()
        self.answerer = None
        on_end, self.on_end = self.on_end, None  # no cycles of references: they would wait for the collector
        if on_end is not None:
            on_end(self)


def too_large(size: int, limit: int) -> ApiError:
    message = f"the body has {size:,} bytes or more; at most {limit:,} are taken"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
