"""Logged decisions are replayed from a recording in another order; obstacles are reported."""

from pathlib import Path

import msgspec
import pytest

from api.process.settings import Unusable
from events.recording.recording import Recorder, Recording, redacted_copy
from events.source import Record
from lab.incident.replay import IncidentReplay, lines, replay
from lab.trace.formats import read_log
from router.log_lines import LogLine
from router.placement.holders import Optimistic
from router.placement.index import PrefixIndex
from tests.lab.incident.scene import MODEL, Scene

REQUESTS = 150


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    made = Scene(tmp_path, seed=3)
    made.run(REQUESTS)
    return made


def told_of(scene: Scene, **asked: str) -> IncidentReplay:
    return replay(scene.recording, scene.log, policy=asked.get("policy"))


def shown(told: IncidentReplay) -> str:
    return "\n".join(lines(told))


def rewritten(scene: Scene, records: list[Record], sources: int = 3) -> None:
    """The recording with other records."""
    with Recorder(scene.recording, [one.source for one in scene.replicas[:sources]], force=True) as recorder:
        for record in records:
            recorder.write(record)


def records_of(scene: Scene) -> list[Record]:
    return list(Recording(scene.recording).records())


def relogged(scene: Scene, logged: list[LogLine]) -> None:
    scene.log.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in logged))


# ---- the same


def test_replicas_are_found_by_their_statuses_whatever_the_recording_calls_them(scene: Scene) -> None:
    told = told_of(scene)
    assert told.sources == {name: f"source-of-{name}" for name in ("r0", "r1", "r2")}
    assert "r0 = source-of-r0" in shown(told) and f"{REQUESTS} of {REQUESTS} decisions as logged (100.00%)" in shown(
        told
    )


def test_clocks_that_are_apart_are_found_out(scene: Scene) -> None:
    moved = [msgspec.structs.replace(record, time=record.time + 7.5) for record in records_of(scene)]
    rewritten(scene, moved)
    told = told_of(scene)
    assert told.is_same and told.same == REQUESTS
    assert told.offset_s["scene"] == pytest.approx(7.5, abs=0.05) and "clocks: the recorder's is +7," in shown(told)


def test_a_redacted_recording_is_enough(scene: Scene, tmp_path: Path) -> None:
    redacted_copy(Recording(scene.recording), tmp_path / "redacted.wre")
    told = replay(tmp_path / "redacted.wre", scene.log)
    assert told.is_same and told.same == REQUESTS and not told.other_matches


def test_each_run_of_a_router_is_a_world_of_its_own(scene: Scene) -> None:
    first = list(read_log(scene.log))
    again = [msgspec.structs.replace(line, run="another") for line in first]
    relogged(scene, [line for pair in zip(first, again, strict=True) for line in pair])
    told = told_of(scene)
    assert told.is_same and told.same == 2 * REQUESTS and not told.other_matches


# ---- the controls: another choice is detected, with its cause


def test_another_policy_differs_and_what_it_would_have_made_of_it_is_told(scene: Scene) -> None:
    told = told_of(scene, policy="round-robin")
    assert not told.is_same and set(told.kinds) == {"policy"} and 0 < told.same < told.compared == REQUESTS
    assert told.replayed.cached_tokens < told.logged.cached_tokens
    assert f"round-robin would change {len(told.differences)} of {REQUESTS} decisions" in shown(told)
    first = told.differences[0]
    assert f"{first.request_id}: logged {first.logged}, replayed {first.replayed} (policy)" in shown(told)
    assert told_of(scene, policy="cost").is_same


def test_an_unknown_policy_is_named_with_the_known_ones(scene: Scene) -> None:
    with pytest.raises(Unusable, match="the policy 'fastest' is not known; use one of cost, prefix"):
        told_of(scene, policy="fastest")
    first, *others = read_log(scene.log)
    first.decisions[0].policy = "of-another-version"
    relogged(scene, [first, *others])
    with pytest.raises(Unusable, match=r"scene.jsonl: the policy 'of-another-version' is not known; use one of cost"):
        told_of(scene)
    assert told_of(scene, policy="cost").compared == REQUESTS


