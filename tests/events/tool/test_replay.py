"""`replay`: the same bytes under the same numbers, gaps where they were, repairs where they were had."""

import asyncio
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import zmq
from click.testing import CliRunner, Result

from events.cli import events
from events.publisher import END_OF_REPLAY
from events.recording import Recorder, Recording
from events.sockets.curve import load_curve, load_curve_client
from events.source import Record, Source
from events.subscriber import Subscriber
from events.tool.replay import Player
from events.view import CacheView
from tests.events.processes import FREE, Tool, tool, wait_until
from tests.events.recorded import SOURCE, TOPIC, record_incident, replay_into_view
from tests.events.replicas import replica

DEADLINE_MS = 20_000


@contextmanager
def playing(path: Path, **config: Any) -> Iterator[Player]:
    """Plays in a thread, from when the first subscriber is there until the test is done with it."""
    settings = {"events": FREE, "replay": FREE, "speed": None, **config}
    recording = Recording(path)
    done = False

    def play() -> None:
        player.wait_for_subscriber()
        player.play()
        while not done:
            player.stay(0.02)

    with Player(recording, recording.sources[0], **settings) as player:
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


def play_all(path: Path, ask: int, **config: Any) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """The live messages, and then the answer to a replay request."""
    batches = sum(record.kind == "events" for record in Recording(path).records())
    with playing(path, **config) as player, zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.linger = 0
        subscriber.subscribe(b"")
        subscriber.connect(player.endpoints[0])
        live: list[list[bytes]] = []
        while len(live) < batches:
            assert subscriber.poll(DEADLINE_MS), "no message arrived"
            live.append(subscriber.recv_multipart())
        return live, frames_of(player, ask)


def test_live_messages_are_the_recorded_bytes_and_a_replay_starts_where_it_is_asked_to(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    live, replayed = play_all(tmp_path / "a.wre", 20)
    assert replayed[0][2] == (20).to_bytes(8, "big")
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


def test_old_replay_layouts_stay_old(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.wre", [SOURCE]) as recorder:
        recorder.write(Record(1.0, 0, "connected", []))
        recorder.write(Record(1.1, 0, "replay", [b"", bytes(8), b"zero"]))
        recorder.write(Record(1.2, 0, "replay", [b"", b"\xff" * 8, b""]))
        recorder.write(Record(1.3, 0, "events", [b"", (1).to_bytes(8, "big"), b"one"]))
    live, replayed = play_all(tmp_path / "a.wre", 0)
    assert live == [[b"", (1).to_bytes(8, "big"), b"one"]]
    assert replayed == [[b"", bytes(8), b"zero"], [b"", (1).to_bytes(8, "big"), b"one"], [b"", b"\xff" * 8, b""]]


def test_speed_is_kept(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.wre", [SOURCE]) as recorder:
        for seq in range(3):
            recorder.write(Record(100.0 + 2 * seq, 0, "events", [b"", seq.to_bytes(8, "big"), b"x"]))
    started_s = time.monotonic()
    play_all(tmp_path / "a.wre", 0, speed=10.0)
    assert time.monotonic() - started_s >= 0.4


# ---- the command


def bound(replay: Tool) -> list[str]:
    """The endpoints that a running `replay` has said."""
    wait_until(lambda: replay.err or replay.process.poll() is not None, "it prints its endpoints")
    assert replay.err[0].startswith("publishing at ")
    return replay.err[0].removeprefix("publishing at ").strip().split(", ")


def seen_after_reset(lines: list[dict[str, Any]], seq: int) -> bool:
    """Return True if the batch of this number was shown in the second life."""
    kinds = [line["type"] for line in lines]
    return "reset" in kinds and any(line.get("seq") == seq for line in lines[kinds.index("reset") :])


def test_a_recording_can_be_followed_by_the_other_tools(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    truth = replay_into_view(Recording(tmp_path / "a.wre"), SOURCE)
    options = ["--bind", FREE, "--replay-bind", FREE, "--speed", "max", "--stay", "30"]
    with tool("replay", tmp_path / "a.wre", *options) as replay:
        at, replays = bound(replay)
        with tool("tail", at, "--replay", replays, "--model", "m") as tail:
            last = truth.stream.last_seq
            tail.wait_for(lambda lines: seen_after_reset(lines, last), "the last batch")
            assert tail.end() == 0
        assert replay.end() == 0
    summary = tail.lines()[-1]
    assert (summary["inexact"], summary["resident_blocks"]) == (None, truth.resolver.resident_blocks())
    [published] = replay.lines()
    assert published["batches"] == sum(r.kind == "events" for r in Recording(tmp_path / "a.wre").records())
    assert published["replays"] > 0


def test_it_waits_for_a_subscriber_until_it_is_ended(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    with tool("replay", tmp_path / "a.wre", "--bind", FREE) as replay:
        bound(replay)
        wait_until(lambda: len(replay.err) == 2, "it says that it waits")
        assert replay.end(signal.SIGTERM) == 0
        assert replay.lines() == [{"finished": False, "batches": 0, "payload_bytes": 0, "replays": 0}]


def test_it_ends_at_the_end_of_a_source_that_may_be_named(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    options = ["--source", SOURCE.name, "--bind", FREE, "--speed", "max", "--no-wait", "--stay", "0"]
    with tool("replay", tmp_path / "a.wre", *options) as replay:
        assert replay.end(None) == 0
        [published] = replay.lines()
    assert published["finished"]
    assert published["batches"] == sum(r.kind == "events" for r in Recording(tmp_path / "a.wre").records())


def run(*arguments: object) -> Result:
    return CliRunner().invoke(events, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bind", "5557"], "--bind: '5557' is not an endpoint; write tcp://HOST:PORT, with a port"),
        (
            ["--bind", FREE, "--replay-bind", "tcp://127.0.0.1:x"],
            "--replay-bind: 'tcp://127.0.0.1:x' is not an endpoint",
        ),
        (["--bind", FREE, "--speed", "fast"], "'fast' is neither a number above 0 nor 'max'"),
        (["--bind", FREE, "--speed", "0"], "'0' is neither a number above 0 nor 'max'"),
        (["--bind", FREE, "--source", "b"], "holds a, not 'b'; choose one with --source"),
        ([], "Missing option '--bind'"),
    ],
)
def test_a_wrong_option_is_quoted(tmp_path: Path, options: list[str], message: str) -> None:
    record_incident(tmp_path / "a.wre")
    result = run("replay", tmp_path / "a.wre", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_taken_port_is_an_error(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    with replica(native=False) as engine:
        result = run("replay", tmp_path / "a.wre", "--bind", engine.events)
    assert result.exit_code == 1
    assert f"cannot bind {engine.events}: Address already in use" in result.stderr


def test_a_bind_to_all_addresses_logs_a_warning(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre", steps=40)
    options = ["--bind", "tcp://*:*", "--no-wait", "--speed", "max", "--stay", "0"]
    assert "the recording holds prompts" in run("replay", tmp_path / "a.wre", *options).stderr


def test_keys_are_written_and_never_overwritten(tmp_path: Path) -> None:
    assert run("keygen", tmp_path / "me").exit_code == 0
    public, secret = tmp_path / "me.key", tmp_path / "me.key_secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert load_curve(str(secret)).public == load_curve_client(str(public), str(secret)).server
    again = run("keygen", tmp_path / "me")
    assert again.exit_code == 1
    assert "already exists; keys are never overwritten" in again.stderr
    assert run("keygen", tmp_path / "nowhere" / "me").exit_code == 1
