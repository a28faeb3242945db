"""Requests that the router passes on without parsing them."""

import asyncio
import json

import pytest

from tests.router.loopback import until
from tests.router.scripted import (
    DRAINING,
    QUEUE_FULL,
    Call,
    Handler,
    Script,
    Scripted,
    connect,
    drops,
    named,
    says,
    served,
    silent,
)

PATH, UNKNOWN = "/v1/embeddings", "/v1/things"
GOOD = b'{"data":[]}'


async def test_it_goes_to_a_replica_that_serves_the_model_which_the_body_names() -> None:
    one, other = (Scripted(name, says(f'"{name}"'.encode()), models=[name]) for name in ("one", "other"))
    async with served(one, other) as running, connect(running.port) as client:
        for name in ("one", "other") * 3:
            assert (await client.post(PATH, {"model": name})).json == name
        answer = await client.post(PATH, {"model": "none"})
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("body", [b"", b"{}", b' {"model": 7}\n'])
async def test_a_body_that_names_none_goes_to_any(body: bytes) -> None:
    script = Script(says(GOOD))
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        assert (await client.post(PATH, body)).body == GOOD
        assert script.calls[0].body == body


async def test_it_goes_where_there_is_the_least_to_do() -> None:
    script = Script(silent, says(GOOD))
    async with (
        served(*script.replicas(2)) as running,
        connect(running.port) as busy,
        connect(running.port) as client,
    ):
        busy.send("POST", PATH, {})
        await until(lambda: script.calls, "one is busy")
        names = {(await client.post(PATH, {})).headers["x-warmroute-replica"] for _ in range(4)}
        assert len(names) == 1
        busy.leave()


async def test_a_refused_connection_is_not_seen_by_the_client() -> None:
    stopping, good = named("stopping"), named("good")
    async with good.running():
        async with stopping.running():
            pass
        async with served(good, replicas=(good.spec,)) as running, connect(running.port) as client:
            running.front.upkeep.add(stopping.spec)
            running.member("stopping").candidate.unavailable = None  # nobody has noticed yet
            assert [(await client.post(PATH, {})).json for _ in range(4)] == ["good"] * 4


@pytest.mark.parametrize("lost", [drops, *(says(b"{}", status) for status in (500, 502, 503, 504))])
@pytest.mark.parametrize("path", [PATH, "/v1/messages/count_tokens", "/tokenize"])
async def test_what_is_only_computed_is_asked_of_another_replica_after_an_error(lost: Handler, path: str) -> None:
    script = Script(lost, says(GOOD))
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        assert (await client.post(path, {})).body == GOOD
        assert len(script.calls) == 2 and sum(member.server.faults for member in running.router.members) == 1


async def test_internal_errors_in_a_row_open_the_breaker() -> None:
    async with served(*Script(says(b"{}", 500)).replicas(1)) as running, connect(running.port) as client:
        for _ in range(3):
            assert running.member("r0").health.breaker == "closed"
            assert (await client.post(PATH, {})).status == 500
        assert running.member("r0").health.breaker == "open"


async def test_what_may_have_effects_and_may_have_arrived_is_not_sent_again() -> None:
    script = Script(drops, says(GOOD))
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        answer = await client.post(UNKNOWN, {}, host="localhost")
        assert (answer.status, answer.error["code"]) == (502, "replica_lost")
        assert len(script.calls) == 1
        assert (await client.post(UNKNOWN, {}, host="localhost")).body == GOOD


@pytest.mark.parametrize(("method", "status", "times"), [("POST", 502, 2), ("DELETE", 502, 2), ("GET", 200, 3)])
async def test_what_may_have_arrived_is_not_sent_again_on_another_connection_either(
    method: str, status: int, times: int
) -> None:
    script = Script(says(GOOD), drops, says(GOOD))
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        assert (await client.post(PATH, {})).body == GOOD  # it leaves a connection that is used again
        body: object = {} if method == "POST" else None
        assert (await client.ask(method, UNKNOWN, body, host="localhost")).status == status
        assert len(script.calls) == times
        assert script.calls[-1].header("content-type") == (None if body is None else "application/json")


async def test_a_body_is_kept_once() -> None:
    taken: list[Call] = []
    async with served(*Script(taken.append).replicas(1)) as running, connect(running.port) as client:
        client.send("POST", PATH, {"input": "x" * 100_000})
        await until(lambda: taken, "the replica is asked")
        [connection] = running.front._server.connections.open
        assert len(connection.cycle.body) == 0
        taken[0].answer(GOOD)
        assert (await client.answer()).body == GOOD


