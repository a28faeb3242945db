"""Answers to random schemas are valid over HTTP, and the same if the engine that gives them is killed halfway."""

from pathlib import Path

import pytest

from tests.chaos.schemas import REFUSED, refusal, report, router_of_one

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

STREAMS = 16  # `python -m tests.bench schemas` tries a thousand


def test_answers_are_valid_and_the_same_after_a_kill(tmp_path: Path) -> None:
    found = report(tmp_path, STREAMS, STREAMS)
    print(found)
    assert found.resumed > STREAMS // 6, "too few answers were under way when the engine was killed"


def test_keywords_that_are_not_supported_are_refused_by_name(tmp_path: Path) -> None:
    with router_of_one(tmp_path) as served:
        for keyword, value in REFUSED.items():
            schema = {"type": "object", "properties": {"a": {"type": "array", keyword: value}}}
            status, message = refusal(served, schema)
            assert status == 400 and keyword in message and "properties" in message, (keyword, status, message)
