"""One replica's events as block keys."""

import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from events.blocks import ExtraKey, block_keys, root_key
from events.cache.changes import Cleared, Held, Removed, Stored
from events.cache.pool import Digest, fold
from events.cache.resolver import Resolver
from events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Decoder,
    Event,
    EventBatch,
    ExtraKeys,
    Hash,
    RejectedEvent,
    UnknownEvent,
    encode_batch,
)
from tests.events.resident import copies as resident_copies
from tests.events.strategies import BATCHES

MODEL = "model"
SIZE = 2
TOKENS = [10, 11, 20, 21, 30, 31]
KEYS = block_keys(TOKENS, SIZE, root_key(MODEL, block_size=SIZE))


def stored(hashes: list[Hash], tokens: list[Any], parent: Hash | None = None, **fields: Any) -> BlockStored:
    values = {"block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None, **fields}
    return BlockStored(hashes, parent, tokens, **values)


def removed(*hashes: Hash, medium: str | None = "GPU", group: int | None = None) -> BlockRemoved:
    return BlockRemoved(list(hashes), medium, group)


def resolved(*events: Event, **options: Any) -> Resolver:
    resolver = Resolver(MODEL, **options)
    for event in events:
        resolver.apply([event])
        resolver.check()
    return resolver


# ---- names


def test_change_names_the_blocks_and_what_they_follow() -> None:
    resolver = Resolver(MODEL)
    first, rest = stored([1], TOKENS[:2]), stored([2, 3], TOKENS[2:], parent=1)
    root = root_key(MODEL, block_size=SIZE)
    assert resolver.apply([first, rest]) == [
        Stored("GPU", KEYS[:1], KEYS[:1], root, first),
        Stored("GPU", KEYS[1:], KEYS[1:], KEYS[0], rest),
    ]
    held = (Held("GPU", 0, {KEYS[0], KEYS[2]}),)
    assert resolver.apply([removed(2), AllBlocksCleared()]) == [Removed("GPU", KEYS[1:2]), Cleared(held)]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=24), st.integers(1, 4), st.data())
def test_replicas_that_hash_differently_hold_equal_keys(
    tokens: list[int], block_size: int, data: st.DataObject
) -> None:
    keys = block_keys(tokens, block_size, root_key(MODEL, block_size=block_size))
    tokens = tokens[: len(keys) * block_size]
    resolvers = []
    for seed in range(2):
        rng = random.Random(seed)
        hashes: list[Hash] = [rng.getrandbits(64) if seed else rng.randbytes(32) for _ in keys]
        cut = data.draw(st.integers(0, len(keys)))
        resolvers.append(
            resolved(
                stored(hashes[:cut], tokens[: cut * block_size], block_size=block_size),
                stored(
                    hashes[cut:], tokens[cut * block_size :], hashes[cut - 1] if cut else None, block_size=block_size
                ),
            )
        )
    assert [resolver.keys() for resolver in resolvers] == [set(keys)] * 2
    assert [resolver.matched(keys) for resolver in resolvers] == [len(keys)] * 2


@pytest.mark.parametrize(
    ("fields", "root"),
    [
        ({}, root_key(MODEL, None, None, SIZE)),
        ({"lora_name": "a"}, root_key(MODEL, "a", None, SIZE)),
        ({"lora_name": "a", "lora_id": 7}, root_key(MODEL, "a", None, SIZE)),
        ({"lora_id": 7}, root_key(MODEL, "#7", None, SIZE)),
        ({"lora_name": "a", "extra_keys": [["a"], ["a"], ["a"]]}, root_key(MODEL, "a", None, SIZE)),
        ({"lora_name": "a", "extra_keys": [["a", "s"], ["a"], ["a"]]}, root_key(MODEL, "a", "s", SIZE)),
        ({"lora_name": "a", "extra_keys": [["a", "a"], ["a"], ["a"]]}, root_key(MODEL, "a", "a", SIZE)),
        ({"extra_keys": [["s"], None, None]}, root_key(MODEL, None, "s", SIZE)),
        ({"cache_salt": "s"}, root_key(MODEL, None, "s", SIZE)),
        ({"metadata": {"cache_salt": "s"}}, root_key(MODEL, None, "s", SIZE)),
    ],
)
def test_lora_and_salt_are_in_the_root_however_the_engine_says_them(fields: dict[str, Any], root: int) -> None:
    assert resolved(stored([1, 2, 3], TOKENS, **fields)).keys() == set(block_keys(TOKENS, SIZE, root))


