"""A gateway's requests at a router between real sockets; the gateway's part of forwarding is scripted."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from api.http.connection import Limits
from engines import NATIVE
from router.http.picker.exchange import PickedExchange
from router.http.picker.stream import RequestHeaders
from router.http.picker.wire import MAX_BESIDE_BYTES
from router.members.spec import ReplicaSpec
from router.tenants.keys import Key, digest_of
from tests.api.tokenizers import byte_level, saved
from tests.router.http.picker.asking import BUFFERED, DUPLEX, Stream, asked, gateway, head
from tests.router.loopback import until
from tests.router.proxy.test_conversing_losses import Resumable
from tests.router.scripted import CHAT, DEADLINE_S, MODEL, Scripted, Served, connect, named, served

LISTEN: dict[str, Any] = {"picker_listen": "127.0.0.1:0"}
USAGE = b'{"usage":{"prompt_tokens":5,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":3}}}'


def endpoint(replica: Scripted) -> str:
    return f"127.0.0.1:{replica.port}"


async def test_a_request_is_in_the_books_until_its_answer_ends() -> None:
    replica = named("one")
    async with served(replica, **LISTEN) as running, gateway(running) as asking:
        stream = asking.stream()
        await stream.begin(asked(stream=True))
        assert await stream.picked() == endpoint(replica)
        member = running.member("one")
        assert member.candidate.in_flight == 1
        await stream.send(response_headers=head({":status": "200", "content-type": "text/event-stream"}))
        name, value, _ = await stream.reply()
        added = {one.header.key: one.header.raw_value for one in value.response.header_mutation.set_headers}
        assert (name, added["x-warmroute-replica"]) == ("response_headers", b"one")
        for part in (b"data: {}\n\n", b"data: " + USAGE + b"\n\ndata: [DONE]\n\n"):
            await stream.send(response_body={"body": part})
            _, value, _ = await stream.reply()
            assert value.response.body_mutation.streamed_response.body == part
        assert member.candidate.in_flight == 1
        await stream.send(response_trailers={})
        assert (await stream.reply())[0] == "response_trailers"
        assert member.candidate.in_flight == 0
        [decision] = running.router.history.decisions
        told = decision.record()
        assert (told.status, told.reported_cached_tokens) == (200, 3)
        await stream.end()
        assert await stream.reply() is None
        assert not replica.calls, "the gateway forwards"


async def test_an_answer_of_which_the_gateway_shows_the_head_alone_runs_until_its_stream_ends() -> None:
    heads = {"request_body_mode": 2, "response_body_mode": 0}
    limits: dict[str, Any] = {"idle_timeout_s": 0.01, "first_token_timeout_s": 0.01}
    async with served(named("one"), **LISTEN, **limits) as running, gateway(running) as asking:
        member = running.member("one")
        for status, in_flight in (("200", 1), ("503", 0)):
            stream = asking.stream()
            await stream.head(heads)
            await stream.reply()
            await stream.send(request_body={"body": asked(stream=True), "end_of_stream": True})
            await stream.picked()
            await stream.send(response_headers=head({":status": status, "content-type": "text/event-stream"}))
            assert (await stream.reply())[0] == "response_headers"
            running.router.sweep(running.router.now_s() + 10)
            assert member.candidate.in_flight == in_flight
            await stream.end()
            assert await stream.reply() is None
            await until(lambda: not member.candidate.in_flight, "it has ended")
            decision = running.router.history.decisions[-1].record()
            assert (decision.status, decision.ttft_s) == (int(status), None)


async def test_requests_of_both_fronts_are_placed_by_the_same_figures() -> None:
    replicas = [named("one"), named("two")]
    async with (
        served(*replicas, policy="least-loaded", **LISTEN) as running,
        gateway(running) as asking,
        connect(running.port) as client,
    ):
        stream = asking.stream()
        await stream.begin(asked())
        busy = await stream.picked()
        for _ in range(4):
            answer = await client.post("/v1/chat/completions", json.loads(asked()))
            other = next(replica for replica in replicas if endpoint(replica) != busy)
            assert answer.headers["x-warmroute-replica"] == other.name
        await stream.answer()


@pytest.mark.parametrize("config", [DUPLEX, BUFFERED], ids=["duplex", "buffered"])
async def test_a_stream_that_ends_early_ends_its_request(config: dict[str, int]) -> None:
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        for how in ("cancelled", "half-closed"):
            stream = asking.stream()
            await stream.begin(asked(), config)
            await stream.picked()
            assert running.router.lifecycle.open_requests == 1
            if how == "cancelled":
                stream.call.cancel()
            else:
                await stream.end()
            await running.idle()
        assert running.member("one").server.faults == 0


async def test_a_stream_that_ends_while_it_waits_for_room_leaves_the_queue() -> None:
    async with served(named("one"), replica_limit=1, **LISTEN) as running, gateway(running) as asking:
        first, second, third = (asking.stream() for _ in range(3))
        await first.begin(asked())
        await first.picked()
        await second.begin(asked())
        await third.begin(asked())
        await until(lambda: len(running.router.waiting) == 2, "two wait")
        await second.end()
        await until(lambda: len(running.router.waiting) == 1, "one waits")
        await first.answer()
        assert await third.picked()
        await third.answer()


async def test_a_body_that_is_picked_is_not_kept() -> None:
    async with served(named("one"), picker_listen="127.0.0.1:0") as running, gateway(running) as asking:
        stream = asking.stream()
        await stream.begin(asked("x" * 30_000))
        await stream.picked()
        [attempt] = running.router.attempts
        assert not attempt.owner.facts.body
        await stream.answer()
        await until(lambda: not running.router.bodies.used_bytes, "its bytes are given back")


async def test_a_body_beyond_the_limit_is_refused_before_it_has_come() -> None:
    async with served(named("one"), max_body_bytes=100_000, **LISTEN) as running, gateway(running) as asking:
        stream = asking.stream()
        await stream.send(request_headers=head({":method": "POST", ":path": "/v1/completions"}), protocol_config=DUPLEX)
        for _ in range(2):
            await stream.send(request_body={"body": b"x" * 60_000})
        assert await stream.refusal() == (413, "body_too_large")
        declared = asking.stream()
        headers = {":method": "POST", ":path": "/v1/completions", "content-length": "100001"}
        await declared.send(request_headers=head(headers), protocol_config=DUPLEX)
        assert await declared.refusal() == (413, "body_too_large")


async def test_headers_beyond_the_limit_are_refused() -> None:
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        stream = asking.stream()
        await stream.head(x="y" * 40_000)
        assert await stream.refusal() == (431, "headers_too_large")


@pytest.mark.parametrize("mode", [0, 1, 3, 77])
async def test_a_gateway_that_sends_no_whole_body_is_told_what_to_set(mode: int) -> None:
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        stream = asking.stream()
        await stream.send(
            request_headers=head({":method": "POST", ":path": "/v1/completions"}),
            protocol_config={"request_body_mode": mode},
        )
        assert await stream.refusal() == (500, "body_not_sent")


async def test_a_replica_gets_what_this_router_would_send() -> None:
    key = Key(name="alice", digest=digest_of("sk-alice"), salt="of alice")
    options = {"keys": (key,), "demand_key": True, "replica_api_key": "sk-replicas", **LISTEN}
    async with served(named("one"), **options) as running, gateway(running) as asking:
        stream = asking.stream()
        unwanted = {"x_own": "1", "x_vllm_priority": "-9", "content_type": "text/plain"}
        body = asked(kv_transfer_params={"a": 1})
        await stream.begin(
            body, authorization="Bearer sk-alice", user_agent="kept", x_envoy_attempt_count="1", **unwanted
        )
        name, value, _ = await stream.reply()
        assert name == "request_headers", value
        mutation = value.response.header_mutation
        changed = {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}
        assert changed["authorization"] == "Bearer sk-replicas"
        assert changed["content-type"] == "application/json"
        assert set(mutation.remove_headers) == {"x-own", "x-vllm-priority"}
        assert {"user-agent", "x-envoy-attempt-count"}.isdisjoint(changed)
        _, value, _ = await stream.reply()
        sent = value.response.body_mutation.streamed_response.body
        assert len(sent) == int(changed["content-length"])
        fields = json.loads(sent)
        assert "kv_transfer_params" not in fields
        assert fields["cache_salt"] == key.salted(None)
        await stream.answer()


async def test_no_tokens_are_asked_for_that_nobody_would_take_out_of_the_answer(tmp_path: Path) -> None:
    folder = saved(byte_level(), tmp_path, tokenizer_config={"eos_token": "<|endoftext|>"})
    options = {"model_dirs": {MODEL: str(folder)}, **LISTEN}
    async with served(Resumable("one", named("one").handler), **options) as running, gateway(running) as asking:
        stream = asking.stream()
        await stream.begin(json.dumps({"model": MODEL, "input": "hi"}).encode(), path="/v1/responses")
        await stream.reply()
        _, value, _ = await stream.reply()
        fields = json.loads(value.response.body_mutation.streamed_response.body)
        assert fields["input"] == "hi" and "enable_response_messages" not in fields
        await stream.answer()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_only_this_router_says_whom_a_replica_computes_first(path: str) -> None:
    replica = Scripted("one", named("one").handler, native=True)
    async with served(replica, policy="cost", **LISTEN) as running, gateway(running) as asking:
        member = running.member("one")
        await until(lambda: member.profile is NATIVE, "it says what it is")
        streams = [asking.stream() for _ in range(2)]
        for stream in streams:
            await stream.begin(asked(max_tokens=5), path=path, x_warmroute_priority="-1000")
            set_headers, _ = await changed_headers(stream)
            assert float(set_headers["x-warmroute-priority"]) > -1
        assert len(member.candidate.queue_positions) == 1, "the second one waits by its rank"
        for stream in streams:
            await stream.answer()
        await running.idle()
        assert len(member.candidate.queue_positions) == 0


async def test_other_engines_are_not_told_whom_to_compute_first() -> None:
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        stream = asking.stream()
        await stream.begin(asked(), x_warmroute_priority="-1000")
        set_headers, removed = await changed_headers(stream)
        assert "x-warmroute-priority" in removed
        assert "x-warmroute-priority" not in set_headers
        await stream.answer()


async def changed_headers(stream: Stream) -> tuple[dict[str, str], set[str]]:
    """The headers that are set, and those that are removed."""
    name, value, _ = await stream.reply()
    assert name == "request_headers", value
    mutation = value.response.header_mutation
    await stream.reply()
    return {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}, {*mutation.remove_headers}


def picked_by(running: Served) -> Any:
    """The router's side for gateways."""
    assert running.front.picker is not None, "picker_listen is set"
    return running.front.picker._gateway


