"""A pool that takes its neighbours' hottest prefixes, from real sources over loopback."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from msgspec.structs import replace

from replica.cache.block_pool import BlockPool
from replica.neighbours import warm as warming
from replica.neighbours.connection import Connection, Patience
from replica.neighbours.messages import Prefixes, Read
from replica.neighbours.reader import read_of
from replica.neighbours.warm import WARM_S, warm
from tests.replica.engines import SIZE, chain
from tests.replica.neighbours.liars import Lie, liar
from tests.replica.neighbours.replicas import (
    ArrayMemory,
    ServingEngine,
    neighbour_config,
    payload_of,
    reading,
    tokens_of,
    wanted,
)

SYSTEM = tokens_of(6)
NOBODY = "tcp://127.0.0.1:1"


@pytest.fixture
def serving() -> Iterator[Callable[[], ServingEngine]]:
    with ExitStack() as stack:

        def begin() -> ServingEngine:
            engine = ServingEngine(256, share=1.0)
            stack.callback(engine.close)
            return engine

        yield begin


def filled(*endpoints: str, blocks: int = 64, adapters: dict[str, str] | None = None) -> tuple[BlockPool, ArrayMemory]:
    """Return a pool that has taken what these have, and its memory."""
    pool, memory = BlockPool(blocks, SIZE), ArrayMemory(blocks)
    with reading(memory) as own:
        warm(pool, own, endpoints, adapters or {})
    pool.check()
    assert pool.free == blocks, "nothing stays in use"
    return pool, memory


def test_what_most_prompts_begin_with_comes_first(serving: Callable[[], ServingEngine]) -> None:
    engine = serving()
    engine.serve(chain([*tokens_of(5, 5000), 1]))  # alone, and the newest but one
    for end in range(3):
        engine.serve(chain([*SYSTEM, *tokens_of(5, 1000 * (end + 1)), 1]))
    pool, memory = filled(engine.source.endpoint, blocks=4 * 6)
    prompt = chain([*SYSTEM, 1])
    found = pool.match(prompt).blocks
    assert len(found) == 6 == pool.named, "a quarter of the cache"
    assert [memory.rows[block].tobytes() for block in found] == [payload_of(prompt, index) for index in range(6)]
    [stored] = pool.take_events()
    assert stored == prompt.stored_event(0, 6, "GPU")


def test_several_neighbours_each_give_a_part_and_the_newest_sessions_follow(
    serving: Callable[[], ServingEngine],
) -> None:
    one, other = serving(), serving()
    for session in range(8):
        one.serve(chain([*tokens_of(8, 1000 * session), 1]))
        other.serve(chain([*tokens_of(8, 1000 * session + 500), 1]))
    pool, _ = filled(one.source.endpoint, other.source.endpoint, blocks=4 * 32)
    assert pool.named == 32
    for begin in (0, 500):
        prompts = (chain([*tokens_of(8, 1000 * session + begin), 1]) for session in range(8))
        assert [len(pool.match(prompt).blocks) for prompt in prompts] == [0] * 6 + [8, 8]


def test_a_tenants_blocks_stay_its_own_and_other_adapters_stay_away(serving: Callable[[], ServingEngine]) -> None:
    engine = serving()
    named: dict[str, dict[str, Any]] = {
        "theirs": {"cache_salt": "theirs", "extras": {1: [("cat", 0)]}},
        "ours": {"lora_name": "sql", "lora_digest": "1"},
    }
    for own in named.values():
        engine.serve(chain([*SYSTEM, 1], **own))
    for digest, expected in ("1", 6), ("2", 0):
        pool, _ = filled(engine.source.endpoint, blocks=100, adapters={"sql": digest})
        hits = {name: len(pool.match(chain([*SYSTEM, 1], **own)).blocks) for name, own in named.items()}
        assert hits == {"theirs": 6, "ours": expected}
        assert not pool.match(chain([*SYSTEM, 1])).blocks
        assert not pool.match(chain([*SYSTEM, 1], cache_salt="mine", extras={1: [("cat", 0)]})).blocks


def read(blocks: int = 8) -> Read:
    return read_of(wanted(blocks), neighbour_config(), 0.0)


def says(*reads: Read) -> Lie:
    return lambda connection, _, patience: connection.send_frame(Prefixes(list(reads)), patience)


def silent(connection: Connection, request: object, patience: Patience) -> None:
    del request
    connection.receive_frame(1, patience)


LIES = {
    "silent": silent,
    "half a token": says(replace(read(), prompt=b"\1\2\3")),
    "another length": says(replace(read(), stop=2**20)),
    "another layout": says(replace(read(), kv_layout="else")),
    "no end": says(*[read()] * 50),
    "another answer": lambda connection, _, patience: connection.send_frame(read(), patience),
}


@pytest.mark.parametrize("name", LIES)
def test_a_neighbour_that_fails_costs_a_bounded_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "WARM_S", 0.5)
    began_s = time.monotonic()
    with liar(LIES[name]) as source:
        pool, _ = filled(NOBODY, source.endpoint)
    assert not pool.named
    assert time.monotonic() - began_s < WARM_S / 2


def test_a_busy_neighbour_is_left_alone(serving: Callable[[], ServingEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "WARM_S", 0.3)
    engine = serving()
    engine.serve(chain([*SYSTEM, 1]))
    with engine.paused():
        assert not filled(engine.source.endpoint)[0].named
    assert not engine.holds.references
