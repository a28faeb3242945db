"""GET /usage: everything for administrators, its own for a key; CSV that no spreadsheet computes."""

import csv
import io
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.console.usage import COLUMNS, draw
from router.http.usage import as_csv
from router.tenants.keys import keys_from_options
from router.tenants.usage import PLACE, Counts, Row, day_of
from tests.router.scripted import CHAT, Client, Script, Served, chat, connect, says, served

USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 40}}
GOOD = msgspec.json.encode({"choices": [], "usage": USAGE})
ALICE, BOB, ROOT = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob", "root"))


@asynccontextmanager
async def running(path: Path | None = None, script: Script | None = None) -> AsyncIterator[tuple[Served, Client]]:
    script = script or Script(says(GOOD), says(GOOD), says(b"{}", 400), says(b"{}", 500))
    keys = tuple(
        msgspec.structs.replace(key, name="alice" if key.name == "key-1" else "=bob" if key.name == "key-2" else "root")
        for key in keys_from_options(["alice", "bob"], "root")
    )
    db = None if path is None else str(path)
    async with (
        served(*script.replicas(1), keys=keys, demand_key=True, usage_db=db) as made,
        connect(made.port) as client,
    ):
        yield made, client


async def usage(client: Client, query: str = "", **headers: str) -> Any:
    answer = await client.get(f"/usage{query}", **(headers or ROOT))
    assert answer.status == 200, answer
    return answer.json["usage"]


@pytest.mark.parametrize("kept", [True, False])
async def test_requests_errors_and_tokens_are_counted_by_key_and_model(tmp_path: Path, kept: bool) -> None:
    async with running(tmp_path / "usage.db" if kept else None) as (made, client):
        for who in (ALICE, BOB, ALICE, ALICE):
            await client.post(CHAT, chat(), **who)
        await made.idle()
        bob, alice = await usage(client)
        assert (alice["requests"], alice["client_errors"], alice["server_errors"]) == (3, 1, 1)
        assert (bob["key"], bob["model"], bob["day"]) == ("=bob", "m", day_of(time.time()).isoformat())
        for one in (alice, bob):
            assert (one["computed_tokens"], one["cached_tokens"], one["generated_tokens"]) == (60, 40, 7)
            assert one["first_tokens"] == 1 and one["first_token_s"] >= 0
        assert await usage(client) == [bob, alice]
        answer = (await client.get("/usage", **ROOT)).json
        assert (answer["kept_in"], answer["since"] is None) == (("file", True) if kept else ("memory", False))


async def test_a_key_sees_its_own_usage_and_nothing_of_others() -> None:
    async with running() as (made, client):
        for who in (ALICE, BOB):
            await client.post(CHAT, chat(), **who)
        await made.idle()
        assert [row["key"] for row in await usage(client, "", **ALICE)] == ["alice"]
        assert [row["key"] for row in await usage(client, "?key=alice", **ALICE)] == ["alice"]
        for query in ("?key=%3Dbob", "?key=nobody", "?key=(none)", "?key="):
            answer = await client.get(f"/usage{query}", **ALICE)
            assert (answer.status, answer.error["code"]) == (403, "admin_key_required")
            assert "bob" not in answer.body.decode()
        text = (await client.get("/usage?format=csv", **ALICE)).body.decode()
        assert "alice" in text and "bob" not in text
        assert (await client.get("/usage")).status == 401


async def test_rows_are_chosen_and_mistakes_are_named() -> None:
    async with running() as (made, client):
        await client.post(CHAT, chat(), **ALICE)
        await made.idle()
        today = day_of(time.time()).isoformat()
        for query, count in (
            (f"?from={today}&to={today}", 1),
            ("?from=2020-01-01&to=2020-01-02", 0),
            ("?model=m&key=alice", 1),
            ("?model=other", 0),
            ("?key=bob", 0),
        ):
            assert len(await usage(client, query)) == count, query
        for query, param, said in (
            ("?from=x", "from", 'from is "x"; write a day such as 2'),
            ("?to=2020-02-30", "to", 'to is "2020-02-30"'),
            ("?from=2020-01-02&to=2020-01-01", "from", "write the earlier day first"),
            ("?format=xml", "format", 'format is "xml"; write json or csv'),
            ("?by=week", "by", 'by is "week"; write day, key or model'),
            ("?by=", "by", 'by is ""; write day'),
            ("?limit=0", "limit", "write a whole number above 0"),
        ):
            answer = await client.get(f"/usage{query}", **ROOT)
            assert (answer.status, answer.error["param"]) == (400, param)
            assert said in answer.error["message"]


