"""Objects against the strict schemas of Kubernetes 1.32, and custom resources against those in schemas/."""

import functools
import importlib.resources
import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from referencing import Registry, Resource

from tests.k8s.rendered import Object

VERSION = "v1.32.0-local-strict"
OWN = Path(__file__).parent / "schemas"


def mistakes(each: Object) -> list[str]:
    """In words, with the place of each."""
    return [f"{error.json_path}: {error.message}" for error in _validator(*_names(each)).iter_errors(each)]


def _names(each: Object) -> tuple[str, str]:
    return each["apiVersion"], each["kind"].lower()


@functools.cache
def _validator(version: str, kind: str) -> Any:
    own = OWN / f"{kind}.json"
    if own.is_file():
        schema = json.loads(own.read_text())
    else:
        group, _, number = version.rpartition("/")
        name = "-".join(part for part in (kind, group.partition(".")[0], number) if part)
        schema = _kubernetes(f"{name}.json")
    return jsonschema.Draft202012Validator(schema, registry=_definitions())


@functools.cache
def _definitions() -> Any:
    """By the address that schemas of both kinds name them with."""
    definitions: Resource[Any] = Resource.from_contents(_kubernetes("_definitions.json"))
    return definitions @ Registry()


def _kubernetes(name: str) -> Any:
    folder = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema" / VERSION
    file = folder / name
    assert file.is_file(), f"Kubernetes 1.32 has no {name.removesuffix('.json')}, nor does tests/k8s/schemas"
    return json.loads(file.read_text())
