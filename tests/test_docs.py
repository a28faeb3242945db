"""The pages say what the command line does: pasted help is real, named commands exist, everything has help."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from fleet.cli import warmroute

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL_BLOCK = re.compile(r"^```(?:console|sh|bash|shell)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`((?:warmroute|make) [^`\n]+)`")


def pasted_runs(page: str) -> Iterator[tuple[str, str]]:
    """Yield each `$ command` of the console blocks with the output pasted below it."""
    for block in CONSOLE.findall(page):
        for run in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = run.partition("\n")
            yield command, output


def commands_named_in(page: str) -> list[str]:
    """Find the warmroute and make commands in code spans and shell blocks."""
    lines = [line.removeprefix("$ ") for block in SHELL_BLOCK.findall(page) for line in block.splitlines()]
    return CODE_SPAN.findall(page) + [line for line in lines if re.match(r"(warmroute|make) ", line)]


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command of the tree with its path."""
    pending: list[tuple[str, click.Command]] = [("warmroute", warmroute)]
    while pending:
        path, command = pending.pop()
        yield path, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None, f"{path} lists {name} but does not have it"
                pending.append((f"{path} {name}", child))


def unknown_word(line: str) -> str | None:
    """Return the word of a warmroute command line that should name a sub-command and does not."""
    command: click.Command = warmroute
    for word in shlex.split(line, comments=True)[1:]:
        if not isinstance(command, click.Group) or not re.fullmatch(r"[a-z][a-z-]*", word):
            return None
        child = command.get_command(click.Context(command), word)
        if child is None:
            return word
        command = child
    return None


def real_output(command: str) -> str:
    """Run `warmroute ...` as a terminal of 100 columns without colours would show it."""
    env = os.environ | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    arguments = shlex.split(command)[1:]
    finished = subprocess.run([sys.executable, "-m", "fleet", *arguments], env=env, capture_output=True, text=True)
    return finished.stdout


def help_pasted_in_pages() -> list[tuple[str, str]]:
    """With what `warmroute size` computes: that is the same everywhere, too."""
    runs = [run for page in PAGES for run in pasted_runs(page.read_text())]
    return [(command, output) for command, output in runs if re.fullmatch(r"warmroute (.*--help|size .*)", command)]


@pytest.mark.parametrize(("command", "pasted"), help_pasted_in_pages())
def test_pasted_help_is_the_real_output(command: str, pasted: str) -> None:
    assert pasted.strip() == real_output(command).strip()


def test_the_readme_shows_the_help() -> None:
    assert "warmroute --help" in [command for command, _ in help_pasted_in_pages()]


def test_stale_help_would_be_noticed() -> None:
    [(command, pasted)] = pasted_runs("```console\n$ warmroute --help\nUsage: something else\n```\n")
    assert pasted.strip() != real_output(command).strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_named_in_pages_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands_named_in(page.read_text()):
        if line.startswith("make "):
            assert set(re.findall(r"[a-z0-9-]+", line.partition("#")[0])) - {"make"} <= targets, line
        else:
            assert unknown_word(line) is None, line


def test_a_command_that_does_not_exist_would_be_noticed() -> None:
    assert commands_named_in("Run `warmroute evnets tree` now.") == ["warmroute evnets tree"]
    assert unknown_word("warmroute evnets tree") == "evnets"


def test_every_command_and_option_has_help() -> None:
    for path, command in all_commands():
        assert command.help, f"{path} has no help"
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{path} {parameter.opts[0]} has no help"
