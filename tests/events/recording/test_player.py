"""A published recording: the same bytes under the same numbers, gaps where they were, repairs where they were had."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import zmq

from events.publisher import END_OF_REPLAY
from events.recording.player import Player, PlayerConfig
from events.recording.recording import Recorder, Recording, redacted_copy
from events.source import Record, Source
from events.subscriber import Subscriber
from events.view import CacheView
from tests.events.recorded import SOURCE, TOPIC, Engine, Line, record_incident, replay_into_view
from tests.events.resident import copies

FREE = "tcp://127.0.0.1:0"
DEADLINE_MS = 20_000


@contextmanager
def playing(path: Path, *, start_seq: int | None = None, **config: Any) -> Iterator[Player]:
    """Plays in a thread, from when the first subscriber is there until the test is done with it."""
    settings = {"events": FREE, "replay": FREE, "speed": None, **config}
    recording = Recording(path)
    done = False

    def play() -> None:
        player.wait_for_subscriber()
        player.play(0 if start_seq is None else recording.find(seq=start_seq))
        while not done:
            player.stay(0.02)

    with Player(recording, recording.sources[0], PlayerConfig(**settings)) as player:
        thread = Thread(target=play)
        thread.start()
        try:
            yield player
        finally:
            done = True
            thread.join(DEADLINE_MS / 1000)


async def followed(source: Source, until: Callable[[CacheView], object]) -> CacheView:
    async with Subscriber() as subscriber:
        view = subscriber.add(source)
        end_s = time.monotonic() + DEADLINE_MS / 1000
        while not until(view):
            assert time.monotonic() < end_s, (view.inexact, view.stream.stats)
            await asyncio.sleep(0.01)
        return view


def source_of(player: Player, *, replay: bool = True) -> Source:
    return Source("again", player.endpoints[0], player.endpoints[1] if replay else None, model="m")


def last_seq(path: Path) -> int:
    return next(seq for record in reversed(list(Recording(path).records())) if (seq := record.seq) is not None)


async def test_a_consumer_comes_to_the_recorded_state(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    truth = replay_into_view(Recording(tmp_path / "a.wre"), SOURCE)
    with playing(tmp_path / "a.wre") as player:
        end = truth.stream.last_seq
        view = await followed(
            source_of(player), lambda v: v.stream.stats.restarts and v.stream.last_seq == end and v.stream.exact
        )
    assert copies(view.resolver) == copies(truth.resolver)
    assert view.inexact is None


async def test_recorded_gaps_are_gaps_again(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    truth = replay_into_view(Recording(tmp_path / "a.wre"), SOURCE).stream.stats
    with playing(tmp_path / "a.wre", replay=None) as player:
        end = last_seq(tmp_path / "a.wre")
        view = await followed(
            source_of(player, replay=False), lambda v: v.stream.last_seq == end and v.stream.stats.restarts
        )
    assert view.stream.stats.lost_batches > 0
    assert view.stream.stats.gaps <= truth.gaps
    assert view.inexact is not None


def frames_of(player: Player, start: int) -> list[list[bytes]]:
    """The replay socket's answer at the end of the recording."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(player.endpoints[1])
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        found: list[list[bytes]] = []
        while not found or found[-1][-2:] != [END_OF_REPLAY[1], b""]:
            assert dealer.poll(DEADLINE_MS), "no answer"
            found.append(dealer.recv_multipart())
        return found


def play_all(
    path: Path, ask: int, start_seq: int | None = None, **config: Any
) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """The live messages, and then the answer to a replay request."""
    with (
        playing(path, start_seq=start_seq, **config) as player,
        zmq.Context() as context,
        context.socket(zmq.SUB) as subscriber,
    ):
        subscriber.linger = 0
        subscriber.subscribe(b"")
        subscriber.connect(player.endpoints[0])
        live: list[list[bytes]] = []
        while len(live) < player.batches - (start_seq or 0):
            assert subscriber.poll(DEADLINE_MS), "no message arrived"
            live.append(subscriber.recv_multipart())
        return live, frames_of(player, ask)


