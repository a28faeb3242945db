"""The table of retries: one for every kind of request, with a budget for those that follow errors.

A request is repeatable if a second replica's answer harms nobody: generations are, and what is only computed. Once
bytes were sent, another replica goes on with the answer if it can; else the answer breaks off. Of a prefill half and of
a request that a gateway forwards, only the replica is judged here: the prompt is computed where the answer is
generated, and the gateway asks another replica or does not.

`python -m tests.docs.retries` writes the table in docs/failures.md.
"""

from typing import Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from router.members.broken import Broken

MAX_LOST = 3  # replicas that one request may lose, and retries after errors
MAX_MOVES = 3  # away from silent replicas; then it waits: on a stalled machine, all seem silent

Next: TypeAlias = Literal["another", "resume", "wait", "pass on", "break off"]
GOES_ON: tuple[Next, ...] = ("another", "resume")
Lesson: TypeAlias = Literal["nothing", "busy", "rests", "fault", "fault, busy", "opens", "unheard", "suspect"]
Limit: TypeAlias = Literal["any", "three", "budget", "both", "none"]  # three: MAX_LOST of one request


class Row(NamedTuple):
    what: str
    repeatable: Next  # nothing was sent to the client
    effects: Next  # nothing was sent, and what a second request does is not known
    sent: Next  # bytes were sent to the client
    lesson: Lesson  # the replica's health learns it
    retries: Limit


# fmt: off
#                 what happens                           nothing sent:            sent         its health     retries
#                                                        repeatable effects                   learns
REFUSED =     Row("the connection is refused",           "another", "another",    "resume",     "opens",       "any")
UNREACHED =   Row("no connection opens in time",         "another", "another",    "resume",     "unheard",     "any")
OURS =        Row("the router has no socket left",       "another", "another",    "resume",     "nothing",     "any")
LOST =        Row("lost, or its answer cannot be read",  "another", "break off",  "resume",     "fault",       "three")
LATE =        Row("nothing comes within the time limit", "another", "break off",  "resume",     "fault",       "three")
SILENT =      Row("silent, while others are heard",      "another", "wait",       "resume",     "suspect",     "any")
RESTS =       Row("429, 503: `draining` or `loading`",   "another", "another",    "resume",     "rests",       "any")
FULL =        Row("429, 503: `queue_full`",              "another", "another",    "resume",     "busy",        "any")
LIMITED =     Row("429",                                 "another", "another",    "resume",     "busy",        "budget")
UNAVAILABLE = Row("503",                                 "another", "another",    "resume",     "fault, busy", "both")
FAILED =      Row("500, 502, 504",                       "another", "pass on",    "resume",     "fault, busy", "both")
UNABLE =      Row("another status from 500",             "pass on", "pass on",    "break off",  "fault",       "none")
INVALID =     Row("another status from 400",             "pass on", "pass on",    "break off",  "nothing",     "none")
# fmt: on
TABLE = (REFUSED, UNREACHED, OURS, LOST, LATE, SILENT, RESTS, FULL, LIMITED, UNAVAILABLE, FAILED, UNABLE, INVALID)
NOT_REACHED = (REFUSED, UNREACHED, OURS)
_CODES = {"draining": RESTS, "loading": RESTS, "queue_full": FULL}
_STATUSES = {429: LIMITED, 503: UNAVAILABLE, 500: FAILED, 502: FAILED, 504: FAILED}


def loss(broken: Broken) -> Row:
    """The row of a request that a replica will not answer."""
    if broken.ours:
        return OURS
    if broken.refused:
        return UNREACHED if broken.silent else REFUSED
    return SILENT if broken.silent else LATE if broken.late else LOST


def refusal(status: int, body: bytes) -> tuple[Row, str]:
    """The row of an answer of status 400 or more, and the reason in words."""
    code = refusal_code(body) if status in (429, 503) else None
    row = _CODES.get(code) if isinstance(code, str) else None
    row = row or _STATUSES.get(status) or (UNABLE if status >= 500 else INVALID)
    return row, f"it answered {status}" + (f" ({code})" if code else "")


class _Error(Struct):
    code: str | int | None = None


class _Refusal(Struct):
    error: _Error = msgspec.field(default_factory=_Error)


_decode_refusal = msgspec.json.Decoder(_Refusal).decode


def refusal_code(body: bytes) -> str | int | None:
    """The `error.code` of an OpenAI-shaped answer."""
    try:
        return _decode_refusal(body).error.code
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class Budget:
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, more_bytes: int) -> bool:
        """Reserve more bytes, or fewer; return False and reserve nothing if more exceed the limit."""
        if more_bytes > 0 and self.held_bytes + more_bytes > self.limit_bytes:
            return False
        self.held_bytes += more_bytes
        return True


SHARE = 0.2  # the share of requests that may be sent again
PER_S = 10.0  # at least as many may be
MOST = 100.0


class RetryBudget(Struct):
    """A share of all requests, so that retries do not add to an overload. Steps back in time are ignored."""

    left: float = MOST
    filled_s: float = 0.0
    requests: int = 0  # counts those that came since; callers add to it

    def take(self, now_s: float) -> bool:
        """Take a retry; return False if none is left."""
        passed_s = max(0.0, now_s - self.filled_s)
        self.left = min(MOST, self.left + SHARE * self.requests + PER_S * passed_s)
        self.requests, self.filled_s = 0, self.filled_s + passed_s
        if self.left < 1:
            return False
        self.left -= 1
        return True
