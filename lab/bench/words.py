"""Text of a wanted number of tokens: what a passage says follows from its name and a seed, and from nothing else.

All words have four letters and a space before them, and are common enough to be one token each in many vocabularies;
how many tokens a word really has is measured first (`lab.bench.probe`).
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

_COMMON = """
able acid also army baby back ball band bank base bath bear beat been beer bell best bill blue born burn call calm
came care case cash cell chip club code cold cook cool cope copy core crew crop date days dear down drew drop duke
dust duty earn ease east easy else ever face fact fail fair fate fear feet fell felt fill film fine fire firm fish
five flat flow food four fuel fund gain gate gear gift girl glad golf gone good grow gulf half hall harm head heat
help here high hire hole holy home host hour hung hunt hurt into item join jury just keen keep kept kick knee knew
know lack laid land late lead left less line link list load loan long lose love main male many mark meal mean mill
mind mine mode mood moon most move much navy near neck need news next nice nine nose note only onto oral pace pack
pair palm park past path peak pick pink pipe play plug poll post pull rail rain rank rare real rely rice ride ring
room rule said sale salt same sand save seem seen self sent ship shop shot sign size skin slow snow soil sold sole
some soon star stay step stop such take tall tank tape text than that them then toll took tool trip true tune turn
type used user vary vast wait walk wall wave ways weak were what when wide wife wind wine wire with wood wore work
yard year zero
"""
WORDS = _COMMON.split()  # 256, one for each byte
SPACED = [f" {word}" for word in WORDS]
WORD_BYTES = 5  # a space and four letters
CORPUS_WORDS = 1 << 16
NAME_DIGITS = 8  # so much of a passage spells its name, so that no two begin alike


class Passage(NamedTuple):
    """Equal names, equal text; where it is cut short, its beginning."""

    name: str
    tokens: int


class Words:
    def __init__(self, seed: str, tokens_per_word: float = 1.0) -> None:
        self._seed = xxh3_64_intdigest(seed.encode())
        self._tokens_per_word = tokens_per_word
        self._corpus = "".join(map(SPACED.__getitem__, random.Random(f"words {seed}").randbytes(CORPUS_WORDS)))

    def text(self, passages: Sequence[Passage]) -> str:
        """Rounded to words over all of them, so that many short ones do not add up to something else."""
        said, tokens, words = [], 0, 0
        for passage in passages:
            tokens += passage.tokens
            end = round(tokens / self._tokens_per_word)
            said.append(self._passage(passage.name, end - words))
            words = end
        return "".join(said)

    def _passage(self, name: str, words: int) -> str:
        digest = xxh3_128_intdigest(name.encode(), self._seed)
        digits = (digest >> 8 * place & 0xFF for place in range(min(words, NAME_DIGITS)))
        begun = "".join(map(SPACED.__getitem__, digits))
        start, missing = (digest >> 64) % CORPUS_WORDS, max(0, words - NAME_DIGITS)
        parts = [begun]
        while missing:
            part = self._corpus[start * WORD_BYTES : (start + missing) * WORD_BYTES]
            parts.append(part)
            missing -= len(part) // WORD_BYTES
            start = 0
        return "".join(parts)
