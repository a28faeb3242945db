"""GET /dashboard/replicas/NAME and GET /decisions/ID."""

import asyncio
from typing import Any

import pytest

from events.cache.groups import Group, Layout
from router.dashboard.replica_page import held_prefixes
from router.dashboard.sampling import REPLICA_SERIES
from router.tenants.keys import keys_from_options
from tests.router.dashboard.test_sharing import SHARED, asked, holding
from tests.router.http.test_app import LOCAL, bearer
from tests.router.loopback import until
from tests.router.scripted import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Answer,
    Call,
    Script,
    Scripted,
    Served,
    chat,
    connect,
    says,
    served,
)

GOOD = b'{"choices":[]}'
SYSTEM = "You are a helpful assistant that answers shortly. " * 20
KEYS = tuple(keys_from_options(["client-key"], "admin-key"))


async def get(running: Served, path: str, **headers: str) -> Answer:
    async with connect(running.port, 2**20) as client:
        return await client.get(path, **(LOCAL | headers))


async def page_of(running: Served, name: str = "r0", **headers: str) -> Any:
    answer = await get(running, f"/dashboard/replicas/{name}", **headers)
    assert answer.status == 200, answer.body
    return answer.json


async def routed(running: Served, *bodies: dict[str, Any], **headers: str) -> None:
    async with connect(running.port) as client:
        for body in bodies:
            assert (await client.post(CHAT, body, **headers)).status == 200


async def test_a_replica_is_told_with_what_it_has_done_and_its_past() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        await routed(running, *[chat("a prompt " * 100)] * 4)
        await running.front.dashboard.sampling.sample()
        page = await page_of(running)
        assert page["replica"]["name"] == page["row"]["name"] == "r0"
        assert (page["counts"]["requests"], page["counts"]["errors"]) == (2, 0)
        assert page["counts"]["prompt_tokens"] > 100
        assert page["stream"] is None  # it sends no events
        assert page["cache"]["ages"] is None
        assert set(page["history"]) == {"at", "interval_s", *REPLICA_SERIES}
        assert len(page["history"]["at"]) == 1 and page["history"]["requests_per_s"][0] > 0
        assert page["history"]["hit_reported"] == [None]
        replicas = (await get(running, "/replicas")).json["replicas"]
        assert set(page["replica"]) == set(replicas[0])


async def test_answers_that_report_nothing_make_no_hit_rate_smaller() -> None:
    """For they may have hit as well."""

    def reports(call: Call) -> None:
        call.begin_frames(x_warmroute_cached_tokens="16")
        call.end()

    script = Script(reports, says(GOOD))
    [replica] = script.replicas(1, native=True)
    replica.control["/load"][1]["endpoints"] = {"events": "ipc:///nowhere/events"}
    async with served(replica) as running, connect(running.port) as client:
        for _ in range(4):
            await client.post(COMPLETIONS, {"model": MODEL, "prompt": "x" * 31, "stream": True})
        [tally] = running.member("r0").tallies.values()
        [first, *_] = (one.record() for one in running.router.history.decisions)
        assert (tally.compared_tokens, tally.prompt_tokens) == (
            first.prompt_tokens,
            4 * first.prompt_tokens,
        )
        assert (await page_of(running))["row"]["hit_reported"] == round(16 / first.prompt_tokens, 4)


async def test_a_cache_of_known_size_is_shown_by_age() -> None:
    async with served(*Script(says(GOOD)).replicas(1), policy="cost") as running:
        assert (await page_of(running))["cache"]["ages"] is None
        ages, now_s = running.member("r0").candidate.ages, running.router.now_s()
        ages.describe(16, 100_000)
        ages.routed(range(3), now_s - 100)
        ages.routed(range(50, 52), now_s - 5)
        newer, older = (await page_of(running))["cache"]["ages"]
        assert (newer["tokens"], older["tokens"]) == (2 * 1024, 3 * 1024)
        assert 5 <= newer["idle_s"] < 15 and 100 <= older["idle_s"] < 110


async def test_one_that_has_just_come_has_no_past() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        assert (await page_of(running))["history"]["at"] == []


async def test_its_part_of_shared_prefixes_is_shown() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        await routed(running, *[asked(SYSTEM, f"{letter} " * 400) for letter in "aabb"])
        for name in ("r0", "r1"):
            prefixes = (await page_of(running, name))["cache"]["prefixes"]
            whole = [one for one in prefixes if one["held"]]
            assert whole and all(one["held_tokens"] == one["tokens"] for one in whole)
            assert all(one["text"].startswith("system: You are") for one in whole)
            assert "a a a" in str([one["adds"] for one in whole])
        running.front.dashboard._forget()
        running.router.placement.guesses.clear(running.member("r1").slot)
        prefixes = (await page_of(running, "r1"))["cache"]["prefixes"]
        assert prefixes and all((one["held"], one["held_tokens"]) == (False, 0) for one in prefixes)
        assert {one["held_by"] for one in prefixes} == {1}


