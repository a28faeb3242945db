"""Constrained answers in engines that compute, beside free ones: the form, the same tokens, and who waits for whom."""

import json
import math
import random
import re
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from api.openai.constraints import Constraint
from api.tokens.tokenizer import ByteTokenizer
from events.blocks import pack_tokens
from replica.engine.engine import Engine
from replica.grammar.compiler import Compiler
from replica.grammar.matcher import Matcher
from replica.grammar.vocabulary import packed_vocabulary, unpacked_vocabulary
from replica.messages import Sampling, Submit
from tests.replica.device.hosts import on_device
from tests.replica.grammar.constraints import KINDS, WEATHER
from tests.replica.models import VOCABULARY, Answer, finish, native, saved, submit

END = ByteTokenizer.eos
REQUESTS = 12
SHAPES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "seed": 11},
    {"temperature": 1.0, "top_p": 0.7, "seed": 3, "logit_bias": {ord("x"): 100.0, ord('"'): 3.0, END: 50.0}},
    {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"temperature": 0.9, "min_tokens": 60, "seed": 5},
]
Engines = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("qwen3", tmp_path_factory.mktemp("models"))


@cache
def compiler() -> Compiler:
    return Compiler(unpacked_vocabulary(packed_vocabulary(ByteTokenizer(), VOCABULARY, (END,))))


def matcher(constraint: Constraint) -> Matcher:
    own = unpacked_vocabulary(packed_vocabulary(ByteTokenizer(), VOCABULARY, (END,)))
    return Matcher(compiler().compile(constraint).deep_copy(), own)


def constrain(
    engine: Engine, number: int, prompt: list[int], constraint: Constraint, output: list[int] | None = None, **more: Any
) -> None:
    own = {"max_tokens": 200, "temperature": 0.0, "top_logprobs": 3, "stop_token_ids": (END,), **more}
    sampling = Sampling(**own, constraint=constraint)
    given = Submit(number, pack_tokens(prompt), sampling, output=pack_tokens(output or []), priority=float(number))
    state = matcher(constraint)
    assert state.follow(output or [])
    assert engine.submit(given, state) is None


def text(answer: Answer) -> str:
    return ByteTokenizer().decode(answer.token_ids)


def prompt(seed: int, length: int = 20) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(length)]


def ask_mixed(engine: Engine) -> dict[int, Answer]:
    """Free and constrained requests of all shapes together; those with odd numbers are constrained."""
    for number in range(REQUESTS):
        shape = SHAPES[number // 2 % len(SHAPES)]
        if number % 2:
            constrain(engine, number, prompt(number), list(KINDS.values())[number // 2 % len(KINDS)], **shape)
        else:
            submit(engine, number, prompt(number), max_tokens=24, **{"stop_token_ids": (END,), **shape})
    return finish(engine)


def alone(engine: Engine, number: int, constraint: Constraint, **fields: Any) -> Answer:
    constrain(engine, number, prompt(number), constraint, **fields)
    return finish(engine)[number]


@pytest.mark.parametrize("made", [native, on_device], ids=["cpu", "device"])
def test_all_answers_have_their_form_and_free_ones_are_as_without_the_others(folder: Path, made: Engines) -> None:
    answers = ask_mixed(made(folder))
    for number in range(1, REQUESTS, 2):
        assert answers[number].finish_reason == "stop", text(answers[number])
        kind = list(KINDS)[number // 2 % len(KINDS)]
        said = text(answers[number])
        if kind == "schema":
            jsonschema.validate(json.loads(said), WEATHER)
        elif kind == "choice":
            assert said in json.loads(KINDS["choice"].text)
        else:
            pattern = {"regex": r"[A-C]{2}-[0-9]{3}", "grammar": r"\[[a-z]{1,3}(,[a-z]{1,3})?\]"}[kind]
            assert re.fullmatch(pattern, said)
    free = made(folder)
    for number in range(0, REQUESTS, 2):
        shape = SHAPES[number // 2 % len(SHAPES)]
        submit(free, number, prompt(number), max_tokens=24, **{"stop_token_ids": (END,), **shape})
    for number, answer in finish(free).items():
        assert answer.token_ids == answers[number].token_ids, number


def test_the_device_says_what_the_cpu_says(folder: Path) -> None:
    expected = ask_mixed(native(folder))
    for number, answer in ask_mixed(on_device(folder)).items():
        same = expected[number]
        assert (answer.token_ids, answer.finish_reason) == (same.token_ids, same.finish_reason), number
        for mine, other in zip(answer.logprobs, same.logprobs, strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [token for token, _ in mine.top] == [token for token, _ in other.top]


@pytest.mark.parametrize(
    ("made", "shape"),
    [
        pytest.param(made, shape, marks=() if number in (0, 9) else pytest.mark.grid)
        for number, (made, shape) in enumerate(product((native, on_device), SHAPES))
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_answer_goes_on_from_every_token(folder: Path, made: Engines, shape: dict[str, Any]) -> None:
    whole = alone(made(folder), 1, KINDS["schema"], **shape).token_ids
    engine = made(folder)
    for cut in range(0, len(whole) - 1, 1 + len(whole) // 5):
        constrain(engine, cut, prompt(1), KINDS["schema"], whole[:cut], **shape)
    for cut, answer in finish(engine).items():
        assert whole[:cut] + answer.token_ids == whole


def test_log_probabilities_are_of_what_is_allowed(folder: Path) -> None:
    answer = alone(native(folder), 1, Constraint("regex", "[abc][xy]"), top_logprobs=5, temperature=1.0)
    for place, (token, logprobs) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        finite = dict(pair for pair in logprobs.top if pair[1] > -math.inf)
        assert set(finite) == [set(b"abc"), set(b"xy"), {END}][place]
        assert sum(map(math.exp, finite.values())) == pytest.approx(1.0)
        assert logprobs.logprob == finite[token]
        assert logprobs.rank <= len(finite)


def test_what_cannot_be_followed_further_has_not_ended_by_itself(folder: Path) -> None:
    ambiguous = Constraint("grammar", 'start: start start | "a" | start start start')
    engine = native(folder)
    answer = alone(engine, 1, ambiguous, logit_bias={END: -100.0})
    assert answer.finish_reason == "length"
    assert engine.stats().constraint_failures == 1
    assert answer.token_ids[-1] == END and len(answer.token_ids) < 200


# ---- one step ahead


def test_free_requests_do_not_wait_for_constrained_ones(folder: Path) -> None:
    """Both kinds run ahead; a constrained one takes part in every other step, a free one in each."""
    engine = on_device(folder)
    submit(engine, 1, prompt(1), max_tokens=30, top_logprobs=None)
    constrain(engine, 2, prompt(2), Constraint("regex", "[a-d]{60}"), top_logprobs=None)
    tokens = {1: 0, 2: 0}
    for _ in range(21):
        assert engine.scheduler.may_run_ahead()
        for output in engine.step():
            tokens[output.id] += len(output.token_ids)
        engine.check()
    assert tokens == {1: 20, 2: 10}
