"""EndpointSlices of Kubernetes (discovery.k8s.io/v1): what lists and watches say, and the replicas that makes.

Decides without I/O; `router.discovery.kubernetes` asks the API server. Fields that are not read here are passed over.
"""

import logging
from typing import Any

import msgspec
from msgspec import Struct

from router.discovery.wanted import Wanted
from router.spec import SOCKETS, BadSpec, ReplicaSpec, spec_of

log = logging.getLogger(__name__)

HTTP = "http"
GONE = 410


class Expired(Exception):
    """The server no longer has the changes since then; list everything again."""


class Metadata(Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


class Conditions(Struct):
    """What is absent is unknown: then ready means ready, and so on (the API's own rules)."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class TargetRef(Struct):
    kind: str = ""
    name: str = ""
    uid: str = ""


class Endpoint(Struct, rename="camel"):
    addresses: list[str]
    conditions: Conditions | None = None
    target_ref: TargetRef | None = None


class Port(Struct):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class Slice(Struct, rename="camel"):
    metadata: Metadata
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


class SliceList(Struct):
    metadata: Metadata
    items: list[Slice] | None = None


class WatchEvent(Struct):
    type: str
    object: msgspec.Raw


class Failure(Struct):
    """A `Status` of the API."""

    code: int = 0
    message: str = ""


class Slices:
    """The slices of one service, and the resource version they are true at."""

    def __init__(self) -> None:
        self.resource_version = ""
        self._slices: dict[str, Slice] = {}
        self._refused: set[str] = set()  # what the log has said already

    def listed(self, body: bytes) -> None:
        answer = msgspec.json.decode(body, type=SliceList)
        self._slices = {each.metadata.name: each for each in answer.items or ()}
        self.resource_version = answer.metadata.resource_version

    def changed(self, line: bytes | str) -> bool:
        """Whether the replicas may be others now; Expired when the watch cannot go on."""
        event = msgspec.json.decode(line, type=WatchEvent)
        if event.type == "ERROR":
            failure = msgspec.json.decode(event.object, type=Failure)
            if failure.code == GONE:
                raise Expired(failure.message)
            raise ValueError(f"the watch failed with {failure.code}: {failure.message}")
        each = msgspec.json.decode(event.object, type=Slice)
        self.resource_version = each.metadata.resource_version
        if event.type == "DELETED":
            self._slices.pop(each.metadata.name, None)
        elif event.type in ("ADDED", "MODIFIED"):
            self._slices[each.metadata.name] = each
        return event.type != "BOOKMARK"

    def wanted(self) -> Wanted:
        """The replicas that are ready, and those that serve while they end; a pod of several addresses counts once."""
        wanted: Wanted = {}
        for each in sorted(self._slices.values(), key=lambda each: (each.address_type, each.metadata.name)):
            ports = ports_of(each)
            for endpoint in each.endpoints or ():
                try:
                    spec = spec_from(endpoint, ports)
                except BadSpec as error:
                    self._refuse(str(error))
                    continue
                if spec is not None:
                    wanted.setdefault(spec.name, spec)
        return wanted

    def _refuse(self, why: str) -> None:
        if why not in self._refused:
            log.warning("An endpoint of the service cannot be used: %s; name its ports http, events, replay, ...", why)
        self._refused.add(why)


def ports_of(each: Slice) -> dict[str, int]:
    """By name; a slice's only port is that of HTTP, whatever it is called."""
    ports = {port.name or HTTP: port.port for port in each.ports or () if port.port and port.protocol in (None, "TCP")}
    return ports if len(ports) != 1 else {HTTP: next(iter(ports.values()))}


def spec_from(endpoint: Endpoint, ports: dict[str, int]) -> ReplicaSpec | None:
    """None: it takes no requests."""
    draining = is_draining(endpoint.conditions or Conditions())
    if draining is None or not endpoint.addresses:
        return None
    host = endpoint.addresses[0]
    host = f"[{host}]" if ":" in host else host
    fields: dict[str, Any] = {name: f"tcp://{host}:{ports[name]}" for name in SOCKETS if name in ports}
    if HTTP not in ports:
        raise BadSpec(f"{host} has no port named {HTTP}")
    fields |= {"url": f"http://{host}:{ports[HTTP]}", "draining": draining}
    target = endpoint.target_ref
    if target is not None and target.kind == "Pod":
        fields |= {"name": target.name, "incarnation": target.uid or None}
    return spec_of(fields)


def is_draining(conditions: Conditions) -> bool | None:
    """None: it is not to be used at all."""
    ready = conditions.ready is not False
    serving = ready if conditions.serving is None else conditions.serving
    if conditions.terminating:
        return True if serving else None
    return False if ready else None
