"""Each kind of request does what `traces.json` says when a replica fails.

A trace is all that can be seen from outside: which replica got which request, what the client got, what `/replicas` and
`/metrics` tell of the replicas afterwards, and how often the request was retried or resumed. Time is virtual, but for
gateways: gRPC has threads of its own. After an intended change, `python -m tests.router.flow.test_traces` records all
traces anew.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.native import REQUEST_TYPE
from router.members.spec import ReplicaSpec
from tests.router.http.picker.asking import gateway, head
from tests.router.loopback import until
from tests.router.monitor.test_upkeep import status
from tests.router.proxy.nixl_peer import Engine, Fabric
from tests.router.proxy.test_conversing_losses import message, response
from tests.router.proxy.test_generation import from_piece, goes_on
from tests.router.scripted import (
    CHAT,
    COMPLETIONS,
    DONE,
    DRAINING,
    MODEL,
    Call,
    Client,
    Handler,
    Scripted,
    Served,
    connect,
    event,
    refused_port,
    says,
    served,
)
from tests.router.virtual import in_virtual_time

RECORD = Path(__file__).with_name("traces.json")
MESSAGES, RESPONSES, EMBEDDINGS = "/v1/messages", "/v1/responses", "/v1/embeddings"
LIMIT_S = 2.0  # for the first byte, and between two
PATIENCE_S = 20.0  # then the client waits until it leaves
NEVER_S = 100.0


# ---- what is seen

WORDS = re.compile(r'"message":\s*"[^"]*"')  # of errors: they have ports and times


class Trace:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.asked: list[str] = []
        self.client: list[str] = []

    def note(self, name: str, call: Call) -> None:
        """Note a request that a replica got."""
        self.calls.append(call)
        differs = call.body != self.calls[0].body
        more = ""
        if b'"do_remote_prefill": true' in call.body:
            more = ", with KV"
        elif b'"do_remote_decode":true' in call.body:
            more = ", for its KV"
        elif differs and call.header("content-type") == REQUEST_TYPE:
            said = call.native[0].resume_token_ids
            more = f", after {len(said[0]) // 4} tokens" if said else ""
        elif differs:
            more = ", another body"
        self.asked.append(f"{name}: {call.method} {call.path}{more}")

    async def read(self, client: Client) -> None:
        """Note an answer, however it ends."""
        body = b""
        try:
            async with asyncio.timeout(PATIENCE_S):
                code, headers = await client.head()
                self.client.append(f"{code} of {headers.get('x-warmroute-replica', 'the router')}")
                if "content-length" in headers:
                    body = await client.reader.readexactly(int(headers["content-length"]))
                else:
                    while part := await client.chunk():
                        body += part
        except (asyncio.IncompleteReadError, TimeoutError) as error:
            body += error.partial if isinstance(error, asyncio.IncompleteReadError) else b""
            self.client.append("waits" if isinstance(error, TimeoutError) else "is cut off")
        text = WORDS.sub('"message":…', body.decode())
        self.client.append(text if len(text) < 2000 else f"{text[:30]}… ({len(body)} bytes)")

    async def told(self, running: Served, silent: str = "", **more: str) -> dict[str, Any]:
        """The whole trace, once the request is over; the `silent` replica goes on failing health checks."""
        await running.idle()
        async with connect(running.port) as one, connect(running.port) as other:
            metrics = (await one.get("/metrics")).body.decode()
            states = (await other.get("/replicas")).json["replicas"]
        learned: dict[str, str] = {}
        for state in (state for state in states if state["name"] != silent):
            name = state["name"]
            faults = _figure(metrics, f'warmroute_router:faults_total{{replica="{name}"}}')
            words = [f"{faults} faults"] * (faults > 0) + [state["breaker"]] * (state["breaker"] != "closed")
            words += ["counts as busy"] * (state["breaker"] == "closed" and state["slowness"] > 1)
            if state["why"] is not None and state["breaker"] == "closed":
                words.append(re.sub(r"[0-9.]+", "N", state["why"]))
            if words:
                learned[name] = ", ".join(words)
        counts = {name: _figure(metrics, f"warmroute_router:{name}_total") for name in ("retries", "resumes")}
        learned |= {name: str(count) for name, count in counts.items() if count}
        return {"asked": self.asked, "client": self.client, "learned": learned | more}


def _figure(metrics: str, name: str) -> int:
    found = re.search(rf"^{re.escape(name)} (\d+)", metrics, re.MULTILINE)
    assert found is not None, f"{name} is no metric"
    return int(found[1])


# ---- replicas, and how they fail


class Once(Scripted):
    """A replica whose connections serve one request of the router's own: on a used one, others may be sent twice."""

    is_silent = False
    rests = False  # and says so when its health is checked

    def refuses(self, call: Call, handler: Handler) -> Any:
        """Have the handler fail a request."""
        self.rests = isinstance(handler, Refuses) and handler.rests
        return handler(call)

    async def _serve(self, call: Call) -> None:
        if call.header("x-request-id") is not None:
            await super()._serve(call)
        elif self.is_silent:
            await self._until_left(call.connection)
        else:
            code, answer = self.control.get(call.path, (404, {}))
            if self.rests and call.path in ("/health", "/ready"):
                code, answer = 503, DRAINING
            call.answer(answer if isinstance(answer, bytes) else json.dumps(answer).encode(), code, connection="close")


