"""Makes request bodies of a conversation's turns: text of a wanted number of tokens.

What a passage says follows from its name and a seed, and from nothing else. All words have four letters and a space
before them, and are common enough to be one token each in many vocabularies; how many tokens a word really has is
measured first (`lab.bench.probe`).
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from lab.bench.workloads import Conversation, Passage

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
NAME_DIGITS = 8  # a passage begins with its name in this many, so that no two begin alike


class Words:
    def __init__(self, seed: str, tokens_per_word: float = 1.0) -> None:
        self._seed = xxh3_64_intdigest(seed.encode())
        self._tokens_per_word = tokens_per_word
        self._corpus = "".join(map(SPACED.__getitem__, random.Random(f"words {seed}").randbytes(CORPUS_WORDS)))

    def text(self, passages: Sequence[Passage]) -> str:
        """Rounded to words over all of them, so that many short ones do not add up to something else."""
        said, tokens, words = list[str](), 0, 0
        for passage in passages:
            tokens += passage.tokens
            end = round(tokens / self._tokens_per_word)
            digest = xxh3_128_intdigest(passage.name.encode(), self._seed)
            digits = (digest >> 8 * place & 0xFF for place in range(min(end - words, NAME_DIGITS)))
            said += map(SPACED.__getitem__, digits)
            start, missing = (digest >> 64) % CORPUS_WORDS, max(0, end - words - NAME_DIGITS)
            while missing:
                part = self._corpus[start * WORD_BYTES : (start + missing) * WORD_BYTES]
                said.append(part)
                missing -= len(part) // WORD_BYTES
                start = 0
            words = end
        return "".join(said)


# ---- bodies

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_encode = msgspec.json.Encoder().encode


class Dialect(NamedTuple):
    """The optional fields that an endpoint takes."""

    greedy: bool = True  # temperature 0
    ignore_eos: bool = True  # answers are as long as was asked for
    usage: bool = True  # the stream ends with its usage
    limit: str = "max_tokens"  # the field's name


DIALECTS = (
    Dialect(),
    Dialect(ignore_eos=False),
    Dialect(ignore_eos=False, greedy=False, limit="max_completion_tokens"),
    Dialect(ignore_eos=False, greedy=False, usage=False),
)


class Form(NamedTuple):
    """The form of requests: messages, or a text."""

    model: str
    words: Words
    is_chat: bool = True
    dialect: Dialect = Dialect()

    @property
    def path(self) -> str:
        return CHAT if self.is_chat else COMPLETIONS

    def body(self, talk: Conversation, turn: int, answers: Sequence[str]) -> bytes:
        """`answers`: to the turns before, empty where there was none. Instead of those something made up is said."""
        text, dialect = self.words.text, self.dialect
        said = [("system", text(talk.system))] if talk.system else []
        for number, before in enumerate(talk.before(turn)):
            made_up = Passage(f"answer {number} of {talk.name}", before.output_tokens)
            said += [("user", text(before.said)), ("assistant", answers[number] or text([made_up]))]
        said.append(("user", text(talk.turns[turn].said)))
        fields: dict[str, Any] = {"model": self.model, "stream": True}
        if self.is_chat:
            fields["messages"] = [{"role": role, "content": content} for role, content in said]
        else:
            fields["prompt"] = "".join(content for _, content in said)
        fields[dialect.limit] = talk.turns[turn].output_tokens
        if dialect.greedy:
            fields["temperature"] = 0
        if dialect.ignore_eos:
            fields["ignore_eos"] = True
        if dialect.usage:
            fields["stream_options"] = {"include_usage": True}
        return _encode(fields)


def asked_tokens(talk: Conversation, turn: int) -> int:
    """Return the planned tokens of this turn's prompt, without a template's."""
    before = sum(_tokens(one.said) + one.output_tokens for one in talk.before(turn))
    return _tokens(talk.system) + before + _tokens(talk.turns[turn].said)


def _tokens(passages: Sequence[Passage]) -> int:
    return sum(passage.tokens for passage in passages)
