import pytest

from router.placement.ages import FADES_EVERY, MAX_KNOWN_PAGES, Reuse


def test_nothing_is_expected_of_what_never_came_again() -> None:
    reuse = Reuse()
    for second in range(1000):
        reuse.used([second], float(second))
    assert reuse.chance(0.0) == reuse.chance(60.0) == 0.0


def test_what_always_comes_again_is_expected_until_its_time_is_over() -> None:
    reuse = Reuse()
    for second in range(0, 10_000, 10):
        reuse.used(range(5), float(second))
    reuse.check()
    assert reuse.chance(1.0) > 0.99
    assert reuse.chance(30.0) == 0.0


def test_the_chance_is_that_of_what_has_not_come_by_then() -> None:
    """Half of the pages come again after 1 s, a quarter after 100 s, and a quarter never."""
    reuse = Reuse()
    for page in range(4000):
        at_s = page * 1000.0
        reuse.used([page], at_s)
        if page % 4 < 2:
            reuse.used([page], at_s + 1)
        elif page % 4 == 2:
            reuse.used([page], at_s + 100)
    reuse.check()
    # 7,000 uses, of which 3,000 were followed by another: 2,000 after a second, the others after 100.
    assert reuse.chance(0.1) == pytest.approx(3 / 7, abs=0.01)
    assert reuse.chance(10.0) == pytest.approx(1 / 5, abs=0.01)
    assert reuse.chance(1000.0) == 0.0


def test_habits_that_change_are_learned_again() -> None:
    reuse = Reuse()
    for second in range(FADES_EVERY // 10):
        reuse.used(range(10), float(second))
    always = reuse.chance(0.1)
    for second in range(FADES_EVERY):
        reuse.used([100 + second], float(second))
    assert always > 0.99 and reuse.chance(0.1) < 0.7


def test_pages_of_long_ago_are_forgotten() -> None:
    reuse = Reuse()
    reuse.used(range(2 * MAX_KNOWN_PAGES), 0.0)
    reuse.check()
    assert len(reuse) == MAX_KNOWN_PAGES


def test_a_new_page_takes_the_place_of_the_one_used_longer_ago() -> None:
    reuse = Reuse()
    # For one place, or the other of its pair.
    first, second, third = (7 + number * MAX_KNOWN_PAGES for number in range(3))
    reuse.used([first], 0.0)
    reuse.used([second], 1.0)
    reuse.used([first], 2.0)
    reuse.used([third], 3.0)
    assert len(reuse) == 2
    known = reuse.chance(0.0)
    reuse.used([second], 4.0)  # forgotten: a use like that of a page never seen
    reuse.used([third], 5.0)
    assert reuse.chance(0.0) > known
    reuse.check()


def test_a_clock_that_stands_still_is_no_error() -> None:
    reuse = Reuse()
    reuse.used([1, 1, 1], 5.0)
    reuse.check()
    assert reuse.chance(0.0) == 0.0  # they came again within the shortest time that is told apart
