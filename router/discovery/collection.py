"""Objects of Kubernetes as lists and watches tell of them, and the replicas that they make.

Decides without I/O; `router.discovery.kubernetes` asks the API server. Fields that are not read are passed over.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct, field

from router.discovery.labels import Metadata, Values, values_in
from router.discovery.wanted import Wanted
from router.spec import ReplicaSpec

log = logging.getLogger(__name__)

GONE = 410


class Expired(Exception):
    """The server no longer has the changes since then; list everything again."""


class Described(Protocol):
    """What objects of all kinds have."""

    metadata: Metadata

    @property
    def order(self) -> tuple[str, ...]:
        """Where two objects name the same replica, the first of them counts."""


Item = TypeVar("Item", bound=Described)


class ListMetadata(Struct, rename="camel"):
    resource_version: str = ""
    next_page: str = field(default="", name="continue")


class ItemList(Struct, Generic[Item]):
    metadata: ListMetadata
    items: list[Item] | None = None


class Page(Struct):
    metadata: ListMetadata


class Bookmark(Struct):
    """Only a version; what else there is of an object is not filled in."""

    metadata: Metadata


class WatchEvent(Struct):
    type: str
    object: msgspec.Raw


class Failure(Struct):
    """A `Status` of the API."""

    code: int = 0
    message: str = ""


class Made(NamedTuple):
    """Of one object."""

    uid: str = ""
    order: tuple[str, ...] = ()
    replicas: tuple[ReplicaSpec, ...] = ()
    good: Values | None = None  # what its labels and annotations said when replicas were last made of it
    said: frozenset[str] = frozenset()  # what the log has been told of it


class Kind(NamedTuple, Generic[Item]):
    resource: str  # as roles name it
    group: str  # "": the core API's
    version: str
    noun: str  # for logs
    type: type[Item]
    # With what its labels and annotations say; and of those that are none why (as one goes on after a name).
    replicas: Callable[[Item, Values], tuple[Sequence[ReplicaSpec], Sequence[str]]]

    def path(self, namespace: str) -> str:
        api = f"/apis/{self.group}" if self.group else "/api"
        return f"{api}/{self.version}/namespaces/{namespace}/{self.resource}"


class Collection(Generic[Item]):
    """The objects of one kind that a selector names, up to one version.

    Versions that are whole numbers are compared; others are taken in the order they come. A watch only goes forward:
    an event from before what is known means that the server repeats itself, or that its store was put back. A list
    says which.
    """

    def __init__(self, kind: Kind[Item], where: str, selector: str) -> None:
        self.kind = kind
        self.where = where  # for logs
        self.selector = selector
        self.resource_version = ""
        self._made: dict[str, Made] = {}  # by the object's name
        self._item = msgspec.json.Decoder(kind.type)
        self._list = msgspec.json.Decoder(ItemList[kind.type])  # type: ignore[name-defined]

    def listed(self, pages: Sequence[bytes]) -> None:
        """All pages at once: half a list would drop replicas that are there."""
        lists: list[ItemList[Item]] = [self._list.decode(page) for page in pages]
        self._made = {item.metadata.name: self._look(item) for each in lists for item in each.items or ()}
        self.resource_version = lists[0].metadata.resource_version

    def changed(self, line: bytes | str) -> bool:
        """Whether the replicas may be others now; Expired when the watch cannot go on."""
        event = _event(line)
        if event.type == "ERROR":
            failure = _failure(event.object)
            if failure.code == GONE:
                raise Expired(failure.message)
            raise ValueError(f"the watch failed with {failure.code}: {failure.message}")
        if event.type == "BOOKMARK":
            self._advance(_bookmark(event.object).metadata.resource_version)
            return False
        item = self._item.decode(event.object)
        self._advance(item.metadata.resource_version)
        name = item.metadata.name
        before = self._made.get(name, Made())
        if event.type == "DELETED":
            self._made.pop(name, None)
        elif event.type in ("ADDED", "MODIFIED"):
            self._made[name] = self._look(item)
        return self._made.get(name, Made()).replicas != before.replicas

    def wanted(self) -> Wanted:
        """A replica that several objects name counts once."""
        wanted: Wanted = {}
        for made in sorted(self._made.values(), key=lambda made: made.order):
            for spec in made.replicas:
                wanted.setdefault(spec.name, spec)
        return wanted

    def _advance(self, version: str) -> None:
        known = self.resource_version
        if version.isdecimal() and known.isdecimal() and int(version) < int(known):
            raise Expired(f"its watch went back from version {known} to {version}")
        self.resource_version = version or known

    def _look(self, item: Item) -> Made:
        """A value that cannot be used takes no replica away: the last that could be used counts on."""
        metadata = item.metadata
        before = self._made.get(metadata.name, Made())
        if before.uid != metadata.uid:
            before = Made(metadata.uid)
        values, remarks = values_in(metadata)
        replicas, refused = self.kind.replicas(item, values)
        good = before.good
        if replicas:
            good = values
        elif refused and good is not None:
            replicas, _ = self.kind.replicas(item, good)
            if replicas:
                refused = [f"{why}; what it said before still counts" for why in refused]
        remarks += refused
        self._say(metadata.name, [remark for remark in remarks if remark not in before.said])
        return Made(metadata.uid, item.order, tuple(replicas), good, before.said.union(remarks))

    def _say(self, name: str, remarks: Iterable[str]) -> None:
        for remark in remarks:
            log.warning("%s: %s %s %s", self.where, self.kind.noun, name, remark)


_event = msgspec.json.Decoder(WatchEvent).decode
_failure = msgspec.json.Decoder(Failure).decode
_bookmark = msgspec.json.Decoder(Bookmark).decode
_page = msgspec.json.Decoder(Page).decode


def next_page(body: bytes) -> str:
    """Where the list goes on; empty: nowhere."""
    return _page(body).metadata.next_page


def failure_of(body: bytes) -> str:
    """What a refusal says; empty, where it is no `Status` of the API."""
    try:
        return _failure(body).message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
