"""Filters headers in both directions; hop-by-hop ones end with their connection (RFC 9110, 7.6.1)."""

from collections.abc import Iterable, Sequence

from starlette.types import Scope

from api.http.keys import KEY_HEADERS
from router.members.members import Member
from router.members.upstream import Header, Upstream
from router.proxy.admission import Admitted
from router.proxy.exchange import Exchange

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
TO_READ = TO_REPLICA - {b"accept-encoding"}  # where the answer is not only passed on
USUAL_OPTIONS = (b"keep-alive", b"close")  # of a `connection` header
JSON_LINE = b"content-type: application/json\r\n"
COPIED_BYTES = 64 * 1024  # of a body; one write costs less than two
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


def passed_lines(headers: Sequence[Header], passed: frozenset[bytes]) -> bytes:
    """The lines of a request's headers that go on, except those that any `connection` header names."""
    kept = []
    named: set[bytes] = set()
    for name, value in headers:
        if name in passed:
            kept.append(name + b": " + value + b"\r\n")
        elif name == b"connection" and value.lower() not in USUAL_OPTIONS:
            named.update(part.strip().lower() for part in value.split(b","))
    return b"".join(kept) if named.isdisjoint(passed) else passed_lines(headers, passed - named)


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
    scope = exchange.scope if path is None else {**exchange.scope, "raw_path": path}
    kept = lines_to(member, scope["headers"], admitted, passed, more)
    head = request_head(scope, member.upstream, kept, len(envelope) + len(body))
    return (head + envelope + body, b"") if len(body) <= COPIED_BYTES else (head + envelope, body)


def lines_to(
    member: Member, headers: Sequence[Header], admitted: Admitted, passed: frozenset[bytes], more: bytes
) -> bytes:
    """The header lines of a client's request for a replica, without those that frame its body.

    The client's key goes along unless it is for the router, or the replica has a key of its own.
    """
    if admitted.key is None and not admitted.shows_key and not member.server.key_line:
        passed = WITH_KEY[passed]
    return passed_lines(headers, passed) + member.own_lines + admitted.id_line + more


def request_head(scope: Scope, upstream: Upstream, kept: bytes, length: int) -> bytes:
    """The head of a request to a replica; `kept` are complete lines. A GET without a body gets no content-length."""
    query, method = scope["query_string"], scope["method"]
    path = upstream.path + scope["raw_path"]
    if query:
        path = b"%b?%b" % (path, query)
    framing = b"content-length: %d\r\n" % length if length or method in WITH_BODY else b""
    return b"%b %b HTTP/1.1\r\n%b%b%b\r\n" % (method.encode(), path, upstream.host_line, kept, framing)
