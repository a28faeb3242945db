"""One JSON line for every generation request, with the data for later analysis and simulation."""

import logging
import time
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec
from msgspec import Raw

from router.log_lines import NO_BODY, LogLine, Sending
from router.records.line_file import LineFile

if TYPE_CHECKING:
    from router.proxy.attempt import Attempt
    from router.proxy.predicted_hit import PredictedHit
    from router.proxy.request_summary import PastDecision, RequestSummary
    from router.responses import DecisionRecord

log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode


class RequestLog(LineFile):
    def __init__(self, path: str, *, bodies: bool) -> None:
        super().__init__(path, "request log")
        self.run = uuid4().hex[:12]
        self._bodies = bodies
        self._has_failed = False

    def over(self, summary: "RequestSummary", generation: "PredictedHit", past: "PastDecision") -> None:
        """Write the line of a finished request. A mistake costs only the line."""
        try:
            self.add(_encode(self._line(summary, generation, past.record())))
        except Exception:  # any mistake in making the line: the request itself went well
            if not self._has_failed:  # logged once, not for every request
                log.exception("Cannot make a line of the request log; lines with this error are lost")
            self._has_failed = True
            self.lost_lines += 1
            self._lost_before += 1  # the file itself works

    def _line(self, summary: "RequestSummary", generation: "PredictedHit", record: "DecisionRecord") -> LogLine:
        prompt, ttft_s = generation.prompt, summary.ttft_s
        size = generation.block_size  # the chosen replica's, else the model's largest
        if prompt.exact and not size and summary.model is not None:
            size = max(summary.model.slots, default=0)
        session, predicted = generation.decision.question.session, generation.prediction
        return LogLine(
            ts=round(time.time() - summary.duration_s, 6),
            request_id=summary.admitted.request_id,
            model=generation.prompt.peek.model,
            prompt_tokens=prompt.tokens,
            output_tokens=summary.output_tokens,
            cached_tokens=generation.reported_tokens,
            block_tokens=size,
            blocks=prompt.keys(size) if size else [],
            status=summary.exchange.status,
            ttft_s=None if ttft_s is None else round(ttft_s, 6),
            duration_s=round(summary.duration_s, 6),
            replica=generation.member.name if generation.member is not None else None,
            session=None if session is None else session.encode("utf-8", "replace").decode(),
            exact=prompt.exact,
            base_model=prompt.model if prompt.lora is not None else None,
            client_left=summary.exchange.disconnected,
            run=self.run,
            at_s=summary.arrived_s,
            policy=record.policy,
            estimated_ttft_s=record.estimated_ttft_s,
            candidates=record.candidates,
            known_batch=None if generation.predicted_at is None else generation.predicted_at.batch,
            sendings=[_sending(attempt) for attempt in summary.attempts],
            raw_body=_one_line(summary.logged) if self._bodies else NO_BODY,
            index_exact=generation.exactness.index,
            prediction_exact=generation.exactness.prediction,
            predicted_tokens=None if predicted is None else predicted.tokens,
            prefill=record.prefill,
            further_tokens=prompt.all_tokens - prompt.tokens,
        )


def _sending(attempt: "Attempt") -> Sending:
    placed = attempt.placed
    return Sending(
        attempt.member.name,
        placed.sent_s,
        attempt.begun_s,
        attempt.ended_s,
        placed.uncached_tokens,
        attempt.fault,
    )


def _one_line(body: bytes) -> Raw:
    try:
        return Raw(msgspec.json.format(body, indent=-1))
    except (msgspec.DecodeError, RecursionError):  # only a lenient reader takes it for JSON, or it is nested too deep
        return Raw(_encode(body.decode("utf-8", "replace")))
