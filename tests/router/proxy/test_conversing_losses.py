"""Losses under requests of the Messages and Responses APIs, at engines that speak them themselves."""

import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.core import HELD_BYTES
from router.members.spec import ReplicaSpec
from router.proxy.streams.repetition import DIFFERS, Repetition, without_tokens
from tests.api.tokenizers import byte_level, saved
from tests.router.scripted import (
    MODEL,
    Answer,
    Call,
    Client,
    Handler,
    Script,
    Scripted,
    Served,
    connect,
    drops,
    says,
    served,
)

pytestmark = pytest.mark.virtual

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
GOOD = b'{"content":[],"stop_reason":"end_turn","status":"completed"}'


class Resumable(Scripted):
    """A vLLM whose streams the router may continue elsewhere."""

    @property
    def spec(self) -> ReplicaSpec:
        return msgspec.structs.replace(super().spec, engine="vllm", events="off", resume=True)


@asynccontextmanager
async def world(
    script: Script, count: int = 2, *, resume: bool = True, **config: Any
) -> AsyncIterator[tuple[Served, Client]]:
    """Replicas that follow this script, and nothing else than a client's requests."""

    def asked(call: Call) -> Any:
        return call.answer(b"{}", 404) if call.method == "GET" else script(call)

    kind = Resumable if resume else Scripted
    made = [kind(f"r{number}", asked) for number in range(count)]
    async with served(*made, **config) as running, connect(running.port) as client:
        yield running, client


def body(path: str, **fields: Any) -> dict[str, Any]:
    asked = {"input": "hi"} if path == RESPONSES else {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    return {"model": MODEL, **asked, **fields}


def faults(running: Served) -> int:
    return sum(member.server.faults for member in running.router.members)


# ---- streams as vLLM writes them


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({**fields, 'type': kind}, separators=(',', ':'))}\n\n".encode()


def message(name: str, texts: Sequence[str], stop: str | None = "end_turn") -> list[bytes]:
    return [
        event("message_start", message={"id": f"msg_{name}", "content": [], "stop_reason": None}),
        event("content_block_start", content_block={"type": "text", "text": ""}, index=0),
        *(event("content_block_delta", delta={"type": "text_delta", "text": text}, index=0) for text in texts),
        event("content_block_stop", index=0),
        event("message_delta", delta={"stop_reason": stop, "stop_sequence": None}, usage={"output_tokens": 3}),
        event("message_stop"),
    ]


def response(name: str, texts: Sequence[str], status: str = "completed") -> list[bytes]:
    head = {"id": f"resp_{name}", "created_at": 1700000000 + len(name), "output": []}
    item = {"id": f"item_{name}", "type": "message"}
    place = {"output_index": 0, "content_index": 0, "item_id": f"item_{name}"}
    told: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": head}),
        ("response.output_item.added", {"output_index": 0, "item": item}),
        *(("response.output_text.delta", {**place, "delta": text}) for text in texts),
        ("response.output_text.done", {**place, "text": "".join(texts)}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": {**head, "status": status, "output": [item]}}),
    ]
    return [event(kind, **fields, sequence_number=number) for number, (kind, fields) in enumerate(told)]


OF = {MESSAGES: message, RESPONSES: response}


def streams(events: Sequence[bytes], then: str = "end") -> Handler:
    def handle(call: Call) -> None:
        call.begin()
        for one in events:
            call.chunk(one)
        call.end() if then == "end" else call.drop()

    return handle


# ---- before the first byte


@pytest.mark.parametrize(
    "fields",
    [
        {"background": True},
        {"previous_response_id": "resp_1"},
        {"tools": [{"type": "mcp", "server_label": "x"}]},
        {"tools": [{"type": "function", "name": "f"}, {"type": "web_search_preview"}]},
    ],
)
async def test_a_response_with_other_effects_is_sent_once(fields: dict[str, Any]) -> None:
    script = Script(drops, says(GOOD))
    async with world(script) as (_, client):
        answer = await client.post(RESPONSES, body(RESPONSES, **fields))
        assert (answer.status, answer.error["code"], len(script.calls)) == (502, "replica_lost", 1)


