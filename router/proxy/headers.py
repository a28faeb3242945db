"""Filters headers in both directions; hop-by-hop ones end with their connection (RFC 9110, 7.6.1)."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from xxhash import xxh3_128_hexdigest

from api.http.keys import KEY_HEADERS
from router.members.members import Member
from router.members.upstream import Header
from router.placement.cost import NONE_TRIED
from router.proxy.attempt import Attempt
from router.proxy.exchange import Exchange
from router.tenants.admission import Admitted

# `expect` was answered by our own server; what frames a body is written anew for each connection.
HOP_BY_HOP = frozenset(
    b"connection content-length expect host keep-alive proxy-authenticate proxy-authorization proxy-connection te "
    b"trailer transfer-encoding upgrade".split()
)
# All that a request takes along; the rest is written by the router. Engines obey more headers with every version, which
# name a rank, a host, a place in the queue or a form of the answer (decision 0048).
TRACES = (
    b"b3 baggage sentry-trace traceparent tracestate uber-trace-id x-amzn-trace-id x-b3-flags x-b3-parentspanid "
    b"x-b3-sampled x-b3-spanid x-b3-traceid x-cloud-trace-context x-datadog-parent-id x-datadog-sampling-priority "
    b"x-datadog-trace-id"
)
TO_REPLICA = frozenset(
    b"accept-encoding accept-language anthropic-beta anthropic-version user-agent x-custom-labels x-session-id".split()
    + TRACES.split()
)
TO_READ = TO_REPLICA - {b"accept-encoding"}  # such answers are not only passed on
USUAL_OPTIONS = (b"keep-alive", b"close")  # values of a `connection` header
JSON_LINE = b"content-type: application/json\r\n"
COPIED_BYTES = 64 * 1024  # a body up to this size is copied: one write costs less than two
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
# The router decides which pages may ask; engines admit all of them by default.
CORS = frozenset(b"access-control-allow-%b" % part for part in (b"credentials", b"headers", b"methods", b"origin"))
TO_CLIENT = HOP_BY_HOP | CORS | {b"x-request-id", b"x-warmroute-content-type", b"x-warmroute-replica"}
FROM_FRAMES = TO_CLIENT | {b"content-type"}
TRACED = {passed: passed - {b"traceparent"} for passed in (TO_REPLICA, TO_READ)}
WITH_KEY = {passed: passed | KEY_HEADERS for passed in (*TRACED, *TRACED.values())}


def lines(headers: Sequence[Header], dropped: frozenset[bytes]) -> bytes:
    """Header lines of an answer without those dropped, and without those that any `connection` header names."""
    kept = []
    named: set[bytes] = set()
    for name, value in headers:
        if name not in dropped:
            kept.append(name + b": " + value + b"\r\n")
        elif name == b"connection" and value.lower() not in USUAL_OPTIONS:
            named.update(part.strip().lower() for part in value.split(b","))
    return b"".join(kept) if named <= dropped else lines(headers, dropped | named)


def value_of(headers: Iterable[Header], wanted: bytes) -> bytes | None:
    for name, value in headers:
        if name == wanted:
            return value
    return None


def length_of(headers: Iterable[Header]) -> int | None:
    length = value_of(headers, b"content-length")
    return int(length) if length is not None and length.isdigit() else None


def request_to(
    member: Member,
    exchange: Exchange,
    admitted: Admitted,
    passed: frozenset[bytes],
    more: bytes,
    body: bytes,
    path: bytes | None = None,
    envelope: bytes = b"",
) -> tuple[bytes, bytes]:
    """The bytes of a client's request for a replica, and its body apart if that is too large to copy."""
    scope, upstream, length = exchange.scope, member.upstream, len(envelope) + len(body)
    kept = lines_to(member, scope["headers"], admitted, passed, more)
    method, query = scope["method"], scope["query_string"]
    target = upstream.path + (scope["raw_path"] if path is None else path) + (b"?" + query if query else b"")
    framing = b"content-length: %d\r\n" % length if length or method in WITH_BODY else b""  # a GET gets none
    head = b"%b %b HTTP/1.1\r\n%b%b%b\r\n" % (method.encode(), target, upstream.host_line, kept, framing)
    return (head + envelope + body, b"") if len(body) <= COPIED_BYTES else (head + envelope, body)


def lines_to(
    member: Member, headers: Sequence[Header], admitted: Admitted, passed: frozenset[bytes], more: bytes
) -> bytes:
    """The header lines of a client's request for a replica, without those that frame its body.

    The client's key goes along unless it is for the router, or the replica has a key of its own. Those that any
    `connection` header names do not.
    """
    if admitted.key is None and not admitted.shows_key and not member.server.key_line:
        passed = WITH_KEY[passed]
    if b"connection" in dict(headers):
        options = [value.lower() for name, value in headers if name == b"connection"]
        named = {part.strip() for value in options if value not in USUAL_OPTIONS for part in value.split(b",")}
        passed = passed if named.isdisjoint(passed) else passed - named
    kept = []
    for name, value in headers:
        if name in passed:
            kept.append(name + b": " + value + b"\r\n")
    return b"".join((*kept, member.own_lines, admitted.id_line, more))


# ---- the session, by the headers that coding agents send of their own accord


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
NAMES_OF_SESSION = frozenset(_RANKS)


class Session(NamedTuple):
    key: str  # a digest if what the client sent is long
    source: str  # the header, or the field of the body
    within: str | None = None  # the session whose agent has begun this one


def session_of(headers: Sequence[Header], prompt_cache_key: str | None) -> Session | None:
    found = sorted((_RANKS[name], value) for name, value in headers if name in _RANKS and value)
    if not found:
        return None if prompt_cache_key is None else Session(_shortened(prompt_cache_key), PROMPT_CACHE_KEY)
    rank, value = found[0]
    outer = next((other for _, other in found if other != value), None)
    within = None if outer is None else _shortened(outer.decode("latin-1"))
    return Session(_shortened(value.decode("latin-1")), SESSION_HEADERS[rank].decode(), within)


def _shortened(given: str) -> str:
    return given if len(given) <= MAX_SESSION else xxh3_128_hexdigest(given.encode("utf-8", "replace"))


# ---- to the chosen replica


class Transport:
    is_single = False  # a replica is named once, and whoever forwards the request asks others by itself

    def beyond(self, exchange: Exchange) -> frozenset[str]:  # noqa: ARG002
        """The replicas that are out of this request's reach."""
        return NONE_TRIED

    def send(
        self,
        exchange: Exchange,
        admitted: Admitted,
        attempt: Attempt,
        passed: frozenset[bytes],
        more: bytes,
        body: bytes,
        path: bytes | None = None,
        envelope: bytes = b"",
        *,
        resend: bool = True,
    ) -> None:
        """Send the request with those of its headers that are `passed`, and `more` lines."""
        member, bodiless = attempt.member, exchange.scope["method"] == "HEAD"
        head, rest = request_to(member, exchange, admitted, passed, more, body, path, envelope)
        attempt.sending = member.upstream.send(head, attempt, body=rest, bodiless=bodiless, resend=resend)


DIRECT = Transport()
