"""Has another replica repeat a stream of the Messages or Responses API, of which the client gets what it lacks.

Their streams have no token ids, so no replica can go on from there. Another one answers the whole request again: what
the client has is compared and dropped, what comes after it is passed on, with the ids and numbers of the first stream.
Greedy answers are the same everywhere. If one differs, as sampled answers do, the stream breaks off: text that does not
fit what was said would be worse.
"""

import re
from collections.abc import Collection
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from api.generation_apis import MESSAGES, RESPONSES
from api.openai_responses.requests import REFERENCE
from router.prompts.prompt import UNREADABLE
from router.prompts.reading.client import is_quick
from router.proxy.streams.events import ABORTED, DONE, EventReader

MAX_TEXT = 2**20  # characters that are kept to be compared
MAX_EVENTS = 2**14  # other than texts
COMPACT = 256  # pieces of a text
DIFFERS = "another replica answered it in other words"
TEXTS = ("text", "thinking", "partial_json")  # fields of the Messages API; signatures are random
CLIENTS_ERRORS = frozenset({"invalid_request_error", "not_found_error", "request_too_large", "permission_error"})
_NUMBER = re.compile(rb'"sequence_number":\d+')
Key: TypeAlias = tuple[str, int, int, int, int, str]


class _Typed(Struct):
    type: Any = None


class _Effects(Struct):
    """Fields of a response that is more than an answer: it goes on alone, needs another one, or calls others' tools."""

    background: Any = None
    previous_response_id: Any = None
    input: str | list[_Typed] | None = None
    tools: list[_Typed] | None = None


_decode_effects = msgspec.json.Decoder(_Effects).decode


def is_repeatable(api: str, body: bytes) -> bool:
    """Return whether several replicas may compute this request, of which one is answered: it has no other effect.

    `store` is no such effect: a response whose answer its client has not got is known to nobody.
    """
    if api != RESPONSES.name:
        return api == MESSAGES.name
    if not is_quick(body):
        return False
    try:
        asked = _decode_effects(body)
    except UNREADABLE:
        return False
    named = asked.input if isinstance(asked.input, list) else ()
    runs_tools = any(tool.type not in ("function", "custom") for tool in asked.tools or ())
    return not (asked.background or asked.previous_response_id or runs_tools) and not any(
        item.type == REFERENCE for item in named
    )


class _Item(Struct):
    id: str = ""
    call_id: str = ""


class _Response(Struct):
    id: str = ""
    created_at: float = 0
    status: str = ""


class _Error(Struct):
    type: str = ""


class _Event(Struct):
    type: str = ""
    index: int = 0
    output_index: int = 0
    content_index: int = 0
    summary_index: int = 0
    delta: str | dict[str, Any] | None = None
    item: _Item | None = None
    response: _Response | None = None
    error: _Error | None = None

    @property
    def text(self) -> tuple[str, str | None]:
        """The name and value of the text that it adds; no value: it adds none."""
        delta = self.delta
        if isinstance(delta, str):
            return "delta", delta
        for name in TEXTS if delta else ():
            if isinstance(value := delta.get(name), str):  # type: ignore[union-attr]
                return name, value
        return "", None


_decode = msgspec.json.Decoder(_Event).decode


