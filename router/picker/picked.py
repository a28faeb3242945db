"""How a gateway forwards requests: the router places and observes them, and the gateway sends and retries them."""

from api.errors import ApiError, quoted
from api.native import PRIORITY_HEADER
from router.members.members import Member, Members
from router.picker.exchange import PickedExchange
from router.placement.cost import INFINITE, NONE_TRIED
from router.placement.decision import Decision
from router.proxy.admission import Admitted
from router.proxy.attempt import Attempt
from router.proxy.exchange import Exchange
from router.proxy.headers import Transport, lines_to
from router.proxy.request import Request

PRIORITY_LINE = b"%b: %%.3f\r\n" % PRIORITY_HEADER.encode()
PASSED_OVER = "the gateway did not reach it, and took another one"


class ByGateway(Transport):
    is_single = True

    def __init__(self, members: Members, fallbacks: int) -> None:
        self._members = members
        self._fallbacks = fallbacks

    def beyond(self, exchange: Exchange) -> frozenset[str]:
        """The replicas beyond those that the gateway offers; the router's may have changed since it began."""
        subset = picked(exchange).asked.subset
        if subset is None:
            return NONE_TRIED
        return frozenset(one.name for one in self._members if not _is_in(subset, one))

    def send(
        self,
        exchange: Exchange,
        admitted: Admitted,
        decision: Decision,
        attempt: Attempt,
        passed: frozenset[bytes],
        more: bytes,
        body: bytes,
        *_: object,
        **__: object,
    ) -> None:
        """Tell the gateway the choice, with the headers and the body that the replica would get from this router."""
        member = attempt.member
        endpoint = endpoint_of(member)
        if endpoint is None:
            raise no_address(member)
        attempt.sending = member.upstream.watch(attempt)
        if attempt.placed.priority_s is not None:
            more += PRIORITY_LINE % attempt.placed.priority_s
        endpoints = [endpoint, *fallbacks(decision, member, self._members)[: self._fallbacks]]
        lines = lines_to(member, exchange.scope["headers"], admitted, passed, more)
        picked(exchange).pick(attempt, endpoints, lines, body)


def picked(exchange: Exchange) -> PickedExchange:
    assert isinstance(exchange, PickedExchange), "gateways' requests have no other"
    return exchange


def moved(request: Request, address: str) -> None:
    """Count a request where it has gone after all, if that is not the first choice."""
    attempt, decision = request.attempt, request.flow.decision
    if attempt is None or decision is None or endpoint_of(attempt.member) == address:
        return
    members = request.router.members
    there = (one for one in members if address in (one.upstream.target.authority, one.upstream.reached_at))
    found = next((one for one in there if one.spec.role != "prefill"), None)
    if found is None:
        return
    attempt.cancel()
    request.flow.passed_over(PASSED_OVER)
    attempt = picked(request.exchange).attempt = request.record_sent(found, decision, streams=attempt.placed.streams)
    attempt.sending = found.upstream.watch(attempt)
    request.hit.member, request.hit.prediction = found, None


def endpoint_of(member: Member) -> str | None:
    """The address that a gateway can send to, which would look up no name; None: the router has not reached it yet."""
    return member.upstream.reached_at or None


def no_address(member: Member) -> ApiError:
    host = member.upstream.target.host
    why = f"the replica {member.name} is at {quoted(host)}, whose IP address is not known yet; try again"
    return ApiError(503, why, "service_unavailable", code="no_address")


def fallbacks(decision: Decision, member: Member, members: Members) -> list[str]:
    """The next best replicas, for a gateway that retries: those to which the same headers may go."""
    chosen, found = endpoint_of(member), list[str]()
    for cost, candidate in sorted(zip(decision.costs, decision.candidates, strict=True), key=lambda one: one[0]):
        other = members.by_name.get(candidate.name)
        if cost < INFINITE and other is not None and other.own_lines == member.own_lines:
            endpoint = endpoint_of(other)
            if endpoint is not None and endpoint not in (chosen, *found):
                found.append(endpoint)
    return found


def _is_in(subset: frozenset[str], member: Member) -> bool:
    upstream = member.upstream
    host = upstream.reached_at.rpartition(":")[0].strip("[]")
    return not subset.isdisjoint((upstream.target.authority, upstream.target.host, upstream.reached_at, host))
