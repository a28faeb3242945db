from hypothesis import given
from hypothesis import strategies as st

from replica.disk.record import Record, Recovered, findable

# So few identities and contents that records meet: missing parents, copies, and two contents of one identity.
links = st.tuples(st.integers(1, 7), st.integers(0, 6)).filter(lambda link: link[1] < link[0])
records = st.builds(
    lambda link, token, exact: Record(0, link[0], link[1], bytes([token]), exact),
    links,
    st.integers(0, 1),
    st.sampled_from([None, None, b"", b"x"]),
)


def content(record: Record) -> tuple[int, bytes, bytes | None]:
    return record.parent, record.tokens, record.exact


@given(held=st.lists(records, max_size=9))
def test_what_can_be_found_is_kept_once_and_after_its_parent(held: list[Record]) -> None:
    found = [Recovered(slot, record) for slot, record in enumerate(held)]
    kept = list(findable(found))
    known: set[int] = {0}
    contents = set()
    for slot, record in kept:
        assert held[slot] == record
        assert record.parent in known
        assert record.identity not in known and content(record) not in contents
        known.add(record.identity)
        contents.add(content(record))
    for each in set(found) - set(kept):
        is_orphan = each.record.parent not in known
        assert is_orphan or each.record.identity in known or content(each.record) in contents


def test_a_chain_is_cut_where_a_record_is_missing() -> None:
    chain = [Recovered(slot, Record(0, identity, identity - 1, b"x")) for slot, identity in enumerate((4, 1, 2, 5))]
    assert [record.identity for _, record in findable(chain)] == [1, 2]
