"""Odd spellings of a path: each is either refused or the same path to every reader."""

import pytest

from api.native import REQUEST_TYPE, Native, envelope
from router.tenants.keys import keys_from_options
from tests.router.scripted import CHAT, Client, Script, chat, connect, says, served

GOOD = b'{"choices":[]}'
KEY, ADMIN = "client-key", "admin-key"
KEYS = tuple(keys_from_options([KEY], ADMIN))
GUARDED = [
    ("POST", "/replicas", b'{"url":"http://127.0.0.1:9"}'),
    ("GET", "/prefixes", b""),
    ("GET", "/decisions", b""),
    ("POST", "/explain", b'{"model":"m","messages":[]}'),
    ("GET", "/dashboard/feed", b""),
    ("GET", "/debug/index", b""),
    ("POST", "/v1/load_lora_adapter", b"{}"),
    ("POST", "/v1/update_weights", b"{}"),
]


async def spoken(client: Client, method: str, target: str, body: bytes = b"", **headers: str) -> int:
    """The answer's status; not its body, as an answer that should not be may have no end."""
    client.send(method, target, body, **headers)
    status, _ = await client.head()
    return status


@pytest.mark.parametrize(("method", "path", "body"), GUARDED, ids=[path for _, path, _ in GUARDED])
@pytest.mark.parametrize("headers", [{}, {"authorization": f"Bearer {KEY}"}, {"origin": "https://page.example"}])
@pytest.mark.parametrize("demand_key", [True, False])
async def test_a_newline_at_the_end_of_a_path_opens_nothing(
    method: str, path: str, body: bytes, headers: dict[str, str], demand_key: bool
) -> None:
    script = Script(says(GOOD))
    async with served(*script.replicas(1), keys=KEYS, demand_key=demand_key) as running:
        async with connect(running.port) as client:
            assert await spoken(client, method, path + "%0A", body, **headers) == 400
        assert len(running.router.members.by_name) == 1
        assert not script.calls


async def test_a_client_gives_itself_no_priority_and_no_cache_of_others() -> None:
    script = Script(says(GOOD))
    body = envelope(Native(priority=-1e6, cache_salt=KEYS[0].salt)) + b'{"model":"m","messages":[]}'
    async with served(*script.replicas(1, native=True), keys=KEYS, demand_key=True) as running:
        for target in (CHAT + "%0A", CHAT, "/v1/embeddings", "/v1/chat%2Fcompletions"):
            async with connect(running.port) as client:
                headers = {"content_type": REQUEST_TYPE, "authorization": f"Bearer {KEY}"}
                assert await spoken(client, "POST", target, body, **headers) in (400, 415)
        assert not script.calls


async def test_a_refused_path_is_quoted_and_counted_and_the_router_continues() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        async with connect(running.port) as client:
            answer = await client.get("/replicas%0A", host="localhost")
            assert (answer.status, answer.error["code"]) == (400, "invalid_path")
            assert '"/replicas%0A"' in answer.error["message"]
            assert running.router.history.counts.refused["invalid_path"] == 1
        async with connect(running.port) as client:
            assert (await client.post(CHAT, chat())).status == 200


async def test_trailers_are_no_headers_of_the_request() -> None:
    script = Script(says(GOOD))
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        for path in (CHAT, "/v1/embeddings"):
            body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
            client.send("POST", path, transfer_encoding="chunked", trailer="content-type")
            client.write(b"%x\r\n%b\r\n0\r\n" % (len(body), body))
            client.write(b"content-type: %b\r\nx-own: 1\r\nupgrade: h2c\r\n\r\n" % REQUEST_TYPE.encode())
            assert (await client.answer()).status == 200
            call = script.calls[-1]
            assert call.header("x-own") is None and REQUEST_TYPE not in (call.header("content-type") or "")
