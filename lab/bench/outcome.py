"""The fields of an answer that are read, and the outcome of a request."""

from typing import Any

import msgspec
from msgspec import Struct

EVENT_STREAM = b"text/event-stream"
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
    asked_tokens: int = 0  # of the prompt, as planned
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    replica: str | None = None
    events: int = 0  # with a token in them
    gaps_s: list[float] = []  # between those

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


def error_text(body: bytes) -> str:
    """The message of an OpenAI-shaped error; of any other, how it begins."""
    try:
        found = msgspec.json.decode(body)
        error = found.get("error", found)
        text = error if isinstance(error, str) else error.get("message") or error.get("detail") or found.get("detail")
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
        text = None
    return (str(text) if text else body.decode(errors="replace"))[:MAX_DETAIL].strip()
