"""`warmroute prefixes`: the prefixes that recent prompts share."""

import click

from fleet.commands.addresses.local_routers import admin_key_option, json_option, locate_router, router_argument, show


@click.command()
@router_argument
@admin_key_option
@click.option(
    "--limit",
    type=click.IntRange(1, 200),
    metavar="N",
    default=20,
    show_default=True,
    help="Number of prefixes to show: those that save most, and the prefixes before them.",
)
@json_option
def prefixes(which: str | None, admin_key: str | None, limit: int, as_json: bool) -> None:
    """Show the prefixes that recent prompts share, and the replicas that hold them.

    Each line is a prefix of two or more prompts; indented lines continue it. Texts are shown if clients
    have no keys, or if the router was started with --show-prompts.

    \b
    Examples:
      warmroute prefixes
      warmroute prefixes 10.0.0.9:8000 --limit 100
      warmroute prefixes --json | python -m json.tool
    """
    from router.console.prefixes import ask, draw  # an HTTP client and rich: not needed to refuse arguments

    show(ask(locate_router(which), limit, admin_key), as_json, draw)
