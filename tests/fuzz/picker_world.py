"""A router for gateways, all of it but sockets: its replicas have said what they serve, and are never asked."""

import asyncio
import gzip
import json
from collections.abc import Iterator, Mapping
from functools import partial
from random import Random
from typing import Any

import msgspec

from api.http.connection import Limits
from api.http.routes import RouteTable
from router.config import RouterConfig
from router.http.app import build_app
from router.http.front import Openings
from router.http.one_answer import answer_of
from router.http.picker.exchange import ByGateway
from router.http.picker.gateway import Gateway
from router.http.picker.wire import ProcessingRequest
from router.http.routes import FORWARDED, ROUTES
from router.members.facts import Rank, foreign_facts, native_facts
from router.members.health import Health, HealthConfig
from router.members.members import Member, Server
from router.members.spec import ReplicaSpec
from router.members.upstream import Upstream
from router.process.front import assembled
from router.tenants.admission import Admission
from router.tenants.keys import Key, digest_of

MODEL, OTHER = "m", "n"
ENDPOINTS = tuple(f"10.0.0.{number}:80" for number in range(1, 5))
MAX_BODY_BYTES = 64 * 1024
KEYS = (
    Key(name="alice", digest=digest_of("sk-alice"), salt="of alice", max_in_flight=2),
    Key(name="bob", digest=digest_of("sk-bob"), tokens_per_minute=1e6),
)
LIMITS = Limits(connections=100, head_s=0.02, body_s=0.02, whole_body_s=0.03)  # a stall takes longer
CONFIG = RouterConfig(
    replica_limit=1,
    queue_size=3,
    queue_timeout_s=0.05,
    max_body_bytes=MAX_BODY_BYTES,
    max_bodies_bytes=3 * MAX_BODY_BYTES,
    picker_fallbacks=1,
    replica_api_key="sk-replicas",
    keys=KEYS,
)


class World:
    """Call it within a running loop, and close it."""

    def __init__(self) -> None:
        self.router, upkeep = assembled(CONFIG, Admission(KEYS))
        self._learning = upkeep.learning
        for number, endpoint in enumerate(ENDPOINTS):
            self._add(number, endpoint)
        self.router.members.arrange()
        table = RouteTable(ROUTES)
        app = build_app(self.router, upkeep, table)
        openings = Openings(self.router, FORWARDED, ByGateway(self.router.members, CONFIG.picker_fallbacks))
        self.gateway = Gateway(table, openings, partial(answer_of, app), LIMITS)

    def _add(self, number: int, endpoint: str) -> None:
        native = number == 0
        spec = ReplicaSpec(name=f"r{number}", url=f"http://{endpoint}", engine="warmroute" if native else "openai")
        never_opens = HealthConfig(faults_to_open=10**9, slow_start_s=0.0, probe_interval_s=0.0)
        health = Health(Random(number), self.router.now_s(), never_opens)
        server = Server(spec, Upstream(spec.target), health, b"authorization: Bearer sk-replicas\r\n")
        self._learning.arrange(server, (Rank(spec),))
        self.router.members.servers[spec.name] = server
        said = {"model": MODEL, "block_size": 16, "max_model_len": 65_536, "tokenizer": "bytes", "incarnation": 1}
        listed = {"data": [{"id": MODEL}, *([{"id": OTHER}] if number == 3 else [])]}
        facts = native_facts(spec, json.dumps(said).encode()) if native else None
        if facts is None:
            facts = foreign_facts(spec, json.dumps(listed).encode())
            facts = msgspec.structs.replace(facts, ranks=(Rank(facts.spec),))
        server.facts, server.profile, server.learned, server.process = facts, facts.profile, True, f"{spec.name} #1"
        server.members[0].describe(facts, facts.ranks[0])

    @property
    def members(self) -> list[Member]:
        return list(self.router.members)

    def disturb(self, rng: Random) -> None:
        """Let something happen beside the streams."""
        router, member = self.router, rng.choice(self.members)
        match rng.randrange(6):
            case 0:
                router.sweep(router.now_s() + 10_000)  # all attempts are late, and all that wait have waited
            case 1:
                member.upstream.break_all("it was found dead")
            case 2:
                member.health.drain()
            case 3:
                router.lifecycle.draining = True
            case _:
                router.room()

    def settle(self) -> None:
        """Undo what has happened."""
        self.router.lifecycle.draining = False
        for member in self.members:
            member.health.resting = None
            member.health.undrain()

    def check(self) -> None:
        """Raise AssertionError if anything is left of a request."""
        router = self.router
        assert router.lifecycle.open_requests == 0, f"{router.lifecycle.open_requests} requests are open"
        assert router.bodies.used_bytes == 0, f"{router.bodies.used_bytes} bytes of bodies are counted"
        assert not router._attempts and not router.waiting, "attempts or requests that wait are left"
        for member in self.members:
            assert member.candidate.in_flight == 0, f"{member.candidate.in_flight} requests at {member.name}"
            assert not member.upstream.sendings, f"{member.name} is watched"
            member.load.check()
        router.admission.check()
        assert not any(router.admission.in_flight().values()), f"running: {router.admission.in_flight()}"

    async def close(self) -> None:
        await self._learning.close()
        await self.router.reading.close()
        self.router.feeds.close()
        self.router.close()
        await asyncio.sleep(0)


# ---- messages to begin with


