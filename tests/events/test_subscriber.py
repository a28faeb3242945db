"""The subscriber over real sockets, in one process; faults between processes are in tests/chaos."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from events.blocks import block_keys, root_key
from events.messages import AllBlocksCleared, BlockStored
from events.native import Load, Status
from events.publisher import Publisher, PublisherConfig
from events.source import Source
from events.subscriber import Subscriber

ANY = "tcp://127.0.0.1:0"
ROOT = root_key("m", None, None, 4)


def config(**changed: Any) -> PublisherConfig:
    return PublisherConfig(**{"events": ANY, "replay": ANY, "status": ANY, "snapshot": ANY, **changed})


def stored(number: int) -> BlockStored:
    tokens = [number, 0, 0, 0]
    return BlockStored(list(block_keys(tokens, 4, ROOT)), None, tokens, 4, None, "GPU", None)


def native(publisher: Publisher, name: str = "native") -> Source:
    ends = publisher.endpoints
    return Source(name, ends.events, ends.replay, ends.status, ends.snapshot, model="m")


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def test_native_and_foreign_views_of_one_replica_agree() -> None:
    with Publisher(config()) as publisher:
        for number in range(50):
            publisher.publish([stored(number)])
        async with Subscriber() as subscriber:
            one = subscriber.add(native(publisher))
            other = subscriber.add(Source("foreign", publisher.endpoints.events, publisher.endpoints.replay, model="m"))
            await until(lambda: one.inexact is None and other.inexact is None)
            for number in range(50, 100):
                publisher.publish([stored(number)])
            publisher.report(Load())
            await until(lambda: one.stream.last_seq == other.stream.last_seq == 99)
            await until(lambda: one.stream.stats.digests_compared > 0)
            assert one.inexact is None
            assert one.resolver.keys() == other.resolver.keys() and len(one.resolver.keys()) == 100


async def test_a_wrong_digest_is_found_and_repaired() -> None:
    with Publisher(config()) as publisher:
        publisher.publish([stored(1)])
        async with Subscriber() as subscriber:
            view = subscriber.add(native(publisher))
            await until(lambda: view.inexact is None)
            view.resolver.apply([stored(666)])  # our view is damaged
            publisher.report(Load())
            await until(lambda: view.stream.stats.digest_mismatches == 1)
            await until(lambda: view.inexact is None)
            assert view.resolver.keys() == set(stored(1).block_hashes)


async def test_statuses_are_handed_on() -> None:
    heard: list[Status] = []
    with Publisher(config()) as publisher:
        async with Subscriber() as subscriber:
            view = subscriber.add(native(publisher), on_status=heard.append)
            await until(lambda: view.inexact is None)
            while not heard:
                publisher.report(Load(running=5))
                await asyncio.sleep(0.005)
    assert heard[0].load.running == 5 and heard[0].incarnation == publisher.incarnation


async def test_a_replica_that_comes_later_is_followed_and_one_removed_is_not() -> None:
    with Publisher(config()) as first:
        endpoints = first.endpoints
    late = Source("late", endpoints.events, endpoints.replay, endpoints.status, endpoints.snapshot, model="m")
    async with Subscriber() as subscriber:
        view = subscriber.add(late)
        with Publisher(
            PublisherConfig(endpoints.events, endpoints.replay, endpoints.status, endpoints.snapshot)
        ) as second:
            second.publish([stored(1)])
            await until(lambda: view.inexact is None and view.stream.last_seq == 0)
            subscriber.remove("late")
            second.publish([AllBlocksCleared()])
            await asyncio.sleep(0.05)
            assert view.stream.last_seq == 0


async def test_a_connection_that_is_gone_is_no_longer_exact() -> None:
    publisher = Publisher(config())
    async with Subscriber() as subscriber:
        view = subscriber.add(native(publisher))
        await until(lambda: view.inexact is None)
        publisher.close()
        await until(lambda: view.inexact is not None)


async def test_two_replicas_of_one_name_are_refused() -> None:
    with Publisher(config()) as publisher:
        async with Subscriber() as subscriber:
            subscriber.add(native(publisher, "a"))
            with pytest.raises(ValueError, match="'a' is already followed"):
                subscriber.add(native(publisher, "a"))


async def test_the_tap_sees_every_frame_before_it_is_acted_on() -> None:
    seen: list[str] = []
    with Publisher(config()) as publisher:
        publisher.publish([stored(1)])
        async with Subscriber() as subscriber:
            view = subscriber.add(native(publisher), tap=lambda socket, frames: seen.append(f"{socket}:{len(frames)}"))
            await until(lambda: view.inexact is None)
            publisher.publish([stored(2)])
            publisher.report(Load())
            await until(lambda: view.stream.last_seq == 1 and "status:2" in seen)
    assert seen[0] == "connected:0"
    assert {"snapshot:2", "events:3", "status:2"} <= set(seen)


async def test_a_native_replica_says_which_model_its_keys_are_of() -> None:
    with Publisher(config(model="m")) as publisher:
        publisher.publish([stored(1)])
        async with Subscriber() as subscriber:
            view = subscriber.add(msgspec.structs.replace(native(publisher), model=""))
            wrong = subscriber.add(msgspec.structs.replace(native(publisher, "wrong"), model="other"))
            await until(lambda: view.inexact is None)
            await until(lambda: wrong.stream.last_seq == 0)
            assert view.resolver.naming.model == "m"
            assert wrong.inexact == "the replica's hashes are not block keys of model 'other' as it claims"
            assert not wrong.resolver.keys()


async def test_a_view_that_is_doubted_is_read_again() -> None:
    with Publisher(config()) as publisher:
        publisher.publish([stored(1)])
        ends = publisher.endpoints
        async with Subscriber() as subscriber:
            for source in (native(publisher), Source("foreign", ends.events, ends.replay, model="m")):
                view = subscriber.add(source)
                await until(lambda view=view: view.inexact is None)  # type: ignore[misc]
                view.resolver.apply([stored(666)])  # our view is damaged
                subscriber.resync(source.name, "doubted")
                assert view.inexact == "doubted"
                await until(lambda view=view: view.inexact is None)  # type: ignore[misc]
                assert view.resolver.keys() == set(stored(1).block_hashes)
