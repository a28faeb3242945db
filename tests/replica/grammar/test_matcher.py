"""A matcher depends on the tokens of the answer, and on nothing else."""

import logging
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.openai.constraints import Constraint
from tests.replica.grammar.constraints import KINDS, allowed, drawn, matcher, vocabulary

[END] = vocabulary().eos_ids


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1000), data=st.data())
def test_it_is_the_same_however_the_tokens_came(kind: str, seed: int, data: st.DataObject) -> None:
    answer = drawn(matcher(KINDS[kind]), seed)
    cut = data.draw(st.integers(0, len(answer)))
    stepwise, at_once = matcher(KINDS[kind]), matcher(KINDS[kind])
    for length in range(cut + 1):
        assert stepwise.follow(answer[:length])
        if data.draw(st.booleans()):
            stepwise.allowed()
    prompt = [1, 2, 3]
    assert at_once.follow(prompt + answer[:cut], len(prompt))
    assert allowed(stepwise) == allowed(at_once)
    assert stepwise.ended == at_once.ended == (cut == len(answer) or allowed(at_once) == [END])


def test_the_end_is_allowed_where_the_answer_may_end() -> None:
    open_end = matcher(Constraint("regex", "a{1,3}"))
    assert END not in allowed(open_end)
    assert open_end.follow([ord("a")])
    assert END in allowed(open_end) and len(allowed(open_end)) > 1
    assert not open_end.ended


def test_a_token_that_is_not_allowed_is_noticed() -> None:
    one = matcher(Constraint("regex", "ab"))
    assert not one.follow([ord("b")])
    assert one.failed and "98" in one.reason
    late = matcher(Constraint("regex", "a"))
    assert not late.follow([97, END, 97])


def test_a_limit_in_the_middle_ends_the_answer_there(caplog: pytest.LogCaptureFixture) -> None:
    many_states = matcher(Constraint("regex", r"(\p{L}{1,200}\p{N}{1,200}){200}"))
    answer: list[int] = []
    chance = random.Random(1)
    with caplog.at_level(logging.WARNING):
        while END not in answer and len(answer) < 500:
            following = allowed(many_states)
            answer.append(chance.choice([token for token in following if token != END] or following))
            many_states.follow(answer)
    assert many_states.failed and many_states.ended and following == [END]
    assert caplog.text.count("an answer ends early") == 1
