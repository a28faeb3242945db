"""From an engine's tokens to a client's text: stop strings, the end, and a start in the middle.

Pure: no socket and no clock. What a `Choice` says after a sequence of tokens depends on that sequence only, never on
how it was cut into calls. Resuming rests on this: a choice that is fed the tokens of another replica says next exactly
what that replica would have said.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from api.parsing.stops import StopStrings
from api.tokens.detokenize import Detokenizer
from api.tokens.tokenizer import Tokenizer
from replica.messages import TokenLogprobs


class StopConditions(Struct, frozen=True):
    """The ends of a choice, and the text shown for each."""

    max_tokens: int  # 0: whatever the engine generates is not shown
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    show_stop: bool = False  # include_stop_str_in_output
    skip_special_tokens: bool = True
    shown_special_tokens: frozenset[int] = frozenset()  # the answer's parser needs these


class Delta(NamedTuple):
    """The addition of one output to a choice."""

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[int] = ()  # the number of characters before each token
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None


NOTHING = Delta("", ())


class Choice:
    """One of a request's answers while it grows."""

    def __init__(self, index: int, ending: StopConditions, tokenizer: Tokenizer) -> None:
        self.index = index
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.stop_string: str | None = None  # the one that was found
        self.stop_token: int | None = None
        self._ending = ending
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, ending.skip_special_tokens, ending.shown_special_tokens)
        self._stops = StopStrings(ending.stop_strings, ending.show_stop) if ending.stop_strings else None
        self._decoded = 0  # characters

    def resume(self, token_ids: Sequence[int]) -> Delta:
        """Take the tokens that another replica has generated; find their end, which the engine does not repeat."""
        for count, token_id in enumerate(token_ids, start=1):
            if (reason := self._end_at(token_id, count)) is not None:
                return self.feed(token_ids[:count], reason)
        return self.feed(token_ids)

    def retold(self, token_ids: Sequence[int]) -> Iterator[Delta]:
        """Yield the deltas that a new choice like this one makes of these tokens, one by one."""
        told = Choice(self.index, self._ending, self._tokenizer)
        for count, token_id in enumerate(token_ids, start=1):
            yield told.feed((token_id,), told._end_at(token_id, count))

    def feed(
        self, token_ids: Sequence[int], reason: str | None = None, logprobs: Sequence[TokenLogprobs] = ()
    ) -> Delta:
        """Take the engine's next tokens, and with the last ones the finish reason.

        After a stop string the choice is finished; later tokens of the engine, which does not know it, are dropped.
        """
        if self.finish_reason is not None:
            return NOTHING
        if not self._ending.max_tokens:
            self.finish_reason = reason and "length"
            return Delta("", (), finish_reason=self.finish_reason)
        shown: list[str] = []
        offsets: list[int] = []
        hidden = len(token_ids) - 1 if reason == "stop" and not self._ending.show_stop else -1
        for place, token_id in enumerate(token_ids):
            offsets.append(self._decoded)
            self.completion_tokens += 1
            if place != hidden:
                shown.append(self._show(self._detokenizer.feed((token_id,))))
            if self.stop_string is not None:
                break
        if reason is not None and self.stop_string is None:
            shown.append(self._show(self._detokenizer.finish()))
            if self._stops is not None and self.stop_string is None:
                shown.append(self._stops.finish())
        self.finish_reason = reason if self.stop_string is None else "stop"
        if self.finish_reason == "stop" and self.stop_string is None:
            self.stop_token = token_ids[-1]
        taken = len(offsets)
        return Delta("".join(shown), token_ids[:taken], offsets, logprobs[:taken], self.finish_reason)

    def _show(self, text: str) -> str:
        """Return the part of newly decoded text that can be shown now."""
        self._decoded += len(text)
        # Stop strings may not end the answer within its first min_tokens; nor may they begin there.
        if self._stops is None or self.completion_tokens <= self._ending.min_tokens:
            return text
        shown = self._stops.feed(text)
        self.stop_string = self._stops.stopped
        return shown

    def _end_at(self, token_id: int, count: int) -> str | None:
        """The engine's own rule for a token, the `count`th of the choice."""
        ending = self._ending
        if token_id in ending.stop_token_ids and count >= ending.min_tokens:
            return "stop"
        return "length" if count >= ending.max_tokens else None
