"""`decode`: every vector decodes to its meaning; bad input is reported and affects nothing else."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from events.cli import events
from events.messages import BlockRemoved, BlockStored

DEFAULT = Path(__file__).parents[2] / "data" / "vectors"
VECTORS = Path(os.environ.get("WARMROUTE_VECTORS", DEFAULT)) / "wire_vectors.jsonl"
FIELDS = {
    "BlockStored": {"type", *BlockStored.__struct_fields__},
    "BlockRemoved": {"type", *BlockRemoved.__struct_fields__},
    "AllBlocksCleared": {"type"},
}
CLEARED = '{"payload_hex": "93cb3ff8000000000000' + b"\x91\x81\xa4type\xb0AllBlocksCleared\xc0".hex() + '"}'


def decode(text: str) -> Result:
    return CliRunner().invoke(events, ["decode"], input=text)


def complete(event: dict[str, Any]) -> dict[str, Any]:
    """The meaning with the fields that its engine does not have."""
    return dict.fromkeys(FIELDS[event["type"]]) | event


def test_every_vector_is_decoded_to_its_meaning() -> None:
    vectors = [json.loads(line) for line in VECTORS.read_text().splitlines()]
    known = [vector for vector in vectors if "normalized" in vector]
    result = decode("".join(json.dumps(vector) + "\n" for vector in known))
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    for vector, line in zip(known, lines, strict=True):
        meaning = vector["normalized"]
        assert line == meaning | {"events": [complete(event) for event in meaning["events"]]}, vector["name"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2: Input data was truncated"),
        ("[" * 100_000, "line 2: Expected `object`, got `array`"),
        ("{}", "line 2: Object missing required field `payload_hex`"),
        ("7", "line 2: Expected `object`, got `int`"),
        ('{"payload_hex": 7}', "line 2: Expected `str`, got `int` - at `$.payload_hex`"),
        ('{"payload_hex": "9g"}', "line 2: non-hexadecimal number found"),
        ('{"payload_hex": ""}', "line 2: not msgpack: "),
        ('{"payload_hex": "c1"}', "line 2: not msgpack: "),
        ('{"payload_hex": "80"}', "line 2: a batch is an array [ts, events, rank], this is dict"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_printed(line: str, reason: str) -> None:
    result = decode(f"{CLEARED}\n{line}\n{CLEARED}\n")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr.startswith(reason)
    assert result.stderr.count("\n") == 1


def test_empty_lines_count_but_are_no_error() -> None:
    result = decode(f"\n{CLEARED}\n\nbad\n")
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr.startswith("line 4: ")


def test_bytes_are_written_as_hex_and_large_integers_exactly() -> None:
    stored = b"\x84\xa4type\xacBlockRemoved\xacblock_hashes\x93\xcf" + b"\xff" * 8 + b"\xd3\x80" + bytes(7)
    payload = b"\x92\xcb" + bytes(8) + b"\x91" + stored + b"\xc4\x02\xab\xcd\xa6medium\xa3GPU\xa8ignored!\x07"
    result = decode(json.dumps({"payload_hex": payload.hex()}))
    assert result.exit_code == 0
    [event] = json.loads(result.stdout)["events"]
    assert event["block_hashes"] == [2**64 - 1, -(2**63), {"$hex": "abcd"}]
    assert event["group_idx"] is None


def test_nothing_in_is_nothing_out() -> None:
    result = decode("")
    assert (result.exit_code, result.output) == (0, "")
