"""`warmroute events view` as its users run it."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.events.processes import DEADLINE_S

READY = re.compile(r"http://\S+")


@contextmanager
def viewing(path: Path, *options: object) -> Iterator[str]:
    """Its address; Ctrl-C ends it quietly."""
    command = [sys.executable, "-m", "fleet", "events", "view", str(path), *map(str, options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = READY.search(process.stdout.readline())
        assert found is not None, process.communicate()
        yield found[0]
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, complaints) == (0, "")
    finally:
        process.kill()
        process.communicate()
