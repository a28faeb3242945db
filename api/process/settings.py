"""The table of settings of a command, and the types that replicas and routers share.

Which settings a command has is said in a table of its own (`replica.settings.options`, `router.process.settings`); how
a value gets from the command line, the environment or a file into it is in `api.process.options`.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click
from msgspec import Struct

LARGEST = 2**31 - 1  # the limit of a number that has no other; not worth showing


class Unusable(click.ClickException):
    """An invalid setting, explained in one line."""

    exit_code = 2


class FiniteRange(click.FloatRange):
    """A range that excludes nan and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number: float = super().convert(value, param, ctx)
        except OverflowError:  # a whole number of TOML, of hundreds of digits
            self.fail("The number is too large.", param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


class Text(click.ParamType[str]):
    """Text that is neither empty, as an empty key or name would count as none, nor invalid UTF-8."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            self.fail(f"{value!r} is empty; leave the setting out instead.", param, ctx)
        if any("\ud800" <= letter <= "\udfff" for letter in str(value)):  # bytes that are not UTF-8
            self.fail(f"{value!r} is not UTF-8; check the locale.", param, ctx)
        return str(value)


class RegularFile(click.Path):
    """A file that is there, and no pipe or device: those could be waited for without end, at each time it is read."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if not os.path.isfile(path):
            self.fail(f"{path!r} is not a regular file.", param, ctx)
        return path


class Setting(NamedTuple):
    key: str
    field: str  # the path below the configuration; empty where the command itself knows what to do with it
    type: click.ParamType[Any]
    metavar: str
    help: str
    default: Any = None  # the default of those that have no field
    required: bool = False
    multiple: bool = False  # may be given several times; a list in the file
    secret: bool = False  # never quoted
    flag: bool = True  # has an option of its own; False: few would set it, and --set can

    @property
    def option(self) -> str:
        return "--" + self.key.replace("_", "-") if self.flag else f"--set={self.key}"

    @property
    def variable(self) -> str:
        return f"WARMROUTE_{self.key.upper()}"


class Table(NamedTuple):
    command: str
    groups: Mapping[str, Sequence[Setting]]  # groups of the help
    defaults: Struct  # the configuration where nothing is said

    @property
    def all(self) -> dict[str, Setting]:
        return {setting.key: setting for rows in self.groups.values() for setting in rows}


TEXT = Text()
FILE = RegularFile()
PATH = click.Path(exists=True)
AT_LEAST_0 = FiniteRange(min=0)
ABOVE_0 = FiniteRange(min=0, min_open=True)
COUNT = click.IntRange(1, LARGEST)
