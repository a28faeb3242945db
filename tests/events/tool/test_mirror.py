"""`mirror` as a process between an engine without snapshots and readers that come late, lose events or start anew."""

import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from events.messages import AllBlocksCleared
from events.publisher import Publisher, PublisherConfig, offset_port
from events.recording import Recorder, Recording
from events.sockets.curve import load_curve_client, write_keys
from events.source import Source
from events.subscriber import Subscriber
from events.tool.mirror import SOCKETS
from events.view import CacheView
from tests.chaos.replicas import can_bind, until
from tests.chaos.routers import steady_ports
from tests.events.processes import FREE, Tool, tool
from tests.events.recorded import Engine
from tests.events.replicas import Replica, run

EXACT_WITHIN_S = 1.0
BUFFER = 20  # batches that an engine keeps, so late readers of its own sockets are inexact


def direct() -> Source:
    """An engine at steady ports, which may start later than its readers."""
    port = steady_ports(2)
    return Source("direct", f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}", model="m")


@contextmanager
def engine(own: Source, seed: int = 1, kept: int = BUFFER) -> Iterator[Replica]:
    config = PublisherConfig(own.events, own.replay, None, None, high_water_mark=1000, replay_batches=kept)
    with Publisher(config) as publisher:
        running = Replica(publisher, seed)
        running.engine = Engine(seed)
        yield running


@contextmanager
def mirror(own: Source, *options: object, bind: str = FREE) -> Iterator[tuple[Tool, Source]]:
    with tool("mirror", own.events, "--replay", own.replay, "--model", "m", "--bind", bind, *options) as running:
        running.wait_for(lambda lines: lines, "it has bound its sockets")
        yield running, source_of(running)


def source_of(running: Tool, rank: int = 0) -> Source:
    return Source("mirrored", **{socket: running.lines()[rank][socket] for socket in SOCKETS}, model="m")


@asynccontextmanager
async def following(*sources: Source) -> AsyncIterator[list[CacheView]]:
    async with Subscriber() as subscriber:
        yield [subscriber.add(source) for source in sources]


async def all_equal(truth: CacheView, *readers: CacheView) -> None:
    """Wait until all are exact, and hold the same blocks, which are some."""
    views = truth, *readers

    def equal() -> bool:
        keys = truth.resolver.keys()
        return bool(keys) and all(view.inexact is None and view.resolver.keys() == keys for view in views)

    await until(equal, "all are exact and equal")
    assert not any(view.stream.stats.digest_mismatches for view in readers)


async def test_readers_of_a_mirror_are_exact_within_a_second_whenever_they_come() -> None:
    own = direct()
    with mirror(own) as (running, source), engine(own) as one:
        async with following(own, source) as (truth, early):
            for batches in (1, 10 * BUFFER):  # the engine has forgotten the first ones when the last ones come
                one.step(batches)
                await until(lambda: truth.stream.last_seq + 1 == len(one.engine.published), "all have come")
                await all_equal(truth, early)
            async with following(source, own) as (late, without):
                began_s = time.monotonic()
                await all_equal(truth, late)
                assert time.monotonic() - began_s < EXACT_WITHIN_S
                await until(lambda: str(without.inexact).startswith("joined at batch"), "without a mirror it is not")
                one.step(10 * BUFFER)
                await all_equal(truth, early, late)
        assert running.end(signal.SIGINT) == 0 and not running.err, running.err
        assert all(can_bind(int(getattr(source, socket).rpartition(":")[2])) for socket in SOCKETS)


async def test_a_recording_of_a_mirror_has_keys_and_no_prompts(tmp_path: Path) -> None:
    own, path = direct(), tmp_path / "a.wre"
    with mirror(own) as (_, source), engine(own) as one, Recorder(path, [source]) as recorder:
        one.engine = Engine(7, secrets=True)
        async with Subscriber() as subscriber:
            truth, reader = subscriber.add(own), subscriber.add(source, tap=recorder.tap(0))
            one.step(BUFFER)
            await all_equal(truth, reader)
    content, recording = path.read_bytes(), Recording(path)
    assert b"secret" not in content
    assert not [token for token in one.engine.tokens if token.to_bytes(4, "big") in content]
    view = recording.sources[0].view()
    recording.replay_into(view, recording.sources[0])
    assert view.resolver.keys() == truth.resolver.keys()