@pytest.mark.parametrize("kept", [True, False])
async def test_rows_are_added_up_over_what_is_not_named(tmp_path: Path, kept: bool) -> None:
    today = {"day": day_of(time.time()).isoformat()}
    async with running(tmp_path / "usage.db" if kept else None, Script(says(GOOD))) as (made, client):
        for who in (ALICE, BOB, ALICE):
            await client.post(CHAT, chat(), **who)
        await made.idle()
        for by, places in (
            ("day", [today]),
            ("key", [{"key": "=bob"}, {"key": "alice"}]),
            ("model,key", [{"key": "=bob", "model": "m"}, {"key": "alice", "model": "m"}]),
        ):
            found = await usage(client, f"?by={by}")
            assert [{name: row[name] for name in PLACE if name in row} for row in found] == places
            assert sum(row["requests"] for row in found) == 3
            assert sum(row["cached_tokens"] for row in found) == 120
            [head, *rows] = csv_of((await client.get(f"/usage?by={by}&format=csv", **ROOT)).body)
            assert (len(rows), head[: len(places[0])]) == (len(places), [*places[0]])
        [own] = await usage(client, "?by=day", **ALICE)
        assert own["requests"] == 2


async def test_of_more_rows_than_the_limit_those_with_most_tokens_stay() -> None:
    async with running(script=Script(says(GOOD))) as (made, client):
        for who in (ALICE, BOB, ALICE, BOB, ALICE):
            await client.post(CHAT, chat(), **who)
        await made.idle()
        answer = (await client.get("/usage?by=key&limit=1", **ROOT)).json
        assert ([row["key"] for row in answer["usage"]], answer["left_out"]) == (["alice"], 1)
        answer = (await client.get("/usage?by=key&limit=2", **ROOT)).json
        assert ([row["key"] for row in answer["usage"]], answer["left_out"]) == (["=bob", "alice"], 0)


async def test_a_broken_file_fails_no_request_and_is_told_to_administrators_only(tmp_path: Path) -> None:
    (tmp_path / "usage.db").write_bytes(b"no database" * 100)
    async with running(tmp_path / "usage.db") as (made, client):
        assert (await client.post(CHAT, chat(), **ALICE)).status == 200
        await made.idle()
        assert len(await usage(client)) == 1
        assert "not a database" in (await client.get("/usage", **ROOT)).json["problem"]
        assert (await client.get("/usage", **ALICE)).json["problem"] is None


async def test_names_of_keys_in_metrics_are_for_administrators() -> None:
    async with running() as (made, client):
        await client.post(CHAT, chat(), **ALICE)
        await made.idle()
        for who, sees in ((ROOT, True), (ALICE, False), ({}, False)):
            answer = await client.get("/metrics", **who)
            assert answer.status == 200
            assert (b'key_generated_tokens_total{key="alice"} 7' in answer.body) == sees
            assert (b"alice" in answer.body) == sees


def csv_of(body: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(body.decode(), newline="")))


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t", "\r"])
def test_no_cell_begins_like_a_formula(begin: str) -> None:
    rows = [Row("2026-01-31", f"{begin}1+1", f'{begin}m, "x"', Counts(3, saved_s=0.5))]
    head, row = csv_of(as_csv(rows))
    assert head[:4] == ["day", "key", "model", "requests"]
    assert row[1:4] == [f"'{begin}1+1", f'\'{begin}m, "x"', "3"]
    assert row[-1] == "0.5"


def test_it_is_drawn_as_a_table_with_a_sum() -> None:
    rows = [
        {
            "day": "2026-01-31",
            "key": key,
            "model": "m",
            "requests": 2,
            "cached_tokens": 1500,
            "first_tokens": 2,
            "first_token_s": 0.5,
            "saved_s": 1.25,
        }
        for key in ("alice", "(none)")
    ]
    text = io.StringIO()
    draw(msgspec.json.encode({"kept_in": "memory", "since": "2026-01-30", "usage": rows}), text, 120)
    lines = text.getvalue().splitlines()
    assert lines[1].split() == ["2026-01-31", "alice", "m", "2", "0", "0", "1,500", "0", "250", "ms", "1.2", "s"]
    assert lines[3].split() == ["all", "4", "0", "0", "3,000", "0", "250", "ms", "2.5", "s"]
    assert "since the router's start, 2026-01-30" in lines[4]
    narrow, piped = io.StringIO(), io.StringIO()
    rows[0]["model"] = "a-model-with-a-name-of-its-own"
    draw(msgspec.json.encode({"kept_in": "file", "usage": rows}), narrow, 80)
    assert narrow.getvalue().split()[:6] == ["day", "key", "model", "requests", "cached", "generated"]
    assert max(map(len, narrow.getvalue().splitlines())) <= 80 and "…" not in narrow.getvalue()
    draw(msgspec.json.encode({"kept_in": "file", "usage": rows}), piped)
    assert (
        piped.getvalue().split()[:10] == [column.title for column in COLUMNS]
        and "a-model-with-a-name-of-its-own" in piped.getvalue()
    )
