"""A matcher depends on the tokens of the answer, and on nothing else."""

import logging
import random

import pytest

from api.openai.constraints import Constraint
from tests.replica.grammar.constraints import allowed, matcher, vocabulary

[END] = vocabulary().eos_ids


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
