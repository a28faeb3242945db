"""fleet.toml: what a fleet should be, as its owner writes it. Its reference is docs/fleet-file.md."""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_args

import click

from fleet.plan import (
    FOREIGN,
    MOST_MODELS,
    MOST_REPLICAS,
    MOST_RESOURCES,
    SHORTEST_S,
    Autoscale,
    Engine,
    FleetPlan,
    ModelPlan,
    Resources,
)
from fleet.toml.lines import Lines
from fleet.toml.lines import Path as KeyPath
from fleet.toml.options import OWN_OF_REPLICA, OWN_OF_ROUTER, BadOption, Options, foreign_words, own_words, shown
from fleet.toml.section import Mistakes, Section
from replica import configure as replica_configure
from replica.settings import MODEL
from replica.settings import TABLE as REPLICA_TABLE
from router.configure import config_from as router_config_from
from router.settings import TABLE as ROUTER_TABLE

ENGINES: tuple[Engine, ...] = get_args(Engine)
OURS = tuple(engine for engine in ENGINES if engine not in FOREIGN)
LONGEST_NAME = 100  # a replica's name has a number after it, and 128 characters at most
MOST_RANKS = 1024  # of one replica, all on one node
MOST_BYTES = 1024 * 1024
MOST_LEVELS = 32
BYTE_ORDER_MARK = "\ufeff"  # some editors begin a file with it
LARGEST_INTEGER = 2**63 - 1  # of what TOML promises to keep

MODEL_KEYS = (
    *("name", "model", "engine", "replicas", "autoscale", "resources", "tensor_parallel", "environment", "options"),
    *("drain_timeout", "wedged_after", "tokenizer", "chat_template", "adapters", "resume", "api_key_env"),
)
AUTOSCALE_KEYS = Autoscale.__struct_fields__
RESOURCE_KEYS = Resources.__struct_fields__
OF_RAY = (
    "CPU",
    "GPU",
    "memory",
    "object_store_memory",
)  # resources that have keys of their own, or cannot be asked for

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONG_KEY = re.compile(
    rf"""(?<![A-Za-z0-9_-])(?:(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{MOST_LEVELS}}}"""
)
_DIGITS = re.compile(r"[0-9_]{4300}")
_AT_LINE = re.compile(r" \(at line (\d+), column (\d+)\)$")


class BadPlan(ValueError):
    """The file cannot be used; the message names file, line, value and fix, and has a line for every mistake."""


def read_fleet(path: str) -> FleetPlan:
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)  # of a device or a pipe there may be no end
        if len(content) > MOST_BYTES:
            raise BadPlan(f"{path} is longer than {MOST_BYTES} bytes; a fleet needs far less")
        text = content.decode().replace("\r\n", "\n").removeprefix(BYTE_ORDER_MARK)
    except BadPlan:
        raise
    except UnicodeDecodeError as error:
        raise BadPlan(f"{path} is not UTF-8: {error.reason} at byte {error.start}; save it as UTF-8") from error
    except (OSError, ValueError) as error:  # ValueError: of a path that no file can have
        raise BadPlan(f"cannot read {path!r}: {getattr(error, 'strerror', None) or error}") from error
    return parse_fleet(path, text)


def parse_fleet(path: str, text: str) -> FleetPlan:
    """Checks all that can be known before anything is started; folders and files are those of this machine."""
    content = _content(path, text)
    mistakes = Mistakes(path, Lines(text))
    for where, problem in _unusable(content):
        mistakes.note(where, problem)
    if not str(mistakes):
        plan = _fleet(Section((), content, mistakes))
    if str(mistakes):
        raise BadPlan(str(mistakes))
    return plan


