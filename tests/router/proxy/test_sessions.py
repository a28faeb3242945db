"""Sessions by the headers of coding agents, as each of them sends them."""

import pytest

from router.proxy.headers import MAX_SESSION, SESSION_HEADERS, session_of

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


def test_headers_of_one_request_alone_are_no_session() -> None:
    assert session_of([(b"x-request-id", b"1"), (b"x-client-request-id", b"2"), (b"thread-id", b"3")], None) is None


def test_a_header_counts_before_the_body_and_an_empty_one_does_not() -> None:
    assert session_of([(b"session-id", b"")], "key") == ("key", "prompt_cache_key")
    assert session_of([(b"session-id", b"s")], "key") == ("s", "session-id")
    assert session_of([], None) is None


def test_our_own_header_counts_first() -> None:
    headers = [(name, b"%d" % rank) for rank, name in enumerate(SESSION_HEADERS)]
    for first in range(len(headers)):
        found = session_of(headers[first:][::-1], None)
        assert found == (str(first), SESSION_HEADERS[first].decode())


def test_a_long_name_is_kept_as_a_digest() -> None:
    one, other = (session_of([(b"x-session-id", b"x" * MAX_SESSION + end)], None) for end in (b"1", b"2"))
    assert one is not None and other is not None
    assert len(one.key) == 32 and one != other