class Replica(Once):
    def __init__(self, name: str, *, native: bool = False, **spec_fields: Any) -> None:
        super().__init__(name, nothing, native=native)
        self.spec_fields = spec_fields

    @property
    def spec(self) -> ReplicaSpec:
        return msgspec.structs.replace(super().spec, **self.spec_fields)


class Half(Once, Engine):
    """An engine that computes prompts or answers."""


def nothing(call: Call) -> None:
    """Say nothing; the connection stays."""


def then(*handlers: Handler) -> Handler:
    def handle(call: Call) -> None:
        for handler in handlers:
            handler(call)

    return handle


def whole_head(call: Call) -> None:
    call.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n")


def half(call: Call) -> None:
    whole_head(call)
    call.write(b'{"half":')


def events(*parts: bytes) -> Handler:
    return then(Call.begin, *(lambda call, part=part: call.chunk(part) for part in parts))


class Refuses:
    """A handler that answers with an error."""

    def __init__(self, code: int, error_code: str | None = None, size: int = 0) -> None:
        error = {"error": {"message": "no" + "o" * size, "code": error_code}}
        self._code, self._body = code, json.dumps(error).encode()
        self.rests = error_code in ("draining", "loading")

    def __call__(self, call: Call) -> None:
        call.answer(self._body, self._code)


REFUSALS: dict[str, tuple[int, str | None]] = {
    **{str(code): (code, None) for code in (400, 429, 500, 501, 502, 503, 504)},
    "429 queue_full": (429, "queue_full"),
    "503 draining": (503, "draining"),
    "503 loading": (503, "loading"),
}


# ---- requests of clients


@dataclass
class Kind:
    """A kind of request: how it is asked, how it is answered, and the beginning of that answer."""

    path: str
    body: Any
    good: Handler
    begins: Handler = whole_head
    first_bytes: Handler = half
    method: str = "POST"
    native: bool = False
    spec: dict[str, Any] = field(default_factory=dict)
    is_like: str = ""  # a kind that takes the same way, so that some scenes are enough

    @property
    def streams(self) -> bool:
        return isinstance(self.body, dict) and self.body.get("stream", False)


def whole(path: str, body: Any, good: bytes, method: str = "POST", is_like: str = "") -> Kind:
    return Kind(path, body, says(good), method=method, is_like=is_like)


def streamed(path: str, body: dict[str, Any], parts: list[bytes], is_like: str = "", **spec: Any) -> Kind:
    first = next(number for number, part in enumerate(parts) if b"two" in part)
    good = then(events(*parts), Call.end)
    return Kind(path, body | {"stream": True}, good, Call.begin, events(*parts[:first]), spec=spec, is_like=is_like)


