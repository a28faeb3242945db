"""The router's memory of its requests: counters, the last decisions and prompts, logs and traces."""

from collections import deque

from starlette.types import Scope

from api.errors import ApiError
from router.config import RouterConfig
from router.members.predictions import Predictions
from router.placement.index import PrefixIndex
from router.prompts.prefixes.recent import TEXT_BYTES, RecentPrompt, RecentPrompts
from router.prompts.prompt import beginning_of
from router.proxy.request_summary import (
    PastDecision,
    RequestCounts,
    RequestSummary,
    compare,
    count_prefill,
    count_request,
    past_decision,
)
from router.records.access_log import encode, line_of, line_of_request
from router.records.line_file import LineFile
from router.records.request_log import RequestLog


class History:
    """Learns of each request when it is over, or turned away."""

    def __init__(self, config: RouterConfig, predictions: Predictions, index: PrefixIndex) -> None:
        self.counts = RequestCounts()
        self.decisions: deque[PastDecision] = deque(maxlen=config.decisions)
        self.recent = RecentPrompts(config.recent_prompts)
        self.access_log: LineFile | None = None
        self.request_log: RequestLog | None = None
        self._predictions = predictions
        self._index = index
        self._texts = config.shows_texts  # recent prompts are kept with the beginnings of their texts

    def turned_away(self, scope: Scope, error: ApiError) -> None:
        """Count and log a request that was not admitted."""
        self.counts.refused[error.code or str(error.status)] += 1
        if self.access_log is not None:
            line = line_of(scope, status=error.status, duration_s=0.0, sent_bytes=len(error.body()), request_id="")
            self.access_log.add(encode(line))

    def over(self, summary: RequestSummary) -> None:
        """Record a finished request."""
        if self.access_log is not None:
            self.access_log.add(encode(line_of_request(summary)))
        if summary.trace is not None:
            summary.trace.end(summary)
        if summary.chat is not None and summary.exchange.disconnected:
            self.counts.client_left += 1
        self.counts.retries += summary.retries
        self.counts.resumes += summary.resumes
        if (generation := summary.generation) is None:
            return
        past = past_decision(summary, generation)
        self.decisions.append(past)
        if self.request_log is not None:
            self.request_log.over(summary, generation, past)
        tenant = generation.decision.question.tenant
        if tenant is not None and tenant.service is not None and summary.ttft_s is not None:
            self.counts.classes.answered(tenant.service, summary.ttft_s)
        peek, size, member = generation.prompt.peek, generation.block_size, generation.member
        lookahead = self._index.lookahead(member.slot) if member is not None and size else 0
        keys = generation.prompt.keys(size, lookahead)
        if summary.first_byte_s and self.recent.most_prompts:
            text = beginning_of(peek, TEXT_BYTES) or None if self._texts else None
            self.recent.add(RecentPrompt(peek.model, size, keys, summary.arrived_s, text, lookahead))
        half = None if (prefill := summary.prefill) is None else prefill.hit
        is_handed = half is not None and prefill is not None and prefill.outcome == "handed"
        if member is not None:
            tally = member.tallies.get(peek.model) or member.tally(peek.model)
            count_request(tally, summary, generation)
            if not is_handed:
                count_prefill(tally, summary, generation, keys, self._index.gone)
            if generation.prediction is not None:
                compare(self._predictions, summary, generation, keys)
        if half is not None and half.member is not None:  # at the replica that computed
            keys = half.prompt.keys(half.block_size, self._index.lookahead(half.member.slot))
            compare(self._predictions, summary, half, keys)
            if is_handed:
                count_prefill(half.member.tally(peek.model), summary, half, keys, self._index.gone)
