"""Requests for models under other names go where these are served, on every path, whatever their size."""

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.router.http.picker.asking import BUFFERED, DUPLEX, gateway
from tests.router.loopback import until
from tests.router.scripted import CHAT, Client, Scripted, Served, connect, says, served

MESSAGES, RESPONSES, EMBEDDINGS, SCORE = "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/score"
RULES = """
[[rewrites]]
model = "chat"
target = "old"
[[rewrites]]
model = "away"
target = "nobody"
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


async def test_a_body_without_room_is_refused(tmp_path: Path) -> None:
    rules = f"[[rewrites]]\nmodel = 'short'\ntarget = '{'long' * 100}'"
    body = json.dumps({"model": "short", "prompt": "a" * 40_000}).encode()
    async with serving(tmp_path, rules) as (running, client, _):
        running.router.bodies.limit_bytes = len(body) + 100
        refused = await client.post("/v1/completions", body, content_type="application/json")
        assert (refused.status, refused.error["code"]) == (429, "queue_full")


async def test_other_names_are_listed_while_they_stand_for_something(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client, _):
        listed = (await client.get("/v1/models")).json["data"]
        assert {model["id"] for model in listed} == {"old", "new", "chat"}
        assert (await client.get("/v1/models/chat")).json["id"] == "chat"
        assert (await client.get("/v1/models/away")).status == 404
        refused = await client.post(CHAT, {"model": "away", "messages": [{"role": "user", "content": "hi"}]})
        assert (refused.status, refused.error["code"]) == (404, "model_not_found")


async def test_a_changed_file_counts_and_a_broken_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as (running, client, file):
        await replace(
            file, RULES.replace('"old"', '"new"'), lambda: running.router.model_rewrites.target("chat") == "new"
        )
        body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
        assert (await client.post(CHAT, body)).headers["x-warmroute-replica"] == "new"
        await replace(file, "[[rewrites", lambda: "keeping the previous rewrites" in caplog.text)
        assert (await client.post(CHAT, body)).headers["x-warmroute-replica"] == "new"


async def replace(file: Path, text: str, seen: Callable[[], bool]) -> None:
    whole = file.with_suffix(".new")
    whole.write_text(text)
    os.replace(whole, file)
    await until(seen, "the router has read it")


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