def limit(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
    """Let routers that begin from now on have these limits."""
    monkeypatch.setattr("router.process.front.connection_limits", lambda most: Limits(connections=most, **limits))


async def test_a_body_that_stops_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, body_s=0.2, head_s=0.2)
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        stream = asking.stream()
        await stream.send(request_headers=head({":method": "POST", ":path": "/v1/completions"}), protocol_config=DUPLEX)
        await stream.send(request_body={"body": b"{"})
        assert await stream.refusal() == (408, "body_timeout")
        assert await stream.reply() is None
        silent = asking.stream()
        await silent.call.wait_for_connection()
        assert await silent.reply() is None


async def test_a_body_that_drips_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, whole_body_s=0.3)
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        stream = asking.stream()
        await stream.send(request_headers=head({":method": "POST", ":path": "/v1/completions"}), protocol_config=DUPLEX)
        refusal = asyncio.create_task(stream.refusal())
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):  # the stream is over
            while not refusal.done():
                await stream.send(request_body={"body": b" "})
                await asyncio.wait([refusal], timeout=0.02)
        assert await refusal == (408, "body_timeout")


async def test_a_body_that_the_gateway_buffers_has_time_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, body_s=0.1, whole_body_s=0.5)
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        stream = asking.stream()
        began_s = asyncio.get_running_loop().time()
        await stream.send(
            request_headers=head({":method": "POST", ":path": "/v1/completions"}), protocol_config=BUFFERED
        )
        assert (await stream.reply())[0] == "request_headers"
        assert await stream.refusal() == (408, "body_timeout")
        assert asyncio.get_running_loop().time() - began_s > 0.4


