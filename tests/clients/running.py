"""One client's program: run beside a router, with a time limit, in an environment without settings of the user's."""

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.clients import python_clients
from tests.clients.rows import CLIENTS
from tests.clients.serving import KEY, MODEL, Serving
from tests.clients.verdicts import Check, Verdict, read

VARIABLE = "WARMROUTE_CLIENTS"  # names the folder with the environments
LANGUAGES = {"python": python_clients}
OFFLINE = {"DO_NOT_TRACK": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def run(name: str, folder: Path, serving: Serving) -> Verdict:
    """Run a client's checks; a program that reports none, and each fault in a server's log, is a failed check."""
    client = CLIENTS[name]
    kit = LANGUAGES[client.language]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        report = Path(home) / "report.xml"
        said = _output(kit.command(folder, name, report), variables(serving, home), client.limit_s)
        checks = read(report) if report.exists() else ()
    if not checks:
        checks = (Check("program", error=f"no report: {said[-2000:]}"),)
    if faults := serving.new_faults():
        checks += (Check("logs of the servers", error=faults[0]),)
    return Verdict(name, kit.version(name, client), checks, time.monotonic() - began_s)


def variables(serving: Serving, home: str) -> dict[str, str]:
    """The environment of a program: addresses by their usual names, and nothing that this machine's user has set."""
    return {
        **OFFLINE,
        "HOME": home,
        "LANG": "C.UTF-8",
        "PATH": os.environ["PATH"],
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "ROUTER_URL": serving.url,
        "MODEL": MODEL,
        "MODEL_DIR": str(serving.model),
        "OPENAI_BASE_URL": f"{serving.url}/v1",
        "OPENAI_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": serving.url,
        "ANTHROPIC_API_KEY": KEY,
    }


def _output(command: list[str], environment: dict[str, str], limit_s: float) -> str:
    """Run a program in its home; end it with all of its processes."""
    how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=environment, cwd=environment["HOME"], **how) as process:
        try:
            said: str = process.communicate(timeout=limit_s)[0]
            return said
        except subprocess.TimeoutExpired:
            return f"it ran longer than {limit_s:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
