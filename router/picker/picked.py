"""Requests that a gateway forwards: placed and observed as all others are, but sent on, and retried, by the gateway."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from api.errors import ApiError, quoted
from api.native import PRIORITY_HEADER
from router.members.broken import Broken
from router.members.members import Member
from router.picker.exchange import PickedExchange
from router.placement.cost import INFINITE
from router.placement.decision import Decision
from router.prompts.prompt import Prompt, salted_for
from router.proxy.attempt import Attempt
from router.proxy.conversing import Conversing, OfResponse
from router.proxy.exchange import Exchange
from router.proxy.forwarding import Forwarding
from router.proxy.headers import JSON_LINE, TO_REPLICA, TRACED, lines_to
from router.proxy.prompted_request import PromptedRequest
from router.proxy.request import Request
from router.proxy.retries import LOST, Row, loss

if TYPE_CHECKING:
    from router.members.members import Members

PRIORITY_LINE = b"%b: %%.3f\r\n" % PRIORITY_HEADER.encode()
PASSED_OVER = "the gateway did not reach it, and took another one"


class Picked(Request):
    """The parts that all of these requests share; it comes before their own kind."""

    __slots__ = ()
    exchange: PickedExchange
    _type: bytes  # of those that are forwarded

    # ---- the choice

    def _is_ready(self) -> bool:
        """Leave out replicas beyond those that the gateway offers; the router's may have changed since it began."""
        subset = self.exchange.asked.subset
        if subset is not None:
            beyond = frozenset(one.name for one in self.router.members if not _is_in(subset, one))
            self.tried, self.unfit = self.tried | beyond, self.unfit | beyond
        return super()._is_ready()

    def _computes_elsewhere(self, decision: Decision) -> bool:  # noqa: ARG002
        return False  # the gateway forwards a request once

    def _sent(self, member: Member, decision: Decision, *, streams: bool, envelope: bool = False) -> Attempt:
        envelope = member.profile.takes_envelope  # a header, in its place
        return Request._sent(self, member, decision, streams=streams, envelope=envelope)

    def _pick(self, attempt: Attempt, passed: frozenset[bytes], more: bytes, body: bytes) -> None:
        """Tell the gateway the choice, with the headers and the body that the replica would get from this router."""
        member, decision = attempt.member, self.decision
        assert decision is not None, "the attempt follows from it"
        endpoint = endpoint_of(member)
        if endpoint is None:
            raise no_address(member)
        attempt.sending = member.upstream.watch(attempt)
        if attempt.placed.priority_s is not None:
            more += PRIORITY_LINE % attempt.placed.priority_s
        others = fallbacks(decision, member, self.router.members)
        endpoints = [endpoint, *others[: self.router.config.picker_fallbacks]]
        lines = lines_to(member, self.exchange.scope["headers"], self.admitted, passed, more)
        self.exchange.pick(attempt, endpoints, lines, body)

    def _hand_over(self, attempt: Attempt, body: bytes) -> None:
        self._pick(attempt, TO_REPLICA, self._type, body)

    # ---- the answer

    def _start(self, attempt: Attempt) -> None:
        self.exchange.start(attempt.status, b"")

    def moved(self, address: str) -> None:
        """Count the request where it has gone after all, if that is not the first choice."""
        attempt, decision = self.attempt, self.decision
        if attempt is None or decision is None or endpoint_of(attempt.member) == address:
            return
        found = next((one for one in self.router.members if one.spec.role != "prefill" and _is_at(one, address)), None)
        if found is None:
            return
        attempt.cancel()
        self.router.learn(attempt, LOST, PASSED_OVER)
        self._end_attempt(attempt)
        self.retries += 1
        attempt = self.exchange.attempt = self._sent(found, decision, streams=attempt.placed.streams)
        attempt.sending = found.upstream.watch(attempt)
        self.hit.member, self.hit.prediction = found, None

    def _may_ask_another(self, attempt: Attempt, row: Row) -> bool:  # noqa: ARG002
        return False  # the gateway may

    def failed(self, attempt: Attempt, broken: Broken) -> None:
        """End the request here: whether it goes on is for the gateway to decide."""
        self._broke(attempt, loss(broken), str(broken))
        self.why = str(broken)
        self.exchange.cut()

    def may_move(self, attempt: Attempt, members: Sequence[Member]) -> bool:  # noqa: ARG002
        return False


class PickedForwarding(Picked, Forwarding):
    __slots__ = ()


class PickedOfResponse(Picked, OfResponse):
    __slots__ = ()


class PickedGeneration(Picked, PromptedRequest):
    __slots__ = ()

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        self._take_notes()

    def prompted(self, prompt: Prompt) -> None:
        assert self.model is not None, "it was asked to make the prompt"
        self.prompt, self._tokens_of_model = prompt, self.model.tokens
        self.place_in_turn()

    def _send(self, member: Member, decision: Decision) -> bool:
        attempt = self._sent(member, decision, streams=bool(self.peek.stream))
        passed, types = TO_REPLICA, JSON_LINE
        if self.trace is not None:
            passed, types = TRACED[passed], types + self.trace.line()
        self._pick(attempt, passed, types, salted_for(self.prompt, self._body))
        if self.prompt.shape is not None and not member.profile.takes_envelope:
            self.hit.verify(self.router, self.model, self.prompt, self.api.name, self._body)
        self._body = b""  # the gateway has it
        return True

    def begun(self, attempt: Attempt) -> None:
        self._is_answered()
        self.router.answered(attempt)
        if attempt.cached_tokens is not None:
            self.hit.reported_tokens = attempt.cached_tokens
        self._start(attempt)

    def take(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        if body and not attempt.begun_s:
            self.router.computed(attempt)
        self._observe(attempt, body)
        if complete:
            self._end_attempt(attempt)
            self.exchange.finish(body)
        else:
            self.exchange.send(body)


class PickedConversing(Picked, Conversing):
    __slots__ = ()

    def _is_for_ours(self, exchange: Exchange) -> bool:  # noqa: ARG002
        return False  # no replica of ours gets the envelope that goes with a generation


def endpoint_of(member: Member) -> str | None:
    """The address that a gateway can send to, which would look up no name; None: the router has not reached it yet."""
    return member.upstream.reached_at or None


def no_address(member: Member) -> ApiError:
    host = member.upstream.target.host
    why = f"the replica {member.name} is at {quoted(host)}, whose IP address is not known yet; try again"
    return ApiError(503, why, "service_unavailable", code="no_address")


def fallbacks(decision: Decision, member: Member, members: "Members") -> list[str]:
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


def _is_at(member: Member, address: str) -> bool:
    return address in (member.upstream.target.authority, member.upstream.reached_at)
