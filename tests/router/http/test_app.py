"""The API around the generation routes, and its access control."""

import json
import re
import threading
from typing import Any

import pytest

from router.members.spec import ReplicaSpec
from router.tenants.keys import keys_from_options
from tests.router.loopback import until
from tests.router.scripted import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Answer,
    Client,
    Script,
    Scripted,
    chat,
    connect,
    drops,
    named,
    says,
    served,
)

GOOD = b'{"choices":[]}'
KEY, ADMIN = "client-key", "admin-key"
KEYS = tuple(keys_from_options([KEY], ADMIN))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(client: Client, method: str, path: str, **headers: str) -> Answer:
    return await client.ask(method, path, chat() if method == "POST" else None, **headers)


# ---- who may ask


@pytest.mark.parametrize(("method", "path"), [("POST", "/replicas"), ("DELETE", "/replicas/r0"), ("GET", "/v1/models")])
async def test_a_body_beyond_the_limit_is_refused_everywhere(method: str, path: str) -> None:
    async with served(*Script(says(GOOD)).replicas(1), max_body_bytes=1000) as running, connect(running.port) as client:
        answer = await client.ask(method, path, b" " * 2_000_000, host="localhost")
        assert answer.status in (200, 400, 404, 409, 413), path  # what is not read cannot be too large
        assert path != "/replicas" or answer.status == 413


async def test_every_answer_has_the_id_of_its_request() -> None:
    async with served(named("a")) as running:
        for method, path in (("GET", "/"), ("POST", CHAT), ("POST", "/explain"), ("GET", "/docs"), ("GET", "/nothing")):
            async with connect(running.port) as client:
                answer = await ask(client, method, path, x_request_id="mine", host="localhost")
                assert answer.headers["x-request-id"] == "mine", path


# ---- what is not served


@pytest.mark.parametrize("path", ["/nothing", "/v2/models", "/v1", "/replicas/r0", "/debug", "/favicon.ico"])
async def test_an_unknown_path_is_a_404_in_openai_shape(path: str) -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        answer = await client.get(path, host="localhost")
        assert answer.status == 404 or (path == "/replicas/r0" and answer.status == 405)
        assert answer.headers["content-type"] == "application/json" and answer.error["code"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("DELETE", COMPLETIONS, "POST"),
        ("OPTIONS", CHAT, "POST"),
        ("GET", "/tokenize", "POST"),
        ("POST", "/health", "GET"),
        ("POST", "/metrics", "GET"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/models/m", "GET"),
        ("GET", "/explain", "POST"),
        ("POST", "/decisions", "GET"),
        ("POST", "/prefixes", "GET"),
        ("GET", "/replicas/a/drain", "POST"),
    ],
)
async def test_a_wrong_method_is_a_405_that_says_which_is_right(method: str, path: str, allowed: str) -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        answer = await client.ask(method, path, host="localhost")
        assert (answer.status, answer.error["code"], answer.headers["allow"]) == (405, "method_not_allowed", allowed)


# ---- models, health


