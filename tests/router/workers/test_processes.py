"""Workers that hang are killed and replaced, and all end together; the processes are real."""

import subprocess
import sys
import textwrap
import time

from tests.events.processes import DEADLINE_S

SCRIPT = """
import logging, os, signal, sys, time
from router.workers.processes import Processes

logging.basicConfig(level="INFO", format="%(message)s")

def serve(place, listener, say_alive):
    say_alive()
    os.write(1, b"%d %d\\n" % (place.number, place.replaces))
    if place.number == 1 and not place.replaces:
        signal.pause()
    while True:
        time.sleep(0.05)
        say_alive()

sys.exit(Processes("127.0.0.1", 0, 2, serve, hung_s=1.0).run(lambda listener: None))
"""


def test_a_worker_that_hangs_is_killed_and_another_takes_its_place() -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            began_s = time.monotonic()
            said = [running.stdout.readline().strip() for _ in range(3)]
            assert time.monotonic() - began_s < DEADLINE_S
            assert sorted(said[:2]) == ["0 0", "1 0"]
            assert said[2] == "1 1", "only the one that hangs is replaced"
            running.terminate()
            _, logged = running.communicate(timeout=DEADLINE_S)
        finally:
            running.kill()
    assert logged.count("has hung for 1 s; killing it") == 1
    assert "has ended by signal 9; another one takes its place" in logged


ENDING = """
import os, signal, sys
from router.workers.processes import Processes

def serve(place, listener, say_alive):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    say_alive()
    while True:
        signal.pause()

sys.exit(Processes("127.0.0.1", 0, 16, serve).run(lambda listener: os.kill(os.getpid(), signal.SIGTERM)))
"""


def test_workers_that_end_at_the_same_time_are_no_error() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (ended.returncode, ended.stderr) == (0, "")
