"""The first half of a request whose prompt is computed elsewhere: an attempt at a prefill replica, before its own.

However it ends, the request goes on: with the KV that is handed over, or as if nothing had been tried.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw, Struct

from api.generation_apis import APIS
from api.native import REQUEST_TYPE, KvSource, Native, envelope
from router.members.broken import Broken
from router.members.members import Member, ServedModel
from router.placement.decision import Decision, predict
from router.placement.elsewhere import Split, can_read, split, why_not_at_all
from router.placement.index import Matches
from router.placement.prices import LEAST_PULLED_TOKENS
from router.prompts.prompt import UNREADABLE, Prompt
from router.proxy.attempt import Attempt
from router.proxy.exchange import Exchange
from router.proxy.facts import RequestFacts
from router.proxy.headers import JSON_LINE, TO_READ, TRACED, request_to
from router.proxy.predicted_hit import PrefillHalf, PrefillOutcome
from router.proxy.retries import loss, refusal
from router.proxy.services import Services

# ---- KV handed over, in the words of each engine

# Step one asks the prefill replica for one token. Step two is the client's own request at the replica that generates.
#
# vLLM 0.33's NixlConnector: step one has `do_remote_decode`, and its answer names the blocks that it holds for a reader
# (`kv_transfer_params`), with which step two reads them. There is a lease of 30 s on the blocks, which the reader
# renews from when it has the request, and one read, after which the blocks may be anybody's. So parameters that have
# reached a replica are never sent again.
#
# Ours: after step one the prompt's blocks are in the cache, where any replica of the same layout may read them, more
# than once. Step two names the prefill replica first among its sources (`api.native.Native`).

MAX_BODY_BYTES = 2 * 1024 * 1024  # half a million tokens; it is parsed once more, within milliseconds
MAX_NESTED = 16 * 1024  # lists and objects
HELD_S = 20.0  # how long parameters are used: vLLM's lease less the time to reach the reader; ours may be evicted
MAX_ANSWER_BYTES = 8 * 1024 * 1024  # the limit for a prefill replica, which names every block of each KV-cache group

# Parsers take the last of two fields, so these stand for the client's own.
_ONE_TOKEN = {
    "chat": b',"max_tokens":1,"max_completion_tokens":1,"min_tokens":0,"stream_options":null',
    "completions": b',"max_tokens":1,"min_tokens":0,"stream_options":null',
    "messages": b',"max_tokens":1',
    "responses": b',"max_output_tokens":1,"store":false',
}


_NEUTRAL = {"use_beam_search": False, "echo": False, "background": False}  # beside null


class _Asked(Struct):
    """Fields of requests with several prompts or answers, or of which one replica needs all."""

    use_beam_search: Any = None
    echo: Any = None
    background: Any = None
    prompt_logprobs: Any = None
    prompt_embeds: Any = None
    previous_response_id: Any = None
    kv_transfer_params: Any = None  # the client's own, where they are passed on


class _Params(Struct):
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_prefill_cached_tokens: int | None = None


class _Answer(Struct):
    kv_transfer_params: Raw = Raw(b"null")


class Handed(Struct, frozen=True):
    """KV that a prefill replica holds: of vLLM, for one reader."""

    params: bytes  # vLLM's own words; empty: a replica of ours
    until_s: float  # may they be sent to the reader
    cached_tokens: int | None = None  # the tokens that it had found in its own cache


_decode_asked = msgspec.json.Decoder(_Asked).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_params = msgspec.json.Decoder(_Params | None).decode


def why_whole(api: str, prompt: Prompt, body: bytes | bytearray, *, needs_tokens: bool) -> str | None:
    """The reason why one replica has to take both halves of this request; None if two may.

    `needs_tokens`: their engine gets its tokens.
    """
    if api not in APIS:
        return f"requests of {api} have several prompts"
    if needs_tokens and not prompt.packed:
        return "its tokens are not known here"
    if len(body) > MAX_BODY_BYTES or body.count(b"[") + body.count(b"{") > MAX_NESTED:
        return "its body takes long to be read again"
    if prompt.choices != 1 or len(prompt.packed) > 1:
        return "it has several prompts or choices"
    try:
        asked = _decode_asked(body)
    except UNREADABLE:
        return "its body cannot be read"
    name = next(
        (name for name in _Asked.__struct_fields__ if getattr(asked, name) not in (None, _NEUTRAL.get(name))), None
    )
    return None if name is None else f"{name} needs all of it at one replica"


def handed_in(answer: bytes, now_s: float) -> Handed | None:
    """The parameters in a prefill replica's answer; None if it hands nothing over."""
    try:
        raw = bytes(_decode_answer(answer).kv_transfer_params)
        params = _decode_params(raw)
    except UNREADABLE:
        return None
    if params is None or not params.do_remote_prefill or params.remote_engine_id is None:
        return None
    return Handed(raw, now_s + HELD_S, params.remote_prefill_cached_tokens)


