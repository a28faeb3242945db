"""A replica's prefill rate, learned from the times of our own first bytes; used if it does not report one.

Requests that begin together were computed in one step of the engine and are one sample.
"""

LEAST_TOKENS = 256  # a sample of less says more about the network than about prefill
TOGETHER_S = 0.005
KEPT = 0.9  # of the older samples' weight at each new one
OUTLIER = 3.0  # a sample that is this many times faster or slower counts as if it were just so far off


class Speed:
    """Tokens over seconds, both fading: long prompts weigh more than short ones."""

    __slots__ = ("_began_s", "_last_s", "_seconds", "_together_tokens", "_tokens", "tokens_per_s")

    def __init__(self) -> None:
        self.tokens_per_s = 0.0  # 0: unknown yet
        self._tokens = 0.0
        self._seconds = 0.0
        self._last_s = float("-inf")  # the last first byte
        self._began_s = 0.0  # of the sample that may still grow
        self._together_tokens = 0

    def first_byte(self, tokens: int, sent_s: float, now_s: float) -> None:
        """Learn from a prompt's first byte and its computed tokens; prefills run one after the other."""
        if now_s - self._last_s >= TOGETHER_S:
            self._finish()
            self._began_s = max(sent_s, self._last_s)
            self._last_s = now_s
        self._together_tokens += tokens
        if not self._tokens and self._together_tokens >= LEAST_TOKENS and now_s > self._began_s:
            self.tokens_per_s = self._together_tokens / (now_s - self._began_s)

    def _finish(self) -> None:
        tokens, seconds = self._together_tokens, self._last_s - self._began_s
        self._together_tokens = 0
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        if self._tokens:
            expected_s = tokens / self.tokens_per_s
            seconds = min(max(seconds, expected_s / OUTLIER), expected_s * OUTLIER)
        self._tokens = self._tokens * KEPT + tokens
        self._seconds = self._seconds * KEPT + seconds
        self.tokens_per_s = self._tokens / self._seconds
