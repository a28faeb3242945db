"""How a request gets to the chosen replica: over a connection of this router, unless a gateway forwards it."""

from router.placement.cost import NONE_TRIED
from router.placement.decision import Decision
from router.proxy.admission import Admitted
from router.proxy.attempt import Attempt
from router.proxy.exchange import Exchange
from router.proxy.headers import request_to


class Transport:
    is_single = False  # a replica is named once, and whoever forwards the request asks others by itself

    def beyond(self, exchange: Exchange) -> frozenset[str]:  # noqa: ARG002
        """The replicas that are out of this request's reach."""
        return NONE_TRIED

    def send(
        self,
        exchange: Exchange,
        admitted: Admitted,
        decision: Decision,  # noqa: ARG002
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
