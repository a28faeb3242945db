"""Peers of a publisher's sockets that do not read, ask without end, or send without end."""

import gc
import socket as network
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zmq
from click.testing import CliRunner

from events.messages import BlockStored
from events.native import SNAPSHOT_REQUEST
from events.publisher import Publisher, PublisherConfig, ReplayBuffer
from events.sockets.curve import load_curve, write_keys
from events.sockets.peers import MAX_BYTES, PublisherStats
from events.sockets.transfers import MESSAGES_PER_S, REQUESTS_PER_S, SNAPSHOTS_ALIVE, STALLED_S, Transfers
from replica.cli import replica
from tests.hostile.peers import connected, flooding, part, resident_mb

ANY = "tcp://127.0.0.1:0"
END = [b"", b"", b"\xff" * 8, b""]
DEADLINE_S = 50.0
BATCH = 4096  # bytes of token ids, about


def config(**changed: Any) -> PublisherConfig:
    return PublisherConfig(**{"events": ANY, "replay": ANY, "status": ANY, "snapshot": ANY, **changed})


def stored(number: int, tokens: int = 4) -> BlockStored:
    return BlockStored([number], None, [100_000 + number % 1000] * tokens, tokens, None, "GPU", None)


def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    ends = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.002)


def above(publisher: Publisher, counter: str, count: int) -> Callable[[], bool]:
    return lambda: getattr(publisher.stats, counter) > count


def replay(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str | None, start: int) -> list[int]:
    """The numbers of the batches that a consumer that reads gets."""
    assert endpoint is not None
    with context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo, socket.rcvhwm = 0, int(DEADLINE_S * 1000), 0
        socket.connect(endpoint)
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        found = []
        while (frames := socket.recv_multipart()) != END:
            found.append(int.from_bytes(frames[2], "big"))
        return found


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as made:
        yield made


