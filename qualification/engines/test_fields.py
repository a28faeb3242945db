"""The list of what engines read: complete, and made as it says."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BaseModel, Field

from qualification.engines.engine import VARIABLE, missing
from qualification.engines.fields import LISTED, found_in, headers_in, names_in


@dataclass
class Inner:
    kv_peer: str | None = None


class Brother(BaseModel):
    model: str
    wanted: list[Annotated[str | None, Field()]] = []
    inner: dict[str, list["Inner"]] | None = None
    spelled: int = Field(alias="prefillHost")
    again: "Brother | None" = None


def test_fields_are_found_wherever_they_stand() -> None:
    found = names_in(Brother, (__name__.partition(".")[0],))
    assert found == {"model", "wanted", "inner", "inner.kv_peer", "spelled", "prefillHost", "again"}


def test_headers_are_found_however_they_are_named() -> None:
    source = """
RANK = "Rank-Wanted"
TRACE_HEADERS = ["traceparent"]
OVERRIDES = {"x-override-host": ("host", str)}
def read(raw_request, other):
    raw_request.headers.get("a", "")
    return raw_request.headers.get(RANK), raw_request.headers["peer"], other.get("body")
"""
    assert headers_in([source]) == {"rank-wanted", "traceparent", "x-override-host", "peer", "a"}


@pytest.mark.live
@pytest.mark.timeout(600)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_the_list_is_that_of_the_installed_engines() -> None:
    assert found_in(Path(os.environ[VARIABLE])) == json.loads(LISTED.read_text()), (
        "python -m qualification.engines.fields"
    )
