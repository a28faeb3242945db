"""Why a replica has nothing to do, as GET /replicas and its pages say."""

from typing import Any

from tests.router.http.test_app import LOCAL
from tests.router.scripted import CHAT, Script, Served, chat, connect, named, says, served

GOOD = b'{"choices":[]}'
PROMPT = chat("a prompt that both replicas could have " * 40)


async def idle(running: Served) -> dict[str, str | None]:
    async with connect(running.port, 2**20) as client:
        answer: Any = (await client.get("/replicas", **LOCAL)).json
        return {one["name"]: one["idle"] for one in answer["replicas"]}


async def asked(running: Served, times: int) -> str:
    """Return the replica that took the last of these requests."""
    async with connect(running.port) as client:
        for _ in range(times):
            answer = await client.post(CHAT, PROMPT)
            assert answer.status == 200
    await running.idle()
    return answer.headers["x-warmroute-replica"]


async def test_a_replica_beside_a_warm_one_says_so_everywhere() -> None:
    async with served(*Script(says(GOOD)).replicas(2), policy="cost") as running:
        assert set((await idle(running)).values()) == {"no prompt came for it"}
        warm = await asked(running, 8)
        told = await idle(running)
        [cold] = {"r0", "r1"} - {warm}
        assert told[warm] is None
        why = told[cold]
        assert why is not None and why.startswith("in 8 of the last 8 choices another replica was sooner")
        await running.front.dashboard.statuses.sampling.sample()
        async with connect(running.port, 2**20) as client:
            page: Any = (await client.get(f"/dashboard/replicas/{cold}", **LOCAL)).json
        assert page["replica"]["idle"] == why


async def test_a_replica_that_takes_no_requests_says_why() -> None:
    async with served(named("r0"), named("r1"), named("r2"), health_interval_s=0) as running:
        running.member("r0").health.drain()
        running.member("r1").health.rests("it drains")
        running.member("r2").health.fault("connection refused", running.router.now_s(), refused=True)
        told = await idle(running)
        assert (told["r0"], told["r1"]) == ("draining", "it drains")
        assert told["r2"] == "breaker open: connection refused (faults in a row: 1)"


async def test_a_router_that_remembers_no_decisions_does_not_guess() -> None:
    async with served(*Script(says(GOOD)).replicas(2), decisions=0) as running:
        await asked(running, 2)
        assert set((await idle(running)).values()) == {None}
