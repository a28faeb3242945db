"""`warmroute top` with a real router: its screen and its keys."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rich.cells import cell_len
from textual._compositor import LayoutUpdate

from router.console.top.tables import rows_of
from router.tenants.keys import keys_from_options
from tests.router.console.top.shown import SMALL, Shown, shown
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
        assert len(lines) == 24 and all(cell_len(line) <= 80 for line in lines)
        assert "3 replicas: 3 approximate" in lines[0]
        assert [line.split()[0] for line in lines if line.startswith(("replica ", "prefix ", "decided "))] == [
            "replica",
            "prefix",
            "decided",
        ]
        assert screen.first_cells("replicas") == ["r0", "r1", "r2"]
        assert "You are a helpful" in screen.text and "its turn" in screen.text
        assert lines[-1].startswith("? help") and lines[-1].endswith("q quit")
        assert "…" not in "".join(lines[:3] + lines[-1:])


async def test_what_happens_is_seen_without_a_key() -> None:
    async with watched(2) as (screen, running):
        assert "No decisions yet." in screen.text and "No recent prompts" in screen.text
        await ask(running, *QUESTIONS)
        await screen.until_text("its turn")
        await screen.until(lambda: len(screen.app.poller.decisions) == 3, "all decisions are shown")
        await screen.until(lambda: screen.line_of("req/s")[6:7] not in ("-", "0"), "requests have a rate")


async def test_it_is_drawn_in_any_size() -> None:
    async with watched(3, *QUESTIONS) as (screen, _):
        for size in ((120, 40), (200, 60), (60, 15), (20, 5), (1, 1), (80, 8), SMALL):
            await screen.pilot.resize_terminal(*size)
            await screen.until(lambda size=size: len(screen.lines) == size[1], "the size is taken")  # type: ignore[misc]
            await screen.press("down", "4", "enter", "escape", "2", "0")
            assert all(cell_len(line) <= size[0] for line in screen.lines)
        await screen.until(lambda: screen.first_cells("replicas") == ["r0", "r1", "r2"], "all is back")


@pytest.mark.parametrize(
    ("rows", "heights"),
    [
        (3, {24: [4, 6, 10], 44: [4, 15, 21], 12: [4, 4, 0], 10: [3, 3, 0], 9: [5, 0, 0], 7: [3, 0, 0]}),
        (30, {24: [8, 5, 7], 12: [5, 3, 0]}),
    ],
)
async def test_a_table_with_few_rows_leaves_its_lines_to_the_others(rows: int, heights: dict[int, list[int]]) -> None:
    replicas = [{"name": f"r{number}"} for number in range(rows)]

    async def many(request: Request, reply: Reply) -> None:
        await answer(request, reply, replicas)

    async with serving(many) as url, shown(url) as screen:
        views = screen.app.views
        screen.app._items = lambda name: rows_of(screen.app.poller) if name == "replicas" else [None] * 50  # type: ignore[method-assign]
        screen.app._fill = lambda *_: None  # type: ignore[method-assign]
        for lines, expected in heights.items():
            await screen.pilot.resize_terminal(80, lines)
            screen.app.draw()
            await screen.pilot.pause()
            shown_heights = [
                views[name].size.height * views[name].display for name in ("replicas", "prefixes", "decisions")
            ]
            assert shown_heights == expected, lines
            assert sum(shown_heights) == lines - 4


async def test_each_table_can_have_the_screen_for_itself() -> None:
    async with watched(3, *QUESTIONS) as (screen, _):

        async def shows(key: str, first: str, tables: int) -> None:
            def shown() -> bool:
                displayed = sum(view.display for view in screen.app.views.values())
                return screen.lines[3].startswith(first) and displayed == tables

            await screen.press(key)
            await screen.until(shown, f"{key}: {tables} tables, {first} first")

        for key, title in (("1", "replica"), ("2", "replica"), ("3", "prefix tokens"), ("4", "decided")):
            await shows(key, title, 1)
        await shows("2", "replica", 1)
        assert "restarts" in screen.lines[3] and "digests" in screen.lines[3]
        await shows("escape", "replica", 3)
        await shows("0", "replica", 3)


# ---- rows


async def test_rows_can_be_sorted_by_the_column_beside_and_turned() -> None:
    async with watched(3) as (screen, running):
        running.member("r1").candidate.running = 7
        running.member("r2").candidate.running = 3
        await screen.until(lambda: "7" in screen.line_of("r1").split(), "the load is known")
        titles = [placed.column.title for placed in screen.app.views["replicas"].table.layout(80)]
        await screen.press(*["greater_than_sign"] * (1 + titles.index("run")))
        assert screen.first_cells("replicas") == ["r1", "r2", "r0"] and "▼run" in screen.lines[3]
        await screen.press("r")
        assert screen.first_cells("replicas") == ["r0", "r2", "r1"] and "▲run" in screen.lines[3]
        await screen.press("less_than_sign")
        assert "▼queued" in screen.lines[3]
        await screen.press("o")
        assert screen.first_cells("replicas") == ["r0", "r1", "r2"] and "▼" not in screen.lines[3]


async def test_a_row_that_is_clicked_is_chosen_and_twice_opened() -> None:
    async with watched(3) as (screen, _):
        await screen.pilot.click("#replicas", offset=(3, 3))
        await screen.pilot.pause()
        assert screen.app.views["replicas"].table.cursor_key == "r2"
        await screen.pilot.click("#replicas", offset=(3, 3), times=2)
        await screen.until_text("slowness")


async def test_a_filter_leaves_what_has_the_text_until_it_is_given_up() -> None:
    async with watched(12, *QUESTIONS) as (screen, _):
        await screen.press("1", "slash", "R", "1")
        assert screen.first_cells("replicas") == ["r1", "r10", "r11"]
        await screen.press("1", "enter")
        assert screen.first_cells("replicas") == ["r11"] and "1 of 12 with 'R11'" in screen.lines[-1]
        await screen.press("escape")
        assert len(screen.first_cells("replicas")) == 12 and "with" not in screen.lines[-1]
        await screen.press("slash", "x", "x")
        await screen.until_text("No row has the text 'xx'; Esc shows all.")
        await screen.press("escape")
        assert len(screen.first_cells("replicas")) == 12


async def test_the_cursor_is_followed_down_and_up() -> None:
    async with watched(40) as (screen, _):
        await screen.press("1", "end")
        assert screen.first_cells("replicas")[-1] == "r39" and screen.app.views["replicas"].table.cursor_key == "r39"
        await screen.press("pageup", "up", "k", "j")
        assert screen.app.views["replicas"].table.cursor == 40 - 1 - 18 - 1
        await screen.press("home")
        assert screen.first_cells("replicas")[0] == "r0"
        assert screen.lines[3].startswith("replica")  # the titles stay


async def test_a_row_that_moves_away_is_followed() -> None:
    async with watched(40) as (screen, running):
        titles = [placed.column.title for placed in screen.app.views["replicas"].table.layout(80)]
        await screen.press("1", *["greater_than_sign"] * (1 + titles.index("run")), "home")
        assert screen.app.views["replicas"].table.cursor_key == "r0"
        for number in range(1, 40):
            running.member(f"r{number}").candidate.running = number
        await screen.until(lambda: screen.first_cells("replicas")[-1] == "r0", "it is the last one, and seen")
        assert screen.app.views["replicas"].table.cursor_key == "r0"


async def test_only_lines_that_say_something_else_are_drawn_again() -> None:
    async with watched(3) as (screen, running):
        drawn = drawn_lines(screen, "replicas")
        await screen.until(lambda: screen.app.poller.history.rates("r0"), "it has looked twice")
        await screen.press("p")
        drawn.clear()
        screen.app.draw()
        await screen.pilot.pause()
        assert drawn == []
        running.member("r1").candidate.running = 7
        await screen.press("p")
        await screen.until(lambda: "7" in screen.line_of("r1").split(), "the load is known")
        assert set(drawn) == {2}


async def test_after_a_suspension_everything_is_drawn_again() -> None:
    async with watched(3) as (screen, _):
        await screen.until(lambda: screen.app.poller.history.rates("r0"), "it has looked twice")
        await screen.press("p")
        updates: list[object] = []
        screen.app._display = lambda _screen, update: updates.append(update)  # type: ignore[assignment,method-assign]
        screen.app.draw()
        await screen.pilot.pause()
        assert not [update for update in updates if isinstance(update, LayoutUpdate)]
        screen.app.app_resume_signal.publish(screen.app)
        await screen.until(lambda: [one for one in updates if isinstance(one, LayoutUpdate)], "the whole screen is")


def drawn_lines(screen: Shown, table: str) -> list[int]:
    """The lines of a table that are drawn from now on."""
    view = screen.app.views[table]
    drawn: list[int] = []
    render = view.render_line

    def counted(y: int) -> Any:
        drawn.append(y)
        return render(y)

    view.render_line = counted  # type: ignore[method-assign]
    return drawn


# ---- one of them


async def test_a_replica_a_prefix_and_a_decision_can_be_looked_into() -> None:
    async with watched(3, *QUESTIONS) as (screen, running):
        await screen.press("down", "enter")
        assert "r1" in screen.text and "slowness" in screen.text
        assert str(running.replicas["r1"].port) in screen.text
        await screen.press("escape", "3", "enter")
        assert "saved_tokens" in screen.text and "Tokens 0 to" in screen.text
        await screen.press("escape", "4", "end", "enter")
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
        await screen.press("enter", "4", "slash")
        assert "slowness" in screen.text
        await screen.press("q")
        assert screen.app.return_value is None and not screen.app.is_running


async def test_help_names_the_keys() -> None:
    async with watched() as (screen, _):
        await screen.press("question_mark")
        assert "drain the replica" in screen.text and "this help" in screen.text
        assert "fewer cached tokens than predicted" in screen.text  # all of it, in the smallest usual terminal
        await screen.press("escape")
        assert "drain the replica" not in screen.text
        await screen.pilot.resize_terminal(60, 8)
        await screen.press("question_mark")
        assert "event streams" in screen.text and "predicted" not in screen.text
        await screen.press("end")
        await screen.until_text("fewer cached tokens")


# ---- what is changed


async def test_a_replica_is_drained_and_undrained_after_a_question() -> None:
    async with watched(2) as (screen, running):
        await screen.press("down", "d")
        assert "Drain r1?" in screen.text
        await screen.press("n")
        assert running.member("r1").candidate.unavailable is None
        await screen.press("d", "enter")  # who only wants the question to go away
        assert running.member("r1").candidate.unavailable is None
        await screen.press("d", "y")
        await screen.until(lambda: "draining" in screen.line_of("r1"), "it is seen")
        assert running.member("r1").candidate.unavailable == "draining"
        await screen.until_text("r1 gets no new requests", "1 approximate, 1 draining")
        await screen.press("d")
        assert "Let r1 have requests again?" in screen.text
        await screen.press("y")
        await screen.until(lambda: running.member("r1").candidate.unavailable is None, "it serves again")


async def test_a_replica_can_be_drained_where_it_is_looked_into() -> None:
    async with watched(2) as (screen, running):
        await screen.press("enter", "d", "y")
        await screen.until(lambda: running.member("r0").candidate.unavailable == "draining", "it drains")
        await screen.until_text("r0  draining: draining")


async def test_without_a_replica_there_is_nothing_to_drain() -> None:
    async with watched(1, *QUESTIONS) as (screen, _):
        await screen.press("4", "d")
        await screen.until_text("Choose a replica first")


# ---- who may


async def test_a_router_with_keys_says_which_option_gives_them() -> None:
    keys = tuple(keys_from_options(["user"], "root"))
    async with watched(2, keys=keys, demand_key=True, key="user") as (screen, running):
        await screen.press("4")
        await screen.until_text("needs the admin key", "WARMROUTE_ADMIN_KEY")
        await screen.press("1", "d", "y")
        await screen.until_text("/replicas/r0/drain")
        await screen.until_text("WARMROUTE_ADMIN_KEY")
        assert running.member("r0").candidate.unavailable is None
    async with watched(2, keys=keys, demand_key=True) as (screen, _):
        await screen.until_text("REFUSED; see --admin-key or WARMROUTE_ADMIN_KEY: the router says: the API key")


async def test_with_the_admin_key_all_is_seen_and_may_be_changed() -> None:
    keys = tuple(keys_from_options(["user"], "root"))
    async with watched(2, keys=keys, demand_key=True, key="root") as (screen, running):
        assert "No decisions yet." in screen.text
        await screen.press("d", "y")
        await screen.until(lambda: running.member("r0").candidate.unavailable == "draining", "it drains")


# ---- time


async def test_a_router_that_goes_away_is_missed_and_found_again() -> None:
    async with served(*Script(says(CACHED)).replicas(2)) as running:
        port = running.port
        specs = tuple(replica.spec for replica in running.replicas.values())
        async with shown(f"http://127.0.0.1:{port}") as screen:
            await running.idle()
            running.front._server.servers[0].close()
            for connection in running.front._server._connections():
                connection.abort()
            await screen.until_text("NO ANSWER, figures", "s old: ")
            assert screen.first_cells("replicas") == ["r0", "r1"]
            assert screen.app.views["replicas"].is_stale
            replicas = [{"name": spec.name, "url": spec.url, "state": "exact"} for spec in specs]

            async def another(request: Request, reply: Reply) -> None:
                await answer(request, reply, replicas)

            async with serving(another, port):
                await screen.until_text("2 replicas: 2 exact")
                assert "NO ANSWER" not in screen.text and not screen.app.views["replicas"].is_stale


async def test_a_router_that_hangs_is_missed_too() -> None:
    now_s = 0.0

    async def hangs(request: Request, reply: Reply) -> None:
        if request.path == "/replicas" and now_s > 1:
            while now_s < 100:
                await screen.pilot.pause()
        await answer(request, reply, [{"name": "r0"}])

    async with serving(hangs) as url, shown(url, clock=lambda: now_s) as screen:
        now_s = 2.0
        await screen.until(lambda: screen.app.poller._pending_since_s == 2.0, "the router is asked")
        now_s = 6.0
        await screen.until_text("NO ANSWER, figures", "does not answer")
        now_s = 100.0
        await screen.until(lambda: "NO ANSWER" not in screen.text, "it answers")


async def answer(request: Request, reply: Reply, replicas: list[dict[str, Any]]) -> None:
    """As a router does; one connection for each question."""
    match request.path:
        case "/replicas":
            await reply.whole(200, {"replicas": replicas})
        case "/decisions":
            await reply.whole(200, {"decisions": []})
        case "/prefixes":
            await reply.whole(200, {"prompts": 0, "span_s": 0.0, "texts": True, "prefixes": []})
        case _:
            await reply.whole(200, b"warmroute_router:open_requests 0.0\n")


async def test_a_thousand_replicas_cost_a_line_for_each_that_can_be_seen() -> None:
    replicas = [{"name": f"replica-{number}", "state": "exact", "load": {"running": number}} for number in range(1000)]
    body = json.dumps({"replicas": replicas})

    async def many(request: Request, reply: Reply) -> None:
        if request.path == "/replicas":
            await reply.whole(200, body.encode())
        else:
            await answer(request, reply, [])

    async with serving(many) as url, shown(url, size=(120, 40)) as screen:
        assert "1,000 replicas: 1,000 exact" in screen.text
        await screen.press("1", "end")
        assert screen.first_cells("replicas")[-1] == "replica-999"
        await screen.press("slash", *"-77", "enter")
        assert len(screen.first_cells("replicas")) == 11
        assert len(screen.app.views["replicas"]._drawn) <= 40
