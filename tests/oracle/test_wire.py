"""The wire format against the bytes of real engines."""

import random
from typing import Any

import msgspec
import pytest

from events.messages import (
    AllBlocksCleared,
    BadBatch,
    BlockRemoved,
    BlockStored,
    Decoder,
    Event,
    EventBatch,
    RejectedEvent,
    UnknownEvent,
    encode_batch,
)
from tests.oracle.vectors import VECTORS, Record, exactly, params, plain, records, unhex

TYPES = {event_type.__name__: event_type for event_type in (BlockStored, BlockRemoved, AllBlocksCleared)}
# The most fields that a map with a one-byte header holds.
FIXMAP_FIELDS = 15

VECTOR = list(records("wire_vectors*.jsonl"))
MEANT = [vector for vector in VECTOR if "normalized" in vector]
EXPECTED = [vector for vector in VECTOR if "expect" in vector]


def named(vectors: list[Record]) -> list[Any]:
    return params((vector["name"], vector) for vector in vectors)


def in_our_layout(vector: Record) -> bool:
    """Return True for vLLM's current layout: three elements, and events in our layout."""
    raw, meant = vector["raw"], vector["normalized"]
    as_ours = all(map(event_in_our_layout, raw[1], meant["events"]))
    return bool(vector["engine"] == "vllm") and len(raw) == 3 and as_ours


def event_in_our_layout(raw: Any, normalized: Record) -> bool:
    """Return True for a map with all fields that we always send, no foreign ones, and a header as wide as ours."""
    if not isinstance(raw, dict):
        return False
    fields = msgspec.structs.fields(TYPES[raw["type"]])
    always = {field.name for field in fields if field.required}
    # msgspec sizes the header by how many fields the type has, not by how many of them it sends.
    widths = {len(fields) + 1 > FIXMAP_FIELDS, len(normalized) > FIXMAP_FIELDS}
    return always <= raw.keys() - {"type"} <= {field.name for field in fields} and len(widths) == 1


OURS = [vector for vector in MEANT if in_our_layout(vector)]


def decode(vector: Record, decoder: Decoder | None = None) -> EventBatch:
    return (decoder or Decoder()).decode(bytes.fromhex(vector["payload_hex"]), vector["name"])


def assert_means(event: Event, normalized: Record, decoder: Decoder) -> None:
    ours = msgspec.structs.asdict(event)
    for field, value in normalized.items():
        if field == "type":
            assert type(event).__name__ == value
        elif field in ours:
            assert exactly(ours.pop(field)) == exactly(value), field
        else:
            assert value is None or decoder.unknown_fields, f"{field} was neither read nor counted"
    assert [field for field, value in ours.items() if value is not None] == []


def test_there_are_vectors_to_test_with() -> None:
    assert list(VECTORS.rglob("*.jsonl")), f"{VECTORS} has no vectors; set WARMROUTE_VECTORS to a folder that does"


@pytest.mark.parametrize("vector", named(MEANT))
def test_payload_decodes_to_its_meaning(vector: Record) -> None:
    decoder = Decoder()
    batch = decode(vector, decoder)
    meant = vector["normalized"]
    assert (batch.ts, batch.data_parallel_rank) == (meant["ts"], meant["data_parallel_rank"])
    assert len(batch.events) == len(meant["events"])
    for event, normalized in zip(batch.events, meant["events"], strict=True):
        assert_means(event, normalized, decoder)
    assert (decoder.unknown_types.total(), decoder.rejected_events) == (0, 0)


@pytest.mark.parametrize("vector", named(MEANT))
def test_tolerant_reading_gives_what_the_strict_one_gives(vector: Record) -> None:
    tolerant = Decoder()
    tolerant.decode(msgspec.msgpack.encode([0.0, [["NotYetInvented"]], None]))
    strict, again = decode(vector), decode(vector, tolerant)
    assert [plain(msgspec.to_builtins(event)) for event in again.events] == [
        plain(msgspec.to_builtins(event)) for event in strict.events
    ]


@pytest.mark.parametrize("vector", named(OURS))
def test_decoded_batch_encodes_to_the_same_bytes(vector: Record) -> None:
    assert encode_batch(decode(vector)).hex() == vector["payload_hex"]


@pytest.mark.parametrize("vector", named(OURS))
def test_batch_built_from_its_meaning_encodes_to_the_engines_bytes(vector: Record) -> None:
    meant = unhex(vector["normalized"])
    events: list[Event] = [TYPES[event.pop("type")](**event) for event in meant["events"]]
    assert encode_batch(EventBatch(meant["ts"], events, meant["data_parallel_rank"])).hex() == vector["payload_hex"]


@pytest.mark.parametrize(
    "vector",
    named([v for v in VECTOR if isinstance(v.get("raw"), list) and any(isinstance(e, dict) for e in v["raw"][1])]),
)
def test_order_of_keys_does_not_matter(vector: Record) -> None:
    rng = random.Random(vector["name"])
    raw = unhex(vector["raw"])
    raw[1] = [dict(rng.sample(sorted(e.items()), len(e))) if isinstance(e, dict) else e for e in raw[1]]
    assert Decoder().decode(msgspec.msgpack.encode(raw)).events == decode(vector).events


@pytest.mark.parametrize("vector", named(EXPECTED))
def test_payload_is_treated_as_expected(vector: Record) -> None:
    expect, decoder = vector["expect"], Decoder()
    assert expect.startswith(("accept", "skip the unknown event", "reject that event", "reject the batch")), expect
    if expect.startswith("reject the batch"):
        with pytest.raises(BadBatch, match=vector["name"]):
            decode(vector, decoder)
        return
    events = decode(vector, decoder).events
    unknown = [event for event in events if isinstance(event, UnknownEvent)]
    rejected = [event for event in events if isinstance(event, RejectedEvent)]
    assert bool(unknown) == expect.startswith("skip the unknown event")
    assert bool(rejected) == expect.startswith("reject that event")
    assert (decoder.unknown_types.total(), decoder.rejected_events) == (len(unknown), len(rejected))
    assert bool(decoder.unknown_fields) == ("ignore" in expect)
    for event, raw in zip(events, unhex(vector["raw"][1]), strict=True):
        assert_kept(event, raw)


def assert_kept(event: Event, raw: Any) -> None:
    """Check that all fields read from an event without a stated meaning equal the sent ones."""
    if isinstance(event, UnknownEvent | RejectedEvent):
        return
    ours = {field: value for field, value in msgspec.structs.asdict(event).items() if value is not None}
    sent = raw if isinstance(raw, dict) else dict(zip(("type", *event.__struct_fields__), raw, strict=False))
    assert exactly({"type": type(event).__name__, **ours}) == exactly(
        {k: v for k, v in sent.items() if k in ("type", *ours)}
    )
    required = {field.name for field in msgspec.structs.fields(event) if field.required}
    assert all(sent[field] is None for field in required - ours.keys())
