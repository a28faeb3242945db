"""Reading and writing batches; the bytes of real engines are in tests/oracle."""

import math
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    decode_batch,
    decode_tokens,
    encode_batch,
)
from tests.events.strategies import ANYTHING, BATCHES

pack = msgspec.msgpack.encode
REMOVED = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
STORED = {
    "type": "BlockStored",
    "block_hashes": [1],
    "parent_block_hash": None,
    "token_ids": [7],
    "block_size": 1,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}
TOO_DEEP = b"\x91" * 100_000 + b"\xc0"
NO_TOKENS = [pack(5), pack("text"), pack({1: 2}), pack([None]), pack([[1]]), b"\x91\xa1\xff"]


def batch(*events: Any) -> bytes:
    return pack([1.5, list(events), None])


def tolerant() -> Decoder:
    """A decoder that has met another layout, and will not go back to the strict reading."""
    decoder = Decoder()
    decoder.decode(batch(["BlockRemoved", [1]]))
    return decoder


# ---- writing


def test_token_ids_in_an_array_are_sent_as_a_list() -> None:
    in_a_list = BlockStored([1], None, [7, 300], 2, None, None, None)
    in_an_array = msgspec.structs.replace(in_a_list, token_ids=array("I", [7, 300]))
    assert encode_batch(EventBatch(1.5, [in_an_array])) == encode_batch(EventBatch(1.5, [in_a_list]))


def test_fields_that_are_not_set_are_not_sent() -> None:
    events: list[Event] = [
        BlockStored([1], None, [7], 1, None, None, None),
        BlockRemoved([1], None),
        AllBlocksCleared(),
    ]
    sent = msgspec.msgpack.decode(encode_batch(EventBatch(1.5, events)))
    assert sent == [1.5, [{**STORED, "medium": None}, {**REMOVED, "medium": None}, {"type": "AllBlocksCleared"}], None]
    assert list(sent[1][0]) == list(STORED)


@given(BATCHES)
def test_encoded_batch_decodes_to_itself(original: EventBatch) -> None:
    again = decode_batch(encode_batch(original))
    assert encode_batch(again) == encode_batch(original)
    assert not any(isinstance(event, UnknownEvent | RejectedEvent) for event in again.events)


@given(BATCHES)
def test_tolerant_reading_agrees_with_the_strict_one(original: EventBatch) -> None:
    payload = encode_batch(original)
    assert encode_batch(tolerant().decode(payload)) == encode_batch(decode_batch(payload)) == payload


# ---- reading what others send


def test_events_without_names_are_read_by_position() -> None:
    decoder = Decoder()
    payload = batch(["BlockStored", [1], None, [7], 1, 3], ["BlockRemoved", [1]], ["AllBlocksCleared"])
    assert decoder.decode(payload).events == [
        BlockStored([1], None, [7], 1, 3, None, None),
        BlockRemoved([1], None),
        AllBlocksCleared(),
    ]
    assert not decoder.unknown_fields


def test_map_in_the_place_of_the_lora_name_is_sglangs_metadata() -> None:
    stored = decode_batch(batch(["BlockStored", [1], None, [7], 1, None, "GPU", {"cache_salt": "x"}])).events[0]
    assert isinstance(stored, BlockStored)
    assert (stored.lora_name, stored.metadata) == (None, {"cache_salt": "x"})


def test_batch_without_a_rank_has_none_and_a_time_stamp_that_is_no_number_is_kept() -> None:
    assert decode_batch(pack([1, []])).data_parallel_rank is None
    assert math.isnan(decode_batch(pack([math.nan, []])).ts)


def test_unknown_events_are_skipped_and_counted_by_type() -> None:
    decoder = Decoder()
    events = decoder.decode(batch({"type": "Tiered"}, REMOVED, ["Tiered", 1], {"type": "Other"})).events
    assert events == [UnknownEvent("Tiered"), BlockRemoved([1], "GPU"), UnknownEvent("Tiered"), UnknownEvent("Other")]
    assert decoder.unknown_types == {"Tiered": 2, "Other": 1}


def test_unknown_fields_are_ignored_and_counted() -> None:
    decoder = Decoder()
    payload = pack([1.5, [{**REMOVED, "new": 1}, ["BlockRemoved", [1], "GPU", 0, "more"]], None, "newer"])
    assert decoder.decode(payload).events == [BlockRemoved([1], "GPU"), BlockRemoved([1], "GPU", 0)]
    assert decoder.unknown_fields == {"BlockRemoved.new": 1, "BlockRemoved.[4:]": 1, "batch[3:]": 1}


