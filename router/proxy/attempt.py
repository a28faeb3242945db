"""One attempt of a request at a replica: reads the response as far as needed, and hands it to its listener.

Methods called by a connection raise nothing: a mistake of ours must not stop the caller's other work.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from api.native import USE_INDEX, FrameReader
from router.members.broken import Broken
from router.members.upstream import Header, Sending
from router.placement.cost import INFINITE, Half
from router.placement.load import Placed

if TYPE_CHECKING:
    from router.members.members import Member
    from router.proxy.exchange import Exchange

log = logging.getLogger(__name__)

MAX_REFUSAL_BYTES = 16 * 1024  # the part of a refusal that is read, to see why
FRAMES_TYPE = b"application/x-warmroute-frames"
MAX_ANSWER_IDS = 2**20  # the limit over all choices; they are kept so that another replica can go on
MAX_CHOICES = 4096
SMALL_BYTES = 256 * 1024  # an unfinished frame of this size is not worth counting
HEAD, BODY = 1, 2  # signs of life: parts of an answer


# ---- the figures that an engine tells of one answer, read on its way to the client

MARK = b'_tokens"'  # each report of an engine has this, and no generated text, whose quotes are escaped
END_BYTES = 64  # a report may come in two parts
BESIDE_TOKENS = 2  # events of a stream that carry none: its first and its last

_GENERATED = (b'"completion_tokens"', b'"output_tokens"')
_PROMPT = (b'"prompt_tokens"', b'"input_tokens"')
CACHED = (b'"cached_tokens"', b'"cache_read_input_tokens"')
_APART = (b'"cache_read_input_tokens"', b'"cache_creation_input_tokens"')  # besides Anthropic's input_tokens


class PromptsTold(Struct, eq=False):
    """The cost of a request's prompts, as a replica of ours tells it when each choice begins."""

    choices: int = 0  # those that have begun
    computed: int = 0
    cached: int = 0

    def add(self, figures: list[int]) -> None:
        if len(figures) != 2:
            raise ValueError(f"{len(figures)} figures of a prompt; there are two")
        self.choices += 1
        self.computed += figures[0]
        self.cached += figures[1]


@dataclass(slots=True, eq=False)
class Report:
    """An engine's own words about the tokens of one attempt, read from an answer that is not in frames."""

    prompt: int | None = None
    cached: int | None = None
    generated: int | None = None
    events: int = 0  # their number so far
    read_tokens: int = 0  # generated ones, by whoever reads the events
    is_whole: bool = False  # the answer has come to its end
    _end: bytes = b""

    @property
    def counted(self) -> int:
        """The generated tokens, as far as they can be counted without a report."""
        return self.read_tokens or max(0, self.events - BESIDE_TOKENS)

    @property
    def tokens(self) -> int:
        """The generated tokens. An engine's figures at the beginning of a stream say nothing of what came after."""
        if self.generated is None:
            return self.read_tokens or max(0, self.events - BESIDE_TOKENS)
        return self.generated if self.is_whole else max(self.generated, self.counted)

    def read(self, body: bytes) -> None:
        self.events += body.count(b"\n\n")
        if self._end and (seam := self._end + body[:END_BYTES]).find(MARK) >= 0:
            self._look(seam)
        if body.find(MARK) >= 0:  # `in` would take twice as long: it tries bytes as a number first
            self._look(body)
        self._end = b"" if body.endswith(b"\n\n") else (self._end + body[-END_BYTES:])[-END_BYTES:]

    def _look(self, body: bytes) -> None:
        self.generated = last_number(body, *_GENERATED, before=self.generated)
        self.cached = last_number(body, *CACHED, before=self.cached)
        if (told := last_number(body, *_PROMPT)) is not None:
            prompt = told + sum(last_number(body, name) or 0 for name in _APART)
            self.prompt = max(prompt, self.prompt or 0)  # the end of a stream may leave out the cached ones


_VALUE = re.compile(rb"\s*:\s*(\d{1,9})")


def last_number(body: bytes, *names: bytes, before: int | None = None) -> int | None:
    """The value of that field among these, each in its quotes, which stands last in the body; `before` if none does."""
    last = max(names, key=body.rfind)
    at = body.rfind(last)
    found = _VALUE.match(body, at + len(last)) if at >= 0 else None
    return before if found is None else int(found[1])


# ---- the attempt


class AttemptListener(Protocol):
    """Listens to an attempt: the answer of a request, or its prefill half."""

    @property
    def exchange(self) -> "Exchange": ...
    @property
    def model_name(self) -> str | None: ...
    def begun(self, attempt: "Attempt") -> None: ...
    def take(self, attempt: "Attempt", body: bytes, complete: bool) -> None: ...
    def holds(self, pending_bytes: int) -> bool: ...  # there is room for an unfinished frame, which is claimed
    # The status is 400 or more, and the body all of it or the beginning.
    def refused(self, attempt: "Attempt", body: bytes, complete: bool) -> None: ...
    def failed(self, attempt: "Attempt", broken: Broken) -> None: ...
    # True: the request could continue at one of these replicas instead of waiting for its own.
    def may_move(self, attempt: "Attempt", members: "Sequence[Member]") -> bool: ...


