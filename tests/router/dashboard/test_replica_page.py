"""GET /dashboard/replicas/NAME and GET /decisions/ID."""

from typing import Any

from router.dashboard.sampling import REPLICA_SERIES
from router.tenants.keys import keys_from_options
from tests.router.http.test_app import LOCAL, bearer
from tests.router.scripted import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Answer,
    Call,
    Script,
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
        await running.front.dashboard.statuses.sampling.sample()
        page = await page_of(running)
        assert page["replica"]["name"] == "r0"
        assert (page["counts"]["requests"], page["counts"]["errors"]) == (2, 0)
        assert page["counts"]["prompt_tokens"] > 100
        assert page["stream"] is None  # it sends no events
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
        assert (await page_of(running))["replica"]["recent"]["hit_reported"] == round(16 / first.prompt_tokens, 4)


async def test_one_that_has_just_come_has_no_past() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        assert (await page_of(running))["history"]["at"] == []


async def test_a_missing_replica_is_not_found() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        answer = await get(running, "/dashboard/replicas/r9")
        assert (answer.status, answer.error["code"]) == (404, "replica_not_found")


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
