"""docs/compatibility.md says what a router and a replica really do with each field."""

import json
from pathlib import Path

import pytest

from qualification.compatibility.classify import DONE, IGNORED, REFUSED, Outcome
from qualification.compatibility.page import PAGE, _clients, _table, page
from qualification.compatibility.sdk import hints, kinds, minimal


@pytest.mark.live
@pytest.mark.timeout(180)
def test_the_page_says_what_is_done() -> None:
    assert PAGE.read_text() == page(), "run `python -m qualification.compatibility.page`"


def test_a_field_with_another_outcome_would_be_noticed() -> None:
    before, after = ("".join(_table({"user": {"chat": Outcome(what, "x")}})) for what in (IGNORED, DONE))
    assert before != after


def test_fields_and_kinds_come_from_the_clients_types() -> None:
    from anthropic.types import ContentBlockParam

    assert {"model", "messages", "tools", "logit_bias"} <= hints("chat").keys()
    assert {"input", "previous_response_id"} <= hints("responses").keys()
    assert {"mcp_servers", "thinking"} <= hints("messages").keys() and "betas" not in hints("messages")
    assert dict(kinds(ContentBlockParam))["tool_use"] == {"type": "tool_use", "id": "x", "name": "x", "input": {}}


def test_an_unknown_type_is_an_empty_object() -> None:
    assert minimal(None) == {} and minimal(dict[str, int]) == {} and minimal(list[str]) == ["x"]


@pytest.mark.parametrize("what", [DONE, REFUSED])
def test_clients_are_listed_if_they_have_been_run(what: str, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    assert list(_clients(results)) == []
    results.write_text(json.dumps([{"client": what, "version": "1.2", "passed": 3, "checks": 4, "date": "2026-11-23"}]))
    assert list(_clients(results))[1] == f"| {what} | 1.2 | 4 | 3 | 2026-11-23 |\n"