async def test_a_request_may_wait_for_room_longer_than_for_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, body_s=0.6)
    options = {"replica_limit": 1, "queue_timeout_s": 1.0, "first_token_timeout_s": 5.0}
    async with served(named("one"), ready=True, **options, **LISTEN) as running, gateway(running) as asking:
        first, second = asking.stream(), asking.stream()
        await first.begin(asked())
        await first.picked()
        await second.begin(asked())
        assert await second.refusal() == (429, "queue_full")
        await first.answer()


async def test_paths_that_only_administrators_may_ask_stay_closed() -> None:
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        for path, expected in (
            ("/v1/load_lora_adapter", (404, "not_found")),
            ("/replicas", (404, "not_found")),
            ("/v1/unheard_of", (403, "admin_key_required")),
            ("/v1//models", (400, "invalid_path")),
            ("", (400, "invalid_path")),
        ):
            stream = asking.stream()
            await stream.head(path=path, host="127.0.0.1")
            assert await stream.refusal() == expected, path


async def test_a_draining_router_is_not_ready_and_refuses() -> None:
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        service = "envoy.service.ext_proc.v3.ExternalProcessor"
        assert [await asking.health(name) for name in ("", "liveness", "readiness", service)] == [1] * 4
        running.front.leave()
        assert [await asking.health(name) for name in ("", "liveness", "readiness", service)] == [2, 1, 2, 2]
        running.router.lifecycle.draining = True
        stream = asking.stream()
        await stream.head()
        assert await stream.refusal() == (503, "draining")
        with pytest.raises(grpc.aio.AioRpcError, match="ask for liveness"):
            await asking.health("other")


