"""Bounds the memory of answers in progress: what waits for the end of a whole answer, or for a client that reads."""

from replica.messages import Output

MAX_BYTES = 512 * 2**20  # the size of all answers
MAX_BYTES_EACH = 128 * 2**20
SMALL_BYTES = 2**20  # there is always room for an answer of this size: the number of requests is limited
# The most that a token, and each log probability with it, takes: from the engine, as text, and in JSON.
TOKEN_BYTES = 400
LOGPROB_BYTES = 400


class NoRoom(Exception):
    """Answers would take more than they may: this one (`alone`), or all together."""

    def __init__(self, message: str, *, alone: bool) -> None:
        super().__init__(message)
        self.alone = alone


class HeldAnswers:
    def __init__(self) -> None:
        self.used_bytes = 0


class HeldAnswer:
    """One answer; `release` it."""

    __slots__ = ("_all", "_bytes")

    def __init__(self, answers: HeldAnswers) -> None:
        self._all = answers
        self._bytes = 0

    def add(self, output: Output) -> None:
        """Raise NoRoom if that is too much."""
        count = TOKEN_BYTES * len(output.token_ids)
        for each in output.logprobs or ():
            count += LOGPROB_BYTES * (len(each.top) + 1)
        self._bytes += count
        self._all.used_bytes += count
        if self._bytes > MAX_BYTES_EACH:
            fix = "ask for fewer choices, tokens or log probabilities, or stream the answer and read on"
            raise NoRoom(f"the answer takes more than {MAX_BYTES_EACH:,} bytes that wait; {fix}", alone=True)
        if self._all.used_bytes > MAX_BYTES and self._bytes > SMALL_BYTES:
            fix = "try again, or stream the answer and read on"
            raise NoRoom(f"answers in progress take more than {MAX_BYTES:,} bytes; {fix}", alone=False)

    def release(self) -> None:
        self._all.used_bytes -= self._bytes
        self._bytes = 0
