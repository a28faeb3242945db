"""The fuzz of a gateway's streams, short; `python -m tests.fuzz.picker` is the long one."""

import pytest

from router.http.picker.exchange import PickedExchange
from router.http.picker.gateway import Gateway
from router.http.picker.stream import Outcome, Pick, PickerStream, Reply
from tests.fuzz import picker
from tests.fuzz.decode import Failure
from tests.fuzz.picker import BLOCK, Report, Sequences, fuzz


def last_report(count: int, seed: int) -> Report:
    *_, report = fuzz(count, seed)
    return report


def test_no_sequence_of_messages_leaves_anything_behind() -> None:
    report = last_report(8000, seed=1)
    assert report.messages >= 8000
    assert min(report.picked, report.answered, report.aborted, report.cancelled, report.refused.total()) > 20


def test_a_stream_depends_on_its_number_alone() -> None:
    one, other = Sequences(), Sequences()
    streams = [one.sequence(5, number) for number in range(50)]
    assert streams == [other.sequence(5, number) for number in reversed(range(50))][::-1]
    assert len({b"".join(messages) for messages in streams}) > 40


def test_a_request_that_is_not_ended_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PickedExchange, "leave", lambda _: None)
    with pytest.raises(Failure, match=r"streams \d+ to \d+: AssertionError: \d+ requests are open"):
        last_report(1000, seed=1)


def test_an_exception_is_a_failure_that_shows_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_badly(*_: object) -> PickedExchange:
        raise KeyError("seven")

    monkeypatch.setattr(Gateway, "open", open_badly)
    with pytest.raises(Failure, match=r"KeyError: 'seven'\n\d+: \['[0-9a-f]+'"):
        last_report(1, seed=1)


def test_an_error_that_is_only_logged_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def hear_badly(*_: object) -> None:
        raise KeyError("eight")

    monkeypatch.setattr(PickedExchange, "set", hear_badly)
    with pytest.raises(Failure, match="eight"):
        last_report(1, seed=1)


def test_a_body_of_another_length_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = PickerStream.decide

    def longer(stream: PickerStream, outcome: Outcome) -> object:
        replies = list(decide(stream, outcome))
        for reply in replies:
            if isinstance(reply, Reply) and reply.part and isinstance(outcome, Pick):
                reply.part += b"x"
        return replies

    monkeypatch.setattr(PickerStream, "decide", longer)
    with pytest.raises(Failure, match="the body has another length"):
        last_report(1000, seed=1)


def test_growing_memory_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = iter([0.0, 1000.0])
    monkeypatch.setattr(picker, "peak_mib", lambda: next(grown))
    with pytest.raises(Failure, match=f"memory grew by 1000 MiB until stream {BLOCK}"):
        last_report(1, seed=1)
