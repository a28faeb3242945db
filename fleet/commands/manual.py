"""`warmroute manual`: all help texts as one page for `man`."""

from collections.abc import Iterator
from importlib.metadata import version

import click

from events.cli import LazyGroup

WIDTH = 76  # `man` indents by four and fills a terminal of 80


@click.command()
@click.pass_context
def manual(context: click.Context) -> None:
    """Print a manual page of all commands.

    \b
    warmroute manual > ~/.local/share/man/man1/warmroute.1
    man warmroute
    """
    root = context.find_root().command
    assert isinstance(root, LazyGroup)
    click.echo(f'.TH WARMROUTE 1 "" "warmroute {version("warmroute")}"')
    click.echo(f".SH NAME\nwarmroute \\- {_escaped(root.help or '')}")
    top = click.Context(root, info_name="warmroute", terminal_width=WIDTH, **root.context_settings)
    for title, text in _help_texts(root, top):
        click.echo(f".SH {title.upper()}\n.nf\n{_escaped(text)}\n.fi")


def _help_texts(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Yield the help of a command, then that of its sub-commands; where an extra is missing, what is known without."""
    yield context.command_path, command.get_help(context)
    if not isinstance(command, LazyGroup):
        return
    for name in command.list_commands(context):
        try:
            found = command.get_command(context, name)
        except ModuleNotFoundError as error:
            note = f"It needs {error.name}, which is not installed."
            yield f"{context.command_path} {name}", f"{command.short_help_of(name)} {note}"
        else:
            assert found is not None, f"{name} is listed and not there"
            yield from _help_texts(found, click.Context(found, context, name, terminal_width=WIDTH))


def _escaped(text: str) -> str:
    """For roff, which takes a line that begins with a dot or a quote for a request."""
    plain = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in plain.splitlines())