def ours(body: dict[str, Any], is_like: str = "") -> Kind:
    first = then(Call.begin_frames, lambda call: call.frame(event("one "), 100))
    good: Handler = lambda call: (goes_on if call.native[0].resume_token_ids else from_piece(0, 4))(call)  # noqa: E731
    return Kind(CHAT, body, good, Call.begin_frames, first, native=True, is_like=is_like)


ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
STORED = {"model": MODEL, "input": "hi"}
TEXT = {"model": MODEL, "prompt": "hi", "max_tokens": 9}
CHATS = [event(json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})) for text in ("one", "two")]
TEXTS = [event(json.dumps({"choices": [{"index": 0, "text": text}]})) for text in ("one", "two")]
RESUMABLE: dict[str, Any] = {"engine": "vllm", "events": "off", "resume": True}
WITH_EFFECTS = STORED | {"background": True}
KINDS: dict[str, Kind] = {
    "chat": whole(CHAT, ASKED, b'{"choices":[]}'),
    "chat, streamed": streamed(CHAT, ASKED, [*CHATS, DONE]),
    "chat at ours": ours(ASKED, "chat at ours, streamed"),
    "chat at ours, streamed": ours(ASKED | {"stream": True}),
    "completion": whole(COMPLETIONS, TEXT, b'{"choices":[]}', is_like="chat"),
    "completion, streamed": streamed(COMPLETIONS, TEXT, [*TEXTS, DONE], "chat, streamed"),
    "message": whole(MESSAGES, ASKED, b'{"content":[],"stop_reason":"end_turn"}'),
    "message, streamed": streamed(MESSAGES, ASKED, message("a", ["one", "two"]), "chat, streamed"),
    "message, streamed, repeatable": streamed(MESSAGES, ASKED, message("a", ["one", "two"]), **RESUMABLE),
    "response": whole(RESPONSES, STORED, b'{"status":"completed"}', is_like="message"),
    "response, streamed, repeatable": streamed(
        RESPONSES, STORED, response("a", ["one", "two"]), "message", **RESUMABLE
    ),
    "response with effects": whole(RESPONSES, WITH_EFFECTS, b'{"status":"completed"}'),
    "response with effects, streamed": streamed(
        RESPONSES, WITH_EFFECTS, response("a", ["one", "two"]), "response with effects", **RESUMABLE
    ),
    "embedding": whole(EMBEDDINGS, STORED, b'{"data":[]}'),
    "another route": whole("/v1/things", {"model": MODEL}, b"{}"),
    "question about a model": whole("/tokenizer_info", None, b"{}", "GET", "embedding"),
    "stored response": whole("/v1/responses/resp_1", None, b'{"id":"resp_1"}', "GET", "another route"),
}


@dataclass
class Scene:
    """A request whose first attempt, or each one, is answered by `first`."""

    first: Handler | None = None  # None: a good answer
    each: bool = False
    replicas: int = 2
    unreached: bool = False
    silent: bool = False  # the first replica, as soon as it has the request
    full: bool = False  # another request has taken all the room
    leaves: bool = False  # the client, once `first` has come


def failing(kind: Kind) -> Iterator[tuple[str, Handler]]:
    for name, refusal in REFUSALS.items():
        yield name, Refuses(*refusal)
    yield "500 with a long body", Refuses(500, size=20_000)
    yield "lost before the head", Call.reset
    yield "no HTTP", lambda call: call.write(b"garbage\r\n\r\n")
    yield "lost after the head", then(kind.begins, Call.drop)
    yield "lost after bytes", then(kind.first_bytes, Call.drop)
    yield "late", nothing
    yield "late after bytes", kind.first_bytes
    if kind.native:
        yield "no frames", then(kind.begins, lambda call: call.chunk(b"\xff" * 12))


FEW = ("nothing", "unreached", "429", "500", "503", "503 draining", "lost before the head", "lost after bytes", "late")


def scenes(kind: Kind) -> dict[str, Scene]:
    found = all_scenes(kind)
    return {name: found[name] for name in FEW} if kind.is_like else found


def all_scenes(kind: Kind) -> dict[str, Scene]:
    first = dict(failing(kind))
    found = {"nothing": Scene(), "unreached": Scene(unreached=True)} | {name: Scene(first[name]) for name in first}
    for name in ("429", "500", "503 draining", "lost before the head"):
        found[f"{name}, at the only replica"] = Scene(first[name], replicas=1)
    for name in ("429", "429 queue_full", "500", "503", "lost before the head"):
        found[f"{name}, at each of five"] = Scene(first[name], each=True, replicas=5)
    found["silent"] = Scene(nothing, silent=True)
    found["silent after bytes"] = Scene(kind.first_bytes, silent=True)
    found["no room"] = Scene(nothing, replicas=1, full=True)
    found["the client leaves"] = Scene(nothing, leaves=True)
    found["the client leaves after bytes"] = Scene(kind.first_bytes, leaves=True)
    return found


