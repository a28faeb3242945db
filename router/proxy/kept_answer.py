"""The part of an answer that the client has, or that is kept to be sent as a whole."""

from api.errors import ApiError
from api.generation_apis import GenerationApi
from router.members.budget import Budget
from router.proxy.aborts import aborted_event
from router.proxy.sse import with_lf

MAX_KEPT_BYTES = 4 * 1024 * 1024
LONGEST_END = 64  # more than the beginning of any last event has


class KeptAnswer:
    """The beginning of an unstreamed answer, kept so that another replica can repeat it, within the router's budget."""

    __slots__ = ("_budget", "_bytes", "_held_bytes")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._bytes: bytearray | None = None
        self._held_bytes = 0  # of the budget: these, and an unfinished frame

    def keep(self, body: bytes) -> bool:
        """Add a part; return False and add nothing if it is too long, or there is no room."""
        if self._bytes is None:
            self._bytes = bytearray()
        if len(self._bytes) + len(body) > MAX_KEPT_BYTES or not self._hold(self._held_bytes + len(body)):
            return False
        self._bytes += body
        return True

    def take(self) -> bytes:
        """Return what was kept, and release its memory."""
        if not self._held_bytes:
            return b""
        kept, self._bytes = bytes(self._bytes or b""), None
        self._hold(0)
        return kept

    def hold_beside(self, pending_bytes: int) -> bool:
        """Claim memory for an unfinished frame; return False if there is no room."""
        return self._hold(pending_bytes + len(self._bytes or b""))

    def _hold(self, wanted_bytes: int) -> bool:
        more = wanted_bytes - self._held_bytes
        if more > 0 and not self._budget.take(more):
            return False
        if more < 0:
            self._budget.give_back(-more)
        self._held_bytes = wanted_bytes
        return True


class SentEvents:
    """The end of a client's stream of events, to see if it is complete and to end it with an error otherwise."""

    __slots__ = ("_api", "_count", "_end", "is_between")

    def __init__(self, api: GenerationApi) -> None:
        self._api = api
        self._count = 0  # where they are numbered
        self._end = b""
        self.is_between = True  # no event has begun

    def note(self, body: bytes) -> None:
        self._end = body if len(body) >= LONGEST_END else (self._end + body)[-LONGEST_END:]
        self.is_between = self._end.endswith(b"\n\n")
        if self._api.ending is not None:
            self._count += body.count(b"\n\n")  # frames of ours have whole events

    def before_abort(self, body: bytes) -> bytes | None:
        """The whole events before the one with which the engine gives the answer up; None: it does not, in `body`."""
        return aborted_event(self._api.name, self._end[-LONGEST_END:], body)

    @property
    def is_complete(self) -> bool:
        api, end = self._api, with_lf(self._end)
        return end.endswith(api.last_event) if api.ending is None else bool(api.ending.search(end))

    def error_event(self, error: ApiError) -> bytes:
        """The bytes that end the stream with an error, after half an event, too."""
        end_of_half_an_event = b"" if with_lf(self._end).endswith(b"\n\n") or not self._end else b"\n\n"
        return end_of_half_an_event + self._api.error_event(error, self._count)
