"""The routers of this machine: those of its fleets, or else the one at the default port."""

import sys
from collections.abc import Callable
from typing import TextIO

import click

from api.process.options import SettingOption
from fleet.commands.addresses.address import Address, Command, example, optional_argument
from fleet.commands.addresses.local_fleets import running_fleets
from router.process.setting_types import SECRET

DEFAULT = "http://127.0.0.1:8000"


def locate_router(which: str | None) -> str:
    """Return the URL of this router, or of the one of the only fleet here, or of the default port."""
    if which is not None:
        return which
    found = list(dict.fromkeys(fleet.router_url for fleet in running_fleets())) or [DEFAULT]
    if len(found) == 1:
        return found[0]
    raise click.ClickException(
        f"{len(found)} routers run on this machine: {', '.join(found)}; name one: {example('router', short(found[0]))}"
    )


def short(url: str) -> str:
    """The shortest address that means this URL."""
    return url.removeprefix("http://127.0.0.1:")


router_option = click.option(
    "--router",
    "which",
    cls=SettingOption,
    type=Address(),
    metavar="ADDRESS",
    envvar="WARMROUTE_ROUTER",
    help="The router: a URL, HOST:PORT, or a PORT of this machine.  [default: the only router on this machine]",
)
admin_key_option = click.option(
    "--admin-key",
    cls=SettingOption,
    type=SECRET,
    metavar="KEY",
    envvar="WARMROUTE_ADMIN_KEY",
    help="The router's admin key, if it has one. Better given as WARMROUTE_ADMIN_KEY.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Show the router's answer as it is.")


def router_argument(command: Command) -> Command:
    """The router as the first argument or as --router: the parameter `which`, for `locate_router`."""
    return optional_argument("router", "which", Address())(router_option(command))


def show(answer: bytes, as_json: bool, draw: Callable[[bytes, TextIO], None]) -> None:
    if as_json:
        click.echo(answer.decode(errors="replace"))
    else:
        draw(answer, sys.stdout)
