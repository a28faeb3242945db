"""Output of `warmroute status`: in 80 columns and more, once and repeatedly."""

import io
import json
from typing import Any

import msgspec
import pytest
from rich.console import Console

from fleet.commands.addresses.local_fleets import record_fleet
from fleet.commands.picture import draw
from fleet.commands.status import status
from fleet.commands.words import age_of
from fleet.control.record import View
from tests.fleet.scripted import Script, calm, model, refusal, replica, run, view
from tests.fleet.test_local_fleets import fleet_of

pytestmark = pytest.mark.usefixtures("noted_in")

NOW_S = 1_800_000_000.0 + 3725


def drawn(what: dict[str, Any], width: int = 80, *, terminal: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, highlight=False, emoji=False, markup=False)
    draw(console, msgspec.convert(what, View), NOW_S)
    return file.getvalue()


def row(shown: str, name: str) -> list[str]:
    [line] = [line for line in shown.splitlines() if line.split()[:1] == [name] and len(line.split()) > 3]
    return line.split()


# ---- the picture


def test_a_row_says_what_a_replica_does() -> None:
    shown = drawn(calm(), 120)
    assert shown.splitlines()[2:4] == [
        "replica   pid  incarnation  state   for    cached  hits  run  wait  queued",
        "demo-0   4711  01234567     ready  1h2m  25% 4.0k   50%    1     2    4.3k",
    ]


@pytest.mark.parametrize("width", [60, 80, 100, 120])
@pytest.mark.parametrize("terminal", [False, True])
def test_it_fits_in_the_columns_there_are(width: int, terminal: bool) -> None:
    replicas = [
        replica(f"a-rather-long-name-{n}", node=f"10.0.0.{n}", pid=4_000_000 + n, starts=n, incarnation=f"{n}" * 12)
        for n in range(12)
    ]
    shown = drawn(view([model("a-rather-long-name", 12, 12)], replicas), width, terminal=terminal)
    lines = [line.rstrip() for line in shown.splitlines()]
    if not terminal:
        assert max(map(len, lines)) <= width
    assert "…" not in shown
    for title in ("state", "cached", "run", "wait", "queued"):
        assert title in shown
    assert sum(name in shown for name in ("a-rather-long-name-11", "a-rather-long-name-0")) == 2


def test_output_is_plain_without_a_terminal() -> None:
    shown = drawn(calm())
    assert shown.isascii()
    assert "\x1b" not in shown


def test_models_come_first() -> None:
    bounds = {"min": 1, "max": 8, "ttft_target_s": 1.0}
    models = [
        model("demo", 4, 2, restarting=True, generation=1, replicas=5),
        model("llama", 2, 2, engine="vllm", autoscale=bounds, autoscale_why="a new prompt would wait 3.4 s"),
        model("less", 1, 1, replicas=3),
        model("none", 0, 0),
    ]
    replicas = [replica("demo-0", generation=1), replica("demo-1", "starting", generation=1), replica("demo-2")]
    assert drawn(view(models, replicas)).splitlines()[:6] == [
        "demo  2 of 4 ready  restarting: 1 of 4 are new",
        "llama  2 of 2 ready  vllm",
        "  scaled automatically from 1 to 8: a new prompt would wait 3.4 s",
        "less  1 of 1 ready, 2 more to leave",
        "none  0 of 0 ready",
        "",
    ]


def test_a_fleet_without_anything_is_one_line() -> None:
    assert drawn(view([], [])) == "The fleet has no models\n"
    assert drawn(view([], [], ending=True)).splitlines()[0] == "The fleet is ending"


