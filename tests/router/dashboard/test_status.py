"""The router's beliefs in its status, and its readiness."""

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from events.blocks import extend_keys, pack_tokens, root_key
from events.cache.changes import Grouped, Stored
from events.cache.groups import Group, Layout
from events.native import Load
from events.publisher import Publisher
from router import lifecycle
from router.http.app import printed_by
from router.http.metrics import metrics_text
from router.members.spec import parse_replica
from router.tenants.keys import keys_from_options
from tests.events.replicas import prompt, replica
from tests.router.loopback import until
from tests.router.members.test_feeds import KEYS, chain, config
from tests.router.scripted import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Call,
    Scripted,
    Served,
    chat,
    connect,
    named,
    refused_port,
    says,
    served,
    up,
)

GOOD = b'{"choices":[]}'


def ours(publisher: Publisher | None) -> Scripted:
    """A warmroute replica with events from this publisher, or without events."""
    scripted = Scripted("ours", says(GOOD), native=True)
    status, answer = scripted.control["/load"]
    if publisher is None:
        dead = f"tcp://127.0.0.1:{refused_port()}"
        ends: dict[str, Any] = {"events": dead, "replay": None, "status": dead, "snapshot": dead}
    else:
        ends = msgspec.to_builtins(publisher.endpoints)
    scripted.control["/load"] = (status, answer | {"endpoints": ends, "topic": ""})
    return scripted


def state(running: Served, name: str) -> str:
    member = running.member(name)
    found: str = member.index_state(member.feed_state)
    return found


async def test_a_replica_is_exact_when_its_whole_cache_is_known() -> None:
    with Publisher(config()) as publisher:
        publisher.publish([chain(3)])
        async with served(ours(publisher)) as running, connect(running.port) as client:

            def is_exact() -> bool:
                publisher.report(Load())
                return state(running, "ours") == "exact"

            await until(is_exact, "it is exact")
            await until(lambda: running.member("ours").block_size == 4, "its blocks are known")
            told = running.front.dashboard.statuses.one(running.member("ours"))
            assert told.inexact is None and told.index.blocks == {"GPU": 3}
            assert told.events is not None and told.events.exact and told.events.block_sizes == (4,)
            assert json.loads(msgspec.json.encode(told))
            assert (await client.get("/ready")).status == 200
            shown = running.front.dashboard.statuses.sizes(0)
            assert shown["replicas"] == {"ours": {"GPU": 3}} and shown["models"][MODEL]["block_sizes"] == [4]


async def test_blocks_that_several_groups_hold_are_of_use_once() -> None:
    with Publisher(config()) as publisher:
        publisher.publish([chain(3)])
        async with served(ours(publisher)) as running:
            await exact(running, publisher)
            index, slot = running.router.placement.index, running.member("ours").slot
            index.apply(slot, Grouped(Layout(4, (Group(0, "full", 1), Group(1, "window", 1, 2)))))
            index.apply(slot, Stored("GPU", [KEYS[1], KEYS[2]], [], 0, chain(3), 1))
            told = running.front.dashboard.statuses.one(running.member("ours")).index
            assert (told.blocks, told.prompt_blocks) == ({"GPU": 5}, {"GPU": 3})


async def test_a_prompt_is_remembered_and_compared_by_the_keys_that_its_replica_gives_its_blocks() -> None:
    with Publisher(config()) as publisher:
        publisher.publish([chain(3)])
        scripted = ours(publisher)
        scripted.handler = reports(4)
        async with served(scripted) as running, connect(running.port) as client:
            await exact(running, publisher)
            await until(lambda: running.member("ours").block_size == 4, "its blocks are known")
            layout = Layout(4, (Group(0, "full", 1),), lookahead=1)
            running.router.placement.index.apply(running.member("ours").slot, Grouped(layout))
            tokens = list(range(1, 11))
            sent = {"model": MODEL, "prompt": tokens, "stream": True}
            assert (await client.post(COMPLETIONS, sent)).status == 200
            keys = extend_keys(root_key(MODEL, None, None, 4), pack_tokens(tokens), 4, lookahead=1)
            [recent] = running.router.history.recent.all()
            assert (recent.keys, recent.lookahead) == (keys, 1)
            [difference] = running.router.predictions._open
            assert list(difference.keys) == keys[:1]


