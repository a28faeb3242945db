"""Progress in a terminal while a load runs."""

import os
import pty
import subprocess
import sys

from tests.events.processes import DEADLINE_S
from tests.lab.bench.endpoints import endpoint


def shown(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Output of the command on a terminal of its own, which is its standard error."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fleet", "bench", *arguments]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120"} | (environment or {})
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=env) as process:
        os.close(theirs)
        drawn = b""
        try:
            while piece := os.read(ours, 65536):
                drawn += piece
        except OSError:  # the last one has closed it
            pass
        assert process.wait(DEADLINE_S) == 0
    os.close(ours)
    return drawn.decode(errors="replace")


def test_a_terminal_shows_how_far_it_is() -> None:
    with endpoint() as server:
        assert " of 40" in shown(server.url, "--requests", "40", "--concurrency", "2")


def test_where_nothing_can_be_drawn_over_nothing_is_drawn() -> None:
    with endpoint() as server:
        assert shown(server.url, "--requests", "5", environment={"TERM": "dumb"}) == ""
