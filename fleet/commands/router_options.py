"""The options of commands that ask a router."""

import sys
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

import click

from api.options import SettingOption
from fleet.commands.address import Address, optional_argument
from router.setting_types import SECRET

Command = TypeVar("Command", bound=Callable[..., Any])

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
