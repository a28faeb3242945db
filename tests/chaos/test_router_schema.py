"""Generated requests, valid and not, against a running router: each is answered as its OpenAPI document says.

WARMROUTE_SCHEMA_EXAMPLES says how many are generated for each path (2 by default).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.replicas import command
from tests.chaos.routers import RouterProcess, router
from tests.chaos.test_replica_schema import FAST, LEFT_OUT, strict
from tests.events.processes import wait_until

EXAMPLES = int(os.environ.get("WARMROUTE_SCHEMA_EXAMPLES", "2"))
LIMIT_S = 400 + 2 * EXAMPLES
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(LIMIT_S + 30)]

ADDS = "POST /replicas"  # the router would look for whatever hosts are made up


@pytest.fixture(scope="module")
def served() -> Iterator[RouterProcess]:
    with command(*FAST) as replica, router("--replica", replica.url, "--log-level", "warning") as running:
        yield running


def test_generated_requests_are_answered_as_documented(served: RouterProcess, tmp_path: Path) -> None:
    document = strict(served.get("/openapi.json").json)
    assert "/v1/chat/completions" in document["paths"]
    done = generate(served, document, tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    print(done.stdout[-600:])
    wait_until(served.is_ready, "the router is ready still")
    assert not any("Traceback" in line or " ERROR " in line for line in served.err), served.err


def test_an_answer_that_is_not_documented_is_found(served: RouterProcess, tmp_path: Path) -> None:
    """The negative control."""
    document = strict(served.get("/openapi.json").json)
    document["paths"] = {"/v1/completions": document["paths"]["/v1/completions"]}
    del document["paths"]["/v1/completions"]["post"]["responses"]["400"]
    done = generate(served, document, tmp_path, "--phases=fuzzing")
    assert done.returncode == 1
    assert "400" in done.stdout and "Undocumented" in done.stdout, done.stdout[-3000:]


def generate(served: RouterProcess, document: Any, folder: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    (folder / "openapi.json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", f"--url={served.url}"]
    options = [f"--max-examples={EXAMPLES}", "--seed=1", "--generation-database=none", f"--exclude-name={ADDS}"]
    checks = ["--checks=all", f"--exclude-checks={LEFT_OUT}", "--request-timeout=20"]
    return subprocess.run(
        [*command, *options, *checks, *more], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