async def test_a_router_without_replicas_is_alive_and_not_ready() -> None:
    async with served(**LISTEN) as running, gateway(running) as asking:
        assert (await asking.health("liveness"), await asking.health()) == (1, 2)


async def test_messages_out_of_order_end_the_stream_with_a_reason() -> None:
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        stream = asking.stream()
        await stream.begin(asked())
        await stream.picked()
        await stream.send(request_body={"body": b"more"})
        with pytest.raises(grpc.aio.AioRpcError, match="RequestBody came when the stream was picked"):
            await stream.reply()


async def test_an_undecided_request_is_refused_if_a_message_cannot_be_taken() -> None:
    """If the stream failed instead, a gateway that may go on without the picker would let the request pass."""
    twice = {"request_headers": head({":method": "POST", ":path": CHAT}), "protocol_config": DUPLEX}
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        broken = {"request_headers": head({"a": "b\nc"})}
        sequences: list[list[dict[str, Any]]] = [[{}], [{"request_body": {}}], [broken], [twice, twice]]
        for messages in sequences:
            stream = asking.stream()
            for message in messages:
                await stream.send(**message)
            assert await stream.refusal() == (400, "bad_message")
            assert await stream.reply() is None
            await running.idle()


async def test_bytes_that_are_no_message_are_refused() -> None:
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        for raw in (b"\xff\xff", b"\x12\x03abc", b"\x22\x00" * MAX_BESIDE_BYTES):
            stream = Stream(asking.raw_process(timeout=DEADLINE_S))
            await stream.call.write(raw)
            assert await stream.refusal() == (400, "bad_message")


async def test_an_error_of_ours_refuses_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        monkeypatch.setattr(running.router.admission, "admit", fail)
        stream = asking.stream()
        await stream.head()
        assert await stream.refusal() == (500, "internal_error")


async def test_a_body_that_nobody_reads_is_not_kept() -> None:
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        inside, exchanges = picked_by(running), list[PickedExchange]()
        opens = inside.open

        def watched(asked: RequestHeaders) -> PickedExchange:
            exchanges.append(opens(asked))
            return exchanges[-1]

        async def never(*_: object) -> None:
            await asyncio.Event().wait()

        inside.open, inside._app_answer = watched, never
        stream = asking.stream()
        await stream.send(request_headers=head({":method": "GET", ":path": "/v1/models"}), protocol_config=DUPLEX)
        await stream.send(request_body={"body": b"x" * 60_000})
        await stream.send(request_body={"body": b"x", "end_of_stream": True})
        await until(lambda: bool(exchanges) and not exchanges[0].more_body, "all of the body has come")
        assert not exchanges[0].body
        stream.call.cancel()
        await until(lambda: exchanges[0].response_complete, "it is over")


async def test_a_replica_gets_the_usual_spelling_of_a_path() -> None:
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        for path, expected in ((CHAT, None), ("/v1/%63hat/completions?a=b", b"/v1/chat/completions?a=b")):
            stream = asking.stream()
            await stream.begin(asked(), path=path)
            _, value, _ = await stream.reply()
            changed = {one.header.key: one.header.raw_value for one in value.response.header_mutation.set_headers}
            assert changed.get(":path") == expected
            await stream.reply()
            await stream.answer()


