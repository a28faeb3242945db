import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from api.messages.answers import error_body
from api.messages.blocks import Blocks
from api.parsing.parsed import CallDelta, Parsed
from api.responses import encode, named_event
from tests.api.parsing.pieces import pieces

THOUGHT, TEXT = Parsed(reasoning="Hm. "), Parsed(content="I look. ")
CALL = Parsed(calls=(CallDelta(0, "c0", "look", ""),))
ARGUMENTS = [Parsed(calls=(CallDelta(0, "c0", None, part),)) for part in ('{"at"', ": 1}")]
SECOND = Parsed(calls=(CallDelta(1, "c1", "stop", "{}"),))


def events(blocks: Blocks, pieces: list[Parsed]) -> list[Any]:
    found = [event for piece in pieces for event in blocks.add(piece)]
    return [{"type": kind, **json.loads(encode(fields))} for kind, fields in (*found, *blocks.finish())]


def replayed(said: list[Any]) -> list[dict[str, Any]]:
    """The blocks that a client puts together; at any time at most one is open."""
    made: list[dict[str, Any]] = []
    is_open = False
    for event in said:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(made)
                made.append(dict(event["content_block"]) | {"json": ""})
                is_open = True
            case "content_block_delta":
                assert is_open and event["index"] == len(made) - 1
                delta = event["delta"]
                for name in ("text", "thinking", "signature"):
                    if name in delta:
                        made[-1][name] += delta[name]
                made[-1]["json"] += delta.get("partial_json", "")
            case "content_block_stop":
                assert is_open and event["index"] == len(made) - 1
                is_open = False
    assert not is_open
    for block in made:
        arguments = block.pop("json")
        if block["type"] == "tool_use" and arguments:
            block["input"] = json.loads(arguments)
    return made


def test_thoughts_text_and_calls_are_blocks_of_their_own() -> None:
    blocks = Blocks("msg_1")
    said = events(blocks, [THOUGHT, THOUGHT, TEXT, TEXT, CALL, *ARGUMENTS, SECOND])
    made = replayed(said)
    assert [block["type"] for block in made] == ["thinking", "text", "tool_use", "tool_use"]
    assert made[0]["thinking"] == "Hm. Hm. " and made[0]["signature"]
    assert (made[2]["id"], made[2]["name"], made[2]["input"]) == ("c0", "look", {"at": 1})
    assert json.loads(_encoded(blocks)) == made


def _encoded(blocks: Blocks) -> bytes:
    return b"[" + b",".join(map(encode, blocks.content())) + b"]"


@given(pieces=pieces(both=True), cut=st.integers(0, 20))
def test_a_stream_and_a_whole_message_have_the_same_blocks(pieces: list[Parsed], cut: int) -> None:
    blocks = Blocks("msg_1")
    said = events(blocks, pieces)
    assert replayed(said) == json.loads(_encoded(blocks))
    # Another replica is told the beginning again, and goes on with the same events.
    other = Blocks("msg_1")
    before = [event for piece in pieces[:cut] for event in other.add(piece)]
    assert said[len(before) :] == events(other, pieces[cut:])


def test_arguments_that_break_off_are_an_empty_object_in_a_whole_message() -> None:
    blocks = Blocks("msg_1")
    events(blocks, [CALL, ARGUMENTS[0]])
    assert json.loads(_encoded(blocks))[0]["input"] == {}


def test_an_event_has_its_type_in_its_name_and_in_its_data() -> None:
    [start, *_] = Blocks("msg_1").add(TEXT)
    name, data, *_ = named_event(*start).split(b"\n")
    assert name == b"event: content_block_start"
    assert json.loads(data.removeprefix(b"data: "))["type"] == "content_block_start"


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, None, "invalid_request_error"),
        (401, None, "authentication_error"),
        (404, None, "not_found_error"),
        (413, None, "request_too_large"),
        (429, "queue_full", "rate_limit_error"),
        (500, None, "api_error"),
        (503, "draining", "overloaded_error"),
    ],
)
def test_an_error_has_the_shape_of_the_api(status: int, code: str | None, kind: str) -> None:
    body = json.loads(error_body(ApiError(status, "no \ud800", code=code)))
    assert body["type"] == "error"
    assert body["error"] == {"type": kind, "message": "no ?", "param": None, "code": code}


def test_a_prompt_that_is_too_long_is_said_in_the_words_that_agents_look_for() -> None:
    error = ApiError(400, "the limit is 8", code="context_length_exceeded")
    assert json.loads(error_body(error))["error"]["message"] == "prompt is too long: the limit is 8"
