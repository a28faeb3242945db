"""Requests that the router passes on without parsing them."""

import json

import pytest

from tests.router.loopback import until
from tests.router.scripted import (
    Call,
    Script,
    Scripted,
    connect,
    drops,
    named,
    says,
    served,
    silent,
)

pytestmark = pytest.mark.virtual

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
        [connection] = running.front.server.connections.open
        assert connection._exchange is not None and len(connection._exchange.body) == 0
        taken[0].answer(GOOD)
        assert (await client.answer()).body == GOOD


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
