"""Memory kept after finished requests and events is bounded for any traffic."""

import gc
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from api.tokens.tokenizer import ByteTokenizer
from events.blocks import block_keys, root_key
from events.messages import BlockRemoved, BlockStored
from events.mirror import Mirror
from events.publisher import Publisher, PublisherConfig
from replica.cache.block_pool import BlockPool
from router.http.front import FrontConnection
from router.members.upstream import Connection
from router.placement.ages import CacheAges, Reuse
from router.placement.cost import Candidate, Question
from router.placement.policy import choose
from router.prompts.prefixes.tree import Run
from router.prompts.tokenizers import Tokenizers
from router.prompts.tokens import Tokens
from router.proxy.request_summary import PastDecision
from router.responses import DecisionRecord
from tests.events.processes import wait_until
from tests.router.loopback import until
from tests.router.scripted import CHAT, MODEL, Call, Scripted, connect, served

MEGABYTE = 10**6
ANY = "tcp://127.0.0.1:0"
REPLAY_BYTES = 16 * 2**20
END_OF_REPLAY = b"\xff" * 8


BODY = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 2000}]}
LOCAL = {"host": "127.0.0.1"}  # an administrator's


def say_little(call: Call) -> None:
    call.answer(b'{"usage":{}}')


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the collector: only references keep objects alive."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def count_of(kind: type) -> int:
    return sum(issubclass(type(one), kind) for one in gc.get_objects())


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


# ---- the router


async def test_a_decision_keeps_no_long_session() -> None:
    """The names of sessions are the clients' own, in the body as long as the body."""
    async with (
        served(Scripted("a", say_little), Scripted("b", say_little), policy="session") as running,
        connect(running.port) as client,
    ):
        for number in range(8):
            assert (await client.post(CHAT, BODY | {"prompt_cache_key": f"{number % 2}" * 50_000})).status == 200
            assert (await client.post(CHAT, BODY, x_session_id=f"{number % 2}" * 8000)).status == 200
        kept = [one.decision.question.session for one in running.router.history.decisions]
        chosen = {(one.decision.question.session, one.outcome.chosen) for one in running.router.history.decisions}
    assert len(kept) == 16
    assert max(map(len, kept)) <= 256
    assert len(set(kept)) == len(chosen) == 4, "each session keeps its replica"


async def test_a_connection_that_is_over_needs_no_collector() -> None:
    """It takes tens of kB with its headers; the collector would free long-lived ones after hundreds of thousands."""

    def say_little_and_leave(call: Call) -> None:
        say_little(call)
        call.drop()

    async with served(Scripted("a", say_little_and_leave)) as running:
        with uncollected():
            for method, path, body in (("POST", CHAT, BODY), ("GET", "/replicas", None), ("GET", "/nowhere", None)):
                for _ in range(10):
                    async with connect(running.port) as client:
                        await client.ask(method, path, body, **LOCAL)
            for _ in range(10):
                async with connect(running.port) as client:
                    client.send("GET", "/dashboard/fleet", **LOCAL)
                    await client.head()
            await until(lambda: not running.front.server.connections.open, "the router sees that all have left")
            await until(lambda: not count_of(FrontConnection), "connections of clients are forgotten")
            idle = running.member("a").upstream
            await until(lambda: count_of(Connection) == len(idle.idle), "those to replicas are forgotten")


async def test_shared_prefixes_are_forgotten_once_reported() -> None:
    async with served(Scripted("a", say_little)) as running, connect(running.port, 2**20) as client:
        for number in range(20):
            content = f"{number // 2}" * 1000
            await client.post(CHAT, BODY | {"messages": [{"role": "user", "content": content}]})
        with uncollected():
            answer = await client.get("/prefixes", **LOCAL)
            assert answer.json["prefixes"]
            await until(lambda: not count_of(Run), "the tree is forgotten")


def test_messages_of_models_without_replicas_are_forgotten() -> None:
    """Replicas name the models, and a fleet's releases may each have a name of their own."""
    tokenizers, ours = Tokenizers({}, {}, 2**20), ("warmroute", ByteTokenizer.name)
    served = tokenizers.of("served", *ours)
    with uncollected():
        before = count_of(Tokens)
        for number in range(100):
            tokenizers.of(f"release {number}", *ours)
        assert count_of(Tokens) - before <= 8
        assert tokenizers.of("served", *ours) is served
        assert tokenizers.of("release 99", *ours).prompts is not None, "the newest entries are kept"


