import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from api.openai_responses.output import Output, event_bytes
from api.parsing.parsed import Parsed
from api.responses import encode
from tests.api.parsing.pieces import pieces


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
        elif kind.endswith(("text.done", "arguments.done")):
            assert event.get("text", event.get("arguments")) == text
        else:
            assert kind in ("response.content_part.added", "response.content_part.done")
            assert event["part"]["text"] == ("" if kind.endswith("added") else text)
    assert not is_open
    return items


@given(pieces=pieces(both=False), cut=st.integers(0, 20))
def test_a_stream_and_a_whole_response_have_the_same_items(pieces: list[Parsed], cut: int) -> None:
    output = Output("resp_1")
    events = told(output, pieces)
    assert replayed(events) == [json.loads(encode(item)) for item in output.items()]
    assert len({item["id"] for item in replayed(events)}) == len(output.items())
    # Another replica is told the beginning again, and goes on with the same events.
    other = Output("resp_1")
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
