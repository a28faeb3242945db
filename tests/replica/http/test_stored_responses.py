from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from api.openai_responses.requests import Item
from replica.http.conversation_forms import StoredResponses

STEPS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 90), st.booleans()), max_size=30)


@given(steps=STEPS)
def test_the_newest_responses_are_kept_within_both_limits(steps: list[tuple[int, int, bool]]) -> None:
    stored, model = StoredResponses(most=3, most_bytes=200), OrderedDict[str, int]()
    for number, size, removes in steps:
        name = f"resp_{number}"
        if removes:
            if model.pop(name, None) is not None:
                stored.remove(name)
            continue
        stored.add(name, b"x" * size, [])
        model.pop(name, None)
        model[name] = size + len(b'{"items":[]}')
        while len(model) > 3 or sum(model.values()) > 200:
            model.popitem(last=False)
        stored.check()
    for number in range(7):
        name = f"resp_{number}"
        if name in model:
            assert len(stored.get(name).body) + len(stored.get(name).conversation) == model[name]
        else:
            with pytest.raises(ApiError, match=name):
                stored.get(name)


def test_a_response_above_the_limit_is_not_kept_and_drops_no_other() -> None:
    stored = StoredResponses(most_bytes=200)
    stored.add("resp_1", b"{}", [Item(role="user", content="hi")])
    stored.add("resp_2", b"x" * 300, [])
    stored.check()
    assert len(stored) == 1 and stored.get("resp_1").body == b"{}"
