"""A request that is none of ours to understand: it goes to a replica as it came, and the answer comes back so."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from api.errors import ApiError, invalid
from api.native import REQUEST_TYPE
from router.admission import Admitted
from router.attempt import Attempt, refusal_code
from router.exchange import Exchange
from router.headers import TO_CLIENT, TO_REPLICA, lines, request_to, value_of
from router.members import Member, no_replica
from router.placement.decision import Decision
from router.placement.placement import Unread
from router.prompt import UNREADABLE, object_salted
from router.reading.client import is_quick
from router.reading.messages import Found, Salt
from router.upstream import Broken

if TYPE_CHECKING:
    from router.core import Router

RESENT = frozenset({"GET", "HEAD", "OPTIONS"})  # done twice, nothing is different
UNREAD = Unread()
RESTING = ("draining", "loading")  # codes of replicas that take nothing new


class _Named(Struct):
    model: str | None = None


_decode_named = msgspec.json.Decoder(_Named).decode


def _model_in(body: bytes) -> str | None:
    try:
        return _decode_named(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class Forwarding:
    """Owns one exchange until its answer is complete."""

    def __init__(self, router: "Router", exchange: Exchange, admitted: Admitted, *, caches: bool) -> None:
        self._router = router
        self._caches = caches  # the engine may answer from its cache, so the body needs the key's salt
        self._exchange = exchange
        self._admitted = admitted
        self._attempt: Attempt | None = None
        self._body = b""
        self._model: str | None = None  # that the body names
        self._tried: frozenset[str] = frozenset()
        self._begun_s = router.now_s()
        exchange.answerer = self
        exchange.on_end = self._over

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    @property
    def model_name(self) -> str | None:
        return self._model

    def serve(self, exchange: Exchange) -> None:
        body = self._body = exchange.take_body()
        try:
            self._refuse_native()
            if not is_quick(body):
                self._router.aside(exchange, exchange.refuse, partial(self._read_apart, body))
                return
            self._body = self._salted(body)
            self._model = _model_in(self._body)
            self._send(*self._choose())
        except ApiError as error:
            exchange.refuse(error)

    def _refuse_native(self) -> None:
        """What only a router may say to a replica, such as a priority and the cache's salt, comes from no client."""
        for name, value in self._exchange.scope["headers"]:
            if name == b"content-type" and value.partition(b";")[0].strip().lower() == REQUEST_TYPE.encode():
                raise ApiError(415, f"{REQUEST_TYPE} is what a router sends; send application/json", code="router_only")

    async def _read_apart(self, body: bytes) -> None:
        key = self._admitted.key

        def want(found: Found) -> Salt | None:
            self._model = found.fields.get("model")
            if key is None or key.salt is None:
                return None
            if found.error is not None:
                self._check_needs_no_salt(found.error)
                return None
            return Salt(key.salted(found.fields.get("cache_salt")))

        made = await self._router.reading.read(body, want, whole=False)
        self._exchange.aside = None
        if made is not None and made.body is not None:
            self._body = made.body
        self._send(*self._choose())

    def _salted(self, body: bytes) -> bytes:
        """With the salt of the key: nobody knows here what an engine generates on."""
        key = self._admitted.key
        if key is None or key.salt is None or not body:
            return body
        try:
            return object_salted(body, key.salted)
        except UNREADABLE as error:
            self._check_needs_no_salt(str(error))
            return body

    def _check_needs_no_salt(self, error: str) -> None:
        """Refuse a body without room for a salt (400) where the engine may answer from its cache."""
        if self._caches:
            path = self._exchange.scope["path"]
            why = f"this API key's cache is kept apart by a field of the body, and that of {path} is not a JSON object"
            raise invalid(f"{why} ({error}); send one, or use a key without a salt")

    def _choose(self) -> tuple[Member, Decision]:
        """The least loaded of those that serve the model, where the body names one."""
        router, name = self._router, self._model
        candidates = (
            router.members.model(name).candidates if name is not None else [one.candidate for one in router.members]
        )
        question, _ = router.placement.question(UNREAD, {}, router.now_s(), tried=self._tried)
        decision = router.placement.decide(question, candidates, policy="least-loaded")
        if decision.chosen is None:
            raise no_replica(decision.refusal())
        return router.members.by_name[decision.chosen.name], decision

    def _send(self, member: Member, decision: Decision) -> None:
        attempt = self._attempt = self._router.sent(self, member, decision, UNREAD, False)
        attempt.takes_frames = False
        request, body = request_to(member, self._exchange, self._admitted, TO_REPLICA, b"", self._body)
        method = self._exchange.scope["method"]
        bodiless, resend = method == "HEAD", method in RESENT
        attempt.sending = member.upstream.send(request, attempt, body=body, bodiless=bodiless, resend=resend)

    # ---- what the attempt tells

    def begun(self, attempt: Attempt) -> None:
        self._router.answered(attempt)
        self._start(attempt)

    def _start(self, attempt: Attempt) -> None:
        length = value_of(attempt.headers, b"content-length")
        head = lines(attempt.headers, TO_CLIENT) + attempt.member.name_line
        known = int(length) if length is not None and length.isdigit() else None
        self._exchange.start(attempt.status, head, length=known)

    def take(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        if complete:
            self._router.attempt_over(attempt)
            self._attempt = None
            self._exchange.finish(body)
        elif body:
            self._exchange.send(body)
        else:
            self._exchange.flush()

    def holds(self, pending_bytes: int) -> bool:
        """Frames are for generation requests alone."""
        raise AssertionError(f"{pending_bytes} bytes of a frame that nobody asked for")

    def refused(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        """One that is too busy, or ends, has not begun with it."""
        code = refusal_code(body) if attempt.status in (429, 503) else None
        if code in RESTING:
            self._router.rests(attempt)
        elif attempt.status in (429, 503):
            self._router.refused_at_once(attempt)
        tried = self._tried | {attempt.member.name}
        if attempt.status in (429, 503) and self._others(tried):
            certain = code in RESTING or code == "queue_full"
            if certain or self._router.retry_budget.take(self._router.now_s()):
                attempt.cancel()
                self._router.attempt_over(attempt)
                self._again(tried)
                return
        self._start(attempt)
        self.take(attempt, body, complete)

    def _others(self, tried: frozenset[str]) -> bool:
        model = None if self._model is None else self._router.members.model(self._model)
        return self._router.others(model, tried)

    def failed(self, attempt: Attempt, broken: Broken) -> None:
        """Sent again only where it cannot have arrived: nobody knows here what it would do twice."""
        self._router.attempt_over(attempt, broken.fault, refused=broken.refused, silent=broken.silent)
        self._attempt = None
        if self._exchange.response_started:
            self._exchange.cut()
        elif broken.refused:
            self._again(self._tried | {attempt.member.name})
        else:
            message = f"{attempt.member.name} was lost before it answered: {broken}"
            self._exchange.refuse(ApiError(502, message, "server_error", code="replica_lost"))

    def may_move(self, attempt: Attempt, members: Sequence[Member]) -> bool:
        """Its client is told, and may ask somebody else; nobody asks the same one again for it."""
        return any(one is not attempt.member and (self._model is None or self._model in one.models) for one in members)

    def _again(self, tried: frozenset[str]) -> None:
        self._attempt, self._tried = None, tried
        try:
            self._send(*self._choose())
        except ApiError as error:
            self._exchange.refuse(error)

    # ---- what the client does

    def client_left(self) -> None:
        """Its attempt ends with it, in `_over`."""

    def client_full(self) -> None:
        if self._attempt is not None and self._attempt.sending is not None:
            self._attempt.sending.pause()

    def client_ready(self) -> None:
        if self._attempt is not None and self._attempt.sending is not None:
            self._attempt.sending.resume()

    def _over(self, exchange: Exchange) -> None:
        if self._attempt is not None:  # it ended before its attempt did
            self._attempt.cancel()
            self._router.attempt_over(self._attempt)
            self._attempt = None
        self._router.released(exchange, self._admitted, self._begun_s)
