"""OpenAI's own client, unchanged, speaking the Responses API to a real replica."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.late import openai
from tests.replica.serving import MODEL, Replica

MORE = {"ignore_eos": True, "seed": 1}


@pytest.fixture
def client(served: Replica) -> Iterator["openai.OpenAI"]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_response_is_the_same_whole_and_streamed(client: "openai.OpenAI") -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "hello", "instructions": "Be brief.", "max_output_tokens": 12}
    whole = client.responses.create(**asked, metadata={"a": "b"}, extra_body=MORE)
    assert whole.id.startswith("resp_") and whole.status == "incomplete" and whole.metadata == {"a": "b"}
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None and whole.usage.output_tokens == 12
    with client.responses.stream(**asked, extra_body=MORE) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.output_text == whole.output_text != ""
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert told == whole.output_text


def test_a_response_is_continued_and_read_until_it_is_deleted(client: "openai.OpenAI") -> None:
    asked = "Tell me of the sea. " * 10
    first = client.responses.create(model=MODEL, input=asked, max_output_tokens=8, extra_body=MORE)
    more: dict[str, Any] = {"model": MODEL, "input": "And then?", "max_output_tokens": 8, "extra_body": MORE}
    second = client.responses.create(**more, previous_response_id=first.id)
    written: list[Any] = [
        {"role": "user", "content": asked},
        *(item.to_dict() for item in first.output),
        {"role": "user", "content": "And then?"},
    ]
    apart = client.responses.create(**more | {"input": written})
    assert second.previous_response_id == first.id and second.output_text == apart.output_text
    assert first.usage is not None and second.usage is not None and apart.usage is not None
    assert second.usage.input_tokens == apart.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    client.responses.delete(first.id)
    for ask in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.create(**more, previous_response_id=first.id),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        assert caught.value.code == "response_not_found" and first.id in str(caught.value)
    third = client.responses.create(**more, previous_response_id=second.id)  # it has all that came before
    assert third.usage is not None and third.usage.input_tokens > second.usage.input_tokens


def test_items_of_earlier_responses_may_be_named_by_their_ids(client: "openai.OpenAI") -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": 8, "extra_body": MORE}
    said: list[Any] = [{"role": "user", "content": "Tell me of the sea."}]
    written = list(said)
    for more in ("And then?", "And then again?"):
        answer = client.responses.create(**asked, input=said)
        assert answer.output_text == client.responses.create(**asked, input=written).output_text
        said += [{"type": "item_reference", "id": item.id} for item in answer.output]
        written += [item.to_dict() for item in answer.output]
        said.append({"role": "user", "content": more})
        written.append(said[-1])
    for missing in ("msg_0123_0", "msg_x"):
        with pytest.raises(openai.APIStatusError, match=r'there is no response "resp_0123"|item_reference'):
            client.responses.create(**asked, input=[{"type": "item_reference", "id": missing}])


def test_a_request_may_say_the_id_of_its_response(client: "openai.OpenAI") -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "hello", "max_output_tokens": 2}
    made = client.responses.create(**asked, extra_body={"request_id": "resp_mine"})
    assert made.id == "resp_mine" and client.responses.retrieve("resp_mine").output == made.output
    for bad in ("mine", "resp_/../x", "resp_" + "x" * 129):
        with pytest.raises(openai.BadRequestError, match="request_id"):
            client.responses.create(**asked, extra_body={"request_id": bad})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_its_name(
    client: "openai.OpenAI", fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, extra_body={"input": "hello"} | fields)
    assert caught.value.param == param
