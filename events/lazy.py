"""A click group that knows its sub-commands by a table and imports one only to run it."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

# Name of the sub-command -> ("module:attribute", the one line that the list of commands shows).
CommandTable = Mapping[str, tuple[str, str]]


class LazyGroup(click.Group):
    """A group that reads `table` at each use."""

    def __init__(self, *arguments: Any, table: CommandTable | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.table: CommandTable = table if table is not None else {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name all sub-commands, sorted."""
        return sorted([*self.table, *super().list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the sub-command; the context around the import lets a failure say who needed the module."""
        if cmd_name not in self.table:
            return super().get_command(ctx, cmd_name)
        with click.Context(click.Command(cmd_name), parent=ctx, info_name=cmd_name) as importing:
            return importing.invoke(load, self.table[cmd_name][0])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the sub-command; the error for an unknown one names those that are spelled alike."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches  # not needed by commands that are there

            if near := get_close_matches(args[0], self.list_commands(ctx)):
                hint = f"Did you mean {' or '.join(map(repr, near))}?"
                raise click.UsageError(f"{error.message} {hint}", ctx) from None
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of sub-commands from the table, importing none."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.short_help_of(name)) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete sub-commands from the table, importing none."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        items = [CompletionItem(name, help=self.short_help_of(name)) for name in names]
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def short_help_of(self, name: str) -> str:
        """Return the one line that the list of sub-commands shows."""
        return self.table[name][1] if name in self.table else self.commands[name].get_short_help_str(limit=100)


def load(import_path: str) -> click.Command:
    """Import a command by `module:attribute`."""
    module, _, attribute = import_path.partition(":")
    command = getattr(import_module(module), attribute)
    assert isinstance(command, click.Command), f"{import_path} is a {type(command).__name__}, not a click command"
    return command
