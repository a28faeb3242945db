"""The official clients of Anthropic and OpenAI, unchanged, against a router with two replicas of ours behind it."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.chaos.routers import Fleet, RouterProcess, fleet, router
from tests.replica.serving import MODEL

pytestmark = pytest.mark.chaos

MORE = {"ignore_eos": True, "seed": 5}
RATES = (
    *("--set=simulated_prefill_tokens_per_s=1e6", "--set=simulated_decode_tokens_per_s=50"),
    "--set=simulated_step_overhead=0",
)
AT = 30  # events after which the replica is killed


@pytest.fixture(scope="module")
def replicas() -> Iterator[Fleet]:
    with fleet(2, *RATES) as started:
        yield started


@pytest.fixture(scope="module")
def served(replicas: Fleet) -> Iterator[RouterProcess]:
    with router(*replicas.as_options, "--log-level", "error") as running:
        yield running


@pytest.fixture
def client(served: RouterProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def kill_its_replica(served: RouterProcess, replicas: Fleet) -> int:
    """Kill the replica with the only request; return its number."""
    number = [served.status_of(f"r{place}")["load"]["in_flight"] for place in (0, 1)].index(1)
    replicas.kill(number)
    return number


def test_a_stream_of_messages_whose_replica_is_killed_goes_on(served: RouterProcess, replicas: Fleet) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 120, "messages": [{"role": "user", "content": "hello"}]}
    kinds: list[str] = []
    number = -1
    with Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**asked, extra_body=MORE)
        with client.messages.stream(**asked, extra_body=MORE) as stream:
            for event in stream:
                kinds.append(event.type)
                if len(kinds) == AT:
                    number = kill_its_replica(served, replicas)
            answer = stream.get_final_message()
    [told], [expected] = answer.content, whole.content
    assert told.type == expected.type == "text" and told.text == expected.text
    assert kinds.count("message_start") == kinds.count("message_stop") == kinds.count("content_block_start") == 1
    assert answer.usage.output_tokens == 120
    replicas.start(number)


def test_a_stream_of_a_response_whose_replica_is_killed_goes_on(
    client: OpenAI, served: RouterProcess, replicas: Fleet
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": 120, "input": "hello", "extra_body": MORE}
    whole = client.responses.create(**asked).output_text
    events = []
    number = -1
    for event in client.responses.create(**asked, stream=True):
        events.append(event)
        if len(events) == AT:
            number = kill_its_replica(served, replicas)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.output_text == whole
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole
    # The replica that went on with it has it now.
    after = client.responses.create(**asked | {"input": "more"}, previous_response_id=last.response.id)
    assert after.usage is not None and last.response.usage is not None
    assert after.usage.input_tokens > last.response.usage.input_tokens
    replicas.start(number)


def test_a_stored_response_is_there_until_it_is_deleted(client: OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="hello", max_output_tokens=4, extra_body=MORE).id
    assert client.responses.retrieve(made).id == made
    client.responses.delete(made)
    with pytest.raises(openai.NotFoundError, match=made):
        client.responses.create(model=MODEL, input="more", previous_response_id=made)
