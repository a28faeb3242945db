"""Turns a stream of token ids into text, never half a character.

What has been emitted after a sequence of tokens depends only on that sequence, never on how it was cut into calls: a
request that is resumed on another replica feeds the tokens it had and carries on.
"""

import codecs
from collections.abc import Sequence

from api.tokens.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"

# A character takes at most 4 tokens. Bytes that are none after twice as many are shown as they are.
MAX_HELD_TOKENS = 8

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one choice: a continuation, so a space at its beginning is kept."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        """`shown` are special tokens that are not skipped."""
        self._skipped = tokenizer.special_token_ids - shown if skip_special_tokens else frozenset[int]()
        self._text = _JoinedBytes(tokenizer) if tokenizer.joins_bytes else _Window(tokenizer)

    def feed(self, token_ids: Sequence[int]) -> str:
        if not self._skipped.isdisjoint(token_ids):
            token_ids = [i for i in token_ids if i not in self._skipped]
        return self._text.feed(token_ids)

    def finish(self) -> str:
        """The rest of a character that was never completed."""
        return self._text.finish()


class _JoinedBytes:
    """Joins the bytes of tokens; the last ones may be half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._utf8 = _Utf8Decoder("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes_of, token_ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class _Window:
    """Decodes the last few tokens again with each new one, for decoders that depend on context.

    tokens  [ ... | shown already, for context | new ones ]
                  ^ 0 .................. shown ^
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._shown = 0  # how many tokens of the window have been emitted

    def feed(self, token_ids: Sequence[int]) -> str:
        said = ""
        for token_id in token_ids:  # one by one: where the window moves must not depend on the cuts
            self._window.append(token_id)
            text = self._new_text()
            held = len(self._window) - self._shown
            if held < MAX_HELD_TOKENS and (not text or text.endswith(REPLACEMENT)):
                continue
            del self._window[: self._shown]
            self._shown = len(self._window)
            said += text
        return said

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._shown], skip_special_tokens=False)
        return self._decode(self._window, skip_special_tokens=False)[len(before) :]

    def finish(self) -> str:
        text = self._new_text()
        self._shown = len(self._window)
        return text
