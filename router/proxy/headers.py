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
# Engines obey these: they select a data-parallel rank, a worker, an adapter or a place in the queue, which is for the
# router to choose.
STEERING = frozenset(
    b"x-data-parallel-rank x-smg-routing-key x-smg-target-worker x-amzn-sagemaker-adapter-identifier "
    b"x-amzn-sagemaker-adapter-alias x-amzn-sagemaker-session-id x-warmroute-priority".split()
)
# Set by the router; a replica's key is not the router's.
TO_REPLICA = HOP_BY_HOP | STEERING | KEY_HEADERS | {b"x-request-id"}
COPIED_BYTES = 64 * 1024  # of a body; one write costs less than two
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
TO_NATIVE = TO_REPLICA | {b"accept", b"accept-encoding", b"content-type"}
# The router decides which pages may ask; engines admit all of them by default.
CORS = frozenset(b"access-control-allow-%b" % part for part in (b"credentials", b"headers", b"methods", b"origin"))
TO_CLIENT = HOP_BY_HOP | CORS | {b"x-request-id", b"x-warmroute-content-type", b"x-warmroute-replica"}
# A generation's body has been read as JSON, and goes on as that: no client names the type that only routers may send.
TO_FOREIGN = TO_REPLICA | {b"content-type"}
TO_READ = TO_FOREIGN | {b"accept-encoding"}  # where the answer is not only passed on
FROM_FRAMES = TO_CLIENT | {b"content-type"}
TRACED = {dropped: dropped | {b"traceparent"} for dropped in (TO_REPLICA, TO_NATIVE, TO_FOREIGN, TO_READ)}
WITH_KEY = {dropped: dropped - KEY_HEADERS for dropped in (*TRACED, *TRACED.values())}


def lines(headers: Sequence[Header], dropped: frozenset[bytes]) -> bytes:
    """Header lines without those dropped, and without those that any `connection` header names."""
    kept = []
    named: set[bytes] = set()
    for name, value in headers:
        if name not in dropped:
            kept.append(name + b": " + value + b"\r\n")
        elif name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            named.update(part.strip().lower() for part in value.split(b","))
    if named:
        others = [header for header in headers if header[0] != b"connection"]
        return lines(others, dropped | named)
    return b"".join(kept)


def value_of(headers: Iterable[Header], wanted: bytes) -> bytes | None:
    for name, value in headers:
        if name == wanted:
            return value
    return None


def request_to(
    member: Member,
    exchange: Exchange,
    admitted: Admitted,
    dropped: frozenset[bytes],
    more: bytes,
    body: bytes,
    path: bytes | None = None,
    envelope: bytes = b"",
) -> tuple[bytes, bytes]:
    """The bytes of a client's request for a replica, and its body apart if that is too large to copy."""
    scope = exchange.scope if path is None else {**exchange.scope, "raw_path": path}
    kept = lines_to(member, scope["headers"], admitted, dropped, more)
    head = request_head(scope, member.upstream, kept, len(envelope) + len(body))
    return (head + envelope + body, b"") if len(body) <= COPIED_BYTES else (head + envelope, body)


def lines_to(
    member: Member, headers: Sequence[Header], admitted: Admitted, dropped: frozenset[bytes], more: bytes
) -> bytes:
    """The header lines of a client's request for a replica, without those that frame its body.

    The client's key is dropped if it is for the router, or if the replica has a key of its own.
    """
    if admitted.key is None and not admitted.shows_key and not member.server.key_line:
        dropped = WITH_KEY[dropped]
    return lines(headers, dropped) + member.own_lines + admitted.id_line + more


def request_head(scope: Scope, upstream: Upstream, kept: bytes, length: int) -> bytes:
    """The head of a request to a replica; `kept` are complete lines. A GET without a body gets no content-length."""
    query, method = scope["query_string"], scope["method"]
    path = upstream.path + scope["raw_path"]
    if query:
        path = b"%b?%b" % (path, query)
    framing = b"content-length: %d\r\n" % length if length or method in WITH_BODY else b""
    return b"%b %b HTTP/1.1\r\n%b%b%b\r\n" % (method.encode(), path, upstream.host_line, kept, framing)
