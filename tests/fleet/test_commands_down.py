"""`warmroute down` against real processes that end like `warmroute up`."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from fleet.commands import down as down_module
from fleet.commands.addresses.local_fleets import LocalFleet, is_running, process_started, record_fleet, running_fleets
from fleet.commands.down import down
from tests.fleet.scripted import Script, calm, model, refusal, replica, run, serving, view

pytestmark = pytest.mark.usefixtures("noted_in")

UP = """
import os, signal, sys
from signal import SIGHUP, SIGUSR1
from fleet.commands.addresses.local_fleets import LocalFleet, record_fleet, remove_record, process_started
port, controller, number, folder = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
fleet = LocalFleet(
    port=port, pid=os.getpid(), started=process_started(os.getpid()), controller=controller, folders=(folder,),
    key="secret", found=sys.argv[5:] == ["found"])
signal.pthread_sigmask(signal.SIG_BLOCK, [SIGHUP, SIGUSR1])
record_fleet(fleet)
print("ready", flush=True)
while signal.sigwait([SIGHUP, SIGUSR1]) != number:
    print("asked", flush=True)
remove_record(fleet)
"""
NOBODY = "http://127.0.0.1:9"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a fleet that ends with this signal."""
    with ExitStack() as stack:

        def started(
            port: int = 8000, controller: str = NOBODY, number: int = signal.SIGHUP, found: bool = False
        ) -> "subprocess.Popen[str]":
            folder = tmp_path / f"warmroute-{port}"
            folder.mkdir()
            command = [sys.executable, "-c", UP, str(port), controller, str(int(number)), str(folder)]
            command += ["found"] * found
            up = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(up.kill)
            assert up.stdout is not None and up.stdout.readline() == "ready\n"
            return up

        yield started


def test_a_fleet_gets_one_signal_and_is_waited_for(start: Start) -> None:
    up = start()
    ran = run(down)
    assert (ran.status, ran.errors) == (0, "")
    assert ran.lines == [f"Ending port 8000, pid {up.pid}", "The fleet of port 8000 has ended"]
    assert up.wait(5) == 0
    assert running_fleets() == []


def test_now_does_not_wait_and_asking_twice_without_it_cuts_nothing(start: Start) -> None:
    up = start(number=signal.SIGUSR1)
    [fleet] = running_fleets()
    for _ in range(2):
        down_module.send_signal(fleet, now=False)
        assert up.stdout is not None and up.stdout.readline() == "asked\n"
    assert is_running(fleet)
    assert run(down, "--now").lines[-1] == "The fleet of port 8000 has ended"
    assert up.wait(5) == 0


def test_what_still_runs_is_shown(start: Start) -> None:
    leaving = replica("demo-1", "leaving", open_requests=2)
    with serving(Script(calm(), view([model(wanted=0, ready=0, replicas=1)], [leaving], ending=True))) as script:
        up = start(controller=script.url, number=signal.SIGUSR1)
        looked = script.answer

        def answer(asked: object) -> tuple[int, object]:
            if len(script.asked) == 4:
                up.send_signal(signal.SIGUSR1)
            return looked(asked)  # type: ignore[arg-type]

        script.answer = answer  # type: ignore[method-assign]
        ran = run(down)
    assert ran.lines[1:] == [
        f"Ending port 8000, pid {up.pid}: 0 of 2",
        "demo-0 is gone",
        "demo-1 finishes 2 requests and leaves",
        f"Ending port 8000, pid {up.pid}: 1 of 2",
        "The fleet of port 8000 has ended",
    ]


def test_several_fleets_want_a_name_or_all(start: Start) -> None:
    start(8000), start(9000)
    ran = run(down)
    assert ran.status == 1
    assert "2 fleets run on this machine" in ran.errors
    assert run(down, "--fleet", "9000").lines[-1] == "The fleet of port 9000 has ended"
    start(7000)
    assert run(down, "--all").lines[-1] == "The fleet of port 8000 has ended"
    assert running_fleets() == []


