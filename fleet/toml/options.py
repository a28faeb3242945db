"""Options in a fleet.toml as the words of a command line; what that command would refuse is refused here."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from api.process.options import options_of
from api.process.settings import Table
from engines import SERVERS
from fleet.plan import Engine
from fleet.toml.mistakes import Mistake, nearest, shown


def _below_models(key: str) -> str:
    return f"write {key} below [[models]] instead"


def _leave_out(*keys: str) -> dict[str, str]:
    return dict.fromkeys(keys, "leave it out")


OWN_OF_ROUTER = {
    **_leave_out("replica", "replicas_file", "registry", "curve_server", "curve_secret", "die_with_parent"),
    **_leave_out(*(f"kubernetes_{key}" for key in ("pods", "pool", "namespace", "api"))),
    "host": "give `warmroute up` --host",
    "port": "give `warmroute up` --port",
    "workers": "the fleet's own router is one process; start another one with `warmroute router --registry`",
    "model_dir": _below_models("tokenizer"),
    "chat_template": _below_models("chat_template"),
}
OWN_OF_REPLICA = {
    **{key: _below_models(key) for key in ("model", "engine", "tokenizer", "chat_template", "drain_timeout", "role")},
    "served_model_name": _below_models("name"),
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

_NAME = re.compile(r"[A-Za-z][\w-]*")


# ---- our own commands


def own_words(
    table: Table,
    options: Mapping[str, Any],
    own: Mapping[str, str],
    beside: Mapping[str, Any],
    check: Callable[[click.Context], object],
) -> tuple[str, ...]:
    """Return the command's extra words, beyond the fleet's own; this process's environment does not count."""
    words = [word for key, value in options.items() for word in _own_words(table, key, value, own)]
    params = options_of(table)
    for param in params:
        if isinstance(param, click.Option):
            param.envvar = None
    command = click.Command(table.command, params=params, add_help_option=False)
    try:
        with command.make_context(table.command, list(words), default_map=dict(beside)) as ctx:
            check(ctx)
    except click.ClickException as error:
        # Name the key as the table spells it.
        as_written = {key.replace("-", "_"): key for key in options}
        if isinstance(error, click.BadParameter) and error.param is not None and error.param.name is not None:
            key = as_written.get(error.param.name, error.param.name)
            raise Mistake(f"{key}: {error.message.rstrip('.')}", key) from error
        message = error.format_message()
        named = [name.replace("-", "_") for name in re.findall(r"(?:--|\b(?=[a-z]+_))([a-z][a-z_-]*)", message)]
        raise Mistake(message, *[as_written[name] for name in named if name in as_written][:1]) from error
    return tuple(words)


def _own_words(table: Table, key: str, value: object, own: Mapping[str, str]) -> Iterator[str]:
    setting = table.all.get(key.replace("-", "_"))
    if setting is None:
        known = [name for name in table.all if name not in own]
        known += [name.replace("_", "-") for name in known if "-" in key]
        hint = nearest(key, known, f"`{table.command} --help` lists them")
        raise Mistake(f"{key!r} is not a setting of '{table.command}'; {hint}", key)
    if setting.key in own:
        raise Mistake(f"{key} is set by the fleet; {own[setting.key]}", key)
    if setting.secret:
        fix = f"export {setting.variable} instead"
        raise Mistake(f"{key} would be on a command line, where other users can read it; {fix}", key)
    if setting.type is click.BOOL:
        if not isinstance(value, bool):
            raise Mistake(f"{key} is {shown(value)}; write true or false", key)
        if setting.flag:
            yield setting.option if value else f"--no-{setting.option[2:]}"
        else:
            yield f"{setting.option}={shown(value)}"
        return
    for item in value if setting.multiple and isinstance(value, list) else [value]:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise Mistake(f"{key} is {shown(value)}; write a string or a number", key)
        yield f"{setting.option}={item}"


# ---- other engines


def foreign_words(engine: Engine, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the engine's options as words. Which exist depends on its version: only the fleet's own are refused."""
    own, words = OWN_OF_FOREIGN[engine], list[str]()
    for key, value in options.items():
        if not _NAME.fullmatch(key):
            raise Mistake(f"{key!r} is not the name of an option; write it without --, like max-model-len", key)
        name = key.replace("_", "-")
        if name in own:
            raise Mistake(f"{key} is set by the fleet; {own[name]}", key)
        if meant := next((each for each in own if each.startswith(name)), None):  # the engines' parsers accept that
            raise Mistake(f"{key} abbreviates --{meant}, which is set by the fleet; {own[meant]}", key)
        match value:
            case True:
                words.append(f"--{name}")
            case False if SERVERS[engine].negates:
                words.append(f"--no-{name}")
            case False:
                raise Mistake(f"{key} is false, but {engine} has no --no-{name}; leave it out", key)
            case str() | int() | float():
                words.append(f"--{name}={value}")
            case list():
                words += (f"--{name}", *_items(key, value))
            case dict():
                try:
                    words.append(f"--{name}={json.dumps(value, allow_nan=False)}")
                except (TypeError, ValueError) as error:
                    raise Mistake(f"{key} contains a date or nan, which is not JSON; write a string", key) from error
            case _:
                raise Mistake(f"{key} is {shown(value)}; write a string, a number, a list, or a table for JSON", key)
    return tuple(words)


def _items(key: str, values: list[Any]) -> Iterator[str]:
    """Yield a list's items as words; one that begins with a dash would be another option."""
    if not values:
        raise Mistake(f"{key} is []; put strings or numbers into the list, or leave it out", key)
    for item in values:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise Mistake(f"{key} contains {shown(item)}; use strings or numbers", key)
        if isinstance(item, str) and item.startswith("-"):
            raise Mistake(f"{key} has {shown(item)} in it, which starts an option; give that its own key", key)
        yield str(item)
