"""Requests that are forwarded directly to replicas, and the keys that they need."""

import msgspec
import pytest

from router.tenants.keys import keys_from_options
from tests.router.scripted import CHAT, COMPLETIONS, Call, Script, chat, connect, says, served

GOOD = b'{"choices":[]}'
KEY, ADMIN = "client-key", "admin-key"
ORIGIN = "https://page.example"


@pytest.mark.parametrize(
    "target",
    [
        *("/v1/embeddings", "/v1/embeddings?a=1&b=%20c", "/v1/audio/speech?x=%2e", "/v1/responses/caf%C3%A9/cancel"),
        *("/tokenize", "/detokenize", "/score", "/v1/score", "/rerank", "/v2/rerank", "/pooling", "/classify"),
        "/inference/v1/generate",
    ],
)
async def test_forwarded_requests_are_passed_on_unchanged(target: str) -> None:
    script = Script(says(GOOD))
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        assert (await client.post(target, {"a": 1})).body == GOOD
        [call] = script.calls
        assert (call.method, call.target, call.json) == ("POST", target, {"a": 1})


@pytest.mark.parametrize("target", ["/v1/chat/completions?api-version=1", "/v%31/chat/completions"])
async def test_a_generation_request_is_known_however_its_path_is_written(target: str) -> None:
    script = Script(says(GOOD))
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        assert (await client.post(target, chat())).body == GOOD
        assert script.calls[0].path == CHAT
        assert len(running.router.history.decisions) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings", "/tokenize"])
@pytest.mark.parametrize("given", ["", "Bearer wrong", "Basic Y2xpZW50LWtleQ==", f"Bearer {KEY} ", "bearer"])
async def test_without_the_key_nothing_reaches_a_replica(path: str, given: str) -> None:
    script = Script(says(GOOD))
    keys = tuple(keys_from_options([KEY], None))
    async with served(*script.replicas(1), keys=keys, demand_key=True) as running, connect(running.port) as client:
        headers = {"authorization": given} if given else {}
        answer = await client.post(path, chat(), **headers)
        if given == f"Bearer {KEY} ":  # a space at a header's end is none of its value
            assert answer.status == 200
            return
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert not script.calls


async def test_a_key_of_ours_is_not_shown_to_replicas() -> None:
    script = Script(says(GOOD))
    keys = tuple(keys_from_options([KEY], None))
    async with served(*script.replicas(1), keys=keys, demand_key=True) as running, connect(running.port) as client:
        for path in (CHAT, "/v1/embeddings"):
            assert (await client.post(path, chat(), authorization=f"Bearer {KEY}")).status == 200
        assert [call.header("authorization") for call in script.calls] == [None, None]
        assert all(KEY.encode() not in call.head + call.body for call in script.calls)


async def test_a_key_that_is_not_ours_is_the_replicas() -> None:
    script = Script(says(GOOD))
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        await client.post(CHAT, chat(), authorization="Bearer theirs")
        assert script.calls[0].header("authorization") == "Bearer theirs"


async def test_a_replicas_own_key_is_sent_instead() -> None:
    script = Script(says(GOOD))
    async with served(*script.replicas(1), replica_api_key="its-own") as running, connect(running.port) as client:
        await client.post(CHAT, chat(), authorization="Bearer theirs")
        await client.post("/v1/embeddings", chat())
        assert [call.header("authorization") for call in script.calls] == ["Bearer its-own"] * 2


async def test_requests_beyond_a_keys_limit_are_refused_and_those_after_them_are_not() -> None:
    [key] = keys_from_options([KEY], None)
    limited = msgspec.structs.replace(key, max_in_flight=1)
    takes: list[Call] = []
    script = Script(takes.append, says(GOOD))
    async with (
        served(*script.replicas(1), keys=(limited,), demand_key=True) as running,
        connect(running.port) as first,
        connect(running.port) as second,
    ):
        first.send("POST", CHAT, chat(), authorization=f"Bearer {KEY}")
        while not takes:
            assert (await second.get("/health")).status == 200
        for path in (CHAT, "/v1/embeddings"):
            async with connect(running.port) as third:
                answer = await third.post(path, chat(), authorization=f"Bearer {KEY}")
                assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
                assert int(answer.headers["retry-after"]) >= 1
        takes[0].answer(GOOD)
        assert (await first.answer()).status == 200
        assert (await first.post(CHAT, chat(), authorization=f"Bearer {KEY}")).status == 200
        assert running.router.history.counts.refused["rate_limit_exceeded"] == 2


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_pages_of_other_sites_are_not_let_in_by_default_whatever_a_replica_says(path: str) -> None:
    script = Script(says(GOOD, access_control_allow_origin="*", access_control_allow_credentials="true"))
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        answer = await client.post(path, chat(), origin=ORIGIN)
        assert not [name for name in answer.headers if name.startswith("access-control")]
        answer = await client.ask("OPTIONS", path, origin=ORIGIN, access_control_request_method="POST")
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert (answer.status, answer.error["code"], answer.headers["allow"]) == (405, "origin_not_allowed", "POST")
        assert ORIGIN in answer.error["message"] and "--cors-origin" in answer.error["message"]


