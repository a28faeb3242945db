"""Records of requests: how many are kept, and their sums."""

from lab.shadow.placing import AtOnceSums, Records, at_once_sums
from tests.lab.shadow.records import record, seen

HITS = {"a": 16.0, "b": 48.0}


def test_the_oldest_requests_make_room() -> None:
    records = Records(most_requests=3, most_blocks=4)
    for number in range(3):
        records.add(record([1], request_id=str(number)))
    records.add(record([1, 2], request_id="3"))
    assert [one.request_id for one in records] == ["1", "2", "3"]
    records.add(record([1] * 4, request_id="4"))
    assert [one.request_id for one in records] == ["4"]
    assert records.dropped == 4


def test_sums_take_only_what_is_known() -> None:
    known = [seen("a", HITS, "b", tokens=50), seen("b", HITS, "b", tokens=60)]
    assert at_once_sums([*known, record(), seen(None, HITS, "a")]) == AtOnceSums(2, 110, 64.0, 96.0)
