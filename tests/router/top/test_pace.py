"""How often a router is asked."""

from router.top.pace import Pace


def test_what_is_answered_quickly_is_asked_at_every_interval() -> None:
    pace = Pace(1.0)
    assert pace.is_due(0.0)
    pace.asked(0.0, took_s=0.004)
    assert not pace.is_due(0.5)
    assert pace.is_due(0.95)  # a timer may be a little early


def test_what_costs_the_router_a_second_is_soon_asked_every_hundred() -> None:
    pace = Pace(1.0)
    for began_s, pause_s in ((0.0, 11.0), (11.0, 11.0), (22.0, 110.0), (132.0, 110.0)):
        pace.asked(began_s, took_s=1.1)
        assert not pace.is_due(began_s + pause_s - 1.0)
        assert pace.is_due(began_s + pause_s)


def test_one_answer_that_took_long_changes_little() -> None:
    pace = Pace(1.0)
    for began_s in range(9):
        pace.asked(float(began_s), took_s=2.0 if began_s == 8 else 0.004)
    assert pace.is_due(9.0)


def test_it_is_never_given_up() -> None:
    pace = Pace(1.0)
    for _ in range(5):
        pace.asked(0.0, took_s=10.0)
    assert pace.is_due(300.0)


def test_a_long_way_is_no_work_of_the_router() -> None:
    pace = Pace(1.0)
    pace.asked(0.0, took_s=0.3, way_s=0.3)
    assert pace.is_due(1.0)


def test_it_can_be_asked_at_once() -> None:
    pace = Pace(60.0)
    pace.asked(0.0, took_s=0.0)
    pace.hurry()
    assert pace.is_due(0.1)
