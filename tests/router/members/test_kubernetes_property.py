"""Despite any changes of pods and any broken lists and watches, the replicas equal the pods in the end."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from router.members.discovery.collection import Collection, Expired
from router.members.discovery.pods import Pod, pods_of
from router.members.spec import ReplicaSpec
from tests.router.kubernetes_api import SPACE, Object, pod

NAMES = st.sampled_from(["a", "b"])
STATES: dict[str, Object] = {
    "ready": {},
    "not ready": {"ready": False},
    "ending": {"ending": True},
    "ended": {"ending": True, "ready": False},
    "restarted": {"restarts": 1},
    "another": {"uid": "another"},
    "failed": {"phase": "Failed"},
    "vllm": {"annotations": {"warmroute/engine": "vllm"}},
    "mistyped": {"annotations": {"warmroute/engin": "vllm"}},
    "refused": {"annotations": {"warmroute/engine": "vlm"}},
    "refused and ending": {"annotations": {"warmroute/engine": "vlm"}, "ending": True},
}
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, st.sampled_from(sorted(STATES))),
        st.tuples(st.just("delete"), NAMES),
        st.tuples(st.just("bookmark")),
    ),
    min_size=1,
    max_size=4,
)
WATCHED = st.one_of(
    st.tuples(st.just("read"), st.integers(1, 4)),  # so many events
    st.tuples(st.just("drop")),
    st.tuples(st.just("forget")),
    st.tuples(st.just("relist")),
    st.tuples(st.just("repeat"), st.integers(0, 20)),
    st.tuples(st.just("put back")),
)
TURNS = st.lists(st.tuples(CHANGES, WATCHED), min_size=2, max_size=15)


class Server:
    """A store, and all that happened to it."""

    def __init__(self) -> None:
        self.version = 1
        self.stored: dict[str, Object] = {}
        self.events: list[tuple[int, Object]] = []
        self.forgotten = 0

    def event(self, kind: str, content: Object) -> None:
        self.version += 1
        content = content | {"metadata": content["metadata"] | {"resourceVersion": str(self.version)}}
        if kind != "BOOKMARK":
            self.stored.pop(content["metadata"]["name"], None)
        if kind in ("ADDED", "MODIFIED"):
            self.stored[content["metadata"]["name"]] = content
        self.events.append((self.version, {"type": kind, "object": content}))

    def pages(self) -> list[bytes]:
        items = list(self.stored.values())
        halves = [items[:2], items[2:]]
        tokens: list[Object] = [{"continue": "more"}, {}]
        return [
            msgspec.json.encode({"metadata": {"resourceVersion": str(self.version)} | token, "items": half})
            for half, token in zip(halves, tokens, strict=True)
        ]

    def put_back(self) -> None:
        """As a backup does: the same objects, at versions that were used before."""
        self.version = max(1, self.version - 5)
        self.events = []
        self.forgotten = 0


class Follower:
    """Does with a collection what a watch does."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pods: Collection[Pod, ReplicaSpec] = pods_of(SPACE, "app=llm")
        self.coming: list[Object] = []  # of the watch that is open
        self.list()

    def list(self) -> None:
        pages = [self.pods.page(body) for body in self.server.pages()]
        assert [page.metadata.next_page for page in pages] == ["more", ""]
        self.pods.listed(pages)
        self.watch()

    def watch(self) -> None:
        seen = int(self.pods.resource_version)
        if seen < self.server.forgotten:
            self.coming = [{"type": "ERROR", "object": {"code": 410, "message": "too old"}}]
        else:
            self.coming = [event for version, event in self.server.events if version > seen]
        self.told = len(self.server.events)

    def read(self, most: int) -> None:
        self.coming += [event for _, event in self.server.events[self.told :]]
        self.told = len(self.server.events)
        for _ in range(min(most, len(self.coming))):
            event = self.coming.pop(0)
            before = self.pods.desired()
            try:
                changed = self.pods.changed(msgspec.json.encode(event))
            except Expired:
                self.list()
                return
            assert changed == (self.pods.desired() != before)

    def read_all(self) -> None:
        self.read(1)
        while self.coming:
            self.read(100)


def model(stored: dict[str, Object]) -> dict[str, tuple[bool, str, str]]:
    """Draining, incarnation and engine of each replica."""
    replicas = {}
    for name, content in stored.items():
        metadata, status = content["metadata"], content["status"]
        engine = metadata["annotations"].get("warmroute/engine", "auto")
        run = status["containerStatuses"][0]["containerID"]
        ending = "deletionTimestamp" in metadata
        if status["phase"] == "Running" and (ending or status["conditions"][1]["status"] == "True"):
            replicas[name] = (ending, f"{metadata['uid']}/{run}", engine)
    return replicas


@given(turns=TURNS)
def test_whatever_happens_the_replicas_are_those_that_there_are(turns: list[tuple[list[Any], Any]]) -> None:
    server = Server()
    follower = Follower(server)
    for changes, (watched, *arguments) in turns:
        for change in changes:
            apply(server, *change)
        if watched == "read":
            follower.read(arguments[0])
        elif watched == "drop":
            follower.watch()
        elif watched == "forget":
            server.forgotten = server.version
            follower.watch()
        elif watched == "relist":
            follower.list()
        elif watched == "repeat" and server.events:
            follower.read_all()
            follower.coming.append(server.events[arguments[0] % len(server.events)][1])
            follower.read_all()
        elif watched == "put back":
            server.put_back()
            follower.list()
    follower.read_all()
    wanted = {name: (spec.draining, spec.incarnation, spec.engine) for name, spec in follower.pods.desired().items()}
    expected = model(server.stored)
    for name in [name for name, (*_, engine) in expected.items() if engine == "vlm"]:
        # What it said before counts, if the follower has seen that.
        *known, _ = expected.pop(name)
        *found, engine = wanted.pop(name, (*known, "auto"))
        assert found == known and engine in ("auto", "vllm")
    assert wanted == expected


def apply(server: Server, change: str, name: str = "", state: str = "") -> None:
    if change == "put":
        server.event("MODIFIED" if name in server.stored else "ADDED", pod(name, **STATES[state]))
    elif change == "delete" and name in server.stored:
        server.event("DELETED", server.stored[name])
    elif change == "bookmark":
        server.event("BOOKMARK", {"metadata": {}, "spec": {"containers": None}, "status": {}})
