"""`warmroute logs`: print the log of a replica."""

import contextlib
import time
from collections.abc import Iterator

import click

from fleet.commands.addresses.local_fleets import fleet_options, locate
from fleet.commands.client import Poller
from router.console.asking import Refused

LINES = 100
FOLLOWED_LINES = 2000  # fewer lines should be written in LOOK_S
LOOK_S = 0.5
NOT_FOUND, UNAVAILABLE = 404, 503


@click.command()
@click.argument("replica")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0, 1_000_000),
    default=LINES,
    show_default=True,
    metavar="N",
    help="Number of lines from the end.",
)
@click.option("-f", "--follow", is_flag=True, help="Follow the log until Ctrl-C, or until the replica is gone.")
@fleet_options
def logs(replica: str, lines: int, follow: bool, which: str | None, fleet_key: str | None) -> None:
    """Print the log of REPLICA from any node, including its earlier processes.

    \b
    Examples:
      warmroute logs demo-0
      warmroute logs demo-0 -n 20 -f
      warmroute logs demo-0 --lines 100000 | grep -i error
    """
    with Poller(lambda: locate(which, fleet_key)) as poller:
        if not follow:
            text = poller.fleet.log(replica, lines)
            click.echo(text, nl=bool(text) and not text.endswith("\n"))
            return
        with contextlib.suppress(KeyboardInterrupt):
            for text in followed(poller, replica, lines):
                click.echo(text, nl=False)


def followed(poller: Poller, replica: str, lines: int) -> Iterator[str]:
    seen = poller.fleet.log(replica, max(lines, FOLLOWED_LINES))
    yield last_lines(seen, lines)
    seen, said = last_lines(seen, FOLLOWED_LINES), False
    while True:
        time.sleep(LOOK_S)
        try:
            now = poller.ask(lambda fleet: fleet.log(replica, FOLLOWED_LINES))
        except Refused as error:
            if error.status == NOT_FOUND:
                click.echo(f"Note: {replica} is gone", err=True)
                return
            if error.status != UNAVAILABLE:
                raise
            now, poller.why = None, error.message
        if now is None:
            if not said:
                click.echo(f"Note: no answer ({poller.why}); retrying", err=True)
            said = True
            continue
        yield news(seen, now)
        seen, said = now, False


def last_lines(text: str, lines: int) -> str:
    return "".join(text.splitlines(keepends=True)[-lines:]) if lines else ""


def news(before: str, now: str) -> str:
    """Return the part of a log's end that was not in its end before; all of it if they have nothing in common.

    Both are whole lines, but for the last one, which may have been cut in the middle of being written.
    """
    begin = 0
    for line in before.splitlines(keepends=True):
        if now.startswith(before[begin:]):
            return now[len(before) - begin :]
        begin += len(line)
    return now
