"""Anthropic's own client, unchanged, against a real replica."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from tests.replica.serving import KEY, MODEL, Replica

if TYPE_CHECKING:  # it takes a second, which each test process would need
    from anthropic import Anthropic
    from anthropic.types import MessageParam

MORE = {"ignore_eos": True, "seed": 1}
HELLO: "list[MessageParam]" = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(served: Replica) -> "Iterator[Anthropic]":
    from anthropic import Anthropic

    with Anthropic(base_url=served.url, api_key="none", max_retries=0) as made:
        yield made


def test_a_message_is_the_same_whole_and_streamed(client: "Anthropic") -> None:
    whole = client.messages.create(model=MODEL, max_tokens=12, messages=HELLO, system="Be brief.", extra_body=MORE)
    assert whole.id.startswith("msg_")
    assert (whole.role, whole.type, whole.stop_reason, whole.stop_sequence) == (
        "assistant",
        "message",
        "max_tokens",
        None,
    )
    assert whole.usage.output_tokens == 12
    with client.messages.stream(
        model=MODEL, max_tokens=12, messages=HELLO, system="Be brief.", extra_body=MORE
    ) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        streamed = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert streamed.content[0].to_dict()["text"] == whole.content[0].to_dict()["text"]
    assert streamed.stop_reason == "max_tokens" and streamed.usage.output_tokens == 12


def test_a_limit_beyond_the_models_length_is_its_length(client: "Anthropic") -> None:
    answer = client.messages.create(
        model=MODEL, max_tokens=10**6, messages=HELLO, timeout=20, extra_body={"ignore_eos": False}
    )
    assert answer.stop_reason in ("end_turn", "max_tokens")


def test_errors_are_those_that_the_client_knows(client: "Anthropic") -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as not_there:
        client.messages.create(model="other", max_tokens=4, messages=HELLO)
    assert isinstance(not_there.value.body, dict)
    assert not_there.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\] is an image"):
        client.messages.create(
            model=MODEL,
            max_tokens=4,
            messages=[{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}],
        )
    with pytest.raises(anthropic.APIStatusError, match="prompt is too long"):
        client.messages.create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "x" * 40_000}])


def test_the_models_are_listed_in_the_clients_own_shape(client: "Anthropic") -> None:
    import anthropic

    [model] = client.models.list()
    assert (model.type, model.id, model.display_name, model.max_input_tokens) == ("model", MODEL, MODEL, 8192)
    assert abs(model.created_at - datetime.now(UTC)) < timedelta(hours=1)
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("else")


def test_the_clients_own_header_shows_the_key(guarded: Replica) -> None:
    import anthropic
    from anthropic import Anthropic

    with Anthropic(base_url=guarded.url, api_key=KEY, max_retries=0) as client:
        assert client.messages.create(model=MODEL, max_tokens=2, messages=HELLO).usage.output_tokens
    with (
        Anthropic(base_url=guarded.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client.messages.create(model=MODEL, max_tokens=2, messages=HELLO)
    twice = {"x-api-key": KEY, "Authorization": "Bearer wrong"}
    assert guarded.ask("GET", "/v1/models", headers=twice).status == 401
