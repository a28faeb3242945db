"""Asks an endpoint of the OpenAI API, and shows the answer as it comes."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from events.tool.words import printable, printable_lines
from lab.bench.client import Endpoint, Outcome
from lab.bench.probe import UNKNOWN_FIELD, only_model
from lab.bench.prompts import CHAT
from router.console.formatting import duration
from router.members.spec import Target

FRAME_S = 0.05
TIMEOUT_S = 600.0
LIST_TIMEOUT_S = 10.0
LONGEST_ANSWER = 512  # tokens
MAX_CHARACTERS = 1024 * 1024  # an answer may have, whatever length was asked for
_USAGE = {"stream_options": {"include_usage": True}}
FORMS: tuple[dict[str, Any], ...] = (  # each is sent where the one before is refused
    {"max_tokens": LONGEST_ANSWER, **_USAGE},
    {"max_completion_tokens": LONGEST_ANSWER, **_USAGE},
    {},
)

Message = dict[str, str]

_encode = msgspec.json.Encoder().encode


class Place(NamedTuple):
    """An endpoint's address, with the model and the key that it is asked with."""

    target: Target
    model: str
    key: str | None


class Answer(Struct):
    outcome: Outcome
    text: str = ""
    stopped: bool = False  # Ctrl-C has ended it


Frame = Callable[[Answer, str, float], None]  # the answer so far, the part of its text that is new, the seconds so far


def find_model(target: Target, key: str | None) -> str:
    """Return the only model that is served there; a click error if there is none, or if it is not alone."""

    async def ask() -> str:
        endpoint = Endpoint(target, key, LIST_TIMEOUT_S)
        try:
            return await only_model(endpoint, f" after {LIST_TIMEOUT_S:g} s; is it still starting?")
        finally:
            endpoint.close()

    return asyncio.run(ask())


def answered(place: Place, messages: Sequence[Message], frame: Frame, **fields: Any) -> Answer:
    """Ask, and call `frame` at each look until the answer is over; Ctrl-C ends it.

    What went wrong is the outcome's `error`.
    """
    for form in FORMS:
        answer = Answer(Outcome("chat", 0, False, 0.0))
        body = _encode({"model": place.model, "messages": messages, "stream": True} | form | fields)
        try:
            asyncio.run(_stream(place, body, answer, frame))
        except KeyboardInterrupt:
            answer.stopped = True
        if answer.outcome.status not in UNKNOWN_FIELD:
            break
    return answer


async def _stream(place: Place, body: bytes, answer: Answer, frame: Frame) -> None:
    began_s, outcome = time.perf_counter(), answer.outcome
    endpoint = Endpoint(place.target, place.key, TIMEOUT_S)
    asked = endpoint.ask(CHAT, body, outcome, began_s)
    seen = 0
    try:
        while True:
            await asyncio.wait([asked.ended], timeout=FRAME_S)
            text, seen = "".join(asked.said[seen:]), len(asked.said)
            answer.text += text
            frame(answer, text, time.perf_counter() - began_s)
            if len(answer.text) > MAX_CHARACTERS:
                outcome.error, outcome.detail = "too long", f"more than {MAX_CHARACTERS:,} characters"
                return
            if asked.ended.done():
                return
    finally:
        outcome.end_s = outcome.end_s or time.perf_counter() - began_s
        endpoint.close()


def figures(answer: Answer) -> str:
    """One line of what was measured, and of what the endpoint tells: `58 ms to first token · 27 tok/s`."""
    first_s = answer.outcome.first_s
    return " · ".join([*([f"{duration(first_s)} to first token"] if first_s is not None else []), *rest(answer)])


def rest(answer: Answer) -> list[str]:
    """The figures but for the time to first token."""
    outcome, parts = answer.outcome, []
    if outcome.cached_tokens is not None and outcome.prompt_tokens is not None:
        parts.append(f"{outcome.cached_tokens:,} of {outcome.prompt_tokens:,} tokens cached")
    if outcome.replica is not None:
        parts.append(printable(outcome.replica))
    tokens = outcome.output_tokens or outcome.events
    if outcome.first_s is not None and tokens > 1 and outcome.end_s > outcome.first_s:
        parts.append(f"{(tokens - 1) / (outcome.end_s - outcome.first_s):.0f} tok/s")
    if answer.stopped:
        parts.append("stopped")
    elif tokens == LONGEST_ANSWER:
        parts.append(f"cut at {tokens} tokens")
    return parts


class Page:
    """Standard output: an answer's text without control characters, and a clock until it begins."""

    def __init__(self, clock: Callable[[float], str] | None = None) -> None:
        """`clock` makes the line that stands where the text will; None: there is nothing."""
        self.clock = clock
        self.has_text = False
        self._has_clock = False

    def frame(self, answer: Answer, text: str, seconds: float) -> None:  # noqa: ARG002
        if text:
            self.erase()
            self.has_text = True
            sys.stdout.write(printable_lines(text))
        elif self.clock is not None and not self.has_text:
            self._has_clock = True
            sys.stdout.write(f"\r{self.clock(seconds)}")
        sys.stdout.flush()

    def erase(self) -> None:
        if self._has_clock:
            sys.stdout.write("\r\x1b[K")
        self._has_clock = False

    def end(self) -> None:
        self.erase()
        if self.has_text:
            sys.stdout.write("\n")
        sys.stdout.flush()
