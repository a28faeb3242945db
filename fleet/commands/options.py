"""The options that name a fleet."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from api.process.options import SettingOption
from fleet.commands.addresses.address import FleetAddress, optional_argument
from fleet.commands.addresses.local_fleets import Where, find
from router.process.setting_types import SECRET

Command = TypeVar("Command", bound=Callable[..., Any])


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
        type=FleetAddress(),
        metavar="ADDRESS",
        envvar="WARMROUTE_FLEET",
        help="The fleet: its router's PORT on this machine, or its controller's URL or HOST:PORT.  "
        "[default: the only fleet on this machine]",
    )
    return fleet(key(command))


def fleet_argument(command: Command) -> Command:
    """The fleet as the first argument or as --fleet, and its key."""
    return optional_argument("fleet", "which", FleetAddress())(fleet_options(command))


def locate(which: str | None, fleet_key: str | None) -> Where:
    where = find(which)
    return where if fleet_key is None else where._replace(key=fleet_key)
