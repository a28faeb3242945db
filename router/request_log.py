"""One JSON line for every generation request: what analysis, simulation and replay of it need later."""

import logging
import time
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec
from msgspec import Raw

from router.line_file import LineFile
from router.logged import NO_BODY, Logged, Sending
from router.noted import Noted

if TYPE_CHECKING:
    from router.attempt import Attempt
    from router.config import RouterConfig
    from router.request import Request

log = logging.getLogger(__name__)

TOKEN_BYTES = 4
_encode = msgspec.json.Encoder().encode


class RequestLog(LineFile):
    def __init__(self, path: str, *, bodies: bool) -> None:
        super().__init__(path, "request log")
        self.run = uuid4().hex[:12]
        self._bodies = bodies
        self._has_failed = False

    @classmethod
    def open(cls, config: "RouterConfig") -> "RequestLog | None":
        if config.request_log is None:
            return None
        return cls(config.request_log, bodies=config.log_prompts)

    def over(self, routing: "Request", now_s: float) -> None:
        """One for which no replica was ever looked for has no line. A mistake in here costs the line alone."""
        try:
            if routing.noted is not None and routing.decision is not None:
                self.add(_encode(self._line(routing, routing.noted, now_s)))
        except Exception:
            if not self._has_failed:  # said once, and not for every request
                log.exception("A line of the request log could not be made; it is lost, like all that fail so")
            self._has_failed = True
            self.lost_lines += 1
            self._lost_before += 1  # the file itself works
        finally:
            routing.noted = None  # its attempts have the request: a cycle, which would keep the body

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
    placed = attempt.placed
    return Sending(
        attempt.member.name,
        attempt.sent_order,
        placed.sent_s,
        placed.uncached_tokens,
        attempt.begun_order,
        attempt.begun_s,
        attempt.ended_order,
        attempt.ended_s,
        placed.streams,
        attempt.fault,
        placed.priority_s,
        placed.awaited_s,
    )


def _one_line(body: bytes) -> Raw:
    try:
        return Raw(msgspec.json.format(body, indent=-1))
    except (msgspec.DecodeError, RecursionError):  # what only a lenient reader takes for JSON; nested too deep
        return Raw(_encode(body.decode("utf-8", "replace")))
