"""The app in this process, for states of unhealthy replicas: loading, and internal errors."""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from api.http.server import http_server, listen
from api.prompts.prompts import Prompts
from api.tokens.tokenizer import ByteTokenizer
from replica.http.app import build_app
from replica.http.engine_client import EngineClient
from tests.replica.serving import MODEL, Answer, config

SILENT_ENGINE = [sys.executable, "-c", "import sys, time; sys.stdin.read(); time.sleep(100)"]


class BrokenTokenizer(ByteTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        raise RuntimeError(f"the secret is {text} {add_special_tokens}")


@asynccontextmanager
async def serving_app(app: Any) -> AsyncIterator[int]:
    server = http_server(app)
    with listen("127.0.0.1", 0) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await server.listening.wait()
        yield listener.getsockname()[1]
        server.end()
        await task


@asynccontextmanager
async def serving(
    command: Sequence[str] | None = None, prompts: Prompts | None = None, api_key: str | None = None
) -> AsyncIterator[int]:
    settings = config(http={"api_key": api_key})
    engine = await EngineClient.spawn(settings.engine, command)
    if command is None:
        await engine.ready()
    async with serving_app(build_app(engine, prompts or Prompts(ByteTokenizer()), settings)) as port:
        yield port
    await engine.close()


async def ask(port: int, method: str, path: str, body: bytes = b"", headers: str = "") -> Answer:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head_lines, _, payload = answer.partition(b"\r\n\r\n")
    first, *lines = head_lines.decode().split("\r\n")
    answered = dict(line.lower().split(": ", 1) for line in lines)
    return Answer(int(first.split()[1]), answered, payload)


async def test_a_replica_that_loads_its_model_is_alive_and_not_ready() -> None:
    async with serving(SILENT_ENGINE) as port:
        assert (await ask(port, "GET", "/health")).status == 200
        assert (await ask(port, "GET", "/v1/models")).status == 200
        assert (await ask(port, "GET", "/load")).json["ready"] is False
        for method, path in [("GET", "/ready"), ("POST", "/v1/completions"), ("POST", "/reset_prefix_cache")]:
            answer = await ask(port, method, path)
            assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "loading", "1")


async def test_a_failure_of_our_own_is_logged_and_tells_the_client_nothing(caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps({"model": MODEL, "prompt": "sesame"}).encode()
    with caplog.at_level(logging.ERROR):
        async with serving(prompts=Prompts(BrokenTokenizer())) as port:
            answer = await ask(port, "POST", "/v1/completions", body)
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert b"sesame" not in answer.body
    assert "the secret is sesame" in caplog.text


async def test_a_key_is_taken_however_its_scheme_is_written() -> None:
    async with serving(SILENT_ENGINE, api_key="Sesame") as port:
        for given, status in [
            ("Bearer Sesame", 200),
            ("bearer Sesame", 200),
            ("BEARER  Sesame", 200),
            ("Bearer sesame", 401),
            ("Basic Sesame", 401),
            ("Sesame", 401),
        ]:
            answer = await ask(port, "GET", "/v1/models", headers=f"Authorization: {given}\r\n")
            assert answer.status == status, given
