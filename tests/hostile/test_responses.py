"""Stored responses: whose they are, and who has them, without any router's memory."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.tenants.keys import Key, digest_of
from tests.router.keeping import PATH, Keeping
from tests.router.scripted import MODEL, Answer, Client, Scripted, Served, connect, served

OWNER, SIBLING, OTHER, PLAIN = (
    Key(name=name, digest=digest_of(name), salt=salt)
    for name, salt in (("owner", "a" * 32), ("sibling", "a" * 32), ("other", "b" * 32), ("plain", None))
)
KEYS = (OWNER, SIBLING, OTHER, PLAIN)
FLEETS: list[tuple[str, ...]] = [("warmroute",), ("vllm",), ("sglang",), ("warmroute", "vllm")]
each_fleet = pytest.mark.parametrize("engines", FLEETS, ids="+".join)
SECRET = "the owner's secret"


def by(key: Key) -> dict[str, str]:
    return {"authorization": f"Bearer {key.name}"}


def asked(said: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": said, **fields}


def item_of(response_id: str) -> dict[str, str]:
    return {"type": "item_reference", "id": f"msg_{response_id.removeprefix('resp_')}_0"}


@asynccontextmanager
async def fronted(replicas: Sequence[Scripted], keys: Sequence[Key] = KEYS) -> AsyncIterator[tuple[Served, Client]]:
    """A router that has just begun, in front of these replicas."""
    async with served(*replicas, keys=tuple(keys), demand_key=bool(keys)) as running, connect(running.port) as client:
        yield running, client


@asynccontextmanager
async def fleet(engines: Sequence[str]) -> AsyncIterator[list[Keeping]]:
    replicas = [Keeping(f"r{number}", engine) for number, engine in enumerate(engines)]
    async with replicas[0].running(), replicas[-1].running() if len(replicas) > 1 else replicas[0].running():
        yield replicas


def forget(replicas: Sequence[Keeping]) -> None:
    for replica in replicas:
        replica.calls.clear()


def told(replicas: Sequence[Keeping]) -> str:
    return "".join(call.head.decode() + call.body.decode(errors="replace") for one in replicas for call in one.calls)


def without_id(answer: Answer, response_id: str) -> tuple[int, bytes]:
    return answer.status, answer.body.replace(response_id.encode(), b"ID")


@each_fleet
async def test_a_foreign_response_is_as_unknown_as_one_that_never_was(engines: Sequence[str]) -> None:
    async with fleet(engines) as replicas:
        async with fronted(replicas) as (_, client):
            foreign = (await client.post(PATH, asked(SECRET), **by(OWNER))).json["id"]
        for key in (OTHER, PLAIN):
            async with fronted(replicas) as (_, client):  # what another router or worker, or one before, has seen
                own = (await client.post(PATH, asked("hi"), **by(key))).json["id"]
                unknown = f"resp_{'0' * (len(foreign) - 5)}"
                forget(replicas)
                seen = [await attacks(client, response_id, own, key) for response_id in (foreign, unknown)]
                assert seen[0] == seen[1]
                assert {status for status, _ in seen[0]} == {404}
                assert foreign not in told(replicas) and SECRET not in told(replicas)


async def attacks(client: Client, response_id: str, own: str, key: Key) -> list[tuple[int, bytes]]:
    """The answers to everything that could read, continue or change this response."""
    bodies: list[Any] = [
        asked("go on", previous_response_id=response_id),
        asked([item_of(response_id)]),
        asked([item_of(response_id)], previous_response_id=own),
        asked([item_of(response_id), item_of(own)]),
        asked([item_of(own), item_of(response_id), {"role": "user", "content": "x"}], previous_response_id=own),
        asked([7, item_of(response_id)], previous_response_id=own),
        asked([7], previous_response_id=response_id),
        json.dumps(asked("x" * 500_000, previous_response_id=response_id)).encode(),
        json.dumps(asked([{"role": "user", "content": "x" * 500_000}, item_of(response_id)])).encode(),
        json.dumps(asked("x", previous_response_id=response_id)).replace("response_id", "response\\u005fid").encode(),
        json.dumps(asked([item_of(response_id)])).replace("item_", "\\u0069tem_").encode(),
    ]
    found = [await client.post(PATH, body, **by(key)) for body in bodies]
    found += [await client.ask(method, f"{PATH}/{response_id}", **by(key)) for method in ("GET", "DELETE")]
    found.append(await client.post(f"{PATH}/{response_id}/cancel", b"", **by(key)))
    found.append(await client.get(f"{PATH}/{response_id.replace('_', '%5F')}", **by(key)))
    return [without_id(answer, response_id) for answer in found]


@each_fleet
async def test_the_owner_goes_on_at_any_router_that_has_its_key(engines: Sequence[str]) -> None:
    async with fleet(engines) as replicas:
        for key, friend in ((OWNER, SIBLING), (PLAIN, PLAIN)):
            async with fronted(replicas) as (_, client):
                made = (await client.post(PATH, asked(SECRET), **by(key))).json["id"]
            for _ in range(4):
                async with fronted(replicas) as (_, client):
                    assert SECRET in (await client.get(f"{PATH}/{made}", **by(friend))).body.decode()
                    then = await client.post(PATH, asked("then", previous_response_id=made), **by(friend))
                    assert (then.status, SECRET in then.body.decode()) == (200, True)
                    made = then.json["id"]
            async with fronted(replicas) as (_, client):
                assert (await client.ask("DELETE", f"{PATH}/{made}", **by(friend))).status == 200
                assert (await client.get(f"{PATH}/{made}", **by(friend))).status == 404


async def test_items_of_two_responses_are_found_beside_one_that_is_continued() -> None:
    async with fleet(("warmroute",)) as replicas:
        async with fronted(replicas) as (_, client):
            first = (await client.post(PATH, asked("first"), **by(OWNER))).json["id"]
            second = (await client.post(PATH, asked("second"), **by(OWNER))).json["id"]
        async with fronted(replicas) as (_, client):
            answer = await client.post(PATH, asked([item_of(second)], previous_response_id=first), **by(OWNER))
            said = [item.get("content") for item in answer.json["conversation"]]
            assert said == ["first", "answer", "answer"]


@each_fleet
async def test_no_client_chooses_the_id_of_its_response(engines: Sequence[str]) -> None:
    async with fleet(engines) as replicas, fronted(replicas) as (_, client):
        made = (await client.post(PATH, asked(SECRET), **by(OWNER))).json["id"]
        for key in (OTHER, PLAIN):
            body = json.dumps(asked("mine now", request_id=made)).encode()
            for sent in (body, body.replace(b"request_id", b"request\\u005fid"), body[:-1] + b"  }\r\n "):
                answer = await client.post(PATH, sent, **by(key))
                assert answer.status == 200 and answer.json["id"] != made
        assert SECRET in (await client.get(f"{PATH}/{made}", **by(OWNER))).body.decode()


async def test_where_keys_are_kept_apart_an_engines_own_id_proves_nothing() -> None:
    async with fleet(("openai",)) as replicas, fronted(replicas) as (_, client):
        made = (await client.post(PATH, asked(SECRET), **by(OWNER))).json["id"]
        for key in KEYS:
            assert (await client.get(f"{PATH}/{made}", **by(key))).status == 404
            assert (await client.post(PATH, asked("x", previous_response_id=made), **by(key))).status == 404


# ---- who has it


@pytest.mark.parametrize("engine", ["vllm", "sglang", "openai", "warmroute"])
async def test_without_tenants_a_new_router_finds_what_replicas_keep(engine: str) -> None:
    async with fleet((engine, engine)) as replicas:
        async with fronted(replicas, ()) as (_, client):
            made = [(await client.post(PATH, asked(f"said {n}"))).json["id"] for n in range(6)]
        replicas[1].kept["resp_its_own"] = [{"role": "user", "content": "said before"}]
        async with fronted(replicas, ()) as (_, client):
            for response_id in (*made, "resp_its_own"):
                assert "said" in (await client.get(f"{PATH}/{response_id}")).body.decode()
                then = await client.post(PATH, asked("then", previous_response_id=response_id))
                assert (then.status, "said" in then.body.decode()) == (200, True)
            assert (await client.get(f"{PATH}/resp_unknown")).status == 404
            assert (await client.post(PATH, asked("then", previous_response_id="resp_unknown"))).status == 404


@pytest.mark.parametrize("engine", ["vllm", "warmroute"])
async def test_a_silent_replica_is_not_taken_to_have_nothing(engine: str) -> None:
    async with fleet((engine, engine)) as replicas, fronted(replicas, ()) as (_, client):
        replicas[1].is_silent = True
        replicas[0].kept["resp_7"] = [{"role": "user", "content": "said"}]
        assert "said" in (await client.get(f"{PATH}/resp_7")).body.decode()
        answer = await client.post(PATH, asked("then", previous_response_id="resp_8"))
        assert (answer.status, answer.error["code"]) == (503, "response_not_asked_for")
        assert "r1" in answer.error["message"] and answer.headers["retry-after"]
