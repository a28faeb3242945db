"""Clients that would have tokens computed for nothing: batches, figures of their own, answers that they leave."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from router.proxy.responses import new_response_id
from router.tenants.keys import Key, keys_from_options
from tests.router.loopback import until
from tests.router.scripted import CHAT, COMPLETIONS, MODEL, Call, Script, Served, connect, event, served, silent

DAY = 100_000
LONG = "x" * 400  # as many tokens of the tokenizer that takes bytes
BATCH = ["a", *[LONG] * 30]
BATCH_TOKENS = 2 + 30 * (1 + len(LONG))  # each prompt begins with a special token
FLOOD, QUIET = {"authorization": "Bearer flood"}, {"authorization": "Bearer quiet"}


def keys(**limits: float) -> tuple[Key, ...]:
    return tuple(msgspec.structs.replace(key, **limits) for key in keys_from_options(["flood", "quiet"], None))


def asked(prompt: Any = "a", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 1, **more}


def charged(running: Served) -> int:
    """The tokens that the flooding key has used today."""
    with running.router.admission.shared.opened("key-1") as state:
        return int(state.today.computed + state.today.cached + state.today.generated)


def framed(call: Call) -> None:
    call.begin_frames("application/json", x_warmroute_cached_tokens="0")
    call.frame(b"{}", 1)
    call.end()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    "prompts",
    [BATCH, [list(prompt.encode()) for prompt in BATCH], ["a", *["é" * 1500] * 100]],
    ids=["texts", "ids", "read apart"],
)
async def test_a_batch_beyond_a_limit_reaches_no_replica(native: bool, prompts: list[Any]) -> None:
    script = Script(framed)
    limited = keys(tokens_per_day=1500)
    replicas = script.replicas(1, native=native)
    async with served(*replicas, keys=limited, demand_key=True) as running, connect(running.port) as client:
        answer = await client.post(COMPLETIONS, asked(prompts), **FLOOD)
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
    assert not script.calls


async def test_a_batch_costs_all_of_its_prompts_in_limits_and_usage() -> None:
    script = Script(framed)
    async with served(*script.replicas(1, native=True), keys=keys(tokens_per_day=DAY), demand_key=True) as running:
        async with connect(running.port) as client:
            assert (await client.post(COMPLETIONS, asked(BATCH), **FLOOD)).status == 200
        await running.idle()
        assert charged(running) == BATCH_TOKENS + 1


class Crowd:
    """Clients whose requests replicas get one after the other, and answer none."""

    def __init__(self, running: Served, script: Script, stack: AsyncExitStack) -> None:
        self._running, self._script, self._stack = running, script, stack

    async def send(self, prompt: Any, **headers: str) -> None:
        client = await self._stack.enter_async_context(connect(self._running.port))
        client.send("POST", COMPLETIONS, asked(prompt), **headers)
        count = len(self._script.calls) + 1
        await until(lambda: len(self._script.calls) == count, "a replica has it")


@asynccontextmanager
async def crowd(count: int, **more: Any) -> AsyncIterator[tuple[Served, Script, Crowd]]:
    script = Script(silent)
    replicas = script.replicas(count, native=True)
    async with served(*replicas, policy="cost", **more) as running, AsyncExitStack() as stack:
        yield running, script, Crowd(running, script, stack)


async def test_a_batch_counts_as_all_its_prompts_where_it_waits() -> None:
    async with crowd(2) as (running, _, clients):
        await clients.send(BATCH)
        [busy] = [member for member in running.router.members if member.candidate.in_flight]
        assert busy.candidate.queued_tokens == BATCH_TOKENS
        for number in range(3):
            await clients.send(f"{number}" * 300)
        assert busy.candidate.in_flight == 1, "the others are placed elsewhere"


async def test_whoever_sends_batches_stands_back_for_others() -> None:
    async with crowd(1, keys=keys(), demand_key=True) as (_, script, clients):
        for _ in range(4):
            await clients.send(BATCH, **FLOOD)
        await clients.send("b", **FLOOD)
        await clients.send("c", **QUIET)
        of_flood, quiet = (call.native[0].priority for call in script.calls[-2:])
        assert of_flood > quiet + 1.0


# ---- answers that their clients leave


@asynccontextmanager
async def left(call_of: Callable[[Call], None], path: str, body: dict[str, Any]) -> AsyncIterator[Served]:
    """A router whose client has left an answer of a foreign engine once all of it but its end had come."""
    script = Script(partial(_until_left, call_of))
    async with served(*script.replicas(1), keys=keys(tokens_per_day=DAY), demand_key=True) as running:
        async with connect(running.port) as client:
            client.send("POST", path, {"model": MODEL, **body}, **FLOOD)
            if body.get("stream"):
                await client.head()
                while b"last" not in await client.chunk():
                    pass
            else:
                await until(lambda: script.calls, "it is asked")
            client.leave()
        await running.idle()
        yield running


async def _until_left(says: Callable[[Call], None], call: Call) -> None:
    says(call)
    await call.left()


ANSWER = 40  # tokens
DECOY = {"input_tokens": 0, "output_tokens": 0, "cached_tokens": 99_999}


def responds(call: Call) -> None:
    """Stream as vLLM does: its first event repeats the client's tools."""
    call.begin()
    created = {"type": "response.created", "response": {"id": "resp_1", "tools": call.json["tools"], "usage": None}}
    call.chunk(b"event: response.created\n" + event(json.dumps(created)))
    for number in range(ANSWER):
        delta = {"type": "response.output_text.delta", "delta": "last" if number == ANSWER - 1 else "a"}
        call.chunk(b"event: response.output_text.delta\n" + event(json.dumps(delta)))


