"""Every kind of constraint, compiled for the demo model's vocabulary."""

import json
import re
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest

from api.errors import ApiError
from api.openai.constraints import Constraint
from api.tokens.tokenizer import HfTokenizer
from replica.grammar.compiler import KEPT, Compiler, NotCompiled
from replica.grammar.matcher import Matcher
from replica.grammar.vocabulary import check_constrainable, packed_vocabulary, unpacked_vocabulary
from tests.api.tokenizers import byte_level, saved, sentencepiece, word_pieces
from tests.replica.grammar.constraints import (
    CHOICES,
    KINDS,
    WEATHER,
    compiler,
    drawn,
    matcher,
    schema,
    text,
    vocabulary,
)


@pytest.mark.parametrize("seed", range(20))
def test_every_answer_has_its_form(seed: int) -> None:
    said = {kind: text(drawn(matcher(constraint), seed)) for kind, constraint in KINDS.items()}
    jsonschema.validate(json.loads(said["schema"]), WEATHER)
    assert said["choice"] in CHOICES
    assert re.fullmatch(r"[A-C]{2}-\d{3}", said["regex"])
    assert re.fullmatch(r"\[[a-z]{1,3}(,[a-z]{1,3})?\]", said["grammar"])


def test_an_object_may_have_any_members() -> None:
    found = [text(drawn(matcher(Constraint("json_object", "")), seed, most=300)) for seed in range(30)]
    whole = [json.loads(answer) for answer in found if answer.rstrip().endswith("}")]
    assert len(whole) > 5 and all(isinstance(answer, dict) for answer in whole)
    assert any(whole)


def test_grammars_may_be_lark() -> None:
    assert text(drawn(matcher(Constraint("grammar", 'start: "a" B\nB: /[xy]/')), 1)) in ("ax", "ay")


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (schema({"type": "strin"}), "Invalid type: strin"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"type": "string", "pattern": "(?=a)"}), "look-around"),
        (schema({"enum": []}), "Unsatisfiable"),
        (Constraint("json_schema", "[1]"), "object"),
        (Constraint("regex", "(ab"), "unclosed group"),
        (Constraint("grammar", "root ::= ("), "line 1"),
        (Constraint("grammar", "start: other"), 'unknown name: "other"'),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_named(constraint: Constraint, reason: str) -> None:
    with pytest.raises(NotCompiled) as caught:
        compiler().compile(constraint)
    assert reason in str(caught.value)


def test_only_the_last_grammars_are_kept() -> None:
    own = Compiler(vocabulary())
    first = own.compile(Constraint("regex", "a"))
    assert own.compile(Constraint("regex", "a")) is first
    for number in range(KEPT):
        own.compile(Constraint("regex", str(number)))
    assert own.compile(Constraint("regex", "a")) is not first


@pytest.mark.parametrize("made", [byte_level, sentencepiece])
def test_any_tokenizer_that_joins_bytes_will_do(made: object, tmp_path: Path) -> None:
    tokenizer = HfTokenizer(saved(made(), tmp_path))  # type: ignore[operator]
    end = tokenizer.vocab_size - 1
    known = unpacked_vocabulary(packed_vocabulary(tokenizer, tokenizer.vocab_size + 7, (end,)))
    own = Compiler(known)
    for seed in range(5):
        answer = drawn(Matcher(own.compile(KINDS["schema"]).deep_copy(), known), seed)
        said = b"".join(tokenizer.token_bytes(token) for token in answer[:-1])
        jsonschema.validate(json.loads(said), WEATHER)


def test_a_tokenizer_without_bytes_of_its_own_or_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="depends on their neighbours"):
        check_constrainable(HfTokenizer(saved(word_pieces(), tmp_path)), (1,), "guided_json")
    with pytest.raises(ApiError, match="no end-of-sequence token"):
        check_constrainable(HfTokenizer(saved(byte_level(), tmp_path)), (), "guided_json")
