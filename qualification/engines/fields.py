"""The fields and headers that engines read, by their own schemas and source.

`python -m qualification.engines.fields` writes `fields.json` from the packages in WARMROUTE_LIVE. What the router makes
of each stands in `tests/hostile/test_fields.py`. Run as a file by the engines' Python, it prints what it finds there.
"""

import ast
import dataclasses
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import typing
from collections.abc import Collection, Iterable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ENGINES = ("vllm", "sglang")
LISTED = Path(__file__).with_name("fields.json")
# Where requests are read, within the packages.
READ_IN = (
    "vllm/entrypoints",
    "vllm/tracing",
    "sglang/srt/entrypoints",
    "sglang/srt/managers",
    "sglang/srt/observability",
)
_HEADER = re.compile(r"x-[a-z0-9-]*[a-z0-9]", re.IGNORECASE)


# ---- fields


def names_in(annotation: Any, ours: tuple[str, ...] = (*ENGINES, "fastapi"), before: str = "") -> set[str]:
    """The fields of the models in an annotation, of those within as `outer.inner`."""
    return set(_names(annotation, ours, before, frozenset()))


def _names(annotation: Any, ours: tuple[str, ...], before: str, above: frozenset[type]) -> Iterator[str]:
    if arguments := typing.get_args(annotation):
        for argument in arguments:
            yield from _names(argument, ours, before, above)
    elif isinstance(annotation, type) and annotation not in above and annotation.__module__.partition(".")[0] in ours:
        for name, inner in _fields(annotation):
            yield before + name
            yield from _names(inner, ours, f"{before}{name}.", above | {annotation})


def _fields(model: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(model, "model_fields"):
        for name, field in model.model_fields.items():
            aliases = (field.alias, *getattr(field.validation_alias, "choices", (field.validation_alias,)))
            yield from ((one, field.annotation) for one in (name, *aliases) if isinstance(one, str))
    elif hasattr(model, "__struct_fields__") or dataclasses.is_dataclass(model) or issubclass(model, dict):
        yield from typing.get_type_hints(model).items()


def _routes(engine: str) -> Iterator[Any]:
    """The routes of an engine's server."""
    if engine == "sglang":
        yield from _imported("sglang.srt.entrypoints.http_server").app.routes
        return
    from fastapi import APIRouter  # of the engines' environment

    entrypoints = _imported("vllm.entrypoints")
    for module in pkgutil.walk_packages(entrypoints.__path__, "vllm.entrypoints."):
        if module.name.endswith("api_router"):
            for value in vars(_imported(module.name)).values():
                yield from value.routes if isinstance(value, APIRouter) else ()


def _imported(name: str) -> Any:
    """A module; packages that it imports and the environment lacks are stand-ins."""
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] in ENGINES:
                raise
            sys.modules[error.name] = MagicMock(__spec__=None, __path__=[])


# ---- headers


def headers_in(sources: Iterable[str]) -> set[str]:
    """The names that these sources look up among headers, and all that look like a header's."""
    trees = [ast.parse(source) for source in sources]
    constants = {
        target.id: node.value.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {name.lower() for tree in trees for node in ast.walk(tree) for name in _headers(node, constants)}


def _headers(node: ast.AST, constants: dict[str, str]) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)) if _HEADER.fullmatch(text):
            yield text
        case ast.Call(func=ast.Attribute(attr="get" | "getlist", value=among), args=[asked, *_]):
            if ast.unparse(among).lower().endswith("headers"):
                yield from _texts(asked, constants)
        case ast.Subscript(value=among, slice=asked, ctx=ast.Load()) if ast.unparse(among).endswith("request.headers"):
            yield from _texts(asked, constants)
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.List(elts=listed)) if name.endswith("HEADERS"):
            for each in listed:
                yield from _texts(each, constants)


def _texts(node: ast.expr, constants: dict[str, str]) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Name(id=name) if name in constants:
            yield constants[name]


def _sources() -> Iterator[str]:
    for folder in READ_IN:
        package, _, rest = folder.partition("/")
        spec = find_spec(package)
        assert spec is not None and spec.submodule_search_locations is not None, package
        for path in sorted((Path(spec.submodule_search_locations[0]) / rest).rglob("*.py")):
            yield path.read_text()


# ---- the list


def found_here(paths: Collection[str]) -> dict[str, Any]:
    """Read the engines of this environment; of fields, list those of bodies at these paths."""
    fields: set[str] = set()
    for engine in ENGINES:
        for route in _routes(engine):
            if getattr(route, "body_field", None) is not None and route.path in paths:
                fields |= names_in(route.body_field.field_info.annotation)
    engines = {engine: version(engine) for engine in ENGINES}
    return {"engines": engines, "fields": sorted(fields), "headers": sorted(headers_in(_sources()))}


def found_in(live: Path) -> dict[str, Any]:
    """List the fields and headers that the engines in this folder read of requests that the router passes on."""
    from router.http.routes import DIRECT_ROUTES

    paths = sorted({route.template for route in DIRECT_ROUTES})
    command = [str(live / "venv/bin/python"), __file__, *paths]
    environment = os.environ | {"VLLM_TARGET_DEVICE": "cpu"}
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    if paths := sys.argv[1:]:
        print(json.dumps(found_here(paths)))
    else:
        LISTED.write_text(json.dumps(found_in(Path(os.environ["WARMROUTE_LIVE"])), indent=1) + "\n")


if __name__ == "__main__":
    main()
