"""`warmroute events verify`: the stream's tree against the replica's own word."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

from events.messages import BlockRemoved
from events.native import Load
from tests.events.processes import wait_until
from tests.events.recorded import record_incident
from tests.events.replicas import Replica, on_terminal, prompt, replica, run

QUICK = ["--for", "0.05"]


@contextmanager
def forgetting(engine: Replica, tokens: list[int]) -> Iterator[None]:
    """Once it is followed, the replica forgets the last block of a prompt without saying so."""

    def forget() -> None:
        wait_until(lambda: engine.publisher.stats.snapshots, "somebody follows")
        mirror = engine.publisher._mirror
        assert mirror is not None
        mirror.apply([BlockRemoved(list(engine.hashes(tokens)[-1:]), "GPU")])
        engine.publisher.report(Load())

    with ThreadPoolExecutor(1) as pool:
        forgot = pool.submit(forget)
        yield
        forgot.result()


@contextmanager
def reporting(engine: Replica) -> Iterator[None]:
    """Says its status again and again, as replicas do."""
    ended = Event()

    def report() -> None:
        while not ended.wait(0.02):
            engine.publisher.report(Load())

    with ThreadPoolExecutor(1) as pool:
        pool.submit(report)
        try:
            yield
        finally:
            ended.set()


def test_a_true_stream_is_equal_to_the_snapshot_and_the_digests() -> None:
    with replica() as engine, reporting(engine):
        engine.store(prompt(1, 2, 3))
        ran = run("verify", *engine.arguments, *QUICK)
    assert ran.status == 0
    [verdict] = ran.lines
    assert (verdict["equal"], verdict["seq"], verdict["blocks"], verdict["digests_wrong"]) == (True, 0, 3, [])
    assert verdict["digests_compared"] >= 1


def test_a_surplus_block_is_shown_with_its_place() -> None:
    with replica() as engine, reporting(engine), forgetting(engine, prompt(1, 2, 3)):
        engine.store(prompt(1, 2, 3))
        ran = run("verify", *engine.arguments, "--for", "0.5")
    assert ran.status == 1
    verdict, summary, part = ran.lines
    assert not verdict["equal"]
    assert verdict["digests_wrong"][0]["stream"]["blocks"] == 3
    assert verdict["digests_wrong"][0]["replica"]["blocks"] == 2
    assert summary["only"]["stream"]["blocks"] == 1
    assert (part["side"], part["place"], part["token_ids"]) == ("stream", "block 2", prompt(3))


def test_without_a_status_the_snapshot_alone_finds_the_difference() -> None:
    with replica() as engine, forgetting(engine, prompt(1, 2)):
        engine.store(prompt(1, 2))
        ran = run("verify", engine.events, "--snapshot", engine.snapshot, "--for", "0.5")
    assert ran.status == 1
    assert ran.lines[0]["digests_compared"] == 0


def test_a_foreign_engine_is_verified_by_its_replay() -> None:
    with replica(native=False) as engine:
        engine.store(prompt(1, 2, 3))
        ran = run("verify", *engine.arguments, *QUICK)
    assert (ran.status, ran.lines[0]["blocks"]) == (0, 3)


def test_a_replay_that_does_not_go_back_to_the_beginning_proves_nothing() -> None:
    with replica(native=False, replay_batches=2) as engine:
        for name in range(4):
            engine.store(prompt(name))
        ran = run("verify", *engine.arguments, *QUICK)
    assert (ran.status, ran.lines) == (2, [])
    assert "joined at batch 2: what came before is not known" in ran.notes


def test_without_a_server_there_is_no_diagnosis() -> None:
    with replica(native=False) as engine:
        ran = run("verify", engine.events)
    assert ran.status == 2
    assert "nobody to ask; give --snapshot, or --replay" in ran.notes


def record(engine: Replica, file: Path) -> None:
    assert run("record", *engine.arguments, "-o", str(file), "--for", "1").status == 0


def test_the_digests_in_a_recording_are_compared(tmp_path: Path) -> None:
    with replica() as engine, reporting(engine):
        engine.store(prompt(1, 2))
        record(engine, tmp_path / "r")
    ran = run("verify", str(tmp_path / "r"))
    assert (ran.status, ran.lines[0]["equal"], ran.lines[0]["blocks"]) == (0, True, 2)
    assert ran.lines[0]["digests_compared"] > 1


def test_a_wrong_digest_in_a_recording_is_found(tmp_path: Path) -> None:
    with replica() as engine, reporting(engine), forgetting(engine, prompt(1, 2)):
        engine.store(prompt(1, 2))
        record(engine, tmp_path / "r")
    ran = run("verify", str(tmp_path / "r"))
    assert (ran.status, bool(ran.lines[0]["digests_wrong"])) == (1, True)


def test_a_recording_without_digests_proves_nothing(tmp_path: Path) -> None:
    record_incident(tmp_path / "r")
    ran = run("verify", str(tmp_path / "r"))
    assert ran.status == 2
    assert "no digest in" in ran.notes


@pytest.mark.chaos
def test_the_verdict_fits_the_terminal() -> None:
    with replica() as engine, reporting(engine), forgetting(engine, prompt(1, 2, 3)):
        engine.store(prompt(1, 2, 3))
        status, lines = on_terminal("verify", *engine.arguments, "--for", "0.5")
    assert status == 1
    assert all(len(line) <= 80 for line in lines)
    assert any("DIFFERENT" in line for line in lines)
    assert any(line.startswith("only stream   1 block from block 2") for line in lines)
