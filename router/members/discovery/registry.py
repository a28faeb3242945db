"""Replicas from the fleet's registry, by long polling (docs/discovery.md, "The registry")."""

import asyncio
import logging
from typing import Any

import httpx2
import msgspec
from msgspec import Struct

from router.members.discovery.desired import Backoff, Source, Tell
from router.members.spec import BadSpec, Desired, ReplicaSpec, spec_of

log = logging.getLogger(__name__)

WAIT_S = 20.0
GRACE_S = 5.0  # the response may come this long after the wait
CONNECT_TIMEOUT_S = 2.0
PAUSE_S = 0.2  # after a response without changes, in case the registry does not wait

_FIELDS = frozenset(ReplicaSpec.__struct_fields__)


class Members(Struct):
    version: int
    members: list[Any]


_decode = msgspec.json.Decoder(Members).decode


class RegistryError(Exception):
    """The registry gave no usable answer."""


class RegistryDiscovery(Source):
    def __init__(self, url: str, *, wait_s: float = WAIT_S, backoff: Backoff | None = None) -> None:
        super().__init__(url.rstrip("/"))
        self._wait_s = wait_s
        self._backoff = backoff or Backoff()
        self._version: int | None = None  # None: ask for the current members without waiting
        self._refused: set[str] = set()  # logged already

    async def run(self, tell: Tell) -> None:
        timeout = httpx2.Timeout(self._wait_s + GRACE_S, connect=CONNECT_TIMEOUT_S)
        latest: Desired | None = None
        async with httpx2.AsyncClient(timeout=timeout, trust_env=False) as client:
            while True:
                why = ""
                try:
                    after = {} if self._version is None else {"after": str(self._version)}
                    params = {"wait": f"{self._wait_s:g}"} | after
                    response = await client.get(f"{self.where}/members", params=params)
                    if response.status_code != 200:
                        raise RegistryError(f"status {response.status_code}")
                    answer = _decode(response.content)
                    desired, refused = desired_from(answer.members, latest or {})
                    if refused and not desired:
                        raise RegistryError(f"all its replicas are invalid: {refused[0]}")
                except (RegistryError, httpx2.HTTPError, httpx2.InvalidURL) as error:
                    why = str(error) or type(error).__name__
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    why = f"its response cannot be read: {error}"
                if why:
                    self._failed(why)
                    self._version = None  # a restarted registry may count from anywhere
                    await asyncio.sleep(self._backoff.next_s())
                    continue
                for why in refused:
                    if why not in self._refused:
                        log.warning("The registry at %s has an invalid replica: %s", self.where, why)
                self._refused = set(refused)
                self._recovered()
                self._backoff.reset()
                if desired != latest:
                    latest = desired
                    tell(desired)
                elif answer.version == self._version:
                    await asyncio.sleep(PAUSE_S)
                self._version = answer.version


def desired_from(members: list[Any], latest: Desired) -> tuple[Desired, list[str]]:
    """The replicas, and why some members are invalid; an invalid member keeps its `latest` spec.

    Unknown fields of a newer registry are ignored.
    """
    desired: Desired = {}
    refused: list[str] = []
    for member in members:
        try:
            if not isinstance(member, dict):
                raise BadSpec(f"{member!r} is not an object with a url")
            spec = spec_of({key: value for key, value in member.items() if key in _FIELDS and value is not None})
            if spec.name in desired:
                raise BadSpec(f"two replicas are named {spec.name!r}; the first counts")
        except BadSpec as error:
            refused.append(str(error))
            name = member.get("name") if isinstance(member, dict) else None
            if isinstance(name, str) and name in latest:
                desired.setdefault(name, latest[name])
        else:
            desired[spec.name] = spec
    return desired, refused
