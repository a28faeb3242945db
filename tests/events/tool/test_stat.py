"""`warmroute events stat`: of recordings and of live streams, in pipes and on terminals."""

import signal
from pathlib import Path
from typing import Any

import pytest

from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KnownEvent, encode_batch
from events.publisher import END_OF_REPLAY
from events.source import Source
from events.tool.options import Target
from events.tool.stat import Counted
from tests.events.processes import tool
from tests.events.recorded import record_incident
from tests.events.replicas import on_terminal, prompt, replica, run


def followed(replicas: int, *arguments: str) -> list[dict[str, Any]]:
    """The last report of each replica that is followed; for longer where the machine has other work."""
    for seconds in ("0.2", "2", "20"):
        reports = run("stat", *arguments, "--for", seconds).lines[-replicas:]
        if all(report["resident"] for report in reports):
            break
    return reports


def test_a_recording_is_summed_up_once(tmp_path: Path) -> None:
    record_incident(tmp_path / "r")
    ran = run("stat", str(tmp_path / "r"))
    assert ran.status == 0
    [report] = ran.lines
    assert (report["replica"], report["inexact"]) == ("a", None)
    assert report["stream"]["gaps"] > 2
    assert report["stream"]["restarts"] == 1
    assert report["counts"]["stored_blocks"] > report["counts"]["removed_blocks"] > 0


def test_a_live_stream_is_reported_as_it_is() -> None:
    with replica() as engine:
        engine.store(prompt(1, 2, 3))
        engine.store(prompt(1, 2, 4), 2)
        [report] = followed(1, *engine.arguments)
    assert report["inexact"] is None
    assert report["resident"] == [{"medium": "GPU", "blocks": 4}]


def test_why_a_view_is_inexact_is_reported() -> None:
    with replica(native=False, replay_batches=1) as engine:
        engine.store(prompt(1))
        engine.store(prompt(2))
        [report] = followed(1, *engine.arguments)
    assert report["inexact"] == "joined at batch 1: what came before is not known"


def test_several_replicas_are_reported_one_by_one() -> None:
    with replica(native=False) as one, replica(native=False, seed=1) as other:
        one.store(prompt(1))
        other.store(prompt(1, 2))
        reports = followed(2, one.events, other.events, "--replay", one.replay, "--replay", other.replay)
    assert [report["resident"][0]["blocks"] for report in reports] == [1, 2]


@pytest.mark.chaos
def test_ctrl_c_ends_with_the_last_figures() -> None:
    with replica() as engine:
        engine.store(prompt(1, 2))
        with tool("stat", *engine.arguments) as running:
            running.wait_for(lambda lines: lines and lines[-1]["resident"], "a report")
            before = len(running.lines())
            assert running.end(signal.SIGINT) == 0
            assert len(running.lines()) > before
            assert running.err == []


@pytest.mark.chaos
@pytest.mark.parametrize("columns", [80, 120])
def test_the_figures_fit_the_terminal(columns: int) -> None:
    with replica() as engine:
        engine.store(prompt(1000001, 1000002, 1000003))
        engine.store(prompt(1000001, 1000002, 4), 2)
        status, lines = on_terminal("stat", *engine.arguments, "--for", "1.5", columns=columns)
    assert status == 0
    shown = [line.split("\x1b[2K")[-1] for line in lines]
    assert all(len(line) <= columns for line in shown)
    assert any("GPU 4 blocks" in line for line in shown)


class Followed:
    """Counts batches that are given by hand."""

    def __init__(self) -> None:
        source = Source("r", "tcp://a:1", "tcp://a:2")
        self.counted = Counted(Target("r", [source]), source)
        self.seq = 0
        self.receive("connected")

    def receive(self, kind: str, *frames: bytes, at_s: float = 0.0) -> None:
        self.counted.at_s = at_s
        self.counted.received(kind, list(frames))
        self.counted.view.receive(kind, list(frames), 0.0)

    def batch(self, ts: float, *events: KnownEvent, received_s: float | None = None) -> None:
        """Replay it, unless it is received."""
        frames = b"", self.seq.to_bytes(8, "big"), encode_batch(EventBatch(ts, list(events)))
        if received_s is None:
            self.receive("replay", b"", *frames)
        else:
            self.receive("events", *frames, at_s=received_s)
        self.seq += 1


def stored(*hashes: int) -> BlockStored:
    return BlockStored(list(hashes), None, [h for h in hashes for _ in range(2)], 2, None, "GPU", None)


def test_rates_are_over_the_time_of_the_stream_and_a_clear_leaves_nothing_resident() -> None:
    followed = Followed()
    followed.batch(10.0, stored(1, 2))
    followed.batch(12.0, BlockRemoved([2], "GPU"), stored(5))
    report = followed.counted.report()
    assert report["span_s"] == 2.0
    assert report["rates"] == {"batches": 1.0, "events": 1.5, "stored_blocks": 1.5, "removed_blocks": 0.5}
    assert report["resident"] == [{"medium": "GPU", "blocks": 2}]
    followed.batch(13.0, AllBlocksCleared())
    assert followed.counted.report()["resident"] == []


@pytest.mark.parametrize(
    ("delays", "note"),
    [([0.25, 0.3], None), ([0.1, -2.0], "clocks differ: a batch came 2 s before"), ([7.0, 9.0], "never below 7 s")],
)
def test_lag_is_of_live_batches_and_says_when_clocks_differ(delays: list[float], note: str | None) -> None:
    followed = Followed()
    followed.batch(0.0)
    followed.receive("replay", b"", *END_OF_REPLAY)
    for index, delay_s in enumerate(delays):
        followed.batch(10.0 + index, received_s=10.0 + index + delay_s)
    lag = followed.counted.report()["lag"]
    assert lag is not None
    assert [lag["least_s"], lag["most_s"]] == pytest.approx([min(delays), max(delays)])
    assert (note is None and lag["note"] is None) or str(note) in str(lag["note"])
