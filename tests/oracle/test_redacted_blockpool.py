"""Redacted recordings of real block managers, hybrid ones included: they replay to the original's index."""

from pathlib import Path

from tests.events.recorded import indexes, record_payloads
from tests.oracle.test_wire_blockpool import each_trace, load


@each_trace
def test_a_redacted_recording_replays_to_the_same_index(path: Path, tmp_path: Path) -> None:
    payloads = [bytes.fromhex(op["payload_hex"]) for op in load(path)[1] if "payload_hex" in op]
    before, after = map(indexes, record_payloads(tmp_path, payloads))
    assert any(held for held, _, _ in before)
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        assert other == one, f"record {number}"
