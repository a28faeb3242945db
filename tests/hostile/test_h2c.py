"""Requests that ask for another protocol on their connection: HTTP/1.1 is answered, and nothing of them is lost."""

import asyncio
import json
import shutil

import pytest

from tests.api.http.test_connection import code
from tests.api.http.test_connection import serving as serving_app
from tests.router.scripted import CHAT, COMPLETIONS, Script, chat, connect, says, served

GOOD = b'{"choices":[]}'
H2C = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAMAAABkAAQAoAAAAAIAAAAA"}
HEAD = (
    b"POST /body HTTP/1.1\r\nHost: test\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: A\r\n"
)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings", "/tokenize"])
async def test_a_body_after_an_upgrade_is_read(path: str) -> None:
    script = Script(says(GOOD))
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        for _ in range(3):
            answer = await client.post(path, chat(prompt="hi"), **H2C)
            assert (answer.status, answer.body) == (200, GOOD)
        assert [call.json["model"] for call in script.calls] == ["m"] * 3
        assert not [name for call in script.calls for name, _ in call.headers if name in ("upgrade", "http2-settings")]


@pytest.mark.parametrize("closing", [b" HTTP/1.0\r\n", b" HTTP/1.1\r\nConnection: close\r\n"])
@pytest.mark.parametrize("body", [b"", b"abc"])
async def test_a_client_that_closes_after_one_request_is_answered(closing: bytes, body: bytes) -> None:
    asked = HEAD.replace(b" HTTP/1.1\r\n", closing) + b"Content-Length: %d\r\n\r\n" % len(body)
    async with serving_app() as served_app:
        for pieces in ((asked + body,), (asked, body)):
            client = await served_app.connect()
            for piece in pieces:
                await client.say(piece)
            answered = await client.rest()
            assert answered.startswith(b"HTTP/1.1 200 ") and answered.endswith(b"\r\n\r\n%d" % len(body)), answered


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_may_come_later_and_in_parts(chunked: bool) -> None:
    body = json.dumps(chat()).encode()
    framing = {"transfer_encoding": "chunked"} if chunked else {"content_length": str(len(body))}
    script = Script(says(GOOD))
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        client.send("POST", CHAT, **H2C, **framing)
        for start in range(0, len(body), 7):
            part = body[start : start + 7]
            await client.writer.drain()
            await asyncio.sleep(0)
            client.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
        client.write(b"0\r\n\r\n" if chunked else b"")
        assert (await client.answer()).status == 200
        assert script.calls[0].json == chat()


async def test_requests_that_follow_in_the_same_packet_are_answered_in_turn() -> None:
    async with serving_app() as served_app:
        client = await served_app.connect()
        one = HEAD + b"Content-Length: %d\r\n\r\n"
        await client.say(
            one % 3 + b"abc" + one % 2 + b"de" + b"GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
        )
        answered = await client.rest()
        assert [answered.count(text) for text in (b"\r\n\r\n3", b"\r\n\r\n2", b"\r\n\r\nok")] == [1, 1, 1]
        assert served_app.app.answered == 3


async def test_many_upgrades_in_one_packet_are_no_burden() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running, connect(running.port) as client:
        client.write(b"GET /%0A HTTP/1.1\r\nHost: r\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n" * 5000)
        assert (await client.answer()).status == 400
        async with connect(running.port) as other:
            assert (await other.post(CHAT, chat())).status == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"CONNECT other:443 HTTP/1.1\r\nHost: other:443\r\n\r\n",
        b"CONNECT /body HTTP/1.1\r\nHost: test\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: test\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_what_is_no_request_for_this_server_is_refused(sent: bytes) -> None:
    async with serving_app() as served_app:
        client = await served_app.connect()
        await client.say(sent)
        assert code(await client.rest())[0] == 400
        assert served_app.app.answered == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_curl_may_ask_for_http_2_with_a_body() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        url = f"http://127.0.0.1:{running.port}{CHAT}"
        command = ("curl", "--silent", "--http2", "--max-time", "10", "--data", json.dumps(chat()), url)
        curl = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        answered, _ = await curl.communicate()
        assert (curl.returncode, answered) == (0, GOOD)
