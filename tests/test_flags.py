"""Each command has few options: another one has to replace one, and these numbers may only be lowered."""

from collections.abc import Iterator

import click
import pytest

from fleet.cli import warmroute
from tests.house import flags

MOST = 14  # of a command that is not named here
OF = {
    "router": 45,
    "picker": 45,
    "replica": 45,
    "simulate": 34,
    "bench": 25,
    "shadow": 27,
    "size": 16,
    "up": 15,
}


def commands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        _, command, _ = group.resolve_command(ctx, [name])
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command)
        else:
            yield name, command


@pytest.mark.parametrize(("name", "command"), list(commands(warmroute)))
def test_a_command_has_few_options(name: str, command: click.Command) -> None:
    found = flags(command)
    assert len(found) <= OF.get(name, MOST), found
