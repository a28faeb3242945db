"""From a constraint to a grammar of llguidance, within limits on its size and on the work of each step."""

import json
from collections import OrderedDict
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from api.openai.constraints import Constraint
from replica.grammar.vocabulary import Vocabulary

# Masks mostly take 5 to 200 us. With these a hostile grammar takes milliseconds for one, and some 10 MB for a sequence;
# an object may have some 140 optional properties, each of which is four items.
LIMITS = LLParserLimits(
    max_items_in_row=600,
    initial_lexer_fuel=300_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=10_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
# Whitespace is a space, or a line break and an indent: a weak model would otherwise go on with it for ever.
# `oneOf` is read as `anyOf`.
JSON_OPTIONS: Any = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"\x20|\x0A(\x20{0,16}|\x09{0,8})",
    "coerce_one_of": True,
    "lenient": False,
}
KEPT = 64  # compiled grammars


class NotCompiled(ValueError):
    """A constraint that cannot be compiled; the message says where."""


class Compiler:
    """Compiles for one vocabulary, and keeps the last grammars."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.tokenizer = tokenizer_of(vocabulary)
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()

    def compile(self, constraint: Constraint) -> LLMatcher:
        """Return a matcher to copy; raise NotCompiled."""
        matcher = self._compiled.get(constraint)
        if matcher is None:
            matcher = matcher_of(self.tokenizer, grammar_of(constraint))
            self._compiled[constraint] = matcher
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(constraint)
        return matcher


class _Tokens:
    """A tokenizer for llguidance, which encodes text that a grammar forces, with the longest tokens."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]
        special = frozenset(vocabulary.special_ids)
        self._ids = {text: token for token, text in enumerate(vocabulary.tokens) if text and token not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        found: list[int] = []
        start = 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                if (token := self._ids.get(text[start:end])) is not None:
                    found.append(token)
                    break
            else:
                return found
            start = end
        return found


def tokenizer_of(vocabulary: Vocabulary) -> LLTokenizer:
    tokens = TokenizerWrapper(_Tokens(vocabulary))
    return LLTokenizer(tokens, n_vocab=len(vocabulary.tokens), eos_token=list(vocabulary.eos_ids))


def matcher_of(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        # Leave out the mark with which llguidance says that it could say more.
        raise NotCompiled(matcher.get_error().replace("<non-verbose/>", "").strip())
    return matcher


def grammar_of(constraint: Constraint) -> str:
    match constraint.kind:
        case "json_object":
            return schema_grammar('{"type":"object"}')
        case "json_schema":
            return schema_grammar(constraint.text)
        case "regex":
            # \d and \w are ASCII, as in JSON Schema.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(constraint.text, 'dw')}/")
        case "choice":
            # A JSON string is a string of Lark's, too.
            choices = [json.dumps(one, ensure_ascii=False) for one in dict.fromkeys(json.loads(constraint.text))]
            return LLMatcher.grammar_from_lark("start: " + "\n | ".join(choices))
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(constraint.text))
    except (GbnfToLarkError, ValueError, RecursionError) as error:
        raise NotCompiled(str(error)) from None


def schema_grammar(schema: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
    except ValueError as error:
        raise NotCompiled(str(error)) from None
