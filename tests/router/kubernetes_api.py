"""An API server of Kubernetes as far as lists and watches go: versions, pages, 410, and everything that goes wrong.

Answers have the shapes of those that Kubernetes' documentation shows.
"""

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from hashlib import blake2b
from typing import Any

from router.members.discovery.desired import Discovery
from router.members.spec import Desired
from tests.router.loopback import Reply, Request, serving
from tests.router.scripted import refused_port

SPACE = "space"
PODS = f"/api/v1/namespaces/{SPACE}/pods"
POOLS = f"/apis/inference.networking.k8s.io/v1/namespaces/{SPACE}/inferencepools"
Object = dict[str, Any]
Refusal = tuple[int, Mapping[str, str]]  # a status and headers
NO_HEADERS: Mapping[str, str] = {}
SWAPPED = {"ADDED": "MODIFIED", "MODIFIED": "ADDED"}
HANG = 0  # instead of a status: nothing is answered, and the connection stays
TOO_OLD = "The provided continue parameter is too old to display a consistent list result."


class KubernetesApi:
    """Its store outlives the server, like etcd; watches may start in the past until a compaction."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self.tls: ssl.SSLContext | None = None
        self.version = 100
        self.asked: list[Request] = []
        self.refusals: list[Callable[[Request], Refusal | None]] = []
        self.cut: tuple[float, str] | None = None  # the share of the next event that is sent, and how its stream ends
        self.times = 1  # each event is told so often
        self.mistyped = False  # events say that what is new has changed, and that what has changed is new
        self.page = 500  # objects at most, whatever is asked for
        self.port = port or refused_port()
        self._objects: dict[tuple[str, str], Object] = {}  # by path and name
        self._history: list[tuple[int, str, str, Object, Object | None]] = []  # version, path, type, object, the last
        self._forgotten = 0
        self._changed = asyncio.Event()
        self._replies: set[Reply] = set()
        self._lists: dict[str, tuple[int, list[Object]]] = {}  # what a list goes on with, by its token
        self._running: AsyncExitStack | None = None

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.host}:{self.port}"

    # ---- being there

    async def start(self) -> None:
        self._running = AsyncExitStack()
        await self._running.enter_async_context(serving(self._handle, self.port, self.host, self.tls))

    async def stop(self) -> None:
        """Refuse new connections, and reset open ones."""
        if self._running is not None:
            self.drop()
            await self._running.aclose()
        self._running = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator["KubernetesApi"]:
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    def drop(self) -> None:
        """Every watch is lost."""
        for reply in self._replies:
            reply.drop()
        self._replies.clear()

    # ---- what is stored

    def put(self, path: str, content: Object) -> None:
        name = content["metadata"]["name"]
        before = self._objects.get((path, name))
        content = self._stamped(content)
        self._objects[path, name] = content
        self._tell(path, "ADDED" if before is None else "MODIFIED", content, before)

    def delete(self, path: str, name: str) -> None:
        before = self._objects.pop((path, name))
        self._tell(path, "DELETED", self._stamped(before), before)

    def mark(self) -> None:
        """Send every watch a bookmark."""
        content = self._stamped({"kind": "Pod", "apiVersion": "v1", "metadata": {"creationTimestamp": None}})
        self._tell("", "BOOKMARK", content | {"spec": {"containers": None}, "status": {}}, None)

    async def babble(self, said: bytes) -> None:
        """Send every watch these bytes."""
        for reply in list(self._replies):
            with suppress(ConnectionError):
                await reply.chunk(said)

    async def suffer(self, what: str, *more: Any) -> None:
        """Have a trouble, named like a method or an attribute here; `heal` ends those that last."""
        match what, *more:
            case "heal", *_:
                self.cut, self.refusals, self.times, self.mistyped = None, [], 1, False
                if self._running is None:
                    await self.start()
            case "refuse", str(kind), int(status), *headers:
                self.refusals.append(refusing(kind, status, *headers))
            case "cut", float(share), str(ends):
                self.cut = share, ends
            case "repeat", int(times), bool(mistyped):
                self.times, self.mistyped = times, mistyped
            case _:
                done = getattr(self, what)(*more)
                if done is not None:
                    await done

    def fail(self, code: int) -> None:
        """Send every watch an error."""
        self.version += 1
        self._tell("", "ERROR", failure(code, "too old resource version"), None)

    def forget(self) -> None:
        """Compact: no earlier watch or unfinished list can continue."""
        self._forgotten = self.version
        self._lists.clear()

    def _stamped(self, content: Object) -> Object:
        self.version += 1
        return content | {"metadata": content["metadata"] | {"resourceVersion": opaque(self.version)}}

    def _tell(self, path: str, kind: str, content: Object, before: Object | None) -> None:
        self._history.append((self.version, path, kind, content, before))
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- what is asked

    def kinds(self) -> list[str]:
        return ["watch" if "watch" in request.query else "list" for request in self.asked]

    def watches(self) -> list[Request]:
        return [request for request in self.asked if "watch" in request.query]

    @property
    def watched(self) -> int:
        return len(self._replies)

    async def _handle(self, request: Request, reply: Reply) -> None:
        self.asked.append(request)
        for refuses in self.refusals:
            if (refusal := refuses(request)) is not None:
                status, headers = refusal
                if status == HANG:
                    await asyncio.Event().wait()
                said = failure(status, f"refused with {status}") if status != 200 else b"<p>No.</p>"
                await reply.whole(status, said, **headers)
                return
        if "watch" in request.query:
            await self._watch(request, reply)
        else:
            await self._list(request, reply)

    async def _list(self, request: Request, reply: Reply) -> None:
        token = request.query.get("continue")
        if token is not None and token not in self._lists:
            await reply.whole(410, failure(410, TOO_OLD) | {"metadata": {"continue": "for the rest as it is now"}})
            return
        matches = selector_of(request)
        found = [each for (path, _), each in sorted(self._objects.items()) if path == request.path and matches(each)]
        version, items = (self.version, found) if token is None else self._lists.pop(token)
        limit = min(self.page, int(request.query.get("limit", len(items))))
        metadata = {"resourceVersion": opaque(version)}
        if items[limit:]:
            metadata["continue"] = base64.b64encode(f"{version} {len(self.asked)}".encode()).decode()
            self._lists[metadata["continue"]] = (version, items[limit:])
        await reply.whole(200, {"kind": "List", "metadata": metadata, "items": items[:limit]})

    async def _watch(self, request: Request, reply: Reply) -> None:
        await reply.begin()
        seen = next(one for one in range(self.version + 1) if opaque(one) == request.query["resourceVersion"])
        if seen < self._forgotten:
            await reply.line({"type": "ERROR", "object": failure(410, "too old resource version")})
            await reply.end()
            return
        self._replies.add(reply)
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                await self._tell_all(request, reply, seen)
        except TimeoutError:
            await reply.end()
        finally:
            self._replies.discard(reply)

    async def _tell_all(self, request: Request, reply: Reply, seen: int) -> None:
        matches = selector_of(request)
        history = self._history
        told = sum(version <= seen for version, *_ in history)
        while True:
            changed = self._changed
            while told < len(history):
                _, path, kind, content, before = history[told]
                told += 1
                if path == request.path:
                    kind = as_seen(kind, content, before, matches)
                    kind = SWAPPED.get(kind, kind) if self.mistyped else kind
                if kind and path in ("", request.path):
                    for _ in range(self.times):
                        await self._say(reply, {"type": kind, "object": content})
            await changed.wait()

    async def _say(self, reply: Reply, event: Object) -> None:
        line = json.dumps(event, ensure_ascii=False).encode() + b"\n"  # as Go writes it
        if self.cut is None:
            await reply.chunk(line)
            return
        (share, ends), self.cut = self.cut, None
        await reply.chunk(line[: int(share * len(line))])
        if ends == "hangs":
            await asyncio.Event().wait()
        if ends == "ends":
            await reply.end()
        else:
            reply.drop()
        raise ConnectionAbortedError


def refusing(kind: str, status: int, headers: Mapping[str, str] = NO_HEADERS) -> Callable[[Request], Refusal | None]:
    """Refuse requests of one kind: a list's first or a further page, or a watch."""

    def refuses(request: Request) -> Refusal | None:
        asked = "watch" if "watch" in request.query else "page" if request.query.get("continue") else "list"
        return (status, headers) if asked == kind else None

    return refuses


