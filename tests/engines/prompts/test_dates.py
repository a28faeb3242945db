"""Prompts with a date are exact where the replica has shown the same date in this quarter of an hour."""

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from api.prompts.prompts import Prompts
from engines.prompts import dates
from engines.prompts.dates import EDGE_S, OTHER_DATE, QUARTER_S, SHOWS_DATE, SHOWS_TIME, quarter, shown
from router.prompts.prompt import Prompt
from router.prompts.shapes import DIFFERS
from router.prompts.tokenizer_probe import probes
from tests.router.families import prompts
from tests.router.members.test_verification import USER, World

ODD = USER | {"content": "\u2028"}
CALL = 'strftime_now("%d %b %Y")'
DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock in the middle of a quarter of an hour, and the way to set it on."""
    at_s = time.time() // QUARTER_S * QUARTER_S + QUARTER_S / 2

    def forward(by_s: float) -> None:
        nonlocal at_s
        at_s += by_s
        monkeypatch.setattr(time, "time", lambda: at_s)

    forward(0.0)
    return forward


def world(folder: Path, *, ahead: timedelta = timedelta(), template: str = "") -> World:
    """A router and an engine with a template that shows the date, whose clocks or time zones may differ."""
    ours = prompts("llama3", folder)
    if template:
        ours = Prompts(ours.tokenizer, template)
    there = (datetime.now() + ahead).strftime("%d %b %Y")
    return World(ours, Prompts(ours.tokenizer, ours.templates[0].replace(CALL, f"'{there}'")))


async def send(made: World, **fields: Any) -> Prompt:
    """Send a request to the replica, as the router does once it has chosen it."""
    process = made.member.server.process
    prompt, _ = made.prompt(**fields)
    if not made.tokens.is_verified_at(prompt, process):
        made.send(**fields)
        await made.settled()
    return prompt


def is_called_exact(prompt: Prompt) -> bool:
    return prompt.exact and prompt.doubt is None


async def test_a_date_is_asked_for_once_in_a_quarter_of_an_hour(tmp_path: Path, clock: Callable[[float], None]) -> None:
    made = world(tmp_path)
    assert [is_called_exact(await send(made, messages=[USER])) for _ in range(3)] == [False, False, True]
    clock(QUARTER_S)
    asked = len(made.engine.asked)
    prompt = await send(made, messages=[USER])
    assert prompt.exact and prompt.doubt == SHOWS_DATE, "its tokens are used, and not called exact"
    assert is_called_exact(await send(made, messages=[USER]))
    assert is_called_exact(await send(made, messages=[USER]))
    assert len(made.engine.asked) <= asked + 2, "one question, to one or two routes"


async def test_a_replica_in_another_time_zone_has_no_exact_prompts_while_its_date_differs(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    made = world(tmp_path, ahead=DAY)
    for _ in range(4):
        last = await send(made, messages=[USER])
        assert not is_called_exact(last)
    assert last.why_not == OTHER_DATE
    assert made.tokens.shapes is not None
    [(name, found)] = made.tokens.shapes.differences()
    assert "date" in name and found.ours != found.theirs
    made.engine.made_by = world(tmp_path).engine.made_by  # midnight is over there
    clock(QUARTER_S)
    for _ in range(3):
        last = await send(made, messages=[USER])
    assert is_called_exact(last)


@pytest.mark.parametrize("near", [-EDGE_S / 2, EDGE_S / 2])
async def test_nothing_with_a_date_is_called_exact_where_it_may_change(
    tmp_path: Path, clock: Callable[[float], None], near: float
) -> None:
    made = world(tmp_path)
    for _ in range(3):
        last = await send(made, messages=[USER])
    assert is_called_exact(last)
    clock(QUARTER_S / 2 + near)
    last = await send(made, messages=[USER])
    assert last.exact and last.doubt == SHOWS_DATE


async def test_a_prompt_that_waited_until_the_next_quarter_is_not_called_exact(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    made = world(tmp_path)
    for _ in range(3):
        last = await send(made, messages=[USER])
    assert is_called_exact(last)
    clock(QUARTER_S)
    await send(made, messages=[USER])
    made.tokens.is_verified_at(last, made.member.server.process)
    assert last.doubt == SHOWS_DATE


async def test_a_client_has_no_say_in_what_date_a_replica_shows(tmp_path: Path, clock: Callable[[float], None]) -> None:
    made = world(tmp_path)
    for _ in range(3):
        await send(made, messages=[USER])
    clock(QUARTER_S)
    odd, _ = made.prompt(messages=[ODD])
    member: Any = made.member
    made.verification.other_length(member, made.tokens, odd, odd.tokens + 1)
    await send(made, messages=[ODD])
    assert is_called_exact(await send(made, messages=[USER]))


@pytest.mark.parametrize("ahead", [timedelta(), DAY])
async def test_the_questions_at_a_replicas_start_tell_its_date(tmp_path: Path, ahead: timedelta) -> None:
    made = world(tmp_path, ahead=ahead)
    assert made.tokens.prompts is not None and made.tokens.shapes is not None
    asked = probes("m", made.tokens.prompts, made.tokens.engine)
    answered = [await made.engine.answer(None, "/tokenize", probe.body, 1.0) for probe in asked]
    server: Any = made.member.server
    made.verification.probed(server, made.tokens, asked, [(one.status, one.body) for one in answered])
    prompt = await send(made, messages=[USER])
    assert is_called_exact(prompt) if not ahead else prompt.why_not == OTHER_DATE
    assert not any(made.tokens.shapes.why_not(name, frozenset) == DIFFERS for name in made.tokens.shapes.known)


async def test_a_template_that_shows_the_time_is_never_called_exact(tmp_path: Path) -> None:
    made = world(tmp_path, template="{{ strftime_now('%H:%M') }}{{ messages[0].content }}")
    made.engine.made_by = made.tokens.prompts  # type: ignore[assignment]
    for _ in range(3):
        last = await send(made, messages=[USER])
    assert not is_called_exact(last)
    assert last.doubt == SHOWS_TIME or last.why_not == DIFFERS  # as the minute may end between


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ messages }}", "nothing"),
        ("{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}", "date"),
        ('{{ strftime_now( "%Y-%m-%d" ) }}{{ strftime_now("%A, %-d. %B") }}', "date"),
        ("{{ strftime_now('%Y-%m-%d %H h') }}", "date"),
        ("{{ strftime_now('%d %b %Y') }}{{ strftime_now('%X') }}", "time"),
        ("{{ strftime_now('%Y-%m-%dT%H:%M:%S') }}", "time"),
        ("{{ strftime_now(format) }}", "time"),
        ("{{ strftime_now('%d' ~ x) }}", "time"),
        ("{% set now = strftime_now %}{{ now('%S') }}", "time"),
        ("{{ '%S' | strftime_now }}", "time"),
        ("{{ strftime_now('%Y %') }}", "time"),
    ],
)
def test_what_a_template_shows_of_the_time_is_read_in_its_source(template: str, what: dates.Shown) -> None:
    assert shown(template) == what


def test_quarters_of_an_hour_are_known_but_at_their_ends() -> None:
    at_s = 1_000 * QUARTER_S
    assert [quarter(at_s + more) for more in (0, EDGE_S, 450, QUARTER_S - EDGE_S)] == [None, 1000, 1000, None]
