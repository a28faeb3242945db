"""Rates: the speed of prefill and decode, and the counters' change over the last seconds."""

from collections import deque

from api.measured_rate import MeasuredRate
from replica.messages import Rates, Stats

HALF_LIFE_STEPS = 200.0
GROWTH_WEIGHT = 0.005  # a step counts so much if its number of answers is far from the mean
OUTLIER = 2.0  # a step counts as at most this many usual ones: its process was interrupted
MIN_PREFILL_TOKENS = 32  # the duration of a step with fewer says nothing about prefill
SAMPLE_TOKENS = 512  # a sample has these of a few steps: the time of one with a short prompt is mostly noise
FIRST_STEP_TOKENS = 256  # the prefill of a step before anything is known
LEAST_STEP_TOKENS = 64  # less would make much of what every step costs; and a limit is a multiple of it, because a CPU
# fills the rows of a product up to such a number (`kernels.linear`)


class Speed:
    """Prefill and decode speed, learned from how long the last steps took.

    What a step takes that only decodes, every step takes; the rest of one with prefill is the prefill's.
    """

    def __init__(self) -> None:
        self.step_s = 0.0  # the time of steps that only decode
        self.growth_s = 0.0  # the part of it that one more answer adds
        self._answers = 0.0  # that steps decode, on average
        self._tokens = 0  # the tokens of steps that are no sample yet
        self._seconds = 0.0
        self._prefill = MeasuredRate()

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 while it is not known."""
        return self._prefill.per_s

    def prefill_s(self, tokens: int) -> float:
        """Seconds that so many tokens take to compute; 0: not known."""
        return tokens / self._prefill.per_s if self._prefill.per_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens that one request decodes in a second."""
        return 1 / self.step_s if self.step_s > 0 else 0.0

    def add(self, prefill_tokens: int, duration_s: float, answers: int = 1) -> None:
        if prefill_tokens >= MIN_PREFILL_TOKENS:
            self._tokens += prefill_tokens
            self._seconds += duration_s - self.step_s
            if self._tokens >= SAMPLE_TOKENS:
                self._prefill.add(self._tokens, self._seconds)
                self._tokens, self._seconds = 0, 0.0
        elif not prefill_tokens:
            weight = 1 - 0.5 ** (1 / HALF_LIFE_STEPS) if self.step_s else 1.0
            more, longer_s = answers - self._answers, duration_s - self.step_s
            # The line through the means; a step of as many answers as usual says nothing of its slope.
            error_s = min(longer_s, OUTLIER * self.step_s) - self.growth_s * more
            self.growth_s += GROWTH_WEIGHT * error_s * more / (1 + more * more)
            self._answers += weight * more
            self.step_s += weight * longer_s


class StepLimit:
    """The prefill that a step has time for: while it lasts, no other answer goes on, and no status is sent.

    By the last step alone: what a token costs grows with the tokens before it, so older steps know less.
    """

    def __init__(self, max_step_s: float) -> None:
        self.tokens: int | None = FIRST_STEP_TOKENS if max_step_s else None  # None: no limit
        self._max_step_s = max_step_s

    def add(self, prefill_tokens: int, duration_s: float) -> None:
        if self.tokens is None or prefill_tokens < MIN_PREFILL_TOKENS or duration_s <= 0:
            return
        fitting = int(prefill_tokens * self._max_step_s / duration_s)
        most = min(fitting, 2 * max(self.tokens, prefill_tokens))
        self.tokens = max(LEAST_STEP_TOKENS, most // LEAST_STEP_TOKENS * LEAST_STEP_TOKENS)


class Window:
    """Rates over the last `span_s` seconds, from the counters as they were then and are now."""

    def __init__(self, span_s: float = 10.0) -> None:
        self.span_s = span_s
        self._past: deque[tuple[float, Stats]] = deque()

    def add(self, now_s: float, stats: Stats) -> Rates:
        self._past.append((now_s, stats))
        while len(self._past) > 2 and now_s - self._past[1][0] >= self.span_s:
            self._past.popleft()
        began_s, then = self._past[0]
        pool, elapsed_s = stats.pool, now_s - began_s
        queries = pool.query_tokens - then.pool.query_tokens
        hits = pool.hit_tokens - then.pool.hit_tokens

        generated_tokens = stats.generated_tokens - then.generated_tokens
        token_s = 1 / stats.decode_tokens_per_s if generated_tokens > 0 and stats.decode_tokens_per_s else 0.0
        per_s = 1 / elapsed_s if elapsed_s > 0 else 0.0
        return Rates(
            window_s=elapsed_s,
            token_hit_rate=hits / queries if queries else 0.0,
            evictions_per_s=(pool.evictions - then.pool.evictions) * per_s,
            utilization=pool.utilization,
            unreferenced_fraction=pool.unreferenced / pool.total,
            prompt_tokens_per_s=(stats.prompt_tokens - then.prompt_tokens) * per_s,
            generated_tokens_per_s=generated_tokens * per_s,
            token_s=token_s,
        )