def test_blocks_that_follow_a_salted_one_need_not_repeat_the_salt() -> None:
    resolver = resolved(stored([1], TOKENS[:2], extra_keys=[["s"]]), stored([2, 3], TOKENS[2:], parent=1))
    assert resolver.keys() == set(block_keys(TOKENS, SIZE, root_key(MODEL, None, "s", SIZE)))


@pytest.mark.parametrize(
    ("fields", "extras"),
    [
        ({"extra_keys": [None, [["img", -1]], None]}, {1: [("img", -1)]}),
        ({"extra_keys": [["s"], ["unknown", ["img", 0], b"embedding"]]}, {1: [("img", 0), b"embedding"]}),
        ({"mm_keys": [[], [{"type": "mm_key", "hash": "ab", "start_offset": 1}]]}, {1: [("ab", 1)]}),
    ],
)
def test_images_and_embeddings_are_in_the_keys_of_their_blocks(
    fields: dict[str, Any], extras: dict[int, list[ExtraKey]]
) -> None:
    salt = "s" if fields.get("extra_keys", [None])[0] else None
    expected = block_keys(TOKENS, SIZE, root_key(MODEL, None, salt, SIZE), extras)
    assert resolved(stored([1, 2, 3], TOKENS, **fields)).keys() == set(expected)
    assert set(expected) != set(KEYS)


def test_digits_are_read_as_tokens() -> None:
    expected = block_keys([1, 2, 3, 4, 5, 6], SIZE, root_key(MODEL, block_size=SIZE))
    assert resolved(stored([1, 2, 3], list("123456"))).keys() == set(expected)


def test_an_event_without_blocks_of_its_own_may_come_first_after_a_loss() -> None:
    resolver = resolved(stored([1], TOKENS[:2]))
    resolver.capacity.cacheable_blocks = 4
    resolver.lose()
    resolver.apply([stored([2], TOKENS[:2], locality="REMOTE"), stored([], [])])
    assert resolver.keys() == set()


# ---- copies


def test_medium_that_is_not_said_is_the_gpu() -> None:
    assert resolved(stored([1], TOKENS[:2], medium=None)).keys("GPU") == {KEYS[0]}


def test_removal_of_what_was_never_stored_leaves_no_trace() -> None:
    resolver = resolved(*(removed(1, medium=f"tier-{number}") for number in range(100)))
    assert resolver.pools == {}
    assert resolver.stats.removed_unknown == 100


def test_clear_empties_all_media_and_forgets_what_was_lost() -> None:
    resolver = resolved(stored([1], TOKENS[:2]), stored([3], TOKENS[4:], parent=2, medium="CPU"), RejectedEvent("bad"))
    assert (resolver.orphan_blocks, resolver.inexact) == (1, "an event could not be read: bad")
    resolver.apply([AllBlocksCleared()])
    assert (resident_copies(resolver), resolver.orphan_blocks, resolver.inexact) == ({}, 0, None)


def test_unknown_event_leaves_the_view_exact_but_counted() -> None:
    resolver = resolved(UnknownEvent("New"))
    assert (resolver.stats.unknown_events, resolver.inexact) == (1, None)


def test_one_hash_for_two_texts_is_declared() -> None:
    assert (
        resolved(stored([1], [1, 2]), stored([1], [3, 4])).inexact
        == "block 1 was announced twice with different tokens"
    )


# ---- orphans


def test_waiting_orphans_are_bounded_and_dropping_them_is_declared() -> None:
    orphans = [stored([number], [1, 2], parent=-number) for number in range(1, 1000)]
    resolver = resolved(*orphans[:10], orphan_limit=10)
    assert (resolver.orphan_blocks, resolver.inexact) == (10, None)
    resolver = resolved(*orphans, orphan_limit=10)
    assert resolver.orphan_blocks == 10
    assert resolver.stats.orphans_dropped == len(orphans) - 10
    assert resolver.inexact == "more than 10 blocks waited for their parent; the oldest were dropped"


def test_only_what_can_be_named_one_day_waits() -> None:
    nothing = [stored([], [1, 2], parent=-number) for number in range(1, 100)]
    too_long = [stored([number], [1, 2, 3], parent=-number) for number in range(1, 100)]
    resolver = resolved(*nothing, *too_long)
    assert resolver._orphans == {}
    assert resolver.stats.unpaired_blocks == 99


# ---- what cannot be named