def reports(tokens: int) -> Callable[[Call], None]:
    def answer(call: Call) -> None:
        call.begin_frames(x_warmroute_cached_tokens=str(tokens))
        call.end()

    return answer


async def test_a_replica_that_was_met_while_it_loaded_is_listened_to_when_it_has() -> None:
    with Publisher(config()) as publisher:
        publisher.publish([chain(3)])
        late = ours(publisher)
        loaded = late.control["/load"]
        late.control["/load"] = (200, {**loaded[1], "incarnation": None, "endpoints": None, "topic": None})
        async with served(late, ready=False, health_interval_s=0.05) as running:
            member = running.member("ours")
            await until(lambda: member.server.trouble == "it is still loading its model", "it is met")
            model = running.router.members.model(MODEL)  # known: its clients are told to try again
            asked = late.asked.count("/load")
            await until(lambda: late.asked.count("/load") > asked + 2, "the replica is asked again")
            assert running.router.members.model(MODEL) is model and not member.server.learned
            late.control["/load"] = loaded
            await exact(running, publisher)


async def test_an_unnoticed_restart_is_followed_again() -> None:
    """The new process answers on the same port before the next poll; its events come from elsewhere."""
    with Publisher(config()) as second:
        second.publish([chain(2)])
        with Publisher(config()) as first:
            first.publish([chain(3)])
            restarted = ours(first)
            async with served(restarted, health_interval_s=0.05) as running:
                await exact(running, first)
                assert running.front.dashboard.statuses.one(running.member("ours")).index.blocks == {"GPU": 3}
                first.close()
                restarted.control["/load"] = ours(second).control["/load"]
                await exact(running, second)
                assert running.front.dashboard.statuses.one(running.member("ours")).index.blocks == {"GPU": 2}


async def test_a_replica_that_is_silent_and_no_other_one_is_left_as_it_is() -> None:
    with Publisher(config()) as publisher:
        publisher.publish([chain(3)])
        silent = ours(publisher)
        async with served(silent, health_interval_s=0.05) as running:
            await exact(running, publisher)
            member = running.member("ours")
            await until(lambda: member.block_size == 4, "its blocks are known")
            model = running.router.members.model(MODEL)
            await until(lambda: member.health.silent, "it has not been heard for a while")
            asked = silent.asked.count("/load")
            await until(lambda: silent.asked.count("/load") > asked + 2, "the replica is asked again")
            assert running.router.members.model(MODEL) is model and member.server.learned
            assert running.front.dashboard.statuses.one(member).index.blocks == {"GPU": 3}
            await exact(running, publisher)


async def exact(running: Served, publisher: Publisher) -> None:
    def is_exact() -> bool:
        publisher.report(Load())
        member = running.member("ours")
        return (member.incarnation, state(running, "ours")) == (publisher.incarnation, "exact")

    await until(is_exact, "it is exact")


async def test_a_router_is_not_ready_while_a_cache_is_being_read() -> None:
    async with served(ours(None)) as running, connect(running.port) as client:
        assert state(running, "ours") == "syncing"
        answer = await client.get("/ready")
        assert (answer.status, answer.error["code"]) == (503, "not_ready")
        assert "what ours holds is still being read" in answer.error["message"]
        assert (await client.post(CHAT, chat())).status == 200  # asked all the same, it does its work
        running.member("ours").health.drain()
        assert "ours (draining)" in (running.router.lifecycle.not_ready() or "")


