"""The gateway's side of one request: it gives the body, takes a choice or a refusal, and shows the answer go by."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from api.errors import ApiError, internal, quoted
from api.native import PRIORITY_HEADER
from router.http.picker import stream
from router.members.members import Member, Members
from router.members.upstream import Header
from router.placement.cost import NONE_TRIED
from router.proxy.attempt import Attempt
from router.proxy.exchange import Exchange
from router.proxy.headers import CORS, HOP_BY_HOP, Transport, lines_to
from router.proxy.request import Request
from router.tenants.admission import Admitted

PRIORITY_LINE = b"%b: %%.3f\r\n" % PRIORITY_HEADER.encode()
FRAMING = HOP_BY_HOP - {b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"}
# A gateway goes on by these, and no engine reads them. Without `x-forwarded-proto` Envoy finds no route.
GATEWAYS_OWN = (b":", b"x-envoy-", b"x-gateway-destination-endpoint", b"x-forwarded-proto")


@dataclass(eq=False, kw_only=True)  # `super()` would fail with slots
class PickedExchange(Exchange):
    asked: stream.RequestHeaders
    outcome: stream.Outcome | None = None
    is_decided: bool = False
    on_decided: Callable[[], object] | None = None
    attempt: Attempt | None = None  # the one at the chosen replica
    _is_replaced: bool = False
    _given: bytes | bytearray = b""  # the body as it came
    _lines: bytes = b""

    # ---- messages of the gateway

    def hear(self, message: stream.Message) -> None:
        """Take a message after the first one."""
        if self.response_complete:
            return
        match message:
            case stream.RequestBody(body, end) if self.more_body:
                if self._served is not None:  # else nobody reads it, nor counts it
                    self.body += body
                self.more_body = not (end or self.asked.request_mode == stream.Mode.BUFFERED)  # trailers may follow
                self.set()
            case stream.RequestTrailers() if self.more_body:
                self.more_body = False
                self.set()
            case stream.ResponseHeaders():
                if message.served and isinstance(self.answerer, Request):
                    self.guard(moved, self.answerer, message.served)
                attempt = self.attempt
                if attempt is None or attempt.sending is None:  # the gateway answers by itself
                    self.leave()
                    return
                attempt.member.upstream.spoken = True
                attempt.sending.answered(message.status, list(message.headers))
                if message.end or (message.status >= 400 and not self.is_watched):
                    self._received(b"", end=True)
            case stream.ResponseBody(body, end):
                self._received(body, end=end)
            case stream.ResponseTrailers():
                self._received(b"", end=True)

    def leave(self) -> None:
        """End the request, whose stream has ended, if it has not ended before."""
        if not self.is_watched and self.attempt is not None and self.attempt.status:
            self._received(b"", end=True)
        self.disconnected = True
        self.set()
        self.attempt = self.on_decided = None  # a cycle of references would wait for the collector

    def _received(self, body: bytes, *, end: bool) -> None:
        attempt = self.attempt
        if attempt is not None and attempt.sending is not None:
            attempt.member.upstream.spoken = True
            attempt.sending.received(body, end)

    def replace_body(self, body: bytearray | None) -> None:
        super().replace_body(body)
        self._is_replaced = body is not None

    def take_body(self) -> bytes:
        self._given = self.body
        return super().take_body()

    # ---- what the router decides

    def pick(self, attempt: Attempt, lines: bytes, body: bytes) -> None:
        """Name the replica: with these header lines and this body it gets what this router itself would send."""
        self.attempt = attempt
        # The usual spelling, which was admitted: a replica might read another one differently.
        path, query = self.scope["raw_path"], self.scope["query_string"]
        target = (b":path", b"%b?%b" % (path, query) if query else path)
        before, after = changeable(self.asked.headers), changeable([target, *headers_in(lines)])
        changed = [(name, value) for name, values in after.items() if before.get(name) != values for value in values]
        mutation = stream.Mutation(changed, [name for name in before if name not in after])
        is_changed = self._is_replaced or body != self._given
        self._decide(stream.Pick(attempt.member.upstream.reached_at, mutation, body, is_changed))

    def added_to_answer(self) -> list[Header]:
        name_line = b"" if self.attempt is None else self.attempt.member.name_line
        more = b"" if self.more_lines is None else self.more_lines()
        return list(headers_in(name_line + self.extra + more))

    def changed_in_answer(self, headers: Iterable[Header]) -> stream.Mutation:
        """The changes of an answer's head. A replica does not say which pages may read it."""
        added = self.added_to_answer()
        names = {name for name, _ in added}
        removed = {name for name, _ in headers if name in CORS} - names
        return stream.Mutation(added, [] if self.attempt is None else sorted(removed))

    def _decide(self, outcome: stream.Outcome) -> None:
        self.outcome, self._given = outcome, b""
        self.is_decided = True
        if self.on_decided is not None:
            self.on_decided()

    def told(self) -> stream.Outcome:
        """Hand the outcome over to the caller."""
        outcome, self.outcome = self.outcome, None
        assert outcome is not None, "it is decided"
        return outcome

    # ---- what goes to the client

    def start(self, status: int, headers: bytes, *, length: int | None = None) -> None:  # noqa: ARG002
        self.response_started, self.status, self._lines = True, status, headers

    def flush(self) -> None:
        """Do nothing: the gateway has the head."""

    def send(self, body: bytes) -> None:
        self.sent_bytes += len(body)

    def finish(self, body: bytes = b"") -> None:
        if self.disconnected or self.response_complete:
            return
        self.sent_bytes += len(body)
        if not self.is_decided:
            headers = [*headers_in(self._lines), *self.added_to_answer()]
            self._decide(stream.Refusal(self.status, headers, bytes(body)))
        self._end()

    def cut(self) -> None:
        """End the request for this router; the gateway goes on with it, if it knows where."""
        if not self.is_decided:
            self._decide(refusal(internal()))
        self._end()

    @property
    def unread_bytes(self) -> int:
        return 0

    def abandon(self) -> None:
        self._end()


