"""A request whose prompt the router cannot make waits for an engine to tell its tokens, and is placed by them."""

import json
from typing import Any

from engines.vllm import RENDER
from router.members.spec import ReplicaSpec
from tests.router.scripted import CHAT, MODEL, Call, Client, Scripted, chat, connect, served, silent

ALL = {"path": CHAT, "more": {}}, {"path": "/v1/messages", "more": {"max_tokens": 5}}


class Rendering(Scripted):
    """A vLLM that tells a token for each character of a message."""

    silent = False

    def __init__(self, name: str) -> None:
        super().__init__(name, self._handle)
        self.renders, self.bodies = True, list[Any]()
        self.control |= {"/kv_event_sources": (404, {}), "/metrics": (200, b"")}

    @property
    def spec(self) -> ReplicaSpec:
        return ReplicaSpec(name=self.name, url=f"http://127.0.0.1:{self.port}", engine="vllm", events="off")

    def _handle(self, call: Call) -> Any:
        if call.path not in RENDER.values():
            tokens = len(call.json["messages"][-1]["content"])
            call.answer(json.dumps({"usage": {"prompt_tokens": tokens, "input_tokens": tokens}}).encode())
        elif self.silent:
            return silent(call)
        else:
            self.bodies.append(call.json)
            ids = [*map(ord, call.json["messages"][-1]["content"])]
            call.answer(json.dumps({"token_ids": ids, "features": None}).encode())
        return None


async def last(client: Client) -> Any:
    return (await client.get("/decisions?limit=1", host="localhost")).json["decisions"][0]


async def test_prompts_are_placed_by_the_tokens_that_an_engine_tells() -> None:
    async with served(one := Rendering("r0")) as running, connect(running.port) as client:
        for asked in ALL:
            body = chat("x" * 100, **asked["more"], stream=False, cache_salt="s")  # type: ignore[arg-type]
            assert (await client.post(str(asked["path"]), body)).status == 200
            decided = await last(client)
            assert decided["prompt_tokens"] == 100, decided
        told = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 100}], "mm_payload": "none"}
        assert one.bodies == [told, told | {"max_tokens": 1}], (
            "what changes no token is left out; the second API has a route of its own"
        )
        tokens = running.router.members.model(MODEL).tokens
        assert not tokens.approximated
        explained = (await client.post("/explain", chat("x" * 70), host="localhost")).json
        assert explained["prompt_tokens"] == 70
        metrics = (await client.get("/metrics", host="localhost")).body
        assert b'asked_prompts_total{outcome="told"} 3' in metrics


async def test_nothing_is_asked_where_that_is_switched_off() -> None:
    async with (
        served(one := Rendering("r0"), ask_engines=False) as running,
        connect(running.port) as client,
    ):
        assert (await client.post(CHAT, chat("x" * 100))).status == 200
        assert not one.bodies and (await last(client))["why_inexact"] == "it has no tokenizer here"
        assert running.router.members.model(MODEL).tokens.approximated == {"model": 1}


async def test_a_client_does_not_wait_long_and_the_record_says_why_its_prompt_is_not_exact() -> None:
    async with served(one := Rendering("r0")) as running, connect(running.port) as client:
        one.silent = True
        assert (await client.post(CHAT, chat("x" * 100))).status == 200
        assert (await last(client))["why_inexact"].endswith("no replica told its tokens within 0.1 s")
        assert running.router.members.model(MODEL).tokens.approximated == {"model": 1}


async def test_an_answer_that_counts_other_tokens_ends_it() -> None:
    async with served(one := Rendering("r0")) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat("x" * 100))).status == 200
        one.handler = lambda call: (  # it told 100, and computes 7
            one._handle(call)
            if call.path in RENDER.values()
            else call.answer(b'{"usage":{"prompt_tokens":7,"cached_tokens":0}}')
        )
        for _ in range(2):
            assert (await client.post(CHAT, chat("y" * 100))).status == 200
        assert "differed" in (await last(client))["why_inexact"]
