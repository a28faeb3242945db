"""Usage at the end of an engine's answer."""

import msgspec
import pytest

from api.responses import usage
from router.proxy.attempt import Report


def _cached_in(body: bytes) -> int | None:
    report = Report()
    report.read(body)
    return report.cached


@pytest.mark.parametrize(
    ("said", "cached"),
    [
        (b'"cached_tokens": 12', 12),
        (b'"cached_tokens":1,"x":0} "cached_tokens" : 33}', 33),
        (b'"cached_tokens":null', None),
        (b"", None),
    ],
)
def test_the_last_word_of_an_engine_on_cached_tokens_counts(said: bytes, cached: int | None) -> None:
    assert _cached_in(said) == cached


def test_the_usage_of_our_own_answers_is_understood() -> None:
    assert _cached_in(msgspec.json.encode(usage(10, 5, 7))) == 7