async def test_a_part_that_is_held_is_counted() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        await routed(running, *[asked(SYSTEM, "Why? " * 400)] * 2)
        routed_keys = running.router.history.recent.all()[0].keys
        running.router.placement.guesses.remove(running.member("r0").slot, routed_keys[5:])
        [one] = (await page_of(running))["cache"]["prefixes"]
        assert not one["held"] and one["held_tokens"] == 5 * one["tokens"] // len(routed_keys)


@pytest.mark.parametrize(("held", "tokens"), [(SHARED, 5 * 16), (SHARED[:3], 3 * 16), ([], 0)])
async def test_a_part_is_counted_by_keys_of_the_replicas_own_kind(held: list[int], tokens: int) -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        holding(running, "r0", Layout(16, (Group(0, "full", 1),), lookahead=1), 1, held)
        [one] = (await page_of(running))["cache"]["prefixes"]
        assert (one["held_tokens"], one["held"]) == (tokens, held == SHARED)


async def test_what_no_prompt_can_use_of_a_prefix_is_not_missing() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        holding(running, "r0", Layout(16, (Group(0, "full", 2),)), 0, SHARED)
        [one] = (await page_of(running))["cache"]["prefixes"]
        assert (one["held_tokens"], one["tokens"], one["held"]) == (4 * 16, 5 * 16, True)


async def test_prompts_are_for_administrators_and_hidden_where_they_are_to_be() -> None:
    async with served(*Script(says(GOOD)).replicas(1), keys=KEYS, demand_key=True) as running:
        await routed(running, *[asked(SYSTEM, "Why? " * 400)] * 2, **bearer("client-key"))
        assert (await page_of(running, **bearer("client-key")))["cache"]["prefixes"] is None
        [one] = (await page_of(running, **bearer("admin-key")))["cache"]["prefixes"]
        assert one["held"] and one["text"] is None  # --show-prompts was not given


async def test_models_of_others_are_no_business_of_it() -> None:
    async with served(Scripted("r0", says(GOOD)), Scripted("r1", says(GOOD), models=("other",))) as running:
        await routed(running, *[asked(SYSTEM, "Why? " * 400)] * 2)
        assert (await page_of(running, "r1"))["cache"]["prefixes"] == []


async def test_a_missing_replica_is_not_found() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        answer = await get(running, "/dashboard/replicas/r9")
        assert (answer.status, answer.error["code"]) == (404, "replica_not_found")


async def test_one_that_leaves_while_it_is_asked_about_is_not_found() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        async with running.front.dashboard._computing:  # its prefixes have to wait
            asking = asyncio.create_task(get(running, "/dashboard/replicas/r1"))
            await until(lambda: running.front.dashboard._computing._waiters, "the request waits")
            running.front.upkeep.apply({"r0": running.replicas["r0"].spec})
        assert (await asking).error["code"] == "replica_not_found"


async def test_of_one_that_has_left_nothing_is_looked_up_in_what_may_be_anothers_slot() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        await routed(running, *[asked(SYSTEM, "Why? " * 400)] * 4)
        member, prefixes = running.member("r1"), running.front.dashboard.prefixes
        shared = await prefixes.told(50)
        assert await held_prefixes(prefixes, member, shared)
        running.front.upkeep.apply({"r0": running.replicas["r0"].spec})
        assert await held_prefixes(prefixes, member, shared) == []


# ---- decisions


async def test_a_decision_is_found_by_its_request() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        for name in ("one", "a/b?c", "two"):
            await routed(running, chat(), x_request_id=name)
        listed = {one["request_id"]: one for one in (await get(running, "/decisions")).json["decisions"]}
        assert (await get(running, "/decisions/one")).json == listed["one"]
        assert (await get(running, "/decisions/a%2Fb%3Fc")).json == listed["a/b?c"]
        assert [one["name"] for one in listed["one"]["candidates"]] == ["r0", "r1"]


async def test_of_equal_ids_the_newest_is_returned() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        await routed(running, chat(), chat(), x_request_id="same")
        newest = (await get(running, "/decisions?limit=1")).json["decisions"][0]
        assert (await get(running, "/decisions/same")).json == newest


async def test_a_decision_that_is_not_remembered_is_not_found() -> None:
    async with served(*Script(says(GOOD)).replicas(1), decisions=1) as running:
        for name in ("one", "two"):
            await routed(running, chat(), x_request_id=name)
        answer = await get(running, "/decisions/one")
        assert (answer.status, answer.error["code"]) == (404, "decision_not_found")
        assert "one" in answer.error["message"]


async def test_decisions_are_for_administrators() -> None:
    async with served(*Script(says(GOOD)).replicas(1), keys=KEYS, demand_key=True) as running:
        await routed(running, chat(), x_request_id="one", **bearer("client-key"))
        assert (await get(running, "/decisions/one", **bearer("client-key"))).status == 403
        assert (await get(running, "/decisions/one", **bearer("admin-key"))).status == 200