async def test_the_models_of_all_replicas_are_listed() -> None:
    one = Scripted("one", says(GOOD), models=[{"id": "x", "max_model_len": 512}, {"id": "x-lora", "parent": "x"}])
    other = Scripted("other", says(GOOD), models=["y", "a/b"])
    third = Scripted("third", says(GOOD), models=[{"id": "x", "max_model_len": 1024}])
    async with served(one, other, third) as running, connect(running.port) as client:
        listed = (await client.get("/v1/models")).json
        assert listed["object"] == "list"
        found = {model["id"]: model.get("max_model_len") for model in listed["data"]}
        assert found == {"x": 1024, "x-lora": 512, "y": None, "a/b": None}
        assert {model["id"]: model["parent"] for model in listed["data"] if "parent" in model} == {"x-lora": "x"}
        anthropic = {"anthropic-version": "2023-06-01"}
        page = (await client.get("/v1/models", **anthropic)).json
        assert {model["id"]: model.get("max_input_tokens") for model in page["data"]} == found
        assert (page["first_id"], page["last_id"], page["has_more"]) == (
            *(page["data"][i]["id"] for i in (0, -1)),
            False,
        )
        assert (await client.get("/v1/models/a/b", **anthropic)).json["display_name"] == "a/b"
        assert (await client.get("/v1/models/a/b")).json["id"] == "a/b"
        assert (await client.get("/v1/models/a%2Fb")).json["id"] == "a/b"
        answer = await client.get("/v1/models/none")
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_ready_waits_for_a_replica() -> None:
    one = named("one")
    async with one.running(), served() as running, connect(running.port) as client:
        answer = await client.get("/ready")
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "not_ready", "1")
        assert "no replica" in answer.error["message"]
        running.front.upkeep.add(one.spec)
        await until(lambda: running.member("one").candidate.unavailable is None, "the replica takes requests")
        assert (await client.get("/ready")).status == 200
        running.member("one").health.drain()
        answer = await client.get("/ready")
        assert answer.status == 503 and "one (draining)" in answer.error["message"]


# ---- replicas

LOCAL = {"host": "localhost"}


async def replicas_of(client: Client) -> dict[str, Any]:
    return {one["name"]: one for one in (await client.get("/replicas")).json["replicas"]}


async def test_a_replica_can_be_added_drained_and_removed() -> None:
    new = named("new")
    async with new.running(), served(named("a")) as running, connect(running.port) as client:
        added = await client.post("/replicas", {"url": f"http://127.0.0.1:{new.port}", "name": "new"}, **LOCAL)
        assert (added.status, added.json["name"]) == (201, "new")
        await until(lambda: running.member("new").candidate.unavailable is None, "the replica takes requests")
        assert {(await client.post(CHAT, chat())).json for _ in range(4)} == {"a", "new"}
        drained = await client.post("/replicas/new/drain", **LOCAL)
        assert (drained.status, drained.json["available"], drained.json["why"]) == (200, False, "draining")
        assert {(await client.post(CHAT, chat())).json for _ in range(4)} == {"a"}
        undrained = await client.post("/replicas/new/undrain", **LOCAL)
        assert (undrained.status, undrained.json["available"]) == (200, True)
        assert (await client.post("/replicas/new/resync", **LOCAL)).status == 200
        assert set(await replicas_of(client)) == {"a", "new"}
        assert (await client.ask("DELETE", "/replicas/new", **LOCAL)).json == {"status": "ok"}
        assert set(await replicas_of(client)) == {"a"}
        assert {(await client.post(CHAT, chat())).json for _ in range(4)} == {"a"}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"\xff", "not a JSON object"),
        (b"{}", "the url is missing"),
        (b'{"url":"nonsense"}', "write http://HOST:PORT"),
        (b'{"url":7}', "the url is 7"),
        (b'{"url":"http://h:1","nmae":"x"}', "did you mean 'name'?"),
        (b'{"url":"http://h:1","name":"a b"}', "is not usable"),
        (b'{"url":"http://h:1","name":"a"}', "is there already"),
        (b'{"url":"http://h:1","api_key_env":"NOT_SET_ANYWHERE"}', "only at the router's start"),
        (b'{"url":"http://h:1","api_key":"secret"}', "api_key_env"),
    ],
)
async def test_a_replica_that_cannot_be_is_refused_with_what_to_do(body: bytes, why: str) -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        answer = await client.post("/replicas", body, **LOCAL)
        assert answer.status == 400 and why in answer.error["message"], answer.error
        assert set(running.router.members.by_name) == {"a"}
        running.front.check()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/replicas/x"),
        ("POST", "/replicas/x/drain"),
        ("POST", "/replicas/x/undrain"),
        ("POST", "/replicas/x/resync"),
    ],
)
async def test_a_replica_that_is_not_there_is_a_404_with_those_that_are(method: str, path: str) -> None:
    async with served(named("a"), named("b")) as running, connect(running.port) as client:
        answer = await client.ask(method, path, **LOCAL)
        assert (answer.status, answer.error["code"]) == (404, "replica_not_found")
        assert "'x'" in answer.error["message"] and answer.error["message"].endswith("there are: a, b")


