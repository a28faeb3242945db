"""Whatever the OpenAPI document allows, and a lot that it does not, is answered as the document says."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.replica.serving import MODEL, Replica

CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
]


@pytest.mark.timeout(180)
def test_no_request_makes_the_server_fail(served: Replica, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json"]
    options = ["--max-examples=5", "--seed=1", "--generation-database=none", f"--checks={','.join(CHECKS)}"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    served.wait_idle()


def test_the_document_names_the_model_that_is_served(served: Replica) -> None:
    document = served.get("/openapi.json").json
    for request in ("CompletionRequest", "ChatRequest"):
        assert document["components"]["schemas"][request]["properties"]["model"] == {"enum": [MODEL]}


def test_every_path_documents_its_errors(served: Replica) -> None:
    paths = served.get("/openapi.json").json["paths"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = paths[path]["post"]["responses"]
        assert set(responses) >= {"200", "400", "401", "404", "413", "429", "500", "503"}
        assert "text/event-stream" in responses["200"]["content"]
        assert paths[path]["post"]["requestBody"]["required"]