async def test_a_page_is_told_how_to_be_let_in_although_it_shows_no_key() -> None:
    preflight = {"origin": ORIGIN, "access_control_request_method": "POST"}
    keys = keys_from_options((KEY,), None)
    async with (
        served(*Script(says(GOOD)).replicas(1), keys=keys, demand_key=True) as running,
        connect(running.port) as client,
    ):
        assert (await client.ask("OPTIONS", CHAT, **preflight)).error["code"] == "origin_not_allowed"
        assert (await client.ask("OPTIONS", CHAT, origin=ORIGIN)).error["code"] == "invalid_api_key"
        assert (await client.ask("OPTIONS", "/nowhere", **preflight)).error["code"] == "invalid_api_key"


@pytest.mark.parametrize("allowed", [ORIGIN, "*"])
async def test_pages_of_the_origins_that_are_named_are_let_in(allowed: str) -> None:
    script = Script(says(GOOD, access_control_allow_origin="*"))
    async with served(*script.replicas(1), cors_origins=(allowed,)) as running, connect(running.port) as client:
        asked = await client.ask(
            "OPTIONS", CHAT, origin=ORIGIN, access_control_request_method="POST",
            access_control_request_headers="authorization,content-type",
        )  # fmt: skip
        assert asked.status == 200
        assert asked.headers["access-control-allow-origin"] in (ORIGIN, "*")
        for answer in (await client.post(CHAT, chat(), origin=ORIGIN), await client.get("/health", origin=ORIGIN)):
            assert answer.headers["access-control-allow-origin"] in (ORIGIN, "*")
        other = (await client.post(CHAT, chat(), origin="https://other.example")).headers
        assert ("access-control-allow-origin" in other) == (allowed == "*")


async def test_the_admin_key_is_not_shown_to_replicas_where_no_key_is_demanded() -> None:
    script = Script(says(GOOD))
    keys = tuple(keys_from_options([], ADMIN))
    async with served(*script.replicas(1), keys=keys) as running, connect(running.port) as client:
        for path in (CHAT, "/v1/embeddings"):
            for given in (ADMIN, "theirs"):
                assert (await client.post(path, chat(), authorization=f"Bearer {given}")).status == 200
        assert [call.header("authorization") for call in script.calls] == [None, "Bearer theirs"] * 2


# ---- salts on routes that are passed on


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/v1/messages", "/v1/pooling", "/v1/embeddings", "/score", "/inference/v1/generate"]
)
@pytest.mark.parametrize(
    "given", ["{}", '{"input":1.50}', '{"cache_salt":7}', '{"cache_salt":"x","cache_\\u0073alt":null}']
)
async def test_each_key_has_a_cache_of_its_own_on_every_route(path: str, given: str) -> None:
    script = Script(says(GOOD))
    keys = tuple(keys_from_options(["one", "two"], None))
    async with served(*script.replicas(1), keys=keys, demand_key=True) as running, connect(running.port) as client:
        for key in ("one", "two", "one"):
            assert (await client.post(path, given.encode(), authorization=f"Bearer {key}")).status == 200
        one, two, again = (call.json["cache_salt"] for call in script.calls)
        assert [one, two, again] == [keys[0].salt, keys[1].salt, keys[0].salt]
        assert all(
            call.body.count(b"salt") == 1 and (b"1.50" in call.body) == ("1.50" in given) for call in script.calls
        )


async def test_a_clients_own_salt_divides_further_on_every_route() -> None:
    script = Script(says(GOOD))
    keys = tuple(keys_from_options([KEY], None))
    async with served(*script.replicas(1), keys=keys, demand_key=True) as running, connect(running.port) as client:
        await client.post("/v1/responses", {"cache_salt": "mine"}, authorization=f"Bearer {KEY}")
        assert script.calls[0].json == {"cache_salt": f"{keys[0].salt}.mine"}


async def test_a_body_that_cannot_have_a_salt_goes_only_where_no_cache_is_read() -> None:
    body = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--b--\r\n'
    form = {"content_type": "multipart/form-data; boundary=b"}
    script = Script(says(GOOD))
    salted = tuple(keys_from_options([KEY], None))
    [shares] = keys_from_options(["shares"], None)
    keys = (*salted, msgspec.structs.replace(shares, name="shares", salt=None))
    async with served(*script.replicas(1), keys=keys, demand_key=True) as running, connect(running.port) as client:
        for path in ("/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/classify"):
            answer = await client.post(path, body, authorization=f"Bearer {KEY}", **form)
            assert answer.status == 400 and "not a JSON object" in answer.error["message"]
        assert not script.calls
        for path in ("/v1/audio/transcriptions", "/tokenize"):
            assert (await client.post(path, body, authorization=f"Bearer {KEY}", **form)).status == 200
        assert (await client.post("/v1/responses", body, authorization="Bearer shares", **form)).status == 200
        assert [call.body for call in script.calls] == [body] * 3
