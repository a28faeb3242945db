"""One JSON line for every generation request: what analysis, simulation and replay of it need later.

Times that end in `at_s`, and those of reports, are of the router's own clock, which only its `run` has; `order` says in
which order the router did things that have the same time.
"""

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec
from msgspec import Raw, Struct, field

from router.cost import INFINITE
from router.line_file import LineFile
from router.report import Report

if TYPE_CHECKING:
    from router.attempt import Attempt
    from router.config import RouterConfig
    from router.decision import Decision
    from router.feeds import Feeds
    from router.members import Member
    from router.request import Request

COMPLETION = b'"completion_tokens"'
USUAL_TTL_S = 30.0
USUAL_LIMIT = 512
TOKEN_BYTES = 4
NO_BODY = Raw()  # msgspec leaves out a default by its identity
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})')
_encode = msgspec.json.Encoder().encode


class Weighed(Struct, omit_defaults=True, gc=False):
    """One replica in a decision, as it was then. New fields go last with a default; none is renamed."""

    name: str
    cost_s: float | None = None  # None: it could not take the request
    matched_tokens: float = 0  # in GPU memory
    lower_tokens: float | None = None  # in any medium, where that is more
    queued_tokens: float = 0
    running: int = 0
    waiting: int = 0
    in_flight: int = 0
    prefill_tokens_per_s: float = 0
    empty_tokens: float | None = None
    assigned_tokens: float = 0
    slowness: float = 1
    unavailable: str | None = None
    may_try_anyway: bool = False
    limit: int = USUAL_LIMIT
    max_model_len: int | None = None
    block_tokens: int = 0  # of its events; 0: it is matched by guesses
    cache_block_tokens: int = 0  # of its cache, as it says
    cache_blocks: int = 0
    seq: int | None = None  # the last batch of its events that was known; None: none are followed
    inexact: str | None = None  # why what was known of its cache may not have been all
    report: Report | None = None  # the last that had come


class Decided(Struct, omit_defaults=True):
    order: int
    at_s: float
    policy: str
    lot: int  # what near-equals were drawn with (`router.lot`)
    turn: int
    chosen: str | None = None
    tried: list[str] = []
    candidates: list[Weighed] = []


class Sending(Struct, omit_defaults=True):
    """A try at one replica."""

    replica: str
    sent_order: int
    sent_at_s: float
    uncached_tokens: int = 1
    begun_order: int = -1  # -1: it never was
    begun_at_s: float = 0
    ended_order: int = -1
    ended_at_s: float = 0
    streamed: bool = True  # what comes first is the first token
    fault: str | None = None


class Logged(Struct, kw_only=True, omit_defaults=True):
    """Rules for editing: new fields have a default, nothing is renamed. `body` is there only if prompts may be kept."""

    ts: float  # when it arrived, seconds since 1970
    request_id: str
    model: str
    prompt_tokens: int
    output_tokens: int | None = None
    cached_tokens: int | None = None  # as the replica reported
    block_tokens: int = 0  # 0: no blocks are known
    blocks: list[int] = []  # keys of the prompt's full blocks
    status: int = 200
    ttft_s: float | None = None
    duration_s: float = 0.0
    replica: str | None = None
    session: str | None = None
    exact: bool = True  # False: `prompt_tokens` is an estimate
    base_model: str | None = None  # where `model` is an adapter of it
    client_left: bool = False
    run: str = ""  # of the router's process
    at_s: float = 0.0  # when it arrived
    optimistic_ttl_s: float = USUAL_TTL_S
    decisions: list[Decided] = []
    sendings: list[Sending] = []
    raw_body: Raw = field(default=NO_BODY, name="body")  # `Raw | None` is nothing that msgspec can decode

    @property
    def body(self) -> Raw | None:
        return self.raw_body or None


class Noted:
    """What is kept of a request for its line while it runs."""

    __slots__ = ("attempts", "body", "completion_tokens", "decisions")

    def __init__(self) -> None:
        self.body = b""
        self.decisions: list[Decided] = []
        self.attempts: list[Attempt] = []
        self.completion_tokens: int | None = None  # by the usage that an engine sends

    def decided(
        self, order: int, now_s: float, decision: "Decision", members: Sequence["Member"], feeds: "Feeds"
    ) -> None:
        """To be called before the load changes."""
        question = decision.question
        matched, lower = question.matched.get, question.lower.get
        self.decisions.append(
            Decided(
                order,
                now_s,
                decision.policy,
                decision.lot,
                question.turn,
                None if decision.chosen is None else decision.chosen.name,
                sorted(question.tried),
                [
                    _weighed(member, cost, matched(member.slot, 0), lower(member.slot, 0), feeds)
                    for member, cost in zip(members, decision.costs, strict=True)
                ],
            )
        )

    def read(self, body: bytes) -> None:
        """A part of an answer that is no frames."""
        if COMPLETION in body:
            found = _COMPLETION_TOKENS.findall(body)
            self.completion_tokens = int(found[-1]) if found else self.completion_tokens