def filled(publisher: Publisher, batches: int) -> None:
    for number in range(batches):
        publisher.publish([stored(number, BATCH // 4)])
    until(lambda: publisher.seq == batches - 1, "everything is published")


def test_peers_that_do_not_read_replays_cost_no_copy_of_them(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    with Publisher(config(max_peers=70)) as publisher, ExitStack() as stack:
        filled(publisher, 4000)  # about 16 MB
        gc.collect()
        before = resident_mb()
        for _ in range(60):
            socket = stack.enter_context(connected(publisher.endpoints.replay, b"DEALER"))
            socket.sendall(part(b"", True) + part(bytes(8), False))
        until(lambda: publisher.stats.replays == 60, "all have asked")
        assert replay(context, publisher.endpoints.replay, 3990) == list(range(3990, 4000)), "other peers are served"
        assert resident_mb() - before < 60


@pytest.mark.chaos
def test_peers_that_ask_without_end_are_read_at_a_bounded_rate(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    requests = (part(b"", True) + part(bytes(8), False)) * 50
    with Publisher(config()) as publisher, flooding(publisher.endpoints.replay, b"DEALER", requests, peers=5):
        filled(publisher, 100)
        began = time.monotonic()
        until(lambda: publisher.stats.replays > 1.5 * REQUESTS_PER_S, "they are answered")
        at_most = REQUESTS_PER_S * (2 + time.monotonic() - began)
        assert publisher.stats.replays <= at_most
        assert replay(context, publisher.endpoints.replay, 90) == list(range(90, 100)), "other peers are served"
        publisher.publish([stored(7)])
        until(lambda: publisher.seq == 100, "events go on")


def test_a_peer_with_too_many_topics_is_cut_off(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """One peer that subscribed to 100,000 topics of 1,000 bytes took 4 GB, and nothing was sent for 100 s."""
    numbers = count()
    topics = b"".join(part(b"\x01" + next(numbers).to_bytes(4, "big") * 8, False) for _ in range(MAX_BYTES // 20))
    with Publisher(config()) as publisher, context.socket(zmq.SUB) as honest:
        honest.linger = 0
        honest.subscribe(b"")
        honest.connect(publisher.endpoints.events)
        until(lambda: publishing(publisher) and honest.poll(1), "an honest peer is served")
        with connected(publisher.endpoints.events, b"SUB") as hostile:
            with suppress(ConnectionError):  # closed before all of it was sent
                hostile.sendall(topics)
            until(lambda: publishing(publisher) and publisher.stats.cut_off_peers, "they were too many")
        while honest.poll(0):
            honest.recv_multipart()
        until(lambda: publishing(publisher) and honest.poll(1), "others are served")
        assert publisher.failed is None


def publishing(publisher: Publisher) -> bool:
    publisher.publish([stored(1)])
    return True


def test_a_topic_longer_than_any_of_ours_is_not_read() -> None:
    with Publisher(config()) as publisher, connected(publisher.endpoints.events, b"SUB") as hostile:
        with suppress(ConnectionError):  # closed before all of it was sent
            hostile.sendall(part(b"\x01" + bytes(1_000_000), False))
        hostile.settimeout(DEADLINE_S)
        assert _is_closed(hostile)


@pytest.mark.chaos
def test_a_message_without_an_end_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    endless = part(b"", True) * 100_000
    with Publisher(config()) as publisher:
        before = resident_mb()
        for endpoint, kind in ((publisher.endpoints.replay, b"DEALER"), (publisher.endpoints.events, b"SUB")):
            cut_off = publisher.stats.cut_off_peers
            with flooding(endpoint, kind, endless):
                until(above(publisher, "cut_off_peers", cut_off + 2), "it is seen each time")
        assert resident_mb() - before < 600
    assert caplog.text.count("sends without end") == 1


def _is_refused(endpoint: str | None, kind: bytes) -> bool:
    try:
        with connected(endpoint, kind) as opened:
            return _is_closed(opened)
    except ConnectionError:
        return True


def _is_closed(opened: network.socket) -> bool:
    try:
        while opened.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def test_one_peer_too_many_is_refused_and_room_is_made_when_one_leaves() -> None:
    with Publisher(config(max_peers=3)) as publisher, ExitStack() as stack:
        first = [stack.enter_context(connected(publisher.endpoints.replay, b"DEALER")) for _ in range(3)]
        assert _is_refused(publisher.endpoints.replay, b"DEALER")
        assert publisher.stats.refused_peers == 1
        first[0].close()

        def comes_in() -> bool:
            try:
                stack.enter_context(connected(publisher.endpoints.replay, b"DEALER"))
            except OSError:
                return False
            return True

        until(comes_in, "there is room again")


@pytest.mark.chaos
def test_a_silent_replica_is_not_awaited() -> None:
    with Publisher(config()) as publisher:
        port = int(str(publisher.endpoints.events).rpartition(":")[2])
        with network.create_connection(("127.0.0.1", port)) as opened:
            opened.settimeout(DEADLINE_S)
            assert _is_closed(opened)


def test_what_is_kept_for_replays_is_bounded_in_bytes() -> None:
    kept = ReplayBuffer(10, 1000)
    for seq in (0, 1, 5, 6):
        kept.append(seq, zmq.Frame(bytes(300)))
    assert [seq for seq, _ in kept.since(0)] == [1, 5, 6]
    assert [seq for seq, _ in kept.since(2)] == [5, 6]
    assert kept.kept_bytes == 900
    reading = kept.since(1)
    assert next(reading)[0] == 1
    for seq in range(7, 10):
        kept.append(seq, zmq.Frame(bytes(300)))
    assert [seq for seq, _ in reading] == [], "dropped batches are skipped, later ones not included"
    kept.append(10, zmq.Frame(bytes(2000)))
    assert len(kept) == 0


class Asked:
    """Transfers between real sockets, by a clock that the test sets."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", messages: int) -> None:
        self.now_s = 0.0
        self.stats = PublisherStats()
        self.made = 0
        self.taking_s = 0.0
        self.router = context.socket(zmq.ROUTER)
        self.router.router_mandatory = True
        self.router.sndhwm = self.router.rcvhwm = 4
        self.router.bind("inproc://asked")
        self.messages = messages
        self.transfers = Transfers(None, iter, self.router, self._snapshot, lambda: self.now_s, self.stats)  # type: ignore[arg-type]

    def _snapshot(self) -> list[tuple[zmq.Frame]]:
        self.made += 1
        self.now_s += self.taking_s
        return [(zmq.Frame(b"%d" % self.made),)] * self.messages

    def peer(self, context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
        socket = context.socket(zmq.DEALER)
        socket.linger, socket.rcvhwm = 0, 4
        socket.connect("inproc://asked")
        socket.send_multipart([b"", SNAPSHOT_REQUEST])
        return socket

    def turns(self, seconds: float, step_s: float = 0.05) -> None:
        ends = self.now_s + seconds
        while self.now_s < ends:
            if self.transfers.may_receive:
                self.transfers.receive(self.router)
            self.transfers.turn()
            self.now_s += step_s


def test_a_snapshot_takes_a_small_share_of_the_time_whoever_asks(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    asked = Asked(context, 1)
    asked.taking_s = 2.0
    with ExitStack() as stack:
        peers = [stack.enter_context(asked.peer(context)) for _ in range(3)]
        stack.enter_context(asked.router)
        for _ in range(10):
            asked.turns(6)
            for socket in peers:
                while socket.poll(0):
                    socket.recv_multipart()
                socket.send_multipart([b"", SNAPSHOT_REQUEST])
    assert 2 <= asked.made <= 1 + asked.now_s / 20


def test_a_peer_that_reads_slowly_gets_all_and_one_that_does_not_is_given_up(
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> None:
    asked = Asked(context, 40)
    with asked.router, asked.peer(context) as slow, asked.peer(context):
        read = 0
        while read < 40:
            asked.turns(STALLED_S / 10)
            assert slow.poll(0), "the slow peer has nothing to read"
            slow.recv_multipart()
            read += 1
        asked.turns(1)
        assert asked.stats.abandoned_transfers == 1
        assert asked.transfers.wait_s() is None


def test_no_more_than_two_snapshots_are_alive(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    asked = Asked(context, 1000)
    with asked.router, ExitStack() as stack:
        for number in range(4):
            stack.enter_context(asked.peer(context))
            asked.turns(1)
            assert asked.stats.abandoned_transfers == max(0, number + 1 - SNAPSHOTS_ALIVE)


def test_limits_leave_room_for_a_whole_replay() -> None:
    """A consumer that is new asks once for 10,000 batches."""
    assert 10_000 / MESSAGES_PER_S < 1


def test_a_flood_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with Publisher(config(max_peers=1)) as publisher, connected(publisher.endpoints.status, b"SUB"):
        for _ in range(3):
            refused = publisher.stats.refused_peers
            assert _is_refused(publisher.endpoints.status, b"SUB")
            until(above(publisher, "refused_peers", refused), "it is counted")
    assert caplog.text.count("refusing one") == 1


def test_a_secret_key_alone_is_refused(tmp_path: Path) -> None:
    _, secret = write_keys(str(tmp_path / "replica"))
    made = CliRunner().invoke(replica, ["--model", "m", "--engine", "simulated", "--curve-secret", str(secret)])
    assert made.exit_code == 2
    for fix in ("--curve-clients DIR", "--set curve_any_client=true"):
        assert fix in made.output


def test_admitting_any_holder_of_the_public_key_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, secret = write_keys(str(tmp_path / "replica"))
    with Publisher(config(curve=load_curve(str(secret)))):
        assert caplog.text.count("readable by anyone who knows its public key") == 4
