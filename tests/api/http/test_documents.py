"""Servers start without FastAPI, which takes as long to import as all else: only their documents need it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("server", ["replica.server", "router.process.server"])
def test_a_server_starts_without_what_only_its_document_needs(server: str) -> None:
    code = f"import sys, {server}; print(*(name in sys.modules for name in ('fastapi', 'pydantic', 'starlette')))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True).stdout
    assert told == "False False True\n"
