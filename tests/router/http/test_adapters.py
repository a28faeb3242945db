"""Adapters loaded and unloaded through the router, at every replica of their base model."""

import json
from typing import Any

import pytest

from router.members.spec import ReplicaSpec
from router.tenants.keys import keys_from_options
from tests.router.loopback import until
from tests.router.scripted import CHAT, MODEL, Call, Scripted, Served, chat, connect, drops, says, served

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
HERE = {"host": "localhost"}  # an administrator, as no key is demanded
SQL = {"lora_name": "sql", "lora_path": "/adapters/sql"}


def engine(name: str, model: str = MODEL) -> Scripted:
    """An engine that loads and unloads adapters, at most once each."""
    base = {"id": model, "owned_by": "vllm", "max_model_len": 512}
    made = Scripted(name, says(), models=[base])
    made.control |= {"/kv_event_sources": (404, {}), "/metrics": (200, b"")}
    loaded: set[str] = set()

    def change(call: Call) -> None:
        adapter, load = call.json["lora_name"], call.path == LOAD
        if (adapter in loaded) == load:
            call.answer(b'{"error": {"message": "it is so already"}}', 400)
            return
        (loaded.add if load else loaded.remove)(adapter)
        listed = [{"id": one, "parent": model, "owned_by": "vllm"} for one in sorted(loaded)]
        made.control["/v1/models"] = (200, {"data": [base, *listed]})
        call.answer(b"Success")

    made.handler = change
    return made


def models(running: Served) -> set[str]:
    return set(running.router.members.models)


async def test_an_adapter_reaches_every_replica_of_its_base_model_once() -> None:
    a, b, other = engine("a"), engine("b"), engine("other", "else")
    a.control["/kv_event_sources"] = (200, {str(rank): {} for rank in range(2)})  # of two data-parallel ranks
    async with a.running(), b.running(), other.running():
        specs = tuple(ReplicaSpec(name=one.name, url=one.spec.url) for one in (a, b, other))
        await _loads_everywhere(a, b, other, specs)


async def _loads_everywhere(a: Scripted, b: Scripted, other: Scripted, specs: tuple[ReplicaSpec, ...]) -> None:
    async with served(a, b, other, ready=False, replicas=specs) as running, connect(running.port) as client:
        await until(lambda: models(running) == {MODEL, "else"} and len(running.router.members) == 4, "they are known")
        asked = {**SQL, "model": MODEL}
        answer = await client.post(LOAD, asked, **HERE)
        assert answer.status == 200 and answer.json["model"] == MODEL
        assert answer.json["replicas"] == [
            {"name": name, "has_it": True, "status": 200, "message": "Success"} for name in ("a", "b")
        ]
        assert "sql" in models(running)
        assert [len(one.calls) for one in (a, b, other)] == [1, 1, 0]
        assert json.loads(a.calls[0].body) == asked
        again = await client.post(LOAD, asked, **HERE)  # what counts is what they have
        assert again.status == 200 and {one["status"] for one in again.json["replicas"]} == {400}
        gone = await client.post(UNLOAD, {"lora_name": "sql"}, **HERE)
        assert gone.status == 200 and [one["has_it"] for one in gone.json["replicas"]] == [False, False]
        assert models(running) == {MODEL, "else"}
        nobody = await client.post(CHAT, chat() | {"model": "sql"})
        assert (nobody.status, nobody.error["code"]) == (404, "model_not_found"), "it waits for nobody"


async def test_a_replica_that_fails_is_named_with_the_reason() -> None:
    a, lost = engine("a"), Scripted("lost", drops, models=[{"id": MODEL, "owned_by": "vllm"}])
    async with served(a, lost) as running, connect(running.port) as client:
        answer = await client.post(LOAD, SQL, **HERE)
        assert answer.status == 502
        have = {one["name"]: one for one in answer.json["replicas"]}
        assert have["a"]["has_it"] and not have["lost"]["has_it"]
        assert have["lost"]["status"] is None and "ended the connection" in have["lost"]["message"]
        assert answer.error["message"].startswith("1 of 2 replicas do not have the adapter; lost says: ")


async def test_an_engine_that_loads_no_adapters_gives_the_status() -> None:
    one = engine("a")
    one.handler = says(b"{}", 404)
    async with served(one) as running, connect(running.port) as client:
        answer = await client.post(LOAD, SQL, **HERE)
        assert (answer.status, answer.error["code"]) == (404, "adapter_not_changed")
        assert answer.json["replicas"][0]["status"] == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        (LOAD, {}, 400, "lora_name"),
        (LOAD, [], 400, "does not name an adapter"),
        (LOAD, SQL, 400, "serves 2 base models; name the adapter's base as model"),
        (LOAD, {**SQL, "model": "nobody"}, 404, "no replica serves the base model"),
        (UNLOAD, {"lora_name": "unknown"}, 404, "no replica has an adapter"),
    ],
)
async def test_what_concerns_no_replica_is_refused(path: str, body: Any, status: int, why: str) -> None:
    a, other = engine("a"), engine("other", "else")
    async with served(a, other) as running, connect(running.port) as client:
        answer = await client.post(path, body, **HERE)
        assert answer.status == status and why in answer.error["message"]
        assert not a.calls and not other.calls


async def test_only_an_administrator_loads_an_adapter() -> None:
    a = engine("a")
    keys = tuple(keys_from_options(["client"], "admin"))
    async with served(a, keys=keys, demand_key=True) as running, connect(running.port) as client:
        assert (await client.post(LOAD, SQL, authorization="Bearer client")).status == 403
        assert not a.calls
        assert (await client.post(LOAD, SQL, authorization="Bearer admin")).status == 200


async def test_sglang_has_these_routes_at_another_path() -> None:
    base = {"id": MODEL, "owned_by": "sglang"}
    a = Scripted("a", says(), models=[base])

    def change(call: Call) -> None:
        a.control["/v1/models"] = (200, {"data": [base, {"id": "sql", "parent": MODEL, "owned_by": "sglang"}]})
        call.answer()

    a.handler = change
    a.control |= {"/server_info": (200, {"version": "0.5.14"}), "/metrics": (200, b"")}
    async with a.running():
        spec = ReplicaSpec(name="a", url=a.spec.url)
        async with served(a, replicas=(spec,)) as running, connect(running.port) as client:
            assert (await client.post(LOAD, SQL, **HERE)).status == 200
        assert [call.path for call in a.calls] == ["/load_lora_adapter"]
