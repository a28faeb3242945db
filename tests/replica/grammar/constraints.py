"""Constraints for the demo model's vocabulary, compiled in this process."""

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from api.openai.constraints import Constraint
from api.tokens.tokenizer import HfTokenizer
from replica.grammar.compiler import Compiler
from replica.grammar.matcher import Matcher, boolean
from replica.grammar.vocabulary import Vocabulary, packed_vocabulary, unpacked_vocabulary
from replica.model.demo import TEXTS

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", 'a "quoted" \\ one', "für\nimmer", "/not a regex/"]
LIST = 'root ::= "[" item ("," item)? "]"\nitem ::= [a-z]{1,3}'


def schema(asked: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(asked))


KINDS = {
    "schema": schema(WEATHER),
    "choice": Constraint("choice", json.dumps(CHOICES)),
    "regex": Constraint("regex", r"[A-C]{2}-\d{3}"),
    "grammar": Constraint("grammar", LIST),
}


@cache
def tokenizer() -> HfTokenizer:
    return HfTokenizer(TEXTS)


@cache
def packed() -> bytes:
    return packed_vocabulary(tokenizer(), tokenizer().vocab_size, tokenizer().eos_token_ids)


@cache
def vocabulary() -> Vocabulary:
    return unpacked_vocabulary(packed())


@cache
def compiler() -> Compiler:
    return Compiler(vocabulary())


def matcher(constraint: Constraint) -> Matcher:
    return Matcher(compiler().compile(constraint).deep_copy(), vocabulary())


def allowed(matcher: Matcher) -> list[int]:
    return [int(token) for token in np.flatnonzero(boolean(matcher.allowed(), len(matcher.vocabulary.tokens)))]


def drawn(matcher: Matcher, seed: int, most: int = 2000) -> list[int]:
    """A random answer, with the token that ends it."""
    chance = random.Random(seed)
    answer: list[int] = []
    while len(answer) < most and not (answer and answer[-1] in matcher.vocabulary.eos_ids):
        answer.append(chance.choice(allowed(matcher)))
        assert matcher.follow(answer)
    return answer


def text(answer: Sequence[int]) -> str:
    return tokenizer().decode(answer)