@pytest.mark.parametrize(
    ("hashes", "tokens", "block_size"),
    [
        ([1, 2], TOKENS, SIZE),
        ([1], TOKENS[:1], SIZE),
        ([1], TOKENS[:2], 0),
        ([1], TOKENS[:2], -2),
        ([1], ["x", "y"], SIZE),
        ([1], [-1, 2], SIZE),
        ([1], [2**63, 2], SIZE),
        ([1], TOKENS[:2], 2**62),
    ],
)
def test_tokens_that_cannot_be_paired_with_hashes_name_nothing_and_are_counted(
    hashes: list[Hash], tokens: list[Any], block_size: int
) -> None:
    resolver = resolved(stored(hashes, tokens, block_size=block_size))
    assert (resolver.keys(), resolver.resident_blocks()) == (set(), len(hashes))
    assert resolver.stats.unpaired_blocks == len(hashes)
    resolver.apply([removed(*hashes)])
    assert resolver.resident_blocks() == 0


@pytest.mark.parametrize("block_size", [0, 1, 2**62, -(2**63)])
@pytest.mark.parametrize("native", [False, True])
def test_event_without_blocks_changes_nothing(block_size: int, native: bool) -> None:
    for tokens in ([], ["x"], [1]):
        resolver = Resolver(MODEL, native=native)
        assert resolver.apply([stored([], tokens, block_size=block_size)]) == []
        assert (resolver.resident_blocks(), resolver.inexact) == (0, None)


def test_image_id_nested_too_deeply_to_print_is_survived() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    extra_keys: ExtraKeys = [[[deep, 1]]]
    resolved(stored([1], TOKENS[:2], extra_keys=extra_keys))
    resolved(stored([1], TOKENS[:2], mm_keys=[[{"hash": deep, "start_offset": 1}]]))


# ---- lower media


def test_blocks_in_a_place_that_replicas_share_are_not_the_replicas_own() -> None:
    resolver = resolved(stored([1], TOKENS[:2]), stored([1], TOKENS[:2], medium="STORAGE", locality="REMOTE"))
    assert (resolver.keys("STORAGE"), resolver.stats.remote_blocks) == (set(), 1)
    resolver.apply([stored([1], [], medium="STORAGE", locality="LOCAL", block_size=0)])
    assert resolver.keys("STORAGE") == {KEYS[0]}
    resolver.apply([BlockRemoved([1], "STORAGE", None, "REMOTE")])
    assert resolver.keys("STORAGE") == {KEYS[0]}
    resolver.apply([BlockRemoved([1], "STORAGE", None, "LOCAL")])
    assert resolver.keys("STORAGE") == set()


def test_two_tiers_of_one_medium_are_two_copies() -> None:
    tiers = [stored([1], TOKENS[:2], medium="CPU", ownership=owner) for owner in ("a", "b")]
    resolver = resolved(*tiers, BlockRemoved([1], "CPU", None, "LOCAL", "a"))
    assert resolver.keys("CPU") == {KEYS[0]}
    resolver.apply([BlockRemoved([1], "CPU", None, "LOCAL", "b")])
    assert resolver.keys("CPU") == set()


def test_blocks_of_a_lower_medium_have_the_keys_of_the_same_hashes_in_gpu_memory() -> None:
    """Its events leave out the salt, so their tokens alone would name other blocks."""
    gpu = stored([1, 2], TOKENS[:4], extra_keys=[["salt"], None])
    resolver = resolved(gpu, stored([1, 2], TOKENS[:4], medium="CPU"), stored([3], TOKENS[4:], parent=2, medium="CPU"))
    salted = block_keys(TOKENS, SIZE, root_key(MODEL, None, "salt", SIZE))
    assert resolver.keys("CPU") == set(salted)


def test_chunks_announced_again_in_a_lower_medium_are_copies_and_no_reports() -> None:
    chunks = [stored([1], TOKENS[:2], medium="CPU"), stored([2], TOKENS[2:4], parent=1, medium="CPU")]
    resolver = resolved(*chunks, *chunks, removed(1, medium="CPU"))
    assert resolver.keys("CPU") == set(KEYS[:2])


# ---- native


def native(*events: Event) -> Resolver:
    return resolved(*events, native=True)


def test_native_hashes_are_taken_as_keys() -> None:
    chain = stored(list(KEYS), TOKENS)
    resolver = native(chain, BlockStored([7], KEYS[2], [], SIZE, None, "GPU", None))
    assert (resolver.keys(), resolver.inexact) == ({*KEYS, 7}, None)
    assert resolver.digest() == Digest(4, fold([*KEYS, 7]))
    resolver.apply([removed(KEYS[1])])
    assert resolver.digest() == Digest(3, fold([KEYS[0], KEYS[2], 7]))


