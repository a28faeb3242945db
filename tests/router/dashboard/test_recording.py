"""The page of a recording: its incidents, cached blocks over time, and the tree at a moment."""

import math
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import click
import httpx2
import pytest

from events.messages import BlockStored, Hash
from events.recording import Recording
from events.records import Record
from events.resolver import Resolver
from events.tool.options import Target
from events.tool.watch import Watch
from events.tree import Tree
from router.dashboard import recording as told
from router.dashboard.recording import Player, ShuttingDown, TreePlayback, about, span
from router.dashboard.recording_server import Pages, build_app, view
from router.prompts.prefixes.shared import Prefix
from tests.events.processes import DEADLINE_S
from tests.events.recorded import SOURCE, record_incident

ENDLESS = """
import itertools
import sys
from events.recording import Recording
from router.dashboard.recording_server import view

def endless(self):
    print("playing", flush=True)
    yield from itertools.repeat(next(self.located())[1])

Recording.records = endless
view.main(sys.argv[1:])
"""


@pytest.fixture
def incident(tmp_path: Path) -> Recording:
    record_incident(tmp_path / "incident.wre")
    return Recording(tmp_path / "incident.wre")


def test_marks_are_what_the_stream_counted(incident: Recording) -> None:
    player = Player(incident)
    player.play(math.inf)
    stats = player.views[0].stream.stats
    found: Counter[str] = Counter()
    for mark in about(incident, texts=False).marks:
        found[mark.kind] += mark.count
    assert (found["gap"], found["restart"], found["reconnect"]) == (stats.gaps, stats.restarts, stats.reconnects)
    assert 0 < found["repair"] <= stats.replays


def test_timeline_ends_with_what_is_held_at_the_end(incident: Recording) -> None:
    found = about(incident, texts=False)
    player = Player(incident)
    player.play(math.inf)
    assert (found.begin, found.end) == span(incident)
    held = found.timeline.resident["a"]
    assert held[-1] == sum(bool(node.held) for node in player.tree.nodes.values()) > 0
    assert len(found.timeline.at) == len(held) == len(found.timeline.stored) == told.BUCKETS
    assert sum(found.timeline.stored) - sum(found.timeline.removed) == held[-1]


def test_moment_is_the_same_from_before_and_from_behind(incident: Recording) -> None:
    begin_s, end_s = span(incident)
    middle_s = (begin_s + end_s) / 2
    forward, back = TreePlayback(incident, None), TreePlayback(incident, None)
    forward.at(begin_s)
    back.at(end_s)
    found = forward.at(middle_s)
    assert found == back.at(middle_s)
    assert found.prefixes != forward.at(end_s).prefixes


def test_moment_has_every_block_of_the_tree(incident: Recording) -> None:
    _, end_s = span(incident)
    found = TreePlayback(incident, None).at(end_s)
    player = Player(incident)
    player.play(end_s)
    assert sum(each.tokens for each in flat(found.prefixes)) == sum(node.tokens for node in player.tree.nodes.values())
    assert found.parts == len(flat(found.prefixes))
    assert [one.blocks for one in found.replicas] == [sum(bool(node.held) for node in player.tree.nodes.values())]
    assert all(each.begin == 0 for each in found.prefixes)
    assert len({each.id for each in flat(found.prefixes)}) == found.parts


def test_tree_is_that_of_the_other_tools(incident: Recording) -> None:
    player, watch = Player(incident), Watch(SOURCE)
    player.play(math.inf)
    watch.replay(Target("incident", incident.sources, incident))
    assert player.tree.nodes.keys() == watch.tree.nodes.keys()