def test_what_a_killed_fleet_has_left_is_removed(start: Start, tmp_path: Path, noted_in: Path) -> None:
    up = start()
    up.kill()
    up.wait()
    ran = run(down)
    assert ran.status == 1
    assert f"Note: the fleet of port 8000 was killed (pid {up.pid}); its remains are removed" in ran.errors
    assert not (tmp_path / "warmroute-8000").exists()
    assert not noted_in.exists()
    ran = run(down, "--fleet", "8000")
    assert (ran.status, ran.errors) == (1, "no fleet on this machine has port 8000; running: none")


def test_a_fleet_that_is_killed_while_it_ends_is_cleaned_up_too(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = start(number=signal.SIGUSR1)
    monkeypatch.setattr(down_module, "send_signal", lambda *_: up.kill())
    assert "the fleet of port 8000 was killed" in run(down).errors
    assert not (tmp_path / "warmroute-8000").exists()
    assert running_fleets() == []


def test_a_fleet_outlives_a_router_that_only_joined_it(start: Start) -> None:
    with serving(Script(calm())) as script:
        start(controller=script.url, found=True)
        ran = run(down)
    assert ran.lines[1:] == [
        f"The router of port 8000 has ended; the fleet goes on: warmroute down {script.url} ends it"
    ]
    assert script.asked == []


def test_a_joined_fleet_is_ended_by_its_url_with_the_key_that_was_noted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(down_module, "GONE_S", 0.0)
    with serving(Script(calm(), view([], [], ending=True))) as script:
        script.answers["/fleet"] = refusal(503, "it has ended")
        up = start(controller=script.url, found=True)
        ran = run(down, "--fleet", script.url)
        assert script.changes == [("/end", {})]
        assert {asked.key for asked in script.asked} == {"Bearer secret"}
        assert ran.lines[-1] == f"The fleet of {script.url} has ended"
        assert up.poll() is None
        assert run(down, "--fleet", "8000").lines[-1].startswith("The router of port 8000 has ended; ")


def test_nothing_to_end_is_an_error() -> None:
    assert run(down).status == 1
    assert run(down).errors.startswith("no fleet runs on this machine")
    assert run(down, "--all") == (1, "", "no fleet runs on this machine")


def test_a_pid_that_was_given_again_gets_no_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        started = process_started(stranger.pid)
        assert started is not None
        fleet = LocalFleet(port=8000, pid=stranger.pid, started=started, controller=NOBODY)
        record_fleet(msgspec.structs.replace(fleet, started=started - 1))
        assert run(down).status == 1  # it was killed, long ago
        down_module.send_signal(msgspec.structs.replace(fleet, started=started - 1), now=False)
        with pytest.raises(subprocess.TimeoutExpired):
            stranger.wait(0.2)
        down_module.send_signal(fleet, now=False)
        assert stranger.wait(5) == -signal.SIGHUP


def test_one_that_is_elsewhere_is_asked_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(down_module, "GONE_S", 0.05)
    with serving(Script(calm(), view([model(wanted=0, ready=0)], [], ending=True))) as script:
        looked = script.answer

        def answer(asked: object) -> tuple[int, object]:
            if len(script.views) == 1:
                script.answers["/fleet"] = refusal(503, "it has ended")
            return looked(asked)  # type: ignore[arg-type]

        script.answer = answer  # type: ignore[method-assign]
        ran = run(down, "--fleet", script.url)
    assert script.changes == [("/end", {})]
    assert ran.lines[-1] == f"The fleet of {script.url} has ended"
    assert "Ending" in ran.output


def test_what_contradicts_itself_is_refused() -> None:
    assert run(down, "--all", "--fleet", "8000").status == 2
    assert run(down, "--now", "--fleet", "http://10.0.0.5:1").status == 2
