"""A replica's prefill rate, learned from the times of our own first bytes; used if it does not report one.

Requests that begin together were computed in one step of the engine and are one sample.
"""

from api.measured_rate import MeasuredRate

LEAST_TOKENS = 256  # a sample of less says more about the network than about prefill
TOGETHER_S = 0.005


class Speed:
    __slots__ = ("_began_s", "_last_s", "_measured", "_together_tokens")

    def __init__(self) -> None:
        self._measured = MeasuredRate()
        self._last_s = float("-inf")  # the last first byte
        self._began_s = 0.0  # of the sample that may still grow
        self._together_tokens = 0

    @property
    def tokens_per_s(self) -> float:
        """0 while it is not known."""
        return self._measured.per_s

    def first_byte(self, tokens: int, sent_s: float, now_s: float) -> None:
        """Learn from a prompt's first byte and its computed tokens; prefills run one after the other."""
        if now_s - self._last_s >= TOGETHER_S:
            self._finish()
            self._began_s = max(sent_s, self._last_s)
            self._last_s = now_s
        self._together_tokens += tokens

    def _finish(self) -> None:
        tokens, seconds = self._together_tokens, self._last_s - self._began_s
        self._together_tokens = 0
        if tokens >= LEAST_TOKENS and seconds > 0:
            self._measured.add(tokens, seconds)
