"""Checks and progress of several commands: options that would change nothing are refused."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count

import click
from click.core import ParameterSource

from api.process.settings import Unusable
from fleet.display import progress


def given_options() -> dict[str, str]:
    """The options on the command line: the flag of each, by its parameter."""
    ctx = click.get_current_context()
    names = {param.name or "": param.opts[0] for param in ctx.command.params}
    return {name: flag for name, flag in names.items() if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def check_options(needs: Mapping[str, str], excludes: Iterable[tuple[str, str]] = ()) -> None:
    """`needs`: by parameter, one without which it changes nothing; `excludes`: pairs that do not go together."""
    ctx, given = click.get_current_context(), given_options()
    flags = {param.name: param.opts[0] for param in ctx.command.params}
    for one, other in excludes:
        if one in given and other in given:
            raise Unusable(f"{given[one]} does not work with {given[other]}; leave one of them out")
    for name, needed in needs.items():
        if name in given and not ctx.params[needed]:
            raise Unusable(f"{given[name]} has no effect without {flags[needed]}; give both, or leave it out")


@contextmanager
def counting(what: str, total: int, every: int = 100) -> Iterator[Callable[[], None]]:
    """Yield a function to be called once for each of many things."""
    numbers = count(1)
    with progress(what, total) as tell:

        def on_one() -> None:
            if not (number := next(numbers)) % every:
                tell(number)

        yield on_one
