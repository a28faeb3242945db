"""docs/architecture.md: its walks have few names, each of them is there, and every room is listed."""

import re
from importlib import import_module
from operator import attrgetter

import pytest

from tests.docs import rooms
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
MAX_NAMES = 12


def names_in(section: str) -> list[str]:
    """The names that the steps of a section begin with or mention, in their order."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"`((?:\w+\.)+\w+)`", text)


def exists(name: str) -> bool:
    """Tell if a dotted name is a module, or something in one."""
    words = name.split(".")
    for end in range(len(words), 0, -1):
        try:
            module = import_module(".".join(words[:end]))
        except ModuleNotFoundError:
            continue
        try:
            attrgetter(".".join(words[end:]))(module) if words[end:] else module
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.parametrize("section", ["A request", "An event"])
def test_a_walk_has_few_names_and_each_exists(section: str) -> None:
    names = names_in(section)
    assert 8 <= len(names) <= MAX_NAMES
    assert [name for name in names if not exists(name)] == []


@pytest.mark.parametrize(
    "name", ["router.nothing", "events.blocks.nothing", "replica.engine.engine.Engine.nothing", "nothing.at"]
)
def test_a_name_that_is_gone_would_be_noticed(name: str) -> None:
    assert not exists(name)
    assert exists("events.blocks.block_keys")


def test_the_page_lists_every_room_of_the_house() -> None:
    assert rooms.PART.text() == rooms.plan(), "run `python -m tests.docs.rooms`"


def test_each_place_where_something_is_decided_is_there() -> None:
    table = PAGE.partition("## Where is it decided?\n")[2].partition("\n## ")[0]
    places = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", table)
    assert len(places) > 10
    assert [place for place in places if not (ROOT / place).exists()] == []
