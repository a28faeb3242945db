"""Samples of a router's metrics, as the doctor reads them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.prometheus import labels, line
from router.console.samples import BadMetrics, Samples

TEXT = """\
# TYPE warmroute_router:requests counter
warmroute_router:requests_total{worker="0",replica="a",status="200"} 3.0
warmroute_router:requests_total{worker="1",replica="a",status="200"} 4.0
warmroute_router:requests_total{worker="1",replica="a",status="429"} 1.0
# TYPE warmroute_router:replica_in_flight gauge
warmroute_router:replica_in_flight{worker="0",replica="a"} 1.0
warmroute_router:replica_in_flight{worker="1",replica="a"} 2.0
# TYPE warmroute_router:index_blocks gauge
warmroute_router:index_blocks{worker="0",replica="a",medium="GPU"} 90.0
warmroute_router:index_blocks{worker="1",replica="a",medium="GPU"} 100.0
# TYPE warmroute_router:event_gaps counter
warmroute_router:event_gaps_total{worker="0",replica="a"} 1.0
warmroute_router:event_gaps_total{worker="1",replica="a"} 1.0
# TYPE warmroute_router:open_requests gauge
warmroute_router:open_requests{worker="0"} 5.0
warmroute_router:open_requests{worker="1"} 6.0
"""


def test_workers_count_together_and_know_the_same() -> None:
    samples = Samples(TEXT).of_all_workers()
    assert samples.total("warmroute_router:requests_total", replica="a", status="200") == 7
    assert samples.total("warmroute_router:requests_total") == 8
    assert samples.total("warmroute_router:replica_in_flight", replica="a") == 3
    assert samples.total("warmroute_router:index_blocks", replica="a", medium="GPU") == 100
    assert samples.total("warmroute_router:event_gaps_total") == 1
    assert samples.total("warmroute_router:open_requests") == 11


def test_a_router_of_one_process_stays_as_it_is() -> None:
    alone = Samples(TEXT.replace('worker="1"', 'other="1"').replace('worker="0",', "").replace('worker="0"', ""))
    for name in ("requests_total", "index_blocks", "event_gaps_total"):
        full = f"warmroute_router:{name}"
        assert alone.of_all_workers().total(full, other="1") == alone.total(full, other="1")


TOLD = st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), st.text(max_size=20), max_size=3)


@given(st.dictionaries(st.from_regex(r"[a-z:_][a-z0-9:_]{0,12}", fullmatch=True), TOLD, max_size=4), st.floats(0, 1e18))
def test_what_is_written_is_read(told: dict[str, dict[str, str]], value: float) -> None:
    text = "".join(line(name, labels(**said), value) for name, said in told.items())
    samples = Samples(text)
    for name, said in told.items():
        assert samples.total(name) == value
        assert all(samples.by(name, label) == {named: value} for label, named in said.items())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('a { x = "1" , } 3 1700000000', 3.0),
        ('a{x="1"} 3 # {trace="}"} 0.5', 3.0),
        ("a 1e+06", 1e6),
        ("a\t7", 7.0),
        ("a +Inf", float("inf")),
        ("a NaN", None),
    ],
)
def test_lines_of_other_writers_are_read(text: str, value: float | None) -> None:
    assert Samples(text).total("a") == value


def test_a_hostile_line_is_refused_in_time() -> None:
    for text in ('a{x="' + "\\" * 200_000, "a{" + 'x="",' * 100_000, "a" * 500_000, "a{" + "{" * 300_000):
        with pytest.raises(BadMetrics):
            Samples(text)
