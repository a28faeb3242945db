"""Rows and details of replicas, prefixes and decisions."""

from typing import Any

import pytest

from router.console.top import details
from router.console.top.heading import empty_text, heading
from router.console.top.history import Rates
from router.console.top.poller import DECISIONS, PREFIXES, REPLICAS, Poller, RouterClient
from router.console.top.table import Table
from router.console.top.tables import (
    BAD,
    Branch,
    Row,
    branches_of,
    cached_tokens,
    decision_table,
    event_table,
    natural,
    prefix_table,
    replica_table,
    rows_of,
    saved_tokens,
)
from router.placement.verdict import Portion
from router.prompts.prefixes.tree import Prefix, Shared
from router.responses import FeedState, Index, Load, ReplicaStatus
from tests.router.console.top.samples import a_decision, a_prefix, a_replica

RATES = Rates(12.5, 18000.0, 1700.0, 26.0, 240.0, 200.0, 8.0)


def cells(table: Table[Any], item: Any, width: int = 200) -> dict[str, str]:
    """By the titles of their columns."""
    table.show([item])
    texts = [text for text, _ in table.line(item, width)][::2]
    return {placed.column.title: text.strip() for placed, text in zip(table.layout(width), texts, strict=True)}


def styles(table: Table[Any], item: Any) -> dict[str, str]:
    return {column.title: column.style(item) for column in table.columns}


def known(*replicas: ReplicaStatus, **what: Any) -> Poller:
    poller = Poller(RouterClient("http://router:8000", None), 1.0)
    poller.replicas = list(replicas)
    for name, value in what.items():
        setattr(poller, name, value)
    return poller


# ---- replicas and their events


