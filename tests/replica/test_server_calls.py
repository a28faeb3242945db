"""Calls and reasoning over HTTP, and on another replica in the middle of a call.

The simulated engine says letters, spaces and dots: the test gives it the beginning of a call to go on with.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from api.native import pack_ids
from tests.replica.serving import MODEL, Replica, replica
from tests.replica.test_server_resume import frames, payload, said, without_cached

PATH = "/v1/chat/completions"
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
TOOLS = [{"type": "function", "function": {"name": "write"}}]
BEGINNING = '<think>Hm.</think>I write.\n<tool_call>{"name": "write", "arguments": {"text": "'
END = BEGINNING + 'ok"}}</tool_call>'
EOS = 257


@pytest.fixture(scope="module")
def parsing() -> Iterator[Replica]:
    with replica(http=PARSERS) as running:
        yield running


@pytest.fixture(scope="module")
def successor() -> Iterator[Replica]:
    with replica(http=PARSERS) as running:
        yield running


def request(**fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 200, "seed": 3}
    return {"model": MODEL, **asked, **fields}


def answered(served: Replica, body: dict[str, Any], said: list[int]) -> Any:
    """The whole answer of a replica, of which another one has said this."""
    return json.loads(payload(frames(served, PATH, body, [pack_ids(said)])))


def test_a_call_is_a_call_to_the_client(parsing: Replica) -> None:
    [choice] = answered(parsing, request(), [*END.encode(), EOS])["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"], choice["finish_reason"]) == ("Hm.", "I write.", "tool_calls")
    assert message["tool_calls"][0]["function"] == {"name": "write", "arguments": '{"text": "ok"}'}


@pytest.mark.parametrize("before", [1, 30, len(BEGINNING)])
def test_a_stream_cut_within_a_call_continues_byte_for_byte(parsing: Replica, successor: Replica, before: int) -> None:
    body = request(stream=True, max_tokens=before + 40)
    beginning = pack_ids(BEGINNING.encode()[:before])
    whole = frames(parsing, PATH, body, [beginning])
    for cut in range(0, len(whole), 3):
        after = frames(successor, PATH, body, [beginning + said(whole[:cut], 1)[0]])
        assert without_cached(payload(whole[:cut]) + payload(after)) == without_cached(payload(whole)), cut
