"""fleet.toml: a fleet's desired state. Its reference is docs/fleet-file.md."""

import os
import re
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import click
import msgspec
from msgspec import UNSET

from api.model_files import read_bytes_of
from engines import profile_of
from fleet.plan import FOREIGN, NO_MODELS, Autoscale, FleetPlan, ModelPlan, Resources, SomeAmount
from fleet.plan import mistakes as mistakes_of
from fleet.toml.lines import Lines, Path
from fleet.toml.options import (
    ENGINES,
    OWN_OF_REPLICA,
    OWN_OF_ROUTER,
    BadOption,
    foreign_words,
    own_words,
    shown,
)
from fleet.toml.tables import FleetTable, Mistakes, ModelTable, convert, explained, refuse_unknown
from replica.model.locate import DEMO, SMOLLM2, short_name
from replica.settings import configure as replica_configure
from replica.settings.options import MODEL
from replica.settings.options import TABLE as REPLICA_TABLE
from router.process.configure import config_from as router_config_from
from router.process.settings import TABLE as ROUTER_TABLE

OURS = tuple(engine for engine in ENGINES if engine not in FOREIGN)
# Engines that read what another replica has computed.
HANDING_OVER = ("native", *(engine for engine in FOREIGN if profile_of(engine).hand_over is not None))
LONGEST_NAME = 100  # a replica's name has a number after it, and 128 characters at most
MAX_BYTES = 1024 * 1024
MAX_LEVELS = 32
BYTE_ORDER_MARK = "\ufeff"  # some editors begin a file with it
LARGEST_INTEGER = 2**63 - 1  # TOML promises to keep no larger one

OF_PROMPTS = ("model", "tokenizer", "chat_template")
OF_RAY = ("CPU", "GPU", "memory", "object_store_memory")  # they have keys of their own, or cannot be asked for

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONG_KEY = re.compile(
    rf"""(?<![A-Za-z0-9_-])(?:(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{MAX_LEVELS}}}"""
)
_DIGITS = re.compile(r"[0-9_]{4300}")
_AT_LINE = re.compile(r" \(at line (\d+), column (\d+)\)$")


class BadPlan(ValueError):
    """The file cannot be used; the message names file, line, value and fix, and has a line for every mistake."""


def read_fleet(path: str) -> FleetPlan:
    try:
        text = read_bytes_of(path, MAX_BYTES).decode().replace("\r\n", "\n").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise BadPlan(f"{path} is not UTF-8: {error.reason} at byte {error.start}; save it as UTF-8") from error
    except (OSError, ValueError) as error:  # ValueError: of a path that no file can have
        raise BadPlan(f"cannot read {path!r}: {getattr(error, 'strerror', None) or error}") from error
    return parse_fleet(path, text)


def parse_fleet(path: str, text: str) -> FleetPlan:
    """Check everything possible before a start; folders and files are on this machine."""
    content = _content(path, text)
    mistakes = Mistakes(path, Lines(text))
    for where, problem in _unusable(content):
        mistakes.note(where, problem)
    plan = NO_MODELS if str(mistakes) else _fleet(content, mistakes)
    if str(mistakes):
        raise BadPlan(str(mistakes))
    return plan


def _content(path: str, text: str) -> dict[str, Any]:
    if (long := _LONG_KEY.search(text)) is not None:  # tomllib takes time and memory with the square of its parts
        line = text.count("\n", 0, long.start()) + 1
        raise BadPlan(f"{path}, line {line}: this key has too many parts; a fleet needs three")
    try:
        content = tomllib.loads(text)
        if _depth(content) > MAX_LEVELS:
            raise RecursionError
        return content
    except RecursionError:
        raise BadPlan(f"{path}, line 1: lists or tables are nested too deeply; a fleet needs three levels") from None
    except tomllib.TOMLDecodeError as error:
        said, line = str(error), text.count("\n") + 1  # "at end of document"
        if at := _AT_LINE.search(said):
            said, line = f"{said[: at.start()]}, column {at[2]}", int(at[1])
        raise BadPlan(f"{path}, line {line}: this is not TOML: {said}") from error
    except ValueError as error:  # Python reads no number of thousands of digits
        before = _DIGITS.split(text)[0]
        line = before.count("\n") + 1
        raise BadPlan(f"{path}, line {line}: this number is too large; write one below 2^63") from error