def test_live_messages_are_the_recorded_bytes(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    live, _ = play_all(tmp_path / "a.wre", 0)
    assert live == [record.frames for record in Recording(tmp_path / "a.wre").records() if record.kind == "events"]


def test_a_replay_has_what_the_recorder_asked_for_but_nothing_from_before_a_restart(tmp_path: Path) -> None:
    engine = record_incident(tmp_path / "a.wre")
    _, replayed = play_all(tmp_path / "a.wre", 0)
    second_life = engine.published[35:]
    assert [frames[:3] for frames in replayed[:-1]] == [
        [b"", TOPIC, seq.to_bytes(8, "big")] for seq in range(len(replayed) - 1)
    ]
    assert [frames[3] for frames in replayed[:-1]] == second_life[: len(replayed) - 1]
    assert len(replayed) - 1 == last_seq(tmp_path / "a.wre") + 1


def test_a_replay_starts_where_it_is_asked_to(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    _, replayed = play_all(tmp_path / "a.wre", 20)
    assert replayed[0][2] == (20).to_bytes(8, "big")


def test_what_is_before_the_start_is_for_the_replay_socket_only(tmp_path: Path) -> None:
    engine = Engine(2)
    with Recorder(tmp_path / "a.wre", [SOURCE]) as recorder:
        line = Line(recorder)
        line.arrive("connected", [])
        for _ in range(20):
            line.publish(engine.step())
    live, replayed = play_all(tmp_path / "a.wre", 0, start_seq=15)
    assert [int.from_bytes(frames[1], "big") for frames in live] == [15, 16, 17, 18, 19]
    assert len(replayed) == 21


def test_old_replay_layouts_stay_old(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.wre", [SOURCE]) as recorder:
        recorder.write(Record(1.0, 0, "connected", []))
        recorder.write(Record(1.1, 0, "replay", [b"", bytes(8), b"zero"]))
        recorder.write(Record(1.2, 0, "replay", [b"", b"\xff" * 8, b""]))
        recorder.write(Record(1.3, 0, "events", [b"", (1).to_bytes(8, "big"), b"one"]))
    live, replayed = play_all(tmp_path / "a.wre", 0)
    assert live == [[b"", (1).to_bytes(8, "big"), b"one"]]
    assert replayed == [
        [b"", bytes(8), b"zero"],
        [b"", (1).to_bytes(8, "big"), b"one"],
        [b"", b"\xff" * 8, b""],
    ]


def test_speed_is_kept(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.wre", [SOURCE]) as recorder:
        for seq in range(3):
            recorder.write(Record(100.0 + 2 * seq, 0, "events", [b"", seq.to_bytes(8, "big"), b"x"]))
    started_s = time.monotonic()
    play_all(tmp_path / "a.wre", 0, speed=10.0)
    assert time.monotonic() - started_s >= 0.4


async def test_a_redacted_recording_answers_snapshots(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre", restart=False)
    redacted_copy(Recording(tmp_path / "a.wre"), tmp_path / "r.wre")
    truth = replay_into_view(Recording(tmp_path / "a.wre"), SOURCE)
    with playing(tmp_path / "r.wre", snapshot=FREE) as player:
        events, _, snapshot = player.endpoints
        native = Source("again", events, snapshot=snapshot, model="m")
        view = await followed(native, lambda v: v.stream.last_seq == truth.stream.last_seq and v.stream.exact)
    assert view.resolver.keys() == truth.resolver.keys()
    assert view.stream.stats.snapshots > 0


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    recording = Recording(tmp_path / "a.wre")
    with (
        Player(recording, recording.sources[0], PlayerConfig(FREE)) as first,
        pytest.raises(zmq.ZMQError, match=f"cannot bind {first.endpoints[0]}: Address already in use"),
    ):
        Player(recording, recording.sources[0], PlayerConfig(first.endpoints[0]))
