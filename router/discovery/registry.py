"""Replicas that the fleet's registry knows, by long polling (docs/discovery.md, "The registry")."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import msgspec
from msgspec import Struct

from router.discovery.backoff import Backoff
from router.discovery.wanted import Wanted
from router.spec import BadSpec, ReplicaSpec, spec_of

log = logging.getLogger(__name__)

WAIT_S = 20.0
GRACE_S = 5.0  # for the answer, after the wait
CONNECT_TIMEOUT_S = 2.0
PAUSE_S = 0.2  # after an answer without news, should a registry not know how to wait

_FIELDS = frozenset(ReplicaSpec.__struct_fields__)


class Answer(Struct):
    version: int
    members: list[Any]


_decode = msgspec.json.Decoder(Answer).decode


class Unanswered(Exception):
    """The registry gave no usable answer."""


class Registry:
    """While the registry is gone, what it said last stays."""

    def __init__(self, url: str, *, wait_s: float = WAIT_S, backoff: Backoff | None = None) -> None:
        self.where = url.rstrip("/")
        self.problem: str | None = None
        self._wait_s = wait_s
        self._backoff = backoff or Backoff()
        self._version: int | None = None  # None: ask for what there is now
        self._refused: set[str] = set()  # what the log has said already

    async def watch(self) -> AsyncGenerator[Wanted, None]:
        timeout = httpx2.Timeout(self._wait_s + GRACE_S, connect=CONNECT_TIMEOUT_S)
        said: Wanted | None = None
        async with httpx2.AsyncClient(timeout=timeout, trust_env=False) as client:
            while True:
                try:
                    answer = await self._ask(client)
                    wanted = self._read(answer, said or {})
                except Unanswered as error:
                    self._failed(str(error))
                    await asyncio.sleep(self._backoff.next_s())
                    continue
                self._answered()
                if wanted != said:
                    said = wanted
                    yield wanted
                elif answer.version == self._version:
                    await asyncio.sleep(PAUSE_S)
                self._version = answer.version

    async def _ask(self, client: httpx2.AsyncClient) -> Answer:
        params = {"wait": f"{self._wait_s:g}"} | ({} if self._version is None else {"after": str(self._version)})
        try:
            response = await client.get(f"{self.where}/members", params=params)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise Unanswered(str(error) or type(error).__name__) from error
        if response.status_code != 200:
            raise Unanswered(f"it answered with status {response.status_code}")
        try:
            return _decode(response.content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Unanswered(f"its answer cannot be read: {error}") from error

    def _read(self, answer: Answer, said: Wanted) -> Wanted:
        wanted, refused = wanted_from(answer.members, said)
        if refused and not wanted:
            raise Unanswered(f"it names only replicas that cannot be used: {refused[0]}")
        for why in refused:
            if why not in self._refused:
                log.warning("The registry at %s names a replica that cannot be used: %s", self.where, why)
        self._refused = set(refused)
        return wanted

    def _failed(self, why: str) -> None:
        if self.problem is None:
            log.warning("The registry at %s does not answer: %s; keeping the replicas it named", self.where, why)
        self.problem = why
        self._version = None  # one that was restarted may count from anywhere

    def _answered(self) -> None:
        if self.problem is not None:
            log.info("The registry at %s answers again", self.where)
        self.problem = None
        self._backoff.reset()


def wanted_from(members: list[Any], said: Wanted) -> tuple[Wanted, list[str]]:
    """The replicas, and why some of the members are none; one that was a replica before stays as it was.

    Fields of a newer registry that are not known here are passed over.
    """
    wanted: Wanted = {}
    refused: list[str] = []
    for member in members:
        try:
            spec = _spec(member)
            if spec.name in wanted:
                raise BadSpec(f"two replicas are named {spec.name!r}; the first counts")
        except BadSpec as error:
            refused.append(str(error))
            name = member.get("name") if isinstance(member, dict) else None
            if isinstance(name, str) and name in said:
                wanted.setdefault(name, said[name])
        else:
            wanted[spec.name] = spec
    return wanted, refused


def _spec(member: Any) -> ReplicaSpec:
    if not isinstance(member, dict):
        raise BadSpec(f"{member!r} is no object with a url")
    return spec_of({key: value for key, value in member.items() if key in _FIELDS and value is not None})
