"""A request that is none of ours to understand: it goes to a replica as it came, and the answer comes back so."""

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from api.errors import ApiError, invalid
from router.admission import Admitted
from router.attempt import Attempt, refusal_code
from router.exchange import Exchange
from router.headers import TO_CLIENT, TO_REPLICA, lines, request_to, value_of
from router.members import Member
from router.policy import Question, choose
from router.prompt import UNREADABLE, object_salted
from router.upstream import Broken

if TYPE_CHECKING:
    from router.core import Router

RESENT = frozenset({"GET", "HEAD", "OPTIONS"})  # done twice, nothing is different
# Where engines take a body that is no JSON, and make nothing of what is cached.
NO_GENERATION = frozenset({"/tokenize", "/detokenize", "/v1/classify", "/v1/embeddings", "/v1/rerank", "/v1/score"})
AUDIO = "/v1/audio/"
RESTING = ("draining", "loading")  # codes of replicas that take nothing new


class _Named(Struct):
    model: str | None = None


_decode_named = msgspec.json.Decoder(_Named).decode


class Forwarding:
    """Owns one exchange until its answer is complete."""

    def __init__(self, router: "Router", exchange: Exchange, admitted: Admitted) -> None:
        self._router = router
        self._exchange = exchange
        self._admitted = admitted
        self._attempt: Attempt | None = None
        self._body = b""
        self._tried: frozenset[str] = frozenset()
        self._begun_s = router.now_s()
        exchange.answerer = self
        exchange.on_end = self._over

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    def serve(self, exchange: Exchange) -> None:
        body = bytes(exchange.body)
        exchange.body.clear()
        try:
            self._body = self._salted(body)
            self._send(self._choose())
        except ApiError as error:
            exchange.refuse(error)

    def _salted(self, body: bytes) -> bytes:
        """With the salt of the key: nobody knows here what an engine generates on."""
        key, scope = self._admitted.key, self._exchange.scope
        if key is None or key.salt is None or not body:
            return body
        try:
            return object_salted(body, key.salted)
        except UNREADABLE as error:
            path = scope["path"]
            if path in NO_GENERATION or path.startswith(AUDIO):
                return body
            why = f"this API key's cache is kept apart by a field of the body, and that of {path} is not a JSON object"
            raise invalid(f"{why} ({error}); send one, or use a key without a salt") from error

    def _choose(self) -> Member:
        """The least loaded of those that serve the model, where the body names one."""
        members = self._router.members
        try:
            name = _decode_named(self._body).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            name = None
        candidates = members.model(name).candidates if name is not None else [one.candidate for one in members]
        question = Question(tokens=1, matched={}, lower={}, tried=self._tried, exact=False)
        decision = choose("least-loaded", question, candidates, self._router.rng)
        if decision.chosen is None:
            message = f"{decision.refusal()}; try again"
            headers = {"Retry-After": "1"}
            raise ApiError(503, message, "service_unavailable", code="no_replica", headers=headers)
        return members.by_name[decision.chosen.name]

    def _send(self, member: Member) -> None:
        attempt = self._attempt = self._router.attempt(self, member)
        request = request_to(member, self._exchange, self._admitted, TO_REPLICA, b"", self._body)
        method = self._exchange.scope["method"]
        bodiless, resend = method == "HEAD", method in RESENT
        attempt.sending = member.upstream.send(request, attempt, bodiless=bodiless, resend=resend)

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

    def refused(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        """What is full, or ends, has not begun with it."""
        code = refusal_code(body) if attempt.status in (429, 503) else None
        if code in RESTING:
            self._router.rests(attempt)
        if code in RESTING or code == "queue_full":
            tried = self._tried | {attempt.member.name}
            if self._router.others(None, tried):
                attempt.cancel()
                self._router.attempt_over(attempt)
                self._again(tried)
                return
        self._start(attempt)
        self.take(attempt, body, complete)

    def failed(self, attempt: Attempt, broken: Broken) -> None:
        """Sent again only where it cannot have arrived: nobody knows here what it would do twice."""
        self._router.attempt_over(attempt, str(broken), refused=broken.refused)
        self._attempt = None
        if self._exchange.response_started:
            self._exchange.cut()
        elif broken.refused:
            self._again(self._tried | {attempt.member.name})
        else:
            message = f"{attempt.member.name} was lost before it answered: {broken}"
            self._exchange.refuse(ApiError(502, message, "server_error", code="replica_lost"))

    def _again(self, tried: frozenset[str]) -> None:
        self._attempt, self._tried = None, tried
        try:
            self._send(self._choose())
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
