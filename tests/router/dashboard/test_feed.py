"""GET /dashboard/feed: its content, its limits, and its end."""

import asyncio
import socket
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest
from msgspec.structs import replace

from api.errors import ApiError
from events.native import Load
from router.dashboard import broadcast, dashboard, sampling
from router.dashboard.rows import Query
from router.members.counts import ReplicaCounts, counts_of
from router.members.members import Member
from router.tenants.keys import Key, digest_of, keys_from_options
from tests.router.dashboard.watching import Page, watched
from tests.router.http.test_app import LOCAL, bearer
from tests.router.loopback import until
from tests.router.scripted import (
    CHAT,
    DONE,
    Call,
    Client,
    Script,
    Scripted,
    Served,
    chat,
    connect,
    drops,
    event,
    says,
    served,
)

GOOD = b'{"choices":[]}'
AT_ONCE_S = 5.0  # far less than any answer or drain would take
LONG_S = 30.0
KEYS = tuple(keys_from_options(["client-key"], "admin-key"))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "FRAME_S", 0.02)


async def ask(running: Served, count: int, **headers: str) -> None:
    async with connect(running.port) as client:
        for number in range(count):
            await client.post(CHAT, chat("a prompt " * 100), x_request_id=f"asked-{number}", **headers)


def count_of(running: Served) -> int:
    return len(running.front.dashboard.broadcast)


def newest(running: Served, name: str) -> float:
    value = running.front.dashboard.statuses.sampling.fleet.columns()[name][-1]
    assert value is not None
    return value


async def alone(running: Served) -> None:
    await until(lambda: count_of(running) == 0, "no viewer is left")
    assert running.front.dashboard.broadcast._showing is None
    assert running.front.dashboard.broadcast._fleet is None
    running.router.admission.check()


# ---- what is shown


async def test_a_page_is_greeted_and_told_the_past_and_the_present() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        await running.front.dashboard.statuses.sampling.sample()
        await ask(running, 3)
        async with watched(running) as page:
            hello, history, fleet = [await page.event() for _ in range(3)]
        assert [hello.name, history.name, fleet.name] == ["hello", "history", "fleet"]
        assert (hello.content["role"], hello.content["keyed"], hello.content["models"]) == ("admin", False, ["m"])
        assert set(history.content) == {"at", "interval_s", *sampling.FLEET_SERIES}
        assert {len(column) for column in history.content.values() if isinstance(column, list)} == {1}
        totals = fleet.content["totals"]
        assert (totals["replicas"], totals["up"], totals["in_flight"]) == (2, 2, 0)
        assert totals["requests_per_s"] > 0 and totals["prompt_tokens_per_s"] > 0
        assert fleet.content["states"]["approximate"] == 2
        assert [row["name"] for row in fleet.content["replicas"]] == ["r0", "r1"]
        assert {row["standing"] for row in fleet.content["replicas"]} == {"approximate"}
        assert [one["request_id"] for one in fleet.content["decisions"]] == ["asked-2", "asked-1", "asked-0"]
        assert {one["status"] for one in fleet.content["decisions"]} == {200}
        await alone(running)


async def test_a_row_tells_how_full_a_cache_is_and_when_its_replica_was_heard() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        member, now_s = running.member("r0"), running.router.now_s()
        member.block_size = 16
        member.load.describe(16, 100)
        member.load.reported(Load(free_blocks=25, cached_blocks=75), now_s)
        member.health.heard(now_s)
        async with watched(running, "?sort=name") as page:
            told, silent = (await page.next("fleet"))["replicas"]
        assert told["cache_used"] == 0.75 and 0 <= told["heard_age_s"] < 10
        assert (silent["cache_used"], silent["heard_age_s"], silent["events"]) == (None,) * 3


@pytest.mark.parametrize("native", [True, False])
async def test_tokens_are_counted_while_their_answer_still_runs(native: bool) -> None:
    goes_on = asyncio.Event()

    async def slowly(call: Call) -> None:
        def say(payload: bytes, *token_ids: int) -> None:
            if native:
                call.frame(payload, *token_ids)
            else:
                call.chunk(payload)

        (call.begin_frames if native else call.begin)()
        for number in range(8):
            say(event("{}"), number)
        await goes_on.wait()
        say(DONE, 9)
        call.end()

    replica = Scripted("r0", slowly, native=native)
    async with served(replica) as running, watched(running) as page, connect(running.port) as client:
        client.send("POST", CHAT, chat(stream=True))
        while not (totals := (await page.next("fleet"))["totals"])["generated_tokens_per_s"]:
            pass
        assert totals["in_flight"] == 1
        while (totals := (await page.next("fleet"))["totals"])["token_s"] is None:
            pass
        goes_on.set()
        await client.answer()
        await running.idle()
        counts = counts_of(running.member("r0"))
        assert counts.generated_tokens == (9 if native else 7)  # without figures, all events but two have a token
        assert counts.streamed_tokens == counts.generated_tokens - 1


