"""Requests of the Messages API for our own replicas: rendered, placed and resumed as chats are."""

import asyncio
import json
from typing import Any

import pytest

from api.messages.conversion import chat_of
from api.messages.requests import MessagesRequest
from api.native import unpack_ids
from api.openai.requests import ChatRequest
from api.prompts.prompts import Prompts
from api.reading import read
from api.tokens.tokenizer import ByteTokenizer
from router.tenants.keys import Key, digest_of
from tests.router.keeping import Keeping
from tests.router.scripted import MODEL, Call, Script, Scripted, connect, says, served

pytestmark = pytest.mark.virtual

PATH = "/v1/messages"
HEAD, MORE = b"event: message_start\ndata: {}\n\n", b"event: content_block_delta\ndata: {}\n\n"
LAST = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
KEY = "sk-alice"


def body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    return {"model": MODEL, "max_tokens": 8, "system": "Be kind.", "messages": said, **fields}


def tokens_of(asked: dict[str, Any]) -> list[int]:
    return Prompts(ByteTokenizer()).chat(chat_of(read(json.dumps(asked).encode(), MessagesRequest)))


def streams(call: Call) -> None:
    call.begin_frames()
    call.frame(HEAD, 104)
    call.frame(MORE + LAST, 105)
    call.end()


def breaks(call: Call) -> None:
    call.begin_frames()
    call.frame(HEAD, 104)
    call.drop()


def goes_on(call: Call) -> None:
    call.begin_frames()
    call.frame(MORE + LAST, 105)
    call.end()


@pytest.mark.parametrize("size", [1, 40_000], ids=["small", "large"])
async def test_a_replica_gets_the_token_ids_and_the_clients_own_body(size: int) -> None:
    one = Scripted("one", streams, native=True)
    one.control["/load"][1]["max_model_len"] = 10**6
    async with served(one) as running, connect(running.port) as client:
        asked = body("hello " * size, stream=True)
        answer = await client.post(PATH, asked)
        assert answer.body == HEAD + MORE + LAST
        [call] = one.calls
        native, sent = call.native
        assert call.path == PATH and sent["max_tokens"] == 8 and sent["system"] == "Be kind."
        assert unpack_ids(native.prompts[0]) == tokens_of(asked)
        assert native.response_id is not None and native.response_id.startswith("msg_")
        await running.idle()
        [decision] = (one.record() for one in running.router.history.decisions)
        assert decision.tokens_exact


async def test_a_stream_goes_on_at_another_replica() -> None:
    script = Script(breaks, goes_on)
    async with served(*script.replicas(2, native=True)) as running, connect(running.port) as client:
        assert (await client.post(PATH, body(stream=True))).body == HEAD + MORE + LAST
        (before, _), (after, _) = (call.native for call in script.calls)
        assert before.response_id == after.response_id and before.seed == after.seed
        assert [unpack_ids(ids) for ids in after.resume_token_ids] == [[104]]


async def test_a_stream_is_complete_after_its_last_event() -> None:
    async def breaks_after_all(call: Call) -> None:
        call.begin_frames()
        call.frame(HEAD + MORE, 104)
        call.frame(LAST)
        await asyncio.sleep(0)
        call.drop()

    one, two = (Scripted(name, breaks_after_all, native=True) for name in ("one", "two"))
    async with served(one, two) as running, connect(running.port) as client:
        assert (await client.post(PATH, body(stream=True))).body == HEAD + MORE + LAST
        assert len(one.calls) + len(two.calls) == 1


async def test_a_stream_that_nobody_continues_ends_with_an_error_in_the_apis_own_words() -> None:
    one = Scripted("one", breaks, native=True)
    async with served(one, resume=False) as running, connect(running.port) as client:
        answer = await client.post(PATH, body(stream=True))
        assert answer.body.startswith(HEAD + b"event: error\ndata: ")
        error = json.loads(answer.body.removeprefix(HEAD).partition(b"data: ")[2])
        assert (error["type"], error["error"]["code"]) == ("error", "broken_stream")


async def test_the_routers_own_errors_have_the_apis_shape() -> None:
    async with served(Scripted("one", streams, native=True)) as running, connect(running.port) as client:
        answer = await client.post(PATH, body(model="other"))
        assert answer.status == 404 and answer.json["error"]["type"] == "not_found_error"
        answer = await client.post(PATH, body(messages=[]))
        assert answer.status == 400 and answer.json["type"] == "error"
        assert answer.json["error"]["param"] == "messages"


async def test_beside_another_engine_bodies_go_on_as_they_came() -> None:
    ours, other = Scripted("ours", says(b"{}"), native=True), Scripted("other", says(b"{}"))
    async with served(ours, other) as running, connect(running.port) as client:
        asked = body()
        for _ in range(4):
            assert (await client.post(PATH, asked)).status == 200
        assert {call.body for call in ours.calls + other.calls} == {json.dumps(asked).encode()}


async def test_a_key_may_come_in_anthropics_header_and_goes_no_further() -> None:
    keys = (Key(name="alice", digest=digest_of(KEY), salt="a"),)
    one = Scripted("one", streams, native=True)
    async with served(one, keys=keys, demand_key=True) as running, connect(running.port) as client:
        assert (await client.post(PATH, body(stream=True), x_api_key=KEY)).status == 200
        native, _ = one.calls[0].native
        assert native.cache_salt == "a" and KEY.encode() not in one.calls[0].head
        for shown in ({"x_api_key": "sk-other"}, {"x_api_key": KEY, "authorization": f"Bearer {KEY}"}):
            async with connect(running.port) as other:
                refused = await other.post(PATH, body(), **shown)
                assert refused.status == 401 and refused.json["error"]["type"] == "authentication_error"


