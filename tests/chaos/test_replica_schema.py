"""Generated requests, valid and not, against a running replica: each is answered as its OpenAPI document says.

WARMROUTE_SCHEMA_EXAMPLES says how many are generated for each path (3 by default). Stricter than a reader of the
document: its `default` answer is taken out first, so that a status that it does not name is a failure.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.replicas import Command, command

EXAMPLES = int(os.environ.get("WARMROUTE_SCHEMA_EXAMPLES", "3"))
LIMIT_S = 400 + EXAMPLES
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(LIMIT_S + 30)]

FAST = (
    *("--set=simulated_prefill_tokens_per_s=1e8", "--set=simulated_decode_tokens_per_s=1e6"),
    *("--set=simulated_batch_slowdown=0", "--set=simulated_step_overhead=0", "--log-level", "warning"),
)
# What a schema cannot say is refused although the schema allows it: ids beyond the vocabulary, text that is no JSON.
LEFT_OUT = "positive_data_acceptance"


def test_generated_requests_are_answered_as_documented(tmp_path: Path) -> None:
    with command(*FAST) as served:
        document = strict(served.get("/openapi.json").json)
        done = generate(served, document, tmp_path)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
        operations = sum(map(len, document["paths"].values()))
        assert f"{operations} passed" in done.stdout
        print(done.stdout[-400:])
        served.wait_idle()
        assert served.post("/reset_prefix_cache").status == 200
        assert not any("Traceback" in line or " ERROR " in line for line in served.err), served.err


def test_an_answer_that_is_not_documented_is_found(tmp_path: Path) -> None:
    """The negative control."""
    with command(*FAST) as served:
        document = strict(served.get("/openapi.json").json)
        document["paths"] = {"/v1/completions": document["paths"]["/v1/completions"]}
        del document["paths"]["/v1/completions"]["post"]["responses"]["400"]
        done = generate(served, document, tmp_path, "--phases=fuzzing")
    assert done.returncode == 1
    assert "400" in done.stdout and "Undocumented" in done.stdout, done.stdout[-3000:]


def strict(document: Any) -> Any:
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("default", None)
    return document


def generate(served: Command, document: Any, folder: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    (folder / "openapi.json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", f"--url={served.url}"]
    options = [f"--max-examples={EXAMPLES}", "--seed=1", "--generation-database=none"]
    checks = ["--checks=all", f"--exclude-checks={LEFT_OUT}", "--request-timeout=20"]
    return subprocess.run(
        [*command, *options, *checks, *more], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