@pytest.mark.parametrize(
    "fields",
    [{"background": None}, {"store": True}, {"previous_response_id": None}, {"tools": [{"type": "function"}]}],
)
async def test_what_is_kept_or_called_by_the_client_is_no_effect(fields: dict[str, Any]) -> None:
    script = Script(drops, says(GOOD))
    async with world(script) as (_, client):
        assert (await client.post(RESPONSES, body(RESPONSES, **fields))).body == GOOD


# ---- answers that the engine gave up


async def test_a_message_that_was_given_up_is_given_again() -> None:
    script = Script(says(b'{"content":[{"type":"text","text":"a"}],"usage":{}}'), says(GOOD))
    async with world(script) as (running, client):
        assert (await client.post(MESSAGES, body(MESSAGES))).body == GOOD and faults(running) == 1


TOKENS = '"input_messages":[{"message":"hi","tokens":[1,2],"type":"raw_message_tokens"}],"output_messages":'


@pytest.mark.parametrize(
    ("tokens", "status", "given_up"),
    [
        ('[{"message":"a","tokens":[5,9],"type":"raw_message_tokens"}]', "completed", False),
        ('[{"message":"a","tokens":[5,6],"type":"raw_message_tokens"}]', "completed", True),
        ('[{"message":"a","tokens":[6],"type":"raw_message_tokens"}]', "completed", True),
        ('[{"message":"a","tokens":[9],"type":"raw_message_tokens"}]', "completed", False),
        ('[{"message":"a","tokens":[5,6],"type":"raw_message_tokens"}]', "incomplete", False),
        ("[]", "completed", True),
        ("[]", "incomplete", False),
    ],
)
def test_the_last_token_tells_whether_a_response_was_given_up(tokens: str, status: str, given_up: bool) -> None:
    plain = f'{{"id":"resp_1","status":"{status}","input_messages":null,"output_messages":null}}'
    answer = plain.replace('"input_messages":null,"output_messages":null', TOKENS + tokens)
    assert without_tokens(answer.encode(), {9}) == (plain.encode(), given_up)


async def test_tokens_stay_in_an_answer_whose_length_the_client_has(tmp_path: Path) -> None:
    """They are taken out of an answer that is kept until it is complete. This one is read in many parts."""
    folder = saved(byte_level(), tmp_path, tokenizer_config={"eos_token": "<|endoftext|>"})
    tokens = TOKENS + '[{"message":"a","tokens":[5,6],"type":"raw_message_tokens"}]'
    plain = '{"text":"%s","status":"incomplete","input_messages":null,"output_messages":null}' % ("x" * 2**20)
    whole = plain.replace('"input_messages":null,"output_messages":null', tokens).encode()

    def parts(call: Call) -> None:
        assert call.json["enable_response_messages"]
        call.answer(whole)

    async with world(Script(parts), model_dirs={MODEL: str(folder)}) as (running, client):
        assert (await client.post(RESPONSES, body(RESPONSES))).body == plain.encode()
        running.router.held.take(HELD_BYTES)
        answer = await client.post(RESPONSES, body(RESPONSES))
        running.router.held.take(-HELD_BYTES)
        assert answer.body == whole and int(answer.headers["content-length"]) == len(whole)


def test_an_answer_without_tokens_is_left_alone() -> None:
    answer = b'{"status":"completed","text":"\\"output_messages\\":[]","input_messages":null,"output_messages":null}'
    assert without_tokens(answer, {9}) == (answer, False)


# ---- in the midst of a stream


