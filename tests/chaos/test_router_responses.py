"""OpenAI's own client, unchanged, speaking the Responses API to a router with two replicas of ours behind it."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.chaos.routers import Fleet, RouterProcess
from tests.replica.serving import MODEL

pytestmark = pytest.mark.chaos

MORE = {"ignore_eos": True, "seed": 5}
TURNS = 8


@pytest.fixture
def client(served: RouterProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_every_turn_of_a_stored_conversation_hits_what_was_said_before(client: OpenAI, served: RouterProcess) -> None:
    previous: str | None = None
    before = 0  # tokens of the last prompt
    for turn in range(TURNS):
        answer = client.responses.create(
            model=MODEL,
            input=f"Turn {turn}: " + "tell me more about the sea. " * 20,
            previous_response_id=previous,
            max_output_tokens=16,
            extra_body=MORE,
        )
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens >= before, turn
        before, previous = answer.usage.input_tokens, answer.id
    decisions = served.decisions()[:TURNS]
    assert len({one["chosen"] for one in decisions}) == 1
    assert all(one["tokens_exact"] for one in decisions)
    assert client.responses.retrieve(str(previous)).id == previous
    client.responses.delete(str(previous))
    with pytest.raises(openai.NotFoundError, match=str(previous)):
        client.responses.create(model=MODEL, input="more", previous_response_id=previous)


def test_a_stream_whose_replica_is_killed_goes_on_with_the_same_numbers(
    client: OpenAI, served: RouterProcess, replicas: Fleet
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": 120, "input": "hello", "extra_body": MORE}
    whole = client.responses.create(**asked).output_text
    events = []
    number = -1
    for event in client.responses.create(**asked, stream=True):
        events.append(event)
        if len(events) == 40:
            number = [served.status_of(f"r{place}")["load"]["in_flight"] for place in (0, 1)].index(1)
            replicas.kill(number)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.output_text == whole
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole
    # The replica that went on with it has it now.
    after = client.responses.create(**asked | {"input": "more"}, previous_response_id=last.response.id)
    assert after.usage is not None and last.response.usage is not None
    assert after.usage.input_tokens > last.response.usage.input_tokens
    replicas.start(number)
