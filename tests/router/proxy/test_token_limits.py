"""Keys with limits of tokens: what their requests are charged, and what the headers of their answers say."""

import json
from typing import Any

import msgspec
import pytest

from router.tenants.keys import Key, keys_from_options
from tests.router.loopback import until
from tests.router.scripted import CHAT, COMPLETIONS, Call, Script, Served, connect, served

pytestmark = pytest.mark.virtual

KEY = "client-key"
PROMPT = 9  # tokens: a beginning, and one for each byte
DAY = 1000
AS_KEY = {"authorization": f"Bearer {KEY}"}
REMAINING = "x-ratelimit-remaining-tokens"


def key(**limits: float) -> Key:
    [made] = keys_from_options([KEY], None)
    return msgspec.structs.replace(made, **limits)


def body(*, stream: bool = False, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "12345678", "stream": stream, **more}


def limited(script: Script, *, native: bool = True, **limits: float) -> Any:
    wanted = {"tokens_per_day": DAY, "cached_token_weight": 0.5, **limits}
    return served(*script.replicas(1, native=native), keys=(key(**wanted),), demand_key=True)


def left(running: Served) -> int:
    account = running.router.admission.accounts["key-1"]
    with account.shared.opened("key-1") as state:
        used: float = account.limits[-1].amount(state.today)
    return round(DAY - used)


async def test_an_answer_in_one_piece_tells_what_is_left_after_it() -> None:
    def says(call: Call) -> None:
        call.begin_frames("application/json", x_warmroute_cached_tokens="4")
        call.frame(b"{}", 1, 2, 3)
        call.end()

    async with limited(Script(says)) as running, connect(running.port) as client:
        answer = await client.post(COMPLETIONS, body(), **AS_KEY)
        assert answer.status == 200
        assert answer.headers[REMAINING] == str(DAY - 5 - 2 - 3)
        assert answer.headers["x-ratelimit-limit-tokens"] == str(DAY)
        assert left(running) == DAY - 10


async def test_a_stream_tells_what_is_left_when_it_begins_and_is_charged_to_its_end() -> None:
    async def says(call: Call) -> None:
        call.begin_frames(x_warmroute_cached_tokens="4")
        call.frame(b"data: 1\n\n", 1)
        await until(lambda: bool(heads), "the client has the head")
        call.frame(b"data: 2\n\ndata: [DONE]\n\n", 2, 3)
        call.end()

    heads: list[dict[str, str]] = []
    async with limited(Script(says)) as running, connect(running.port) as client:
        client.send("POST", COMPLETIONS, body(stream=True), **AS_KEY)
        heads.append((await client.head())[1])
        assert heads[0][REMAINING] == str(DAY - 7)
        assert len([part async for part in client.chunks()]) >= 2
        await running.idle()
        assert left(running) == DAY - 10


async def test_a_client_that_leaves_is_charged_for_what_was_generated_so_far() -> None:
    async def says(call: Call) -> None:
        call.begin_frames(x_warmroute_cached_tokens="0")
        call.frame(b"data: 1\n\n", 1, 2)
        await call.left()

    async with limited(Script(says)) as running, connect(running.port) as client:
        client.send("POST", COMPLETIONS, body(stream=True), **AS_KEY)
        await client.head()
        await client.chunk()
        client.leave()
        await running.idle()
        assert left(running) == DAY - PROMPT - 2


@pytest.mark.parametrize("status", [400, 500])
async def test_a_request_that_the_replica_refuses_costs_no_tokens(status: int) -> None:
    script = Script(lambda call: call.answer(b"{}", status))
    async with limited(script, requests_per_day=5) as running, connect(running.port) as client:
        answer = await client.post(COMPLETIONS, body(), **AS_KEY)
        assert (answer.status, answer.headers[REMAINING]) == (status, str(DAY))
        assert answer.headers["x-ratelimit-remaining-requests"] == "4"


async def test_a_prompt_larger_than_what_is_left_reaches_no_replica() -> None:
    script = Script(lambda call: call.answer())
    async with limited(script, tokens_per_day=8, requests_per_day=5) as running, connect(running.port) as client:
        answer = await client.post(COMPLETIONS, body(), **AS_KEY)
        assert (answer.status, answer.error["code"], answer.error["param"]) == (
            429,
            "rate_limit_exceeded",
            "tokens_per_day",
        )
        assert answer.headers["x-should-retry"] == "false"
        assert (answer.headers[REMAINING], answer.headers["x-ratelimit-remaining-requests"]) == ("8", "5")
        assert not script.calls
        assert (await client.post(COMPLETIONS, body(prompt="1"), **AS_KEY)).status == 200
    assert len(script.calls) == 1


USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 40}}
EVENTS = [{"choices": [{"index": 0, "delta": {"content": "a"}}]}] * 5


def events(*found: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in found) + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("content_type", "answer", "used"),
    [
        ("application/json", json.dumps({"usage": USAGE}).encode(), 60 + 20 + 7),
        ("text/event-stream", events(*EVENTS, {"choices": [], "usage": USAGE}), 60 + 20 + 7),
        ("text/event-stream", events(*EVENTS, EVENTS[0]), 3 + 5),  # counted by its events
    ],
)
async def test_an_engines_own_figures_count(content_type: str, answer: bytes, used: int) -> None:
    script = Script(lambda call: call.answer(answer, content_type=content_type))
    async with limited(script, native=False) as running, connect(running.port) as client:
        found = await client.post(CHAT, {"model": "m", "messages": [], "stream": b"data" in answer}, **AS_KEY)
        assert found.body == answer
        await running.idle()
        if b"usage" in answer:
            assert left(running) == DAY - used
        else:
            assert DAY - 20 < left(running) < DAY - 5


async def test_embeddings_are_charged_when_the_engine_tells_their_tokens() -> None:
    script = Script(lambda call: call.answer(b'{"data":[],"usage":{"prompt_tokens":12,"total_tokens":12}}'))
    async with limited(script, native=False) as running, connect(running.port) as client:
        answer = await client.post("/v1/embeddings", {"model": "m", "input": "x"}, **AS_KEY)
        assert answer.status == 200
        await running.idle()
        assert left(running) == DAY - 12


async def test_what_the_router_answers_itself_has_the_headers_too() -> None:
    script = Script(lambda call: call.answer())
    async with limited(script, requests_per_day=1) as running, connect(running.port) as client:
        answer = await client.get("/v1/models", **AS_KEY)
        assert (answer.headers[REMAINING], answer.headers["x-ratelimit-remaining-requests"]) == (str(DAY), "0")
        answer = await client.get("/v1/models", **AS_KEY)
        assert (answer.status, answer.error["param"]) == (429, "requests_per_day")
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_key_without_limits_gets_no_headers() -> None:
    script = Script(lambda call: call.answer())
    async with served(*script.replicas(1), keys=(key(),), demand_key=True) as running, connect(running.port) as client:
        for answer in (await client.post(CHAT, body(messages=[]), **AS_KEY), await client.get("/v1/models", **AS_KEY)):
            assert not [name for name in answer.headers if "ratelimit" in name]
        assert running.router.admission.accounts == {}
