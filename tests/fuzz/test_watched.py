"""Patience with a fuzzer is counted in the processor's time, and ends."""

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.fuzz.watched import watched


def reports(blocks: int, cpu_s: float = 0.0, sleep_s: float = 0.0) -> Iterator[SimpleNamespace]:
    for number in range(blocks):
        until_s = time.process_time() + cpu_s
        while time.process_time() < until_s:
            pass
        time.sleep(sleep_s)
        yield SimpleNamespace(seconds=11.0 * number)


def test_reports_come_and_progress_is_shown_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    assert [one.seconds for one in watched(reports(3))] == [0.0, 11.0, 22.0]
    assert capsys.readouterr().out.count("seconds=") == 2


def test_one_that_is_stuck_is_ended() -> None:
    with pytest.raises(TimeoutError, match=r"no end after 0.02 s of the processor"):
        list(watched(reports(1, cpu_s=30.0), 0.02))


def test_one_that_gets_no_turn_is_waited_for() -> None:
    assert len(list(watched(reports(1, sleep_s=0.1), 0.05))) == 1
