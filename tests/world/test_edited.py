"""A router that looks at a file once a second goes by one of few versions after an operator's edits."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from router.tenants.keys import Key
from tests.world.edited import LOOKS_S, EditedFile, keys_by_name
from tests.world.loop import WorldLoop, run
from tests.world.network import Network

RED, BLUE = {"key": "r", "salt": False}, {"key": "b", "salt": False}


@pytest.fixture
def edit(tmp_path: Path) -> Iterator[EditedFile[Key]]:
    loop = WorldLoop(random.Random(0))
    Network(loop, "0")
    yield EditedFile(tmp_path / "keys.toml", "keys.{}", {"red": RED, "blue": BLUE}, keys_by_name, loop)
    loop.close()


def after(edits: Callable[[], Coroutine[Any, Any, None]], file: EditedFile[Key]) -> None:
    run(edits(), file.loop)


def names(file: EditedFile[Key], from_s: float, to_s: float) -> list[set[str]]:
    return [set(named) for named in file.in_force(from_s, to_s)]


def test_a_change_may_be_in_force_at_once_and_is_after_two_looks(edit: EditedFile[Key]) -> None:
    began_s = edit.loop.time()

    async def edits() -> None:
        await asyncio.sleep(10)
        edit.write({"red": RED})

    after(edits, edit)
    both, one = {"red", "blue"}, {"red"}
    assert names(edit, began_s + 9, began_s + 9.5) == [both]
    assert names(edit, began_s + 9.5, began_s + 10.5) == [one, both]
    assert names(edit, began_s + 10 + LOOKS_S, began_s + 20) == [one, both]
    assert names(edit, began_s + 10.1 + LOOKS_S, began_s + 20) == [one]


def test_what_is_replaced_too_soon_may_never_be_read(edit: EditedFile[Key]) -> None:
    async def edits() -> None:
        await asyncio.sleep(10)
        edit.write({"red": RED})
        await asyncio.sleep(1)
        edit.write({"blue": BLUE})
        await asyncio.sleep(1)

    after(edits, edit)
    now_s = edit.loop.time()
    assert names(edit, now_s, now_s) == [{"blue"}, {"red"}, {"red", "blue"}]


def test_a_broken_file_changes_nothing_and_is_mended(edit: EditedFile[Key]) -> None:
    whole, now_s = edit.path.read_text(), edit.loop.time()
    edit.break_("[")
    assert names(edit, now_s + 10, now_s + 10) == [{"red", "blue"}]
    edit.mend()
    assert edit.path.read_text() == whole
