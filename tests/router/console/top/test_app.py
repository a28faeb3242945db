"""`warmroute top` with a real router: its screen and its keys."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rich.console import Console

from router.console.top.app import keys_in, paint
from router.tenants.keys import keys_from_options
from tests.router.console.top.shown import SMALL, TITLES, Shown, shown
from tests.router.loopback import Reply, Request, serving
from tests.router.scripted import CHAT, MODEL, Script, Served, connect, says, served

CACHED = b'{"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":0}}}'
SYSTEM = "You are a helpful assistant that answers shortly. " * 20


@asynccontextmanager
async def watched(
    replicas: int = 3, *asked: str, size: tuple[int, int] = SMALL, key: str | None = None, **config: Any
) -> AsyncIterator[tuple[Shown, Served]]:
    """A router that was asked this before, and the application that looks at it."""
    async with served(*Script(says(CACHED)).replicas(replicas), **config) as running:
        await ask(running, *asked)
        async with shown(f"http://127.0.0.1:{running.port}", key, size) as screen:
            yield screen, running


async def ask(running: Served, *questions: str) -> None:
    async with connect(running.port) as client:
        for question in questions:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            assert (await client.post(CHAT, {"model": MODEL, "messages": messages})).status == 200


QUESTIONS = ("Why? " * 100, "Where? " * 100, "When? " * 100)


# ---- what can be seen


async def test_everything_fits_into_eighty_columns_and_twenty_four_lines() -> None:
    async with watched(3, *QUESTIONS) as (screen, _):
        lines = screen.lines
        assert len(lines) == 24
        assert "3 replicas: 3 approximate" in lines[0]
        assert [line.split()[0] for line in lines if TITLES.match(line)] == ["replica", "decided"]
        assert screen.rows("replica") == ["r0", "r1", "r2"] and "its turn" in screen.text
        assert lines[-1].startswith("? help") and lines[-1].endswith("q quit")
        assert "…" not in "".join(lines[:3] + lines[-1:])


async def test_what_happens_is_seen_without_a_key() -> None:
    async with watched(2) as (screen, running):
        assert "No decisions yet." in screen.text
        await ask(running, *QUESTIONS)
        await screen.until(lambda: screen.line_of("req/s").split()[1] not in ("-", "0"), "requests have a rate")
        await screen.until_text("its turn")
        await screen.until(lambda: len(screen.poller.seen.decisions) == 3, "all decisions are shown")


async def test_it_is_drawn_in_any_size() -> None:
    async with watched(3, *QUESTIONS) as (screen, _):
        for size in ((120, 40), (200, 60), (60, 15), (20, 5), (1, 1), (80, 8), SMALL):
            screen.size = size
            await screen.press("down", "3", "enter", "escape", "4", "2", "0", "tab", "/", "escape", "?", "escape")
            assert len(screen.lines) == size[1]
        assert screen.rows("replica") == ["r0", "r1", "r2"]


@pytest.mark.parametrize(("replicas", "lines", "shown_lines"), [(3, 24, 3), (30, 24, 9), (30, 12, 3), (3, 9, 3)])
async def test_the_decisions_have_what_the_replicas_leave(replicas: int, lines: int, shown_lines: int) -> None:
    async with watched(replicas, *QUESTIONS, size=(80, lines)) as (screen, _):
        assert len(screen.rows("replica")) == shown_lines
        assert ("decided" in screen.text) == (lines > 9)


async def test_each_table_can_have_the_screen_for_itself() -> None:
    async with watched(3, *QUESTIONS) as (screen, _):

        async def shows(key: str, first: str, tables: int) -> None:
            await screen.press(key)
            assert screen.lines[3].startswith(first)
            assert sum(1 for line in screen.lines if TITLES.match(line)) == tables

        for key, title in (("1", "replica"), ("2", "replica"), ("3", "decided")):
            await shows(key, title, 1)
        await shows("2", "replica", 1)
        assert "restarts" in screen.lines[3] and "digests" in screen.lines[3]
        await shows("escape", "replica", 2)
        await shows("0", "replica", 2)


# ---- rows


async def test_rows_can_be_sorted_by_the_column_beside_and_turned() -> None:
    async with watched(3) as (screen, running):
        running.member("r1").candidate.running = 7
        running.member("r2").candidate.running = 3
        await screen.until(lambda: "7" in screen.line_of("r1").split(), "the load is known")
        titles = screen.lines[3].split()
        await screen.press(*[">"] * (1 + titles.index("run")))
        assert screen.rows("replica") == ["r1", "r2", "r0"] and "▼run" in screen.lines[3]
        await screen.press("r")
        assert screen.rows("replica") == ["r0", "r2", "r1"] and "▲run" in screen.lines[3]
        await screen.press("<")
        assert "▼queued" in screen.lines[3]
        await screen.press("o")
        assert screen.rows("replica") == ["r0", "r1", "r2"] and "▼" not in screen.lines[3]


async def test_a_filter_leaves_what_has_the_text_until_it_is_given_up() -> None:
    async with watched(12, *QUESTIONS) as (screen, _):
        await screen.press("1", "/", "R", "1")
        assert screen.rows("replica") == ["r1", "r10", "r11"]
        await screen.press("1", "enter")
        assert screen.rows("replica") == ["r11"] and "1 of 12 with 'R11'" in screen.lines[-1]
        await screen.press("escape")
        assert len(screen.rows("replica")) == 12 and "with" not in screen.lines[-1]
        await screen.press("/", "x", "x")
        await screen.until_text("No row has the text 'xx'; Esc shows all.")
        await screen.press("escape")
        assert len(screen.rows("replica")) == 12


async def test_the_cursor_is_followed_down_and_up() -> None:
    async with watched(40) as (screen, _):
        await screen.press("1", "end")
        assert screen.rows("replica")[-1] == "r39" and screen.cursor() == "r39"
        await screen.press("pageup", "up", "k", "j")
        assert screen.cursor() == f"r{40 - 1 - 18 - 1}"
        await screen.press("home")
        assert screen.rows("replica")[0] == "r0"
        assert screen.lines[3].startswith("replica")  # the titles stay


async def test_only_lines_that_say_something_else_are_written_again() -> None:
    async def still(request: Request, reply: Reply) -> None:
        await answer(request, reply, [{"name": "r0"}, {"name": "r1", "load": {"running": running}}])

    running, file = 3, io.StringIO()
    console = Console(file=file, width=80, height=24, force_terminal=True, color_system=None)
    async with serving(still) as url, shown(url) as screen:
        drawn = paint(console, [], screen.screen)
        file.truncate(0)
        assert paint(console, drawn, screen.screen) == drawn and not file.getvalue().strip("\0")
        running = 7
        await screen.until(lambda: "7" in screen.line_of("r1").split(), "the load is known")
        paint(console, drawn, screen.screen)
        written = file.getvalue().strip("\0")
        assert [line for line in written.split("\x1b[") if "r1" in line] and "r0 " not in written


# ---- one of them


async def test_a_replica_and_a_decision_can_be_looked_into() -> None:
    async with watched(3, *QUESTIONS) as (screen, running):
        await screen.press("down", "enter")
        assert "r1" in screen.text and "slowness" in screen.text
        assert str(running.replicas["r1"].port) in screen.text
        await screen.press("escape", "3", "end", "enter")
        assert "request_id" in screen.text
        await screen.press("end")
        await screen.until_text("candidate", "> r")
        await screen.press("backspace")
        assert screen.lines[3].startswith("decided")


async def test_the_shown_row_keeps_updating() -> None:
    async with watched(2, size=(80, 60)) as (screen, running):
        await screen.press("enter")
        await screen.until(lambda: screen.value_of("running") == "0", "it idles")
        running.member("r0").candidate.running = 5
        await screen.until(lambda: screen.value_of("running") == "5", "it is busy")
        running.front.upkeep._remove("r0")
        running.router.members.arrange()
        await screen.until_text("It is gone.")


async def test_keys_of_tables_do_nothing_while_one_is_looked_into() -> None:
    async with watched(2) as (screen, _):
        await screen.press("enter", "3", "/")
        assert "slowness" in screen.text
        await screen.press("q")
        assert screen.screen.ended


async def test_help_names_the_keys() -> None:
    async with watched() as (screen, _):
        await screen.press("?")
        assert "reverse the order" in screen.text and "this help" in screen.text
        assert "fewer cached tokens than predicted" in screen.text  # all of it, in the smallest usual terminal
        await screen.press("escape")
        assert "reverse the order" not in screen.text
        screen.size = (60, 8)
        await screen.press("?")
        assert "event streams" in screen.text and "predicted" not in screen.text
        await screen.press("end")
        await screen.until_text("fewer cached tokens")


def test_keys_are_known_by_what_terminals_send_for_them() -> None:
    typed = "q\x1b[A\x1bOB\x1b[5~\x1b[1;5C\x1b[200~\r\x7fé\x1b\x01\t"
    assert list(keys_in(typed)) == ["q", "up", "down", "pageup", "enter", "backspace", "é", "escape", "tab"]


# ---- who may


async def test_a_router_with_keys_says_which_option_gives_them() -> None:
    keys = tuple(keys_from_options(["user"], "root"))
    async with watched(2, keys=keys, demand_key=True, key="user") as (screen, _):
        await screen.press("3")
        await screen.until_text("needs the admin key", "WARMROUTE_ADMIN_KEY")
    async with watched(2, keys=keys, demand_key=True) as (screen, _):
        await screen.until_text("REFUSED; see --admin-key or WARMROUTE_ADMIN_KEY: the router says: the API key")


# ---- time


async def test_a_router_that_goes_away_is_missed_and_found_again() -> None:
    async with served(*Script(says(CACHED)).replicas(2)) as running:
        port = running.port
        specs = tuple(replica.spec for replica in running.replicas.values())
        async with shown(f"http://127.0.0.1:{port}") as screen:
            await running.idle()
            running.front.server.end()
            for connection in running.front.server.connections.open:
                connection.transport.abort()
            await screen.until_text("NO ANSWER, figures", "s old: ")
            assert screen.rows("replica") == ["r0", "r1"]
            assert screen.poller.seen.is_stale
            replicas = [{"name": spec.name, "url": spec.url, "standing": "exact"} for spec in specs]

            async def another(request: Request, reply: Reply) -> None:
                await answer(request, reply, replicas)

            async with serving(another, port):
                await screen.until_text("2 replicas: 2 exact")
                assert "NO ANSWER" not in screen.text and not screen.poller.seen.is_stale


async def test_a_router_that_hangs_is_missed_too() -> None:
    hanging, over = False, asyncio.Event()

    async def hangs(request: Request, reply: Reply) -> None:
        if hanging:
            await over.wait()
        await answer(request, reply, [{"name": "r0"}])

    async with serving(hangs) as url, shown(url, timeout_s=0.3) as screen:
        hanging = True
        await screen.until_text("NO ANSWER, figures", "timed out")
        hanging = False
        over.set()
        await screen.until(lambda: "NO ANSWER" not in screen.text, "it answers")


async def answer(request: Request, reply: Reply, replicas: list[dict[str, Any]]) -> None:
    """As a router does; one connection for each question."""
    match request.path:
        case "/replicas":
            await reply.whole(200, {"replicas": replicas})
        case "/decisions":
            await reply.whole(200, {"decisions": []})
        case "/sessions":
            await reply.whole(200, {"models": {}})
        case _:
            await reply.whole(200, b"warmroute_router:open_requests 0.0\n")
