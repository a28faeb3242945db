"""Prefix caches cleared through the router, at every replica."""

import time
from typing import Any

import pytest

from events.messages import AllBlocksCleared
from events.publisher import Publisher
from router.members.spec import ReplicaSpec
from router.tenants.keys import keys_from_options
from tests.router.dashboard.test_status import exact, ours, state
from tests.router.loopback import until
from tests.router.members.test_feeds import chain, config
from tests.router.scripted import CHAT, MODEL, Scripted, chat, connect, drops, named, says, served

RESET = "/reset_prefix_cache"
HERE = {"host": "localhost"}  # an administrator, as no key is demanded


async def test_every_replica_is_asked_with_the_query() -> None:
    a, b = named("a"), named("b")
    async with served(a, b) as running, connect(running.port) as client:
        answer = await client.post(f"{RESET}?reset_external=true&x=%20", b"", **HERE)
        assert answer.status == 200 and "error" not in answer.json
        assert [(one["name"], one["cleared"], one["message"]) for one in answer.json["replicas"]] == [
            ("a", True, '"a"'),
            ("b", True, '"b"'),
        ]
    assert [call.target for one in (a, b) for call in one.calls] == [f"{RESET}?reset_external=true&x=+"] * 2


async def test_sglang_has_this_route_under_another_name() -> None:
    a = Scripted("a", says(), models=[{"id": MODEL, "owned_by": "sglang"}])
    a.control |= {"/server_info": (200, {"version": "0.5.14"}), "/metrics": (200, b"")}
    async with a.running():
        async with (
            served(a, replicas=(ReplicaSpec(name="a", url=a.spec.url),)) as running,
            connect(running.port) as client,
        ):
            assert (await client.post(RESET, b"", **HERE)).status == 200
        assert [call.path for call in a.calls] == ["/flush_cache"]


@pytest.mark.parametrize(
    ("handler", "status", "says_so"),
    [
        (says(b'{"success":false}'), 502, '{"success":false}'),
        (says(b'{"error":"requests are running"}', 409), 409, "requests are running"),
        (says(b"{}", 404), 404, "{}"),
        (says(b"{}", 500), 502, "{}"),
        (drops, 502, "ended the connection"),
    ],
)
async def test_a_replica_that_clears_nothing_is_named_with_the_reason(handler: Any, status: int, says_so: str) -> None:
    async with served(Scripted("a", handler)) as running, connect(running.port) as client:
        answer = await client.post(RESET, b"", **HERE)
        assert (answer.status, answer.error["code"]) == (status, "cache_not_cleared")
        assert answer.error["message"].startswith("1 of 1 replicas have not cleared their cache; a says: ")
        assert says_so in answer.error["message"] and not answer.json["replicas"][0]["cleared"]


async def test_replicas_that_refuse_for_different_reasons_are_a_bad_gateway() -> None:
    a, b = Scripted("a", says(b"{}", 404)), Scripted("b", says(b"{}", 409))
    async with served(a, b) as running, connect(running.port) as client:
        answer = await client.post(RESET, b"", **HERE)
        assert answer.status == 502 and answer.error["message"].startswith("2 of 2 ")


async def test_without_a_replica_there_is_nothing_to_clear() -> None:
    async with served(ready=False) as running, connect(running.port) as client:
        assert (await client.post(RESET, b"", **HERE)).error["code"] == "no_replica"


async def test_only_an_administrator_clears_caches() -> None:
    a, keys = named("a"), tuple(keys_from_options(["client"], "admin"))
    async with served(a, keys=keys, demand_key=True) as running, connect(running.port) as client:
        assert (await client.post(RESET, b"", authorization="Bearer client")).status == 403
        assert not a.calls
        assert (await client.post(RESET, b"", authorization="Bearer admin")).status == 200


async def test_guesses_about_a_replica_without_events_are_forgotten_at_once() -> None:
    async with served(Scripted("a", says(b'{"choices":[]}'))) as running, connect(running.port) as client:
        await client.post(CHAT, chat("a long prompt " * 200))
        guesses, slot = running.router.placement.guesses, running.member("a").slot
        assert guesses.blocks(slot)
        assert (await client.post(RESET, b"", **HERE)).status == 200
        assert guesses.blocks(slot) == {}


async def test_a_cache_is_in_doubt_until_its_events_say_that_it_is_clear() -> None:
    with Publisher(config()) as publisher:
        publisher.publish([chain(3)])
        async with served(ours(publisher)) as running, connect(running.port) as client:
            await exact(running, publisher)
            member, before_s = running.member("ours"), time.monotonic()
            assert (await client.post(RESET, b"", **HERE)).status == 200
            assert state(running, "ours") == "partial"
            assert "asked to clear its cache" in (running.router.doubt(member) or "")
            publisher.publish([chain(4, 3)])  # of the time before
            await until(lambda: running.router.placement.index.blocks(member.slot) == {"GPU": 4}, "it has come")
            assert time.monotonic() > before_s + 2 or state(running, "ours") == "partial"
            publisher.publish([AllBlocksCleared(), chain(1)])
            await exact(running, publisher)
            assert running.router.placement.index.blocks(member.slot) == {"GPU": 1}