# ---- the beginning of an answer whose KV is fetched

_ERRORS = (b'data: {"error"', b"event: error\n", b"event: response.failed\n")
MAX_BEGINNING_BYTES = 64 * 1024
_BEFORE_TOKENS = {"chat": 1, "completions": 0, "messages": 1, "responses": 2}  # events that come before any token


class Beginning:
    """Holds the first events of a stream back: vLLM tells only there that it could not read the KV."""

    __slots__ = ("_events", "_held")

    def __init__(self, api: str) -> None:
        self._events = _BEFORE_TOKENS[api]
        self._held = b""

    def feed(self, body: bytes, complete: bool) -> bytes | None:
        """Return all that is held as soon as a token has come, or the end; None before."""
        self._held += body
        if not complete and len(self._held) < MAX_BEGINNING_BYTES and self._held.count(b"\n\n") <= self._events:
            return None
        return self._held

    @property
    def has_failed(self) -> bool:
        return any(event.lstrip().startswith(_ERRORS) for event in self._held.split(b"\n\n"))


# ---- the prefill half of a request

log = logging.getLogger(__name__)

MAX_PREFILLS = 2  # a request has a second one if the replica that was to generate is lost, as its KV is still cached
PAUSE_S = 30.0  # a replica rests this long if it hands nothing over, or its KV could not be read
PATIENCE, LEAST_PATIENCE_S = 4.0, 5.0  # beyond the estimated time, computing it again is better than waiting
NATIVE_TYPE = b"content-type: %b\r\n" % REQUEST_TYPE.encode()


def why_not_from(one: Member, decode: Member, now_s: float) -> str | None:
    """The reason why `one` cannot hand KV over to the replica that generates, beside what keeps it from any request."""
    if one.server is decode.server:
        return "generates the answer"
    if one.spec.engine != decode.spec.engine:
        return f"its engine is {one.spec.engine}, that of {decode.name} is {decode.spec.engine}"
    if one.profile.shares_cache and not can_read(decode.candidate, one.candidate):
        return f"{decode.name} cannot read its blocks: give both the same model, block size and --kv-secret"
    if one.no_prefill_until_s > now_s:
        return f"its KV could not be read; tried again in {one.no_prefill_until_s - now_s:.0f} s"
    return None


def split_of(
    router: Services, model: ServedModel, prompt: Prompt, decode: Decision, session: str | None, came_s: float | None
) -> tuple[Split, Mapping[int, Matches]]:
    """Weigh a prompt at the replica chosen to generate against the best one that could compute it for that one."""
    mode, placement, now_s = router.config.prefill_elsewhere, router.placement, router.now_s()
    why_not = "no two replicas have roles" if not model.splits else why_not_at_all(mode, decode)
    if why_not is not None or decode.chosen is None:
        return Split(False, why_not or ""), {}
    member = router.members.by_name[decode.chosen.name]
    if member.profile.hand_over is None:
        return Split(False, f"replicas of {member.spec.engine} hand no KV over"), {}
    excluded = {one.name for one in model.members if why_not_from(one, member, now_s) is not None}
    question, matches = placement.question(
        prompt,
        model.slots if prompt.exact else model.all_slots,
        now_s,
        session=session,
        tried=decode.question.tried | excluded,
        came_s=came_s,
        half="prefill",
        counts=False,
        tenant=decode.question.tenant,
    )
    prefill = placement.decide(question, model.candidates, policy="cost")
    return split(mode, decode, prefill, placement.transfers), matches


