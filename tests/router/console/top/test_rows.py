"""Rows and details of replicas and decisions."""

from typing import Any

import pytest
from msgspec.structs import replace

from router.console.asking import Client
from router.console.formatting import natural
from router.console.table import Line, Table
from router.console.top.poller import DECISIONS, Poller, Seen
from router.console.top.screen import Screen, heading
from router.console.top.tables import (
    BAD,
    FIGURES,
    STREAMS,
    cached_tokens,
    decision_table,
    details_of,
    replica_table,
    session_table,
)
from router.placement.decision import Portion
from router.responses import DecisionRecord, FeedState, Index, Load, Recent, ReplicaStatus, SessionRow
from tests.router.console.top.samples import a_decision, a_replica

RECENT = Recent(12.5, 0.0, 18000.0, 240.0, 0.04, 1 - 1700 / 18000, batches_per_s=26.0)


def cells(table: Table[Any], item: Any, width: int = 200) -> dict[str, str]:
    """By the titles of their columns."""
    table.show([item])
    titles, line = table.lines(width, 2)
    return {title.strip(" ▼"): text.strip() for (title, _), (text, _) in zip(titles, line, strict=True)}


def styles(table: Table[Any], item: Any) -> dict[str, str]:
    return {column.title: column.style(item) for column in table.columns}


def seen(*replicas: ReplicaStatus, **what: Any) -> Seen:
    return Seen("http://router:8000", replicas, **what)


def plain(lines: list[Line]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


# ---- replicas and their events


def test_a_replica_is_a_row() -> None:
    replica = a_replica(load=Load(900, 4, 2, 3, 8000.0), cache_used=0.25, recent=RECENT)
    assert cells(replica_table(FIGURES), replica) == {
        "replica": "r0",
        "state": "exact",
        "cache": "█     25%",
        "tokens": "4.0k",
        "hits": "91%",
        "queued": "900",
        "run": "4",
        "wait": "2",
        "req/s": "12",
        "tokens/s": "240",
        "each": "40 ms",
        "prefill/s": "1.7k",
        "can/s": "8.0k",
        "heard": "0.1s",
    }


def test_unknown_figures_are_dashes_with_the_reason() -> None:
    replica = ReplicaStatus("r0", available=False, why="not reached yet", standing="down")
    found = cells(replica_table(FIGURES), replica)
    assert {title for title, text in found.items() if text == "-"} == {
        *("cache", "hits", "req/s", "tokens/s", "each", "prefill/s", "can/s", "heard")
    }
    assert (found["state"], found["why"]) == ("down", "not reached yet")


def test_a_late_heartbeat_is_marked() -> None:
    assert styles(replica_table(FIGURES), a_replica(heard_age_s=0.3))["heard"] == ""
    assert styles(replica_table(FIGURES), a_replica(heard_age_s=1.3))["heard"] == BAD


def test_events_are_counted() -> None:
    events = FeedState(seq=1500, lag_batches=2, gaps=1, repairs=3, digest_mismatches=1, last_event_age_s=0.4)
    replica = a_replica(events=events, recent=RECENT)
    found = cells(replica_table(STREAMS), replica)
    assert found == {
        "replica": "r0",
        "state": "exact",
        "batch": "1,500",
        "batch/s": "26",
        "last": "0.4s",
        "lag": "2",
        "gaps": "1",
        "lost": "0",
        "repairs": "3",
        "restarts": "0",
        "digests": "1",
        "reconnects": "0",
        "accuracy": "100.0%",
    }
    marked = styles(replica_table(STREAMS), replica)
    assert (marked["gaps"], marked["lost"]) == ("", "dim")
    without = cells(replica_table(STREAMS), a_replica(events=None, recent=RECENT))
    assert (without["batch/s"], without["gaps"]) == ("-", "-")


def test_replicas_are_in_the_order_that_people_count_in() -> None:
    assert sorted(["r10", "r9", "a"], key=natural) == ["a", "r9", "r10"]
    assert sorted(["10", "a1", "9b", ""], key=natural) == ["", "9b", "10", "a1"]
    assert natural("9" * 5000) > natural("9")  # more digits than a number is read from


# ---- decisions


def test_a_decision_is_a_row() -> None:
    found = cells(decision_table(), a_decision())
    assert found.pop("decided").count(":") == 2
    assert found == {
        "chosen": "r0",
        "tokens": "1,200",
        "predicted": "1,024",
        "reported": "1,030",
        "estimate": "10 ms",
        "TTFT": "50 ms",
        "why": "most cached, +1,024",
    }
    nobody = cells(decision_table(), a_decision(chosen=None, status=429, why="full", exact=False, ttft_s=None))
    assert (nobody["chosen"], nobody["tokens"], nobody["TTFT"]) == ("nobody", "~1,200", "-")


@pytest.mark.parametrize("ts", [1e300, -1e300, 1e17])
def test_a_time_that_no_calendar_has_is_a_dash(ts: float) -> None:
    assert cells(decision_table(), a_decision(ts=ts))["decided"] == "-"


@pytest.mark.parametrize(("reported", "style"), [(1023, BAD), (1024, ""), (1030, ""), (None, "")])
def test_only_less_than_was_predicted_is_marked(reported: int | None, style: str) -> None:
    assert styles(decision_table(), a_decision(reported_cached_tokens=reported))["reported"] == style


def test_models_are_named_where_there_are_several() -> None:
    table = decision_table()
    rows = [a_decision(model=model) for model in ("a", "b")]
    table.show(rows)
    assert "model" in plain(table.lines(120, 1))[0]
    table.show(rows[:1])
    assert "model" not in plain(table.lines(120, 1))[0]


def test_a_reason_cannot_take_hold_of_the_terminal() -> None:
    decision = a_decision(status=400, why="\x1b[2J\x07 gone \u202e")
    assert cells(decision_table(), decision)["why"] == "\\x1b[2J\\x07 gone \\u202e, status 400"
    assert all(letter.isprintable() or letter == "\n" for letter in lines_of(decision))


# ---- sessions


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (SessionRow("a/s1", 70_000, waits_s=30.0), "waits 30s"),
        (SessionRow("a/s1", 70_000, waits_s=30.0, is_here=False), "waits 30s, away"),
        (SessionRow("a/s1", 70_000, turns=2, running=1, gap_s=4.0, replica="r1"), "computes"),
        (SessionRow("a/s1", 70_000, turns=2, idle_s=12.0, gap_s=4.0, replica="r1"), "silent 12s"),
    ],
)
def test_a_session_is_a_row(row: SessionRow, state: str) -> None:
    gap = "-" if row.gap_s is None else "4.0 s"
    whole = {"session": "a/s1", "context": "70,000", "turns": str(row.turns), "gap": gap, "state": state}
    assert cells(session_table(), row) == whole | {"replica": row.replica or "-"}
    assert plain(details_of(row))[0] == f"a/s1: {state}"


