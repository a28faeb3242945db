"""Server-sent events of an engine: cut into whole events, of which every byte stays in one, and those that give up.

vLLM ends running answers as if they were complete on SIGTERM, `/sleep` and `/pause`, SGLang on `/abort_request`:
`finish_reason` is `abort`. In vLLM's Messages API there is no `stop_reason` then: null in a stream, and no field in a
whole answer. SGLang's says `end_turn` there, which nothing tells from a complete answer.
"""

import re

from api.errors import ApiError
from api.generation_apis import GenerationApi
from engines.profile import EngineProfile

MAX_EVENT_BYTES = 16 * 1024 * 1024
DONE = b"[DONE]"
LONGEST_END = 64  # no last event begins with more

# An event ends with two ends of lines, each CRLF, LF or CR. If a read ends within the second CRLF, its LF goes to the
# beginning of the next event, which means the same.
_ANY_END = re.compile(rb"(?:\r\n|\r(?!\n)|\n)(?:\r\n?|\n)")
_END = re.compile(rb"\n\n")  # the usual one is found faster


class EventReader:
    """Reads events; raises ValueError for one longer than MAX_EVENT_BYTES."""

    def __init__(self) -> None:
        self.rest = b""  # the beginning of an event

    def feed(self, body: bytes) -> list[bytes]:
        looked_at = max(0, len(self.rest) - 3)  # an end may have begun there
        held = self.rest + body if self.rest else body
        events: list[bytes] = []
        start = 0
        for end in (_ANY_END if b"\r" in held else _END).finditer(held, looked_at):
            events.append(held[start : end.end()])
            start = end.end()
        self.rest = held[start:]
        if len(self.rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES:,} bytes")
        return events

    def take_rest(self) -> bytes:
        rest, self.rest = self.rest, b""
        return rest


def with_lf(text: bytes) -> bytes:
    """The same lines, each ended by LF."""
    return text.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in text else text


def payload_of(event: bytes) -> bytes | None:
    """The content of the event's only line, if that is `data`; None for comments and longer events."""
    line = event.strip()
    if not line.startswith(b"data:") or b"\n" in line or b"\r" in line:
        return None
    return line[5:].strip()


# ---- answers that an engine gives up


# Within a string the quotes would stand behind backslashes, so generated text cannot be mistaken.
_OPENAI = re.compile(rb'"finish_reason"\s*:\s*"abort"')
_ABORTED = {  # each with a mark that is found faster
    "chat": (b'"abort"', _OPENAI),
    "completions": (b'"abort"', _OPENAI),
    "messages": (b'"stop_reason"', re.compile(rb'"delta"\s*:\s*\{\s*"stop_reason"\s*:\s*null')),
}
_UNKNOWN = b"", None
_OWN_ERROR = re.compile(rb'"code"\s*:\s*5\d\d\b')
ABORTED = "it gave the answer up (finish_reason abort)"


def is_aborted(api: str, answer: bytes, profile: EngineProfile) -> bool:
    """Return whether the engine has given this whole answer up."""
    if api == "messages":
        return profile.hides_aborts and b'"stop_reason"' not in answer and b'"content"' in answer
    mark, pattern = _ABORTED.get(api, _UNKNOWN)
    return pattern is not None and answer.find(mark) >= 0 and pattern.search(answer) is not None


def is_servers_error(body: bytes) -> bool:
    """Return whether a stream of OpenAI's APIs is an error of the engine's own from its first event on."""
    return body.startswith(b'data: {"error"') and _OWN_ERROR.search(body) is not None


class SentEvents:
    """The end of a client's stream of events, to see if it is complete and to end it with an error otherwise."""

    __slots__ = ("_aborts", "_api", "_count", "end", "is_between", "is_plain", "mark")

    def __init__(self, api: GenerationApi) -> None:
        self._api = api
        self._aborts: re.Pattern[bytes] | None
        self.mark, self._aborts = _ABORTED.get(api.name, _UNKNOWN)  # an event without the mark gives no answer up
        self.is_plain = bool(self.mark) and api.ending is None  # whole events without it need no further look
        self._count = 0  # the next number, if events are numbered
        self.end = b""
        self.is_between = True  # no event has begun

    def note(self, body: bytes) -> None:
        self.end = body if len(body) >= LONGEST_END else (self.end + body)[-LONGEST_END:]
        self.is_between = self.end.endswith(b"\n\n")
        if self._api.ending is not None:
            self._count += body.count(b"\n\n")  # frames of ours have whole events

    def before_abort(self, body: bytes) -> bytes | None:
        """The whole events before the one with which the engine gives the answer up; None: it does not, in `body`."""
        before = self.end[-LONGEST_END:]  # the event may begin in it
        held = before + body
        if self._aborts is None or (found := self._aborts.search(held)) is None:
            return None
        good = held[: found.start()]
        ends = [good.rfind(end) + len(end) for end in (b"\n\n", b"\n\r\n") if end in good]
        return body[: max(0, max(ends, default=0) - len(before))]

    @property
    def is_complete(self) -> bool:
        api, end = self._api, with_lf(self.end)
        return end.endswith(api.last_event) if api.ending is None else bool(api.ending.search(end))

    def error_event(self, error: ApiError) -> bytes:
        """The bytes that end the stream with an error, after half an event, too."""
        end_of_half_an_event = b"" if with_lf(self.end).endswith(b"\n\n") or not self.end else b"\n\n"
        return end_of_half_an_event + self._api.error_event(error, self._count)