@asynccontextmanager
async def world(replicas: list[Any], **config: Any) -> AsyncIterator[Served]:
    """A router that asks these replicas in their order."""
    limits = {"first_token_timeout_s": LIMIT_S, "idle_timeout_s": LIMIT_S, "queue_timeout_s": 1.0}
    async with served(*replicas, **{"policy": "least-loaded", **limits, **config}) as running:
        for number, replica in enumerate(replicas):
            running.member(replica.name).candidate.running = 100 * number
        yield running


def refuse_connections(running: Served, name: str) -> None:
    upstream = running.member(name).upstream
    upstream.target = upstream.target._replace(port=refused_port())


async def of_client(kind: Kind, scene: Scene) -> dict[str, Any]:
    trace = Trace()

    def handler_of(replica: Replica) -> Handler:
        def handle(call: Call) -> Any:
            trace.note(replica.name, call)
            if scene.first is not None and (scene.each or len(trace.calls) == 1):
                return replica.refuses(call, scene.first)
            return kind.good(call)

        return handle

    replicas = [Replica(f"r{number}", native=kind.native, **kind.spec) for number in range(scene.replicas)]
    for replica in replicas:
        replica.handler = handler_of(replica)
    config: dict[str, Any] = {"replica_limit": 1} if scene.full else {}
    if scene.silent:
        config = {"first_token_timeout_s": NEVER_S, "idle_timeout_s": NEVER_S, "health_interval_s": 0.5}
    async with world(replicas, **config) as running, connect(running.port) as client, connect(running.port) as second:
        if scene.unreached:
            refuse_connections(running, "r0")
        client.send(kind.method, kind.path, kind.body, host="localhost")
        if scene.silent or scene.full or scene.leaves:
            await until(lambda: trace.calls, "a replica is asked")
        if scene.silent:
            replicas[0].is_silent = True
            if kind.native:
                running.front.upkeep.heard("r0", status())  # and never again
        if scene.full:
            second.send(kind.method, kind.path, kind.body, host="localhost")
        if scene.leaves:
            if kind.streams and scene.first is kind.first_bytes:
                await client.head()
            client.leave()
            await trace.calls[0].left()
            trace.asked.append("r0: left")
        else:
            await trace.read(second if scene.full else client)
        client.leave()
        return await trace.told(running, "r0" if scene.silent else "")


# ---- requests whose prompt is computed at another replica


async def of_halves(fails: str, first: Handler | None) -> dict[str, Any]:
    """A streamed chat: e0 computes its prompt, e1 or e2 its answer. `first` is the first answer of `fails`."""
    trace, fabric = Trace(), Fabric()
    engines = [Half("e0", fabric, "prefill"), Half("e1", fabric, "decode"), Half("e2", fabric, "decode")]

    def handler_of(engine: Half) -> Handler:
        def handle(call: Call) -> Any:
            trace.note(engine.name, call)
            is_first = sum(one.startswith(engine.name) for one in trace.asked) == 1
            if engine.name == fails and is_first and first is not None:
                return engine.refuses(call, first)
            return engine.serve(call)

        return handle

    for engine in engines:
        engine.handler = handler_of(engine)
    asked = ASKED | {"stream": True, "messages": [{"role": "user", "content": "far away " * 200}]}
    config = {"policy": "cost", "prefill_elsewhere": "always"}
    async with world(engines, **config) as running, connect(running.port) as client:
        if first is None and fails in running.replicas:
            refuse_connections(running, fails)
        client.send("POST", CHAT, asked)
        await trace.read(client)
        await running.idle()
        prefill = running.router.history.decisions[-1].record().prefill
        return await trace.told(running, first_half=str(prefill.outcome))


# ---- requests that a gateway forwards


