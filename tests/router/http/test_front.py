"""A whole router on its socket: connections, start and end, logs."""

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from router.tenants.keys import keys_from_options
from tests.router.loopback import until
from tests.router.scripted import (
    CHAT,
    Call,
    Script,
    chat,
    connect,
    says,
    served,
)

GOOD = b'{"choices":[]}'
HOST = b"host: r\r\n"


async def test_an_upgrade_that_is_not_taken_up_does_no_harm() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running, connect(running.port) as client:
        for path in ("/v1/responses/7", "/health", "/v1/responses/7"):
            answer = await client.get(path, connection="upgrade, http2-settings", upgrade="h2c")
            assert answer.status == 200


@pytest.mark.parametrize("more", [("GET", "/health"), ("POST", CHAT)])
async def test_what_is_sent_after_a_refusal_that_closes_is_dropped(more: tuple[str, str]) -> None:
    keys = tuple(keys_from_options(["key"], None))
    script = Script(says(GOOD))
    async with served(*script.replicas(1), keys=keys, demand_key=True) as running:
        for together in (True, False):
            async with connect(running.port) as client:
                client.send("POST", CHAT, chat())
                if not together:
                    assert (await client.answer()).headers["connection"] == "close"
                client.send(*more, chat(), authorization="Bearer key")
                if together:
                    assert (await client.answer()).status == 401
                assert await client.rest() == b""
        assert not script.calls


@pytest.mark.parametrize("framing", ["content-length: 50000000", "transfer-encoding: chunked"])
async def test_a_request_that_is_not_admitted_yet_is_not_kept_in_memory(framing: str) -> None:
    size, part = 50_000_000, 50_000
    taken: list[Call] = []
    async with (
        served(*Script(taken.append, says(GOOD)).replicas(1), max_body_bytes=size) as running,
        connect(running.port) as client,
    ):
        client.send("POST", CHAT, chat())
        client.write(b"POST /v1/embeddings HTTP/1.1\r\n" + HOST + framing.encode() + b"\r\n\r\n")
        piece = b"%x\r\n%b\r\n" % (part, b" " * part) if "chunked" in framing else b" " * part
        last = piece.replace(b"  ", b"{}", 1)
        end = b"0\r\n\r\n" if "chunked" in framing else b""

        async def send_all() -> None:
            for _ in range(size // part - 1):
                client.write(piece)
                await client.writer.drain()
            client.write(last + end)

        sending = asyncio.create_task(send_all())
        await until(lambda: taken, "the first is asked")
        [connection] = running.front.server.connections.open
        newest: Any = connection
        await until(lambda: newest._read_paused, "the router reads no further")
        assert len(newest._exchange.body) < 1_000_000 and not sending.done()
        taken[0].answer(GOOD)
        assert (await client.answer()).body == GOOD
        assert (await client.answer()).body == GOOD
        await sending
        assert len(taken) == 1


# ---- its end


async def test_what_runs_may_come_to_its_end_while_the_router_drains() -> None:
    taken: list[Call] = []
    script = Script(taken.append)
    async with served(*script.replicas(1)) as running, connect(running.port) as client, connect(running.port) as other:
        client.send("POST", CHAT, chat())
        await until(lambda: taken, "the replica is asked")
        draining = asyncio.create_task(running.front.drain(10))
        await until(lambda: running.router.lifecycle.draining, "the router drains")
        refused = await other.post(CHAT, chat())
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "draining", "1")
        async with connect(running.port) as probe:
            assert (await probe.get("/ready")).status == 503
            assert (await probe.get("/health")).status == 200
        assert not draining.done()
        taken[0].answer(GOOD)
        assert (await client.answer()).body == GOOD
        assert await draining == 0


