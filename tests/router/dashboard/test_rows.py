"""Rows of a page, and their order."""

from typing import Any

import pytest
from msgspec.structs import replace

from api.errors import ApiError
from router.dashboard.rows import Fleet, Query, Totals, query_of, select_rows
from router.responses import FeedState, Index, Load, Recent, ReplicaStatus

QUIET = ReplicaStatus("r0", models=["m"], engine="warmroute", standing="exact", events=FeedState(), recent=Recent())
ZEROS: Any = dict.fromkeys(Totals.__struct_fields__, 0)
TOTALS = Totals(**ZEROS)


def fleet(*replicas: ReplicaStatus) -> Fleet:
    return Fleet(0.0, 0.0, TOTALS, {}, list(replicas))


def names(rows: list[ReplicaStatus]) -> list[str]:
    return [row.name for row in rows]


WELL = replace(
    QUIET,
    name="well",
    load=Load(queued_tokens=900),
    recent=Recent(requests_per_s=3.0, hit_predicted=0.5),
    index=Index({"GPU": 7}),
)
DOWN = replace(QUIET, name="down", standing="down", severity=2)
LATE = replace(
    QUIET,
    name="late",
    engine="vllm",
    models=["Other"],
    standing="partial",
    severity=1,
    events=FeedState(lag_batches=5),
    index=Index(accuracy=0.9),
)
FLEET = fleet(WELL, DOWN, LATE)


def test_the_worst_come_first_unless_another_order_is_asked_for() -> None:
    assert names(select_rows(FLEET, query_of({}))[1]) == ["down", "late", "well"]
    assert names(select_rows(FLEET, query_of({"order": "asc"}))[1]) == ["well", "late", "down"]


@pytest.mark.parametrize(
    ("sort", "first"),
    [
        ("name", "down"),
        ("queued", "well"),
        ("requests", "well"),
        ("hits", "well"),
        ("blocks", "well"),
        ("accuracy", "late"),
        ("lag", "late"),
        ("in_flight", "down"),  # all alike: by name
        ("ttft", "down"),
    ],
)
def test_each_column_has_an_order_of_its_own(sort: str, first: str) -> None:
    assert names(select_rows(FLEET, query_of({"sort": sort}))[1])[0] == first


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("WELL", ["well"]), ("other", ["late"]), ("vllm", ["late"]), ("down", ["down"]), ("partial", ["late"]),
     ("exact", ["well"]), ("draining", []), ("  ", ["down", "late", "well"]), ("nobody", [])],
)  # fmt: skip
def test_a_filter_names_a_state_or_a_part_of_a_name(wanted: str, found: list[str]) -> None:
    shown, rows = select_rows(FLEET, query_of({"filter": wanted, "sort": "name"}))
    assert (names(rows), shown["matching"]) == (found, len(found))


def test_never_more_than_a_hundred_are_shown() -> None:
    many = fleet(*[replace(QUIET, name=f"r{number:04d}") for number in range(1000)])
    shown, rows = select_rows(many, query_of({"sort": "name"}))
    assert names(rows) == [f"r{number:04d}" for number in range(100)] and shown["matching"] == 1000


@pytest.mark.parametrize(
    "asked",
    [{"sort": "size"}, {"order": "up"}, {"filter": "x" * 101}],
)
def test_what_cannot_be_asked_is_named(asked: dict[str, str]) -> None:
    with pytest.raises(ApiError) as refused:
        query_of(asked)
    [param] = asked
    assert (refused.value.status, refused.value.param) == (400, param)


def test_empty_values_are_the_usual_ones() -> None:
    assert query_of({"sort": "", "order": "", "filter": ""}) == Query()