async def test_what_happens_is_shown_in_the_next_frames() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running, watched(running) as page:
        assert (await page.next("fleet"))["states"]["draining"] == 0
        running.member("r1").health.drain()
        while (fleet := await page.next("fleet"))["states"]["draining"] == 0:
            pass
        assert fleet["totals"]["up"] == 1
        assert [(row["name"], row["severity"]) for row in fleet["replicas"]] == [("r1", 1), ("r0", 0)]


async def test_each_history_point_is_sent_once_and_all_after_a_miss() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running, watched(running) as page:
        taken = running.front.dashboard.statuses.sampling
        assert (await page.next("history"))["at"] == []
        await ask(running, 2)
        await taken.sample()
        point = await page.next("point")
        assert point["replicas_up"] == 1 and point["requests_per_s"] > 0 and point["ttft_p99_s"] is not None
        await taken.sample()
        assert (await page.next("point"))["requests_per_s"] == 0
        for _ in range(2):
            await taken.sample()
        assert len((await page.next("history"))["at"]) == 4


async def test_errors_and_refusals_are_counted() -> None:
    async with served(*Script(says(b"{}", 500)).replicas(1), breaker_faults=100, queue_size=0) as running:
        taken = running.front.dashboard.statuses.sampling
        await taken.sample()
        await ask(running, 2)
        running.member("r0").health.drain()
        await ask(running, 1)
        await taken.sample()
        assert newest(running, "errors_per_s") > 0
        async with watched(running) as page:
            assert (await page.next("fleet"))["totals"]["errors_per_s"] > 0


async def test_a_replica_that_leaves_and_comes_back_is_counted_again() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        taken = running.front.dashboard.statuses.sampling
        await ask(running, 4)
        await taken.sample()
        running.front.upkeep.apply({"r0": running.replicas["r0"].spec})
        await taken.sample()
        assert newest(running, "requests_per_s") == 0
        running.front.upkeep.apply({name: one.spec for name, one in running.replicas.items()})
        await until(lambda: running.member("r1").candidate.unavailable is None, "it is back")
        await taken.sample()
        assert newest(running, "requests_per_s") == 0
        await ask(running, 2)
        await taken.sample()
        assert newest(running, "requests_per_s") > 0


async def test_what_a_replica_saved_is_still_counted_when_it_has_left() -> None:
    cached = says(b'{"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64}}}')
    async with served(*Script(cached).replicas(2)) as running:
        await ask(running, 4)
        await running.front.dashboard.statuses.sampling.sample()
        async with watched(running) as page:
            assert (await page.next("fleet"))["totals"]["saved_tokens"] == 4 * 64
        running.front.upkeep.apply({"r0": running.replicas["r0"].spec})
        await ask(running, 1)
        await running.front.dashboard.statuses.sampling.sample()
        async with watched(running) as page:
            assert (await page.next("fleet"))["totals"]["saved_tokens"] == 5 * 64


