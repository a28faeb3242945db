"""A replica of ours by script: its tokens follow from the prompt alone, so any other one goes on where it was lost."""

import asyncio
import json
import math
import random
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import msgspec
from httptools import HttpRequestParser, parse_url

from api.native import FRAMES_TYPE, encode_frame, unpack_ids, unwrap
from events.blocks import block_keys, root_key
from events.native import Load
from router.members.spec import ReplicaSpec
from tests.router.scripted import CHAT, DONE, DRAINING, MODEL, QUEUE_FULL, SSE, event, head_of
from tests.world.loop import WorldLoop
from tests.world.network import End, Host, Network
from tests.world.publisher import Cache, Publisher

PORT = 8000
BLOCK_TOKENS = 16
REPORTS_S = 0.25
TOOL = "/v1/tool"  # a path that the router does not know, and so may not repeat
EFFECT_S = 0.4
PREFILL_TOKENS_PER_S = 4_000.0
KNOWN_S = 0.6  # after what the replica has said: it has arrived, and what was sent before has come


def tokens_of(prompt: bytes, count: int) -> list[int]:
    """The answer to a prompt of packed token ids: small letters, as a model of bytes would say them."""
    return [97 + blake2b(prompt + b"%d" % i, digest_size=1).digest()[0] % 26 for i in range(count)]


