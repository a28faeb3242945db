"""Predicted against reported blocks."""

from router.members.predictions import FEWEST, WINDOW, Accuracy


def test_differences_are_counted_with_their_size() -> None:
    accuracy = Accuracy()
    assert accuracy.compare(5, 5)
    assert not accuracy.compare(5, 2)
    assert not accuracy.compare(0, 4)
    assert (accuracy.compared, accuracy.different, accuracy.error_blocks) == (3, 2, 7)
    assert accuracy.recent == 1 - 2 / 3


def test_a_few_differences_cause_no_resync() -> None:
    accuracy = Accuracy(0.999)
    for _ in range(FEWEST - 1):
        accuracy.compare(1, 2)
    assert not accuracy.differs_too_often
    accuracy.compare(1, 2)
    assert accuracy.differs_too_often


def test_as_many_as_the_objective_allows_are_none_either() -> None:
    accuracy = Accuracy(0.99)
    for number in range(WINDOW):
        accuracy.compare(1, 2 if number % 100 == 0 else 1)
    assert accuracy.recent == 0.99 and not accuracy.differs_too_often
    accuracy.compare(1, 1)  # the oldest, a difference, is forgotten
    accuracy.compare(1, 2)
    accuracy.compare(1, 2)
    assert accuracy.differs_too_often


def test_only_the_last_answers_count() -> None:
    accuracy = Accuracy()
    for _ in range(10):
        accuracy.compare(1, 2)
    for _ in range(WINDOW):
        accuracy.compare(1, 1)
    assert accuracy.recent == 1.0 and accuracy.different == 10


def test_figures_before_a_resync_do_not_count() -> None:
    accuracy = Accuracy()
    for _ in range(10):
        accuracy.compare(1, 2)
    accuracy.forget()
    assert accuracy.recent == 1.0 and not accuracy.differs_too_often
    assert accuracy.different == 10  # the counters go on
    accuracy.compare(1, 2)
    assert accuracy.recent == 0.0