async def stream_of(client: Client, path: str) -> Answer:
    return await client.post(path, body(path, stream=True, temperature=0))


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("then", ["drop", "end"])
async def test_a_greedy_stream_is_repeated_and_the_client_reads_one(path: str, then: str) -> None:
    whole = OF[path]("a", ["one ", "two ", "three"])
    for cut in range(len(whole)):
        script = Script(streams(whole[:cut], then), streams(OF[path]("bbb", ["one", " tw", "o thr", "ee"])))
        async with world(script) as (running, client):
            answer = await stream_of(client, path)
            assert len(script.calls) == 2 and faults(running) == 1
        if cut == 0:
            continue
        told = [json.loads(part.partition(b"data: ")[2]) for part in answer.body.split(b"\n\n") if part]
        texts = [one["delta"] if path == RESPONSES else one["delta"].get("text", "") for one in told if "delta" in one]
        assert "".join(texts) == "one two three", cut
        kinds = [json.loads(part.partition(b"data: ")[2])["type"] for part in whole if b'"delta"' not in part]
        assert [one["type"] for one in told if "delta" not in one] == kinds
        assert not re.search(rb"(resp|msg)_bbb", answer.body)
        if path == RESPONSES:
            assert len(set(re.findall(rb'"item_(?:a|bbb)"', answer.body))) == 1
            assert [one["sequence_number"] for one in told] == list(range(len(told)))
            assert told[-1]["response"]["created_at"] == told[0]["response"]["created_at"]


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_a_stream_that_another_replica_words_otherwise_ends_with_the_apis_own_error(path: str) -> None:
    script = Script(streams(OF[path]("a", ["one ", "two "])[:4], "drop"), streams(OF[path]("b", ["one ", "too "])))
    async with world(script) as (running, client):
        answer = await stream_of(client, path)
        *_, last, end = answer.body.split(b"\n\n")
        assert not end and last.startswith(b"event: error\n") and DIFFERS.encode() in last
        assert faults(running) == 1, "the second one is not to blame"


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_records_tell_the_first_byte_of_a_stream_and_that_it_broke(path: str) -> None:
    events = OF[path]("a", ["one ", "two "])
    script = Script(streams(events), streams(events[:3], "drop"))
    async with world(script, resume=False) as (running, client):
        for _ in range(2):
            await stream_of(client, path)
        await running.idle()
        whole, broken = [one.record() for one in running.router.history.decisions]
        assert whole.ttft_s is not None and broken.ttft_s is not None
        assert (whole.why, bool(broken.why)) == (None, True)
        assert sum(member.tally(MODEL).broken for member in running.router.members) == 1


async def test_a_stream_that_was_given_up_is_repeated_or_ends_with_an_error() -> None:
    given_up = message("a", ["one ", "two "], None)
    for resume in (True, False):
        script = Script(streams(given_up), streams(message("b", ["one ", "two ", "three"])))
        async with world(script, resume=resume) as (_, client):
            answer = await stream_of(client, MESSAGES)
        assert (b"three" in answer.body, b"event: error" in answer.body) == (resume, not resume)
        assert answer.body.count(b"message_stop\n") == resume


async def test_a_clients_error_in_a_stream_is_passed_on() -> None:
    error = event("error", error={"type": "invalid_request_error", "message": "no"})
    script = Script(streams([error]))
    async with world(script) as (running, client):
        assert (await stream_of(client, MESSAGES)).body == error and faults(running) == 0


async def test_a_stream_that_is_complete_is_not_repeated() -> None:
    for path in OF:
        whole = OF[path]("a", ["one"])
        script = Script(streams(whole, "drop"))
        async with world(script) as (_, client):
            assert (await stream_of(client, path)).body == b"".join(whole) and len(script.calls) == 1


def test_a_stream_too_long_to_be_compared_is_passed_on_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.proxy.streams.repetition.MAX_TEXT", 5)
    repetition = Repetition("messages", ())
    repetition.begin()
    whole = b"".join(message("a", ["one ", "two "]))
    assert repetition.read(whole, True) == (whole, None)
    assert repetition.why_not is not None
