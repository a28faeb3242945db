"""`warmroute events tree`: the drawing, and notes about facts that it cannot draw."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from events.messages import BlockStored
from tests.events.recorded import record_incident
from tests.events.replicas import on_terminal, prompt, replica, run


def test_a_live_tree_has_its_trunks_merged() -> None:
    with replica() as engine:
        engine.store(prompt(1, 2, 3))
        engine.store(prompt(1, 2, 4, 5), 2)
        ran = run("tree", *engine.arguments)
    assert ran.status == 0
    shape = sorted((line["blocks_before"], line["blocks"], line["at_and_below"]["leaves"]) for line in ran.lines)
    assert shape == [(0, 2, 2), (2, 1, 1), (2, 2, 1)]
    trunk = next(line for line in ran.lines if line["blocks_before"] == 0)
    assert (trunk["token_ids"], trunk["parent"]) == (prompt(1, 2), None)
    assert {line["parent"] for line in ran.lines} == {None, trunk["key"]}


def test_a_foreign_engine_is_read_from_its_replay() -> None:
    with replica(native=False) as engine:
        engine.store(prompt(1, 2))
        ran = run("tree", *engine.arguments)
    assert [line["token_ids"] for line in ran.lines] == [prompt(1, 2)]
    assert ran.lines[0]["held"] == [{"replica": engine.events.removeprefix("tcp://"), "medium": "GPU"}]
    assert ran.notes == ""


def test_orphans_are_named_not_drawn() -> None:
    with replica(native=False) as engine:
        engine.store(prompt(1, 2, 3), 2)
        ran = run("tree", *engine.arguments)
    assert ran.lines == []
    assert "1 block not drawn: their parents have not been seen (orphans)" in ran.notes


@pytest.mark.parametrize(("at", "more"), [("5", True), ("+0.005", True), ("1970-01-01", True), ("100", False)])
def test_a_recording_is_drawn_as_it_was_at_a_moment(tmp_path: Path, at: str, more: bool) -> None:
    record_incident(tmp_path / "r")
    at_the_end, then = run("tree", str(tmp_path / "r")).lines, run("tree", str(tmp_path / "r"), "--at", at).lines
    assert (then != at_the_end) == more


def test_wrong_arguments_are_explained(tmp_path: Path) -> None:
    record_incident(tmp_path / "r")
    assert "is not a moment" in run("tree", str(tmp_path / "r"), "--at", "noon").notes
    assert "is live; only a recording" in run("tree", "tcp://127.0.0.1:1", "--at", "5").notes
    assert "name a folder with a tokenizer.json" in run("tree", str(tmp_path / "r"), "--tokenizer", "nowhere").notes


def test_a_silent_server_is_named() -> None:
    ran = run("tree", "tcp://127.0.0.1:1", "--timeout", "0.2")
    assert (ran.status, ran.lines) == (2, [])
    assert "tcp://127.0.0.1:1: nothing came within 0.2 s" in ran.notes


@pytest.mark.chaos
@pytest.mark.parametrize("columns", [80, 120])
def test_the_drawing_fits_the_terminal(columns: int) -> None:
    with replica() as engine:
        engine.store(prompt(*range(1000, 1040)))
        for branch in range(12):
            engine.store(prompt(*range(1000, 1040), branch, 0, 0), 40)
        [image] = engine.hashes(prompt(9))
        engine.publish(BlockStored([image], 77, prompt(9), 4, None, "GPU", None, extra_keys=[[["cat\x1b[2J", 3]]]))
        status, lines = on_terminal("tree", *engine.arguments, columns=columns)
    assert status == 0
    assert all(len(line) <= columns for line in lines)
    text = "\n".join(lines)
    assert "77 blocks, 308 tokens" in text
    assert "40 blocks, 160 tokens  GPU  36 blocks in 12 branches below" in text
    assert "… 12 blocks in 4 branches" in text
    assert "detached below 000000000000004d" in text
    assert r"image cat\x1b[2J@3" in text


def test_text_is_shown_where_a_tokenizer_is_given(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "hello": 1, "new\nline": 2}
    Tokenizer(WordLevel(vocabulary, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with replica() as engine:
        engine.store([1, 2, 1, 1])
        ran = run("tree", *engine.arguments, "--tokenizer", str(tmp_path))
    assert ran.lines[0]["text"] == "hello new\nline hello hello"