async def of_gateway(path: str, happens: str) -> dict[str, Any]:
    trace = Trace()
    replicas = [Replica(f"r{number}") for number in range(1 if happens == "no room" else 2)]
    config: dict[str, Any] = {"replica_limit": 1, "queue_timeout_s": 0.1} if happens == "no room" else {}
    limit_s = 0.1 if happens == "late" else NEVER_S
    config |= {"picker_listen": "127.0.0.1:0", "first_token_timeout_s": limit_s, "idle_timeout_s": limit_s}
    async with world(replicas, **config) as running, gateway(running) as asking:
        names = {f"127.0.0.1:{replica.port}": replica.name for replica in replicas}
        body, stream = json.dumps(ASKED | {"input": "hi"}).encode(), asking.stream()
        await stream.begin(body, path=path)
        trace.asked.append(f"{names[await stream.picked()]}: {path}")
        if happens == "served elsewhere":
            await stream.answer(served=f"127.0.0.1:{replicas[1].port}")
        elif happens == "no room":
            second = asking.stream()
            await second.begin(body, path=path)
            trace.client.append("{} {}".format(*await second.refusal()))
            await stream.end()
        elif happens == "late":
            await running.idle()
        elif happens.startswith("leaves"):
            if happens == "leaves after bytes":
                await stream.send(response_headers=head({":status": "200"}))
                await stream.send(response_body={"body": b"{"})
            await stream.end()
        else:
            code, error_code = REFUSALS.get(happens, (200, None))
            replicas[0].rests = error_code in ("draining", "loading")
            await stream.answer(json.dumps({"error": {"code": error_code}}).encode(), str(code))
        return await trace.told(running)


AT_GATEWAY = ("nothing", *REFUSALS, "late", "leaves", "leaves after bytes", "served elsewhere", "no room")


# ---- the record

Run = Callable[[], dict[str, Any]]


def runs() -> dict[str, dict[str, Run]]:
    """All scenarios, by kind of request."""
    found: dict[str, dict[str, Run]] = {}
    for name, kind in KINDS.items():
        found[name] = {title: partial(virtually, of_client, kind, scene) for title, scene in scenes(kind).items()}
    halves = {name: first for name, first in failing(KINDS["chat, streamed"]) if "after" not in name}
    for title, engine in (("the prompt is computed elsewhere", "e0"), ("a computed prompt is fetched", "e1")):
        found[title] = {"nothing": partial(virtually, of_halves, "none", None)} | {
            what: partial(virtually, of_halves, engine, first) for what, first in {"unreached": None, **halves}.items()
        }
    for path in (CHAT, MESSAGES, RESPONSES, EMBEDDINGS):
        happens = AT_GATEWAY if path in (CHAT, EMBEDDINGS) else ("nothing", "500", "503 draining", "late")
        found[f"{path} of a gateway"] = {what: partial(really, of_gateway, path, what) for what in happens}
    return found


def virtually(scenario: Any, *arguments: Any) -> dict[str, Any]:
    return in_virtual_time(scenario(*arguments))


def really(scenario: Any, *arguments: Any) -> dict[str, Any]:
    return asyncio.run(scenario(*arguments))


def traces_of(kind: str) -> dict[str, Any]:
    """The traces of a kind; an answer that is the same as if nothing had happened is written once."""
    traces = {what: run() for what, run in runs()[kind].items()}
    client = traces["nothing"]["client"]
    for what, trace in traces.items():
        if what != "nothing" and client and trace["client"][1:] == client[1:]:
            trace["client"][1:] = ["the same answer"]
    return traces


@pytest.mark.parametrize("kind", list(runs()))
def test_a_kind_of_request_does_what_is_recorded_when_replicas_fail(kind: str) -> None:
    recorded = json.loads(RECORD.read_text())[kind]
    traces = traces_of(kind)
    assert {what: trace for what, trace in traces.items() if trace != recorded.get(what)} == {}
    assert traces.keys() == recorded.keys()


def record() -> None:
    kinds = {kind: traces_of(kind) for kind in runs()}
    lines = [
        f"{json.dumps(kind)}: {{\n"
        + ",\n".join(f"  {json.dumps(what)}: {json.dumps(trace, ensure_ascii=False)}" for what, trace in found.items())
        + "\n}"
        for kind, found in kinds.items()
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    record()
