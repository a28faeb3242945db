"""The program of docs/library.md works as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

from tests.chaos.routers import fleet
from tests.docs.pages import ROOT
from tests.events.processes import DEADLINE_S
from tests.replica.serving import MODEL

SIMULATED = ("--engine", "simulated", "--served-model-name", MODEL, "--model", "demo", "--block-size", 16)
PROMPT = list(range(100, 200))
CACHED = 96  # six whole blocks


def test_it_sends_a_prompt_where_it_is_cached(tmp_path: Path) -> None:
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    path = tmp_path / "program.py"
    path.write_text(program)
    with fleet(2, *SIMULATED) as replicas:
        warm = replicas[1]
        assert warm.post("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}).status == 200
        command = [sys.executable, "-W", "error", str(path), *replicas.urls]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env={"PYTHONPATH": str(ROOT)})
        assert (ran.stdout, ran.stderr) == (f"send it to {warm.url}, which has {CACHED} of its tokens\n", "")
