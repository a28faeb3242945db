"""Drawing of a decision: its layout in 80 columns, with and without a terminal."""

import io
import json
import re
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.console.explain import bar_of, draw
from router.placement.decision import Verdict
from router.responses import Explanation

ANSWER: dict[str, Any] = {
    "model": "demo",
    "policy": "cost",
    "prompt_tokens": 4100,
    "exact": True,
    "why_not": None,
    "block_size": 16,
    "blocks": 256,
    "chosen": "replica-1",
    "candidates": [
        {
            "name": "replica-0",
            "matched_tokens": 4096,
            "lower_tokens": 4096,
            "sure_tokens": 4096,
            "queued_tokens": 81234,
            "running": 64,
            "in_flight": 3,
            "ttft_s": 10.2,
            "cost": 10.53,
            "available": True,
            "why": "78,194 tokens wait there, which takes longer than computing 2,048 anew",
        },
        {
            "name": "replica-2.some-namespace.svc.cluster.local:8000",
            "matched_tokens": 0,
            "lower_tokens": 0,
            "sure_tokens": 0,
            "queued_tokens": 0,
            "running": 0,
            "in_flight": 0,
            "ttft_s": None,
            "cost": None,
            "available": False,
            "why": "draining",
        },
        {
            "name": "replica-1",
            "matched_tokens": 2048,
            "lower_tokens": 3072,
            "sure_tokens": 2048,
            "queued_tokens": 0,
            "running": 2,
            "in_flight": 1,
            "ttft_s": 0.256,
            "cost": 0.513,
            "available": True,
            "why": "chosen: lowest cost",
            "portions": [
                {"source": "GPU", "tokens": 2048},
                {"source": "CPU", "tokens": 1024, "seconds": 0.0102},
                {"source": "COMPUTE", "tokens": 1028, "seconds": 0.1285},
            ],
        },
    ],
    "hits": {"replica-0": [[0, 255]], "replica-1": [[0, 127]]},
}


def drawn(answer: dict[str, Any] | None = None, width: int = 80, **changes: Any) -> str:
    file = io.StringIO()
    draw(msgspec.json.encode((answer or ANSWER) | changes), file, width)
    return file.getvalue()


def test_a_decision_is_a_table_of_plain_text_where_there_is_no_terminal() -> None:
    shown = drawn(width=100)
    assert shown.isascii()
    assert "\x1b" not in shown
    lines = shown.splitlines()
    assert lines[:2] == ["demo, 4,100 tokens in 256 blocks of 16", "It goes to replica-1 (policy cost)"]
    winner, loser = lines[4].split(), lines[5].split()
    assert winner == [">", "replica-1", "##########..........", "2,048+1,024", "0", "2", "256", "ms", "513", "ms"]
    assert loser == ["replica-0", "#" * 20, "4,096", "81,234", "64", "10.2", "s", "10.5", "s"]
    assert "  replica-0  78,194 tokens wait there, which takes longer than computing 2,048 anew" in lines
    assert "    tokens: 2,048 in its KV cache, 1,024 from host memory in 10 ms, 1,028 computed in 128 ms" in lines
    assert lines[-1].endswith("draining")


def test_a_neighbour_is_named_as_the_place_that_tokens_come_from() -> None:
    portions = [
        {"source": "PULL", "tokens": 2048, "seconds": 0.056, "neighbours": ["replica-0", "\x1b[31mreplica-3"]},
        {"source": "STORAGE", "tokens": 512, "seconds": 0.026},
        {"source": "COMPUTE", "tokens": 1540, "seconds": 0.1925},
    ]
    candidate = {**ANSWER["candidates"][2], "portions": portions}
    shown = drawn(candidates=[candidate], width=200)
    assert "2,048 from replica-0 or \\x1b[31mreplica-3 in 56 ms, 512 from disk in 26 ms, 1,540 computed" in shown
    assert "tokens:" not in drawn(candidates=[{**candidate, "portions": portions[2:]}])


@pytest.mark.parametrize("width", [80, 120, 100, 60])
def test_it_fits_in_the_columns_there_are(width: int) -> None:
    reasons = re.compile(
        "wait there|  tokens: |svc.cluster.local:8000  draining"
    )  # sentences are for the reader's pager
    lines = [line for line in drawn(width=width).splitlines() if not reasons.search(line)]
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)


def test_numbers_of_one_that_cannot_be_chosen_are_left_out() -> None:
    [line] = [
        line for line in drawn(width=120).splitlines() if line.strip().startswith("replica-2") and "." * 20 in line
    ]
    assert line.split()[2:] == ["0", "-", "-", "-", "-"]


def test_no_replica_is_eligible() -> None:
    assert "It waits: no replica takes it now (policy cost)" in drawn(chosen=None)
    assert "> " not in drawn(chosen=None)
    assert drawn(chosen=None, candidates=[], hits={}).count("\n") == 2


def test_what_is_not_exact_says_why() -> None:
    shown = drawn(exact=False, why_not="no tokenizer of demo", blocks=9, block_size=0)
    assert shown.startswith("demo, about 4,100 tokens in 9 blocks, approximate: no tokenizer of demo\n")


def test_a_short_prompt_has_no_bar() -> None:
    shown = drawn(prompt_tokens=5, blocks=0, hits={})
    assert shown.startswith("demo, 5 tokens, less than a block\n")
    assert "#" not in shown and "prompt " not in shown


def test_an_answer_that_cannot_be_read_is_reported_in_one_line() -> None:
    with pytest.raises(click.ClickException, match=r"the router's answer cannot be read: .*; see it with --json"):
        draw(b'{"model": 5}', io.StringIO())


def test_the_answer_in_the_docs_is_drawn() -> None:
    page = (Path(__file__).parents[3] / "docs" / "router-api.md").read_text()
    answer = json.loads(page.partition("```json\n")[2].partition("```")[0])
    assert set(answer) == set(Explanation.__struct_fields__)
    assert set(answer["candidates"][0]) >= set(Verdict.__struct_fields__)
    assert "> replica-1" in drawn(answer)


def test_a_router_cannot_take_hold_of_the_terminal() -> None:
    evil = "\x1b[2J\x9b31m\u202e"
    candidate = ANSWER["candidates"][0] | {"name": evil, "why": evil}
    named: dict[str, Any] = dict.fromkeys(("model", "policy", "why_not", "chosen"), evil)
    for exact in (True, False):
        shown = drawn(candidates=[candidate], exact=exact, **named)
        assert all(letter.isprintable() or letter == "\n" for letter in shown)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colours_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = Terminal()
    draw(msgspec.json.encode(ANSWER), file, 80)
    assert "█" in file.getvalue() and "\x1b[1;32m" in file.getvalue()


@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_a_bar_shows_of_each_cell_whether_its_blocks_are_held(blocks: int, cells: int, data: st.DataObject) -> None:
    cells = min(cells, blocks)
    held = sorted(data.draw(st.sets(st.integers(0, blocks - 1))))
    bar = bar_of([(block, block) for block in held], blocks, cells, plain=True)
    assert len(bar) == cells
    for cell, shown in enumerate(bar):
        own = range(cell * blocks // cells, (cell + 1) * blocks // cells)
        count = sum(block in held for block in own)
        assert shown == ("." if not count else "#" if count == len(own) else "+")
