"""Anthropic's own client, unchanged, against a router with two replicas of ours behind it."""

from collections.abc import Iterator

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam

from tests.chaos.routers import Fleet, RouterProcess
from tests.replica.serving import MODEL

pytestmark = pytest.mark.chaos

MORE = {"ignore_eos": True, "seed": 5}
TURNS = 8


@pytest.fixture
def client(served: RouterProcess) -> Iterator[Anthropic]:
    with Anthropic(base_url=served.url, api_key="none", max_retries=0) as made:
        yield made


def text_of(message: anthropic.types.Message) -> str:
    [block] = message.content
    assert block.type == "text"
    return block.text


def test_every_turn_of_a_conversation_hits_what_was_said_before(client: Anthropic, served: RouterProcess) -> None:
    said: list[MessageParam] = []
    before = 0  # tokens of the last prompt
    for turn in range(TURNS):
        said.append({"role": "user", "content": f"Turn {turn}: " + "tell me more about the sea. " * 20})
        answer = client.messages.create(model=MODEL, max_tokens=16, system="Be kind.", messages=said, extra_body=MORE)
        said.append({"role": "assistant", "content": text_of(answer)})
        cached = answer.usage.cache_read_input_tokens or 0
        assert cached >= before, turn
        before = answer.usage.input_tokens + cached
    decisions = served.decisions()[:TURNS]
    assert len({one["chosen"] for one in decisions}) == 1
    assert all(one["tokens_exact"] for one in decisions)


def test_a_stream_whose_replica_is_killed_goes_on_with_the_same_events(
    client: Anthropic, served: RouterProcess, replicas: Fleet
) -> None:
    asked = {"model": MODEL, "max_tokens": 120, "messages": [{"role": "user", "content": "hello"}]}
    whole = text_of(client.messages.create(**asked, extra_body=MORE))  # type: ignore[call-overload]
    kinds: list[str] = []
    with client.messages.stream(**asked, extra_body=MORE) as stream:  # type: ignore[arg-type]
        for event in stream:
            kinds.append(event.type)
            if len(kinds) == 40:
                running = [served.status_of(f"r{number}")["load"]["in_flight"] for number in (0, 1)]
                number = running.index(1)
                replicas.kill(number)
        answer = stream.get_final_message()
    assert text_of(answer) == whole
    assert kinds.count("message_start") == kinds.count("message_stop") == kinds.count("content_block_start") == 1
    assert answer.usage.output_tokens == 120
    replicas.start(number)