def test_replicas_that_fail_say_why_and_what_they_said_last() -> None:
    failing = replica(
        "demo-1",
        "failing",
        why="was killed by SIGKILL",
        starts=3,
        pid=None,
        last_words=[*(f"line {n}" for n in range(9)), "\x1b[31mOut of [memory]\x1b[0m"],
    )
    others = [
        replica("demo-2", "lost", why="no answer"),
        {"name": "demo-3", "model": "demo", "life": "placing", "why": "no node has 1 GPU"},
        replica("demo-4", "starting", why="ended with status 1", last_words=["bad option"]),
    ]
    shown = drawn(view([model("demo", 5, 1)], [replica("demo-0"), failing, *others]))
    assert shown.partition("demo-1 was")[1:][1].splitlines() == [
        " killed by SIGKILL; restarting, after 3 starts",
        *(f"  | line {n}" for n in range(4, 9)),
        "  | Out of [memory]",
        "demo-2 is unreachable: no answer",
        "demo-3 waits for resources: no node has 1 GPU",
        "demo-4 restarts; before, it ended with status 1",
        "  | bad option",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0s"),
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (3599, "59m"),
        (3600, "1h0m"),
        (86399, "23h59m"),
        (9e5, "10d10h"),
    ],
)
def test_ages_have_two_units_at_most(seconds: float, words: str) -> None:
    assert age_of(seconds) == words


# ---- the command


def test_its_exit_status_says_whether_all_is_well(script: Script) -> None:
    assert run(status, "--fleet", script.url).status == 0
    script.views = [view([model(wanted=3, ready=2)], [])]
    assert run(status, "--fleet", script.url).status == 1
    script.views = [calm(ending=True)]
    assert run(status, "--fleet", script.url).status == 1
    script.views = [view([model(wanted=2, ready=3)], [])]  # with a surge
    assert run(status, "--fleet", script.url).status == 0


def test_json_is_the_controllers_own_answer(script: Script) -> None:
    script.views = [calm(new_field=1)]
    ran = run(status, "--json", WARMROUTE_FLEET=script.url)
    assert json.loads(ran.output) == script.views[0]


def test_without_any_fleet_it_says_what_to_do() -> None:
    ran = run(status)
    assert ran.status == 1
    assert ran.errors == (
        "no fleet runs on this machine; start one with `warmroute up`, or name one elsewhere: `status HOST:PORT`"
    )


def test_the_addresses_of_router_and_controller_come_first(script: Script) -> None:
    assert run(status, script.url).lines[0] == f"controller {script.url}"
    for port in (8000, 9000):
        record_fleet(fleet_of(port=port, controller=script.url, found=port > 8000))
    assert run(status, script.url).lines[:2] == [
        f"routers http://127.0.0.1:8000, http://127.0.0.1:9000, controller {script.url}",
        "demo  2 of 2 ready",
    ]


def with_router(script: Script, *idle: tuple[str, str | None]) -> None:
    """Record a fleet whose router says this of its replicas."""
    record_fleet(fleet_of(controller=script.url, router=script.url))
    script.answers["/replicas"] = (200, {"replicas": [{"name": name, "idle": why} for name, why in idle]})


def test_an_idle_replica_has_a_line_that_says_why(script: Script) -> None:
    with_router(script, ("demo-0", None), ("demo-1", "no prompt came for it"), ("of-another-fleet", "draining"))
    assert run(status, script.url).lines[-2:] == ["", "demo-1 idle: no prompt came for it"]


def test_many_idle_replicas_take_few_lines(script: Script) -> None:
    script.views = [calm(9)]
    with_router(script, *((f"demo-{number}", "no prompt came for it") for number in range(9)))
    lines = run(status, script.url).lines[-6:]
    assert lines[0].startswith("demo-0 idle") and lines[4].startswith("demo-4 idle")
    assert lines[5] == "4 more are idle; warmroute top says why"


def test_a_router_that_demands_a_key_says_nothing_of_idle_replicas(script: Script) -> None:
    with_router(script)
    script.answers["/replicas"] = refusal(401, "a key is demanded")
    ran = run(status, script.url)
    assert ran.status == 0 and "idle" not in ran.output + ran.errors
