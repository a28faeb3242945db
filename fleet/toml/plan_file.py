"""fleet.toml: a fleet's desired state. Its reference is docs/fleet-file.md."""

import os
import re
import tomllib
from typing import Annotated, Any, TypeAlias, TypeVar, get_args

import click
import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from api.model_files import read_bytes_of
from engines import profile_of
from fleet import plan
from fleet.plan import FOREIGN, Engine, FleetPlan, ModelPlan, Resources
from fleet.toml.mistakes import Mistake, line_of, nearest, shown, within
from fleet.toml.options import OWN_OF_REPLICA, OWN_OF_ROUTER, foreign_words, own_words
from replica.model.locate import DEMO, SMOLLM2, short_name
from replica.settings import configure as replica_configure
from replica.settings.options import MODEL
from replica.settings.options import TABLE as REPLICA_TABLE
from router.process.configure import config_from as router_config_from
from router.process.settings import TABLE as ROUTER_TABLE

ENGINES: tuple[Engine, ...] = get_args(Engine)
OURS = tuple(engine for engine in ENGINES if engine not in FOREIGN)
# Engines that read what another replica has computed.
HANDING_OVER = ("native", *(engine for engine in FOREIGN if profile_of(engine).hand_over is not None))
LONGEST_NAME = 100  # a replica's name has a number after it, and 128 characters at most
MAX_BYTES = 1024 * 1024
BYTE_ORDER_MARK = "\ufeff"  # some editors begin a file with it

OF_PROMPTS = ("model", "tokenizer", "chat_template")
OF_RAY = ("CPU", "GPU", "memory", "object_store_memory")  # they have keys of their own, or cannot be asked for
FIXES = {
    "models": "; write [[models]], once for each model, and its keys below it",
    "role": "; write prefill, decode or both",
}

