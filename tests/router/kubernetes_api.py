"""An API server of Kubernetes as far as lists and watches go: versions, pages, 410, and being gone."""

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from router.members.discovery.desired import Discovery
from router.members.spec import Desired
from tests.router.loopback import Reply, Request, serving
from tests.router.scripted import refused_port

SPACE = "space"
PODS = f"/api/v1/namespaces/{SPACE}/pods"
POOLS = f"/apis/inference.networking.k8s.io/v1/namespaces/{SPACE}/inferencepools"
Object = dict[str, Any]
Refusal = tuple[int, dict[str, str]]  # a status and headers


class KubernetesApi:
    """Its store outlives the server, like etcd; watches may start in the past until a compaction."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self.tls: ssl.SSLContext | None = None
        self.version = 100
        self.asked: list[Request] = []
        self.refusals: list[Callable[[Request], Refusal | None]] = []
        self.torn = False  # what is written next breaks off in the middle of a line
        self.port = refused_port()
        self._objects: dict[tuple[str, str], Object] = {}  # by path and name
        self._history: list[tuple[str, str, Object, Object | None]] = []  # path, type, object, what it was before
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

    def forget(self) -> None:
        """Compact: no earlier watch or unfinished list can continue."""
        self._forgotten = self.version
        self._lists.clear()

    def _stamped(self, content: Object) -> Object:
        self.version += 1
        return content | {"metadata": content["metadata"] | {"resourceVersion": str(self.version)}}

    def _tell(self, path: str, kind: str, content: Object, before: Object | None) -> None:
        self._history.append((path, kind, content, before))
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
                await reply.whole(status, failure(status, f"refused with {status}"), **headers)
                return
        if "watch" in request.query:
            await self._watch(request, reply)
        else:
            await self._list(request, reply)

    async def _list(self, request: Request, reply: Reply) -> None:
        token = request.query.get("continue")
        if token is not None and token not in self._lists:
            await reply.whole(410, failure(410, "the provided continue parameter is too old"))
            return
        matches = selector_of(request)
        found = [each for (path, _), each in sorted(self._objects.items()) if path == request.path and matches(each)]
        version, items = (self.version, found) if token is None else self._lists.pop(token)
        limit = int(request.query.get("limit", len(items)))
        metadata = {"resourceVersion": str(version)}
        if items[limit:]:
            metadata["continue"] = base64.b64encode(f"{version} {len(self.asked)}".encode()).decode()
            self._lists[metadata["continue"]] = (version, items[limit:])
        await reply.whole(200, {"kind": "List", "metadata": metadata, "items": items[:limit]})

    async def _watch(self, request: Request, reply: Reply) -> None:
        await reply.begin()
        seen = int(request.query["resourceVersion"])
        if seen < self._forgotten:
            await reply.line({"type": "ERROR", "object": failure(410, f"too old resource version: {seen}")})
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
        told = next((number for number, each in enumerate(history) if version_of(each[2]) > seen), len(history))
        while True:
            changed = self._changed
            while told < len(history):
                path, kind, content, before = history[told]
                told += 1
                if path == request.path and (kind := as_seen(kind, content, before, matches)):
                    await self._say(reply, {"type": kind, "object": content})
            await changed.wait()

    async def _say(self, reply: Reply, event: Object) -> None:
        line = json.dumps(event, ensure_ascii=False).encode() + b"\n"  # as Go writes it
        if self.torn:
            self.torn = False
            await reply.chunk(line[: len(line) // 2])
            self._replies.discard(reply)
            await reply.end()
            return
        await reply.chunk(line)


def version_of(content: Object) -> int:
    return int(content["metadata"]["resourceVersion"])


def failure(code: int, message: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}


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
                {"type": "PodScheduled", "status": "True"},
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