async def test_no_replica_says_which_pages_may_read_its_answer() -> None:
    options = {"cors_origins": ("http://page",), **LISTEN}
    told = {":status": "200", "access-control-allow-origin": "*", "access-control-allow-headers": "*", "x-a": "b"}
    async with served(named("one"), **options) as running, gateway(running) as asking:
        for origin, expected in (({}, None), ({"origin": "http://page"}, b"http://page")):
            stream = asking.stream()
            await stream.begin(asked(), **origin)
            await stream.picked()
            await stream.send(response_headers=head(told, end=True))
            _, value, _ = await stream.reply()
            mutation = value.response.header_mutation
            changed = {one.header.key: one.header.raw_value for one in mutation.set_headers}
            assert changed.get("access-control-allow-origin") == expected
            removed = {"access-control-allow-headers"} | (set() if expected else {"access-control-allow-origin"})
            assert {*mutation.remove_headers} == removed


async def test_a_proxys_credentials_end_here() -> None:
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        stream = asking.stream()
        named_too = "x-secret, x-gateway-destination-endpoint"
        unwanted = {"x_secret": "1", "x_gateway_destination_endpoint": "10.0.0.1:22", "connection": named_too}
        await stream.begin(asked(), proxy_authorization="Basic x", **unwanted)
        _, value, _ = await stream.reply()
        mutation = value.response.header_mutation
        assert {*mutation.remove_headers} >= {"proxy-authorization", "x-secret"}
        assert "x-gateway-destination-endpoint" not in mutation.remove_headers
        changed = {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}
        assert changed["x-gateway-destination-endpoint"] == endpoint(running.replicas["one"])
        await stream.reply()
        await stream.answer()


@pytest.mark.parametrize("config", [DUPLEX, BUFFERED], ids=["duplex", "buffered"])
async def test_a_body_may_end_with_trailers(config: dict[str, int]) -> None:
    async with served(named("one"), **LISTEN) as running, gateway(running) as asking:
        stream = asking.stream()
        await stream.send(request_headers=head({":method": "POST", ":path": CHAT}), protocol_config=config)
        if config == BUFFERED:
            assert (await stream.reply())[0] == "request_headers"
        await stream.send(request_body={"body": asked()})
        if config == DUPLEX:
            await stream.send(request_trailers={})
        names = [(await stream.reply())[0]]
        if config == BUFFERED:
            await stream.send(request_trailers={})
        while names[-1] != "request_trailers":
            names.append((await stream.reply())[0])
        assert names[-2:] == ["request_body", "request_trailers"]
        await stream.answer()


async def test_streams_at_once_are_limited() -> None:
    async with served(named("one"), max_connections=2, **LISTEN) as running, gateway(running) as asking:
        streams = [asking.stream() for _ in range(2)]
        for stream in streams:
            await stream.begin(asked())
            await stream.picked()
        third = asking.stream()
        await third.head()
        assert await third.refusal() == (503, "too_many_connections")  # if it failed, a gateway might let it pass
        assert await asking.health("liveness") == 1
        for stream in streams:
            await stream.answer()
            assert await stream.reply() is None
        await third.end()
        fourth = asking.stream()
        await fourth.begin(asked())
        await fourth.picked()
        await fourth.answer()


async def test_streams_beyond_all_limits_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, spare_connections=1)
    async with served(named("one"), max_connections=1, **LISTEN) as running, gateway(running) as asking:
        first = asking.stream()
        await first.begin(asked())
        await first.picked()
        second = asking.stream()
        await until(lambda: picked_by(running).streams == 2, "the second stream is open")
        with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
            await asking.stream().reply()
        await first.answer()
        await second.end()


async def test_a_replica_that_is_named_by_its_host_is_picked_by_its_address() -> None:
    replica = named("one")
    async with replica.running():
        spec = ReplicaSpec(name="one", url=f"http://localhost:{replica.port}", engine="openai")
        async with served(ready=False, replicas=(spec,), **LISTEN) as running, gateway(running) as asking:
            await until(lambda: "m" in running.router.members.models, "the replica is known")
            stream = asking.stream()
            await stream.begin(asked())
            assert await stream.picked() == f"127.0.0.1:{replica.port}"
            await stream.answer(served=f"127.0.0.1:{replica.port}")
            await stream.end()
            await until(lambda: running.router.lifecycle.open_requests == 0, "it is over")
            assert running.router.history.decisions[-1].record().retries == 0
            running.member("one").upstream.reached_at = ""
            stream = asking.stream()
            await stream.begin(asked())
            assert await stream.refusal() == (503, "no_address")
