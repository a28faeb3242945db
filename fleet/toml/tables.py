"""The tables of a fleet.toml as structs; msgspec finds the mistakes, and their lines are added here."""

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from fleet import plan
from fleet.toml.lines import Lines, Path
from fleet.toml.options import ENGINES, nearest, shown

LONGEST_MESSAGE = 500
MAX_SHOWN = 50
FIXES = {
    "models": "; write [[models]], once for each model, and its keys below it",
    "role": "; write prefill, decode or both",
}

Text: TypeAlias = Annotated[str, Meta(min_length=1)]
T = TypeVar("T", bound=Struct)

_AT = re.compile(r"(.*) - at `\$([^`]*)`", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


class FleetTable(Struct, kw_only=True):
    models: Annotated[list[dict[str, Any]], Meta(max_length=plan.MAX_MODELS)] = []
    router: dict[str, Any] = {}


class ResourcesTable(Struct, frozen=True, kw_only=True):
    # Those of engines that compute there follow tensor_parallel.
    cpus: plan.Amount | UnsetType = UNSET
    gpus: plan.Amount | UnsetType = UNSET
    custom: dict[str, Any] = {}


class ModelTable(Struct, kw_only=True):
    model: Text
    name: Text | UnsetType = UNSET
    engine: plan.Engine = "native"
    replicas: plan.Count | UnsetType = UNSET
    autoscale: plan.Autoscale | None = None
    resources: ResourcesTable = ResourcesTable()
    tensor_parallel: Annotated[int, Meta(ge=1, le=plan.MAX_RANKS)] = 1
    environment: dict[str, Any] = {}
    options: dict[str, Any] | list[Any] = {}
    drain_timeout: plan.Seconds = 60.0
    wedged_after: plan.SomeSeconds = 20.0
    tokenizer: Text | None = None
    chat_template: Text | None = None
    adapters: tuple[Text, ...] = ()
    resume: bool | UnsetType = UNSET
    api_key_env: Text | None = None
    serves: plan.Name | None = None
    role: plan.Role | None = None


class Mistakes:
    def __init__(self, file: str, lines: Lines) -> None:
        self._file = file
        self._lines = lines
        self._found: dict[tuple[int, str], None] = {}

    def note(self, where: Path, message: str) -> None:
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[: LONGEST_MESSAGE - 3]}..."
        self._found[self._lines.of(where), message] = None

    def line(self, where: Path) -> int:
        return self._lines.of(where)

    def __str__(self) -> str:
        """The first mistakes in the order of their lines, and how many more there are; empty if there are none."""
        lines = [f"{self._file}, line {line}: {message}" for line, message in sorted(self._found)[:MAX_SHOWN]]
        more = len(self._found) - len(lines)
        return "\n".join([*lines, f"There are {more} more mistakes."] if more else lines)


def refuse_unknown(values: object, known: Collection[str], where: Path, mistakes: Mistakes) -> None:
    """Note keys that this table does not have. Only the first get a hint: finding it takes time."""
    if not isinstance(values, dict):
        return
    table = ".".join(part for part in where if isinstance(part, str)) or "the file"
    listed = f"the keys of {table} are {', '.join(known)}"
    for number, key in enumerate(key for key in values if key not in known):
        hint = f"; {nearest(key, sorted(known), listed)}" if number < MAX_SHOWN else ""
        mistakes.note((*where, key), f"{key!r} is not known here{hint}")


def convert(values: dict[str, Any], kind: type[T], where: Path, mistakes: Mistakes) -> T | None:
    """Return the table as a struct; None if it has mistakes, all of which are noted. `values` loses the wrong ones."""
    wrong: set[Path] = set()
    while True:
        try:
            found = msgspec.convert(values, kind)
        except msgspec.ValidationError as error:
            said, path = _located(str(error))
            if missing := _MISSING.fullmatch(said):
                if (*path, missing[1]) not in wrong:
                    mistakes.note((*where, *path), f"{missing[1]} is missing{' in ' + str(path[-1]) if path else ''}")
                if not path:
                    return None
            else:
                key = next(step for step in reversed(path) if isinstance(step, str))
                mistakes.note((*where, *path), explained(key, _at(values, path), said))
            wrong.add(path)
            del _at(values, path[:-1])[path[-1]]
        else:
            return None if wrong else found


def _located(message: str) -> tuple[str, Path]:
    found = _AT.fullmatch(message)
    if found is None:
        return message, ()
    return found[1], tuple(name or int(number) for name, number in _STEP.findall(found[2]))


def _at(values: Any, path: Sequence[str | int]) -> Any:
    for step in path:
        values = values[step]
    return values


def explained(key: str, value: object, said: str) -> str:
    """Return msgspec's complaint about a value in TOML's terms."""
    if key == "engine":
        listed = f"write {', '.join(ENGINES[:-1])} or {ENGINES[-1]}"
        return f"engine is {shown(value)}; {nearest(value, ENGINES, listed) if isinstance(value, str) else listed}"
    said = said.replace(" | null", "").replace("object", "table").replace("array", "list")
    return f"{key} is {shown(value)}: {said[:1].lower()}{said[1:]}{FIXES.get(key, '')}"
