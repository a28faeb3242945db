"""Generated requests, valid and not, against a replica and a router: each is answered as its OpenAPI document says.

Another project's suite then judges answers by the schemas of those whose APIs they are.

WARMROUTE_SCHEMA_EXAMPLES says how many are generated for each path, and adds those at the edges of every schema.
Without it there are few. Stricter than a reader of the document: its `default` answer is taken out first, so that a
status that it does not name is a failure.
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
from tests.chaos.routers import router
from tests.events.processes import wait_until
from tests.replica.serving import Replica

EXAMPLES = os.environ.get("WARMROUTE_SCHEMA_EXAMPLES")
HOW_MANY = (f"--max-examples={EXAMPLES}",) if EXAMPLES else ("--max-examples=4", "--phases=fuzzing")
LIMIT_S = 420
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(LIMIT_S + 30)]

FAST = (
    *("--set=simulated_prefill_tokens_per_s=1e8", "--set=simulated_decode_tokens_per_s=1e6"),
    *("--set=simulated_batch_slowdown=0", "--set=simulated_step_overhead=0", "--log-level", "warning"),
)
# What a schema cannot say is refused although the schema allows it: ids beyond the vocabulary, text that is no JSON.
LEFT_OUT = "positive_data_acceptance"
ADDS = "POST /replicas"  # the router would look for whatever hosts are made up


CALL = '<tool_call>{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}</tool_call>'
# Per API of llm-comply, what it finds to be missing: the model sees no images, and conversations are not compacted.
SUITES = {
    "openai-chat": {"chat-image-input"},
    "open-responses": {"image-input", "compact-response", "compact-missing-model"},
    "anthropic": {"anth-image-input"},
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Replica, Replica]]:
    answers = tmp_path_factory.mktemp("simulated") / "answers.jsonl"
    answers.write_text(json.dumps({"tool": "get_weather", "text": CALL}))
    simulated = ("--simulated-answers", str(answers), "--tool-call-parser", "hermes")
    with command(*FAST, *simulated) as replica, router("--replica", replica.url, "--log-level", "warning") as running:
        yield replica, running


@pytest.mark.parametrize("number", [0, 1], ids=["replica", "router"])
def test_generated_requests_are_answered_as_documented(
    both: tuple[Replica, Replica], number: int, tmp_path: Path
) -> None:
    served = both[number]
    document = strict(served.get("/openapi.json").json)
    done = generate(served, document, tmp_path, *HOW_MANY)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    operations = sum(map(len, document["paths"].values())) - number  # without ADDS
    assert f"{operations} passed" in done.stdout, done.stdout[-1000:]
    print(done.stdout[-600:])
    wait_until(lambda: served.get("/ready").status == 200, "it is ready still")
    assert not any("Traceback" in line or " ERROR " in line for line in served.err), served.err


def test_an_answer_that_is_not_documented_is_found(both: tuple[Replica, Replica], tmp_path: Path) -> None:
    """The negative control."""
    document = strict(both[0].get("/openapi.json").json)
    document["paths"] = {"/v1/completions": document["paths"]["/v1/completions"]}
    del document["paths"]["/v1/completions"]["post"]["responses"]["400"]
    done = generate(both[0], document, tmp_path, "--max-examples=4", "--phases=fuzzing")
    assert done.returncode == 1
    assert "400" in done.stdout and "Undocumented" in done.stdout, done.stdout[-3000:]


@pytest.mark.parametrize("suite", SUITES)
def test_answers_have_what_the_schemas_of_their_apis_require(both: tuple[Replica, Replica], suite: str) -> None:
    program = "import sys; from llm_comply.cli import main; sys.exit(main())"
    asked = (f"--base-url={both[1].url}/v1", "--model=demo", "--api-key=none", f"--format={suite}", "--json")
    done = subprocess.run(
        [sys.executable, "-c", program, *asked], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    results = json.loads(done.stdout[done.stdout.index("{") :])["results"]
    assert {each["id"] for each in results if each["status"] == "failed"} == SUITES[suite], done.stdout
    assert sum(each["status"] == "passed" for each in results) >= 7


def strict(document: Any) -> Any:
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("default", None)
    return document


def generate(served: Replica, document: Any, folder: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    (folder / "openapi.json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", f"--url={served.url}"]
    options = ["--seed=1", "--generation-database=none", f"--exclude-name={ADDS}"]
    checks = ["--checks=all", f"--exclude-checks={LEFT_OUT}", "--request-timeout=20"]
    return subprocess.run(
        [*command, *options, *checks, *more], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
