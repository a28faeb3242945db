"""OpenAI's own client, unchanged, against a router with a replica behind it: what we claim of the API, with keys."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from router.tenants.keys import digest_of
from tests.chaos.replicas import Command, command
from tests.chaos.routers import RouterProcess, router
from tests.events.processes import wait_until
from tests.replica.serving import MODEL

pytestmark = pytest.mark.chaos

KEY, OTHER, POOR, REPLICAS_KEY = "sk-of-alice", "sk-of-bob", "sk-of-carol", "sk-between-us"
IGNORE_EOS = {"ignore_eos": True}
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
LONG = "The same long beginning of two tenants' prompts. " * 10
RATES = (
    *("--set=simulated_prefill_tokens_per_s=1e6", "--set=simulated_decode_tokens_per_s=2000"),
    *("--set=simulated_step_overhead=0", "--log-level", "warning"),
)


@pytest.fixture(scope="module")
def replica() -> Iterator[Command]:
    with command(*RATES, "--api-key", REPLICAS_KEY, "--replica-name", "r0") as started:
        yield started


@pytest.fixture(scope="module")
def served(replica: Command, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    names = {"alice": KEY, "bob": OTHER, "carol": POOR}
    limits = {"carol": "requests_per_minute = 6\n"}
    keys.write_text(
        "".join(
            f'[keys.{name}]\nkey_sha256 = "{digest_of(key).hex()}"\n{limits.get(name, "")}'
            for name, key in names.items()
        )
    )
    options = ("--api-keys", keys, "--replica-api-key", REPLICAS_KEY, "--log-level", "warning")
    with router("--replica", replica.url, *options) as running:
        yield running


def as_client(served: RouterProcess, key: str = KEY) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(served: RouterProcess) -> Iterator[OpenAI]:
    with as_client(served) as made:
        yield made


@pytest.fixture
async def asynchronous(served: RouterProcess) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL) == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"


async def test_streamed_chat_with_usage(asynchronous: AsyncOpenAI) -> None:
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


async def test_a_client_that_stops_listening_ends_the_work(replica: Command, asynchronous: AsyncOpenAI) -> None:
    stream = await asynchronous.completions.create(
        model=MODEL, prompt="hello", max_tokens=8000, stream=True, extra_body=IGNORE_EOS
    )
    async for _ in stream:
        break
    await stream.close()
    headers = {"authorization": f"Bearer {REPLICAS_KEY}"}
    idle = lambda: not replica.ask("GET", "/load", headers=headers).json["load"]["running"]  # noqa: E731
    wait_until(idle, "the replica has stopped")


def test_the_raw_response_says_what_happened(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="hello", max_tokens=2, extra_headers={"x-request-id": "my-own-id"}
    )
    assert raw.headers["x-request-id"] == "my-own-id"
    assert raw.headers["x-warmroute-replica"] and raw.headers["content-type"] == "application/json"


def test_no_hits_are_predicted_for_a_prompt_that_is_scored(replica: Command) -> None:
    with (
        router("--replica", replica.url, "--replica-api-key", REPLICAS_KEY, "--log-level", "warning") as running,
        httpx2.Client(base_url=running.url) as http,
    ):

        def predicted(**fields: object) -> int | None:
            body = {"model": MODEL, "prompt": "A prompt of several blocks. " * 4, "max_tokens": 1, **fields}
            assert http.post("/v1/completions", json=body).status_code == 200
            found: int | None = http.get("/decisions").json()["decisions"][0]["predicted_cached_tokens"]
            return found

        wait_until(lambda: (predicted() or 0) > 0, "the router follows the replica's events")
        assert predicted(echo=True, logprobs=1) is None
        assert predicted(prompt_logprobs=0) is None
        assert (predicted(echo=True) or 0) > 0


# ---- keys


def test_a_wrong_key_and_a_key_without_credit(served: RouterProcess) -> None:
    with as_client(served, "wrong") as stranger:
        for call in (
            lambda: stranger.models.list(),
            lambda: stranger.completions.create(model=MODEL, prompt="x"),
            lambda: stranger.chat.completions.create(model=MODEL, messages=HELLO, stream=True),
        ):
            with pytest.raises(openai.AuthenticationError):
                call()
    with as_client(served, POOR) as poor:
        poor.completions.create(model=MODEL, prompt="x", max_tokens=1)
        with pytest.raises(openai.RateLimitError) as caught:
            poor.completions.create(model=MODEL, prompt="x", max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_tenant_cannot_see_what_another_one_has_asked(served: RouterProcess) -> None:
    def cached(key: str) -> int:
        with as_client(served, key) as client:
            usage = client.completions.create(model=MODEL, prompt=LONG, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert cached(KEY) < 16  # of a block, shared with what this one has asked before
    assert cached(KEY) > 400
    assert cached(OTHER) == 0
    assert cached(OTHER) > 400
