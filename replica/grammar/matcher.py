"""The state of one constrained answer: the tokens that may come next.

It follows the chain of its request, so it is the same however the tokens came: drawn here, or by another replica.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from replica.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)


class Matcher:
    def __init__(self, matcher: "LLMatcher", vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._matcher = matcher
        self._taken = 0  # tokens of the answer
        self.failed = False  # it failed in the middle of the answer, which ends there: mostly, a limit was reached
        self.reason = ""

    @property
    def ended(self) -> bool:
        """True if nothing but the end may follow."""
        return self.failed or self._matcher.is_stopped()

    def follow(self, tokens: Sequence[int], start: int = 0) -> bool:
        """Take what is new of the answer, which begins at `start`; return False if a token was not allowed."""
        new, self._taken = tokens[start + self._taken :], len(tokens) - start
        while len(new) and not self.ended:
            taken = self._matcher.try_consume_tokens(list(new))
            if self._matcher.is_error():
                self._fail(self._matcher.get_error())
            elif not taken:
                self._fail(f"token {new[0]} is not allowed")
                return False
            new = new[taken:]
        return self.failed or all(token in self.vocabulary.eos_ids for token in new)

    def allowed(self) -> NDArray[np.uint8]:
        """One bit for each token, the lowest first, in whole words of 32; at least one is set."""
        size = -(-len(self.vocabulary.tokens) // 32) * 4
        if not self.ended:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[:size]
            if self._matcher.is_error():
                self._fail(self._matcher.get_error())
            elif not bits.any():
                self._fail("no token of the vocabulary is allowed")
            else:
                return np.pad(bits, (0, size - len(bits))) if len(bits) < size else bits
        bits = np.zeros(size, np.uint8)
        for token in self.vocabulary.eos_ids:
            bits[token >> 3] |= 1 << (token & 7)
        return bits

    def _fail(self, reason: str) -> None:
        self.failed = True
        self.reason = reason.partition("\n")[0]
        log.warning("an answer ends early, because its constraint cannot be followed further: %s", self.reason)


def boolean(bits: NDArray[np.uint8], vocab_size: int) -> NDArray[np.bool_]:
    return np.unpackbits(bits, axis=-1, count=vocab_size, bitorder="little").view(np.bool_)
