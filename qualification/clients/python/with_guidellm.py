"""GuideLLM: small benchmarks with synthetic prompts from the model's tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODEL, URL, KEY = os.environ["MODEL"], os.environ["ROUTER_URL"], os.environ["OPENAI_API_KEY"]
GUIDELLM = str(Path(sys.executable).with_name("guidellm"))
REQUESTS = 6
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses"]


def benchmark(folder: Path, backend: str, profile: str) -> Any:
    report = folder / "report.json"
    command = [
        *(GUIDELLM, "run", "--backend", f"kind=openai_http,target={URL},api_key={KEY},model={MODEL},{backend}"),
        *("--profile", profile, "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={os.environ['MODEL_DIR']}"),
        *("--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=12"),
        *("--output", f"kind=json,path={report}", "--disable-console"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    return json.loads(report.read_text())


@pytest.mark.parametrize("path", PATHS)
def test_synchronous(tmp_path: Path, path: str) -> None:
    [done] = benchmark(tmp_path, f"request_format={path}", "kind=synchronous")["benchmarks"]
    assert done["requests"]["errored"] == [] and len(done["requests"]["successful"]) == REQUESTS


def test_concurrent(tmp_path: Path) -> None:
    [done] = benchmark(tmp_path, f"request_format={PATHS[0]}", "kind=concurrent,streams=3")["benchmarks"]
    assert done["requests"]["errored"] == [] and len(done["requests"]["successful"]) == REQUESTS


def test_without_streaming(tmp_path: Path) -> None:
    [done] = benchmark(tmp_path, f"request_format={PATHS[0]},stream=false", "kind=synchronous")["benchmarks"]
    assert done["requests"]["errored"] == [] and len(done["requests"]["successful"]) == REQUESTS
