"""Requests for models under other names go where these are served, on every path, whatever their size."""

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.router.keeping import Keeping
from tests.router.loopback import until
from tests.router.picker.asking import BUFFERED, DUPLEX, gateway
from tests.router.scripted import CHAT, Client, Scripted, Served, connect, says, served

MESSAGES, RESPONSES, EMBEDDINGS, SCORE = "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/score"
RULES = """
[[rewrites]]
model = "chat"
targets = {old = 1}
[[rewrites]]
model = "both"
targets = {old = 50, new = 50}
[[rewrites]]
model = "away"
targets = {nobody = 1}
"""


def replica(model: str) -> Scripted:
    answer = {"id": f"resp_{model}", "model": model, "usage": {}}
    return Scripted(model, says(json.dumps(answer).encode()), models=[model])


@asynccontextmanager
async def serving(folder: Path, text: str = RULES, **config: Any) -> AsyncIterator[tuple[Served, Client, Path]]:
    file = folder / "rewrites.toml"
    file.write_text(text)
    config = {"model_rewrites_file": str(file), "policy": "cost", **config}
    async with served(replica("old"), replica("new"), **config) as running, connect(running.port) as client:
        yield running, client, file


def asked_of(running: Served) -> list[Any]:
    return [call.json["model"] for one in running.replicas.values() for call in one.calls if call.body]


@pytest.mark.parametrize("size", [1, 300_000], ids=["small", "large"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", MESSAGES, RESPONSES, EMBEDDINGS, SCORE])
async def test_another_name_works_on_every_path(path: str, size: int, tmp_path: Path) -> None:
    said = "a, " * size
    field = {CHAT: "messages", MESSAGES: "messages", "/v1/completions": "prompt"}.get(path, "input")
    prompt = [{"role": "user", "content": said}] if field == "messages" else said
    body = {"model": "chat", "max_tokens": 3, field: prompt}
    async with serving(tmp_path) as (running, client, _):
        answer = await client.post(path, body)
        assert (answer.status, answer.headers["x-warmroute-replica"]) == (200, "old")
        [call] = running.replicas["old"].calls
        assert call.json == body | {"model": "old"}
        assert (await client.post(path, body | {"model": "new"})).headers["x-warmroute-replica"] == "new"


async def test_conversations_are_split_and_each_stays(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client, _):
        homes: dict[int, str] = {}
        for _ in range(3):
            for number in range(16):
                body = {"model": "both", "messages": [{"role": "user", "content": f"{number}"}]}
                home = (await client.post(CHAT, body)).headers["x-warmroute-replica"]
                assert homes.setdefault(number, home) == home
        assert {*homes.values()} == {"old", "new"}


async def test_a_response_is_continued_by_its_model(tmp_path: Path) -> None:
    file = tmp_path / "rewrites.toml"
    file.write_text(RULES)
    old, new = (Keeping(model, models=(model,)) for model in ("old", "new"))
    async with served(old, new, model_rewrites_file=str(file)) as running, connect(running.port) as client:
        for number in range(12):
            first = await client.post(RESPONSES, {"model": "both", "input": f"{number}"})
            then = {"model": "both", "input": f"and {number + 100}", "previous_response_id": first.json["id"]}
            second = await client.post(RESPONSES, then)
            assert (second.status, second.json["model"]) == (200, first.json["model"])
        assert {*asked_of(running)} == {"old", "new"}


async def test_a_replica_of_several_models_goes_on_with_the_one_that_answered(tmp_path: Path) -> None:
    file = tmp_path / "rewrites.toml"
    file.write_text(RULES)
    both = Keeping("both", models=("old", "new"))
    async with served(both, model_rewrites_file=str(file)) as running, connect(running.port) as client:
        for number in range(12):
            first = await client.post(RESPONSES, {"model": "both", "input": f"{number}"})
            then = {"model": "both", "input": f"and {number + 100}", "previous_response_id": first.json["id"]}
            assert (await client.post(RESPONSES, then)).json["model"] == first.json["model"]
        assert {*asked_of(running)} == {"old", "new"}


async def test_a_body_without_room_is_refused(tmp_path: Path) -> None:
    rules = f"[[rewrites]]\nmodel = 'short'\ntargets = {{'{'long' * 100}' = 1}}"
    body = json.dumps({"model": "short", "prompt": "a" * 40_000}).encode()
    async with serving(tmp_path, rules) as (running, client, _):
        running.router.bodies.limit_bytes = len(body) + 100
        refused = await client.post("/v1/completions", body, content_type="application/json")
        assert (refused.status, refused.error["code"]) == (429, "queue_full")


async def test_other_names_are_listed_while_they_stand_for_something(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client, _):
        listed = (await client.get("/v1/models")).json["data"]
        assert {model["id"] for model in listed} == {"old", "new", "chat", "both"}
        assert (await client.get("/v1/models/chat")).json["id"] == "chat"
        assert (await client.get("/v1/models/away")).status == 404
        refused = await client.post(CHAT, {"model": "away", "messages": [{"role": "user", "content": "hi"}]})
        assert (refused.status, refused.error["code"]) == (404, "model_not_found")


async def test_a_changed_file_counts_and_a_broken_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as (running, client, file):
        await replace(file, RULES.replace("old = 1", "new = 1"), lambda: first_target(running) == "new")
        body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
        assert (await client.post(CHAT, body)).headers["x-warmroute-replica"] == "new"
        await replace(file, "[[rewrites", lambda: "keeping the previous rewrites" in caplog.text)
        assert (await client.post(CHAT, body)).headers["x-warmroute-replica"] == "new"


async def replace(file: Path, text: str, seen: Callable[[], bool]) -> None:
    whole = file.with_suffix(".new")
    whole.write_text(text)
    os.replace(whole, file)
    await until(seen, "the router has read it")


def first_target(running: Served) -> str:
    model: str = running.router.model_rewrites.targets("chat")[0].model
    return model


async def test_an_explanation_is_of_the_model_that_a_request_gets(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client, _):
        body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
        explained = await client.post("/explain", body, host="127.0.0.1")
        assert (explained.status, explained.json["chosen"]) == (200, "old")


@pytest.mark.parametrize("config", [BUFFERED, DUPLEX], ids=["buffered", "duplex"])
async def test_a_gateway_gets_the_body_with_the_other_name(config: dict[str, int], tmp_path: Path) -> None:
    async with serving(tmp_path, picker_listen="127.0.0.1:0") as (running, _, _), gateway(running) as asking:
        body = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hi"}]}).encode()
        stream = asking.stream()
        await stream.begin(body, config=config)
        sent = b""
        while not sent:
            name, value, _ = await stream.reply()
            mutation = value.response.body_mutation
            sent = (mutation.body or mutation.streamed_response.body) if name == "request_body" else b""
        assert json.loads(sent) == json.loads(body) | {"model": "old"}
        await stream.answer()
        await stream.end()
