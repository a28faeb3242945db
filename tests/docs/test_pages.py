"""The pages match the command line: pasted help is real, named commands exist, everything has help."""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import pytest

from fleet.cli import warmroute
from tests.bench.__main__ import BY_NAME, PARTS
from tests.docs.pages import PAGES, PRINTS_THE_SAME, ROOT, commands_of, name_of

CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`((?:warmroute|make) [^`\n]+)`")


def pasted_runs(page: str) -> Iterator[tuple[str, str]]:
    """Yield each `$ command` of the console blocks with the output pasted below it."""
    for block in CONSOLE.findall(page):
        for run in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = run.partition("\n")
            yield command, output


def commands_named_in(page: str) -> list[str]:
    """Find the warmroute and make commands in code spans and shell blocks."""
    lines = [command.line for command in commands_of(page)]
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
                _, child, _ = command.resolve_command(context, [name])
                assert child is not None, f"{path} lists {name}, which it does not define"
                pending.append((f"{path} {name}", child))


def unknown_word(line: str) -> str | None:
    """Return the word of a warmroute command line that should name a sub-command and does not."""
    command: click.Command = warmroute
    for word in shlex.split(line, comments=True)[1:]:
        if not isinstance(command, click.Group) or not re.fullmatch(r"[a-z][a-z-]*", word):
            return None
        _, child, _ = command.resolve_command(click.Context(command, resilient_parsing=True), [word])
        if child is None:
            return word
        command = child
    return None


def help_option(command: click.Command, ctx: click.Context, of: Any = click.Command.get_help_option) -> Any:
    """Its `--help` and `-h`: click keeps the option of a first call, in which a test may have called it by itself."""
    vars(command)["_help_option"] = None
    return of(command, ctx)


def real_output(command: str) -> str:
    """Run `warmroute ...` as a terminal of 100 columns without colours would show it."""
    shown = patch.dict(os.environ, {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"})
    anew = patch.object(click.Command, "get_help_option", help_option)
    with shown, anew, redirect_stdout(StringIO()) as output:
        warmroute.main(shlex.split(command)[1:], prog_name="warmroute", standalone_mode=False)
    return output.getvalue()


def help_pasted_in_pages() -> list[tuple[str, str]]:
    """Find the pasted runs that print the same on every machine: help, and `warmroute size`."""
    runs = [run for page in PAGES for run in pasted_runs(page.read_text())]
    return [(command, output) for command, output in runs if PRINTS_THE_SAME.fullmatch(command)]


@pytest.mark.parametrize(("command", "pasted"), help_pasted_in_pages())
def test_pasted_help_is_the_real_output(command: str, pasted: str) -> None:
    assert pasted.strip() == real_output(command).strip(), "run `python -m tests.docs.paste`"


def test_a_page_shows_the_help() -> None:
    assert "warmroute --help" in [command for command, _ in help_pasted_in_pages()]


def test_stale_help_would_be_noticed() -> None:
    [(command, pasted)] = pasted_runs("```console\n$ warmroute --help\nUsage: something else\n```\n")
    assert pasted.strip() != real_output(command).strip()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_commands_named_in_pages_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands_named_in(page.read_text()):
        if line.startswith("make "):
            words = shlex.split(line, comments=True)[1:]
            assert {word for word in words if "=" not in word} <= targets, line
        else:
            assert unknown_word(line) is None, line


def test_a_command_that_does_not_exist_would_be_noticed() -> None:
    assert commands_named_in("Run `warmroute evnets tree` now.") == ["warmroute evnets tree"]
    assert unknown_word("warmroute evnets tree") == "evnets"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_benchmarks_named_in_pages_exist(page: Path) -> None:
    named = re.findall(r"python -m\s+tests\.bench((?: [a-z_]+)+)", page.read_text())
    assert set(" ".join(named).split()) <= {*PARTS, *BY_NAME}


def test_every_command_and_option_has_help() -> None:
    for path, command in all_commands():
        assert command.help, f"{path} has no help"
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{path} {parameter.opts[0]} has no help"
