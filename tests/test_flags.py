"""Each command has few options: another one has to replace one, and these numbers may only be lowered."""

from collections.abc import Iterator

import click
import pytest

from api.options import KeyOption
from fleet.cli import warmroute

MOST = 14  # of a command that is not named here
OF = {
    "router": 45,
    "picker": 45,
    "replica": 45,
    "simulate": 34,
    "bench": 28,
    "shadow": 27,
    "size": 17,
    "diff": 16,
    "up": 15,
}


def commands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command)
        else:
            yield name, command


@pytest.mark.parametrize(("name", "command"), list(commands(warmroute)))
def test_a_command_has_few_options(name: str, command: click.Command) -> None:
    options = [
        param for param in command.params if isinstance(param, click.Option) and not isinstance(param, KeyOption)
    ]
    assert len(options) <= OF.get(name, MOST), [option.opts[0] for option in options]
