"""A job that crashes, hangs or fails in its own process is reported, and the next one runs."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen

import pytest

from tests.events.processes import wait_until
from tests.gpu.apart import Ended, Job, Said, Say, apart
from tests.processes import is_alive

LONG_S = 50.0
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of threads that are pytest's own


def outcomes(jobs: Sequence[Job], limit_s: float = LONG_S, at_once: int = 1) -> tuple[list[object], list[str]]:
    said: list[object] = []
    ended = [""] * len(jobs)
    for number, message in apart(jobs, limit_s, at_once):
        match message:
            case Said(what):
                said.append(what)
            case Ended(error):
                ended[number] = error or "well"
    return said, ended


def well(say: Say) -> None:
    say("one")
    say("two")


def fails(say: Say) -> None:
    say("before")
    raise ValueError("it is broken")


def dies(_: Say) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(_: Say) -> None:
    signal.pause()


def test_jobs_say_what_they_find_and_end_well() -> None:
    assert outcomes([well, well]) == (["one", "two", "one", "two"], ["well", "well"])


def test_a_job_that_fails_is_told_of_with_its_reason() -> None:
    said, ended = outcomes([fails, well])
    assert said == ["before", "one", "two"]
    assert ended[0].strip().endswith("ValueError: it is broken") and ended[1] == "well"


def test_a_dying_job_takes_no_other_with_it() -> None:
    said, ended = outcomes([dies, well])
    assert said == ["one", "two"] and ended == ["its process died with status -9", "well"]


def test_those_that_are_not_done_in_time_are_cut_off() -> None:
    said, ended = outcomes([well, hangs, well], limit_s=1.0)
    assert said == ["one", "two"] and ended == ["well", "cut off after 1 s", "cut off after 1 s"]


def test_jobs_run_side_by_side(tmp_path: Path) -> None:
    """Each waits for the other."""
    pipes = [tmp_path / "there", tmp_path / "back"]
    for pipe in pipes:
        os.mkfifo(pipe)

    def asks(say: Say) -> None:
        pipes[0].write_text("here")
        say(pipes[1].read_text())

    def answers(_: Say) -> None:
        pipes[1].write_text(pipes[0].read_text() + " and there")

    assert outcomes([asks, answers], at_once=2) == (["here and there"], ["well", "well"])


def test_what_a_leading_job_has_started_ends_with_it() -> None:
    def leaves_one(say: Say) -> None:
        say(Popen(["sleep", "1000"]).pid)

    def leaves_one_and_hangs(say: Say) -> None:
        leaves_one(say)
        hangs(say)

    for job in (leaves_one, leaves_one_and_hangs):
        pids = [message.what for _, message in apart([job], 2.0, leads=True) if isinstance(message, Said)]
        wait_until(lambda pids=pids: not any(map(is_alive, pids)), "the sleeper is gone")  # type: ignore[misc]
