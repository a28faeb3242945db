"""`scale`, `restart` and `drain` against a controller that follows a script."""

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import click
import msgspec
import pytest

from fleet.commands import change
from fleet.commands import drain as drain_module
from fleet.commands.addresses.local_fleets import Where
from fleet.commands.change import restart, scale
from fleet.commands.client import CONTROLLER, FleetClient, Poller
from fleet.commands.drain import drain
from fleet.commands.words import changes
from fleet.control.record import View
from router.console.asking import Unreachable
from tests.fleet.scripted import Script, calm, model, refusal, replica, run, serving, view

pytestmark = pytest.mark.usefixtures("noted_in")

DEADLINE_S = 50.0


@pytest.fixture
def script() -> Iterator[Script]:
    with serving(Script(calm())) as scripted:
        scripted.answers["/models/scale"] = 200, model(wanted=3)
        scripted.answers["/models/restart"] = 200, model(generation=1)
        yield scripted


@contextmanager
def at_terminal(command: click.Command, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a command in a process with a terminal, to be read from and written to."""
    ours, theirs = pty.openpty()
    code = f"from {command.callback.__module__} import {command.name} as run; run()"
    try:
        with subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdin=theirs, stdout=theirs, stderr=theirs
        ) as process:
            os.close(theirs)
            yield process, ours
            process.kill()
    finally:
        os.close(ours)


def typed(what: dict[str, Any]) -> View:
    return msgspec.convert(what, View)


def demos(*is_running: str, **more: Any) -> list[dict[str, Any]]:
    return [replica(f"demo-{number}", life, **more) for number, life in enumerate(is_running)]


# ---- what has happened


def test_only_what_is_new_is_reported() -> None:
    before = typed(view([model()], demos("ready", "starting", "ready")))
    now = typed(view([model()], [*demos("ready", "ready"), replica("demo-3", "placing")]))
    assert changes(before, now) == ["demo-1 is ready", "demo-2 is gone", "demo-3 is being placed"]
    assert changes(now, now) == []


def test_at_the_first_look_what_is_ready_is_no_news() -> None:
    now = typed(view([model()], demos("ready", "leaving", open_requests=2)))
    assert changes(None, now) == ["demo-1 finishes 2 requests and leaves"]


def test_other_models_are_skipped() -> None:
    before = typed(view([], [replica("other-1")]))
    now = typed(view([], [replica("other-0", "starting"), replica("demo-0", "starting")]))
    assert changes(before, now, "demo") == ["demo-0 starts"]


def test_a_failure_comes_with_last_words() -> None:
    failing = replica("demo-0", "failing", why="ended with status 1", last_words=["one", "two"])
    now = typed(view([], [failing]))
    assert changes(typed(calm(1)), now, "demo") == [
        "demo-0 ended with status 1; restarting",
        "  | one",
        "  | two",
    ]


def test_a_failure_that_is_over_at_the_next_look_is_reported() -> None:
    before = typed(view([], demos("ready", starts=1)))
    now = typed(view([], demos("ready", starts=2, last_words=["one"])))
    assert changes(before, now) == ["demo-0 has ended", "  | one", "demo-0 is ready again"]


# ---- scale


def test_scaling_up_shows_what_comes_until_all_are_ready(script: Script) -> None:
    script.views = [
        calm(),
        view([model(wanted=3)], [*demos("ready", "ready"), replica("demo-2", "placing")]),
        view([model(wanted=3, replicas=3)], demos("ready", "ready", "starting")),
        calm(3),
    ]
    ran = run(scale, "demo", "3", "--fleet", script.url)
    assert (ran.status, ran.errors) == (0, "")
    assert ran.lines == [
        "demo-2 is being placed",
        "Scaling demo: 2 of 3",
        "demo-2 starts",
        "demo-2 is ready",
        "Scaling demo: 3 of 3",
        "demo: 3 of 3 ready",
    ]
    assert script.changes == [("/models/scale", {"model": "demo", "replicas": 3})]


def test_scaling_down_waits_until_those_that_are_too_many_have_left(script: Script) -> None:
    leaving = [*demos("ready"), replica("demo-1", "leaving", open_requests=1)]
    script.views = [calm(), view([model(wanted=1, ready=1, replicas=2)], leaving), calm(1)]
    ran = run(scale, "demo", "1", "--fleet", script.url)
    assert ran.lines == [
        "demo-1 finishes 1 request and leaves",
        "Scaling demo: 0 of 1",
        "demo-1 is gone",
        "Scaling demo: 1 of 1",
        "demo: 1 of 1 ready",
    ]


def test_scaling_to_nothing_needs_a_yes_where_nobody_can_be_asked(script: Script) -> None:
    ran = run(scale, "demo", "0", "--no-wait", "--fleet", script.url)
    assert ran.status == 2
    assert ran.errors == ("this ends 2 replicas of demo, and requests for it fail until you scale it up; give --yes")
    assert script.changes == []


@pytest.mark.parametrize(("answer", "changes"), [("y", 1), ("", 0)])
def test_scaling_to_nothing_asks_in_a_terminal(script: Script, answer: str, changes: int) -> None:
    with at_terminal(scale, "demo", "0", "--no-wait", "--fleet", script.url) as (process, terminal):
        said = b""
        while b"Go on? [y/N]" not in said:
            said += os.read(terminal, 4096)
        os.write(terminal, f"{answer}\n".encode())
        process.wait(DEADLINE_S)
    assert b"This ends 2 replicas of demo" in said
    assert len(script.changes) == changes


def test_a_model_without_replicas_may_be_scaled_to_none_without_a_question(script: Script) -> None:
    script.views = [view([model(wanted=0, ready=0)], [])]
    assert run(scale, "demo", "0", "--fleet", script.url).lines[-1] == "demo has no replicas"


def test_another_scale_command_ends_the_waiting(script: Script) -> None:
    script.views = [calm(), view([model(wanted=5, autoscale_why="4,000 tokens wait")], demos("ready", "ready"))]
    ran = run(scale, "demo", "3", "--fleet", script.url)
    assert (ran.status, ran.errors) == (1, "demo was set to 5 replicas meanwhile, instead of 3: 4,000 tokens wait")


@pytest.mark.parametrize("last", [calm(ending=True), view([], [])])
def test_a_fleet_or_model_that_goes_away_ends_the_waiting(script: Script, last: dict[str, Any]) -> None:
    script.views = [calm(), last]
    ran = run(scale, "demo", "3", "--fleet", script.url)
    assert ran.status == 1
    assert ran.errors in ("the fleet is ending", "demo was removed from the fleet meanwhile")


def test_no_wait_only_asks(script: Script) -> None:
    ran = run(scale, "demo", "3", "--no-wait", "--fleet", script.url)
    assert ran.lines == ["demo is set to 3 replicas; see `warmroute status`"]
    assert len(script.asked) == 2


def test_ctrl_c_ends_the_waiting_and_says_that_the_change_stays(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    script.views = [calm(), view([model(wanted=3)], demos("ready", "ready"))]
    with pytest.raises(click.Abort):
        scale.main(["demo", "3", "--fleet", script.url], standalone_mode=False)
    assert capsys.readouterr().err == "Stopped waiting; the change stays in effect. See `warmroute status`.\n\n"


# ---- restart


def test_a_restart_counts_those_that_are_new_and_ready(script: Script) -> None:
    def renewed(*of: tuple[str, int]) -> list[dict[str, Any]]:
        return [replica(f"demo-{n}", life, generation=generation) for n, (life, generation) in enumerate(of)]

    busy = model(restarting=True, generation=1)
    script.views = [
        calm(),
        view([busy], renewed(("leaving", 0), ("ready", 0))),
        view([busy], renewed(("starting", 1), ("ready", 0))),
        view([busy], renewed(("ready", 1), ("leaving", 0))),
        view([model(generation=1)], renewed(("ready", 1), ("starting", 1))),
        view([model(generation=1)], renewed(("ready", 1), ("ready", 1))),
    ]
    ran = run(restart, "demo", "--fleet", script.url)
    assert ran.lines == [
        "demo-0 leaves",
        "Restarting demo: 0 of 2",
        "demo-0 starts",
        "demo-0 is ready",
        "demo-1 leaves",
        "Restarting demo: 1 of 2",
        "demo-1 starts",
        "demo-1 is ready",
        "Restarting demo: 2 of 2",
        "All replicas of demo are new",
    ]
    assert script.changes == [("/models/restart", {"model": "demo", "surge": 0})]


# ---- drain


def test_draining_says_what_is_left_and_how_to_undo_it(script: Script) -> None:
    script.views = [view([model()], demos("draining", "ready", open_requests=3))]
    ran = run(drain, "demo-0", "--fleet", script.url)
    assert ran.lines == [
        "demo-0 gets no new requests, and has 3 requests to finish",
        "To undo it: warmroute drain demo-0 --undo",
    ]
    script.views = [view([model()], demos("ready", "ready"))]
    assert run(drain, "demo-0", "--undo", "--fleet", script.url).lines == ["demo-0 gets requests again"]
    assert [body["drain"] for _, body in script.changes] == [True, False]


def test_a_node_is_drained_with_all_that_runs_there(script: Script) -> None:
    script.answers["/nodes/drain"] = 200, {"replicas": ["demo-0", "demo-1"]}
    ran = run(drain, "--node", "10.0.0.7", "--fleet", script.url)
    assert ran.lines == [
        "demo-0, demo-1 get no new requests, and have nothing left to do",
        "To undo it: warmroute drain --node 10.0.0.7 --undo",
    ]
    assert run(drain, "--node", "10.0.0.7", "--undo", "--fleet", script.url).lines == [
        "demo-0, demo-1 get requests again"
    ]
    assert script.changes == [("/nodes/drain", {"node": "10.0.0.7", "drain": wanted}) for wanted in (True, False)]


def test_a_node_without_replicas_is_no_mistake(script: Script) -> None:
    script.answers["/nodes/drain"] = 200, {"replicas": []}
    ran = run(drain, "--node", "10.0.0.7", "--wait", "9", "--fleet", script.url)
    assert (ran.status, ran.lines) == (0, ["No replica of this fleet runs at 10.0.0.7"])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "LOOK_S", 0.001)
    monkeypatch.setattr(drain_module, "HEARD_S", 0.0)
    monkeypatch.setattr(drain_module, "SOONEST_S", 0.0)


@pytest.mark.usefixtures("quick")
def test_waiting_ends_when_nothing_was_left_at_a_later_look(script: Script) -> None:
    is_running = ("draining", "ready")
    script.views = [
        view([model()], demos(*is_running, open_requests=0, measured_at=10.0)),  # from before anybody heard of it
        view([model()], demos(*is_running, open_requests=2, measured_at=11.0)),
        view([model()], demos(*is_running, open_requests=0, measured_at=12.0)),
        view([model()], demos(*is_running, open_requests=9, measured_at=13.0)),
    ]
    ran = run(drain, "demo-0", "--wait", "60", "--fleet", script.url)
    assert ran.lines == ["demo-0 gets no new requests, and has nothing left to do"]
    assert len(script.views) == 1, "the command kept polling"


@pytest.mark.usefixtures("quick")
def test_what_comes_to_the_node_meanwhile_is_waited_for_too(script: Script) -> None:
    told = [["demo-0"], ["demo-0", "demo-1"]]
    script.answers["/nodes/drain"] = 200, lambda: {"replicas": told.pop(0) if len(told) > 1 else told[0]}
    script.views = [
        view([model()], [replica("demo-0", "draining", open_requests=1, measured_at=10.0)]),
        view([model()], demos("draining", "draining", open_requests=1, measured_at=11.0)),
        view([model()], demos("draining", "draining", open_requests=0, measured_at=12.0)),
    ]
    ran = run(drain, "--node", "10.0.0.7", "--wait", "60", "--fleet", script.url)
    assert ran.lines == ["demo-0, demo-1 get no new requests, and have nothing left to do"]


@pytest.mark.usefixtures("quick")
def test_a_controller_that_does_not_know_yet_is_asked_again(script: Script) -> None:
    answers = iter([refusal(503, "the replicas are still unknown"), (502, "<html>"), (200, {"replicas": []})])
    script.answers["/nodes/drain"] = 0, lambda: next(answers)
    ran = run(drain, "--node", "10.0.0.7", "--wait", "60", "--fleet", script.url)
    assert (ran.status, ran.lines) == (0, ["No replica of this fleet runs at 10.0.0.7"])
    script.answers["/nodes/drain"] = refusal(503, "the replicas are still unknown")
    assert run(drain, "--node", "10.0.0.7", "--fleet", script.url).status == 1, "it does not wait without --wait"
    script.answers["/nodes/drain"] = refusal(401, "the key is missing")
    assert run(drain, "--node", "10.0.0.7", "--wait", "60", "--fleet", script.url).status == 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("now", [{"life": "starting"}, {"incarnation": "another"}])
def test_no_request_waits_for_a_cut_one(script: Script, now: dict[str, Any]) -> None:
    what: dict[str, Any] = {"life": "draining", "open_requests": 2} | now
    cut = replica("demo-0", **what)
    script.views = [view([model()], demos("draining", open_requests=2)), view([model()], [cut])]
    assert run(drain, "demo-0", "--wait", "60", "--fleet", script.url).status == 0


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("running", "said"), [(2, "has 2 requests left"), (0, "was not heard of since")])
def test_waiting_has_an_end_that_says_what_is_left(script: Script, running: int, said: str) -> None:
    script.views = [view([model()], demos("draining", open_requests=running))]
    ran = run(drain, "demo-0", "--wait", "0.01", "--fleet", script.url)
    assert ran.status == 1
    assert f"after 0.01 s demo-0 {said}; --wait longer, or let them be cut" in ran.errors


def test_a_replica_drained_by_name_stays_drained_when_its_node_stays(script: Script) -> None:
    script.answers["/nodes/drain"] = 200, {"replicas": ["demo-0", "demo-1"]}
    script.views = [view([model()], demos("ready", "draining"))]
    assert run(drain, "--node", "10.0.0.7", "--undo", "--fleet", script.url).lines == [
        "demo-0 gets requests again",
        "demo-1 was drained by name and stays drained; undo it with: warmroute drain demo-1 --undo",
    ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "give either a REPLICA or --node ADDRESS"),
        (["demo-0", "--node", "10.0.0.7"], "give either a REPLICA or --node ADDRESS"),
        (["demo-0", "--undo", "--wait", "3"], "--wait does not work with --undo"),
        (["--node", ""], "'' is empty"),
    ],
)
def test_what_contradicts_itself_is_refused(script: Script, arguments: list[str], why: str) -> None:
    ran = run(drain, *arguments, "--fleet", script.url)
    assert ran.status == 2 and why in ran.errors
    assert script.changes == []


# ---- a controller that goes away


def test_a_controller_that_came_back_elsewhere_is_found() -> None:
    with ExitStack() as stack:
        place: list[str] = []
        with serving(Script(calm(1))) as first:
            place.append(first.url)
            poller = stack.enter_context(Poller(lambda: Where(place[-1], None, None)))
            assert poller.look() == typed(calm(1))
        assert poller.look() is None
        assert poller.away_s > 0
        assert "refused" in poller.why
        place.append(stack.enter_context(serving(Script(calm(2)))).url)
        assert poller.look() is None  # and finds where it is now
        assert poller.look() == typed(calm(2))
        assert poller.away_s == 0


def test_waiting_continues_when_the_controller_is_back(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = FleetClient.answer, 0

    def answer(fleet: FleetClient) -> bytes:
        nonlocal asked
        asked += 1
        if asked in (2, 3):  # after the look before the change
            raise Unreachable(CONTROLLER, fleet.url, "Connection refused")
        return real(fleet)

    monkeypatch.setattr(FleetClient, "answer", answer)
    script.views = [calm(), calm(3)]
    ran = run(scale, "demo", "3", "--fleet", script.url)
    assert ran.lines[0] == "The controller does not answer (Connection refused); retrying"
    assert ran.lines[-1] == "demo: 3 of 3 ready"
    assert ran.output.count("does not answer") == 1


def test_a_controller_that_stays_away_ends_the_waiting(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change, "MISSING_S", -1.0)
    monkeypatch.setattr(Poller, "look", lambda _: None)
    ran = run(scale, "demo", "3", "--fleet", script.url)
    assert ran.status == 1
    assert ran.errors.startswith(f"no controller answers at {script.url}")
