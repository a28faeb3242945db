"""A click group that knows its sub-commands by a table and imports one only to run it."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

# Name of the sub-command -> ("module:attribute", the one line that the list of commands shows).
CommandTable = Mapping[str, tuple[str, str]]


class LazyCommand(click.Command):
    """Stands for a command in lists and completions."""

    def __init__(self, name: str, import_path: str, line: str) -> None:
        super().__init__(name, short_help=line)
        self.import_path = import_path

    def load(self) -> click.Command:
        module, _, attribute = self.import_path.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command), f"{self.import_path} is not a click command"
        return command


class LazyGroup(click.Group):
    def __init__(self, *arguments: Any, table: CommandTable, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name, (import_path, line) in table.items():
            self.add_command(LazyCommand(name, import_path, line))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, LazyCommand) else command, rest
