import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.openai_responses.output import Output, event_bytes
from api.openai_responses.tools import Called, arguments_of, input_of
from api.parsing.parsed import CallDelta, Parsed
from api.responses import encode
from tests.api.parsing.pieces import pieces

TOOLS = {"patch": Called("patch", "files", is_custom=True)}


def told(output: Output, pieces: list[Parsed]) -> list[Any]:
    events = [event for piece in pieces for event in output.add(piece)] + list(output.finish())
    return [json.loads(event_bytes(event, number).partition(b"data: ")[2]) for number, event in enumerate(events)]


def replayed(events: list[Any]) -> list[dict[str, Any]]:
    """The output that a client puts together; each item and part is opened and closed once, in order."""
    items: list[dict[str, Any]] = []
    text, is_open = "", False
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert not is_open and event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            text, is_open = "", True
            continue
        assert is_open and event["output_index"] == len(items) - 1
        if kind == "response.output_item.done":
            assert event["item"]["id"] == items[-1]["id"]
            items[-1], is_open = event["item"], False
        elif kind.endswith(".delta"):
            text += event["delta"]
        elif kind.endswith(("text.done", "arguments.done", "input.done")):
            assert event.get("text", event.get("arguments", event.get("input"))) == text
        else:
            assert kind in ("response.content_part.added", "response.content_part.done")
            assert event["part"]["text"] == ("" if kind.endswith("added") else text)
    assert not is_open
    return items


@given(pieces=pieces(both=False), cut=st.integers(0, 20))
def test_a_stream_and_a_whole_response_have_the_same_items(pieces: list[Parsed], cut: int) -> None:
    output = Output("resp_1", TOOLS)
    events = told(output, pieces)
    assert replayed(events) == [json.loads(encode(item)) for item in output.items()]
    assert len({item["id"] for item in replayed(events)}) == len(output.items())
    # Another replica is told the beginning again, and goes on with the same events.
    other = Output("resp_1", TOOLS)
    before = [event for piece in pieces[:cut] for event in other.add(piece)]
    after = [event for piece in pieces[cut:] for event in other.add(piece)] + list(other.finish())
    again = [event_bytes(event, number) for number, event in enumerate(before + after)]
    assert [json.loads(event.partition(b"data: ")[2]) for event in again] == events


def test_an_item_that_breaks_off_says_so() -> None:
    output = Output("resp_1")
    list(output.add(Parsed(reasoning="Hm.")))
    list(output.add(Parsed(content="It i")))
    *_, done = output.finish("incomplete")
    assert done[1]["item"].status == "incomplete"
    assert [item.status for item in output.items("incomplete")] == ["completed", "incomplete"]


def test_a_call_of_a_custom_tool_has_its_input_as_text() -> None:
    output = Output("resp_1", TOOLS)
    piece = Parsed(calls=(CallDelta(0, "c0", "patch", '{"input": "a'),))
    events = told(output, [piece, Parsed(calls=(CallDelta(0, "c0", None, '\\n"}'),))])
    assert [event["type"] for event in events] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    call = {"call_id": "c0", "id": "ctc_1_0", "name": "patch", "namespace": "files", "type": "custom_tool_call"}
    assert events[0]["item"] == call | {"status": "in_progress", "input": ""}
    assert events[-1]["item"] == call | {"status": "completed", "input": "a\n"}


@given(text=st.text())
def test_an_input_is_the_text_in_its_arguments(text: str) -> None:
    for arguments in (arguments_of(text), json.dumps({"input": text}), f' {{ "input" : {json.dumps(text)} }}'):
        assert input_of(arguments) == text


@pytest.mark.parametrize("arguments", ['{"patch": "x"}', '{"input": 7}', '{"input": "ab', '{"input": "\\ud83d"}'])
def test_arguments_of_another_form_are_the_input_themselves(arguments: str) -> None:
    assert input_of(arguments) == arguments
