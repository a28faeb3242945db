"""GET /dashboard/fleet and /dashboard/history."""

import asyncio

import pytest

from events.native import Load
from router.dashboard import dashboard, sampling
from router.dashboard.rows import Query
from router.members.counts import ReplicaCounts, counts_of
from router.members.members import Member
from router.tenants.keys import keys_from_options
from tests.router.dashboard.watching import watched
from tests.router.http.test_app import LOCAL, bearer
from tests.router.loopback import until
from tests.router.scripted import (
    CHAT,
    DEADLINE_S,
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
KEYS = tuple(keys_from_options(["client-key"], "admin-key"))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "FRAME_S", 0.02)


async def ask(running: Served, count: int, **headers: str) -> None:
    async with connect(running.port) as client:
        for number in range(count):
            await client.post(CHAT, chat("a prompt " * 100), x_request_id=f"asked-{number}", **headers)


def newest(running: Served, name: str) -> float:
    value = running.front.dashboard.statuses.sampling.fleet.columns()[name][-1]
    assert value is not None
    return value


# ---- what is shown


async def test_a_page_is_told_the_past_and_the_present() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        await running.front.dashboard.statuses.sampling.sample()
        await ask(running, 3)
        async with watched(running) as page, connect(running.port) as client:
            frame, history = await page.next(), (await client.get("/dashboard/history", **LOCAL)).json
        router = frame["router"]
        assert (router["role"], router["keyed"], frame["models"], frame["points"]) == ("admin", False, ["m"], 1)
        assert set(history) == {"at", "interval_s", *sampling.FLEET_SERIES}
        assert {len(column) for column in history.values() if isinstance(column, list)} == {1}
        totals = frame["totals"]
        assert (totals["replicas"], totals["up"], totals["in_flight"]) == (2, 2, 0)
        assert totals["requests_per_s"] > 0 and totals["prompt_tokens_per_s"] > 0
        assert frame["states"]["approximate"] == 2
        assert [row["name"] for row in frame["replicas"]] == ["r0", "r1"]
        assert {row["standing"] for row in frame["replicas"]} == {"approximate"}
        assert [one["request_id"] for one in frame["decisions"]] == ["asked-2", "asked-1", "asked-0"]
        assert {one["status"] for one in frame["decisions"]} == {200}


async def test_a_row_tells_how_full_a_cache_is_and_when_its_replica_was_heard() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        member, now_s = running.member("r0"), running.router.now_s()
        member.block_size = 16
        member.load.describe(16, 100)
        member.load.reported(Load(free_blocks=25, cached_blocks=75), now_s)
        member.health.heard(now_s)
        async with watched(running, "?sort=name") as page:
            told, silent = (await page.next())["replicas"]
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
        while not (totals := (await page.next())["totals"])["generated_tokens_per_s"]:
            pass
        assert totals["in_flight"] == 1
        while (totals := (await page.next())["totals"])["token_s"] is None:
            pass
        goes_on.set()
        await client.answer()
        await running.idle()
        counts = counts_of(running.member("r0"))
        assert counts.generated_tokens == (9 if native else 7)  # without figures, all events but two have a token
        assert counts.streamed_tokens == counts.generated_tokens - 1


async def test_what_happens_is_shown_in_the_next_frames() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running, watched(running) as page:
        assert (await page.next())["states"]["draining"] == 0
        running.member("r1").health.drain()
        while (fleet := await page.next())["states"]["draining"] == 0:
            pass
        assert fleet["totals"]["up"] == 1
        assert [(row["name"], row["severity"]) for row in fleet["replicas"]] == [("r1", 1), ("r0", 0)]


