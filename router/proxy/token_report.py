"""The figures that an engine tells of one answer, read on its way to the client."""

from msgspec import Struct

from router.proxy.figures import last_number

MARK = b'_tokens"'  # in each report of an engine, and nowhere in generated text, whose quotes are escaped
END_BYTES = 64  # a report may come in two parts
BESIDE_TOKENS = 2  # events of a stream that carry none: its first and its last

_GENERATED = (b'"completion_tokens"', b'"output_tokens"')
_PROMPT = (b'"prompt_tokens"', b'"input_tokens"')
CACHED = (b'"cached_tokens"', b'"cache_read_input_tokens"')
_APART = (b'"cache_read_input_tokens"', b'"cache_creation_input_tokens"')  # not part of Anthropic's input_tokens


class PromptsTold(Struct, eq=False):
    """The cost of a request's prompts, as a replica of ours tells it when each choice begins."""

    choices: int = 0  # that have begun
    computed: int = 0
    cached: int = 0

    def add(self, figures: list[int]) -> None:
        if len(figures) != 2:
            raise ValueError(f"{len(figures)} figures of a prompt; there are two")
        self.choices += 1
        self.computed += figures[0]
        self.cached += figures[1]


class Report(Struct, eq=False):
    """An engine's own words about the tokens of one attempt, read from an answer that is not in frames."""

    prompt: int | None = None
    cached: int | None = None
    generated: int | None = None
    counted: int = 0  # generated tokens, as far as they can be counted without a report
    is_whole: bool = False  # the answer has come to its end
    _events: int = 0
    _end: bytes = b""

    @property
    def tokens(self) -> int:
        """The generated tokens. An engine's figures at the beginning of a stream say nothing of what came after."""
        if self.generated is None:
            return self.counted
        return self.generated if self.is_whole else max(self.generated, self.counted)

    def read(self, body: bytes) -> None:
        """Look for figures in a part of the answer."""
        self._events += body.count(b"\n\n")
        self.counted = max(0, self._events - BESIDE_TOKENS)
        if self._end:
            self._look(self._end + body[:END_BYTES])
        if MARK in body:
            self._look(body)
        self._end = b"" if body.endswith(b"\n\n") else (self._end + body[-END_BYTES:])[-END_BYTES:]

    def _look(self, body: bytes) -> None:
        if MARK not in body:
            return
        self.generated = _last(_GENERATED, body, self.generated)
        self.cached = _last(CACHED, body, self.cached)
        if (told := last_number(body, *_PROMPT)) is not None:
            prompt = told + sum(last_number(body, name) or 0 for name in _APART)
            self.prompt = max(prompt, self.prompt or 0)  # the end of a stream may leave out the cached ones


def _last(names: tuple[bytes, ...], body: bytes, before: int | None) -> int | None:
    found = last_number(body, *names)
    return before if found is None else found
