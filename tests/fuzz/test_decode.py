"""The fuzz of reading events, short; `python -m tests.fuzz.decode` is the long one."""

import pytest

from events.messages import Decoder
from tests.fuzz import decode
from tests.fuzz.decode import Failure, Report, fuzz


def last_report(count: int, seed: int) -> Report:
    *_, report = fuzz(count, seed)
    return report


def test_no_mutated_payload_breaks_the_decoder_or_the_resolver() -> None:
    report = last_report(8_000, seed=1)
    assert report.inputs == 8_000
    assert min(report.accepted, report.refused, report.rejected_events, report.named_blocks) > 400


def test_exception_is_a_failure_that_shows_the_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fragile(Decoder):
        def decode(self, payload: bytes, name: str = "batch") -> object:  # type: ignore[override]
            if len(payload) % 7 == 0:
                raise KeyError("seven")
            return super().decode(payload, name)

    monkeypatch.setattr(decode, "Decoder", Fragile)
    with pytest.raises(Failure, match=r"input \d+: KeyError: 'seven'\npayload: [0-9a-f]+"):
        last_report(1000, seed=1)
