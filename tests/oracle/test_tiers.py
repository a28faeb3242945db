"""Real engines' events of memory below the GPU, through the index: which source a prompt would take."""

from typing import Any

import pytest

from events.cache.resolver import Resolver
from events.messages import REMOTE, BlockStored, Decoder
from router.placement.index import PrefixIndex
from router.placement.prices import CPU, STORAGE
from tests.oracle.vectors import Record, params, records

SOURCES = {"CPU": CPU, "CPU_PINNED": CPU, "STORAGE": STORAGE, "DISK": STORAGE, "EXTERNAL": STORAGE}


def stores(vector: Record) -> list[BlockStored]:
    events = Decoder().decode(bytes.fromhex(vector["payload_hex"]), vector["name"]).events
    return [event for event in events if isinstance(event, BlockStored) and event.medium not in (None, "GPU")]


VECTORS = [vector for vector in records("wire_vectors*.jsonl") if "normalized" in vector and stores(vector)]


@pytest.mark.parametrize("vector", params((vector["name"], vector) for vector in VECTORS))
def test_a_prompt_is_loaded_from_where_the_engine_says(vector: Record) -> None:
    for event in stores(vector):
        index, resolver = PrefixIndex(), Resolver("m")
        slot = index.add()
        keys: list[int] = []
        for change in resolver.apply([event]):
            index.apply(slot, change)
            keys += getattr(change, "keys", [])
        index.check()
        found: tuple[tuple[str, Any], ...] = index.match(keys, 1 << slot).below
        if event.locality == REMOTE or not event.token_ids:
            assert not keys and resolver.stats.remote_blocks == (event.locality == REMOTE) * len(event.block_hashes)
        else:
            assert event.medium is not None
            assert found == ((SOURCES[event.medium], {slot: len(keys)}),) and keys