async def test_a_mirror_that_lost_events_says_so_until_the_cache_is_cleared() -> None:
    own = direct()
    with mirror(own) as (running, source), engine(own) as one:
        async with following(own, source) as (truth, reader):
            one.step(BUFFER)
            await all_equal(truth, reader)
            running.process.send_signal(signal.SIGSTOP)
            for _ in range(60):  # more than the sockets on the way and the engine itself keep
                one.step(200)
            running.process.send_signal(signal.SIGCONT)
            async with following(source) as (late,):
                for view in (reader, late):  # some batches are lost, or it has joined anew
                    await until(lambda v=view: v.stream.settled and "batch" in str(v.inexact), "it is told")  # type: ignore[misc]
                one.publish(AllBlocksCleared())
                one.engine = Engine(9)
                one.step(4)
                await all_equal(truth, reader, late)


async def test_restarts_of_the_engine_and_of_the_mirror() -> None:
    own, where = direct(), f"tcp://127.0.0.1:{steady_ports(4)}"
    with mirror(own, bind=where) as (running, source):
        async with following(own, source) as (truth, reader):
            for seed in (1, 2):
                with engine(own, seed, kept=1000) as one:
                    one.step(BUFFER)
                    await all_equal(truth, reader)
                await until(lambda: reader.inexact is not None, "the engine has gone")
            with engine(own, 3, kept=1000) as one:
                one.step(BUFFER)
                await all_equal(truth, reader)
                running.end(signal.SIGKILL)
                one.step(BUFFER)
                with mirror(own, bind=where):
                    await all_equal(truth, reader)  # all of the stream could be replayed
                one.step(2000)
                with mirror(own, bind=where):
                    await until(lambda: "joined at batch" in str(reader.inexact), "it tells that a part could not")


async def test_one_mirror_serves_all_ranks_of_an_engine_and_encrypts_what_it_sends(tmp_path: Path) -> None:
    public, secret = write_keys(str(tmp_path / "keys"))
    curve = load_curve_client(str(public), str(secret))
    ranks, port = 3, steady_ports(6)
    first = Source("first", f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + ranks}", model="m")
    with mirror(first, "--ranks", ranks, "--secret", secret, "--clients", tmp_path) as (running, _):
        running.wait_for(lambda lines: len(lines) >= ranks, "it has bound the sockets of all")
        for rank in range(ranks):
            own = replace(first, events=offset_port(first.events, rank), replay=offset_port(str(first.replay), rank))
            async with following(own, replace(source_of(running, rank), curve=curve)) as (truth, reader):
                with engine(own, rank) as one:
                    one.store([rank] * 4 * (rank + 1))
                    await all_equal(truth, reader)
                    assert len(reader.resolver.keys()) == rank + 1


async def test_keys_of_another_models_name_are_not_believed() -> None:
    own = direct()
    with mirror(own) as (_, source), engine(own) as one:
        async with following(own, source, replace(source, name="other", model="n")) as (truth, reader, other):
            one.step(BUFFER)
            await all_equal(truth, reader)
            await until(lambda: "not block keys of model 'n'" in str(other.inexact), "the other one is not exact")
            assert not other.resolver.keys()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--bind", FREE), "--model is missing"),
        (("--snapshot", "tcp://127.0.0.1:2", "--bind", FREE), "has snapshots"),
        (("--model", "m", "--bind", "here"), "not an endpoint"),
        (("--model", "m", "--bind", FREE, "--secret", "none"), "none"),
        (("--model", "m", "--bind", "tcp://192.0.2.1:5561"), "--bind tcp://192.0.2.1:5561"),
    ],
)
def test_what_it_refuses(options: tuple[str, ...], said: str) -> None:
    status, _, notes = run("mirror", "tcp://127.0.0.1:1", *options)
    assert status in (1, 2) and said in notes