async def test_each_point_of_the_past_is_counted() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running, watched(running) as page:
        taken = running.front.dashboard.statuses.sampling
        await ask(running, 2)
        await taken.sample()
        await taken.sample()
        assert (await page.next())["points"] == 2
        async with connect(running.port) as client:
            history = (await client.get("/dashboard/history", **LOCAL)).json
        assert history["replicas_up"] == [1, 1] and history["requests_per_s"][0] > history["requests_per_s"][1] == 0
        assert history["ttft_p99_s"][0] is not None


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
            assert (await page.next())["totals"]["errors_per_s"] > 0


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
    async with served(*Script(cached).replicas(2)) as running, watched(running) as page:
        await ask(running, 4)
        await running.front.dashboard.statuses.sampling.sample()
        assert (await page.next())["totals"]["saved_tokens"] == 4 * 64
        running.front.upkeep.apply({"r0": running.replicas["r0"].spec})
        await ask(running, 1)
        await running.front.dashboard.statuses.sampling.sample()
        assert (await page.next())["totals"]["saved_tokens"] == 5 * 64


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
            fleet = await page.next()
            assert [row["name"] for row in fleet["replicas"]] == ["r2", "r1", "r0"]
            assert fleet["shown"] == {"sort": "name", "order": "desc", "filter": "r", "matching": 3}
            assert fleet["totals"]["replicas"] == 3
        async with connect(running.port) as client:
            answer = await client.get("/dashboard/fleet?sort=size", **LOCAL)
            assert (answer.status, answer.error["param"]) == (400, "sort")


async def test_a_frame_is_bounded_however_large_the_fleet() -> None:
    names = [f"replica-{number:03d}" for number in range(130)]
    async with served(*[Scripted(name, says(GOOD)) for name in names]) as running:
        await ask(running, 30)
        for member in running.router.members:
            member.health.drain()
        async with watched(running) as page:
            fleet = await page.next()
        assert (fleet["totals"]["replicas"], len(fleet["replicas"])) == (130, 100)
        assert len(fleet["decisions"]) == 20
        alerts = fleet["alerts"]
        assert len(alerts["alerts"]) == 50 and alerts["truncated"] == 130 - 50


# ---- who may watch


async def test_only_an_administrator_is_shown_what_others_ask() -> None:
    async with served(*Script(says(GOOD)).replicas(1), keys=KEYS, demand_key=True) as running:
        await ask(running, 2, **bearer("client-key"))
        async with watched(running, **bearer("client-key")) as page, watched(running, **bearer("admin-key")) as admins:
            frame = await page.next()
            assert (frame["router"]["role"], frame["decisions"]) == ("reader", None)
            frame = await admins.next()
            assert (frame["router"]["role"], len(frame["decisions"])) == ("admin", 2)


async def test_no_word_of_a_prompt_is_in_a_frame() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        async with connect(running.port) as client:
            await client.post(CHAT, chat("a secret word " * 50))
        async with watched(running) as page:
            assert "secret" not in str(await page.next())


async def test_a_frame_is_made_once_for_all_who_ask_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "FRAME_S", 1000.0)
    monkeypatch.setattr(dashboard, "MAX_QUERIES", 2)
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        board = running.front.dashboard
        first = await board.frame(Query(), admin=True)
        assert await board.frame(Query(), admin=True) is first
        for number in range(5):
            assert b'"matching":0' in await board.frame(Query(filter=f"none {number}"), admin=False)
        assert await board.frame(Query(), admin=True) is not first, "not all of them are kept"


# ---- mistakes and losses


async def test_a_mistake_costs_one_frame() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running, watched(running) as page:
        await page.next()
        member = running.member("r0")
        models, member.models = member.models, None
        async with connect(running.port) as client:
            await until_status(client, 500)
            member.models = models
            await until_status(client, 200)
        await ask(running, 1)
        running.front.check()


async def until_status(client: Client, status: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await client.get("/dashboard/fleet", **LOCAL)).status != status:
            await asyncio.sleep(0.005)


async def test_replicas_that_are_lost_are_shown_as_down() -> None:
    async with served(Scripted("r0", drops), breaker_faults=1) as running, watched(running) as page:
        await ask(running, 1)
        while (fleet := await page.next())["states"]["down"] == 0:
            pass
        [row] = fleet["replicas"]
        assert (row["standing"], row["severity"]) == ("down", 2) and row["why"]
