"""Neighbours named to a replica of ours: by the router alone, in the envelope, from what both say of themselves."""

import json
from typing import Any

import pytest

from api.native import KvSource
from api.openai.requests import ChatRequest
from api.prompts.prompts import Prompts
from api.reading import read
from api.tokens.tokenizer import ByteTokenizer
from events.blocks import block_keys, root_key
from router.proxy.predicted_hit import PULLED
from tests.router.scripted import MODEL, Call, Script, Scripted, Served, connect, served

pytestmark = pytest.mark.virtual

CHAT = "/v1/chat/completions"
SIZE = 16
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me of the sea. " * 60}], "max_tokens": 4}


def frames(call: Call) -> None:
    call.begin_frames("application/json")
    call.frame(b"{}", 104)
    call.end()


def replicas(script: Script, **said: Any) -> list[Scripted]:
    """Two replicas that can read from each other, but for what is said of both."""
    found = script.replicas(2, native=True)
    for number, replica in enumerate(found):
        replica.control["/load"][1].update({"kv_read": f"tcp://*:{7000 + number}", "kv_layout": "layout"} | said)
    return found


def hold(running: Served, name: str, asked: dict[str, Any] = ASKED) -> int:
    """Let a replica hold all whole blocks of a prompt, and have a long queue; return the number of its tokens."""
    router = running.router
    for member in router.members:
        member.block_size = SIZE
    router.members.arrange()
    tokens = Prompts(ByteTokenizer()).chat(read(json.dumps(asked).encode(), ChatRequest))
    keys = block_keys(tokens, SIZE, root_key(MODEL, None, None, SIZE))
    holder = router.members.by_name[name]
    router.placement.index.store(holder.slot, keys)
    holder.candidate.queued_tokens = 1e6
    return SIZE * len(keys)


async def test_a_replica_is_told_where_to_read_what_it_does_not_hold() -> None:
    script = Script(frames)
    async with served(*replicas(script), policy="cost") as running, connect(running.port) as client:
        held = hold(running, "r0")
        answer = await client.post(CHAT, ASKED)
        assert answer.status == 200 and answer.headers["x-warmroute-replica"] == "r1"
        assert script.calls[0].native[0].kv_sources == [KvSource("tcp://127.0.0.1:7000", held)]
        await running.idle()
        [decision] = (one.record() for one in running.router.history.decisions)
        assert (decision.predicted_cached_tokens, decision.prediction_exact) == (0, False)
        assert [(one.source, one.tokens, one.neighbours) for one in decision.portions] == [
            ("PULL", held, ("r0",)),
            ("COMPUTE", decision.prompt_tokens - held, ()),
        ]
        assert decision.why_inexact in (PULLED, running.router.doubt(running.router.members.by_name["r1"]))


@pytest.mark.parametrize("said", [{"kv_read": ""}, {"kv_layout": ""}, {"kv_read": "ipc:///tmp/x"}, {"kv_read": None}])
async def test_nothing_is_read_that_no_replica_offers(said: dict[str, Any]) -> None:
    script = Script(frames)
    async with served(*replicas(script, **said), policy="cost") as running, connect(running.port) as client:
        hold(running, "r0")
        assert (await client.post(CHAT, ASKED)).status == 200
        assert script.calls[0].native[0].kv_sources == []


async def test_a_client_names_no_endpoint() -> None:
    script = Script(frames)
    mine = [{"endpoint": "tcp://10.6.6.6:22", "tokens": 999}]
    async with served(*replicas(script), policy="cost") as running, connect(running.port) as client:
        asked = {**ASKED, "kv_sources": mine, "native": {"kv_sources": mine}}
        held = hold(running, "r0")
        assert (await client.post(CHAT, asked, x_warmroute_kv_sources=json.dumps(mine))).status == 200
        [call] = script.calls
        assert call.native[0].kv_sources == [KvSource("tcp://127.0.0.1:7000", held)]
        assert b"10.6.6.6" not in call.body[: call.body.index(b"{")], "the envelope is the router's own"


def test_a_replica_finds_no_sources_in_a_clients_body() -> None:
    request = read(
        json.dumps({**ASKED, "kv_sources": [{"endpoint": "tcp://10.6.6.6:22", "tokens": 9}]}).encode(), ChatRequest
    )
    assert not hasattr(request, "kv_sources")


async def test_several_prompts_name_no_neighbours() -> None:
    script = Script(frames)
    async with served(*replicas(script), policy="cost") as running, connect(running.port) as client:
        hold(running, "r0")
        prompt = "Tell me of the sea. " * 60
        await client.post("/v1/completions", {"model": MODEL, "prompt": [prompt, prompt], "max_tokens": 4})
        native, _ = script.calls[0].native
        assert len(native.prompts) == 2 and native.kv_sources == []


async def test_a_replica_that_describes_itself_anew_is_read_at_its_new_endpoint() -> None:
    script = Script(frames)
    one, other = replicas(script)
    async with served(one, other, policy="cost") as running, connect(running.port) as client:
        hold(running, "r0")
        member = running.router.members.by_name["r0"]
        running.router.placement.restarted(member.load)
        assert member.candidate.kv_read == ""
        one.control["/load"][1]["kv_read"] = "tcp://*:7777"
        member.server.learned = False
        await running.front.upkeep.learn_again(member.server)
        hold(running, "r0")
        await client.post(CHAT, ASKED)
        assert script.calls[0].native[0].kv_sources[0].endpoint == "tcp://127.0.0.1:7777"
