"""Counts of finished requests for OpenTelemetry's GenAI metrics; the time is an argument.

Names, units, descriptions and bounds are those of the semantic conventions (decision 0040); tests compare them.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from api.http.prometheus import Histogram
from router.proxy.attempt import Attempt
from router.proxy.predicted_hit import PredictedHit
from router.proxy.request_summary import RequestSummary

Attributes: TypeAlias = dict[str, str | int | float | bool]
Known: TypeAlias = dict[str, str | int | float | bool | None]  # None: nothing is to be told

PROVIDER = "warmroute"  # none of the conventions' names is that of a server's own models
MAX_MODELS = 100  # models with a name of their own
MAX_SERIES = 2000  # the limit for one instrument, as in OpenTelemetry's SDK
OTHER = "_OTHER"

_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4.0**power for power in range(14))


class Labels(NamedTuple):
    """The values that tell a series from the others of its instrument."""

    operation: str
    model: str | None  # None: no replica serves it
    error: str | None = None
    host: str | None = None  # the host of the replica that was asked
    port: int = 0
    token_type: str | None = None
    modality: str | None = None  # the modality of tokens

    def attributes(self) -> Attributes:
        return known(
            {
                "gen_ai.operation.name": self.operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": self.model,
                "gen_ai.response.model": self.model if self.error is None else None,
                "error.type": self.error,
                "server.address": self.host,
                "server.port": self.port or None,
                "gen_ai.token.type": self.token_type,
                "gen_ai.token.modality": self.modality,
            }
        )


def known(attributes: Known) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}


class Series(Histogram):
    """The values of one instrument with equal attributes; a counter has no bounds, and shows the total."""

    __slots__ = ("attributes", "greatest", "least", "since_ns", "used_ns")

    def __init__(self, bounds: tuple[float, ...], attributes: Attributes, since_ns: int) -> None:
        super().__init__(bounds)
        self.attributes = attributes
        self.least, self.greatest = float("inf"), float("-inf")
        self.since_ns = self.used_ns = since_ns

    def add(self, value: float, now_ns: int) -> None:
        self.observe(value)
        self.least, self.greatest = min(self.least, value), max(self.greatest, value)
        self.used_ns = now_ns


class Instrument:
    def __init__(self, name: str, unit: str, description: str, bounds: tuple[float, ...] = ()) -> None:
        self.name = name
        self.unit = unit
        self.description = description
        self.bounds = bounds
        self._series: dict[Labels, Series] = {}

    def observe(self, labels: Labels, value: float, now_ns: int) -> None:
        series = self._series.get(labels)
        if series is not None:
            series.add(value, now_ns)
            return
        if len(self._series) >= MAX_SERIES:  # replicas come and go, and each has an address
            del self._series[min(self._series, key=lambda one: self._series[one].used_ns)]
        series = Series(self.bounds, labels.attributes(), now_ns)
        series.add(value, now_ns)
        self._series[labels] = series  # last, as another thread may be looking: none is empty

    def series(self) -> list[Series]:
        """Return the series, also to another thread: it may see a value that is not yet in its total."""
        return list(self._series.values())


class GenaiMetrics:
    def __init__(self) -> None:
        self._models: set[str] = set()
        self.request_s = Instrument(
            "gen_ai.server.request.duration",
            "s",
            "Generative AI server request duration such as time-to-last byte or last output token.",
            _DURATION_S,
        )
        self.first_token_s = Instrument(
            "gen_ai.server.time_to_first_token",
            "s",
            "Time to generate first token for successful responses.",
            _FIRST_TOKEN_S,
        )
        self.token_s = Instrument(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time per output token generated after the first token for successful responses.",
            _TOKEN_S,
        )
        self.operation_s = Instrument("gen_ai.client.operation.duration", "s", "GenAI operation duration.", _DURATION_S)
        self.tokens = Instrument(
            "gen_ai.client.token.usage", "{token}", "Number of input and output tokens used.", _TOKENS
        )
        self.cached_tokens = Instrument(
            "gen_ai.client.inference.usage.cache_read.input_tokens",
            "{token}",
            "The number of input tokens served from a provider-managed cache.",
        )

    def __iter__(self) -> Iterator[Instrument]:
        yield from (self.request_s, self.first_token_s, self.token_s)
        yield from (self.operation_s, self.tokens, self.cached_tokens)

    def over(self, summary: RequestSummary, now_ns: int) -> None:
        """Count a finished request if it was to generate."""
        if summary.chat is None and summary.generation is None:
            return
        model = None if summary.model is None else summary.model.name  # a replica and no client has chosen it
        if model is not None and model not in self._models:
            if len(self._models) < MAX_MODELS:
                self._models.add(model)
            else:
                model = OTHER
        labels = Labels(operation(summary), model, request_error(summary))
        generation, ttft_s, tokens = summary.generation, summary.ttft_s, summary.output_tokens
        self.request_s.observe(labels, summary.duration_s, now_ns)
        if labels.error is None and ttft_s is not None and generation is not None and generation.prompt.peek.stream:
            self.first_token_s.observe(labels, ttft_s, now_ns)
            if tokens is not None and tokens > 1 and generation.prompt.choices == 1:
                self.token_s.observe(labels, (summary.duration_s - ttft_s) / (tokens - 1), now_ns)
        for attempt in summary.attempts:
            ended_s = attempt.ended_s or summary.ended_s
            asked = labels_at(attempt, labels, operation_error(summary, attempt))
            self.operation_s.observe(asked, ended_s - attempt.placed.sent_s, now_ns)
        if generation is None or not summary.attempts:
            return
        last, prompt_tokens = summary.attempts[-1], summary.used.computed + summary.used.cached
        if prompt_tokens and knows_prompt(summary, generation):  # estimates are left out
            self.tokens.observe(labels_at(last, labels, token_type="input"), prompt_tokens, now_ns)
        if tokens is not None:
            self.tokens.observe(labels_at(last, labels, token_type="output"), tokens, now_ns)
        if prompt_tokens and knows_cached(summary, generation):
            self.cached_tokens.observe(labels_at(last, labels, modality="unknown"), summary.used.cached, now_ns)


def operation(summary: RequestSummary) -> str:
    return "text_completion" if summary.chat is False else "chat"


def attempt_error(attempt: Attempt) -> str:
    """The `error.type` of an attempt that has failed."""
    return str(attempt.status) if attempt.status >= 400 else "replica_lost"


def labels_at(attempt: Attempt, labels: Labels, error: str | None = None, **more: str) -> Labels:
    target = attempt.member.upstream.target
    return labels._replace(error=error, host=target.host, port=target.port, **more)


def request_error(summary: RequestSummary) -> str | None:
    """The request's `error.type`: a status, `broken_stream` or `client_left`."""
    status = summary.exchange.status
    if status >= 400:
        return str(status)
    if summary.exchange.disconnected:
        return "client_left"
    return "broken_stream" if summary.why else None


def operation_error(summary: RequestSummary, attempt: Attempt) -> str | None:
    """An attempt's `error.type`; a client that leaves cuts the last one short."""
    if attempt.fault is not None or attempt.status >= 400:
        return attempt_error(attempt)
    return "client_left" if summary.exchange.disconnected and attempt is summary.attempts[-1] else None


def knows_prompt(summary: RequestSummary, generation: PredictedHit) -> bool:
    """Return whether the prompt's length is exact, or the engine's own count."""
    report = None if summary.resumes else summary.attempts[-1].report
    return generation.prompt.exact or (report is not None and report.prompt is not None)


def knows_cached(summary: RequestSummary, generation: PredictedHit) -> bool:
    """Return whether the replica that computed the prompt has reported its cached tokens."""
    prefill = summary.prefill
    if prefill is not None and prefill.outcome == "handed" and prefill.hit is not None:
        generation = prefill.hit
    return generation.reported_tokens is not None
