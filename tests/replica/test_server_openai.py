"""OpenAI's own client, unchanged, against a real replica."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.late import openai
from tests.replica.serving import MODEL, Replica

IGNORE_EOS = {"ignore_eos": True}
HELLO: list["openai.types.chat.ChatCompletionMessageParam"] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(served: Replica) -> Iterator["openai.OpenAI"]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def asynchronous(served: Replica) -> AsyncIterator["openai.AsyncOpenAI"]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: "openai.OpenAI") -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL) == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"


async def test_streamed_chat_with_usage(asynchronous: "openai.AsyncOpenAI") -> None:
    stream = await asynchronous.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=12,
        n=2,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=IGNORE_EOS,
    )
    chunks = [chunk async for chunk in stream]
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [len(text) for text in texts] == [12, 12]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


def test_errors_are_the_classes_that_applications_catch(client: "openai.OpenAI") -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="hello")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=MODEL, prompt="hello", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.APIStatusError) as long:
        client.completions.create(model=MODEL, prompt="x" * 9000)
    assert (long.value.status_code, long.value.code) == (400, "context_length_exceeded")