def header_list(headers: Mapping[str, str | bytes] | list[tuple[str, bytes]]) -> list[dict[str, Any]]:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return [{"key": name, "raw_value": value.encode() if isinstance(value, str) else value} for name, value in pairs]


def wired(**fields: Any) -> bytes:
    raw: bytes = ProcessingRequest(**fields).SerializeToString()
    return raw


OFFERED: tuple[Any, ...] = (list(ENDPOINTS[1:3]), ["10.0.0.4"], ["6.6.6.6:80"], [], ["x"] * 5000, ",".join(ENDPOINTS))
USUAL_PATHS = (
    *("/v1/chat/completions",) * 6,
    *("/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses", "/tokenize"),
)
PATHS = (
    *(*USUAL_PATHS, "/v1/models", "/v1/batches"),
    *("/v1/%63hat/completions?a=b", "/v1/responses/resp_1", "/metrics", "/v1//x", "/v1/load_lora_adapter", "", "*"),
)
EXTRA: list[tuple[str, bytes]] = [
    ("authorization", b"Bearer sk-alice"),
    ("authorization", b"Bearer sk-bob"),
    ("authorization", b"Basic eA=="),
    ("x-api-key", b"sk-alice"),
    ("content-type", b"application/json"),
    ("content-encoding", b"gzip"),
    ("content-encoding", b"br"),
    ("content-length", b"99999"),
    ("content-length", b"9" * 30),
    ("connection", b"x-gateway-destination-endpoint, x-a, close"),
    ("x-gateway-destination-endpoint", b"6.6.6.6:22"),
    ("x-data-parallel-rank", b"3"),
    ("x-request-id", b"\x1b[31mred"),
    ("x-forwarded-for", b"127.0.0.1"),
    ("host", b"127.0.0.1"),
    ("x-a", b"\xff\xfe"),
    ("x-large", b"y" * 40_000),
]


def random_head(rng: Random) -> bytes:
    is_usual = rng.random() < 0.7
    method = b"POST" if is_usual else rng.choice((b"POST", b"POST", b"POST", b"GET", b"\xc3"))
    path = rng.choice(USUAL_PATHS if is_usual else PATHS)
    named = [(":method", method), (":scheme", b"http"), (":path", path.encode())]
    named += rng.sample(EXTRA[:5] if is_usual else EXTRA, rng.choice((0, 1) if is_usual else (0, 1, 2, 5)))
    if not is_usual and rng.random() < 0.02:
        named += [(f"x-{number}", b"") for number in range(2000)]
    headers = {"headers": {"headers": header_list(named)}, "end_of_stream": rng.random() < 0.03}
    message = ProcessingRequest(request_headers=headers)
    if rng.random() < 0.95:
        message.protocol_config.request_body_mode = rng.choice((2, 4) if is_usual else (2, 4, rng.randrange(7)))
        message.protocol_config.response_body_mode = rng.choice((0, 1, 2, 4, 4))
    if rng.random() < 0.15:
        hint = message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint").value
        hint.update({"x-gateway-destination-endpoint-subset": rng.choice(OFFERED)})
    raw: bytes = message.SerializeToString()
    return raw


def bodies() -> Iterator[bytes]:
    """Bodies of requests, usable ones first."""
    for text in ("hello", "word " * 300, "w" * 15_000):
        messages = [{"role": "user", "content": text}]
        any_api = {"model": MODEL, "messages": messages, "prompt": text, "input": text, "max_tokens": 5}
        yield json.dumps(any_api).encode()
        yield json.dumps({**any_api, "stream": True, "cache_salt": "s"}).encode()
        yield json.dumps({**any_api, "model": OTHER, "kv_transfer_params": {}}).encode()
    yield gzip.compress(json.dumps({"model": MODEL, "prompt": "x" * 50_000}).encode())
    yield gzip.compress(bytes(10**7))
    yield json.dumps({"model": "none", "prompt": "x"}).encode()
    yield json.dumps({"model": MODEL, "input": "x", "previous_response_id": "resp_1"}).encode()
    yield from (b"", b"{", b"[]", b"\xff", b"[" * 5000, b"x" * 30_000, b"x" * (MAX_BODY_BYTES + 1))


def answer_heads() -> Iterator[bytes]:
    told: list[tuple[str, bytes]] = [("content-type", b"text/event-stream"), ("x-warmroute-cached-tokens", b"16")]
    for status in (*(b"200",) * 8, b"204", b"400", b"429", b"500", b"503", b"100", b"999", b""):
        for more, end in ((told, False), (told[:1], False), ([], False), (told, True)):
            headers = {"headers": {"headers": header_list([(":status", status), *more])}, "end_of_stream": end}
            yield wired(response_headers=headers)
        for served in (*ENDPOINTS, "6.6.6.6:80"):
            message = ProcessingRequest(response_headers={"headers": {"headers": header_list([(":status", status)])}})
            message.metadata_context.filter_metadata.add(key="envoy.lb").value.update(
                {"x-gateway-destination-endpoint-served": served}
            )
            yield message.SerializeToString()


USAGE = b'{"usage":{"prompt_tokens":5,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":3}}}'
ANSWER_PARTS = (
    *(b"data: {}\n\n", b"data: " + USAGE + b"\n\ndata: [DONE]\n\n", USAGE, b"", b"x" * 70_000, b'{"id":"resp_1"}'),
    *(b'{"error":{"code":"draining"}}', b'{"error":{"code":"queue_full"}}', b'data: {"a":1', b'"cached_tokens": 9'),
)