def test_counts_stay_bounded_whatever_the_names_are() -> None:
    decoder = Decoder()
    for number in range(2000):
        decoder.decode(batch({"type": f"{number}" * 1000}, {**REMOVED, f"{number}" * 1000: 1}))
    assert decoder.unknown_types.total() == decoder.unknown_fields.total() == 2000
    for counter in (decoder.unknown_types, decoder.unknown_fields):
        assert len(counter) < 300
        assert max(map(len, counter)) < 100


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "BlockRemoved"},
        {**REMOVED, "block_hashes": [1.5]},
        {**STORED, "block_size": "16"},
        {**STORED, "token_ids": [None]},
        {"type": 5},
        {},
        ["BlockStored", [1]],
        [],
        [5],
        None,
        "BlockRemoved",
    ],
)
def test_event_that_cannot_be_read_is_rejected_alone(bad: Any) -> None:
    decoder = Decoder()
    before, rejected, after = decoder.decode(batch(REMOVED, bad, REMOVED)).events
    assert before == after == BlockRemoved([1], "GPU")
    assert isinstance(rejected, RejectedEvent)
    assert decoder.rejected_events == 1


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (batch(REMOVED)[:-3], "not msgpack"),
        (batch(REMOVED) + b"\x00", "not msgpack"),
        (pack({}), "a batch is an array"),
        (pack([1.5]), "a batch is an array"),
        (pack("text"), "a batch is an array"),
        (pack(["now", []]), "the time stamp is str ('now')"),
        (pack([True, []]), "the time stamp is bool"),
        (pack([1.5, {}]), "the events are dict"),
        (pack([1.5, [], "zero"]), "the data-parallel rank is str ('zero')"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),
        (b"\x93\x00\xdd\xff\xff\xff\xff", "not msgpack"),
        (TOO_DEEP, "not msgpack"),
        (batch({**STORED, "extra_keys": [[msgspec.Raw(TOO_DEEP)]]}), "not msgpack"),
        (batch({"type": "New", "field": msgspec.Raw(TOO_DEEP)}), "not msgpack"),
        (batch({**STORED, "extra_keys": [[msgspec.Raw(b"\x81\x81\x01\x02\x03")]]}), "not msgpack"),
    ],
)
def test_what_is_no_batch_is_refused_by_name(payload: bytes, reason: str) -> None:
    for decoder in (Decoder(), Decoder(skim=True), tolerant()):
        with pytest.raises(BadBatch) as refusal:
            decoder.decode(payload, "batch 7 of r")
        assert str(refusal.value).startswith("batch 7 of r: ")
        assert reason in str(refusal.value)


@given(st.binary(max_size=40) | ANYTHING.map(pack) | ANYTHING.map(lambda event: batch(event)))
def test_any_bytes_are_a_batch_or_refused(payload: bytes) -> None:
    for decoder in (Decoder(), Decoder(skim=True), tolerant()):
        try:
            decoded = decoder.decode(payload)
        except BadBatch as refusal:
            assert len(str(refusal)) < 300  # noqa: PT017
        else:
            assert isinstance(decoded.ts, float)


# ---- skimming


def test_skimmed_event_gets_its_tokens_on_demand() -> None:
    payload = batch({**STORED, "group_idx": 2})
    skimmed = Decoder(skim=True).decode(payload).events[0]
    assert isinstance(skimmed, BlockStored)
    assert isinstance(skimmed.token_ids, msgspec.Raw)
    assert decode_tokens(skimmed) == decode_batch(payload).events[0]


@pytest.mark.parametrize("tokens", NO_TOKENS)
def test_tokens_skimmed_over_that_are_none_are_refused_on_demand(tokens: bytes) -> None:
    skimmed = Decoder(skim=True).decode(batch({**STORED, "token_ids": msgspec.Raw(tokens)})).events[0]
    assert isinstance(skimmed, BlockStored)
    with pytest.raises(ValueError, match="token_ids"):
        decode_tokens(skimmed)


def test_what_is_not_read_is_named_the_most_frequent_first() -> None:
    decoder = Decoder()
    strange = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "remaining_copy_counts": [0]}
    for events in ([strange], [strange, {"type": "BlockInactive", "block_hashes": [2]}]):
        decoder.decode(msgspec.msgpack.encode([0.0, events, 0]))
    assert decoder.unknown(8) == {"BlockRemoved.remaining_copy_counts": 2, "BlockInactive": 1}
    assert decoder.unknown(1) == {"BlockRemoved.remaining_copy_counts": 2}
    assert Decoder().unknown(8) == {}


@pytest.mark.parametrize(
    ("event", "read"),
    [
        (["BlockStored", [100, 101], 99, [1, 2, 3], 16, None, "gpu", None], BlockStored),
        (["BlockStored", [200, 201], 199, [4, 5, 6], 32, 42, "gpu", "test-lora"], BlockStored),
        (["BlockStored", [300, 301], 299, [7, 8, 9], 64, 123, "gpu"], BlockStored),
        (["BlockStored", [100, 101], 99, [1, 2, 3], 16, None, "gpu", None, None], BlockStored),
        (["BlockStored", [400], 399, [10, 11], 128], BlockStored),
        (["BlockStored", [500], 499, [1]], RejectedEvent),
        (["BlockRemoved", [200, 201, 202], "cpu"], BlockRemoved),
        (["BlockRemoved", [500, 501]], BlockRemoved),
        (["AllBlocksCleared"], AllBlocksCleared),
        (["UnknownEventType", "some", "data"], UnknownEvent),
        ([], RejectedEvent),
    ],
)
def test_events_of_the_tests_of_llm_ds_adapters_are_read(event: list[object], read: type) -> None:
    """The cases are those of its adapters for vLLM and SGLang, but for its refusal of vLLM's shorter, older events."""
    [found] = decode_batch(msgspec.msgpack.encode([1234567890.0, [event], None])).events
    assert type(found) is read
    if isinstance(found, BlockStored):
        assert [found.block_hashes, found.parent_block_hash, found.token_ids, found.block_size] == event[1:5]
        assert [found.lora_id, found.medium, found.lora_name] == [*event[5:8], *[None] * 3][:3]