def _depth(content: dict[str, Any]) -> int:
    """Return the depth of nested tables and lists. Without recursion: a dotted key may be of any length."""
    level: list[Any] = [content]
    for depth in range(MAX_LEVELS + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return depth
    return MAX_LEVELS + 1


def _unusable(value: object, where: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield values that TOML allows and nothing here can take."""
    match value:
        case dict():
            for key, item in value.items():
                if "\0" in key:
                    yield where, f"{key!r} has a NUL in it; leave that out"
                yield from _unusable(item, (*where, key))
        case list():
            for number, item in enumerate(value):
                yield from _unusable(item, (*where, number))
        case str() if "\0" in value:
            yield where, f"{shown(value)} has a NUL in it; leave that out"
        case int() if abs(value) > LARGEST_INTEGER:
            yield where, f"a number of {value.bit_length()} bits is too large; write one below 2^63"


def _fleet(content: dict[str, Any], mistakes: Mistakes) -> FleetPlan:
    refuse_unknown(content, FleetTable.__struct_fields__, (), mistakes)
    if content.get("models", []) == []:
        mistakes.note(("models",), "there is no model; write [[models]], and below it model = 'demo', or another one")
    file = convert(content, FleetTable, (), mistakes) or FleetTable()
    _refuse_same_names(file.models, mistakes)
    _refuse_different_models(file.models, mistakes)
    models = [_model(table, Note(mistakes, ("models", number))) for number, table in enumerate(file.models)]
    note = Note(mistakes, ("router",))
    router = _words(note, lambda: own_words(ROUTER_TABLE, file.router, OWN_OF_ROUTER, {}, router_config_from))
    return FleetPlan(models=tuple(filter(None, models)), router=router)


def _refuse_same_names(tables: list[dict[str, Any]], mistakes: Mistakes) -> None:
    first: dict[object, Path] = {}
    for number, table in enumerate(tables):
        where = ("models", number, "name" if "name" in table else "model")
        name = _name_of(table)
        if isinstance(name, str) and (other := first.setdefault(name, where)) is not where:
            line = mistakes.line(other)
            mistakes.note(where, f"two models have the name {name!r}, the first on line {line}; write another name")


def _name_of(table: dict[str, Any]) -> Any:
    model = table.get("model")
    return table.get("name", short_name(model) if isinstance(model, str) else None)


def _refuse_different_models(tables: list[dict[str, Any]], mistakes: Mistakes) -> None:
    """Tables that serve one name are one model to routers, which read prompts for all of them alike."""
    first: dict[str, int] = {}
    for number, table in enumerate(tables):
        served = table.get("serves", _name_of(table))
        if not isinstance(served, str):
            continue
        other = first.setdefault(served, number)
        if "serves" not in table and "serves" not in tables[other]:
            continue
        for key in OF_PROMPTS:
            if table.get(key) != tables[other].get(key):
                where = ("models", number, key if key in table else "serves")
                line = mistakes.line(("models", other))
                mistakes.note(where, f"the table on line {line} serves {shown(served)}, too; give both the same {key}")


class Note:
    """Notes the mistakes of one table: a message, and the keys that lead to it."""

    def __init__(self, mistakes: Mistakes, where: Path) -> None:
        self.mistakes = mistakes
        self.where = where

    def __call__(self, message: str, *keys: str) -> None:
        self.mistakes.note((*self.where, *keys), message)


def _model(values: dict[str, Any], note: Note) -> ModelPlan | None:
    """Return the plan of one table; None if msgspec finds mistakes, before anything that depends on them is checked."""
    for keys, kind in ((), ModelTable), (("autoscale",), Autoscale), (("resources",), Resources):
        inner = values.get(*keys) if keys else values
        refuse_unknown(inner, kind.__struct_fields__, (*note.where, *keys), note.mistakes)
    table = convert(values, ModelTable, note.where, note.mistakes)
    if table is None:
        return None
    plan = ModelPlan(
        name=table.name or short_name(table.model),
        model=_found(table, note),
        engine=table.engine,
        replicas=_replicas(table, note),
        resources=_resources(table, note),
        tensor_parallel=table.tensor_parallel,
        autoscale=table.autoscale,
        environment=_environment(table, note),
        options=_words(note, lambda: _options(table), "options"),
        drain_timeout_s=table.drain_timeout,
        wedged_after_s=table.wedged_after,
        tokenizer=table.tokenizer and os.path.abspath(table.tokenizer),
        chat_template=table.chat_template and os.path.abspath(table.chat_template),
        adapters=table.adapters,
        resume=table.resume is True,
        api_key_env=table.api_key_env,
        serves=table.serves,
        role=table.role,
    )
    _check(table, note)
    for field, message in mistakes_of(plan):
        note(message, "model" if field == "name" and not table.name else field)
    return plan


def _check(table: ModelTable, note: Note) -> None:
    name = table.name or short_name(table.model)
    if len(name) > LONGEST_NAME:
        message = f"the name {shown(name)} has {len(name)} characters; write name, with {LONGEST_NAME} at most"
        note(message, "name" if table.name else "model")
    if table.tensor_parallel > 1 and table.engine == "simulated":
        note(
            f"tensor_parallel is {table.tensor_parallel}, but the simulated engine computes nothing; leave it out",
            "tensor_parallel",
        )
    if table.engine in OURS and table.resume is not UNSET:
        note(
            f"resume is for {' and '.join(FOREIGN)}; leave it out, ours go on elsewhere if the router lets them",
            "resume",
        )
    if table.role is not None and table.engine not in HANDING_OVER:
        note(f"role is for {' and '.join(HANDING_OVER)}; leave it out, or write another engine", "role")
    for adapter in table.adapters:
        if not adapter.isprintable():
            note(f"the name {shown(adapter)} has a character that cannot be printed; leave that out", "adapters")
    if table.tokenizer is not None and not os.path.isfile(os.path.join(table.tokenizer, "tokenizer.json")):
        note(f"tokenizer is {table.tokenizer!r}, which has no tokenizer.json; name the folder of one", "tokenizer")
    if table.chat_template is not None and not os.path.isfile(table.chat_template):
        note(f"chat_template is {table.chat_template!r}, which is not a file; name a Jinja template", "chat_template")
    if (variable := table.api_key_env) is None:
        return
    if not _VARIABLE.fullmatch(variable):  # not quoted: it may be the key
        note("api_key_env is not the name of a variable; write that name, not the key itself", "api_key_env")
    elif not os.environ.get(variable):
        note(f"api_key_env is {variable!r}, which is not set; export it, or name another", "api_key_env")


def _found(table: ModelTable, note: Note) -> str:
    """Return the model, a folder or file by its absolute path."""
    model = table.model
    if model in (DEMO, SMOLLM2) and table.engine in FOREIGN:
        note(f"model is {model!r}, which {table.engine} does not know; name a folder, or ORG/NAME", "model")
    try:
        MODEL.convert(model, None, None)
        return os.path.abspath(model) if os.path.exists(model) else model
    except click.BadParameter:
        why = "which is neither a folder nor a file"
    except OSError as error:
        why = f"which cannot be looked at: {error.strerror}"
    note(f"model is {shown(model)}, {why}; name a folder, or ORG/NAME", "model")
    return model


def _replicas(table: ModelTable, note: Note) -> int:
    bounds = table.autoscale
    if table.replicas is UNSET:
        return 1 if bounds is None else bounds.min
    if bounds is not None and bounds.min <= bounds.max and not bounds.min <= table.replicas <= bounds.max:
        between = f"from {bounds.min} to {bounds.max}"
        note(f"replicas is {table.replicas}, but autoscale goes {between}; leave replicas out", "replicas")
    return table.replicas


def _resources(table: ModelTable, note: Note) -> Resources:
    """Return the resources; by default as many devices as the engine uses. Ray places an actor on one node."""
    asked, parallel, is_foreign = table.resources, table.tensor_parallel, table.engine in FOREIGN
    cpus = asked.cpus if asked.cpus is not UNSET else float(parallel if table.engine == "native" else 1)
    gpus = asked.gpus if asked.gpus is not UNSET else float(parallel if is_foreign else 0)
    if gpus > 1 and not gpus.is_integer():
        note(f"gpus is {gpus:g}; write a whole number, or a fraction below 1 to share one", "resources", "gpus")
    elif (is_foreign or gpus) and gpus < parallel and parallel > 1:
        note(f"gpus is {gpus:g}, but tensor_parallel is {parallel}; write gpus = {parallel}", "resources", "gpus")
    custom = {key: _custom(key, amount, note) for key, amount in asked.custom.items()}
    return Resources(cpus=cpus, gpus=gpus, custom=custom)


def _custom(key: str, amount: object, note: Note) -> float:
    if key in OF_RAY or not key or not key.isprintable():
        message = f"{key!r} cannot be a custom resource; write cpus or gpus, or another name"
        note(message, "resources", "custom", key)
        return 1.0
    try:
        return msgspec.convert(amount, SomeAmount)
    except msgspec.ValidationError as error:
        note(explained(key, amount, str(error)), "resources", "custom", key)
        return 1.0


def _environment(table: ModelTable, note: Note) -> dict[str, str]:
    for key, value in table.environment.items():
        if not _VARIABLE.fullmatch(key):
            note(f"{key!r} is not the name of a variable; write letters, digits and _", "environment", key)
        elif not isinstance(value, str):
            message = f"{key} is {shown(value)}; write it in quotes: {key} = {shown(shown(value))}"
            note(message, "environment", key)
    return table.environment


def _words(note: Note, make: Callable[[], tuple[str, ...]], *keys: str) -> tuple[str, ...]:
    """Return the words of options; none, and a note, if they cannot be used."""
    try:
        return make()
    except BadOption as error:
        note(str(error), *keys, *([error.key] if error.key else []))
        return ()


def _options(table: ModelTable) -> tuple[str, ...]:
    if table.engine in FOREIGN:
        return foreign_words(table.engine, table.options)
    beside: dict[str, object] = {"model": "demo", "engine": table.engine}
    if table.engine == "native":
        beside["tensor_parallel_size"] = table.tensor_parallel
    return own_words(REPLICA_TABLE, table.options, OWN_OF_REPLICA, beside, replica_configure.check_combinations)
