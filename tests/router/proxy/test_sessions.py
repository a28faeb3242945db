"""Sessions by the headers of coding agents, as each of them sends them."""

import asyncio

import pytest

from events.native import Load
from router.placement.sessions import MAX_WAIT_S
from router.proxy.headers import MAX_SESSION, SESSION_HEADERS, Session, session_of
from tests.router.scripted import COMPLETIONS, MODEL, Answer, Call, Script, connect, served

# What each agent was seen to send, of its session and beside it.
AGENTS: dict[str, tuple[dict[bytes, bytes], str]] = {
    "Claude Code": ({b"x-app": b"cli", b"x-claude-code-session-id": b"c0ffee"}, "c0ffee"),
    "a subagent of Claude Code": ({b"x-claude-code-session-id": b"c0ffee", b"x-claude-code-agent-id": b"a1"}, "a1"),
    "Codex": ({b"session-id": b"0199", b"thread-id": b"0200", b"originator": b"codex_exec"}, "0199"),
    "Codex of old": ({b"session_id": b"0199", b"conversation_id": b"0199"}, "0199"),
    "opencode": ({b"x-session-id": b"ses_1", b"x-session-affinity": b"ses_1"}, "ses_1"),
    "opencode with its own provider": ({b"x-opencode-session": b"ses_1", b"x-opencode-request": b"req_7"}, "ses_1"),
    "crush": ({b"x-session-affinity": b"eee42bf262921f57", b"x-session-id": b"eee42bf262921f57"}, "eee42bf262921f57"),
    "Amp": ({b"x-amp-thread-id": b"T-1"}, "T-1"),
}


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agents_session_is_found(agent: str) -> None:
    headers, key = AGENTS[agent]
    for ordered in (list(headers.items()), list(headers.items())[::-1]):
        found = session_of(ordered, "a-cache-key")
        assert found is not None and found.key == key
        assert headers[found.source.encode()] == key.encode()
        assert found.within == ("c0ffee" if key == "a1" else None)


def test_headers_of_one_request_alone_are_no_session() -> None:
    assert session_of([(b"x-request-id", b"1"), (b"x-client-request-id", b"2"), (b"thread-id", b"3")], None) is None


def test_a_header_counts_before_the_body_and_an_empty_one_does_not() -> None:
    assert session_of([(b"session-id", b"")], "key") == Session("key", "prompt_cache_key")
    assert session_of([(b"session-id", b"s")], "key") == Session("s", "session-id")
    assert session_of([], None) is None


def test_our_own_header_counts_first() -> None:
    headers = [(name, b"%d" % rank) for rank, name in enumerate(SESSION_HEADERS)]
    for first in range(len(headers)):
        found = session_of(headers[first:][::-1], None)
        assert found is not None and found[:2] == (str(first), SESSION_HEADERS[first].decode())


def test_a_long_name_is_kept_as_a_digest() -> None:
    one, other = (session_of([(b"x-session-id", b"x" * MAX_SESSION + end)], None) for end in (b"1", b"2"))
    assert one is not None and other is not None
    assert len(one.key) == 32 and one != other


# ---- sessions that wait to begin

CACHE_TOKENS, PROMPT_BYTES = 64 * 1024, 16 * 1024


def computes_all(call: Call) -> None:
    call.begin_frames("application/json", x_warmroute_cached_tokens="0")
    call.frame(b"{}", 1)
    if "goes on" not in call.native[1]["user"]:
        call.end()


@pytest.mark.virtual
async def test_a_new_session_waits_while_those_that_have_begun_lose_each_others_kv() -> None:
    replicas = Script(computes_all).replicas(1, native=True)
    replicas[0].control["/load"][1]["max_model_len"] = 10**6
    async with served(*replicas, policy="cost") as made:
        member, now_s = made.member("r0"), made.router.now_s
        member.block_size = 16
        made.router.members.arrange()
        member.load.describe(16, CACHE_TOKENS // 16)
        member.load.reported(Load(waiting=1, queued_prefill_tokens=500, prefill_tokens_per_s=1e4), now_s())

        async def turn(number: int, user: str = "") -> Answer:
            asked = {"model": MODEL, "prompt": f"{number:4}" + "x" * (PROMPT_BYTES - 4), "user": user}
            async with connect(made.port) as client:
                return await client.post(COMPLETIONS, asked, **{"x-session-id": f"s{number}"})

        for number in [*range(8)] * 3:
            assert (await turn(number)).status == 200
            await asyncio.sleep(0.3)
        others = [asyncio.ensure_future(turn(number, "goes on")) for number in range(8)]
        await asyncio.sleep(1.0)
        came_s = now_s()
        refused = await turn(8)
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert "more sessions are active than the caches of its replicas hold" in refused.error["message"]
        assert now_s() - came_s == pytest.approx(made.router.config.queue_timeout_s, abs=1.0)
        assert 1 <= int(refused.headers["retry-after"]) <= MAX_WAIT_S
        assert (await turn(3)).status == 200, "one that has begun goes on"
        async with connect(made.port) as client:
            [told] = (await client.get("/sessions", host="localhost")).json["models"].values()
            waiting, newest, *_ = told["sessions"]
            assert (waiting["session"], waiting["is_here"], waiting["context_tokens"]) == (
                "s8",
                False,
                PROMPT_BYTES + 1,
            )
            assert (newest["session"], newest["turns"]) == ("s3", 5) and 1.0 < newest["gap_s"] < 3.0
            assert b'sessions_waiting{model="m"} 1' in (await client.get("/metrics")).body
        waits = asyncio.ensure_future(turn(8))
        await asyncio.sleep(1.0)
        for other in others:
            other.cancel()
        await asyncio.wait(others)
        assert (await waits).status == 200, "it begins when those others are silent"
