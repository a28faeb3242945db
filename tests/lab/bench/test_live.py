"""Progress in a terminal while a load runs."""

import os
import pty
import subprocess
import sys

from tests.events.processes import DEADLINE_S
from tests.lab.bench.endpoints import endpoint


def shown(url: str, terminal: str) -> str:
    """Output of the command on a terminal of its own, which is its standard error."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fleet", "bench", url, "--requests", "40"]
    env = os.environ | {"TERM": terminal, "COLUMNS": "120"}
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


def test_a_terminal_on_which_can_be_drawn_shows_how_far_it_is() -> None:
    with endpoint() as server:
        assert " of 40" in shown(server.url, "xterm")
        assert shown(server.url, "dumb") == ""
