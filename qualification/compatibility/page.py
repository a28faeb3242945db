"""`python -m qualification.compatibility.page`: write docs/compatibility.md anew, from what servers do."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qualification.compatibility.classify import (
    DONE,
    IGNORED,
    PASSED_ON,
    REFUSED,
    Outcome,
    outcomes,
    outcomes_elsewhere,
    outcomes_of_kinds,
    served,
)
from qualification.compatibility.probes import BASES
from qualification.compatibility.sdk import CLIENTS, IN_HEADERS, hints

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
RESULTS = ROOT / "qualification" / "clients" / "results.json"
MAX_SHOWN = 48  # characters of a value

HEAD = """\
# Compatibility

A program writes this page: `python -m qualification.compatibility.page` sends every field to a router, and
`python -m qualification compatibility` fails if the page says anything else. The fields are those of the official
clients' own types ({clients}), and those that replicas read besides, most of them vLLM's.

## Fields

Through a router, at replicas of ours:

| word | meaning |
| --- | --- |
| done | the answer with the field differs from the one without it, in its words or its shape; or the cache does |
| told | accepted; only the answer's copy of the request shows it |
| ignored | accepted, and changes nothing |
| refused | status 400, which names the field; null and values that ask for nothing are accepted |
| - | no field of this API; ignored, as all unknown fields are |

The value is the one that was sent; `...` stands for a long one, or for one that differs between the APIs. Fields in
italics are in no client's types: send them as `extra_body`.

"""
ELSEWHERE = """
## In front of another engine

The router passes these fields, and the kinds of items below, on to vLLM, SGLang or another engine as they came: {count}
requests arrived there as the client wrote them{but}. What becomes of them is the engine's affair.

## Kinds of items

| API | list | done | ignored | refused |
| --- | --- | --- | --- | --- |
"""
CLIENTS_HEAD = """
## Clients

| client | version | checked | passed | date |
| --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The whole page, which takes seconds."""
    with TemporaryDirectory() as folder, served(Path(folder)) as running:
        fields, kinds = outcomes(running), outcomes_of_kinds(running)
    clients = " and ".join(f"`{name}` {version(name)}" for name in CLIENTS)
    lines = [HEAD.format(clients=clients), *_table(fields)]
    elsewhere = asyncio.run(outcomes_elsewhere())
    others = [f"{label} ({what})" for what, labels in elsewhere.items() if what != PASSED_ON for label in labels]
    but = f", but for {', '.join(others)}" if others else ""
    lines.append(ELSEWHERE.format(count=len(elsewhere[PASSED_ON]), but=but))
    lines += [
        f"| {api} | `{place}` | {' | '.join(_listed(found, what) for what in (DONE, IGNORED, REFUSED))} |\n"
        for (api, place), found in kinds.items()
    ]
    return "".join([*lines, *_clients(RESULTS)])


def _table(fields: Mapping[str, Mapping[str, Outcome]]) -> Iterator[str]:
    yield f"| field | value | {' | '.join(BASES)} |\n" + "| --- " * (2 + len(BASES)) + "|\n"
    named = {name for api in BASES for name in hints(api)} | IN_HEADERS
    for name, found in sorted(fields.items()):
        values = {_value(one.sent) for one in found.values()}
        value = f"`{values.pop()}`" if len(values) == 1 else "`...`"
        words = [found[api].what if api in found else "-" for api in BASES]
        field = f"`{name}`" if name in named else f"*`{name}`*"
        yield f"| {field} | {value} | {' | '.join(words)} |\n"


def _value(sent: Any) -> str:
    shown = json.dumps(sent)
    return "..." if len(shown) > MAX_SHOWN or "resp_" in shown else shown.replace("|", "\\|")


def _listed(found: Mapping[str, list[str]], what: str) -> str:
    return ", ".join(f"`{name}`" for name in found.get(what, ()))


def _clients(results: Path) -> Iterator[str]:
    """The section of clients: nothing while nobody has run them."""
    if not results.is_file():
        return
    yield CLIENTS_HEAD
    for one in json.loads(results.read_text()):
        passed, checks = one["passed"], one["checks"]
        yield f"| {one['client']} | {one['version']} | {checks} | {passed} | {one['date']} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
