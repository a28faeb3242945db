"""Data-parallel ranks behind one URL: each is a replica of its own, and all share one address and one health."""

import asyncio
import json
from typing import Any

import pytest
import zmq

from events.publisher import Publisher, PublisherConfig
from router.members import feed
from router.members.spec import ReplicaSpec
from router.placement.index import APPROXIMATE
from tests.router.loopback import until
from tests.router.scripted import CHAT, MODEL, Call, Scripted, Served, chat, connect, drops, refused_port, says, served

pytestmark = pytest.mark.virtual

HERE = {"host": "localhost"}  # an administrator, as no key is demanded
GOOD = b'{"choices":[]}'
METRICS = b"".join(
    b'vllm:num_requests_running{engine="%d",model_name="m"} %d.0\n'
    b'vllm:num_requests_waiting{engine="%d",model_name="m"} 0.0\n'
    b'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="%d"} 1.0\n'
    % (rank, running, rank, rank, blocks)
    for rank, running, blocks in ((0, 3, 100), (1, 5, 200))
)

# Of SGLang 0.5.23's own publisher, and what no engine sends.
LOAD = bytes.fromhex("9ba84c6f6164537461740307cd1000cd200000cd0384cd138810cf0000010000000000ce0001e240")
NO_LOADS = b"", b"\x93\xa8LoadStat\xff\x07", b"\x93\xa8LoadStat\xa1x\x07", b"\x92\xa8LoadStat\x01"


def sources(count: int) -> tuple[int, dict[str, Any]]:
    """An engine's answer about the sockets of so many ranks, on ports where nobody listens."""
    port = refused_port()
    return 200, {
        str(rank): {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port + rank}"}
        for rank in range(count)
    }


def engine(ranks: int, handler: Any = None) -> Scripted:
    listed = {"id": MODEL, "owned_by": "vllm", "max_model_len": 512}
    made = Scripted("e", handler or says(GOOD), models=[listed])
    made.control["/kv_event_sources"] = sources(ranks)
    made.control["/metrics"] = (200, METRICS)
    return made


def spec_of(engine: Scripted) -> ReplicaSpec:
    return ReplicaSpec(name="e", url=f"http://127.0.0.1:{engine.port}")


def names(running: Served) -> list[str]:
    return list(running.router.members.by_name)


async def has(running: Served, *wanted: str) -> None:
    await until(lambda: names(running) == list(wanted), f"there are {wanted}")
    await until(lambda: all(one.candidate.unavailable is None for one in running.router.members), "they are up")


async def test_each_rank_gets_its_own_requests_and_no_client_chooses_one() -> None:
    seen: list[list[str]] = []

    def noted(call: Call) -> None:
        seen.append([value for name, value in call.headers if name == "x-data-parallel-rank"])
        call.answer(GOOD)

    e = engine(2, noted)
    async with e.running(), served(ready=False, replicas=(spec_of(e),)) as running, connect(running.port) as client:
        await has(running, "e@dp0", "e@dp1")
        answered = []
        for path in (CHAT, CHAT, "/v1/embeddings", "/v1/responses"):
            answer = await client.ask(
                "POST", path, chat(), **{"X-Data-Parallel-Rank": "7", "x-data-parallel-RANK": "9"}
            )
            answered.append(answer.headers["x-warmroute-replica"])
        assert {"e@dp0", "e@dp1"} == set(answered)
        assert seen == [[name[-1]] for name in answered]


async def test_ranks_have_streams_loads_and_pools_of_their_own() -> None:
    e = engine(2)
    async with e.running(), served(ready=False, replicas=(spec_of(e),)) as running:
        await has(running, "e@dp0", "e@dp1")
        first, second = running.member("e@dp0"), running.member("e@dp1")
        assert first.source.events != second.source.events and first.slot != second.slot
        await until(lambda: (first.candidate.running, second.candidate.running) == (3, 5), "metrics are read")
        assert [one.feed.view.resolver.capacity.gpu_blocks for one in (first, second)] == [100, 200]


@pytest.mark.virtual(False)  # a real publisher
async def test_the_load_that_sglangs_ranks_publish_counts_more_than_their_metrics() -> None:
    e = Scripted("e", says(GOOD), models=[{"id": MODEL, "owned_by": "sglang", "max_model_len": 512}])
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        config = json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{refused_port()}"})
        told = {"kv_events_config": config, "dp_size": 2, "version": "0.5.23"}
        e.control["/server_info"] = (200, told | {"kv_events": {"load_endpoint_port_base": port - 1}})
        e.control["/metrics"] = (200, b'sglang:num_running_reqs{dp_rank="1"} 5.0\n')
        async with e.running(), served(ready=False, replicas=(spec_of(e),)) as running:
            await has(running, "e@dp0", "e@dp1")
            second = running.member("e@dp1").candidate
            while (second.running, second.waiting) != (3, 7):
                [socket.send_multipart([b"load", bytes(8), payload]) for payload in (*NO_LOADS, LOAD)]
                await asyncio.sleep(0.01)