def test_largest_parts_are_shown_of_many(incident: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    _, end_s = span(incident)
    whole = TreePlayback(incident, None).at(end_s)
    monkeypatch.setattr(told, "MOST_PARTS", 3)
    some = TreePlayback(incident, None).at(end_s)
    assert len(flat(some.prefixes)) == 3 < some.parts == whole.parts
    assert {each.id for each in some.prefixes} <= {each.id for each in whole.prefixes}


def test_text_is_that_of_the_tokenizer(incident: Recording) -> None:
    _, end_s = span(incident)
    found = TreePlayback(incident, lambda ids: f"{len(ids)} words").at(end_s)
    assert {each.text for each in flat(found.prefixes)} >= {"4 words"}
    assert all(each.text is None for each in flat(TreePlayback(incident, None).at(end_s).prefixes))


def test_marks_beyond_what_is_shown_are_counted(incident: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = about(incident, texts=False)
    monkeypatch.setattr(told, "MOST_MARKS", 2)
    some = about(incident, texts=False)
    assert (len(some.marks), some.more_marks) == (2, len(everything.marks) - 2)


@pytest.mark.parametrize("file", ["tcp://127.0.0.1:5557", "no-such-file"])
def test_a_file_that_is_no_recording_is_reported(file: str) -> None:
    with pytest.raises(click.ClickException, match=file):
        view.main([file], standalone_mode=False)


def test_a_moment_that_failed_half_way_is_played_from_the_beginning(
    incident: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, end_s = span(incident)
    moments, broken = TreePlayback(incident, None), failing(*islice(incident.records(), 9))
    with monkeypatch.context() as patch:
        patch.setattr(incident, "records", lambda: broken)
        with pytest.raises(ZeroDivisionError):
            moments.at(end_s)
    assert moments.at(end_s) == TreePlayback(incident, None).at(end_s)


def test_playing_stops_without_a_waiting_consumer(incident: Recording) -> None:
    asked = count()
    with pytest.raises(ShuttingDown):
        TreePlayback(incident, None, lambda: next(asked) == 9).at(math.inf)
    with pytest.raises(ShuttingDown):
        about(incident, texts=False, is_ended=lambda: True)


async def test_a_failure_while_playing_is_reported_as_an_error(
    incident: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident, "records", failing)
    app = build_app(Pages(Target("incident", incident.sources, incident), None))
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for path in ("/recording", "/recording/tree?at=1"):
            answer = await client.get(path)
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "the recording could not be played: ZeroDivisionError: broken"


def test_ctrl_c_does_not_wait_until_all_is_played(incident: Recording) -> None:
    command = [sys.executable, "-c", ENDLESS, str(incident.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline().rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /recording HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert process.stdout.readline() == "playing\n"
            process.send_signal(signal.SIGINT)
            assert client.recv(1000).startswith(b"HTTP/1.1 503 ")
        assert process.communicate(timeout=DEADLINE_S) == ("", "") and process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def failing(*records: Record) -> Iterator[Record]:
    """These can be read, and no more."""
    yield from records
    raise ZeroDivisionError("broken")


def flat(prefixes: list[Prefix]) -> list[Prefix]:
    return [one for each in prefixes for one in (each, *flat(each.below))]


def test_slower_memory_is_named_for_what_stands_on_it() -> None:
    tree = Tree()
    resolver = Resolver("m", native=False)

    def store(medium: str, first: int, count: int) -> None:
        hashes: list[Hash] = [*range(first, first + count)]
        event = BlockStored(
            hashes, first - 1 if first > 1 else None, [*range(first, first + count)], 1, None, medium, None
        )
        tree.apply("r", resolver.apply([event]), 0.0)

    store("GPU", 1, 2)
    store("CPU", 1, 3)
    store("DISK", 4, 1)
    store("GPU", 5, 1)
    prefixes, _ = told.parts_of(tree, 0.0, "m", None)
    found = [(each.begin, each.tokens, each.sources) for each in flat(prefixes)]
    assert found == [(0, 2, {}), (2, 1, {"r": "CPU"}), (3, 1, {"r": "STORAGE"}), (4, 1, {"r": "STORAGE"})]