class Repetition:
    """For each replica: `begin`, then `read` its stream."""

    new_tokens = 0  # the present replica does not tell their ids

    def __init__(self, api: str, ends: Collection[int]) -> None:
        """`ends`: tokens that end an answer of the Responses API; empty: unknown."""
        self.why_not: str | None = None  # no replica can repeat it
        self.response_id = ""  # the id that the client knows
        self._numbered = api == "responses"
        self._ends = ends
        self._shown: dict[Key, list[str]] = {}  # texts, in pieces; other events have none
        self._count = self._chars = 0  # events, and characters of texts
        self._names: dict[int, list[str]] = {}  # ids by output, -1: of the response
        # These are about the present replica:
        self._reader = EventReader()
        self._renamed: list[tuple[bytes, bytes]] = []
        self._before: dict[Key, str] = {}  # the client's texts when it began
        self._heard: dict[Key, int] = {}  # characters of those
        self._missing = 0  # characters that it has yet to say again
        self._done = False

    def begin(self) -> None:
        self._reader, self._renamed, self._heard, self._done = EventReader(), [], {}, False
        self._before = {key: "".join(pieces) for key, pieces in self._shown.items()}
        self._missing = self._chars

    def read(self, body: bytes, complete: bool) -> tuple[bytes, str | None]:
        """Read a part of the stream; return the bytes for the client, and the reason if the replica is lost."""
        shown: list[bytes] = []
        try:
            events = self._reader.feed(body)
        except ValueError as error:
            self.why_not, events = f"it has {error}", [self._reader.take_rest()]
        lost: str | None = None
        for event in events:
            part, lost = self._read(event)
            shown.append(part)
            if lost is not None:
                break
        if lost is None and complete:
            if self._done or self.why_not is not None:
                shown.append(self._reader.take_rest())
            else:
                lost = "its stream ended before it was complete"
        return b"".join(shown), lost

    def _read(self, event: bytes) -> tuple[bytes, str | None]:
        """The part of an event that the client lacks, and the reason if the replica is lost with it."""
        payload = next((line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")), None)
        if payload is None or payload == DONE:
            return (b"" if self._missing else event), None
        try:
            told = _decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.why_not = self.why_not or f"an event of it cannot be read: {error}"
            return (b"", self.why_not) if self._before else (event, None)
        if told.type in ("error", "response.failed"):
            if told.error is not None and told.error.type in CLIENTS_ERRORS:
                self._done = True
                return event, None
            return b"", "it broke its stream off with an error"
        if told.type in ("response.completed", "response.incomplete"):
            event, given_up = without_tokens(event, self._ends)
            if given_up or (told.response is not None and told.response.status == "cancelled"):
                return b"", ABORTED
        delta = told.delta
        if isinstance(delta, dict) and "stop_reason" in delta and delta["stop_reason"] is None:
            return b"", ABORTED
        self._done = self._done or told.type in ("response.completed", "response.incomplete", "message_stop")
        return self._show(event, payload, told)

    def _show(self, event: bytes, payload: bytes, told: _Event) -> tuple[bytes, str | None]:
        if (response := told.response) is not None:  # the ids that the client knows; others are replaced by them
            self._name(-1, [response.id, f'"created_at":{response.created_at:.0f},'])
            self.response_id = self._names[-1][0]
        if (item := told.item) is not None:
            self._name(told.output_index, [item.id, item.call_id])
        field, text = told.text
        key = (told.type, told.index, told.output_index, told.content_index, told.summary_index, field)
        before = self._before.get(key)
        if not text:
            if before is not None or (text == "" and self._before):
                return b"", None  # it has been told already
        elif before is not None and (heard := self._heard.get(key, 0)) < len(before):
            again = before[heard : heard + len(text)]
            if not text.startswith(again):
                return b"", self._differ()
            self._heard[key] = heard + len(again)
            self._missing -= len(again)
            text = text[len(again) :]
            if not text:
                return b"", None
            fields: dict[str, Any] = msgspec.json.decode(payload)
            fields["delta"] = text if field == "delta" else fields["delta"] | {field: text}
            event = b"event: %b\ndata: %b\n\n" % (told.type.encode(), msgspec.json.encode(fields))
        if self._missing:
            return b"", self._differ()
        self._keep(key, text)
        for new, old in self._renamed:
            event = event.replace(new, old)
        if self._numbered and self._before:
            event = _NUMBER.sub(b'"sequence_number":%d' % self._count, event)
        self._count += 1
        return event, None

    def _differ(self) -> str:
        self.why_not = DIFFERS
        return DIFFERS

    def _keep(self, key: Key, text: str | None) -> None:
        """Keep what the client gets, to compare a repetition with it."""
        if self.why_not is not None:
            return
        pieces = self._shown.setdefault(key, [])
        if text:
            pieces.append(text)
            self._chars += len(text)
            if len(pieces) > COMPACT:
                pieces[:] = ["".join(pieces)]
        if self._chars > MAX_TEXT or len(self._shown) > MAX_EVENTS:
            self.why_not = "it is too long to be repeated"
            self._shown = {}

    def _name(self, place: int, names: list[str]) -> None:
        known = self._names.setdefault(place, names)
        if known is not names:
            pairs = zip(names, known, strict=True)
            wanted = [(new.encode(), old.encode()) for new, old in pairs if new and old and new != old]
            self._renamed += [pair for pair in wanted if pair not in self._renamed]


# ---- the tokens in vLLM's answers of the Responses API

# vLLM ends an answer that it gives up with the status `completed`, like one that came to its end. Only its last token
# tells: one that ends answers, or any. So the router asks for the tokens, and takes them out again.


ASK = b',"enable_response_messages":true'
FIELD = b'"enable_response_messages"'

# Within a string the quotes would stand behind backslashes, so these are found only as members.
_FIRST, _LAST = b'"input_messages":[{"message":"', b'"output_messages":'
_END = b',"type":"raw_message_tokens"}]'
_NONE = b"[]"
_COMPLETED = b'"status":"completed"'
NOTHING = b'"input_messages":null,"output_messages":null'


def without_tokens(answer: bytes, ends: Collection[int]) -> tuple[bytes, bool]:
    """The answer, or its last event, as it is if nobody asks for tokens; and whether its engine has given it up.

    `ends`: tokens that end an answer.
    """
    first, last = answer.rfind(_FIRST), answer.rfind(_LAST)
    if first < 0 or last < first:
        return answer, False
    start, completed = last + len(_LAST), _COMPLETED in answer
    if answer.startswith(_NONE, start):
        return answer[:first] + NOTHING + answer[start + len(_NONE) :], completed
    end = answer.rfind(_END)
    if end < start:
        return answer, False
    tokens_end = answer.rfind(b"]", start, end)
    final = answer[
        max(answer.rfind(b",", start, tokens_end), answer.rfind(b"[", start, tokens_end)) + 1 : tokens_end + 1
    ]
    token = final.rstrip(b"]").strip()
    gives_up = completed and token.isdigit() and int(token) not in ends
    return answer[:first] + NOTHING + answer[end + len(_END) :], gives_up