async def test_a_point_that_fails_is_counted_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply to all replicas, including those handled before the error."""

    def failing(member: Member) -> ReplicaCounts:
        if member.name == "r1":
            raise ValueError("a mistake")
        return counts_of(member)

    async with served(*Script(says(GOOD)).replicas(2)) as running:
        taken = running.front.dashboard.statuses.sampling
        await taken.sample()
        await ask(running, 4)
        with monkeypatch.context() as patched:
            patched.setattr(sampling, "counts_of", failing)
            with pytest.raises(ValueError, match="a mistake"):
                await taken.sample()
        await taken.sample()
        for name in ("r0", "r1"):
            sampled = taken.sampled(running.member(name))
            assert sampled is not None
            assert (sampled.counts.since(sampled.before).requests, len(sampled.series.columns()["at"])) == (2, 2), name


async def test_a_query_chooses_the_rows_and_one_that_cannot_be_used_is_refused() -> None:
    async with served(*Script(says(GOOD)).replicas(3)) as running:
        async with watched(running, "?sort=name&order=desc&filter=R") as page:
            fleet = await page.next("fleet")
            assert [row["name"] for row in fleet["replicas"]] == ["r2", "r1", "r0"]
            assert fleet["shown"] == {"sort": "name", "order": "desc", "filter": "r", "matching": 3}
            assert fleet["totals"]["replicas"] == 3
        async with connect(running.port) as client:
            answer = await client.get("/dashboard/feed?sort=size", **LOCAL)
            assert (answer.status, answer.error["param"]) == (400, "sort")
        await alone(running)


async def test_a_frame_is_bounded_however_large_the_fleet() -> None:
    names = [f"replica-{number:03d}" for number in range(130)]
    async with served(*[Scripted(name, says(GOOD)) for name in names]) as running:
        await ask(running, 30)
        for member in running.router.members:
            member.health.drain()
        async with watched(running) as page:
            fleet = await page.next("fleet")
        assert (fleet["totals"]["replicas"], len(fleet["replicas"])) == (130, 100)
        assert len(fleet["decisions"]) == 20
        alerts = fleet["alerts"]
        assert len(alerts["alerts"]) == 50 and alerts["truncated"] == 130 - 50


# ---- who may watch


async def test_only_an_administrator_is_shown_what_others_ask() -> None:
    async with served(*Script(says(GOOD)).replicas(1), keys=KEYS, demand_key=True) as running:
        await ask(running, 2, **bearer("client-key"))
        async with watched(running, **bearer("client-key")) as page, watched(running, **bearer("admin-key")) as admins:
            assert (await page.next("hello"))["role"] == "reader"
            assert (await page.next("fleet"))["decisions"] is None
            assert (await admins.next("hello"))["role"] == "admin"
            assert len((await admins.next("fleet"))["decisions"]) == 2


async def test_no_word_of_a_prompt_is_in_a_frame() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        async with connect(running.port) as client:
            await client.post(CHAT, chat("a secret word " * 50))
        async with watched(running) as page:
            assert "secret" not in str(await page.next("fleet"))


@pytest.mark.parametrize("change", [{"digest": digest_of("another")}, {"admin": False}])
async def test_a_stream_ends_when_its_key_is_another_or_no_administrators(change: dict[str, Any]) -> None:
    async with (
        served(*Script(says(GOOD)).replicas(1), keys=KEYS, demand_key=True) as running,
        watched(running, **bearer("admin-key")) as page,
        watched(running, **bearer("client-key")) as other,
    ):
        await page.next("fleet")
        running.router.admission.use([replace(key, **change) if key.admin else key for key in KEYS])
        assert "key" in (await page.next("end"))["why"]
        assert await page.ended()
        await other.next("fleet")


async def test_streams_count_for_no_key() -> None:
    """Or a limit of one request would keep a page from asking anything."""
    [key] = keys_from_options(["client-key"], None)
    narrow: list[Key] = [Key(**{**fields_of(key), "max_in_flight": 1})]
    async with (
        served(*Script(says(GOOD)).replicas(1), keys=tuple(narrow), demand_key=True) as running,
        watched(running, **bearer("client-key")) as page,
        connect(running.port) as client,
    ):
        await page.next("fleet")
        assert (await client.post(CHAT, chat(), **bearer("client-key"))).status == 200


def fields_of(key: Key) -> dict[str, Any]:
    return {name: getattr(key, name) for name in key.__struct_fields__}


# ---- many, slow ones, and ends


async def test_the_limit_frees_a_place_for_each_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "MAX_WATCHERS", 2)
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        async with watched(running) as one:
            async with watched(running) as other, connect(running.port) as client:
                await one.next("fleet")
                await other.next("fleet")
                answer = await client.get("/dashboard/feed", **LOCAL)
                assert (answer.status, answer.error["code"]) == (503, "too_many_watchers")
                assert int(answer.headers["retry-after"]) > 0
            await until(lambda: count_of(running) == 1, "one has left")
            async with watched(running) as other:
                await other.next("fleet")
        await alone(running)


@pytest.mark.parametrize(("name", "most"), [("MAX_OF_ONE", 2), ("MAX_READERS", 2)])
async def test_readers_leave_room_for_others_and_for_administrators(
    monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(broadcast, name, most)
    keys = tuple(keys_from_options(["client-key", "another-key"], "admin-key"))
    async with AsyncExitStack() as open_pages:
        running = await open_pages.enter_async_context(
            served(*Script(says(GOOD)).replicas(1), keys=keys, demand_key=True)
        )
        for _ in range(most):
            await open_pages.enter_async_context(watched(running, **bearer("client-key")))
        for key, status in (("client-key", 503), ("another-key", 200 if name == "MAX_OF_ONE" else 503)):
            async with connect(running.port) as client:
                client.send("GET", "/dashboard/feed", **(LOCAL | bearer(key)))
                assert (await client.head())[0] == status, key
        for _ in range(most + 1):
            page = await open_pages.enter_async_context(watched(running, **bearer("admin-key")))
            await page.next("fleet")


async def test_without_keys_readers_are_distinguished_by_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "MAX_OF_ONE", 1)
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        query, owner = broadcast.FeedQuery(Query(), admin=False), running.front.dashboard.broadcast
        watchers = [owner.join(query, None, address) for address in ("10.0.0.8", "10.0.0.9")]
        with pytest.raises(ApiError, match="one reader"):
            owner.join(query, None, "10.0.0.9")
        for subscriber in watchers:
            owner.leave(subscriber)
        await alone(running)


async def stuck(running: Served) -> socket.socket:
    """A page that has asked and does not read, until nothing more can be sent to it."""
    asking = socket.socket()
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    asking.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(asking, ("127.0.0.1", running.port))
    await loop.sock_sendall(asking, b"GET /dashboard/feed HTTP/1.1\r\nhost: localhost\r\n\r\n")
    connections = running.front._server.connections.open
    await until(lambda: any(one.write_paused for one in connections), "its buffers are full")
    return asking


def large() -> list[Scripted]:
    return [Scripted(f"{number:03d}-{'x' * 200}", says(GOOD)) for number in range(60)]


async def test_a_page_that_does_not_read_gets_the_newest_frame_and_none_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast, "FRAME_S", 0.005)
    async with served(*large()) as running:
        owner: Any = running.front.dashboard.broadcast
        asking, shown = await stuck(running), {owner._fleet.at}

        def some() -> bool:
            shown.add(owner._fleet.at)
            return len(shown) > 6

        await until(some, "some frames have been made meanwhile")
        _, writer = opened_on = await asyncio.open_connection(sock=asking, limit=2**22)
        page = Page(Client(*opened_on))
        await page.client.head()
        read = [(await page.next("fleet"))["at"]]
        while read[-1] <= max(shown):
            read.append((await page.next("fleet"))["at"])
        assert len([at for at in set(read) if min(shown) < at <= max(shown)]) <= 1
        writer.transport.abort()
        await alone(running)


async def test_a_reader_that_stops_reading_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "STUCK_S", 1.0)
    async with served(*large()) as running:
        asking = await stuck(running)
        assert count_of(running) == 1
        await alone(running)
        connections = running.front._server.connections.open
        await until(lambda: not connections, "what it has not read is not kept for it")
        asking.close()


async def test_when_the_router_drains_streams_end_at_once_and_are_not_waited_for() -> None:
    loop = asyncio.get_running_loop()
    async with served(*Script(says(GOOD)).replicas(1)) as running, watched(running) as one, watched(running) as other:
        await one.next("fleet")
        await other.next("fleet")
        began_s = loop.time()
        assert await running.front.drain(LONG_S) == 0
        for page in (one, other):
            assert await page.next("end") == {"why": "the router ends"}
            assert await page.ended()
        assert loop.time() - began_s < AT_ONCE_S
        await alone(running)
        async with connect(running.port) as client:
            answer = await client.get("/dashboard/feed", **LOCAL)
            assert (answer.status, answer.error["code"]) == (503, "draining")


async def test_a_mistake_in_a_frame_ends_neither_the_stream_nor_the_router(caplog: pytest.LogCaptureFixture) -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running, watched(running) as page:
        await page.next("fleet")
        member = running.member("r0")
        models, member.models = member.models, None
        await until(lambda: "making frames for the dashboard" in caplog.text, "it is logged")
        member.models = models
        mended = time.time()
        while (await page.next("fleet"))["at"] <= mended:
            pass
        await ask(running, 1)
        running.front.check()


async def test_replicas_that_are_lost_are_shown_as_down() -> None:
    async with served(Scripted("r0", drops), breaker_faults=1) as running, watched(running) as page:
        await ask(running, 1)
        while (fleet := await page.next("fleet"))["states"]["down"] == 0:
            pass
        [row] = fleet["replicas"]
        assert (row["standing"], row["severity"]) == ("down", 2) and row["why"]