def test_no_salt_is_kept_after_its_request() -> None:
    with traced():
        for number in range(100):
            root_key("m", None, f"{number}" * MEGABYTE)
        kept, _ = tracemalloc.get_traced_memory()
    assert kept < 2 * MEGABYTE


def test_the_ages_of_a_cache_are_bounded_whatever_size_it_claims() -> None:
    chance = random.Random(1)
    with traced():
        ages = CacheAges(Reuse())
        ages.describe(16, 1e15)
        for number in range(150):
            ages.routed([chance.getrandbits(64) for _ in range(1000)], float(number))
        used, _ = tracemalloc.get_traced_memory()
    assert len(ages) == 2**17
    assert used <= 25 * MEGABYTE
    ages.check()


# ---- a replica


def test_the_batches_kept_for_replays_are_bounded_in_bytes() -> None:
    """Long prompts make long batches: of 60,000 tokens each 300 kB, of which there would be 10,000."""
    tokens = list(range(2**20, 2**20 + 16 * 4096))
    batches = 100
    with Publisher(PublisherConfig(ANY, ANY, None, None)) as publisher:
        for number in range(batches):
            hashes = [number * 4096 + block for block in range(4096)]
            publisher.publish([BlockStored(hashes, None, tokens, 16, None, "GPU", None)])  # type: ignore[arg-type]
        wait_until(lambda: publisher.seq == batches - 1, "all batches are sent")
        kept = replayed(publisher.endpoints.replay)
        published = publisher.stats.payload_bytes
    assert published > 1.5 * REPLAY_BYTES
    assert sum(kept.values()) <= REPLAY_BYTES
    assert list(kept) == list(range(min(kept), batches)), "the newest entries are kept"


def replayed(endpoint: str | None) -> dict[int, int]:
    """Bytes of the batches that can be had, by their numbers."""
    kept: dict[int, int] = {}
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, 10_000
        socket.connect(str(endpoint))
        socket.send_multipart([b"", bytes(8)])
        while (frames := socket.recv_multipart())[2] != END_OF_REPLAY:
            kept[int.from_bytes(frames[2], "big")] = len(frames[3])
    return kept


def test_a_mirror_keeps_nothing_of_salts_whose_blocks_are_gone() -> None:
    mirror = Mirror()
    for number in range(5000):
        mirror.apply([BlockStored([number], None, [1] * 16, 16, None, "GPU", None, cache_salt=f"{number}")])
        mirror.apply([BlockRemoved([number], "GPU")])
    assert len(mirror._contexts) <= 1024


# ---- sizes in docs/limits.md


@pytest.mark.parametrize(("replicas", "most_bytes"), [(2, 1650), (100, 1600 + 100 * 40)])
def test_a_decision_takes_the_documented_memory(replicas: int, most_bytes: int) -> None:
    candidates = [Candidate(f"r{slot}", slot) for slot in range(replicas)]
    with traced():
        kept = [decided(candidates, number) for number in range(200)]
        used, _ = tracemalloc.get_traced_memory()
    assert used / len(kept) <= most_bytes


def decided(candidates: list[Candidate], number: int) -> PastDecision:
    moment = 1000.5 + number
    question = Question(
        tokens=1000 + number,
        matched={0: moment},
        session=None,
        tried=frozenset(),
        exact=True,
        turn=number,
        now_s=moment,
        came_s=moment,
        awaited={},
    )
    decision = choose("cost", question, candidates, random.Random(number))
    outcome = DecisionRecord(
        ts=moment + 3,
        request_id=f"req-{number:012}",
        model="m",
        chosen="r0",
        prompt_tokens=1000,
        ttft_s=moment + 1,
        duration_s=moment + 2,
        status=200,
    )
    return PastDecision(outcome, decision)


def test_a_block_takes_the_documented_memory() -> None:
    blocks = 20_000
    with traced():
        pool, mirror = BlockPool(blocks, 16), Mirror()
        for number in range(0, blocks, 20):
            tokens = list(range(1000 + number, 1000 + number + 320))
            keys = block_keys(tokens, 16, number)
            mirror.apply([BlockStored(keys, None, tokens, 16, None, "GPU", None)])  # type: ignore[arg-type]
        used, _ = tracemalloc.get_traced_memory()
    assert pool.num_blocks == mirror.digest().blocks == blocks
    assert used / blocks <= 400