def test_a_replica_is_a_row() -> None:
    replica = a_replica(load=Load(900, 4, 2, 3, 8000.0, total_blocks=1000))
    assert cells(replica_table(), Row(replica, RATES, frozenset())) == {
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
    replica = ReplicaStatus("r0", available=False, why="not reached yet", load=Load())
    found = cells(replica_table(), Row(replica, None, frozenset()))
    assert {title for title, text in found.items() if text == "-"} == {
        *("cache", "hits", "queued", "run", "wait", "req/s", "tokens/s", "each", "prefill/s", "can/s", "heard")
    }
    assert (found["state"], found["why"]) == ("down", "not reached yet")


def test_a_late_heartbeat_is_marked() -> None:
    assert styles(replica_table(), Row(a_replica(heard_age_s=0.3), None, frozenset()))["heard"] == ""
    assert styles(replica_table(), Row(a_replica(heard_age_s=1.3), None, frozenset()))["heard"] == BAD


def test_events_are_counted_and_what_rose_is_marked() -> None:
    events = FeedState(seq=1500, lag_batches=2, gaps=1, repairs=3, digest_mismatches=1, last_event_age_s=0.4)
    row = Row(a_replica(events=events), RATES, frozenset({"gaps"}))
    found = cells(event_table(), row)
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
    marked = styles(event_table(), row)
    assert (marked["gaps"], marked["digests"], marked["lost"]) == (BAD, "", "dim")
    without = cells(event_table(), Row(a_replica(events=None), RATES, frozenset()))
    assert (without["batch/s"], without["gaps"]) == ("-", "-")


def test_replicas_are_in_the_order_that_people_count_in() -> None:
    rows = rows_of(known(*(a_replica(name) for name in ("r10", "r9", "a"))))
    assert [row.replica.name for row in rows] == ["a", "r9", "r10"]
    assert sorted(["10", "a1", "9b", ""], key=natural) == ["", "9b", "10", "a1"]
    assert natural("9" * 5000) > natural("9")  # more digits than a number is read from


# ---- prefixes


def test_prefixes_are_indented_below_what_they_come_after() -> None:
    below = a_prefix(begin=1024, tokens=64, prompts=3, held_by=0, replicas=[], exact=False)
    poller = known(shared=Shared(prompts=11, span_s=3.0, texts=True, prefixes=[a_prefix(below=[below]), a_prefix()]))
    first, second, third = branches_of(poller)
    assert (first.key, second.key, third.key) == ("0", "0.0", "1") and second.above == (first.prefix,)
    table = prefix_table()
    assert cells(table, first)["text"] == "system: You are a helpful assistant."
    assert (cells(table, first)["saves"], cells(table, second)["held by"]) == ("10k", "nobody")
    assert saved_tokens(first.prefix) == 10 * 1024
    table.show([second, first])
    assert table.shown == [first, second]  # what a cache saves most by
    assert table.line(second, 80)[0][0].rstrip() == "~+64"
    table.sort_by(None)
    assert table.line(second, 80)[0][0].rstrip() == "  ~+64"


def test_the_cursor_stays_on_its_prefix_while_others_come_before_it() -> None:
    table = prefix_table()
    table.sort_by(None)
    one, other = a_prefix(id="m 01", text="one"), a_prefix(id="m 02", text="other")
    table.show(branches_of(known(shared=Shared(prompts=2, span_s=3.0, texts=True, prefixes=[one]))))
    table.show(branches_of(known(shared=Shared(prompts=4, span_s=3.0, texts=True, prefixes=[other, one]))))
    assert table.current is not None and table.current.prefix == one


def test_models_are_named_where_there_are_several() -> None:
    table = prefix_table()
    branches = [Branch(a_prefix(model=model), (), model) for model in ("a", "b")]
    table.show(branches)
    assert "model" in "".join(text for text, _ in table.head(120))
    table.show(branches[:1])
    assert "model" not in "".join(text for text, _ in table.head(120))


def test_a_prompt_cannot_take_hold_of_the_terminal() -> None:
    branch = Branch(a_prefix(text="\x1b[2J\x07 gone \u202e"), (), "0")
    assert cells(prefix_table(), branch)["text"] == "\\x1b[2J\\x07 gone \\u202e"
    drawn = "\n".join(line.plain for line in details.prefix_lines(branch, 80))
    assert all(letter.isprintable() or letter == "\n" for letter in drawn)


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


# ---- above the tables


def test_the_heading_counts_states_the_worst_last() -> None:
    poller = known(a_replica(), a_replica("r1"), a_replica("r2", available=False, why="gone"))
    first, second, third = [line.plain for line in heading(poller)]
    assert first == "http://router:8000  3 replicas: 2 exact, 1 down"
    assert second.startswith("req/s -  tokens/s -  each -  prompt/s -  hits -")
    assert third == "events -/s  lag 0  gaps 0  lost 0  repairs 0  restarts 0  digests differed 0"


def test_the_heading_adds_up_the_replicas_and_takes_the_time_to_first_token_from_the_decisions() -> None:
    poller = known(a_replica(load=Load(in_flight=2, waiting=3)), a_replica("r1", load=Load(in_flight=1)))
    poller.decisions = [a_decision(ttft_s=0.1), a_decision(ttft_s=None), a_decision(ttft_s=0.3)]
    assert heading(poller)[1].plain.endswith("  TTFT 200 ms  open 3  waiting 3")


def test_the_heading_reports_a_silent_router_first() -> None:
    poller = known(a_replica(), unreachable="connection refused")
    assert heading(poller)[0].plain.startswith(" NO ANSWER: connection refused   http://router:8000")
    assert heading(known())[0].plain == "http://router:8000  0 replicas"


def test_streams_are_missed_only_where_replicas_are() -> None:
    assert heading(known(a_replica(events=None)))[2].plain == "no event streams"
    assert heading(known())[2].plain == ""


def test_an_empty_table_says_why() -> None:
    poller = known(refused={DECISIONS: "the admin key is needed"})
    assert empty_text(poller, DECISIONS) == "the admin key is needed"
    assert "has no replicas" in empty_text(poller, REPLICAS)
    assert "share a prefix" in empty_text(poller, PREFIXES)


# ---- one of them


def lines_of(found: list[Any]) -> str:
    return "\n".join(line.plain for line in found)


def test_everything_of_a_replica_can_be_seen() -> None:
    row = Row(a_replica(inexact="2 batches are lost", state="partial"), RATES, frozenset())
    drawn = lines_of(details.replica_lines(row))
    said = [line.split() for line in drawn.splitlines()]
    assert drawn.startswith("r0  partial: 2 batches are lost\n")
    assert "requests_per_s" in drawn
    for field in (["url", "http://r0:8000"], ["total_blocks", "1,000"], ["connected", "yes"]):
        assert field in said
    bare = lines_of(details.replica_lines(Row(ReplicaStatus("x"), None, frozenset())))
    assert "events" not in bare


def test_a_prefix_is_distinguished_from_the_beginning_of_the_prompt() -> None:
    above = a_prefix(text="system: be short.")
    prefix = a_prefix(begin=1024, tokens=64, text="user: " + "why " * 40, held_by=30, replicas=["r10", "r9"])
    drawn = lines_of(details.prefix_lines(Branch(prefix, (above,), "0.0"), 60))
    assert "Tokens 1,024 to 1,088 of 11 prompts" in drawn and "r10, r9" in drawn
    assert drawn.index("system: be short.") < drawn.index("user: why why")
    assert max(len(line) for line in drawn.splitlines() if "why" in line) <= 60
    hidden: Prefix = a_prefix(text=None)
    assert "--show-prompts" in lines_of(details.prefix_lines(Branch(hidden, (), "0"), 60))


def test_candidates_of_a_decision_are_listed_the_cheapest_first() -> None:
    found = a_decision(candidates=[*a_decision().candidates[::-1], *[type(a_decision().candidates[0])("r9")]])
    drawn = lines_of(details.decision_lines(found)).splitlines()
    assert [line.split() for line in drawn[-3:]] == [
        [">", "r0", "1,024", "cached,", "50", "ms"],
        ["r1", "0", "cached,", "250", "ms"],
        ["r9", "0", "cached,", "ineligible"],
    ]
    portions = [Portion("GPU", 512), Portion("CPU", 256, 0.003), Portion("PULL", 256, 0.011, ("r1",))]
    shown = lines_of(details.decision_lines(a_decision(portions=[*portions, Portion("COMPUTE", 176, 0.022)])))
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
    assert cached_tokens(a_replica(index=Index(blocks), block_size=16)) == 400 * 16, "of an older router"


def test_a_cache_is_never_shown_as_more_than_full() -> None:
    replica = a_replica(index=Index(blocks={"GPU": 1004, "CPU": 900}))
    assert cells(replica_table(), Row(replica, None, frozenset()))["cache"] == "████ 100%"
