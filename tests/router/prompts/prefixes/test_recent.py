"""Remembered prompts stay within bounds."""

import pytest
from msgspec.structs import replace

from router.prompts.prefixes import recent
from router.prompts.prefixes.recent import RecentPrompt, RecentPrompts


def routed(number: int, blocks: int = 1) -> RecentPrompt:
    return RecentPrompt("m", 16, [number * 1000 + place for place in range(blocks)], float(number), b"text")


def test_the_oldest_prompts_make_room() -> None:
    kept = RecentPrompts(3)
    for number in range(5):
        kept.add(routed(number))
    assert [one.at_s for one in kept.all()] == [2.0, 3.0, 4.0]
    kept.check()


def test_long_prompts_make_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MAX_BLOCKS", 10)
    kept = RecentPrompts(100)
    for number in range(8):
        kept.add(routed(number, 3))
        kept.check()
    assert [one.at_s for one in kept.all()] == [5.0, 6.0, 7.0]
    kept.add(routed(8, 10))
    assert [one.at_s for one in kept.all()] == [8.0]
    kept.add(routed(9, 11))
    assert [one.at_s for one in kept.all()] == [8.0]
    kept.check()


def test_texts_make_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MAX_TEXT_BYTES", 10)
    kept = RecentPrompts(100)
    for number in range(4):
        kept.add(routed(number))
        kept.check()
    assert [one.at_s for one in kept.all()] == [2.0, 3.0]
    kept.add(replace(routed(4), text=None))
    assert len(kept) == 3


def test_what_has_no_block_is_not_kept() -> None:
    kept = RecentPrompts(3)
    kept.add(routed(1, 0))
    assert len(kept) == 0
    none = RecentPrompts(0)
    none.add(routed(1))
    assert len(none) == 0
