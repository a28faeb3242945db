"""Traces that others have published: no part of the project, and there on some machines only."""

from pathlib import Path

import pytest

from lab.trace.formats import read_trace
from lab.trace.requests import Trace

FOLDER = Path(__file__).parents[3] / "shared" / "traces"


def published(name: str) -> Trace:
    path = FOLDER / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return read_trace(path)