def test_code_that_decides_otherwise_is_seen(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.placement.policy.COMPUTE_WEIGHT", 0.0)
    told = told_of(scene)
    assert not told.is_same and set(told.kinds) == {"logic"}
    assert "the code has changed" in shown(told)


def test_blocks_that_are_no_longer_expected_are_seen(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimistic, "add", lambda *_: None)
    told = told_of(scene)
    assert told.differences and set(told.kinds) <= {"expected", "load"} and told.kinds["expected"]


def test_an_index_that_forgets_nothing_is_seen(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixIndex, "remove", lambda *_: None)
    told = told_of(scene)
    assert told.other_matches


def test_events_that_the_recording_lacks_are_named_as_the_cause(scene: Scene) -> None:
    kept = [record for record in records_of(scene) if record.kind != "events" or record.source]
    rewritten(scene, kept)
    told = told_of(scene)
    assert told.kinds["events"], shown(told)
    side = next(one for one in told.differences if one.kind == "events").candidates[0]
    assert side.replayed.seq == -1 and side.logged.seq is not None and side.logged.seq >= 0


# ---- decisions that cannot be compared


def test_a_recording_that_was_cut_says_so_and_what_it_covers_is_the_same(scene: Scene) -> None:
    whole = scene.recording.read_bytes()
    scene.recording.write_bytes(whole[: len(whole) * 6 // 10])
    told = told_of(scene)
    after = told.uncovered["after the recording's end"]
    assert 0 < after < REQUESTS and told.compared == told.same == REQUESTS - after and told.is_same
    assert (
        len(told.damage) == 1 and "cut off" in shown(told) and f"{after} decisions not compared: after" in shown(told)
    )


def test_damage_in_the_middle_is_told_and_harms_only_what_comes_after_it(scene: Scene) -> None:
    data = bytearray(scene.recording.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    scene.recording.write_bytes(data)
    told = told_of(scene)
    assert told.damage and told.decisions == REQUESTS == told.compared + sum(told.uncovered.values())
    assert told.same >= REQUESTS // 4


def test_what_was_decided_before_the_recording_began_is_not_compared(scene: Scene) -> None:
    records = records_of(scene)
    rewritten(scene, [record for record in records if record.kind not in ("connected", "snapshot")])
    told = told_of(scene)
    assert told.uncovered == {"before the recording knew a replica's whole cache": REQUESTS}
    assert not told.is_same, "nothing was compared"


def test_of_a_replica_that_was_not_recorded_the_log_is_believed_and_it_is_counted(scene: Scene) -> None:
    rewritten(scene, [record for record in records_of(scene) if record.source < 2], sources=2)
    told = told_of(scene)
    assert told.is_same and told.missing == ["r2"] and told.from_log == {"r2": REQUESTS}
    assert "not recorded: r2" in shown(told) and f"taken from the log: r2 {REQUESTS}" in shown(told)


def test_sources_can_be_named(scene: Scene) -> None:
    endpoint = scene.replicas[1].source.events
    told = replay(scene.recording, scene.log, sources={"r1": endpoint, "r0": "source-of-r0"})
    assert told.is_same and told.sources["r1"] == "source-of-r1"
    with pytest.raises(Unusable, match=r"r1=nowhere.* has no such source; it has source-of-r0"):
        replay(scene.recording, scene.log, sources={"r1": "nowhere"})


def test_files_that_are_something_else_are_named(scene: Scene, tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="not a recording"):
        replay(scene.log, scene.log)
    with pytest.raises(Unusable, match="line 1"):
        replay(scene.recording, scene.recording)
    with pytest.raises(Unusable, match="No such file"):
        replay(scene.recording, tmp_path / "none")
    relogged(scene, [LogLine(ts=1.0, request_id="a", model=MODEL, prompt_tokens=1)])
    with pytest.raises(Unusable, match="none of its 1 lines says how it was decided"):
        told_of(scene)