def opaque(version: int) -> str:
    """A resourceVersion: neither a number, nor in any order."""
    return blake2b(b"%d" % version, digest_size=5).hexdigest()


def failure(code: int, message: str) -> Object:
    told = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return told | {"message": message, "reason": "Expired" if code == 410 else "Unknown", "code": code}


def selector_of(request: Request) -> Callable[[Object], bool]:
    """Parse a selector of `key=value,...`, of `key in (a,b)`, or of a field `metadata.name=value`."""
    selector, field = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")
    if field:
        name = field.removeprefix("metadata.name=")
        return lambda content: content["metadata"]["name"] == name
    if " in " in selector:
        key, _, values = selector.partition(" in ")
        allowed = values.strip("()").split(",")
        return lambda content: (content["metadata"].get("labels") or {}).get(key) in allowed
    wanted = dict(part.split("=") for part in selector.split(",") if part)
    return lambda content: wanted.items() <= (content["metadata"].get("labels") or {}).items()


def as_seen(kind: str, content: Object, before: Object | None, matches: Callable[[Object], bool]) -> str:
    """The type of an event for a watcher with a selector; empty: no event."""
    if kind == "DELETED":
        return kind if matches(content) else ""
    was, now = before is not None and matches(before), matches(content)
    return {(False, True): "ADDED", (True, True): "MODIFIED", (True, False): "DELETED"}.get((was, now), "")


