"""`warmroute events diff`: equal, different, and unknown."""

from pathlib import Path

import pytest

from tests.events.recorded import record_incident
from tests.events.replicas import on_terminal, prompt, replica, run


def test_engines_with_other_hashes_are_equal_when_their_content_is() -> None:
    with replica(native=False, seed=1) as one, replica(native=False, seed=2) as other:
        for engine in (one, other):
            engine.store(prompt(1, 2, 3))
        assert one.hashes(prompt(1)) != other.hashes(prompt(1))
        ran = run("diff", one.events, other.events, "--replay", one.replay, "--replay", other.replay)
    assert ran.status == 0
    assert ran.lines[0]["equal"]
    assert ran.lines[0]["shared"] == {"blocks": 3, "tokens": 12}


def test_what_only_one_has_is_listed_by_its_topmost_block() -> None:
    with replica() as one, replica() as other:
        one.store(prompt(1, 2, 3, 4))
        other.store(prompt(1, 9))
        options = ["--snapshot", one.snapshot, "--snapshot", other.snapshot]
        ran = run("diff", one.events, other.events, *options)
    assert ran.status == 1
    summary, *parts = ran.lines
    assert summary["shared"]["blocks"] == 1
    assert [(part["side"], part["blocks"], part["place"]) for part in parts] == [
        ("A", 3, "block 1"),
        ("B", 1, "block 1"),
    ]
    assert parts[0]["token_ids"] == prompt(2, 3, 4)
    assert parts[0]["media"] == {"A": ["GPU"], "B": []}


def test_two_moments_of_a_recording_differ(tmp_path: Path) -> None:
    record_incident(tmp_path / "r")
    file = str(tmp_path / "r")
    assert run("diff", file, file).status == 0
    ran = run("diff", file, file, "--at-a", "10")
    assert ran.status == 1
    assert ran.lines[0]["only"]["B"]["blocks"] > 0


def test_a_recording_equals_its_redacted_copy(tmp_path: Path) -> None:
    record_incident(tmp_path / "plain", seed=3)
    record_incident(tmp_path / "redacted", seed=3, redact=True)
    assert run("diff", str(tmp_path / "plain"), str(tmp_path / "redacted")).status == 0


def test_an_unknown_result_exits_with_2(tmp_path: Path) -> None:
    record_incident(tmp_path / "r")
    ran = run("diff", str(tmp_path / "r"), "tcp://127.0.0.1:1", "--timeout", "0.2")
    assert ran.status == 2
    assert "nothing came" in ran.notes
    assert run("diff", str(tmp_path / "r"), str(tmp_path / "none")).status == 2
    assert (
        "choose one with --replica-a" in run("diff", str(tmp_path / "r"), str(tmp_path / "r"), "--replica-a", "x").notes
    )


@pytest.mark.chaos
def test_the_difference_fits_the_terminal(tmp_path: Path) -> None:
    record_incident(tmp_path / "r", steps=200)
    file = str(tmp_path / "r")
    status, lines = on_terminal("diff", file, file, "--at-a", "20")
    assert status == 1
    assert all(len(line) <= 80 for line in lines)
    assert any(line.startswith("only B") and "from block" in line for line in lines)
    assert any("more (--json)" in line for line in lines)