# ---- above the tables


def test_the_heading_counts_states_the_worst_last() -> None:
    known = seen(a_replica(), a_replica("r1"), a_replica("r2", standing="down"))
    first, second, third = plain(heading(known, 0.0))
    assert first == "http://router:8000  3 replicas: 2 exact, 1 down"
    assert second.startswith("req/s -  tokens/s -  each -  prompt/s -  hits -")
    assert third == "events -/s  lag 0  gaps 0  lost 0  repairs 0  restarts 0  digests differed 0"


def test_the_heading_adds_up_rates_and_weighs_means() -> None:
    one, other = Recent(1.0, prompt_tokens_per_s=900, hit_predicted=0.9), Recent(2.0, prompt_tokens_per_s=100)
    known = seen(a_replica(recent=one), a_replica("r1", recent=replace(other, hit_predicted=0.1)))
    assert plain(heading(known, 0.0))[1].startswith("req/s 3.0  tokens/s 0  each -  prompt/s 1.0k  hits 82%")


def test_the_heading_adds_up_the_replicas_and_takes_the_time_to_first_token_from_the_decisions() -> None:
    replicas = a_replica(load=Load(in_flight=2, waiting=3)), a_replica("r1", load=Load(in_flight=1))
    decisions = [a_decision(ttft_s=ttft_s) for ttft_s in (0.1, None, 0.3)]
    assert plain(heading(seen(*replicas, decisions=decisions), 0.0))[1].endswith("  TTFT 200 ms  open 3  waiting 3")


def test_the_heading_reports_a_silent_router_first() -> None:
    known = seen(a_replica(), silence="connection refused")
    assert plain(heading(known, 0.0))[0].startswith(" NO ANSWER: connection refused   http://router:8000")
    assert plain(heading(known._replace(at_s=3.0), 10.0))[0].startswith(" NO ANSWER, figures 7.0s old: connection")
    assert plain(heading(seen(), 0.0))[0] == "http://router:8000  0 replicas"


def test_streams_are_missed_only_where_replicas_are() -> None:
    assert plain(heading(seen(a_replica(events=None)), 0.0))[2] == "no event streams"
    assert plain(heading(seen(), 0.0))[2] == ""


def test_an_empty_table_says_why() -> None:
    with Client("http://router:8000") as client:
        screen = Screen(Poller(client, 1.0))
        screen.show(seen(refused={DECISIONS: "the admin key is needed"}))
        assert screen.empty("decisions") == "the admin key is needed"
        assert "has no replicas" in screen.empty("replicas")


# ---- one of them


def lines_of(row: ReplicaStatus | DecisionRecord) -> str:
    return "\n".join(plain(details_of(row)))


def test_everything_of_a_replica_can_be_seen() -> None:
    drawn = lines_of(a_replica(inexact="2 batches are lost", standing="partial", recent=RECENT))
    said = [line.split() for line in drawn.splitlines()]
    assert drawn.startswith("r0  partial: 2 batches are lost\n")
    for field in (["url", "http://r0:8000"], ["connected", "yes"], ["requests_per_s", "12.5"]):
        assert field in said
    bare = lines_of(ReplicaStatus("x"))
    assert "events" not in bare and "recent" not in bare


def test_candidates_of_a_decision_are_listed_the_cheapest_first() -> None:
    found = a_decision(candidates=[*a_decision().candidates[::-1], *[type(a_decision().candidates[0])("r9")]])
    drawn = lines_of(found).splitlines()
    assert [line.split() for line in drawn[-3:]] == [
        [">", "r0", "1,024", "cached,", "50", "ms"],
        ["r1", "0", "cached,", "250", "ms"],
        ["r9", "0", "cached,", "ineligible"],
    ]
    portions = [Portion("GPU", 512), Portion("CPU", 256, 0.003), Portion("PULL", 256, 0.011, ("r1",))]
    shown = lines_of(a_decision(portions=[*portions, Portion("COMPUTE", 176, 0.022)]))
    for told in (
        "512 in its KV cache",
        "256 from host memory in 3 ms",
        "256 from r1 in 11 ms",
        "176 computed in 22 ms",
    ):
        assert told in shown


def test_tokens_are_those_that_prompts_can_use() -> None:
    blocks = {"GPU": 300, "CPU": 100}
    assert cached_tokens(a_replica(index=Index(blocks, 1.0, {"GPU": 100, "CPU": 40}), block_size=16)) == 140 * 16
    assert cached_tokens(a_replica(index=Index(blocks, 1.0, {}), block_size=16)) == 0