RESPONSES = "/v1/responses"
DONE_EVENT = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'
FIRST = {"role": "user", "content": "first"}
ANSWERED = {"role": "assistant", "content": "answer"}


def keeping(name: str) -> Keeping:
    return Keeping(name, "warmroute")


async def test_a_response_is_continued_with_the_conversation_of_its_replica() -> None:
    one, two = keeping("one"), keeping("two")
    async with served(one, two) as running, connect(running.port) as client:
        made = (await client.post(RESPONSES, {"model": MODEL, "input": "first"})).json["id"]
        asked = {"model": MODEL, "input": "then", "previous_response_id": made}
        assert (await client.post(RESPONSES, asked)).status == 200
        calls = [call for each in (one, two) for call in each.calls if call.method == "POST"]
        [(native, sent)] = [call.native for call in calls if b"then" in call.body]
        assert [item["content"] for item in sent["previous_items"]] == ["first", "answer"]
        assert sent["previous_response_id"] == made
        chat = [FIRST, ANSWERED, {"role": "user", "content": "then"}]
        assert unpack_ids(native.prompts[0]) == Prompts(ByteTokenizer()).chat(
            read(json.dumps({"model": MODEL, "messages": chat}).encode(), ChatRequest)
        )


async def test_an_item_that_is_named_is_found_at_its_replica() -> None:
    one, two = keeping("one"), keeping("two")
    async with served(one, two) as running, connect(running.port) as client:
        made = (await client.post(RESPONSES, {"model": MODEL, "input": "first"})).json["id"]
        named = {"type": "item_reference", "id": f"msg_{made.removeprefix('resp_')}_7"}
        asked = {"model": MODEL, "input": [named, {"role": "user", "content": "then"}]}
        assert (await client.post(RESPONSES, asked)).status == 400  # that response has no such item
        named["id"] = f"msg_{made.removeprefix('resp_')}_0"
        assert (await client.post(RESPONSES, asked)).status == 200
        calls = [call for each in (one, two) for call in each.calls if call.method == "POST"]
        [(native, sent)] = [call.native for call in calls if b"then" in call.body]
        assert named["id"] in [item.get("id") for item in sent["referenced_items"]] and sent["input"] == asked["input"]
        chat = [ANSWERED, {"role": "user", "content": "then"}]
        assert unpack_ids(native.prompts[0]) == Prompts(ByteTokenizer()).chat(
            read(json.dumps({"model": MODEL, "messages": chat}).encode(), ChatRequest)
        )


@pytest.mark.parametrize("response_id", ["resp_unknown", "resp_x/../../load", "resp_x HTTP/1.1\r\nhost: x", ""])
async def test_a_response_that_is_nowhere_is_said_to_be_gone(response_id: str) -> None:
    one = keeping("one")
    async with served(one) as running, connect(running.port) as client:
        asked = {"model": MODEL, "input": "then", "previous_response_id": response_id}
        answer = await client.post(RESPONSES, asked)
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")
        assert {call.path for call in one.calls} <= {f"{RESPONSES}/resp_unknown/conversation"}


async def test_a_router_that_has_forgotten_a_response_finds_it_unless_keys_are_kept_apart() -> None:
    keys = tuple(Key(name=name, digest=digest_of(name), salt=salt) for name, salt in (("a", "1"), ("b", "2")))
    one = keeping("one")
    one.kept["resp_1"] = [FIRST]
    asked = {"model": MODEL, "input": "then", "previous_response_id": "resp_1"}
    async with served(one) as running, connect(running.port) as client:
        assert (await client.post(RESPONSES, asked)).status == 200
    two = keeping("two")
    async with served(two, keys=keys, demand_key=True) as running:
        made = ""
        for name, status in (("a", 200), ("b", 404), ("a", 200)):
            async with connect(running.port) as client:
                more = {"previous_response_id": made} if made else {}
                sent = {"model": MODEL, "input": "then", **more}
                answer = await client.post(RESPONSES, sent, authorization=f"Bearer {name}")
                assert answer.status == status, name
                made = made or answer.json["id"]
        async with connect(running.port) as client:
            answer = await client.post(RESPONSES, asked, authorization="Bearer a")
            assert answer.status == 404 and "resp_1" in answer.error["message"]


async def test_a_stream_of_responses_is_complete_after_its_last_event_and_numbers_its_error() -> None:
    def breaks_after_all(call: Call) -> None:
        call.begin_frames()
        call.frame(MORE, 104)
        call.frame(DONE_EVENT)
        call.drop()

    asked = {"model": MODEL, "input": "hi", "stream": True}
    async with (
        served(Scripted("one", breaks_after_all, native=True)) as running,
        connect(running.port) as client,
    ):
        assert (await client.post(RESPONSES, asked)).body == MORE + DONE_EVENT
    async with (
        served(Scripted("one", breaks, native=True), resume=False) as running,
        connect(running.port) as client,
    ):
        answer = await client.post(RESPONSES, asked)
        assert answer.body.startswith(HEAD + b"event: error\ndata: ")
        error = json.loads(answer.body.removeprefix(HEAD).partition(b"data: ")[2])
        assert (error["type"], error["code"], error["sequence_number"]) == ("error", "broken_stream", 1)
