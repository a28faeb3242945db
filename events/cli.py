"""`warmroute events`: the tools that read a replica's event stream. A new one is one line in COMMANDS."""

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


COMMANDS = {
    "conform": ("events.tool.conform:conform", "Grade an engine's stream against the wire format, point by point."),
    "decode": ("events.tool.decode:decode", "Turn payloads (JSON lines of hex) into events with named fields."),
    "diff": ("events.tool.diff:diff", "Compare the caches of two replicas, or of one at two moments."),
    "keygen": ("events.tool.keygen:keygen", "Write a pair of CURVE keys, to encrypt streams and admit known clients."),
    "record": ("events.tool.record:record", "Record streams to a file, with or without the prompts in them."),
    "replay": ("events.tool.replay:replay", "Publish a recording again, replay socket included."),
    "stat": ("events.tool.stat:stat", "Show rates, churn, lifetimes, gaps and the hottest prefixes of a stream."),
    "tail": ("events.tool.tail:tail", "Show a stream live, one line per event."),
    "tree": ("events.tool.tree:tree", "Draw the tree of cached prefixes."),
    "verify": ("events.tool.verify:verify", "Compare a stream's tree with the replica's own report of its cache."),
}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def events() -> None:
    """Read, check, record and replay the cache events of replicas.

    FILE is a recording made by `record`; ENDPOINT is the socket of an engine's events, such as
    tcp://127.0.0.1:5557, or the http:// address of a warmroute replica, which reports all of its sockets. With
    --json the output is one JSON object per line.

    \b
    Examples:
      warmroute events tail tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558
      warmroute events tail http://127.0.0.1:8001
      warmroute events record tcp://127.0.0.1:5557 -o incident.wre
      warmroute events stat incident.wre
    """
