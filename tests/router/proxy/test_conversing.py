"""Requests of the Messages, Responses and batch APIs: placed by their conversations, passed on as they came."""

import json
from typing import Any

import pytest

from tests.router.keeping import Keeping
from tests.router.scripted import MODEL, Call, Scripted, Served, connect, says, served

pytestmark = pytest.mark.virtual

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
COST: dict[str, Any] = {"policy": "cost"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def body(path: str, topic: str, turns: int, **fields: Any) -> dict[str, Any]:
    """The conversation about this topic at its nth turn."""
    said = [user(f"{topic} {n} " * 1000) for n in range(turns)]
    if path == MESSAGES:
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: {turns}"},
            {"type": "text", "text": "Be kind."},
        ]
        return {"max_tokens": turns, "model": MODEL, "system": system, "messages": said, **fields}
    if path == RESPONSES:
        return {"model": MODEL, "temperature": turns / 10, "instructions": "Be kind.", "input": said, **fields}
    return {"max_tokens": turns, "model": MODEL, "messages": [said, [user(f"{turns}")]], **fields}


def replicas(count: int) -> list[Scripted]:
    return [Scripted(f"r{n}", says(json.dumps({"id": f"resp_r{n}", "usage": {}}).encode())) for n in range(count)]


def replica_of(answer: Any) -> str:
    assert answer.status == 200
    return str(answer.headers["x-warmroute-replica"])


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("size", [1, 70], ids=["small", "large"])
async def test_a_conversation_stays_where_it_is_cached(path: str, size: int) -> None:
    async with served(*replicas(4), **COST) as running, connect(running.port) as client:
        homes: dict[str, str] = {}
        for turns in range(1, 5):
            for topic in ("stars", "bees", "chess", "tides"):
                asked = body(path, topic * size, turns)
                if size > 1:  # such bodies are not taken apart: what changes comes after the conversation
                    asked = {
                        name: asked[name] for name in ("model", "instructions", "messages", "input") if name in asked
                    }
                home = replica_of(await client.post(path, asked))
                assert homes.setdefault(topic, home) == home
        assert len(set(homes.values())) > 1, "they spread"


async def test_decisions_name_such_requests() -> None:
    async with served(*replicas(1), **COST) as running, connect(running.port) as client:
        await client.post(MESSAGES, body(MESSAGES, "stars", 1))
        await running.idle()
        [decision] = (one.record() for one in running.router.history.decisions)
        assert (decision.model, decision.chosen, decision.tokens_exact, decision.status) == (
            MODEL,
            "r0",
            False,
            200,
        )
        assert running.member("r0").tally(MODEL).statuses == {200: 1}


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_bodies_and_streams_go_on_unchanged(path: str) -> None:
    stream = [b'event: message_start\ndata: {"type": "x", "id": "resp_9"}\n\n', b"data: \xff\n\n", b"data: [DONE]\n\n"]

    async def streams(call: Call) -> None:
        call.begin()
        for piece in stream:
            call.chunk(piece)
        call.end()

    one = Scripted("one", streams)
    async with served(one, **COST) as running, connect(running.port) as client:
        sent = json.dumps(body(path, "stars", 1, stream=True, unknown=[1.50, {"a": None}]), indent=1).encode()
        answer = await client.post(path, sent)
        assert answer.body == b"".join(stream)
        assert one.calls[0].body == sent


async def test_a_response_is_continued_and_read_where_it_is_kept() -> None:
    async with served(*(Keeping(f"r{n}") for n in range(3)), **COST) as running, connect(running.port) as client:
        made = await client.post(RESPONSES, body(RESPONSES, "stars", 1))
        first, held = replica_of(made), made.json["id"]
        for n in range(4):
            busy = body(RESPONSES, f"other {n}", 3)
            await client.post(RESPONSES, busy)
            assert (
                replica_of(await client.post(RESPONSES, body(RESPONSES, str(n), 1, previous_response_id=held))) == first
            )
            assert replica_of(await client.get(f"{RESPONSES}/{held}")) == first
            assert replica_of(await client.post(f"{RESPONSES}/{held}/cancel", b"")) == first
        unknown = body(RESPONSES, "stars", 1, previous_response_id="resp_unknown")
        assert (await client.post(RESPONSES, unknown)).headers["x-warmroute-replica"] in ("r0", "r1", "r2")
        assert (await client.get(f"{RESPONSES}/resp_unknown")).status == 404


async def test_a_response_whose_replica_has_left_goes_to_another() -> None:
    async with served(*(Keeping(f"r{n}") for n in range(2)), **COST) as running, connect(running.port) as client:
        made = await client.post(RESPONSES, body(RESPONSES, "stars", 1))
        first, held = replica_of(made), made.json["id"]
        _remove(running, first)
        again = body(RESPONSES, "stars", 2, previous_response_id=held)
        assert (await client.post(RESPONSES, again)).headers["x-warmroute-replica"] != first
        assert (await client.get(f"{RESPONSES}/{held}")).headers["x-warmroute-replica"] != first


def _remove(running: Served, name: str) -> None:
    upkeep = running.front.upkeep
    upkeep.apply({member.name: member.spec for member in running.router.members if member.name != name})


@pytest.mark.parametrize(
    "sent",
    [
        b'{"model": 7}',
        b'{"model": "m"}',
        b'{"model": "m", "messages": 5, "input": 5}',
        b'{"model": "m", "messages": [[], 1, null, {"content": [1, null, {}]}], "input": [[1], {}]}',
        b'{"model": "m", "messages": ' + b"[" * 900 + b"]" * 900 + b"}",
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_what_is_no_conversation_is_the_replicas_to_refuse(path: str, sent: bytes) -> None:
    [one] = replicas(1)
    async with served(one, **COST) as running, connect(running.port) as client:
        assert (await client.post(path, sent)).status == 200
        assert one.calls[0].body == sent


async def test_codex_keeps_its_session_by_its_cache_key_too() -> None:
    async with served(*replicas(4), policy="session") as running, connect(running.port) as client:
        by_session: dict[str, set[str]] = {}
        for n in range(32):
            session = f"s{n % 8}"
            asked = body(RESPONSES, f"topic {n}", 1, prompt_cache_key=session)
            by_session.setdefault(session, set()).add(replica_of(await client.post(RESPONSES, asked)))
        assert all(len(found) == 1 for found in by_session.values())
        assert len(set.union(*by_session.values())) > 1


async def test_prompts_with_a_billing_line_are_counted_and_matched_without_it() -> None:
    async with served(*replicas(2), **COST) as running, connect(running.port) as client:
        went = [replica_of(await client.post(MESSAGES, body(MESSAGES, "a", turns))) for turns in (1, 2, 3)]
        assert len(set(went)) == 1
        await client.post(RESPONSES, body(RESPONSES, "b", 1))
        await running.idle()
        billed = {member.name: member.tally(MODEL).billed for member in running.router.members}
        assert billed[went[0]] == sum(billed.values()) == 3
