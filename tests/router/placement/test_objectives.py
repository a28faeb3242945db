from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.classes import ACTIVE_S, CALM_S, NAMES, OWN_TIMES, STEP_S, Objectives, ServiceClass

WANTED_S = (1.0, 5.0, 60.0)
FIRST, SECOND, LAST = (ServiceClass(name, level, WANTED_S[level]) for level, name in enumerate(NAMES))
MODEL = "m"


class Asked:
    """Asks as prompts of several classes do; the clock is its own."""

    def __init__(self) -> None:
        self.objectives = Objectives()
        self.now_s = 0.0

    def refused_for_s(
        self, service: ServiceClass, wait_s: float, own_s: float = 0.1, lead_s: float = 0.0
    ) -> float | None:
        self.objectives.yields(MODEL, service, self.now_s)
        return self.objectives.outlook(MODEL, service, wait_s, own_s, self.now_s, lead_s).refused_for_s

    def late_for(self, service: ServiceClass, seconds: float, every_s: float = 0.5) -> Iterator[float | None]:
        """Prompts that would be late, one after the other."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            yield self.refused_for_s(service, 10 * service.first_token_s)
            self.now_s += every_s


def test_nobody_is_refused_while_all_are_in_time() -> None:
    asked = Asked()
    for service in (FIRST, SECOND, LAST) * 20:
        assert asked.refused_for_s(service, service.first_token_s / 2) is None
        asked.now_s += 1


def test_who_has_no_class_below_is_refused_when_late_by_as_much_as_it_would_be() -> None:
    asked = Asked()
    assert asked.refused_for_s(LAST, 100.0, 1.0) == pytest.approx(101.0 - LAST.first_token_s)
    assert asked.refused_for_s(LAST, 10.0) is None


def test_a_long_prompt_may_take_its_own_time() -> None:
    asked = Asked()
    assert asked.refused_for_s(LAST, 0.0, 300.0) is None
    assert asked.refused_for_s(LAST, 299.0, 300.0) is None
    assert asked.refused_for_s(LAST, OWN_TIMES * 300.0, 300.0) is not None


def test_the_lowest_class_is_refused_first_and_the_late_one_last() -> None:
    asked = Asked()
    assert asked.refused_for_s(LAST, 0.0) is None
    assert asked.refused_for_s(SECOND, 0.0) is None
    seen: list[list[bool]] = []
    for own in asked.late_for(FIRST, 4 * STEP_S):
        refused = [own is not None, *(asked.refused_for_s(one, 0.0) is not None for one in (SECOND, LAST))]
        if refused not in seen:
            seen.append(refused)
    assert seen == [
        [False, False, False],
        [False, False, True],
        [False, True, True],
        [True, True, True],
    ]


def test_one_late_prompt_refuses_nobody() -> None:
    asked = Asked()
    asked.refused_for_s(LAST, 0.0)
    assert asked.refused_for_s(FIRST, 10.0) is None
    asked.now_s += CALM_S + 1
    assert asked.refused_for_s(FIRST, 10.0) is None
    asked.refused_for_s(LAST, 0.0)
    assert asked.refused_for_s(LAST, 0.0) is None


def test_classes_come_back_one_by_one() -> None:
    asked = Asked()
    for service in (SECOND, LAST):
        asked.refused_for_s(service, 0.0)
    assert list(asked.late_for(FIRST, 4 * STEP_S))[-1] is not None
    assert asked.refused_for_s(SECOND, 0.0) is not None
    asked.now_s += CALM_S
    assert asked.refused_for_s(SECOND, 0.0) is None
    assert asked.refused_for_s(LAST, 0.0) is not None
    asked.now_s += CALM_S
    assert asked.refused_for_s(LAST, 0.0) is None


def test_who_is_refused_for_others_comes_again_when_the_queue_is_done() -> None:
    asked = Asked()
    asked.refused_for_s(LAST, 0.0)
    list(asked.late_for(FIRST, 2 * STEP_S))
    assert asked.refused_for_s(LAST, 40.0) == pytest.approx(40.0)
    assert asked.refused_for_s(LAST, 0.0) == CALM_S


def test_who_is_late_for_a_while_is_refused_unless_a_lower_class_is_there() -> None:
    asked = Asked()
    refused = [one is not None for one in asked.late_for(FIRST, 2 * STEP_S)]
    assert refused == [number >= 4 for number in range(8)], "2 s, as nobody lower has asked"
    asked = Asked()
    asked.refused_for_s(SECOND, 0.0)
    refused = [one is not None for one in asked.late_for(FIRST, 4 * STEP_S)]
    assert refused == [number >= 8 for number in range(16)], "after 2 s the second class is, 2 s later it is itself"


def test_a_tenant_late_by_its_own_lead_is_refused_itself_and_nobody_for_it() -> None:
    asked = Asked()
    asked.refused_for_s(LAST, 0.0)
    for _ in range(20):
        refused_s = asked.refused_for_s(FIRST, 10.0, lead_s=FIRST.first_token_s + 1)
        assert refused_s == pytest.approx(10.1 - FIRST.first_token_s)
        assert asked.refused_for_s(LAST, 0.0) is None
        asked.now_s += STEP_S / 4
    assert asked.refused_for_s(FIRST, 0.0, lead_s=FIRST.first_token_s + 1) is None, "it is in time"
    assert asked.refused_for_s(FIRST, 10.0, lead_s=FIRST.first_token_s) is None, "a lead that is caught up in time"


def test_a_class_leaves_room_while_a_higher_one_is_there() -> None:
    objectives = Objectives()
    assert not objectives.yields(MODEL, LAST, 0.0)
    assert not objectives.yields(MODEL, FIRST, 1.0)
    assert objectives.yields(MODEL, LAST, 2.0)
    assert not objectives.yields(MODEL, FIRST, 2.0)
    assert not objectives.yields("another model", LAST, 2.0)
    assert not objectives.yields(MODEL, LAST, 1.0 + ACTIVE_S + 1.5)


def test_what_waits_longer_than_foreseen_is_expected_later() -> None:
    asked = Asked()
    assert asked.refused_for_s(LAST, 30.0) is None
    for _ in range(100):
        asked.objectives.came(MODEL, LAST, 30.0, 90.0)
    assert asked.refused_for_s(LAST, 30.0) == pytest.approx(30.1, abs=0.2)
    assert asked.refused_for_s(LAST, 10.0) is None
    for _ in range(100):
        asked.objectives.came(MODEL, LAST, 0.1, 90.0)  # a short wait says nothing
        asked.objectives.came(MODEL, LAST, 30.0, 1.0)
    assert asked.refused_for_s(LAST, 30.0) is None


@given(
    st.lists(
        st.tuples(st.sampled_from([FIRST, SECOND, LAST]), st.floats(0, 200), st.floats(0.001, 60), st.floats(0, 9)),
        max_size=60,
    )
)
def test_a_higher_class_is_never_refused_for_a_lower_one(asks: list[tuple[ServiceClass, float, float, float]]) -> None:
    """A prompt that is refused without being late is below a class that is or was late."""
    asked = Asked()
    late_s: dict[int, float] = {}
    for service, wait_s, own_s, pause_s in asks:
        is_late = wait_s + own_s > max(service.first_token_s, OWN_TIMES * own_s)
        if is_late:
            late_s[service.level] = asked.now_s
        refused_for_s = asked.refused_for_s(service, wait_s, own_s)
        if refused_for_s is not None:
            assert refused_for_s > 0
            above = [at_s for level, at_s in late_s.items() if level < service.level]
            assert is_late or any(at_s > asked.now_s - len(NAMES) * CALM_S for at_s in above)
        asked.now_s += pause_s
