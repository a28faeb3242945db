"""Polls a router over HTTP, tells a refusal from an unreachable router, and keeps its last answers, to be drawn."""

import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import quote

import click
import httpx2
import msgspec

from events.tool.words import printable
from router.console import asking
from router.console.asking import Unreachable
from router.console.top.history import History
from router.prompts.prefixes.tree import Shared
from router.responses import DecisionList, DecisionRecord, ReplicaList, ReplicaStatus

TIMEOUT_S = 10.0
KEY_HINT = "--admin-key or WARMROUTE_ADMIN_KEY"
ROUTER = asking.ROUTER._replace(key=f"see {KEY_HINT}")

T = TypeVar("T")


class RouterClient:
    """Close it with `contextlib.aclosing`. Its methods raise Unreachable, and Refused for a missing key, say."""

    def __init__(self, router_url: str, key: str | None) -> None:
        self.router_url = router_url
        self.round_trip_s = TIMEOUT_S  # the fastest answer so far: close to the network's round trip
        self._http = httpx2.AsyncClient(base_url=router_url, **asking.options(key, TIMEOUT_S))

    async def aclose(self) -> None:
        await self._http.aclose()

    async def get(self, path: str, kind: type[T]) -> T:
        answer = await self.ask("GET", path)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self.no_answer(f"no answer from a router: {path}: {error}") from error

    async def drain(self, replica: str, *, undo: bool) -> None:
        await self.ask("POST", f"/replicas/{quote(replica, safe='')}/{'undrain' if undo else 'drain'}")

    async def ask(self, method: str, path: str) -> bytes:
        began_s = time.monotonic()
        try:
            response = await self._http.request(method, path)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self.no_answer(asking.reason_of(error)) from error
        self.round_trip_s = min(self.round_trip_s, time.monotonic() - began_s)
        if response.status_code in (502, 504):  # from a proxy whose router is gone
            raise self.no_answer(f"status {response.status_code} for {path}")
        return asking.checked(response, self.router_url, ROUTER)

    def no_answer(self, why: str) -> Unreachable:
        return Unreachable(ROUTER, self.router_url, printable(why))


REPLICAS, PREFIXES, DECISIONS = "/replicas", "/prefixes", "/decisions"
PREFIXES_EVERY_S = 3.0  # the router builds a tree for each answer, and the tree changes slowly
MOST_PREFIXES = 200
MOST_CANDIDATES = 20_000  # in one answer: each decision names every replica of its model
HANGS_S = 3.0  # report a router that takes longer to answer
FEWEST_DECISIONS, MOST_DECISIONS = 20, 200

LOAD_SHARE = 0.01  # answering may take this share of the router's time
FIRST_LOAD_SHARE = 0.1  # until KEPT_ANSWERS are measured: the first may have been slow by chance
KEPT_ANSWERS = 3
LONGEST_INTERVAL_S = 300.0
REFUSED_INTERVAL_S = 10.0
EARLY = 0.1  # of the interval: a timer that fires slightly early should not skip a poll


class PollInterval:
    """How often to poll one path. The fastest of the last answers counts: slower ones waited for other work."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._took_s: deque[float] = deque(maxlen=KEPT_ANSWERS)
        self._next_s = float("-inf")

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._next_s - EARLY * self._interval_s

    def answered(self, began_s: float, took_s: float, round_trip_s: float = 0.0) -> None:
        """Schedule the next poll; the network's `round_trip_s` is no load on the router."""
        self._took_s.append(max(0.0, took_s - round_trip_s))
        share = LOAD_SHARE if len(self._took_s) == KEPT_ANSWERS else FIRST_LOAD_SHARE
        self._next_s = began_s + min(LONGEST_INTERVAL_S, max(self._interval_s, min(self._took_s) / share))

    def refused(self, began_s: float) -> None:
        """Poll rarely: the router counts each request that it refuses."""
        self._next_s = began_s + max(self._interval_s, REFUSED_INTERVAL_S)

    def make_due(self) -> None:
        self._next_s = float("-inf")


class Poller:
    """The last known state of a router, kept while the router is unreachable."""

    def __init__(self, client: RouterClient, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.client = client
        self.replicas: list[ReplicaStatus] = []
        self.shared: Shared | None = None
        self.decisions: list[DecisionRecord] = []
        self.refused: dict[str, str] = {}  # reason by path
        self.unreachable: str | None = None  # reason
        self.history = History()
        self._clock = clock
        self.seen_s: float | None = None  # time of the last list of replicas
        self._pending_since_s: float | None = None
        self._polls: dict[str, tuple[PollInterval, Callable[[], Awaitable[None]]]] = {
            REPLICAS: (PollInterval(interval_s), self._get_replicas),
            DECISIONS: (PollInterval(interval_s), self._get_decisions),
            PREFIXES: (PollInterval(max(interval_s, PREFIXES_EVERY_S)), self._get_prefixes),
        }

    @property
    def silence(self) -> str | None:
        """Why there is no answer at present."""
        hangs = self._pending_since_s is not None and self._clock() - self._pending_since_s > HANGS_S
        return "it accepts connections but does not answer" if hangs and self.unreachable is None else self.unreachable

    @property
    def is_stale(self) -> bool:
        return self.silence is not None or REPLICAS in self.refused

    def age_s(self) -> float | None:
        """Seconds since the last list of replicas; None: there was none."""
        return None if self.seen_s is None else self._clock() - self.seen_s

    def make_due(self) -> None:
        """Have the next `poll` ask for the replicas, after a change to one."""
        self._polls[REPLICAS][0].make_due()

    async def require(self) -> None:
        """Poll; raise ClickException unless the router lists its replicas."""
        await self.poll()
        if self.unreachable is not None:
            raise Unreachable(ROUTER, self.client.router_url, self.unreachable)
        if REPLICAS in self.refused:
            raise click.ClickException(self.refused[REPLICAS])

    async def poll(self) -> None:
        """Ask for everything that is due. Failures go to `unreachable` and `refused`."""
        try:
            for path, (interval, get) in self._polls.items():
                began_s = self._pending_since_s = self._clock()
                try:
                    if interval.is_due(began_s):
                        await get()
                        interval.answered(began_s, self._clock() - began_s, self.client.round_trip_s)
                        self.refused.pop(path, None)
                except asking.Refused as error:
                    self.refused[path] = error.message
                    interval.refused(began_s)
                if REPLICAS in self.refused:
                    break  # the other paths would be refused too
            self.unreachable = None
        except click.ClickException as error:
            self.unreachable = error.reason if isinstance(error, Unreachable) else error.message
        finally:
            self._pending_since_s = None

    async def _get_replicas(self) -> None:
        self.replicas = (await self.client.get(REPLICAS, ReplicaList)).replicas
        self.seen_s = self._clock()
        self.history.add(self.replicas, self.seen_s)

    async def _get_decisions(self) -> None:
        limit = min(MOST_DECISIONS, max(FEWEST_DECISIONS, MOST_CANDIDATES // max(1, len(self.replicas))))
        self.decisions = (await self.client.get(f"{DECISIONS}?limit={limit}", DecisionList)).decisions

    async def _get_prefixes(self) -> None:
        self.shared = await self.client.get(f"{PREFIXES}?limit={MOST_PREFIXES}", Shared)
