"""aider, over the chat API: it has no tools, and writes files from the text of an answer."""

import os
import subprocess
import sys
from pathlib import Path

OFFLINE = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
MODEL = {"OPENAI_API_BASE": os.environ["OPENAI_BASE_URL"], "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
OPTIONS = (
    *("--model", "openai/demo", "--edit-format", "whole", "--yes-always", "--no-auto-commits", "--no-pretty"),
    *("--no-analytics", "--no-check-update", "--no-show-model-warnings", "--no-show-release-notes"),
    *("--no-fancy-input", "--no-detect-urls", "--map-tokens", "0"),
)
SAID = "Write made.txt as a whole.\nIs it there?\n/exit\n"


def test_a_file_is_written_and_talked_about(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    command = [sys.executable, "-m", "aider", *OPTIONS, "made.txt"]
    told = subprocess.run(
        command, cwd=tmp_path, env=os.environ | OFFLINE | MODEL, input=SAID, capture_output=True, text=True, timeout=120
    )
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "made.txt").read_text() == "hello\n"
    assert "Yes, it is there." in told.stdout
