"""A cluster, its objects from lists and watches, and what is made of them: replicas, for example.

No I/O: `router.members.discovery.kubernetes` talks to the API server. Unknown fields are ignored.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct, field

from router.members.discovery.labels import Metadata, Values, values_in

log = logging.getLogger(__name__)

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Cluster(Struct, frozen=True):
    url: str
    namespace: str
    token_file: str | None = None  # read for each request
    ca_file: str | None = None


def in_cluster(environment: Mapping[str, str], namespace: str | None = None, folder: Path = ACCOUNT_FOLDER) -> Cluster:
    """The cluster of this pod; raise ValueError outside a pod with a service account."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    token, authority, own = folder / "token", folder / "ca.crt", folder / "namespace"
    if not host or not token.is_file():
        raise ValueError(
            "this process has no pod service account; give the API server, "
            "for example of `kubectl proxy`: --kubernetes-api http://127.0.0.1:8001"
        )
    host = f"[{host}]" if ":" in host else host
    if namespace is None:
        namespace = own.read_text().strip() if own.is_file() else "default"
    return Cluster(f"https://{host}:{port}", namespace, str(token), str(authority) if authority.is_file() else None)


class KubernetesObject(Protocol):
    """The attributes that objects of every kind have."""

    metadata: Metadata


class Named(Protocol):
    @property
    def name(self) -> str: ...


Item = TypeVar("Item", bound=KubernetesObject)
Made = TypeVar("Made", bound=Named)


class ListMetadata(Struct, rename="camel"):
    resource_version: str = ""
    next_page: str = field(default="", name="continue")


class ItemList(Struct, Generic[Item]):
    metadata: ListMetadata
    items: list[Item] | None = None


class WatchEvent(Struct):
    type: str
    object: msgspec.Raw


class Failure(Struct):
    """A `Status` object of the API."""

    code: int = 0
    message: str = ""


class FromObject(NamedTuple, Generic[Made]):
    """The things made from one object."""

    uid: str = ""
    made: tuple[Made, ...] = ()
    good: Values | None = None  # its last labels and annotations that made some
    logged: frozenset[str] = frozenset()  # remarks logged already


class Kind(NamedTuple, Generic[Item, Made]):
    resource: str  # the name that RBAC roles have
    group: str  # "": the core API
    version: str
    noun: str  # the name in logs
    type: type[Item]
    # From an object and its values: replicas, and why others were refused (to follow the object's name in a log).
    make: Callable[[Item, Values], tuple[Sequence[Made], Sequence[str]]]
    selects_by: str = "labelSelector"  # the parameter that has the selector

    def path(self, namespace: str) -> str:
        api = f"/apis/{self.group}" if self.group else "/api"
        return f"{api}/{self.version}/namespaces/{namespace}/{self.resource}"


class Collection(Generic[Item, Made]):
    """The objects of one kind that match a selector."""

    def __init__(self, kind: Kind[Item, Made], where: str, selector: str) -> None:
        self.kind = kind
        self.where = where  # the name in logs
        self.selector = selector
        self.resource_version = ""  # that of the last list
        self._objects: dict[str, FromObject[Made]] = {}  # each object by its name
        self._item = msgspec.json.Decoder(kind.type)
        self._list = msgspec.json.Decoder(ItemList[kind.type])  # type: ignore[name-defined]

    def page(self, body: bytes) -> ItemList[Item]:
        page: ItemList[Item] = self._list.decode(body)
        return page

    def listed(self, pages: Sequence[ItemList[Item]]) -> None:
        """Take all pages of a list together: half a list would drop existing replicas."""
        self._objects = {item.metadata.name: self._look(item) for each in pages for item in each.items or ()}
        self.resource_version = pages[0].metadata.resource_version

    def changed(self, line: bytes | str) -> bool:
        """Apply a watch event; return True if what is made of them may have changed; raise ValueError for a failure."""
        event = _event(line)
        if event.type == "ERROR":
            failure = _failure(event.object)
            raise ValueError(f"the watch failed with {failure.code}: {failure.message}")
        item = self._item.decode(event.object)
        name = item.metadata.name
        nothing: FromObject[Made] = FromObject()
        before = self._objects.get(name, nothing)
        if event.type == "DELETED":
            self._objects.pop(name, None)
        elif event.type in ("ADDED", "MODIFIED"):
            self._objects[name] = self._look(item)
        return self._objects.get(name, nothing).made != before.made

    def desired(self) -> dict[str, Made]:
        """All of them by name; of one that several objects name, that of the last object by name."""
        return {one.name: one for _, each in sorted(self._objects.items()) for one in each.made}

    def _look(self, item: Item) -> FromObject[Made]:
        """Make what the object describes. If a changed value is invalid, the last valid one still counts."""
        metadata = item.metadata
        before: FromObject[Made] = self._objects.get(metadata.name, FromObject())
        if before.uid != metadata.uid:
            before = FromObject(metadata.uid)
        values, remarks = values_in(metadata)
        made, refused = self.kind.make(item, values)
        good = before.good
        if made:
            good = values
        elif refused and good is not None:
            made, _ = self.kind.make(item, good)
            if made:
                refused = [f"{why}; its last valid value still counts" for why in refused]
        remarks += refused
        for remark in remarks:
            if remark not in before.logged:
                log.warning("%s: %s %s %s", self.where, self.kind.noun, metadata.name, remark)
        return FromObject(metadata.uid, tuple(made), good, before.logged.union(remarks))


_event = msgspec.json.Decoder(WatchEvent).decode
_failure = msgspec.json.Decoder(Failure).decode


def failure_of(body: bytes) -> str:
    """The message of an error response; empty if it is not a `Status` object."""
    try:
        return _failure(body).message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