@dataclass(slots=True, eq=False)
class Prefill:
    """The first half of one request; `go_on` places the request when it has ended."""

    facts: RequestFacts
    router: Services
    go_on: Callable[[], None] | None  # None: the request has ended
    half: PrefillHalf = field(default_factory=PrefillHalf)  # its outcome, for the record
    _attempt: Attempt | None = None
    _answer: bytearray = field(default_factory=bytearray)
    _handed: Handed | None = None  # waits to be sent
    _sent: Handed | None = None  # went with the last attempt to generate
    _prefills: int = 0
    _is_given_up: bool = False

    @property
    def exchange(self) -> Exchange:
        return self.facts.exchange

    @property
    def model_name(self) -> str | None:
        return self.facts.model_name

    def begin(self, decode: Decision, model: ServedModel, prompt: Prompt, body: bytes) -> Attempt | None:
        """Send the prompt to a prefill replica, if that gains; None: the request is to be sent as it is."""
        if self._is_given_up or self._handed is not None or self._prefills >= MAX_PREFILLS:
            return None
        assert decode.chosen is not None, "its caller has looked"
        router, facts, hit = self.router, self.facts, self.half.at_replica
        needs_tokens = router.members.by_name[decode.chosen.name].profile.takes_envelope
        if (why_not := why_whole(facts.type.api, prompt, body, needs_tokens=needs_tokens)) is not None:
            self.half.split = Split(False, why_not)
            return None
        found, matches = split_of(router, model, prompt, decode, facts.session, facts.came_s)
        self.half.split = found
        if not found.elsewhere or found.prefill is None or found.prefill.chosen is None:
            return None
        decision, member = found.prefill, router.members.by_name[found.prefill.chosen.name]
        profile = member.profile
        hit.prompt, hit.decision, hit.member, hit.reported_tokens = prompt, decision, member, None
        hit.index_doubt = router.doubt(member)
        hit.prediction = predict(prompt, decision, member.block_size, matches)
        hit.predicted_at = None if hit.prediction is None or member.feed is None else member.feed.moment()
        assert profile.hand_over is not None, "its engine was asked"
        enveloped, speed = profile.takes_envelope, member.candidate.prefill_tokens_per_s  # before it is sent
        attempt = self._attempt = router.sent(self, member, decision, prompt, True, envelope=enveloped)
        attempt.half = "prefill"
        if speed:  # else the estimate is a guess
            attempt.within_s = max(LEAST_PATIENCE_S, PATIENCE * decision.ttft_s)
        self._prefills += 1
        self.half.outcome = None
        self._answer.clear()
        passed, types, before = TO_READ, JSON_LINE, b""
        if enveloped:  # it may read a part of the prompt from neighbours, too
            types, priority = NATIVE_TYPE, decision.priority_s(router.now_s())
            sources = [KvSource(one.endpoint, one.tokens) for one in decision.neighbours]
            native = Native(prompts=prompt.packed, priority=priority, cache_salt=prompt.salt, kv_sources=sources)
            before = envelope(native)
        if facts.trace is not None:
            passed, types = TRACED[passed], types + facts.trace.line()
        first_token = body.rstrip()[:-1] + _ONE_TOKEN[facts.type.api] + profile.hand_over
        request, rest = request_to(member, facts.exchange, facts.admitted, passed, types, first_token, envelope=before)
        attempt.sending = member.upstream.send(request, attempt, body=rest)
        return attempt

    # ---- what the attempt tells

    def begun(self, attempt: Attempt) -> None:
        self.router.answered(attempt)

    def take(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        self.router.computed(attempt)
        self._answer += body
        if len(self._answer) > MAX_ANSWER_BYTES:
            attempt.cancel()
        elif not complete:
            return
        profile = attempt.member.profile
        if profile.shares_cache:
            self._handed = Handed(b"", self.router.now_s() + HELD_S, attempt.cached_tokens)
        else:
            self._handed = handed_in(bytes(self._answer), self.router.now_s())
        if self._handed is None:
            self._pause(attempt.member, f"hands nothing over: {profile.hand_over_advice}")
            self._end(attempt, "nothing")
        else:
            self.half.at_replica.reported_tokens = self._handed.cached_tokens
            self._end(attempt, "handed")

    def holds(self, pending_bytes: int) -> bool:
        """Fail: a prefill replica is asked for no frames."""
        raise AssertionError(f"{pending_bytes} bytes of a frame that nobody asked for")

    def refused(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        self.router.learn(attempt, *refusal(attempt.status, body))
        if not complete:
            attempt.cancel()
        self._end(attempt, "refused")

    def failed(self, attempt: Attempt, broken: Broken) -> None:
        self.router.learn(attempt, loss(broken), str(broken))
        self._end(attempt, "late" if broken.late else "lost")

    def may_move(self, attempt: Attempt, members: Sequence[Member]) -> bool:  # noqa: ARG002
        """Agree: the replica that generates can compute the prompt itself."""
        return True

    def _end(self, attempt: Attempt, outcome: PrefillOutcome) -> None:
        self._attempt, self._answer = None, bytearray()
        self.router.attempt_over(attempt)
        self.half.duration_s = attempt.ended_s - attempt.placed.sent_s
        self._is_given_up = outcome != "handed"
        self.half.outcome = outcome
        attempt.member.prefills[outcome] += 1
        if outcome == "handed":
            attempt.member.prefill_s.observe(self.half.duration_s)
        if self.go_on is not None:
            self.go_on()

    def _pause(self, member: Member, why: str) -> None:
        now_s = self.router.now_s()
        if member.no_prefill_until_s <= now_s:
            log.warning("%s %s; no prompt is computed there for %g s", member.name, why, PAUSE_S)
        member.no_prefill_until_s = now_s + PAUSE_S

    # ---- the second half

    @property
    def source(self) -> Member | None:
        """The replica that holds the prompt's KV for one that generates; None: nothing is held."""
        if self._handed is None or self.half.at_replica.member is None:
            return None
        is_gone = self.half.at_replica.member.profile.shares_cache and not self.half.at_replica.member.candidate.kv_read
        if is_gone or self.router.now_s() >= self._handed.until_s:  # it waited too long for room
            self._handed, self._is_given_up = None, True
            return None
        return self.half.at_replica.member

    def hand_over(self, body: bytes) -> bytes:
        """The body for the replica that generates; what it names is read once, so it is not sent again."""
        handed, self._handed = self._handed, None
        assert handed is not None, "it is held"
        self._sent = handed
        return body.rstrip()[:-1] + b',"kv_transfer_params":' + handed.params + b"}"

    def give_back(self) -> None:
        """Keep the parameters for another replica: the last one was not reached."""
        self._handed, self._sent = self._sent, None

    def found(self, decision: Decision, cached_tokens: int) -> None:
        """Note how much of the prompt a replica of ours had when it began to compute: what it read is part of it."""
        question, chosen = decision.question, decision.chosen
        if self._handed is None or question.source is None or chosen is None:
            return
        own = question.reached(chosen.slot)
        missing = question.tokens - own
        # Less than half has come: it may have a few tokens more than it has said, such as the beginning of a block.
        if missing >= LEAST_PULLED_TOKENS and cached_tokens < own + missing / 2:
            self.unread()

    def unread(self) -> None:
        """Note that the replica that generates could not read the KV; the prompt is computed there."""
        self._handed, self._is_given_up = None, True
        if (member := self.half.at_replica.member) is not None:
            member.prefills["unread"] += 1
            self.half.outcome = "unread"
            self._pause(member, "handed KV over that could not be read")

    # ---- the end

    def close(self) -> None:
        self.go_on = None
        if (attempt := self._attempt) is not None:
            attempt.cancel()
            self._end(attempt, "left")
