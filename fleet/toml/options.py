"""Options in a fleet.toml as the words of a command line; what that command would refuse is refused here."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias, get_args

import click
from click.core import ParameterSource

from api.process.options import options_of
from api.process.settings import Setting, Table
from engines import SERVERS
from fleet.plan import Engine

ENGINES: tuple[Engine, ...] = get_args(Engine)
Options: TypeAlias = Mapping[str, Any] | Sequence[Any]  # a table, or the words as they are


def _below_models(key: str) -> str:
    return f"write {key} below [[models]] instead"


def _leave_out(*keys: str) -> dict[str, str]:
    return dict.fromkeys(keys, "leave it out")


OWN_OF_ROUTER = {
    **_leave_out("replica", "replicas_file", "registry", "curve_server", "curve_secret", "die_with_parent"),
    **_leave_out(*(f"kubernetes_{key}" for key in ("service", "pods", "pool", "objectives", "namespace", "api"))),
    "host": "give `warmroute up` --host",
    "port": "give `warmroute up` --port",
    "workers": "the fleet's own router is one process; start another one with `warmroute router --registry`",
    "model_dir": _below_models("tokenizer"),
    "chat_template": _below_models("chat_template"),
}
OWN_OF_REPLICA = {
    **{key: _below_models(key) for key in ("model", "engine", "tokenizer", "chat_template", "drain_timeout", "role")},
    "served_model_name": _below_models("name"),
    "tensor_parallel_size": _below_models("tensor_parallel"),
    "api_key": _below_models("api_key_env"),
    **_leave_out("host", "port", "events_host", "events_port", "events_topic", "replica_name", "die_with_parent"),
    **_leave_out("kv_host", "kv_port"),
    **_leave_out("curve_secret", "curve_clients", "curve_any_client"),  # nobody tells the router the keys
}
_RANKS = "write more replicas below [[models]] instead"
_OWN_OF_ALL = {
    "model": _below_models("model"),
    "served-model-name": _below_models("name"),
    "chat-template": _below_models("chat_template"),
    "api-key": _below_models("api_key_env"),
    **dict.fromkeys(("tensor-parallel-size", "tp"), _below_models("tensor_parallel")),
    **dict.fromkeys(("data-parallel-size", "dp"), _RANKS),
    **_leave_out("host", "port", "kv-events-config"),
}
OWN_OF_FOREIGN: dict[str, dict[str, str]] = {
    engine: {
        **_OWN_OF_ALL,
        **{option: _below_models(key) for option, key in server.fleet_keys.items()},
        **dict.fromkeys(server.rank_options, _RANKS),
        **_leave_out(*server.fleet_options),
    }
    for engine, server in SERVERS.items()
}

_FLAG = re.compile(r"--?([A-Za-z][\w-]*)")
SHORT = 3  # letters that a flag of one dash has at most, like -dpr


class BadOption(ValueError):
    """`key` is that of the table, where it is known which one is wrong."""

    def __init__(self, key: str | None, message: str) -> None:
        super().__init__(message)
        self.key = key


def shown(value: object) -> str:
    """Return a value as TOML writes it, cut if it is long."""
    text = str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(key: str, known: Sequence[str], otherwise: str) -> str:
    near = get_close_matches(key, known, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


# ---- our own commands


def own_words(
    table: Table,
    options: Options,
    own: Mapping[str, str],
    beside: Mapping[str, Any],
    check: Callable[[click.Context], object],
) -> tuple[str, ...]:
    """Return the command's extra words, beyond the fleet's own; this process's environment does not count."""
    if isinstance(options, Mapping):
        words = [word for key, value in options.items() for word in _own_words(table, key, value, own)]
    else:
        words = _plain_words(options)
    params = options_of(table)
    for param in params:
        if isinstance(param, click.Option):
            param.envvar = None
    command = click.Command(table.command, params=params, add_help_option=False)
    try:
        with command.make_context(table.command, list(words), default_map=dict(beside)) as ctx:
            for setting in table.all.values():
                if ctx.get_parameter_source(setting.key) is ParameterSource.COMMANDLINE:
                    _refuse_own(setting, setting.option, own)
            check(ctx)
    except click.ClickException as error:
        raise _explained(error, options) from error
    return tuple(words)


def _own_words(table: Table, key: str, value: object, own: Mapping[str, str]) -> Iterator[str]:
    setting = table.all.get(key.replace("-", "_"))
    if setting is None:
        known = [name for name in table.all if name not in own]
        known += [name.replace("_", "-") for name in known if "-" in key]
        raise BadOption(
            key,
            f"{key!r} is not a setting of '{table.command}'; "
            + nearest(key, known, f"`{table.command} --help` lists them"),
        )
    _refuse_own(setting, key, own)
    if setting.type is click.BOOL:
        if not isinstance(value, bool):
            raise BadOption(key, f"{key} is {shown(value)}; write true or false")
        if setting.flag:
            yield setting.option if value else f"--no-{setting.option[2:]}"
        else:
            yield f"{setting.option}={shown(value)}"
        return
    for item in value if setting.multiple and isinstance(value, list) else [value]:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise BadOption(key, f"{key} is {shown(value)}; write a string or a number")
        yield f"{setting.option}={item}"