def _content(path: str, text: str) -> dict[str, Any]:
    if (long := _LONG_KEY.search(text)) is not None:  # tomllib takes time and memory with the square of its parts
        line = text.count("\n", 0, long.start()) + 1
        raise BadPlan(f"{path}, line {line}: this key has too many parts; a fleet needs three")
    try:
        content = tomllib.loads(text)
        if _depth(content) > MOST_LEVELS:
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
    """How many levels of tables and lists there are; without recursion, since a dotted key of any length is TOML."""
    level: list[Any] = [content]
    for depth in range(MOST_LEVELS + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return depth
    return MOST_LEVELS + 1


def _unusable(value: object, where: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """What TOML allows and nothing here can take."""
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


def _fleet(file: Section) -> FleetPlan:
    file.only(("router", "models"))
    router = _router(file)
    models = [_model(section) for section in _models(file)]
    return FleetPlan(models=tuple(model for model in models if model is not None), router=router)


def _models(file: Section) -> list[Section]:
    """Their tables; a name that two of them have is a mistake of the second."""
    tables = file.values.get("models", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        file.note("models", f"models is {shown(tables)}; write [[models]], once for each model, and its keys below it")
        return []
    if len(tables) > MOST_MODELS:
        file.note("models", f"there are {len(tables)} models; write {MOST_MODELS} or fewer")
        return []
    if not tables:
        file.note("models", "there is no model; write [[models]], and below it model = 'demo', or another one")
    sections = [Section(("models", number), table, file.mistakes) for number, table in enumerate(tables)]
    first: dict[str, Section] = {}
    for section in sections:
        name = section.values.get("name", section.values.get("model"))
        if isinstance(name, str) and (other := first.setdefault(name, section)) is not section:
            key = "name" if "name" in section.values else "model"
            line = other.line("name" if "name" in other.values else "model")
            section.note(key, f"two models have the name {name!r}, the first on line {line}; write another name")
    return sections


def _router(file: Section) -> tuple[str, ...]:
    section = file.table("router")
    try:
        return own_words(ROUTER_TABLE, section.values, OWN_OF_ROUTER, {}, router_config_from)
    except BadOption as error:
        section.note(error.key, str(error))
        return ()


def _model(section: Section) -> ModelPlan | None:
    """An engine that is not known is None: nothing that depends on it is wrong, too."""
    section.only(MODEL_KEYS)
    model = section.text("model")
    if model is None:
        if "model" not in section.values:
            section.note(None, "model is missing; write model = 'demo', a folder, or ORG/NAME")
        return None
    engine = cast(Engine | None, section.choice("engine", ENGINES, "native"))
    tensor_parallel = _tensor_parallel(section, engine)
    autoscale = _autoscale(section)
    return ModelPlan(
        name=_name(section, model),
        model=_found(section, model, engine),
        engine=engine or "native",
        replicas=_replicas(section, autoscale),
        resources=_resources(section, engine, tensor_parallel),
        tensor_parallel=tensor_parallel,
        autoscale=autoscale,
        environment=_environment(section),
        options=_options(section, engine),
        drain_timeout_s=section.seconds("drain_timeout", 60.0),
        wedged_after_s=section.seconds("wedged_after", 20.0, least=SHORTEST_S),
        tokenizer=_tokenizer(section),
        chat_template=_chat_template(section),
        adapters=_adapters(section),
        resume=_resume(section, engine),
        api_key_env=_api_key_env(section),
    )


def _found(section: Section, model: str, engine: Engine | None) -> str:
    """A folder is named so that it is the same from everywhere."""
    if model == "demo" and engine in FOREIGN:
        section.note("model", f"model is 'demo', which {engine} does not know; name a folder, or ORG/NAME")
    try:
        MODEL.convert(model, None, None)
        return os.path.abspath(model) if Path(model).is_dir() else model
    except click.BadParameter:
        why = "which is no folder"
    except OSError as error:
        why = f"which cannot be looked at: {error.strerror}"
    section.note("model", f"model is {shown(model)}, {why}; name a folder, or ORG/NAME")
    return model


def _name(section: Section, model: str) -> str:
    name = section.text("name") or model
    if len(name) > LONGEST_NAME:
        key = "name" if "name" in section.values else "model"
        section.note(key, f"the name {shown(name)} has {len(name)} characters; write name, with {LONGEST_NAME} at most")
    if not name.isprintable():
        key = "name" if "name" in section.values else "model"
        section.note(key, f"the name {shown(name)} has a character that cannot be printed; write name, without it")
    if name.startswith("-"):
        section.note("name", f"the name {shown(name)} begins as an option does; write name, without the dash")
    return name


def _adapters(section: Section) -> tuple[str, ...]:
    adapters = section.texts("adapters")
    for name in adapters:
        if not name.isprintable():
            section.note("adapters", f"the name {shown(name)} has a character that cannot be printed; leave that out")
    return adapters


def _tensor_parallel(section: Section, engine: Engine | None) -> int:
    parallel = section.whole("tensor_parallel", 1, least=1, most=MOST_RANKS)
    if parallel > 1 and engine in OURS:
        section.note(
            "tensor_parallel",
            f"tensor_parallel is {parallel}, but the {engine} engine computes on one device; "
            "write engine = 'vllm' or 'sglang', or tensor_parallel = 1",
        )
    return parallel


def _autoscale(section: Section) -> Autoscale | None:
    if "autoscale" not in section.values:
        return None
    table = section.table("autoscale")
    table.only(AUTOSCALE_KEYS)
    for key in ("min", "max"):
        if key not in table.values and isinstance(section.values["autoscale"], dict):
            table.note(None, f"autoscale has no {key}; write autoscale = {{min = 1, max = 8}}")
    # With no replica there is nobody whose queue could say that one is wanted.
    least = table.whole("min", 1, least=1, most=MOST_REPLICAS)
    most = table.whole("max", MOST_REPLICAS, least=1, most=MOST_REPLICAS)
    if least > most:
        table.note("min", f"min is {least} and max is {most}; write a max of {least} or more")
    return Autoscale(
        min=least,
        max=most,
        ttft_target_s=table.seconds("ttft_target_s", 1.0, least=SHORTEST_S),
        up_after_s=table.seconds("up_after_s", 5.0),
        down_after_s=table.seconds("down_after_s", 60.0),
    )


def _replicas(section: Section, autoscale: Autoscale | None) -> int:
    begun = 1 if autoscale is None else autoscale.min
    replicas = section.whole("replicas", begun, least=0, most=MOST_REPLICAS)
    if autoscale is not None and autoscale.min <= autoscale.max and not autoscale.min <= replicas <= autoscale.max:
        between = f"from {autoscale.min} to {autoscale.max}"
        section.note("replicas", f"replicas is {replicas}, but autoscale goes {between}; leave replicas out")
    return replicas


def _resources(section: Section, engine: Engine | None, tensor_parallel: int) -> Resources:
    """One actor that asks for k GPUs has them all on one node."""
    table = section.table("resources")
    table.only(RESOURCE_KEYS)
    gpus = table.number("gpus", float(tensor_parallel if engine in FOREIGN else 0), MOST_RESOURCES)
    if gpus > 1 and not gpus.is_integer():
        table.note("gpus", f"gpus is {gpus:g}; write a whole number, or a fraction below 1 to share one")
    elif tensor_parallel > 1 and gpus < tensor_parallel and engine in FOREIGN:
        table.note(
            "gpus", f"gpus is {gpus:g}, but tensor_parallel is {tensor_parallel}; write gpus = {tensor_parallel}"
        )
    custom = table.table("custom")
    names = [key for key in custom.values if key not in OF_RAY and key and key.isprintable()]
    for key in custom.values.keys() - names:
        custom.note(key, f"{key!r} is no resource of your own; write cpus or gpus, or another name")
    amounts = {key: custom.number(key, 1.0, MOST_RESOURCES, above=True) for key in names}
    return Resources(cpus=table.number("cpus", 1.0, MOST_RESOURCES), gpus=gpus, custom=amounts)


def _environment(section: Section) -> dict[str, str]:
    table = section.table("environment")
    for key, value in table.values.items():
        if not _VARIABLE.fullmatch(key):
            table.note(key, f"{key!r} is no variable's name; write letters, digits and _")
        elif not isinstance(value, str):
            table.note(key, f"{key} is {shown(value)}; write it in quotes: {key} = {shown(shown(value))}")
    return {key: value for key, value in table.values.items() if isinstance(value, str)}


def _options(section: Section, engine: Engine | None) -> tuple[str, ...]:
    options: Options = section.values.get("options", {})
    if not isinstance(options, list | Mapping):
        section.note("options", f"options is {shown(options)}; write a table, or a list of words")
        return ()
    if engine is None:
        return ()
    beside = {"model": "demo", "engine": engine}
    try:
        if engine in FOREIGN:
            return foreign_words(engine, options)
        return own_words(REPLICA_TABLE, options, OWN_OF_REPLICA, beside, replica_configure.check_together)
    except BadOption as error:
        where = (*section.where, "options") if error.key is None else (*section.where, "options", error.key)
        section.mistakes.note(where, str(error))
        return ()


def _tokenizer(section: Section) -> str | None:
    folder = section.text("tokenizer")
    if folder is None:
        return None
    if not os.path.isfile(os.path.join(folder, "tokenizer.json")):
        section.note("tokenizer", f"tokenizer is {folder!r}, which has no tokenizer.json; name the folder of one")
    return os.path.abspath(folder)


def _chat_template(section: Section) -> str | None:
    file = section.text("chat_template")
    if file is None:
        return None
    if not os.path.isfile(file):
        section.note("chat_template", f"chat_template is {file!r}, which is no file; name one in Jinja")
    return os.path.abspath(file)


def _resume(section: Section, engine: Engine | None) -> bool:
    if "resume" in section.values and engine in OURS:
        section.note(
            "resume", "resume is for vllm and sglang; leave it out, ours go on elsewhere if the router lets them"
        )
    return section.flag("resume")


def _api_key_env(section: Section) -> str | None:
    name = section.text("api_key_env")
    if name is None:
        return None
    if not _VARIABLE.fullmatch(name):  # not quoted: it may be the key
        section.note(
            "api_key_env", "api_key_env is no variable's name; write the name of a variable, not the key itself"
        )
    elif not os.environ.get(name):
        section.note("api_key_env", f"api_key_env is {name!r}, which is not set; export it, or name another")
    return name
