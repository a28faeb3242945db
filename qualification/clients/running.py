"""One client's program: run beside a router, with a time limit, in an environment without settings of the user's."""

import os
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from qualification.clients import node_clients, python_clients, scripted, serving
from qualification.clients.rows import CLIENTS
from qualification.clients.serving import KEY, MODEL, Serving
from qualification.clients.verdicts import Check, Verdict, read

VARIABLE = "WARMROUTE_CLIENTS"  # names the folder with the environments
LANGUAGES: dict[str, Any] = {"python": python_clients, "node": node_clients}
SERVED = {"model": serving.served, "script": scripted.served}
OFFLINE = {"DO_NOT_TRACK": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


class Servings:
    """The servers that clients need, each started for the first of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._running: dict[str, Serving] = {}

    def of(self, name: str) -> Serving:
        """Return the servers for this client."""
        kind = CLIENTS[name].served_by
        if kind not in self._running:
            self._running[kind] = self._stack.enter_context(SERVED[kind](self._folder / "model"))
        return self._running[kind]


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
    return Verdict(name, kit.version(name, client), (*checks, *serving.new_checks()), time.monotonic() - began_s)


def variables(serving: Serving, home: str) -> dict[str, str]:
    """The environment of a program: addresses by their usual names, and nothing that this machine's user has set."""
    return {
        **OFFLINE,
        "HOME": home,
        "TMPDIR": home,
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