def _weighed(member: "Member", cost: float, matched: float, lower: float, feeds: "Feeds") -> Weighed:
    """Runs for every replica and request while a log is written: positions, no keywords."""
    candidate, load = member.candidate, member.load
    known = feeds.known(member.name)
    seq, inexact = (None, None) if known is None else known
    return Weighed(
        candidate.name,
        None if cost == INFINITE else cost,
        matched,
        lower if lower > matched else None,
        candidate.queued_tokens,
        candidate.running,
        candidate.waiting,
        candidate.in_flight,
        candidate.prefill_tokens_per_s,
        candidate.empty_tokens,
        candidate.assigned_tokens,
        candidate.slowness,
        candidate.unavailable,
        candidate.may_try_anyway,
        candidate.limit,
        candidate.max_model_len,
        member.block_size,
        load.block_size,
        load.total_blocks,
        seq,
        inexact,
        member.report,
    )


class RequestLog(LineFile):
    def __init__(self, path: str, *, bodies: bool, optimistic_ttl_s: float = USUAL_TTL_S) -> None:
        super().__init__(path, "request log")
        self.run = uuid4().hex[:12]
        self._bodies = bodies
        self._ttl_s = optimistic_ttl_s

    @classmethod
    def open(cls, config: "RouterConfig") -> "RequestLog | None":
        if config.request_log is None:
            return None
        return cls(config.request_log, bodies=config.log_prompts, optimistic_ttl_s=config.optimistic_ttl_s)

    def over(self, routing: "Request", now_s: float) -> None:
        """One for which no replica was ever looked for has no line."""
        if routing.noted is not None and routing.decision is not None:
            self.add(_encode(self._line(routing, routing.noted, now_s)))

    def _line(self, routing: "Request", noted: Noted, now_s: float) -> Logged:
        prompt = routing.prompt
        size = _block_tokens(routing)
        session = routing.session
        return Logged(
            ts=round(time.time() - (now_s - routing.arrived_s), 6),
            request_id=routing.admitted.request_id,
            model=routing.peek.model,
            prompt_tokens=prompt.tokens,
            output_tokens=_output_tokens(noted),
            cached_tokens=routing.reported_tokens,
            block_tokens=size,
            blocks=prompt.keys(size) if size else [],
            status=routing.exchange.status,
            ttft_s=round(routing.first_byte_s - routing.arrived_s, 6) if routing.first_byte_s else None,
            duration_s=round(now_s - routing.arrived_s, 6),
            replica=routing.chosen.name if routing.chosen is not None else None,
            session=None if session is None else session.encode("utf-8", "replace").decode(),
            exact=prompt.exact,
            base_model=prompt.model if prompt.lora is not None else None,
            client_left=routing.exchange.disconnected,
            run=self.run,
            at_s=routing.arrived_s,
            optimistic_ttl_s=self._ttl_s,
            decisions=noted.decisions,
            sendings=[_sending(attempt) for attempt in noted.attempts],
            raw_body=_one_line(noted.body) if self._bodies else NO_BODY,
        )


def _block_tokens(routing: "Request") -> int:
    """Of the replica that was chosen; of any where that one has none."""
    if not routing.prompt.exact:
        return 0
    if routing.block_size or routing.model is None:
        return routing.block_size
    return max(routing.model.slots, default=0)


def _output_tokens(noted: Noted) -> int | None:
    """Counted where token ids came; else as an engine said."""
    packed = [packed for attempt in noted.attempts for ids in attempt.token_ids.values() for packed in ids]
    if any(attempt.framed for attempt in noted.attempts):
        return sum(map(len, packed)) // TOKEN_BYTES + (noted.completion_tokens or 0)
    return noted.completion_tokens


def _sending(attempt: "Attempt") -> Sending:
    return Sending(
        attempt.member.name,
        attempt.sent_order,
        attempt.sent_s,
        attempt.uncached_tokens,
        attempt.begun_order,
        attempt.begun_s,
        attempt.ended_order,
        attempt.ended_s,
        attempt.streams,
        attempt.fault,
    )


def _one_line(body: bytes) -> Raw:
    try:
        return Raw(msgspec.json.format(body, indent=-1))
    except msgspec.DecodeError:  # what only a lenient reader takes for JSON
        return Raw(_encode(body.decode("utf-8", "replace")))
