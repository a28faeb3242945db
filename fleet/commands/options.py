"""The options that name a fleet."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from api.options import SettingOption
from fleet.commands.local_fleets import Where, find
from router.settings import SECRET, Url

Command = TypeVar("Command", bound=Callable[..., Any])


class PortOrUrl(Url):
    name = "port or url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if text.isascii() and text.isdecimal() and 0 < int(text[:6]) < 65536:
            return str(int(text))
        if "://" not in text:
            self.fail(f"{text!r} is neither a port nor a URL; write 8000 or http://HOST:PORT.", param, ctx)
        return super().convert(value, param, ctx)


def fleet_options(command: Command) -> Command:
    """`--fleet` and `--fleet-key`, the parameters `which` and `fleet_key`."""
    key = click.option(
        "--fleet-key",
        cls=SettingOption,
        type=SECRET,
        metavar="KEY",
        envvar="WARMROUTE_FLEET_KEY",
        help="The fleet's key. Better given as WARMROUTE_FLEET_KEY.  [default: stored for this user's fleets on "
        "this machine]",
    )
    fleet = click.option(
        "--fleet",
        "which",
        cls=SettingOption,
        type=PortOrUrl(),
        metavar="PORT|URL",
        envvar="WARMROUTE_FLEET",
        help="Which fleet: the port of its router, if it runs on this machine, or the URL of its controller.  "
        "[default: the only one on this machine]",
    )
    return fleet(key(command))


def locate(which: str | None, fleet_key: str | None) -> Where:
    where = find(which)
    return where if fleet_key is None else where._replace(key=fleet_key)