# ---- objects


def pod(name: str, address: str = "10.0.0.1", *, ready: bool = True, restarts: int = 0, **more: Any) -> Object:
    """A pod as its kubelet keeps it; set `labels`, `annotations`, `ports`, `ending`, `phase` and `uid` as needed."""
    metadata: Object = {
        "name": name,
        "namespace": SPACE,
        "uid": more.get("uid", f"uid-{name}"),
        "labels": {"app": "llm"} | more.get("labels", {}),
        "annotations": more.get("annotations", {}),
    }
    if more.get("ending"):
        metadata |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30}
    running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "engine", "ports": more.get("ports", [port("http", 8000)])}]},
        "status": {
            "phase": more.get("phase", "Running"),
            "podIP": address,
            "conditions": [
                {"type": "PodScheduled", "status": "True", "lastProbeTime": None},
                {"type": "Ready", "status": "True" if ready else "False"},
            ],
            "containerStatuses": [
                {
                    "name": "engine",
                    "restartCount": restarts,
                    "containerID": f"containerd://{name}-{restarts}",
                    "state": running,
                }
            ],
        },
    }


def pool(name: str, labels: Mapping[str, str] | None = None, ports: Sequence[int] = (8000,)) -> Object:
    """An InferencePool; without labels it selects those of `pod`."""
    return {
        "metadata": {"name": name, "namespace": SPACE, "uid": f"uid-{name}"},
        "spec": {
            "selector": {"matchLabels": {"app": "llm"} if labels is None else labels},
            "targetPorts": [{"number": number} for number in ports],
            "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
        },
    }


def port(name: str, number: int, protocol: str = "TCP") -> Object:
    return {"containerPort": number, "protocol": protocol} | ({"name": name} if name else {})


# ---- who follows it


@asynccontextmanager
async def following(watch: Discovery) -> AsyncIterator[list[Desired]]:
    """All sets of replicas that it names, from the first on."""
    said: list[Desired] = []
    task = asyncio.create_task(watch.run(said.append))
    try:
        yield said
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
