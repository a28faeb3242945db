"""`warmroute events conform`: real streams, good and bad, over real sockets and from recordings."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
import zmq

from events.analysis import grading
from events.analysis.points import POINTS
from events.messages import BlockRemoved, BlockStored, EventBatch, KnownEvent, encode_batch
from events.publisher import END_OF_REPLAY
from tests.events.processes import wait_until
from tests.events.recorded import record_incident
from tests.events.replicas import Ran, on_terminal, prompt, replica, run

Frames = list[bytes]
HEARD_MS = 5000


def states(ran: Ran) -> dict[str, str]:
    return {line["point"]: line["state"] for line in ran.lines if line["kind"] == "point"}


def failed(ran: Ran) -> dict[str, str]:
    return {line["point"]: line["example"] for line in ran.lines if line.get("state") == "fail"}


def message(seq: int, *events: KnownEvent) -> Frames:
    return [b"t", seq.to_bytes(8, "big"), encode_batch(EventBatch(float(seq), list(events)))]


def stored(block_hash: int, parent: int | None = None) -> BlockStored:
    return BlockStored([block_hash], parent, [block_hash] * 4, 4, None, "GPU", None)


@contextmanager
def engine(sent: Sequence[Frames], answer: Callable[[int], list[Frames]] | None = None) -> Iterator[list[str]]:
    """Send these messages once a subscriber listens, and answer replays; yield the command's arguments."""
    context, ended = zmq.Context(), Event()
    publisher, router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    for socket in (publisher, router):
        socket.linger = 0
        socket.bind("tcp://127.0.0.1:0")

    def serve() -> None:
        if publisher.poll(HEARD_MS):
            for frames in sent:
                publisher.send_multipart(frames)
        while not ended.is_set():
            if router.poll(20) and answer is not None:
                identity, _, start = router.recv_multipart()
                for frames in answer(int.from_bytes(start, "big")):
                    router.send_multipart([identity, *frames])

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        ends = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (publisher, router)]
        try:
            yield [ends[0], *(["--replay", ends[1]] if answer is not None else [])]
        finally:
            ended.set()
            serving.result()
            publisher.close()
            router.close()
            context.term()


def test_our_own_publisher_conforms_on_every_point() -> None:
    with replica(native=False) as publisher, ThreadPoolExecutor(1) as pool:
        publisher.store(prompt(1, 2))
        publisher.publish(publisher.stored(prompt(4)))

        def go_on() -> None:
            wait_until(lambda: publisher.publisher.stats.replays, "somebody listens")
            publisher.publish(publisher.stored(prompt(1, 2, 3), 2), publisher.stored(prompt(1)))
            publisher.remove(prompt(1, 2, 3))

        going = pool.submit(go_on)
        ran = run("conform", *publisher.arguments, "--for", "1")
        going.result()
    assert ran.status == 0
    assert [point for point, state in states(ran).items() if state != "pass"] == ["extra keys per block"]
    assert ran.lines[-1]["batches"] == 4


def test_violations_are_named_with_what_a_router_gets_wrong() -> None:
    bad = [message(0, stored(1)), message(2, stored(3, parent=2)), message(3, BlockRemoved([7], "GPU")), [b"t", b"x"]]
    with engine(bad) as arguments:
        ran = run("conform", *arguments, "--for", "0.5")
    assert ran.status == 1
    assert failed(ran) == {
        "three frames": "after batch 3: 2 frames of 1, 1 bytes; topic, sequence, payload are expected",
        "sequence without holes": "batch 1 never came, and there is no replay socket to ask",
    }
    assert all(line["consequence"] for line in ran.lines if line.get("state") == "fail")


def test_a_hole_is_looked_for_in_the_replay() -> None:
    sent = [message(0, stored(1)), message(2, stored(3, parent=2))]
    missing = message(1, stored(2))

    def answer(start: int) -> list[Frames]:
        replayed = [[b"", *frames] for seq, frames in enumerate([sent[0], missing, sent[1]]) if seq >= start]
        return [*replayed, [b"", *END_OF_REPLAY]]

    with engine(sent, answer) as arguments:
        ran = run("conform", *arguments, "--for", "0.5")
    assert failed(ran) == {}
    assert ran.status == 0
    assert states(ran)["sequence without holes"] == "pass"


def test_a_replay_socket_that_ignores_the_start_is_found_out() -> None:
    sent = [message(seq, stored(seq + 1)) for seq in range(3)]
    with engine(sent, lambda _: [*([b"", *frames] for frames in sent), [b"", *END_OF_REPLAY]]) as arguments:
        ran = run("conform", *arguments, "--for", "0.5")
    assert failed(ran) == {"replay honours start": "asked for 2: the first reply is 0"}


def test_a_replay_socket_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "REPLAY_TIMEOUT_S", 0.1)
    with engine([message(0, stored(1))], lambda _: []) as arguments:
        ran = run("conform", *arguments, "--for", "0.5")
    assert failed(ran) == {"replay ends": "asked for batches from 0: nothing came, and no end marker"}
    assert ran.lines[-1]["batches"] == 1


def test_a_recording_is_graded_with_what_its_recorder_asked_for(tmp_path: Path) -> None:
    record_incident(tmp_path / "r")
    ran = run("conform", str(tmp_path / "r"))
    assert (failed(ran), ran.status) == ({}, 0)
    unseen = {point for point, state in states(ran).items() if state == "not seen"}
    assert unseen == {"extra keys per block", "same hash, same content", "same content, same hash"}
    assert "a restart" in ran.lines[-1]["notes"][0]


def test_where_nothing_can_be_graded_the_status_is_2() -> None:
    ran = run("conform", "tcp://127.0.0.1:1", "--for", "0.1")
    assert ran.status == 2
    assert "no message came" in ran.notes


def test_replies_without_a_batch_are_nothing_to_grade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "REPLAY_TIMEOUT_S", 0.2)
    with engine([], lambda _: [[b"", *END_OF_REPLAY]]) as arguments:
        idle = run("conform", *arguments, "--for", "0.5")
    with engine([], lambda _: []) as arguments:
        silent = run("conform", *arguments, "--for", "0.5")
    assert (idle.status, silent.status) == (2, 2)
    assert "no message came" in idle.notes and "the replay socket does not answer" in silent.notes


@pytest.mark.chaos
@pytest.mark.parametrize("columns", [80, 120])
def test_the_grades_fit_the_terminal(columns: int) -> None:
    bad = [message(0, stored(1)), message(1, stored(3, parent=2), BlockRemoved([7], "GPU"))]
    with engine([*bad, *([b"t", b"x"] for _ in range(3))]) as arguments:
        status, lines = on_terminal("conform", *arguments, "--for", "1", columns=columns)
    assert status == 1
    assert all(len(line) <= columns for line in lines)
    text = "\n".join(lines)
    assert all(point.name in text for point in POINTS)
    assert "A router: It drops the message" in text
