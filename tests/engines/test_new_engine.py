"""A new engine is one profile: the router recognizes it, follows it, and speaks its words, and nothing else changes."""

from collections.abc import MutableSequence

import msgspec
import pytest

import engines
from engines.metrics import EngineMetrics
from engines.profile import EngineProfile
from engines.sources import Ask, Publisher, Sources
from router.members.spec import BadSpec, ReplicaSpec, parse_replica
from tests.router.loopback import until
from tests.router.scripted import (
    CHAT,
    COMPLETIONS,
    DONE,
    MODEL,
    Call,
    Scripted,
    chat,
    connect,
    event,
    events_of,
    refused_port,
    says,
    served,
)

RESET = "/reset_prefix_cache"
PROMPT, ANSWER = "hi", "abcd"


async def sources(ask: Ask) -> Sources:
    answer = await ask("/streams")
    ports = msgspec.json.decode(answer.body, type=list[int])
    return Sources(
        {rank: Publisher(publisher="zmq", endpoint=f"tcp://*:{port}", topic="toy") for rank, port in enumerate(ports)}
    )


TOY = EngineProfile(
    name="toy",
    owner="toymakers",
    health_path="/alive",
    sources=sources,
    metrics=EngineMetrics(
        rank_labels=("shelf",),
        running=("toy_now",),
        waiting=("toy_later",),
        steps=("toy_steps",),
        cache_infos=(("toy_cache", "cell_tokens", "cells"),),
    ),
    is_scraped=True,
    takes_token_ids=True,
    tells_ids=frozenset({"completions"}),
    separates_salts=True,
    rank_header="x-toy-shelf",
    reset_path="/sweep",
)
METRICS = b"""toy_now{shelf="0"} 2
toy_now{shelf="1"} 0
toy_later{shelf="0"} 3
toy_later{shelf="1"} 0
toy_steps 1
toy_cache{shelf="0",cell_tokens="16",cells="64"} 1
"""


class Toy(Scripted):
    """Streams its tokens with their ids, and is not told to the router as a toy. `losses`: one for each lost stream."""

    def __init__(self, name: str, *ports: int, losses: MutableSequence[str] | None = None) -> None:
        super().__init__(name, self.serve, models=[{"id": MODEL, "owned_by": "toymakers", "max_model_len": 512}])
        self.control |= {"/alive": (200, {}), "/metrics": (200, METRICS), "/streams": (200, list(ports))}
        del self.control["/health"]
        self.losses = losses

    @property
    def spec(self) -> ReplicaSpec:
        return ReplicaSpec(name=self.name, url=f"http://127.0.0.1:{self.port}", resume=True)

    def serve(self, call: Call) -> None:
        if not call.body or not call.json.get("stream"):
            call.answer(b'{"choices":[]}')
            return
        call.begin()
        prompt = call.json["prompt"]  # a list of ids ends with what another one has said
        for text in ANSWER if isinstance(prompt, str) else ANSWER[ANSWER.index(chr(prompt[-1])) + 1 :]:
            call.chunk(chunk_of(text))
            if self.losses:
                self.losses.pop()
                call.drop()
                return
        call.chunk(DONE)
        call.end()


def chunk_of(text: str) -> bytes:
    choice = {
        "index": 0,
        "text": text,
        "token_ids": [ord(text)],
        "finish_reason": "stop" if text == ANSWER[-1] else None,
    }
    head = {"id": "c", "created": 1, "model": MODEL, "object": "text_completion"}
    return event(msgspec.json.encode({**head, "choices": [choice]}).decode())


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.PROFILES, TOY.name, TOY)


@pytest.mark.usefixtures("toy")
async def test_a_new_engine_is_recognized_followed_and_steered() -> None:
    ports = refused_port(), refused_port()
    replica = Toy("r", *ports)
    async with served(replica, ready=False) as running, connect(running.port) as client:
        members = running.router.members.by_name
        await until(lambda: "r@dp1" in members and not members["r@dp1"].candidate.unavailable, "its ranks are known")
        ranks = [members["r@dp0"], members["r@dp1"]]
        assert [one.profile for one in ranks] == [TOY, TOY] and {one.spec.engine for one in ranks} == {"toy"}
        assert [one.spec.events for one in ranks] == [f"tcp://127.0.0.1:{port}" for port in ports]
        await until(lambda: ranks[0].candidate.waiting == 3, "its metrics were read")
        assert [(one.candidate.running, one.candidate.waiting) for one in ranks] == [(2, 3), (0, 0)]
        for _ in ranks:
            assert (await client.post(CHAT, chat())).status == 200
        assert sorted(call.header("x-toy-shelf") or "" for call in replica.calls) == ["0", "1"]
        assert (await client.post(RESET, b"", host="localhost")).status == 200
        assert replica.calls[-1].path == "/sweep"
        assert "/alive" in replica.asked and "/health" not in replica.asked


@pytest.mark.usefixtures("toy")
async def test_an_answer_of_a_new_engine_goes_on_at_its_next_replica() -> None:
    losses, ours = ["one"], Scripted("ours", says(), native=True)  # which tells the tokenizer, and takes nothing
    one, other = Toy("one", losses=losses), Toy("other", losses=losses)
    async with served(one, other, ours) as running, connect(running.port) as client:
        running.member("ours").health.drain()
        answer = await client.post(COMPLETIONS, {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "stream": True})
        assert "".join(event["choices"][0]["text"] for event in events_of(answer.body)) == ANSWER
        assert b"token_ids" not in answer.body and not losses
        [second] = [call.json for call in (*one.calls, *other.calls) if call.json["prompt"] != PROMPT]
        assert second["prompt"][-1] == ord(ANSWER[0]) and second["max_tokens"] == 7


@pytest.mark.usefixtures("toy")
def test_a_new_engine_may_be_named() -> None:
    assert parse_replica("http://127.0.0.1:1,engine=toy").engine == "toy"
    with pytest.raises(BadSpec, match="sglang, trtllm, openai or toy"):
        parse_replica("http://127.0.0.1:1,engine=tin")


def test_without_its_profile_it_is_a_server_of_which_nothing_is_known() -> None:
    with pytest.raises(BadSpec, match="engine is 'toy'"):
        parse_replica("http://127.0.0.1:1,engine=toy")
    assert engines.owned_by("toymakers") is engines.OPENAI
