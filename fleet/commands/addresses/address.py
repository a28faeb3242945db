"""The address of a router or fleet on the command line: a URL, HOST:PORT or PORT."""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from router.process.setting_types import Url

Command = TypeVar("Command", bound=Callable[..., Any])


class Address(Url):
    """A URL; a port alone is one of this machine."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if is_port(text):
            return f"http://127.0.0.1:{int(text)}"
        if "://" not in text:
            has_port = False
            with suppress(ValueError):
                parts = urlsplit(f"http://{text}")
                has_port = bool(parts.hostname and parts.port)
            if not has_port:
                self.fail(f"{text!r} is not an address; write 8000, HOST:8000 or http://HOST:8000.", param, ctx)
            text = f"http://{text}"
        return super().convert(text, param, ctx)


class FleetAddress(Address):
    """A URL; a port alone stays one, as it may be a router's or a controller's."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        return str(int(text)) if is_port(text) else super().convert(text, param, ctx)


def is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10 and 0 < int(text) < 65536


def optional_argument(name: str, parameter: str, kind: Address) -> Callable[[Command], Command]:
    """Take the value of the option --NAME as the command's first argument, too."""

    def decorate(command: Command) -> Command:
        @click.argument(name, required=False, type=kind)
        @wraps(command)
        def merged(**given: Any) -> Any:
            said = given.pop(name)
            if said is not None:
                source = click.get_current_context().get_parameter_source(parameter)
                if source is ParameterSource.COMMANDLINE:
                    raise click.UsageError(f"{name.upper()} and --{name} name the same thing; leave one of them out")
                given[parameter] = said
            return command(**given)

        return merged  # type: ignore[return-value]

    return decorate


def example(name: str, value: str) -> str:
    """Return the running command as it could be typed with this router or fleet."""
    ctx = click.get_current_context(silent=True)
    if ctx is None:
        return f"--{name} {value}"
    is_argument = any(isinstance(param, click.Argument) and param.name == name for param in ctx.command.params)
    return f"`{ctx.command_path} {value}`" if is_argument else f"`{ctx.command_path} ... --{name} {value}`"