def stream_of(tokens: list[int], said: int, response_id: str | None, created: int | None) -> list[bytes]:
    """The events of an answer from the token at `said` on: one piece for each token, and the end."""

    def piece(delta: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        told = {"id": response_id, "created": created, "model": MODEL, "object": "chat.completion.chunk"}
        return event(json.dumps({**told, "choices": [choice]}))

    pieces = [piece({"content": chr(token)}) for token in tokens]
    pieces[0] = piece({"role": "assistant", "content": ""}) + pieces[0]
    return [*pieces[said:], piece({}, "length") + DONE]


def whole_of(tokens: list[int], response_id: str | None, created: int | None) -> list[bytes]:
    """The same in one piece, after as many empty ones as there are tokens: it is written in two parts at its end."""
    message = {"role": "assistant", "content": "".join(map(chr, tokens))}
    told = {"id": response_id, "created": created, "model": MODEL, "object": "chat.completion"}
    body = json.dumps({**told, "choices": [{"index": 0, "message": message, "finish_reason": "length"}]}).encode()
    return [body[:-20], body[-20:]]


def effect_of(text: str) -> bytes:
    return json.dumps({"done": blake2b(text.encode(), digest_size=8).hexdigest()}).encode()


class ScriptedReplica:
    """One process after the other at the same address."""

    def __init__(self, network: Network, name: str, chance: random.Random, say: Callable[[str, str], None]) -> None:
        self.host: Host = network.host(name)
        self.name = name
        self.loop: WorldLoop = network.loop
        self.draining = False
        self.incarnation = 0
        self.decode_s = chance.choice((0.01, 0.02, 0.05))
        self.most_running = chance.choice((2, 4, 16))
        self.most_waiting = chance.choice((0, 2, 16))
        self.say = say
        self.cache_blocks = chance.choice((100, 2_000))
        self.cache = Cache(0, BLOCK_TOKENS)
        self.publisher: Publisher
        self._reports: asyncio.TimerHandle | None = None
        self.running: dict[Answering, None] = {}
        self.waiting: deque[Answering] = deque()
        self.is_troubled = self.hangs = False
        self.effects: list[Effect] = []  # all there ever were
        self.answers: tuple[int, bytes] | None = None  # to every generation, instead of one
        self.refusals: dict[str, set[str]] = {}  # status and code, by the request's id
        self.answerings: list[Answering] = []  # all there ever were
        self.found: list[str] = []  # what the router should not have done
        self._said_draining_s = math.inf  # when it first refused a request for that, with nothing in its way
        self._moments: dict[str, asyncio.Future[None]] = {}
        self.network = network

    def go_on(self) -> None:
        """Compute again after it has hung."""
        self.hangs = False
        for answering in [one for one in self.running if one.is_idle]:
            answering.go_on()
        self.make_room()

    async def moment(self, what: str) -> None:
        """Wait until this happens here the next time."""
        self._moments[what] = self.loop.create_future()
        await self._moments[what]

    def happens(self, what: str) -> None:
        if (awaited := self._moments.pop(what, None)) is not None and not awaited.done():
            awaited.set_result(None)

    @property
    def spec(self) -> ReplicaSpec:
        return ReplicaSpec(name=self.name, url=f"http://{self.host.address}:{PORT}", engine="warmroute")

    def start(self) -> None:
        self.incarnation += 1
        self.draining = False
        self.network.listen(lambda: Conversation(self), self.host.address, PORT)
        self.publisher = Publisher(self.network, self.host, self.incarnation, MODEL, self.happens)
        self.cache = Cache(self.cache_blocks, BLOCK_TOKENS)
        self._report()
        self.say(self.name, f"starts, process {self.incarnation}")

    def drain(self) -> None:
        self._said_draining_s = math.inf
        self.say(self.name, f"drains, with {len(self.running)} running and {len(self.waiting)} waiting")
        self.draining = True

    def kill(self) -> None:
        self.say(self.name, f"is killed, with {len(self.running)} running and {len(self.waiting)} waiting")
        self.host.kill()
        if self._reports is not None:
            self._reports.cancel()
        for answering in [*self.running, *self.waiting]:
            answering.stop()
        assert not self.running and not self.waiting

    def _report(self) -> None:
        load = Load(len(self.running), len(self.waiting), cached_blocks=len(self.cache.blocks))
        self.publisher.report(load)
        self._reports = self.loop.call_later(REPORTS_S, self._report)

    def facts(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "block_size": BLOCK_TOKENS,
            "max_model_len": 4096,
            "tokenizer": "bytes",
            "incarnation": self.incarnation,
            "draining": self.draining,
            "topic": "kv",
            "endpoints": msgspec.to_builtins(self.publisher.endpoints),
            "pool": {"total": self.cache_blocks},
        }

    def refuse_draining(self, request_id: str) -> None:
        """Note that it has told the router; from then on nothing new should come until a health check has succeeded."""
        now_s = self.loop.time()
        if now_s - max(self._said_draining_s, self.host.troubled_s) > KNOWN_S:
            since_s = now_s - self._said_draining_s
            self.found.append(f"{request_id} came {since_s:.3f} s after it had said that it drains")
        self._said_draining_s = min(now_s, self._said_draining_s)

    def make_room(self) -> None:
        while self.waiting and len(self.running) < self.most_running and not self.hangs:
            self.waiting.popleft().begin()


class Conversation(asyncio.Protocol):
    """A connection from the router: one request after the other."""

    transport: End

    def __init__(self, replica: ScriptedReplica) -> None:
        self._replica = replica
        self._parser = HttpRequestParser(self)
        self._answering: Answering | Effect | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        del error
        if self._answering is not None:
            self._answering.stop()
            self._replica.make_room()

    # ---- what the parser finds

    def on_message_begin(self) -> None:
        self._url, self._body, self._id = b"", b"", ""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._id = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        replica, path = self._replica, parse_url(self._url).path.decode()
        if path == "/load":
            self._tell(replica.facts())
        elif path in ("/health", "/ready"):
            self._refuse(503, DRAINING) if replica.draining else self._tell({})
            replica.happens("health check")
        elif path not in (CHAT, TOOL):
            self._refuse(404, b"{}")
        elif replica.draining:
            replica.refuse_draining(self._id)
            self._refuse(503, DRAINING)
        elif replica.answers is not None:
            self._refuse(*replica.answers)
        elif path == TOOL:
            self._answering = Effect(replica, self.transport, self._body, self._id)
        elif len(replica.running) >= replica.most_running and len(replica.waiting) >= replica.most_waiting:
            self._refuse(429, QUEUE_FULL)
        else:
            self._answering = Answering(replica, self.transport, self._body, self._id)
            replica.waiting.append(self._answering)
            replica.make_room()
            replica.happens("request")

    def _tell(self, answer: Any) -> None:
        self._refuse(200, json.dumps(answer).encode())

    def _refuse(self, status: int, body: bytes) -> None:
        if status >= 400 and self._id:
            code = json.loads(body).get("error", {}).get("code")
            self._replica.refusals.setdefault(self._id, set()).add(f"{status} {code}")
        self.transport.write(head_of(status, {"content_type": "application/json"}, len(body)) + body)


class Effect:
    """A request that must not be repeated, as nobody knows what a second one does."""

    def __init__(self, replica: ScriptedReplica, transport: End, body: bytes, id: str) -> None:
        self.id = id
        self._body, self._transport = body, transport
        self._timer = replica.loop.call_later(EFFECT_S, self._end)
        replica.effects.append(self)

    def _end(self) -> None:
        body = effect_of(json.loads(self._body)["text"])
        self._transport.write(head_of(200, {"content_type": "application/json"}, len(body)) + body)

    def stop(self) -> None:
        self._timer.cancel()


class Answering:
    """One generation: it waits, computes its prompt, and says a token at a time."""

    def __init__(self, replica: ScriptedReplica, transport: End, body: bytes, id: str) -> None:
        self.id, self.replica = id, replica
        native, asked = unwrap(body)
        fields = json.loads(asked)
        [prompt] = native.prompts
        self.said = len(unpack_ids(native.resume_token_ids[0])) if native.resume_token_ids else 0  # elsewhere
        self.prompt_tokens = len(prompt) // 4
        self.salt = native.cache_salt
        self.cached: int | None = None  # None: it has not begun
        self.came_s, self.lost_s = replica.loop.time(), math.inf  # the latter if it has not come to its end
        self._tokens = tokens_of(prompt, fields["max_tokens"])
        told = native.response_id, native.created
        if fields["stream"]:
            self._content_type, pieces = SSE, stream_of(self._tokens, self.said, *told)
        else:
            self._content_type = "application/json"
            pieces = [*(b"" for _ in self._tokens[self.said :]), *whole_of(self._tokens, *told)]
        self._pieces = deque(pieces)
        self._at = self.said
        self._prompt = unpack_ids(prompt) + self._tokens[: self.said]
        root = root_key(MODEL, cache_salt=self.salt, block_size=BLOCK_TOKENS)
        self._keys = block_keys(self._prompt, BLOCK_TOKENS, root)
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None
        replica.answerings.append(self)

    @property
    def is_idle(self) -> bool:
        return self._timer is None

    @property
    def is_lost(self) -> bool:
        """Whether the router can tell it nothing any more."""
        return self._transport.is_lost

    def begin(self) -> None:
        replica = self.replica
        replica.running[self] = None
        usable = (len(self._prompt) - 1) // BLOCK_TOKENS  # the last token is always computed
        self._cached = replica.cache.hit(self._keys[:usable]) * BLOCK_TOKENS
        prefill_s = (len(self._prompt) - self._cached) / PREFILL_TOKENS_PER_S
        self._timer = replica.loop.call_later(prefill_s + replica.decode_s, self.go_on)

    def stop(self) -> None:
        """It is over, or nobody wants it any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._pieces:
            self.lost_s = self.replica.loop.time()
            self._pieces.clear()
        self.replica.running.pop(self, None)
        if self in self.replica.waiting:
            self.replica.waiting.remove(self)

    def go_on(self) -> None:
        """Say a token, and the next one in time, unless its replica hangs."""
        replica = self.replica
        self._timer = None
        if replica.hangs:
            return
        if self.cached is None:
            self.cached = self._cached
            if events := replica.cache.store(self._keys, self._prompt, self.salt):
                replica.publisher.publish(events)
            told = {"content_type": FRAMES_TYPE, "x_warmroute_content_type": self._content_type}
            self._transport.write(head_of(200, {**told, "x_warmroute_cached_tokens": str(self._cached)}, None))
            replica.happens("first token")
        piece, token = self._pieces.popleft(), self._tokens[self._at : self._at + 1]
        self._at += 1
        frame = encode_frame(0, token, piece)
        self._transport.write(b"%x\r\n%b\r\n" % (len(frame), frame))
        if self._pieces:
            self._timer = replica.loop.call_later(replica.decode_s, self.go_on)
        else:
            self._transport.write(b"0\r\n\r\n")
            self.stop()
            replica.make_room()