@dataclass(slots=True, eq=False)
class Attempt:
    owner: AttemptListener
    member: "Member"
    placed: Placed
    touched_s: float  # kept by the clock's sweep, not per byte
    takes_frames: bool = False  # it was asked for an answer in frames
    begun_s: float = 0.0  # 0: not yet
    ended_s: float = 0.0  # 0: not yet
    fault: str | None = None  # how it ended, if that was the replica's doing
    spoken: int = 0  # HEAD or BODY, if it came since the last sweep; a server may send a head without its engine
    unread: int | None = None  # bytes that the client had not read then, if it is waited for
    status: int = 0
    headers: list[Header] = field(default_factory=list)
    content_type: bytes = b""
    framed: bool = False
    cached_tokens: int | None = None
    token_ids: dict[int, list[bytes]] = field(default_factory=dict)  # packed ids by choice
    sending: Sending | None = None
    half: Half = "decode"
    within_s: float = INFINITE  # its answer has to begin; the router's own limits count, too
    frames: FrameReader | None = None
    generated: int = 0  # token ids in its frames
    told: PromptsTold | None = None  # the cost of its prompts, by frames of figures
    report: Report | None = None  # the figures in an answer that is not in frames
    _refusal: bytearray | None = None
    counted_tokens: int = 0  # generated until it was last looked at; all of them when it has ended
    _counted_s: float = 0.0

    @property
    def tokens(self) -> int:
        """The tokens generated so far, counted by events where no engine says so."""
        report = self.report
        return self.generated if self.framed else 0 if report is None else report.tokens

    def count(self, now_s: float) -> None:
        report, output = self.report, self.member.output
        tokens = self.generated if self.framed or report is None else report.tokens
        new = tokens - self.counted_tokens
        output.tokens += new
        if self.begun_s and self.placed.streams:
            output.streaming_s += now_s - max(self.begun_s, self._counted_s)
            output.streamed_tokens += new - (new > 0 and not self.counted_tokens)
        self.counted_tokens, self._counted_s = tokens, now_s

    @property
    def is_paused(self) -> bool:
        return self.sending is not None and self.sending.paused

    @property
    def goes_on(self) -> bool:
        """True if a streamed response has begun, so that more should come all the time."""
        return self.placed.streams and self.status > 0

    def cancel(self) -> None:
        if self.sending is not None:
            self.sending.cancel()

    # ---- what the connection tells

    def answered(self, status: int, headers: list[Header]) -> None:
        try:
            self.status, self.headers, self.spoken = status, headers, HEAD
            if status >= 400:
                self._refusal = bytearray()
                return
            for name, value in headers:
                if name == b"content-type":
                    self.content_type = self.content_type or value  # the first one counts
                elif name == b"x-warmroute-cached-tokens" and len(value) < 10 and value.isdigit():
                    self.cached_tokens = int(value)
            self.framed = self.takes_frames and self.content_type == FRAMES_TYPE
            if self.framed:
                self.frames = FrameReader()
            else:
                self.report = Report()
            self.owner.begun(self)
        except Exception:
            self.crash()

    def received(self, body: bytes, complete: bool) -> None:
        try:
            self.spoken = BODY
            if self._refusal is not None:
                self._refusal += body
                if complete or len(self._refusal) > MAX_REFUSAL_BYTES:
                    refusal, self._refusal = bytes(self._refusal), None
                    self.owner.refused(self, refusal, complete)
            elif (reader := self.frames) is not None:
                try:
                    frames = reader.feed(body)
                    for frame in frames:
                        if not frame.packed_ids:
                            continue
                        if frame.index == USE_INDEX:
                            self.told = self.told or PromptsTold()
                            self.told.add(frame.token_ids)
                            continue
                        self.generated += len(frame.packed_ids) // 4
                        if self.generated > MAX_ANSWER_IDS or frame.index >= MAX_CHOICES:
                            raise ValueError(f"more than {MAX_ANSWER_IDS:,} token ids, or {MAX_CHOICES:,} choices")
                        self.token_ids.setdefault(frame.index, []).append(frame.packed_ids)
                    if reader.pending_bytes > SMALL_BYTES and not self.owner.holds(reader.pending_bytes):
                        raise ValueError("answers in progress leave no room for a frame of this size")
                except ValueError as error:
                    self.cancel()
                    self.owner.failed(self, Broken(f"its frames cannot be read: {error}"))
                    return
                if complete and reader.pending_bytes:
                    self.owner.failed(self, Broken("its answer ended within a frame"))
                else:
                    self.owner.take(self, b"".join([frame.payload for frame in frames]), complete)
            else:
                if complete and self.report is not None:
                    self.report.is_whole = True
                self.owner.take(self, body, complete)
        except Exception:
            self.crash()

    def broke(self, broken: Broken) -> None:
        try:
            self.owner.failed(self, broken)
        except Exception:
            self.crash()

    def crash(self) -> None:
        """Handle an unexpected exception: end this request, and no other."""
        log.exception("A request failed")
        self.cancel()
        self.owner.exchange.fail()
