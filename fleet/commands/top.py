"""`warmroute top`: a router, watched live."""

import sys

import click

from api.process.options import SettingOption
from api.process.settings import FiniteRange
from fleet.commands.addresses.local_routers import admin_key_option, locate_router, router_argument


@click.command()
@router_argument
@admin_key_option
@click.option(
    "--interval",
    "interval_s",
    cls=SettingOption,
    type=FiniteRange(min=0.2, max=3600),
    metavar="SECONDS",
    default=1.0,
    show_default=True,
    help="How often to poll the router; less often if its answers take long.",
)
@click.option("--once", "only_once", is_flag=True, help="Print one frame and end.")
def top(which: str | None, admin_key: str | None, interval_s: float, only_once: bool) -> None:
    """Watch a router: its replicas, their event streams, shared prefixes, and decisions with their reasons.

    Press ? for the keys. Enter shows a row's details; d drains a replica, after a question. If the router does not
    answer, the last figures stay, marked as old.

    \b
    Examples:
      warmroute top
      warmroute top 10.0.0.9:8000 --interval 5
      warmroute top --once | grep down
    """
    from router.console.top.app import once, watch  # an HTTP client and rich: not needed to refuse arguments

    if only_once:
        once(locate_router(which), admin_key, sys.stdout)
        return
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout)):
        raise click.UsageError("the live view needs a terminal; use --once to print a single frame")
    watch(locate_router(which), admin_key, interval_s)