Text: TypeAlias = Annotated[str, Meta(min_length=1)]
T = TypeVar("T", bound=Struct)

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_AT_LINE = re.compile(r" \(at line (\d+), column (\d+)\)$")
_AT = re.compile(r"(.*) - at `\$([^`]*)`", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


class FleetTable(Struct, kw_only=True):
    models: Annotated[list[dict[str, Any]], Meta(max_length=plan.MAX_MODELS)] = []
    router: dict[str, Any] = {}


class ResourcesTable(Struct, frozen=True, kw_only=True):
    cpus: plan.Amount | UnsetType = UNSET
    gpus: plan.Amount | UnsetType = UNSET
    custom: dict[str, plan.SomeAmount] = {}


class ModelTable(Struct, kw_only=True):
    model: Text
    name: Text | UnsetType = UNSET
    engine: plan.Engine = "native"
    replicas: plan.Count | UnsetType = UNSET
    autoscale: plan.Autoscale | None = None
    resources: ResourcesTable = ResourcesTable()
    tensor_parallel: Annotated[int, Meta(ge=1, le=plan.MAX_RANKS)] = 1
    environment: dict[str, Any] = {}
    options: dict[str, Any] = {}
    drain_timeout: plan.Seconds = 60.0
    wedged_after: plan.SomeSeconds = 20.0
    tokenizer: Text | None = None
    chat_template: Text | None = None
    adapters: tuple[Text, ...] = ()
    resume: bool | UnsetType = UNSET
    api_key_env: Text | None = None
    serves: plan.Name | None = None
    role: plan.Role | None = None


class BadPlan(ValueError):
    """The file cannot be used; the message names file, line, value and fix."""


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
    try:
        return _fleet(tomllib.loads(text))
    except Mistake as error:
        raise BadPlan(f"{path}, line {line_of(text, error.where)}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        said, line = str(error), text.count("\n") + 1  # "at end of document"
        if at := _AT_LINE.search(said):
            said, line = f"{said[: at.start()]}, column {at[2]}", int(at[1])
        raise BadPlan(f"{path}, line {line}: this is not TOML: {said}") from error
    except (RecursionError, ValueError) as error:  # lists in lists without end, numbers of thousands of digits
        raise BadPlan(f"{path}, line 1: {error}") from error


def _fleet(content: dict[str, Any]) -> FleetPlan:
    _refuse_unknown(content, FleetTable)
    if content.get("models", []) == []:
        raise Mistake("there is no model; write [[models]], and below it model = 'demo', or another one")
    file = _converted(content, FleetTable)
    plans: dict[str, ModelPlan] = {}
    served: dict[str, dict[str, Any]] = {}  # the first table of each name that clients ask for
    for number, values in enumerate(file.models):
        with within("models", number):
            made = _model(values)
            if plans.setdefault(made.name, made) is not made:
                message = f"two models have the name {made.name!r}; write another name for one"
                raise Mistake(message, "name" if "name" in values else "model")
            alike = served.setdefault(made.served_name, values)
            # Tables that serve one name are one model to routers, which read prompts for all of them alike.
            for key in OF_PROMPTS:
                if values.get(key) != alike.get(key):
                    message = f"another table serves {made.served_name!r}, too; give both the same {key}"
                    raise Mistake(message, key if key in values else "serves")
    with within("router"):
        router = own_words(ROUTER_TABLE, file.router, OWN_OF_ROUTER, {}, router_config_from)
    return FleetPlan(models=tuple(plans.values()), router=router)


def _model(values: dict[str, Any]) -> ModelPlan:
    _refuse_unknown(values, ModelTable)
    for key, kind in (("autoscale", plan.Autoscale), ("resources", ResourcesTable)):
        with within(key):
            _refuse_unknown(values.get(key), kind)
    table = _converted(values, ModelTable)
    name = table.name or short_name(table.model)
    _check(table, name)
    with within("options"):
        if table.engine in FOREIGN:
            options = foreign_words(table.engine, table.options)
        else:
            beside, check = {"model": "demo", "engine": table.engine}, replica_configure.check_combinations
            options = own_words(REPLICA_TABLE, table.options, OWN_OF_REPLICA, beside, check)
    made = ModelPlan(
        name=name,
        model=_found(table),
        engine=table.engine,
        replicas=_replicas(table),
        resources=_resources(table),
        tensor_parallel=table.tensor_parallel,
        autoscale=table.autoscale,
        environment=table.environment,
        options=options,
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
    for field, message in plan.mistakes(made):
        raise Mistake(message, "model" if field == "name" and not table.name else field)
    return made


def _check(table: ModelTable, name: str) -> None:
    if len(name) > LONGEST_NAME:
        message = f"the name {shown(name)} has {len(name)} characters; write name, with {LONGEST_NAME} at most"
        raise Mistake(message, "name" if table.name else "model")
    if table.tensor_parallel > 1 and table.engine in OURS:
        message = f"is {table.tensor_parallel}, but a replica of ours takes one GPU; use {' or '.join(FOREIGN)}"
        raise Mistake(f"tensor_parallel {message}", "tensor_parallel")
    if table.engine in OURS and table.resume is not UNSET:
        message = f"resume is for {' and '.join(FOREIGN)}; leave it out, ours go on elsewhere if the router lets them"
        raise Mistake(message, "resume")
    if table.role is not None and table.engine not in HANDING_OVER:
        raise Mistake(f"role is for {' and '.join(HANDING_OVER)}; leave it out, or write another engine", "role")
    for adapter in table.adapters:
        if not adapter.isprintable():
            message = f"the name {shown(adapter)} has a character that cannot be printed; leave that out"
            raise Mistake(message, "adapters")
    for key, value in table.environment.items():
        if not _VARIABLE.fullmatch(key):
            raise Mistake(f"{key!r} is not the name of a variable; write letters, digits and _", "environment", key)
        if not isinstance(value, str):
            message = f"{key} is {shown(value)}; write it in quotes: {key} = {shown(shown(value))}"
            raise Mistake(message, "environment", key)
    if table.tokenizer is not None and not os.path.isfile(os.path.join(table.tokenizer, "tokenizer.json")):
        message = f"tokenizer is {table.tokenizer!r}, which has no tokenizer.json; name the folder of one"
        raise Mistake(message, "tokenizer")
    if table.chat_template is not None and not os.path.isfile(table.chat_template):
        message = f"chat_template is {table.chat_template!r}, which is not a file; name a Jinja template"
        raise Mistake(message, "chat_template")
    if (variable := table.api_key_env) is None:
        return
    if not _VARIABLE.fullmatch(variable):  # not quoted: it may be the key
        raise Mistake("api_key_env is not the name of a variable; write that name, not the key itself", "api_key_env")
    if not os.environ.get(variable):
        message = f"api_key_env is {variable!r}, which is not set; export it, or name another"
        raise Mistake(message, "api_key_env")


def _found(table: ModelTable) -> str:
    """Return the model, a folder or file by its absolute path."""
    model = table.model
    if model in (DEMO, SMOLLM2) and table.engine in FOREIGN:
        raise Mistake(f"model is {model!r}, which {table.engine} does not know; name a folder, or ORG/NAME", "model")
    try:
        MODEL.convert(model, None, None)
        return os.path.abspath(model) if os.path.exists(model) else model
    except click.BadParameter:
        why = "which is neither a folder nor a file"
    except OSError as error:
        why = f"which cannot be looked at: {error.strerror}"
    raise Mistake(f"model is {shown(model)}, {why}; name a folder, or ORG/NAME", "model")


def _replicas(table: ModelTable) -> int:
    bounds = table.autoscale
    if table.replicas is UNSET:
        return 1 if bounds is None else bounds.min
    if bounds is not None and bounds.min <= bounds.max and not bounds.min <= table.replicas <= bounds.max:
        between = f"from {bounds.min} to {bounds.max}"
        raise Mistake(f"replicas is {table.replicas}, but autoscale goes {between}; leave replicas out", "replicas")
    return table.replicas


def _resources(table: ModelTable) -> Resources:
    """Return the resources; by default as many devices as the engine uses. Ray places an actor on one node."""
    asked, parallel = table.resources, table.tensor_parallel
    cpus = asked.cpus if asked.cpus is not UNSET else 1.0
    gpus = asked.gpus if asked.gpus is not UNSET else float(parallel if table.engine in FOREIGN else 0)
    with within("resources"):
        if gpus > 1 and not gpus.is_integer():
            raise Mistake(f"gpus is {gpus:g}; write a whole number, or a fraction below 1 to share one", "gpus")
        if gpus < parallel and parallel > 1:
            raise Mistake(f"gpus is {gpus:g}, but tensor_parallel is {parallel}; write gpus = {parallel}", "gpus")
        for key in asked.custom:
            if key in OF_RAY or not key or not key.isprintable():
                message = f"{key!r} cannot be a custom resource; write cpus or gpus, or another name"
                raise Mistake(message, "custom", key)
    return Resources(cpus=cpus, gpus=gpus, custom=asked.custom)


# ---- tables as structs


def _refuse_unknown(values: object, kind: type[Struct]) -> None:
    known = kind.__struct_fields__
    for key in values if isinstance(values, dict) else ():
        if key not in known:
            hint = nearest(key, sorted(known), f"the keys are {', '.join(known)}")
            raise Mistake(f"{key!r} is not known here; {hint}", key)


def _converted(values: dict[str, Any], kind: type[T]) -> T:
    """Return the table as a struct; say msgspec's complaint in TOML's terms."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        said, path = str(error), list[str | int]()
        if (at := _AT.fullmatch(said)) is not None:
            said, path = at[1], [name or int(number) for name, number in _STEP.findall(at[2])]
        if missing := _MISSING.fullmatch(said):
            raise Mistake(f"{missing[1]} is missing{' in ' + str(path[-1]) if path else ''}", *path) from error
        key = next(step for step in reversed(path) if isinstance(step, str))
        value: Any = values
        for step in path:
            value = value[step]
        if key == "engine":
            listed = f"write {', '.join(ENGINES[:-1])} or {ENGINES[-1]}"
            fix = nearest(value, ENGINES, listed) if isinstance(value, str) else listed
            raise Mistake(f"engine is {shown(value)}; {fix}", *path) from error
        said = said.replace(" | null", "").replace("object", "table").replace("array", "list")
        message = f"{key} is {shown(value)}: {said[:1].lower()}{said[1:]}{FIXES.get(key, '')}"
        raise Mistake(message, *path) from error
