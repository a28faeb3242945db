"""Polls a router over HTTP, in a thread, and keeps its last answers; tells a refusal from an unreachable router."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Event
from types import MappingProxyType
from typing import NamedTuple

import click

from events.tool.words import printable
from router.console import asking
from router.console.asking import Client, Refused, Unreachable
from router.console.formatting import natural
from router.responses import DecisionList, DecisionRecord, ReplicaList, ReplicaStatus, SessionList, SessionRow

REPLICAS, DECISIONS, SESSIONS = "/replicas", "/decisions", "/sessions"
TIMEOUT_S = 10.0  # a router that takes longer hangs
KEY_HINT = "--admin-key or WARMROUTE_ADMIN_KEY"
ROUTER = asking.ROUTER._replace(key=f"see {KEY_HINT}")
MAX_CANDIDATES = 20_000  # the limit for one answer: each decision names every replica of its model
FEWEST_DECISIONS, MAX_DECISIONS, MAX_SESSIONS = 20, 200, 200
POLLING_SHARE = 0.1  # the largest share of the time: a router that answers slowly is asked less often
REFUSED_EVERY_S = 10.0  # the router counts each request that it refuses


class Seen(NamedTuple):
    """The last answers of a router; they stay while it does not answer."""

    url: str
    replicas: Sequence[ReplicaStatus] = ()
    decisions: Sequence[DecisionRecord] = ()
    sessions: Sequence[SessionRow] = ()
    at_s: float | None = None  # the time of the list of replicas
    refused: Mapping[str, str] = MappingProxyType({})  # reason by path
    silence: str | None = None  # why there is no answer

    @property
    def is_stale(self) -> bool:
        return self.silence is not None or REPLICAS in self.refused


class Poller:
    """`seen` may be read by other threads."""

    def __init__(self, client: Client, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.client = client
        self.clock = clock
        self.seen = Seen(client.url)
        self.ended = Event()
        self._interval_s = interval_s
        self._next_s = dict.fromkeys((REPLICAS, DECISIONS, SESSIONS), -math.inf)

    def run(self) -> None:
        """Poll until `ended` is set."""
        with self.client:
            pause_s = 0.0
            while not self.ended.wait(pause_s):
                began_s = time.monotonic()
                self.poll()
                took_s = time.monotonic() - began_s
                pause_s = max(self._interval_s - took_s, took_s / POLLING_SHARE)

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
                if self.clock() < next_s:
                    continue
                refused = {other: why for other, why in seen.refused.items() if other != path}
                try:
                    if path == REPLICAS:
                        replicas = sorted(
                            self.client.get(path, ReplicaList).replicas, key=lambda one: natural(one.name)
                        )
                        seen = seen._replace(replicas=replicas, at_s=self.clock())
                    elif path == SESSIONS:
                        models = self.client.get(f"{path}?limit={MAX_SESSIONS}", SessionList).models.values()
                        seen = seen._replace(sessions=[row for one in models for row in one.sessions])
                    else:
                        limit = min(MAX_DECISIONS, max(FEWEST_DECISIONS, MAX_CANDIDATES // max(1, len(seen.replicas))))
                        seen = seen._replace(decisions=self.client.get(f"{path}?limit={limit}", DecisionList).decisions)
                except Refused as error:
                    if error.status in (502, 504):  # a proxy whose router is gone says so
                        raise
                    refused[path] = error.message
                    self._next_s[path] = self.clock() + REFUSED_EVERY_S
                seen = seen._replace(refused=refused)
        except click.ClickException as error:
            seen = seen._replace(silence=printable(error.reason if isinstance(error, Unreachable) else error.message))
        self.seen = seen
        return seen
