"""Every command of README and docs runs as it is written, in the order in which a reader would run it."""

from pathlib import Path

import pytest

from tests.docs.pages import PAGES, PRINTS_THE_SAME, Command, commands_of, name_of
from tests.docs.reader import compare, masked, opened, step
from tests.docs.walking import needs_namespaces, walked
from tests.docs.walks import ELSEWHERE, WALKS, NotHere, Walk

TO_RUN = {
    name_of(page): [
        command.line for command in commands_of(page.read_text()) if not PRINTS_THE_SAME.fullmatch(command.line)
    ]
    for page in PAGES
}


def test_every_page_with_commands_is_walked_or_named_with_the_reason() -> None:
    assert set(WALKS) | set(ELSEWHERE) == {page for page, lines in TO_RUN.items() if lines}
    assert not set(WALKS) & set(ELSEWHERE)
    assert all(ELSEWHERE.values())


def test_no_walk_names_a_command_that_its_page_does_not_have() -> None:
    for page, walk in WALKS.items():
        scenes = [line for scene in walk.scenes for line in scene.commands]
        named = [*walk.how, *(scene.before for scene in walk.scenes), *walk.shows]
        assert [name for name in named if not any(line.startswith(name) for line in [*TO_RUN[page], *scenes])] == [], (
            page
        )


def test_most_commands_run() -> None:
    lines = [(page, line) for page, lines in TO_RUN.items() for line in lines if page in WALKS]
    left_out = [
        (page, line)
        for page, line in lines
        for name, how in WALKS[page].how.items()
        if line.startswith(name) and isinstance(how, NotHere)
    ]
    assert len(left_out) < len(lines) / 3


def test_what_differs_from_run_to_run_is_not_compared() -> None:
    assert masked("  demo-0   26212  c9694098   ready   7s   0% 0") == masked("demo-1  1 00ff00aa  ready  12s  3% 4")
    assert masked('"content":"one"') == masked('"content":"two"')
    assert masked("demo-0 is ready after 4.1 s") != masked("demo-0 is gone after 4.1 s")


def test_a_command_that_fails_or_prints_something_else_would_be_noticed(tmp_path: Path) -> None:
    with opened(tmp_path) as shell:
        step("word=kept", Walk(), shell)
        assert "kept" in (step("echo $word", Walk(), shell) or "")
        with pytest.raises(AssertionError, match="status 3: "):
            step("(exit 3)", Walk(), shell)
    compare(Command("warmroute up", "ready after 4 s"), "one\nready after 12 s\n")
    with pytest.raises(AssertionError, match="does not print"):
        compare(Command("warmroute up", "ready after 4 s"), "gone after 4 s")


# What a reader comes by first, and the two commands that do most. `python -m qualification walks` runs all pages.
TELLING = ("README.md", "docs/quickstart.md", "docs/fleet-commands.md", "docs/doctor.md", "docs/events.md")


@pytest.mark.timeout(300)
@needs_namespaces
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.chaos if page in TELLING else pytest.mark.grid) for page in WALKS]
)
@pytest.mark.usefixtures("smollm2")  # which `make up` serves; a page has no network to fetch it by
def test_a_reader_can_run_the_commands_of(page: str, tmp_path: Path) -> None:
    walked(page, tmp_path)
