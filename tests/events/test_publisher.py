"""The publisher as a consumer written for vLLM sees it, and its native sockets."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from events.blocks import block_keys, root_key
from events.cache.pool import fold
from events.cache.resolver import Resolver
from events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KnownEvent,
    decode_batch,
    encode_batch,
)
from events.mirror import Mirror
from events.native import SNAPSHOT_REQUEST, Doubt, Load, decode_snapshot_header, decode_status
from events.publisher import Publisher, PublisherConfig, offset_port
from events.sockets.curve import MAX_BYTES, CurveClient, load_curve, load_curve_client, secure_client, write_keys
from tests.events.processes import wait_until
from tests.events.resident import copies

ANY = "tcp://127.0.0.1:0"
ROOT = root_key("m", None, None, 4)
END = [b"", b"", b"\xff" * 8, b""]
DEADLINE_MS = 10_000

Connect = Callable[..., "zmq.Socket[bytes]"]


def config(**changed: Any) -> PublisherConfig:
    return PublisherConfig(**{"events": ANY, "replay": ANY, "status": ANY, "snapshot": ANY, **changed})


def stored(*tokens: int, after: int | None = None, salt: str | None = None) -> BlockStored:
    keys = block_keys(list(tokens), 4, after or ROOT)
    extras = [[salt], *[None] * (len(keys) - 1)] if salt else None
    return BlockStored(list(keys), after, list(tokens), 4, None, "GPU", None, extras)


@pytest.fixture
def connect() -> Iterator[Connect]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    opened = []

    def open_socket(kind: int, endpoint: str | None, curve: CurveClient | None = None) -> "zmq.Socket[bytes]":
        assert endpoint is not None
        socket = context.socket(kind)
        socket.linger = 0
        socket.rcvtimeo = DEADLINE_MS
        if curve is not None:
            secure_client(socket, curve)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(endpoint)
        opened.append(socket)
        return socket

    yield open_socket
    for socket in opened:
        socket.close()
    context.term()


def replay(socket: "zmq.Socket[bytes]", start: int) -> list[list[bytes]]:
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    replies = [socket.recv_multipart()]
    while replies[-1] != END:
        replies.append(socket.recv_multipart())
    return replies[:-1]


def test_frames_are_topic_sequence_and_a_batch_that_vllm_would_send(connect: Connect) -> None:
    with Publisher(config(topic="kv@a@m")) as publisher:
        socket = connect(zmq.SUB, publisher.endpoints.events)
        poll_until_subscribed(publisher, socket)
        publisher.publish([stored(1, 2, 3, 4)])
        topic, seq, payload = socket.recv_multipart()
    assert topic == b"kv@a@m"
    assert int.from_bytes(seq, "big") == publisher.seq
    batch = decode_batch(payload)
    assert batch.events == [stored(1, 2, 3, 4)]
    assert encode_batch(batch) == payload


def poll_until_subscribed(publisher: Publisher, socket: "zmq.Socket[bytes]") -> None:
    while not socket.poll(5):
        publisher.publish([AllBlocksCleared()])
    wait_until(lambda: publisher.stats.batches == publisher.seq + 1 and not publisher._queue)
    while socket.poll(50):
        socket.recv_multipart()


@pytest.mark.parametrize(("kept", "start"), [(1000, 3), (2, 0)], ids=["asked", "oldest"])
def test_a_replay_begins_at_the_start_asked_or_the_oldest_batch_kept(connect: Connect, kept: int, start: int) -> None:
    with Publisher(config(topic="t", replay_batches=kept)) as publisher:
        for number in range(5):
            publisher.publish([stored(number, 0, 0, 0)])
        wait_until(lambda: publisher.seq == 4)
        replies = replay(connect(zmq.DEALER, publisher.endpoints.replay), start)
    assert [int.from_bytes(frames[2], "big") for frames in replies] == [3, 4]
    assert all(frames[:2] == [b"", b"t"] for frames in replies)
    assert decode_batch(replies[0][3]).events == [stored(3, 0, 0, 0)]


def test_a_request_without_delimiter_is_ignored_and_a_short_start_is_read(connect: Connect) -> None:
    with Publisher(config()) as publisher:
        publisher.publish([AllBlocksCleared()])
        wait_until(lambda: publisher.seq == 0)
        socket = connect(zmq.DEALER, publisher.endpoints.replay)
        socket.send_multipart([bytes(8)])
        socket.send_multipart([b"", bytes(9)])
        socket.send_multipart([b"", bytes(4)])
        wait_until(lambda: publisher.stats.replays == 1)
        assert len(socket.recv_multipart()) == 4
        assert socket.recv_multipart() == END


def test_an_event_that_cannot_be_encoded_leaves_no_hole_and_takes_no_other_with_it(connect: Connect) -> None:
    broken = stored(9, 9, 9, 9)
    broken.token_ids = [object()]  # type: ignore[list-item]
    negative = stored(8, 8, 8, 8)
    negative.token_ids = [-1, 0, 0, 0]
    with Publisher(config()) as publisher:
        publisher.publish([stored(1, 2, 3, 4)])
        publisher.publish([broken, stored(5, 6, 7, 8), negative])
        publisher.publish([AllBlocksCleared()])
        wait_until(lambda: publisher.seq == 2)
        replies = replay(connect(zmq.DEALER, publisher.endpoints.replay), 0)
    assert [decode_batch(frames[3]).events for frames in replies] == [
        [stored(1, 2, 3, 4)],
        [stored(5, 6, 7, 8)],
        [AllBlocksCleared()],
    ]
    assert publisher.stats.unencodable_events == 2


def snapshot(socket: "zmq.Socket[bytes]") -> tuple[Any, Resolver]:
    socket.send_multipart([b"", SNAPSHOT_REQUEST])
    header = decode_snapshot_header(socket.recv_multipart()[1])
    resolver = Resolver("m")  # as a foreign stream: every key is computed from parents and tokens anew
    for _ in range(header.batches):
        resolver.apply(decode_batch(socket.recv_multipart()[1]).events)
    return header, resolver


def test_a_cache_cleared_in_doubt_leaves_a_hole_so_that_no_reader_believes_the_empty_one(connect: Connect) -> None:
    with Publisher(config(doubt=Doubt("not yet"))) as publisher:
        replay = connect(zmq.DEALER, publisher.endpoints.replay)
        snapshot = connect(zmq.DEALER, publisher.endpoints.snapshot)
        told = []
        for batches, doubt in ((2, ""), (4, "lost")):
            snapshot.send_multipart([b"", SNAPSHOT_REQUEST])
            told.append(decode_snapshot_header(snapshot.recv_multipart()[1]).doubt.reason)
            publisher.report(Load(), Doubt(doubt))
            publisher.publish([AllBlocksCleared()])
            publisher.publish([stored(1, 2, 3, 4)])
            wait_until(lambda n=batches: publisher.stats.batches == n)  # type: ignore[misc]
        replay.send_multipart([b"", bytes(8)])
        seqs = [int.from_bytes(replay.recv_multipart()[2], "big") for _ in range(4)]
    assert seqs == [0, 1, 3, 4] and told == ["not yet", ""]


def test_a_snapshot_is_the_whole_cache_parents_first(connect: Connect) -> None:
    trunk = stored(*range(400))
    branch = stored(*range(1000, 1008), after=trunk.block_hashes[50])  # type: ignore[arg-type]
    with Publisher(config()) as publisher:
        publisher.publish([trunk, branch, stored(7, 7, 7, 7)])
        publisher.publish([BlockRemoved(trunk.block_hashes[80:], "GPU")])
        wait_until(lambda: publisher.seq == 1)
        header, resolver = snapshot(connect(zmq.DEALER, publisher.endpoints.snapshot))
    assert header.incarnation == publisher.incarnation and header.seq == 1
    resolver.check()
    assert resolver.orphan_blocks == 0
    expected = {*trunk.block_hashes[:80], *branch.block_hashes, *stored(7, 7, 7, 7).block_hashes}
    assert set(resolver.pools["GPU", 0].resident) == expected == resolver.keys()


def test_a_status_is_true_at_its_sequence_number(connect: Connect) -> None:
    with Publisher(config()) as publisher:
        socket = connect(zmq.SUB, publisher.endpoints.status)
        while not socket.poll(5):
            publisher.report(Load())
        first, second = stored(1, 2, 3, 4), stored(5, 6, 7, 8)
        publisher.publish([first, second])
        publisher.publish([BlockRemoved(first.block_hashes, "GPU")])
        publisher.report(Load(running=3, queued_prefill_tokens=500))
        publisher.publish([AllBlocksCleared()])
        status = decode_status(socket.recv_multipart()[1])
        while status.load.running == 0:
            status = decode_status(socket.recv_multipart()[1])
    assert (status.incarnation, status.seq) == (publisher.incarnation, 1)
    assert (status.digest_blocks, status.digest_xor) == (1, second.block_hashes[0])
    assert status.load.queued_prefill_tokens == 500


def test_a_taken_port_is_named_in_the_error() -> None:
    with Publisher(config()) as publisher, pytest.raises(zmq.ZMQError, match=publisher.endpoints.events):
        Publisher(config(events=publisher.endpoints.events))


def test_close_sends_what_is_queued_and_may_be_called_twice(connect: Connect) -> None:
    publisher = Publisher(config())
    socket = connect(zmq.SUB, publisher.endpoints.events)
    poll_until_subscribed(publisher, socket)
    publisher.publish([stored(1, 2, 3, 4)])
    publisher.close()
    publisher.close()
    assert decode_batch(socket.recv_multipart()[2]).events == [stored(1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://127.0.0.1:5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://*:5557", 2, "tcp://*:5559"),
        ("tcp://127.0.0.1:0", 2, "tcp://127.0.0.1:0"),
        ("ipc:///tmp/kv", 1, "ipc:///tmp/kv_dp1"),
    ],
)
def test_a_data_parallel_rank_moves_the_port(endpoint: str, rank: int, expected: str) -> None:
    assert offset_port(endpoint, rank) == expected


def test_plain_sockets_off_loopback_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with Publisher(config(events="tcp://*:0")):
        assert "events carry prompts" in caplog.text


def test_only_clients_with_a_known_key_get_events(tmp_path: Path, connect: Connect) -> None:
    (tmp_path / "clients").mkdir()
    server_public, server_secret = write_keys(str(tmp_path / "server"))
    _, friend = write_keys(str(tmp_path / "clients" / "friend"))
    _, stranger = write_keys(str(tmp_path / "stranger"))
    assert server_secret.stat().st_mode & 0o777 == 0o600
    curve = load_curve(str(server_secret), str(tmp_path / "clients"))
    with Publisher(config(curve=curve)) as publisher:
        publisher.publish([stored(1, 2, 3, 4)])
        wait_until(lambda: publisher.seq == 0)
        replay_endpoint = publisher.endpoints.replay
        assert replay(connect(zmq.DEALER, replay_endpoint, load_curve_client(str(server_public), str(friend))), 0)
        for refused in (None, load_curve_client(str(server_public), str(stranger))):
            socket = connect(zmq.DEALER, replay_endpoint, refused)
            with suppress(zmq.Again):  # it may have been turned away already
                socket.send_multipart([b"", bytes(8)], zmq.NOBLOCK)
            assert not socket.poll(300)


def test_wrong_key_files_are_named(tmp_path: Path) -> None:
    public, _ = write_keys(str(tmp_path / "a"))
    with pytest.raises(ValueError, match=r"a\.key has no secret key"):
        load_curve(str(public))
    with pytest.raises(ValueError, match="never overwritten"):
        write_keys(str(tmp_path / "a"))
    with pytest.raises(ValueError, match="nowhere is not a CURVE key file"):
        load_curve(str(tmp_path / "nowhere"))


@pytest.mark.timeout(20)  # who opens a pipe waits for its other end, and /dev/zero has none
def test_what_is_no_small_file_is_not_read(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    large.write_bytes(bytes(MAX_BYTES + 1))
    for file in (pipe, large, Path("/dev/zero"), tmp_path):
        with pytest.raises(ValueError, match=rf"{file} is not a CURVE key file: not a regular file of at most"):
            load_curve(str(file))


def test_the_mirror_keeps_salts_and_loras_apart_and_rebuilds_them() -> None:
    events: list[KnownEvent] = [stored(1, 2, 3, 4, salt="a"), BlockStored([5], None, [1, 2, 3, 4], 4, 1, "GPU", "lora")]
    mirror = Mirror()
    mirror.apply(events)
    rebuilt = sorted(mirror.events(), key=lambda event: event.lora_name or "")
    assert [encoded(event) for event in rebuilt] == [encoded(event) for event in events]
    assert mirror.digest() == (2, fold(mirror.pools["GPU", 0].blocks))
    mirror.apply([AllBlocksCleared()])
    assert mirror.digest() == (0, 0)


def encoded(event: KnownEvent) -> bytes:
    return msgspec.msgpack.encode(EventBatch(0.0, [event]))


def test_a_mirror_of_several_tiers_and_groups_has_the_resolvers_digest() -> None:
    events: list[KnownEvent] = [
        stored(1, 2, 3, 4),
        msgspec.structs.replace(stored(1, 2, 3, 4), medium="CPU"),
        msgspec.structs.replace(stored(5, 6, 7, 8), group_idx=1, kv_cache_spec_kind="sliding_window"),
    ]
    mirror, live = Mirror(), Resolver("m", native=True)
    mirror.apply(events)
    live.apply(events)
    rebuilt = Resolver("m", native=True)
    for payload in mirror.snapshot(0.0):
        rebuilt.apply(decode_batch(payload).events)
    assert mirror.digest() == live.digest() == rebuilt.digest()
    assert copies(live) == copies(rebuilt)
    mirror.apply([BlockRemoved(stored(1, 2, 3, 4).block_hashes, "CPU")])
    assert mirror.digest() != live.digest()
    assert mirror.digest().blocks == 2


@pytest.mark.parametrize(
    "broken",
    [
        {"extra_keys": [None, None]},
        {"token_ids": [1, 2, 3]},
        {"block_hashes": [1, [2]], "token_ids": [0] * 8},
        {"mm_keys": [[]]},
    ],
)
def test_an_event_that_does_not_fit_together_is_left_out_and_changes_nothing(broken: dict[str, Any]) -> None:
    bad = stored(1, 2, 3, 4)
    for field, value in broken.items():
        setattr(bad, field, value)
    with Publisher(config()) as publisher:
        publisher.publish([bad, stored(5, 6, 7, 8)])
        wait_until(lambda: publisher.seq == 0)
        assert publisher.stats.unencodable_events == 1
        assert publisher.failed is None
        assert publisher._mirror is not None
        assert publisher._mirror.digest().blocks == 1


def test_extra_keys_nested_without_end_do_not_end_the_publisher() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    bad = stored(1, 2, 3, 4)
    bad.extra_keys = [deep]
    with Publisher(config()) as publisher:
        publisher.publish([bad])
        publisher.publish([stored(5, 6, 7, 8)])
        wait_until(lambda: publisher.stats.unencodable_events == 1 and publisher.stats.events == 1)


def test_a_failure_of_the_thread_is_seen_and_the_queue_does_not_grow(caplog: pytest.LogCaptureFixture) -> None:
    publisher = Publisher(config())
    publisher.publish([stored(1, 2, 3, 4)])
    wait_until(lambda: publisher.seq == 0)
    publisher._buffer = None  # type: ignore[assignment]  # a bug of ours
    publisher.publish([stored(5, 6, 7, 8)])
    wait_until(lambda: publisher.failed is not None)
    publisher.publish([stored(5, 6, 7, 8)])
    assert not publisher._queue
    publisher.close()
    assert "has stopped" in caplog.text


def test_a_request_that_is_no_snapshot_request_is_not_answered(connect: Connect) -> None:
    with Publisher(config()) as publisher:
        socket = connect(zmq.DEALER, publisher.endpoints.snapshot)
        socket.send_multipart([b"", b"something else"])
        header, _ = snapshot(socket)
        assert header.batches == 0 and publisher.stats.snapshots == 1
        assert not socket.poll(20)
