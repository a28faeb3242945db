"""The router's knowledge of retained prefixes, within bounds."""

import pytest

from api.retention import Retain
from router.prompts.prefixes import retained
from router.prompts.prefixes.retained import Full, RetainedPrefix, RetainedPrefixes

SIZE = 16
TTL_S = 300.0


def asked(kept: RetainedPrefixes, keys: list[int], tokens: int, now_s: float, ttl_s: float = TTL_S) -> None:
    retain = [Retain(tokens, ttl_s)] if tokens else []
    kept.asked("r0", "m", SIZE, keys, retain, now_s)
    kept.check()


def operators(key: int, tokens: int = SIZE) -> RetainedPrefix:
    return RetainedPrefix(key, "m", SIZE, tokens, TTL_S, {"r0": TTL_S}, bytes(4 * tokens))


def test_whole_blocks_are_retained_until_the_time_is_over() -> None:
    kept = RetainedPrefixes()
    asked(kept, [1, 2, 3], 2 * SIZE + 5, now_s=10.0)
    [one] = kept.all(10.0)
    assert (one.key, one.tokens, one.until_s, one.is_operators) == (2, 2 * SIZE, {"r0": 310.0}, False)
    assert kept.until_s(20.0) == {2: 310.0}
    assert kept.all(310.0) == []


def test_each_use_at_the_replica_renews_the_time() -> None:
    kept = RetainedPrefixes()
    asked(kept, [1, 2], 2 * SIZE, now_s=0.0)
    asked(kept, [1, 2, 3], 0, now_s=200.0)
    assert kept.until_s(200.0) == {2: 500.0}
    asked(kept, [1], 0, now_s=400.0)  # too short to use it
    assert kept.until_s(400.0) == {2: 500.0}
    asked(kept, [1, 2, 3], 0, now_s=501.0)
    assert kept.until_s(501.0) == {}


def test_less_than_a_block_is_not_retained() -> None:
    kept = RetainedPrefixes()
    asked(kept, [1, 2], SIZE - 1, now_s=0.0)
    assert len(kept) == 0


def test_what_was_used_longest_ago_is_forgotten_first_but_no_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "MAX_PREFIXES", 3)
    kept = RetainedPrefixes()
    kept.retain(operators(100))
    for key in (1, 2):
        asked(kept, [key], SIZE, now_s=0.0)
    asked(kept, [1], 0, now_s=1.0)
    asked(kept, [3], SIZE, now_s=2.0)
    assert [one.key for one in kept.all(2.0)] == [3, 1, 100]


def test_operators_retain_a_bounded_number_of_tokens_and_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "MAX_OF_OPERATORS", 2)
    monkeypatch.setattr(retained, "MAX_BYTES", 4 * 5 * SIZE)
    kept = RetainedPrefixes()
    for key in (1, 2):
        one = operators(key, 2 * SIZE)
        kept.check_room(key, one.packed, 0.0)
        kept.retain(one)
    with pytest.raises(Full, match="2 prefixes"):
        kept.check_room(3, b"", 0.0)
    kept.check_room(2, bytes(4 * 3 * SIZE), 0.0)  # in place of the same one
    with pytest.raises(Full, match="tokens"):
        kept.check_room(2, bytes(4 * 4 * SIZE), 0.0)
    kept.check_room(3, b"", TTL_S)  # their time is over
    kept.check()
