"""AIPerf: small benchmarks with synthetic prompts from the model's tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODEL, URL = os.environ["MODEL"], os.environ["ROUTER_URL"]
AIPERF = str(Path(sys.executable).with_name("aiperf"))
REQUESTS = 6
# Told to stay offline, it takes every tokenizer for one of the hub, a folder too.
VARIABLES = {name: value for name, value in os.environ.items() if not name.endswith("OFFLINE")}


def profile(folder: Path, *more: str) -> Any:
    command = [
        *(AIPERF, "profile", "--model", MODEL, "--url", URL, "--api-key", os.environ["OPENAI_API_KEY"]),
        *("--tokenizer", os.environ["MODEL_DIR"]),
        *("--request-count", str(REQUESTS), "--concurrency", "2", "--prompt-input-tokens-mean", "40"),
        *("--prompt-output-tokens-mean", "12", "--ui", "none", "--no-gpu-telemetry", "--random-seed", "1"),
        *("--output-artifact-dir", str(folder), *more),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=VARIABLES)
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    [report] = folder.rglob("profile_export_aiperf.json")
    return json.loads(report.read_text())


def check(report: Any) -> None:
    assert report["request_count"]["avg"] == REQUESTS
    assert not report.get("error_summary")


@pytest.mark.parametrize("kind", ["chat", "completions", "responses", "messages"])
def test_stream(tmp_path: Path, kind: str) -> None:
    check(profile(tmp_path, "--endpoint-type", kind, "--streaming"))


def test_without_streaming(tmp_path: Path) -> None:
    check(profile(tmp_path, "--endpoint-type", "chat"))


def test_usage_in_every_chunk(tmp_path: Path) -> None:
    counted = ("--use-server-token-count", "--per-chunk-usage")
    check(profile(tmp_path, "--endpoint-type", "chat", "--streaming", *counted))


def test_cache_reset_and_metrics(tmp_path: Path) -> None:
    metrics = ("--server-metrics", f"{URL}/metrics")
    check(profile(tmp_path, "--endpoint-type", "chat", "--streaming", "--reset-kv-cache", *metrics))