def messages(call: Call) -> None:
    call.begin()
    usage = {"input_tokens": 500, "output_tokens": 1}
    call.chunk(b"event: message_start\n" + event(json.dumps({"type": "message_start", "message": {"usage": usage}})))
    for number in range(ANSWER):
        delta = {"type": "content_block_delta", "delta": {"text": "last" if number == ANSWER - 1 else "a"}}
        call.chunk(b"event: content_block_delta\n" + event(json.dumps(delta)))


async def test_figures_that_a_client_writes_into_its_tools_are_not_the_engines() -> None:
    tools = [{"type": "function", "name": "f", "parameters": DECOY}]
    body = {"input": LONG, "tools": tools, "stream": True}
    async with left(responds, "/v1/responses", body) as running:
        with running.router.admission.shared.opened("key-1") as state:
            assert state.today.computed >= len(LONG) // 4 and state.today.cached == 0
            assert state.today.generated >= ANSWER - 2


async def test_the_figures_of_a_first_event_are_not_those_of_the_whole_answer() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 99, "stream": True}
    async with left(messages, "/v1/messages", body) as running:
        assert charged(running) >= 500 + ANSWER - 2


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/score"])
async def test_inputs_are_charged_though_their_client_does_not_wait(path: str) -> None:
    async with left(lambda _: None, path, {"input": [LONG] * 30}) as running:
        assert charged(running) >= 30 * len(LONG) // 4


async def test_whoever_leaves_before_the_first_token_has_had_its_prompts_computed() -> None:
    async with left(lambda _: None, COMPLETIONS, {"prompt": BATCH}) as running:
        assert charged(running) >= 30 * len(LONG) // 4


# ---- other contents than those that are computed


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": LONG * 10, "messages": [{"role": "user", "content": "a"}]}),
        (CHAT, {"prompt": "a", "messages": [{"role": "user", "content": LONG * 10}]}),
    ],
)
@pytest.mark.parametrize("padding", [0, 300_000], ids=["quick", "read apart"])
async def test_what_the_engine_computes_is_counted_and_nothing_else(path: str, body: Any, padding: int) -> None:
    script, limited = Script(framed), keys(tokens_per_day=500)
    async with served(*script.replicas(1), keys=limited, demand_key=True) as running, connect(running.port) as client:
        answer = await client.post(path, {"model": MODEL, "padding": "x" * padding, **body}, **FLOOD)
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
    assert not script.calls


async def test_looking_at_an_answer_or_counting_tokens_costs_none() -> None:
    usage = {"id": "resp_1", "usage": {"input_tokens": 70, "output_tokens": 7}, "input_tokens": 70}
    script = Script(lambda call: call.answer(json.dumps(usage).encode()))
    flood, quiet = keys(tokens_per_day=DAY)
    async with served(*script.replicas(1), keys=(flood, quiet), demand_key=True) as running:
        async with connect(running.port) as client:
            for path in ("/v1/messages/count_tokens", "/v1/completions/render"):
                assert (await client.post(path, asked(), **FLOOD)).status == 200
            await client.post("/v1/responses", {"model": MODEL, "input": "a"}, **FLOOD)
            await until(lambda: charged(running) == 77, "the answer is charged")
            response_id = new_response_id(flood.salt, "r0", MODEL)
            assert (await client.get(f"/v1/responses/{response_id}", **FLOOD)).status == 200
        await running.idle()
        assert charged(running) == 77