@pytest.mark.parametrize(("method", "path"), [("GET", "/decisions"), ("POST", "/v1/flush_cache")])
async def test_what_comes_by_http_1_0_is_a_proxys_and_administers_nothing(method: str, path: str) -> None:
    for version, status in (("1.0", 403), ("1.1", 200)):
        async with served(named("a")) as running, connect(running.port) as client:
            client.write(f"{method} {path} HTTP/{version}\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode())
            assert (await client.answer()).status == status, version


async def test_of_many_replicas_an_error_names_some() -> None:
    async with served(*[named(f"r{number:02d}") for number in range(12)]) as running, connect(running.port) as client:
        answer = await client.ask("POST", "/replicas/x/drain", **LOCAL)
        assert answer.error["message"].endswith(", r08, r09 and 2 more") and "r10" not in answer.error["message"]


async def test_a_replica_that_discovery_names_cannot_be_removed_here() -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        answer = await client.ask("DELETE", "/replicas/a", **LOCAL)
        assert (answer.status, answer.error["code"]) == (409, "named_by_discovery")
        assert set(running.router.members.by_name) == {"a"}


async def test_a_replica_tells_how_it_is() -> None:
    async with served(named("a"), replica_api_key="SECRET") as running, connect(running.port) as client:
        await client.post(CHAT, chat())
        answer = await client.get("/replicas")
        [one] = answer.json["replicas"]
        assert (one["name"], one["models"], one["engine"], one["state"]) == ("a", [MODEL], "openai", "approximate")
        assert (one["available"], one["why"], one["events"]) == (True, None, None)
        assert one["load"]["in_flight"] == 0
        assert b"SECRET" not in answer.body


# ---- why


async def test_the_session_is_explained_by_what_named_it() -> None:
    async with (
        served(*Script(says(GOOD)).replicas(4), policy="session") as running,
        connect(running.port) as client,
    ):
        for number in range(4):
            asked = chat(prompt_cache_key=f"key-{number}")
            by_key = (await client.post("/explain", asked, **LOCAL)).json
            assert (by_key["session"], by_key["session_from"]) == (f"key-{number}", "prompt_cache_key")
            by_header = (await client.post("/explain", asked, session_id=f"s-{number}", **LOCAL)).json
            assert (by_header["session"], by_header["session_from"]) == (f"s-{number}", "session-id")
            answer = await client.post(CHAT, asked, session_id=f"s-{number}")
            assert answer.headers["x-warmroute-replica"] == by_header["chosen"]
            [decision] = (await client.get("/decisions?limit=1", **LOCAL)).json["decisions"]
            assert decision["session"] == f"s-{number}"
        assert (await client.post("/explain", chat(), **LOCAL)).json["session"] is None


async def test_a_decision_is_explained_without_being_made() -> None:
    script = Script(says(GOOD))
    async with served(*script.replicas(2), policy="cost") as running, connect(running.port) as client:
        prompt = chat("a long prompt " * 200)
        before = (await client.post("/explain", prompt, **LOCAL)).json
        assert before["model"] == MODEL and before["policy"] == "cost" and before["exact"] is False
        assert {one["name"] for one in before["candidates"]} == {"r0", "r1"}
        assert all(one["matched_tokens"] == 0 for one in before["candidates"])
        assert not script.calls and not running.router.history.decisions
        went = (await client.post(CHAT, prompt)).headers["x-warmroute-replica"]
        after = (await client.post("/explain", prompt, **LOCAL)).json
        assert after["chosen"] == went
        matched = {one["name"]: one["matched_tokens"] for one in after["candidates"]}
        assert matched[went] > 0 and sum(matched.values()) == matched[went]
        assert after["hits"][went] and len(script.calls) == 1


SAID = [{"role": "user", "content": "hello " * 40}]
AS_CHAT = {"messages": [{"role": "system", "content": "Be kind."}, *SAID]}
IN_OTHER_APIS = {
    "messages": {"system": "Be kind.", "messages": SAID},
    "responses": {"instructions": "Be kind.", "input": SAID},
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("api", IN_OTHER_APIS)
@pytest.mark.parametrize("query", ["", "?api={}"])
async def test_requests_of_other_apis_are_explained_as_the_chats_that_they_stand_for(
    api: str, native: bool, query: str
) -> None:
    script = Script(says(GOOD))
    async with served(*script.replicas(2, native=native), policy="cost") as running, connect(running.port) as client:
        as_chat = (await client.post("/explain", {"model": MODEL, **AS_CHAT}, **LOCAL)).json
        asked = {"model": MODEL, "max_tokens": 5, **IN_OTHER_APIS[api]}
        found = (await client.post(f"/explain{query.format(api)}", asked, **LOCAL)).json
        assert found["exact"] is as_chat["exact"] is native
        assert found["prompt_tokens"] == as_chat["prompt_tokens"] and found["blocks"] == as_chat["blocks"] > 0
        assert not script.calls and not running.router.history.decisions
        assert not running.router.members.model(MODEL).tokens.approximated


async def test_what_cannot_be_explained_is_refused_by_name() -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        continued = {"model": MODEL, "input": "hi", "previous_response_id": "resp_1"}
        assert (await client.post("/explain", continued, **LOCAL)).error["param"] == "previous_response_id"
        answer = await client.post("/explain?api=other", chat(), **LOCAL)
        assert (answer.status, answer.error["param"]) == (400, "api")


async def test_a_large_body_of_another_api_is_explained_if_it_is_named() -> None:
    async with served(*Script(says(GOOD)).replicas(1, native=True)) as running, connect(running.port) as client:
        asked = {
            "model": MODEL,
            "max_tokens": 5,
            "system": "x" * 100,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "y" * 400_000}]}],
        }
        answer = await client.post("/explain?api=messages", asked, **LOCAL)
        assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("text", ["short", "long" * 1_000_000], ids=["short", "long"])