async def test_a_lost_address_is_lost_for_all_of_its_ranks() -> None:
    e = engine(4, drops)
    config = {"breaker_faults": 1}
    async with e.running(), served(ready=False, replicas=(spec_of(e),), **config) as running:
        await has(running, *(f"e@dp{rank}" for rank in range(4)))
        async with connect(running.port) as client:
            client.send("POST", CHAT, chat())
            await until(lambda: running.member("e@dp0").server.faults == 1, "it is tried")
            assert all(one.candidate.unavailable for one in running.router.members), "another rank is no way around"
            client.leave()


async def test_ranks_drain_together_and_by_either_name() -> None:
    e = engine(2)
    async with e.running(), served(ready=False, replicas=(spec_of(e),)) as running, connect(running.port) as client:
        await has(running, "e@dp0", "e@dp1")
        for name in ("e", "e@dp1"):
            assert (await client.post(f"/replicas/{name}/drain", {}, **HERE)).json["why"] == "draining"
            assert all(one.candidate.unavailable == "draining" for one in running.router.members)
            await client.post(f"/replicas/{name}/undrain", {}, **HERE)
            assert all(one.candidate.unavailable is None for one in running.router.members)


async def test_another_number_of_ranks_after_a_restart_makes_other_replicas() -> None:
    e = engine(2)
    async with e.running(), served(ready=False, replicas=(spec_of(e),)) as running, connect(running.port) as client:
        await has(running, "e@dp0", "e@dp1")
        first = running.member("e@dp0")
        e.control["/kv_event_sources"] = sources(3)
        await has(running, "e@dp0", "e@dp1", "e@dp2")
        assert running.member("e@dp0") is first  # what is known of it stays
        e.control["/kv_event_sources"] = sources(1)
        await has(running, "e")
        assert (await client.post(CHAT, chat())).headers["x-warmroute-replica"] == "e"
        running.front.check()


async def test_a_replica_with_the_name_of_a_rank_keeps_it() -> None:
    e, other = engine(2), Scripted("e@dp1", says(GOOD))
    async with e.running(), other.running(), served(replicas=(other_spec(other), spec_of(e)), ready=False) as running:
        await until(lambda: "e" in names(running), "it is known")
        await until(lambda: "two replicas are named" in (running.member("e").candidate.unavailable or ""), "it is said")
        assert running.member("e@dp1").server.name == "e@dp1"


def other_spec(other: Scripted) -> ReplicaSpec:
    return ReplicaSpec(name=other.name, url=f"http://127.0.0.1:{other.port}", engine="openai")


async def test_an_adapter_is_noticed_and_forgotten() -> None:
    e = engine(1)
    base = {"id": MODEL, "owned_by": "vllm", "max_model_len": 512}
    async with e.running(), served(ready=False, replicas=(spec_of(e),)) as running, connect(running.port) as client:
        await has(running, "e")
        source = running.member("e").source
        e.control["/v1/models"] = (200, {"data": [base, {"id": "lora", "parent": MODEL, "owned_by": "vllm"}]})
        await until(lambda: "lora" in running.router.members.models, "it is noticed")
        assert (await client.post(CHAT, chat() | {"model": "lora"})).status == 200
        e.control["/v1/models"] = (200, {"data": [base]})
        await until(lambda: "lora" not in running.router.members.models, "it is forgotten")
        assert running.member("e").source is source and MODEL in running.router.members.models


@pytest.mark.virtual(False)
async def test_a_socket_that_is_never_reached_is_named_and_nothing_is_called_exact(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feed, "REACHED_WITHIN_S", 0.05)
    e = engine(1)
    status, answer = sources(1)
    endpoint = answer["0"]["endpoint"].replace("*", "127.0.0.1")
    e.control["/kv_event_sources"] = status, answer
    async with e.running(), served(ready=False, replicas=(spec_of(e),)) as running, connect(running.port) as client:
        await has(running, "e")
        await until(lambda: running.member("e").block_size == APPROXIMATE, "it is guessed")
        [replica] = (await client.get("/replicas", **HERE)).json["replicas"]
        assert replica["state"] == "approximate" and f"{endpoint} was never reached" in replica["inexact"]
        assert endpoint in caplog.text
        await client.post(CHAT, chat())
        [decision] = (await client.get("/decisions", **HERE)).json["decisions"]
        assert not (decision["index_exact"] or decision["prediction_exact"])
        with Publisher(PublisherConfig(events=endpoint, model=MODEL)):
            await until(lambda: running.member("e").block_size != APPROXIMATE, "it is followed")
            assert running.member("e").feed_state.connected


async def test_an_engine_that_cannot_tell_its_sockets_for_once_keeps_them() -> None:
    e = engine(2)
    async with e.running(), served(ready=False, replicas=(spec_of(e),)) as running:
        await has(running, "e@dp0", "e@dp1")
        first, source = running.member("e@dp0"), running.member("e@dp0").source
        e.control["/kv_event_sources"] = (500, {})
        asked = len(e.asked)
        await until(lambda: e.asked[asked:].count("/kv_event_sources") > 2, "it is asked again")
        assert running.member("e@dp0") is first and first.source is source