async def test_an_answer_that_breaks_off_breaks_off_for_the_client_too() -> None:
    def breaks(call: Call) -> None:
        call.begin("application/x")
        call.chunk(b"ab")
        call.drop()

    async with served(*Script(breaks).replicas(2)) as running, connect(running.port) as client:
        client.send("POST", PATH, {})
        assert (await client.head())[0] == 200
        assert await client.rest() in (b"2\r\nab\r\n", b"")


@pytest.mark.parametrize(
    ("path", "status"), [(PATH, 400), (PATH, 404), (PATH, 501), (UNKNOWN, 400), (UNKNOWN, 500), (UNKNOWN, 502)]
)
async def test_whatever_the_replica_says_is_passed_on(path: str, status: int) -> None:
    script = Script(says(b"its own words", status, retry_after="9"))
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        answer = await client.post(path, {}, host="localhost")
        assert (answer.status, answer.body, answer.headers["retry-after"]) == (status, b"its own words", "9")
        assert len(script.calls) == 1


@pytest.mark.parametrize(("refusal", "status"), [(DRAINING, 503), (QUEUE_FULL, 429)])
async def test_a_replica_that_takes_nothing_for_now_leaves_it_to_the_next_one(refusal: bytes, status: int) -> None:
    script = Script(says(refusal, status), says(GOOD))
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        assert (await client.post(PATH, {"a": 1})).body == GOOD
        assert [call.json for call in script.calls] == [{"a": 1}] * 2
        assert sum(member.server.faults for member in running.router.members) == 0
        assert (running.router.members.by_name["r0"].candidate.unavailable is not None) + (
            running.router.members.by_name["r1"].candidate.unavailable is not None
        ) == (status == 503)


@pytest.mark.parametrize("status", [429, 503])
async def test_what_was_refused_before_it_began_is_asked_of_the_next_one(status: int) -> None:
    script = Script(says(b"too busy", status), says(GOOD))
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        assert (await client.post(PATH, {})).body == GOOD
        assert len(script.calls) == 2


@pytest.mark.parametrize("status", [429, 503])
async def test_the_last_refusal_is_passed_on(status: int) -> None:
    script = Script(says(b"its own words", status, retry_after="9"))
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        answer = await client.post(PATH, {})
        assert (answer.status, answer.body, answer.headers["retry-after"]) == (status, b"its own words", "9")
        assert len(script.calls) == 2


@pytest.mark.parametrize(("refusal", "status"), [(DRAINING, 503), (QUEUE_FULL, 429)])
async def test_an_unplaced_request_gets_the_reason(refusal: bytes, status: int) -> None:
    async with served(*Script(says(refusal, status)).replicas(2)) as running, connect(running.port) as client:
        answer = await client.post(PATH, {})
        assert (answer.status, answer.body) == (status, refusal)


async def test_a_client_that_leaves_takes_its_request_away_from_the_replica() -> None:
    script = Script(silent)
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        client.send("POST", PATH, {})
        await until(lambda: script.calls, "the replica is asked")
        client.leave()
        async with asyncio.timeout(20):
            await script.calls[0].left()
        await running.idle()


async def test_a_slow_reader_stops_the_replica() -> None:
    size = 20_000_000

    async def long(call: Call) -> None:
        call.begin("application/x")
        for _ in range(size // 100_000):
            call.chunk(bytes(100_000))
            await call.connection.writer.drain()
        call.end()

    async with served(*Script(long).replicas(1)) as running, connect(running.port) as client:
        client.send("POST", PATH, {})
        await client.head()
        await until(lambda: any(one.is_paused for one in running.router._attempts), "the router is full")
        assert sum([len(part) async for part in client.chunks()]) == size


async def test_a_tokenizer_is_described_by_a_replica_of_its_model() -> None:
    replicas = [Scripted(name, says(json.dumps(name).encode()), models=(f"model-{name}",)) for name in "ab"]
    async with served(*replicas) as running, connect(running.port) as client:
        for name in "abab":
            assert (await client.get(f"/tokenizer_info?model=model-{name}")).json == name
        several = await client.get("/tokenizer_info")
        assert (several.status, several.error["param"]) == (400, "model")
        assert '"model-a", "model-b"' in several.error["message"] and "?model=NAME" in several.error["message"]
        assert (await client.get("/tokenizer_info?model=other")).status == 404
    async with served(named("a")) as running, connect(running.port) as client:
        assert (await client.get("/tokenizer_info")).json == "a"