def refusal(error: ApiError) -> stream.Refusal:
    return stream.Refusal(error.status, [(b"content-type", b"application/json")], error.body())


def headers_in(lines: bytes) -> Iterator[Header]:
    for line in lines.split(b"\r\n"):
        if line:
            name, _, value = line.partition(b": ")
            yield name.lower(), value


def changeable(headers: Iterable[Header]) -> dict[bytes, list[bytes]]:
    """Headers by name; a gateway's own, and those of frames, are left alone."""
    found: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if name == b":path" or not (name in FRAMING or name.startswith(GATEWAYS_OWN)):
            found.setdefault(name, []).append(value)
    return found


class ByGateway(Transport):
    is_single = True

    def __init__(self, members: Members) -> None:
        self._members = members

    def beyond(self, exchange: Exchange) -> frozenset[str]:
        """The replicas beyond those that the gateway offers; the router's may have changed since it began."""
        subset = picked(exchange).asked.subset
        if subset is None:
            return NONE_TRIED
        return frozenset(member.name for member in self._members if subset.isdisjoint(addresses(member)))

    def send(
        self,
        exchange: Exchange,
        admitted: Admitted,
        attempt: Attempt,
        passed: frozenset[bytes],
        more: bytes,
        body: bytes,
        *_: object,
        **__: object,
    ) -> None:
        """Tell the gateway the choice, with the headers and the body that the replica would get from this router."""
        member = attempt.member
        if not member.upstream.reached_at:  # a gateway would look up no name
            host = quoted(member.upstream.target.host)
            why = f"the replica {member.name} is at {host}, whose IP address is not known yet; try again"
            raise ApiError(503, why, "service_unavailable", code="no_address")
        attempt.sending = member.upstream.watch(attempt)
        if attempt.placed.priority_s is not None:
            more += PRIORITY_LINE % attempt.placed.priority_s
        lines = lines_to(member, exchange.scope["headers"], admitted, passed, more)
        picked(exchange).pick(attempt, lines, body)


def addresses(member: Member) -> tuple[str, str, str, str]:
    """The names that a gateway may give a replica, with its port or without."""
    at, reached_at = member.upstream.target, member.upstream.reached_at
    return at.authority, at.host, reached_at, reached_at.rpartition(":")[0].strip("[]")


def picked(exchange: Exchange) -> PickedExchange:
    assert isinstance(exchange, PickedExchange), "gateways' requests have no other"
    return exchange


def moved(request: Request, address: str) -> None:
    """Count a request where it has gone after all, if that is not the first choice."""
    attempt, decision = request.attempt, request.flow.decision
    if attempt is None or decision is None or attempt.member.upstream.reached_at == address:
        return
    there = (one for one in request.router.members if address in addresses(one))
    found = next((one for one in there if one.spec.role != "prefill"), None)
    if found is None:
        return
    attempt.cancel()
    request.flow.passed_over("the gateway did not reach it, and took another one")
    attempt = picked(request.exchange).attempt = request.record_sent(found, decision, streams=attempt.placed.streams)
    attempt.sending = found.upstream.watch(attempt)
    request.hit.member, request.hit.prediction = found, None
