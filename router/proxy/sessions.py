"""The session of a request, by the headers that coding agents send of their own accord."""

from collections.abc import Iterable
from typing import NamedTuple

from xxhash import xxh3_128_hexdigest

from router.members.upstream import Header

MAX_SESSION = 256  # characters; decisions keep it
PROMPT_CACHE_KEY = "prompt_cache_key"

# The first one that is there counts. A subagent has a conversation of its own: its id goes before the session.
SESSION_HEADERS = (
    b"x-session-id",  # opencode, crush
    b"x-session-affinity",  # the same, and clients of hosted engines
    b"x-opencode-session",
    b"x-claude-code-agent-id",
    b"x-claude-code-session-id",
    b"session-id",  # Codex
    b"session_id",  # Codex of old
    b"x-amp-thread-id",
)
_RANKS = {name: rank for rank, name in enumerate(SESSION_HEADERS)}


class Session(NamedTuple):
    key: str  # a digest if what the client sent is long
    source: str  # the header, or the field of the body


def session_of(headers: Iterable[Header], prompt_cache_key: str | None) -> Session | None:
    found = [(_RANKS[name], value) for name, value in headers if name in _RANKS and value]
    if found:
        rank, value = min(found)
        return Session(_shortened(value.decode("latin-1")), SESSION_HEADERS[rank].decode())
    return None if prompt_cache_key is None else Session(_shortened(prompt_cache_key), PROMPT_CACHE_KEY)


def _shortened(given: str) -> str:
    return given if len(given) <= MAX_SESSION else xxh3_128_hexdigest(given.encode("utf-8", "replace"))