native_changes = st.tuples(
    st.sampled_from(["store", "store", "remove"]),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.sampled_from([None, 1]),
)


@given(st.lists(native_changes, max_size=20))
def test_native_resolver_equals_a_count_of_copies(changes: list[tuple[str, list[int], int | None]]) -> None:
    resolver = Resolver(MODEL, native=True)
    copies: dict[tuple[str, int], Counter[Hash]] = {("GPU", 0): Counter(), ("GPU", 1): Counter()}
    for kind, hashes, group in changes:
        pool = ("GPU", group or 0)
        if kind == "remove":
            resolver.apply([removed(*hashes, group=group)])
            copies[pool] -= Counter(hashes)  # which leaves none below zero
        else:
            resolver.apply([stored(list(hashes), [], parent=99, group_idx=group)])
            copies[pool].update(hashes)
        resolver.check()
        assert resident_copies(resolver) == {name: dict(count) for name, count in copies.items() if count}
        assert resolver.keys() == set().union(*copies.values())
        assert resolver.digest().blocks == sum(map(len, copies.values())) == resolver.resident_blocks()
    held = {key for found in resolver.reset().held for key in found.keys}
    assert held == set().union(*copies.values()) and resolver.resident_blocks() == 0


def test_native_word_is_checked_on_the_first_chain() -> None:
    resolver = native(stored([1, 2, 3], TOKENS))
    assert resolver.keys() == set()
    assert resolver.inexact == "the replica's hashes are not block keys of model 'model' as it claims"


def test_native_word_is_checked_on_skimmed_events_too() -> None:
    payload = encode_batch(EventBatch(0.0, [stored(list(KEYS), TOKENS)]))
    resolver = native(*Decoder(skim=True).decode(payload).events)
    assert (resolver.keys(), resolver.inexact) == (set(KEYS), None)


@pytest.mark.parametrize("hashes", [[b"x"], [KEYS[0], b"x"], [-1], [KEYS[0], -1]])
def test_native_hashes_that_can_be_no_keys_are_declared_and_name_nothing(hashes: list[Hash]) -> None:
    for before in ([], [stored(list(KEYS), TOKENS)]):
        resolver = native(*before, stored(hashes, [1, 2] * len(hashes), parent=5), removed(*hashes))
        assert resolver.inexact is not None


@pytest.mark.parametrize("tokens", [5, "text", {1: 2}, [None], [[1]]])
def test_native_tokens_that_are_none_are_declared(tokens: Any) -> None:
    fields = {"type": "BlockStored", **msgspec.structs.asdict(stored([1], [])), "token_ids": tokens}
    sent = {
        name: value for name, value in fields.items() if value is not None or name in ("parent_block_hash", "lora_id")
    }
    payload = msgspec.msgpack.encode([0.0, [{"lora_name": None, **sent}], None])
    resolver = native(*Decoder(skim=True).decode(payload).events)
    assert (resolver.resident_blocks(), resolver.inexact is None) == (0, False)


def test_digest_of_foreign_hashes_is_of_their_low_64_bits() -> None:
    assert fold([2**64 - 1, -1, bytes(24) + b"\x01" * 8]) == 0x0101010101010101
    assert resolved(stored([1, -1], TOKENS[:4])).digest() == Digest(2, 2**64 - 2)


# ---- anything at all


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(BATCHES, max_size=4), st.booleans(), st.booleans())
def test_no_batch_that_decodes_breaks_the_resolver(batches: list[EventBatch], native: bool, skim: bool) -> None:
    decoder = Decoder(skim=skim and native)
    resolver = Resolver(MODEL, native=native, orphan_limit=5)
    for batch in batches:
        resolver.apply(decoder.decode(encode_batch(batch)).events)
        resolver.check()


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(BATCHES)
def test_no_batch_breaks_a_native_resolver_that_trusts_its_replica(batch: EventBatch) -> None:
    resolver = native(stored(list(KEYS), TOKENS))
    resolver.apply(batch.events)
    resolver.check()


def test_orphans_that_come_and_go_do_not_fill_the_buffer() -> None:
    resolver = Resolver(orphan_limit=100)
    orphan = BlockStored([2], 1, [5], 1, None, "GPU", None)
    for _ in range(1000):
        resolver.apply([orphan, BlockRemoved([2], "GPU")])
        resolver.check()
    assert resolver.inexact is None
    assert resolver.resident_blocks() == 0