async def test_a_router_that_drains_waits_until_slow_clients_have_read_their_answers() -> None:
    taken, answer = list[Call](), b'{"choices":["%b"]}' % (b"x" * 3_900_000)
    script = Script(taken.append)
    async with served(*script.replicas(1)) as running, connect(running.port, limit=1024) as client:
        client.send("POST", CHAT, chat())
        await until(lambda: taken, "the replica is asked")
        [connection] = running.front.server.connections.open
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
        taken[0].answer(answer)
        await until(lambda: not running.router.lifecycle.open_requests, "the router has all of the answer")
        assert connection.transport.get_write_buffer_size()
        draining = asyncio.create_task(running.front.drain(10))
        assert not (await asyncio.wait([draining], timeout=0.1))[0]
        assert (await client.answer()).body == answer
        assert await draining == 0


async def test_what_does_not_come_to_its_end_in_time_is_counted() -> None:
    taken: list[Call] = []
    async with served(*Script(taken.append).replicas(1)) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat())
        await until(lambda: taken, "the replica is asked")
        assert await running.front.drain(0.05) == 1
        taken[0].answer(GOOD)
        assert (await client.answer()).body == GOOD


# ---- the access log


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_the_access_log_has_client_request_and_outcome(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    script = Script(says(b'{"usage":{"prompt_tokens_details":{"cached_tokens":16}}}'))
    async with served(*script.replicas(1), access_log=str(log)) as running, connect(running.port) as client:
        answer = await client.post(CHAT + "?q=SECRET", chat("SECRET"), x_request_id="my-id")
        await client.post("/v1/embeddings", {"input": "SECRET"})
        await client.get("/version")
        await client.get("/health")  # probes would drown the rest
    generation, forwarded, ours = lines_of(log)
    assert generation["path"] == CHAT and generation["method"] == "POST" and generation["status"] == 200
    assert (generation["request_id"], generation["model"], generation["replica"]) == ("my-id", "m", "r0")
    assert generation["cached_tokens"] == 16 and generation["sent_bytes"] == len(answer.body)
    assert generation["client"] == "127.0.0.1"
    assert 0 <= float(str(generation["ttft_s"])) <= float(str(generation["duration_s"]))
    assert (forwarded["path"], forwarded["status"]) == ("/v1/embeddings", 200)
    assert (ours["path"], ours["status"]) == ("/version", 200)
    assert "SECRET" not in log.read_text()
    assert os.stat(log).st_mode & 0o077 == 0  # it names clients and keys


async def test_the_access_log_knows_keys_by_their_names_and_refusals_too(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    keys = tuple(keys_from_options(["TOPSECRET"], None))
    script = Script(says(GOOD))
    async with (
        served(*script.replicas(1), access_log=str(log), keys=keys, demand_key=True) as running,
        connect(running.port) as client,
    ):
        await client.post(CHAT, chat(), authorization="Bearer TOPSECRET")
        await client.get("/version", authorization="Bearer WRONGSECRET")
        await client.post(CHAT, chat(), authorization="Bearer WRONGSECRET")
    good, *refused = lines_of(log)
    assert (good["status"], good["key"]) == (200, "key-1")
    assert [(line["path"], line["status"], "key" in line) for line in refused] == [
        ("/version", 401, False),
        (CHAT, 401, False),
    ]
    assert "SECRET" not in log.read_text()


async def test_the_access_log_knows_of_clients_that_left_and_of_what_was_tried_again(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    taken: list[Call] = []
    script = Script(lambda call: call.drop(), says(GOOD), taken.append)
    async with (
        served(*script.replicas(2), access_log=str(log)) as running,
        connect(running.port) as client,
        connect(running.port) as leaving,
    ):
        await client.post(CHAT, chat())
        leaving.send("POST", CHAT, chat())
        await until(lambda: taken, "the replica is asked")
        leaving.leave()
        await running.idle()
    again, left = lines_of(log)
    assert (again["status"], again["retries"]) == (200, 1)
    assert left["client_left"] is True and left["status"] in (0, 499)


async def test_a_router_without_replicas_says_so() -> None:
    async with served() as running, connect(running.port) as client:
        assert (await client.get("/health")).status == 200
        assert (await client.get("/ready")).status == 503
        answer = await client.post(CHAT, chat())
        assert (answer.status, answer.error["code"]) == (503, "no_replica")
        answer = await client.post("/v1/embeddings", {})
        assert (answer.status, answer.error["code"]) == (503, "no_replica")
