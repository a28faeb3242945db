"""Polls a router over HTTP, in a thread, and keeps its last answers; tells a refusal from an unreachable router."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import Event
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import quote

import click

from events.tool.words import printable
from router.console import asking
from router.console.asking import Client, Refused, Unreachable
from router.console.top.tables import Row, prefix_rows, replica_rows
from router.prompts.prefixes.tree import Prefix, Shared
from router.responses import DecisionList, DecisionRecord, FeedState, ReplicaList, ReplicaStatus

REPLICAS, PREFIXES, DECISIONS = "/replicas", "/prefixes", "/decisions"
TIMEOUT_S = 10.0  # a router that takes longer hangs
KEY_HINT = "--admin-key or WARMROUTE_ADMIN_KEY"
ROUTER = asking.ROUTER._replace(key=f"see {KEY_HINT}")
PREFIXES_EVERY_S, EARLY_S = 3.0, 0.5  # the router builds a tree for each answer, and the tree changes slowly
MAX_PREFIXES = 200
MAX_CANDIDATES = 20_000  # the limit for one answer: each decision names every replica of its model
RISEN_S = 15.0  # a counter that rose is marked for so long
FEWEST_DECISIONS, MAX_DECISIONS = 20, 200

POLLING_SHARE = 0.1  # the largest share of the time: a router that answers slowly is asked less often
REFUSED_EVERY_S = 10.0  # the router counts each request that it refuses


class Seen(NamedTuple):
    """The last answers of a router; they stay while it does not answer."""

    url: str
    replicas: Sequence[Row[ReplicaStatus]] = ()
    prefixes: Sequence[Row[Prefix]] = ()
    decisions: Sequence[Row[DecisionRecord]] = ()
    at_s: float | None = None  # the time of the list of replicas
    refused: Mapping[str, str] = MappingProxyType({})  # reason by path
    silence: str | None = None  # why there is no answer

    @property
    def is_stale(self) -> bool:
        return self.silence is not None or REPLICAS in self.refused


class Poller:
    """Asks for what is due. `seen` may be read by other threads."""

    def __init__(self, client: Client, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.client = client
        self.clock = clock
        self.seen = Seen(client.url)
        self.ended = False
        self.due = Event()  # set to poll at once
        self._interval_s = interval_s
        self._streams: deque[tuple[float, dict[str, FeedState | None]]] = deque()  # the last seconds'
        self._next_s = dict.fromkeys((REPLICAS, DECISIONS, PREFIXES), -math.inf)

    def run(self) -> None:
        """Poll until `ended` is set."""
        with self.client:
            while not self.ended:
                began_s = time.monotonic()
                self.poll()
                took_s = time.monotonic() - began_s
                self.due.wait(max(self._interval_s - took_s, took_s / POLLING_SHARE))
                self.due.clear()

    def require(self) -> Seen:
        """Poll; raise ClickException unless the router lists its replicas."""
        seen = self.poll()
        if seen.silence is not None:
            raise Unreachable(ROUTER, seen.url, seen.silence)
        if REPLICAS in seen.refused:
            raise click.ClickException(seen.refused[REPLICAS])
        return seen

    def poll(self) -> Seen:
        """Ask for everything that is due; failures are told in what is returned."""
        seen = self.seen._replace(silence=None)
        try:
            for path, next_s in self._next_s.items():
                if path != REPLICAS and REPLICAS in seen.refused:
                    break  # the others would be refused too
                if (began_s := self.clock()) < next_s:
                    continue
                refused = {other: why for other, why in seen.refused.items() if other != path}
                try:
                    seen = self._ask(path, seen)
                    self._next_s[path] = began_s + (PREFIXES_EVERY_S - EARLY_S if path == PREFIXES else 0.0)
                except Refused as error:
                    if error.status in (502, 504):  # a proxy whose router is gone says so
                        raise
                    refused[path] = error.message
                    self._next_s[path] = began_s + REFUSED_EVERY_S
                seen = seen._replace(refused=refused)
        except click.ClickException as error:
            seen = seen._replace(silence=printable(error.reason if isinstance(error, Unreachable) else error.message))
        self.seen = seen
        return seen

    def _ask(self, path: str, seen: Seen) -> Seen:
        get = self.client.get
        if path == REPLICAS:
            replicas, now_s = get(path, ReplicaList).replicas, self.clock()
            self._streams.append((now_s, {one.name: one.events for one in replicas}))
            while len(self._streams) > 2 and self._streams[1][0] <= now_s - RISEN_S:
                self._streams.popleft()
            return seen._replace(replicas=replica_rows(replicas, self._streams[0][1]), at_s=now_s)
        if path == PREFIXES:
            return seen._replace(prefixes=prefix_rows(get(f"{path}?limit={MAX_PREFIXES}", Shared).prefixes))
        limit = min(MAX_DECISIONS, max(FEWEST_DECISIONS, MAX_CANDIDATES // max(1, len(seen.replicas))))
        decisions = get(f"{path}?limit={limit}", DecisionList).decisions
        return seen._replace(decisions=[Row(f"{one.request_id} {one.ts}", one) for one in decisions])

    def drain(self, replica: str, *, undo: bool) -> str:
        """Drain a replica, and return what has come of it in words."""
        try:
            self.client.ask("POST", f"/replicas/{quote(replica, safe='')}/{'undrain' if undo else 'drain'}")
        except click.ClickException as error:
            return printable(error.message)
        self._next_s[REPLICAS] = -math.inf
        self.due.set()
        return f"{printable(replica)} gets {'requests again' if undo else 'no new requests'}"