async def test_a_router_is_not_ready_before_each_replica_has_answered_or_failed() -> None:
    """Prompts that are warm at the one would go to the other."""
    engine = named("a")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"url=http://127.0.0.1:{mute.getsockname()[1]},name=mute"
        async with engine.running(), served(engine, replicas=(engine.spec, parse_replica(url))) as running:
            assert "what mute holds is still being read" in (running.router.lifecycle.not_ready() or "")
            mute.close()  # its connections break
            await until(lambda: running.router.lifecycle.not_ready() is None, "the one that answers is enough")


async def test_a_cache_that_cannot_be_read_keeps_a_router_from_its_clients_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "INDEX_WITHIN_S", 0.5)
    async with served(ours(None)) as running, connect(running.port) as client:
        assert (await client.get("/ready")).status == 503
        await until(lambda: running.router.lifecycle.not_ready() is None, "it has waited long enough")
        assert (await client.get("/ready")).status == 200


async def test_a_router_that_was_ready_once_stays_so_when_a_replica_comes_that_cannot_be_read() -> None:
    lonely = ours(None)
    async with served(named("a")) as running, connect(running.port) as client, lonely.running():
        assert (await client.get("/ready")).status == 200
        running.front.upkeep.add(lonely.spec)
        await until(lambda: up(running.front, {"ours": lonely}), "the replica takes requests")
        assert state(running, "ours") == "syncing"
        assert (await client.get("/ready")).status == 200


@pytest.mark.parametrize(("owner", "isolated"), [("vllm", "by salt"), ("llama.cpp", "unknown")])
async def test_whether_an_engine_keeps_keys_apart_is_told(
    owner: str, isolated: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Scripted("engine", says(GOOD), models=[{"id": MODEL, "owned_by": owner}])
    async with engine.running():
        spec = msgspec.structs.replace(engine.spec, engine="auto")
        async with served(
            engine, replicas=(spec,), keys=tuple(keys_from_options(["secret"], None)), health_interval_s=0.05
        ) as running:
            member = running.member("engine")
            assert running.front.dashboard.statuses.one(member).isolation == isolated
            metric = b'warmroute_router:replica_salted{replica="engine"} %.1f' % (isolated == "by salt")
            assert metric in await metrics_text(printed_by(running.router))
            asked = len(engine.asked)
            await until(lambda: len(engine.asked) > asked + 4, "the replica is asked again")
            assert caplog.text.count("may ignore the salts") == (isolated == "unknown")
            running.router.admission.use(())
            assert running.front.dashboard.statuses.one(member).isolation is None


async def test_a_cache_that_cannot_be_known_as_a_whole_is_no_reason_to_wait() -> None:
    with ExitStack() as stack:
        publisher = stack.enter_context(replica(native=False))
        publisher.store(prompt(1))
        engine = Scripted("engine", says(GOOD))
        async with engine.running():
            spec = msgspec.structs.replace(engine.spec, events=publisher.events)
            async with served(engine, replicas=(spec,)) as running, connect(running.port) as client:

                def is_partial() -> bool:
                    publisher.store(prompt(2))
                    return state(running, "engine") == "partial"

                await until(is_partial, "it is partial")
                assert (await client.get("/ready")).status == 200
                told = running.front.dashboard.statuses.one(running.member("engine"))
                assert told.inexact and told.events is not None and told.events.partial


async def test_without_events_a_replica_is_matched_approximately() -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        assert state(running, "a") == "approximate" and running.router.lifecycle.not_ready() is None
        await client.post(CHAT, chat("a long prompt " * 200))
        told = running.front.dashboard.statuses.one(running.member("a"))
        assert told.events is None and told.block_size is None
        assert sum(told.index.blocks.values()) > 0


@pytest.mark.parametrize("all_of_them", [False, True])
async def test_one_replica_is_enough_unless_all_are_wanted(all_of_them: bool) -> None:
    async with served(named("a"), named("b")) as running:
        assert running.router.lifecycle.not_ready(all_of_them=all_of_them) is None
        running.member("a").health.drain()
        assert (running.router.lifecycle.not_ready(all_of_them=all_of_them) is not None) == all_of_them
        running.member("b").health.drain()
        assert "a (draining); b (draining)" in (running.router.lifecycle.not_ready() or "")
