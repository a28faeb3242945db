"""Workers that hang are killed and replaced, and all end together; the processes are real."""

import subprocess
import sys
import textwrap
import time

import pytest

from tests.events.processes import DEADLINE_S

SCRIPT = """
import logging, os, signal, sys, time
from router.workers.processes import Processes

logging.basicConfig(level="INFO", format="%(message)s")

def serve(place, listener, say_alive):
    say_alive(0)
    os.write(1, b"%d %d\\n" % (place.number, place.joins))
    if place.number == 1 and not place.joins:
        signal.pause()
    while True:
        time.sleep(0.05)
        say_alive(0)

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
    say_alive(0)
    while True:
        signal.pause()

sys.exit(Processes("127.0.0.1", 0, 16, serve).run(lambda listener: os.kill(os.getpid(), signal.SIGTERM)))
"""


def test_workers_that_end_at_the_same_time_are_no_error() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (ended.returncode, ended.stderr) == (0, "")


GROWING = """
import os, sys, time
from router.workers.processes import Processes

idle_cpus, percent = float(sys.argv[1]), int(sys.argv[2])

def serve(place, listener, say_alive):
    os.write(1, b"%d %d %d\\n" % (place.number, place.joins, place.serving[0]))
    for beat in range(20):
        say_alive(percent if beat else 0)
        time.sleep(0.02)
    os.write(1, b"%d serve\\n" % place.serving[0])
    os.kill(os.getppid(), 15)
    time.sleep(60)

sys.exit(Processes("127.0.0.1", 0, 2, serve, 1, idle_cpus=lambda: idle_cpus).run(lambda listener: None))
"""


@pytest.mark.parametrize(
    ("idle_cpus", "percent", "said"),
    [(1, 90, ["0 0 1", "1 1 1", "2 serve"]), (1, 40, ["0 0 1", "1 serve"]), (0.1, 90, ["0 0 1", "1 serve"])],
    ids=["busy", "not busy", "no processor is idle"],
)
def test_another_worker_starts_when_all_are_busy_and_the_machine_is_not(
    idle_cpus: float, percent: int, said: list[str]
) -> None:
    command = [sys.executable, "-c", GROWING, str(idle_cpus), str(percent)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert sorted(set(ended.stdout.splitlines())) == said, ended.stderr
