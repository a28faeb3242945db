"""Hostile constraints are refused in time, and harm nobody else. The child is a real process."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from api.errors import ApiError
from api.openai.constraints import Asked, Constraint, Kind
from replica.grammar import checker as checking
from replica.grammar.checker import Checker
from tests.replica.grammar.constraints import KINDS, packed, schema

HANGS = Constraint("grammar", "start: T\nT: /[a-z]*/ & ~/(.*a.{20}.*)/ & /(.*b.{20}.*)/")
CRASHES = Constraint(
    "grammar", "start: r0\n" + "\n".join(f'r{i}: r{i + 1} | "a"' for i in range(2000)) + '\nr2000: "b"'
)


def deep(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


@pytest.fixture
async def checker() -> AsyncIterator[Checker]:
    own = Checker(packed, limit_s=2.0)
    yield own
    await own.close()


@pytest.fixture
async def patient() -> AsyncIterator[Checker]:
    """It reaches a limit of size before that of time, however busy the machine is."""
    own = Checker(packed, limit_s=40.0)
    yield own
    await own.close()


async def reason(checker: Checker, constraint: Constraint) -> str:
    with pytest.raises(ApiError) as caught:
        await checker.check(Asked(constraint, "guided_json"))
    assert (caught.value.status, caught.value.param) == (400, "guided_json")
    return caught.value.message


async def test_each_kind_is_accepted_and_a_mistake_is_named(checker: Checker) -> None:
    for constraint in KINDS.values():
        await checker.check(Asked(constraint, "x"))
    wrong = schema({"type": "object", "properties": {"a": {"type": "strin"}}})
    assert await reason(checker, wrong) == "guided_json cannot be compiled: Invalid type: strin"


async def test_what_hangs_or_crashes_the_compiler_is_refused_and_others_go_on(checker: Checker) -> None:
    assert "takes more than 2 s" in await reason(checker, HANGS)
    assert checker.reached == {"time": 1}
    await checker.check(Asked(KINDS["schema"], "x"))
    assert "nested too deeply" in await reason(checker, CRASHES)
    assert checker.reached == {"time": 1, "size": 1}
    await checker.check(Asked(KINDS["regex"], "x"))


COSTLY: list[tuple[Kind, str, str | None]] = [
    ("regex", "((a{1000}){1000}){1000}", "size"),
    ("json_schema", '{"type":"integer","multipleOf":999983,"minimum":0,"maximum":1000000000000000}', "size"),
    ("json_schema", deep(2000), "size"),
    ("choice", json.dumps([f"choice {number}" for number in range(4000)]), "size"),
    ("json_schema", '{"$defs":{"a":{"allOf":[{"$ref":"#/$defs/a"}]}},"$ref":"#/$defs/a"}', None),
    ("json_schema", '{"$ref":"http://127.0.0.1:1/schema"}', None),
    ("grammar", "start: <[5]>" * 1000, None),
]


async def test_what_costs_too_much_is_refused_and_counted(patient: Checker) -> None:
    counted = Counter[str]()
    for kind, text, limit in COSTLY:
        assert "cannot be compiled" in await reason(patient, Constraint(kind, text)), text[:99]
        counted.update([limit] if limit else [])
        assert patient.reached == counted, text[:99]


async def test_a_constraint_is_tried_once(checker: Checker) -> None:
    await asyncio.gather(*(checker.check(Asked(KINDS["schema"], "x")) for _ in range(20)))
    child = checker._child
    assert child is not None
    child.kill()
    await child.wait()
    await checker.check(Asked(KINDS["schema"], "x"))  # which needs no child
    assert checker._child is child


async def test_a_child_that_was_ended_is_no_fault_of_the_constraint(checker: Checker) -> None:
    await checker.check(Asked(KINDS["schema"], "x"))
    child = checker._child
    assert child is not None
    child.kill()
    await checker.check(Asked(KINDS["regex"], "x"))
    assert checker._child is not child


async def test_only_so_many_wait(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MAX_WAITING", 2)
    asked = [Asked(Constraint("regex", str(number)), "x") for number in range(4)]
    found: list[Any] = await asyncio.gather(*(map(checker.check, asked)), return_exceptions=True)
    assert [getattr(one, "status", 200) for one in found] == [200, 200, 429, 429]
    assert checker.reached == {"waiting": 2}
