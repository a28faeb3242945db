"""A look that has to succeed: what goes wrong is said in one line, as by the other commands."""

import click

from events.tool.words import printable
from router.top.watch import REPLICAS, Watch


async def must_look(watch: Watch) -> None:
    """ClickException."""
    await watch.look()
    if watch.away is not None:
        raise click.ClickException(
            f"no router answers at {watch.asking.router_url}: {printable(watch.away)}; see --router"
        )
    if REPLICAS in watch.refused:
        raise click.ClickException(watch.refused[REPLICAS])