async def test_an_explained_prompt_is_not_counted(text: str) -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        approximated = running.router.members.model(MODEL).tokens.approximated
        assert (await client.post("/explain", chat(text), **LOCAL)).json["exact"] is False
        assert not approximated
        assert b"approximate_prompts_total{" not in (await client.get("/metrics", **LOCAL)).body
        assert (await client.post(CHAT, chat(text))).status == 200
        assert approximated == {"model": 1}


@pytest.mark.parametrize(("body", "status"), [(b"{", 400), (b"{}", 400), (b'{"model":"none","prompt":"x"}', 404)])
async def test_what_would_be_refused_is_refused_by_the_explanation(body: bytes, status: int) -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        assert (await client.post("/explain", body, **LOCAL)).status == status


@pytest.mark.parametrize("long", [False, True])
async def test_a_long_prompt_is_explained_by_another_process(long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    async with served(named("a")) as running, connect(running.port) as client:
        tokens = running.router.members.model(MODEL).tokens
        draft = tokens.draft

        def watched(*arguments: Any, **more: Any) -> Any:
            threads.append(threading.current_thread())
            return draft(*arguments, **more)

        monkeypatch.setattr(tokens, "draft", watched)
        text = "long" * 1_000_000 if long else "short"
        assert (await client.post("/explain", chat(text), **LOCAL)).json["chosen"] == "a"
    assert threads == ([] if long else [threading.main_thread()])


async def test_the_docs_load_only_files_of_this_server() -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        answer = await client.get("/docs")
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        named_there = re.findall(rb"""(?:href|src|url)[=:]\s*["']([^"']*)["']""", answer.body)
        assert len(named_there) >= 3
        for path in named_there:
            assert b":" not in path and not path.startswith(b"/")
            assert (await client.get(f"/{path.decode()}")).status == 200, path


@pytest.mark.parametrize("name", ["nothing.js", "..", "%2e%2e", "core.py", ""])
async def test_other_files_of_the_package_are_not_served(name: str) -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        assert (await client.get(f"/docs/files/{name}")).status in (400, 404)


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


async def test_a_browser_comes_from_the_root_to_the_dashboard() -> None:
    async with served(named("a"), keys=KEYS, demand_key=True) as running, connect(running.port) as client:
        answer = await client.get("/", accept=BROWSER)
        assert (answer.status, answer.headers["location"]) == (307, "dashboard")
        assert answer.headers["vary"] == "Accept"
        page = await client.get("/dashboard", accept=BROWSER)
        assert page.status == 200 and page.body.startswith(b"<!doctype html>")


@pytest.mark.parametrize("headers", [{}, {"accept": "*/*"}, {"accept": "application/json"}])
async def test_a_program_is_told_at_the_root_what_there_is(headers: dict[str, str]) -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        answer = await client.get("/", **headers)
        assert answer.status == 200 and answer.json["server"] == "warmroute router"
        for place in ("dashboard", "docs", "health", "metrics"):
            assert (await client.get(answer.json[place])).status == 200, place


async def test_the_last_decisions_are_told_the_newest_first() -> None:
    script = Script(says(GOOD), drops, says(GOOD))
    async with served(*script.replicas(2), decisions=3) as running, connect(running.port) as client:
        for n in range(5):
            await client.post(CHAT, chat("SECRET"), x_request_id=f"id-{n}")
        answer = await client.get("/decisions", **LOCAL)
        assert [one["request_id"] for one in answer.json["decisions"]] == ["id-4", "id-3", "id-2"]
        [newest] = (await client.get("/decisions?limit=1", **LOCAL)).json["decisions"]
        assert newest["request_id"] == "id-4" and newest["status"] == 200
        assert newest["chosen"] in ("r0", "r1") and len(newest["candidates"]) == 2
        assert len((await client.get("/decisions?limit=100", **LOCAL)).json["decisions"]) == 3
        assert b"SECRET" not in answer.body


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1.5", "", "%C2%B2", "9" * 5000])
@pytest.mark.parametrize("path", ["/decisions", "/prefixes"])
async def test_an_invalid_limit_is_refused(path: str, limit: str) -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        answer = await client.get(f"{path}?limit={limit}", **LOCAL)
        assert (answer.status, answer.error["param"]) == (400, "limit")


async def test_the_size_of_everything_that_grows_is_told() -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        await client.post(CHAT, chat("a long prompt " * 200))
        told = (await client.get("/debug/index", **LOCAL)).json
        assert set(told["replicas"]) == {"a"} and told["approximate_bytes"] > 0
        assert told["models"][MODEL]["replicas"] == ["a"]


async def test_a_failure_of_our_own_says_nothing_of_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        running.router.members.by_name["a"].spec = None  # nothing that could be asked for does this
        answer = await client.get("/replicas")
        running.router.members.by_name["a"].spec = ReplicaSpec(name="a", url="http://127.0.0.1:1")
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        assert "NoneType" not in json.dumps(answer.json) and "NoneType" in caplog.text


async def test_the_document_says_in_words_what_each_route_does() -> None:
    async with served(named("r0")) as running, connect(running.port, 2**20) as client:
        paths: Any = (await client.get("/openapi.json")).json["paths"]
    told = {path: operation["summary"] for path, operations in paths.items() for operation in operations.values()}
    assert "Past The App" not in told.values()
    assert {"/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"} <= told.keys()
    assert told["/explain"] == "Show where a request would go, and why"
    assert len(set(told.values())) == len(told)