def _refuse_own(setting: Setting, written: str, own: Mapping[str, str]) -> None:
    if setting.key in own:
        raise BadOption(written, f"{written} is set by the fleet; {own[setting.key]}")
    if setting.secret:
        fix = f"export {setting.variable} instead"
        raise BadOption(written, f"{written} would be on a command line, where other users can read it; {fix}")


def _plain_words(options: Sequence[Any]) -> list[str]:
    for word in options:
        if not isinstance(word, str):
            raise BadOption(None, f"{shown(word)} in options is not a string; write {shown(str(word))}")
    return list(options)


def _explained(error: click.ClickException, options: Options) -> BadOption:
    """Return click's error with the key as the table spells it."""
    as_written = {key.replace("-", "_"): key for key in options} if isinstance(options, Mapping) else {}
    if isinstance(error, click.BadParameter) and error.param is not None and error.param.name is not None:
        key = as_written.get(error.param.name, error.param.name)
        return BadOption(key, f"{key}: {error.message.rstrip('.')}")
    message = error.format_message()
    named = [name.replace("-", "_") for name in re.findall(r"(?:--|\b(?=[a-z]+_))([a-z][a-z_-]*)", message)]
    return BadOption(next((as_written[name] for name in named if name in as_written), None), message)


# ---- other engines


def foreign_words(engine: Engine, options: Options) -> tuple[str, ...]:
    """Return the engine's options as words. Which exist depends on its version: only the fleet's own are refused."""
    own = OWN_OF_FOREIGN[engine]
    if isinstance(options, Mapping):
        return tuple(word for key, value in options.items() for word in _foreign_words(engine, key, value, own))
    words = _plain_words(options)
    if words and not words[0].startswith("-"):
        raise BadOption(None, f"options start with {shown(words[0])}; write ['--name', 'value']")
    for word in words:
        if word == "--":
            raise BadOption(None, "'--' in options ends all options; leave it out")
        if (flag := _FLAG.match(word)) is not None:
            _refuse_foreign(None, word, flag[1], own, abbreviated=word.startswith("--"))
    return tuple(words)


def _refuse_foreign(
    key: str | None, written: str, name: str, own: Mapping[str, str], *, abbreviated: bool = True
) -> None:
    """Refuse the fleet's own options, also abbreviated, as the engines' parsers accept those."""
    name = name.replace("_", "-")
    if name in own:
        raise BadOption(key, f"{written} is set by the fleet; {own[name]}")
    meant = next((each for each in own if each.startswith(name) and (abbreviated or len(each) <= SHORT)), None)
    if meant is not None:
        raise BadOption(key, f"{written} abbreviates --{meant}, which is set by the fleet; {own[meant]}")


def _foreign_words(engine: Engine, key: str, value: Any, own: Mapping[str, str]) -> Iterator[str]:
    """Yield the words of one option; a table becomes JSON."""
    if _FLAG.fullmatch(f"--{key}") is None:
        raise BadOption(key, f"{key!r} is not the name of an option; write it without --, like max-model-len")
    _refuse_foreign(key, key, key, own)
    name = key.replace("_", "-")
    match value:
        case True:
            yield f"--{name}"
        case False if SERVERS[engine].negates:
            yield f"--no-{name}"
        case False:
            raise BadOption(key, f"{key} is false, but {engine} has no --no-{name}; leave it out")
        case str() | int() | float():
            yield f"--{name}={value}"
        case list():
            yield from (f"--{name}", *_items(key, value))
        case dict():
            try:
                yield f"--{name}={json.dumps(value, allow_nan=False)}"
            except (TypeError, ValueError) as error:
                raise BadOption(key, f"{key} contains a date or nan, which is not JSON; write a string") from error
        case _:
            raise BadOption(key, f"{key} is {shown(value)}; write a string, a number, a list, or a table for JSON")


def _items(key: str, values: list[Any]) -> Iterator[str]:
    """Yield a list's items as words; one that begins with a dash would be another option."""
    if not values:
        raise BadOption(key, f"{key} is []; put strings or numbers into the list, or leave it out")
    for item in values:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise BadOption(key, f"{key} contains {shown(item)}; use strings or numbers")
        if isinstance(item, str) and item.startswith("-"):
            raise BadOption(key, f"{key} has {shown(item)} in it, which starts an option; give that its own key")
        yield str(item)
