"""The fuzz of reading events, short; `python -m tests.fuzz.decode` is the long one."""

import msgspec
import pytest

from events.messages import Decoder
from tests.fuzz import decode
from tests.fuzz.decode import Failure, Mutator, Report, fuzz, native_payloads


def last_report(count: int, seed: int) -> Report:
    *_, report = fuzz(count, seed)
    return report


def test_no_mutated_payload_breaks_the_decoder_or_the_resolver() -> None:
    report = last_report(20_000, seed=1)
    assert report.inputs == 20_000
    assert min(report.accepted, report.refused, report.rejected_events, report.named_blocks) > 1000


def test_input_depends_on_its_number_alone() -> None:
    payloads = native_payloads()
    one, other = Mutator(payloads), Mutator(payloads)
    inputs = [one.input(5, number) for number in range(50)]
    assert inputs == [other.input(5, number) for number in reversed(range(50))][::-1]
    assert len(set(inputs)) > 40


def test_exception_is_a_failure_that_shows_the_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fragile(Decoder):
        def decode(self, payload: bytes, name: str = "batch") -> object:  # type: ignore[override]
            if len(payload) % 7 == 0:
                raise KeyError("seven")
            return super().decode(payload, name)

    monkeypatch.setattr(decode, "Decoder", Fragile)
    with pytest.raises(Failure, match=r"input \d+: KeyError: 'seven'\npayload: [0-9a-f]+"):
        last_report(1000, seed=1)


def test_slow_input_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "SLOW_S", 0.0)
    with pytest.raises(Failure, match="took"):
        last_report(1, seed=1)


def test_growing_memory_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = iter([0.0, 1000.0])
    monkeypatch.setattr(decode, "peak_mib", lambda: next(grown))
    with pytest.raises(Failure, match="memory grew by 1000 MiB"):
        last_report(1, seed=1)


def test_native_payloads_start_with_a_chain_that_proves_the_hashes() -> None:
    _, events, _ = msgspec.msgpack.decode(native_payloads()[0])
    assert events[0]["parent_block_hash"] is None
